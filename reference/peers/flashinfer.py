"""FlashInfer's SM90 kernels (CuTe DSL): one kernel, split over time, or its own choice of the two.

Full forward only, and in FlashInfer's conventions, into which bind() converts once, outside the
timed region: all sequences packed as [B*T, heads, 128], the gate linear (exp of the log decay), the
state with dv before dk. The final state comes back as a transposed view, not a copy.

The public function is called where the whole package is installed. Where only its kernels
(flashinfer.gdn_kernels.delta_rule_dsl) are, they are called as the public function calls them.
"""

import contextlib
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from . import common

if TYPE_CHECKING:
    from harness.problem import Problem

PACKAGE = "flashinfer"
DISTRIBUTION = "flashinfer-python"
RELEASE = "0.7.2.post1"
# Also in what FlashInfer says of itself when it was not built: 0.0.0+unknown.
UNKNOWN = "unknown"

Split = Literal["auto"] | bool


@dataclass(frozen=True)
class Packed:
    """The inputs in FlashInfer's conventions: N sequences of up to T tokens one after the other.

    q, k [tokens, Hq, 128], v [tokens, Hv, 128] bf16; alpha (linear gate), beta [tokens, Hv] fp32;
    initial_state [N, Hv, 128 (dv), 128 (dk)] fp32 or None; cu_seqlens [N + 1] int64.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    alpha: Tensor
    beta: Tensor
    initial_state: Tensor | None
    cu_seqlens: Tensor
    T: int

    @property
    def sequences(self) -> int:
        return self.cu_seqlens.numel() - 1


@dataclass(frozen=True)
class FlashInfer:
    """split: True and False force the choice of kernel, "auto" leaves it to FlashInfer."""

    name: str = "flashinfer"
    split: Split = "auto"
    scopes: tuple[str, ...] = (common.FULL,)
    backend: str = "cute_dsl"

    @property
    def version(self) -> str:
        return find_version()

    def unavailable(self) -> str | None:
        return common.unavailable(PACKAGE, f"{DISTRIBUTION}=={RELEASE}", _entry)

    def bind(self, problem: "Problem", scope: str) -> common.Call:
        common.check_scope(self.name, scope, self.scopes)
        B, T, Hv, _ = problem.inputs.v.shape
        packed = pack(problem)
        run = _entry()(packed, self.split)

        def full():
            output, state = run()
            return output.view(B, T, Hv, -1), state.transpose(-1, -2)

        return full


def find_version() -> str:
    """FlashInfer's version, wherever its installation keeps it; "unknown" if nowhere.

    Looked for in the module that is imported, the metadata, the generated _build_meta.py, and a
    file VERSION or version.txt in the package, which stands in where its kernels were copied.
    """
    found = importlib.util.find_spec(PACKAGE)
    if found is None:
        return UNKNOWN
    folders = [Path(folder) for folder in found.submodule_search_locations or ()]
    files = [folder / name for folder in folders for name in ("VERSION", "version.txt")]
    sources = (
        lambda: importlib.import_module(PACKAGE).__version__,
        lambda: common.release(DISTRIBUTION),
        lambda: importlib.import_module(f"{PACKAGE}._build_meta").__version__,
        lambda: next(file for file in files if file.is_file()).read_text(encoding="utf-8"),
    )
    for source in sources:
        # Whatever importing it raises, the next source may know.
        with contextlib.suppress(Exception):
            version = str(source()).strip()
            if version and UNKNOWN not in version:
                return version
    return UNKNOWN


def pack(problem: "Problem") -> Packed:
    """Converts a problem's inputs."""
    inputs = problem.inputs
    B, T = inputs.q.shape[:2]
    state, bounds = inputs.initial_state, problem.cu_seqlens
    if bounds is None:
        bounds = torch.arange(B + 1, dtype=torch.int64, device=inputs.q.device) * T
    else:
        T = max(problem.lengths)
    return Packed(
        q=inputs.q.flatten(0, 1),
        k=inputs.k.flatten(0, 1),
        v=inputs.v.flatten(0, 1),
        alpha=inputs.g.exp().flatten(0, 1),
        beta=inputs.beta.flatten(0, 1),
        initial_state=None if state is None else state.transpose(-1, -2).contiguous(),
        cu_seqlens=bounds,
        T=T,
    )


def _entry() -> Callable[[Packed, Split], common.Call]:
    """How to call FlashInfer here; raises ImportError if neither way is there."""
    public = _optional("flashinfer.gdn_prefill")
    kernels = importlib.import_module("flashinfer.gdn_kernels.delta_rule_dsl")
    for name in ("chunk_gated_delta_rule_sm90", "cp_delta_rule_dsl_sm90"):
        # FlashInfer leaves None where its compiler or the CUDA bindings are missing.
        if getattr(kernels, name, None) is None:
            raise ImportError(f"its kernel {name} did not load (nvidia-cutlass-dsl, cuda-bindings)")
    return _kernels_alone if public is None else _public


def _optional(module: str):
    """The module, or None where it is not part of the installation."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise
        return None


def _public(packed: Packed, split: Split) -> common.Call:
    operator = importlib.import_module("flashinfer.gdn_prefill")

    def run():
        return operator.chunk_gated_delta_rule(
            packed.q,
            packed.k,
            packed.v,
            g=packed.alpha,
            beta=packed.beta,
            initial_state=packed.initial_state,
            output_final_state=True,
            cu_seqlens=packed.cu_seqlens,
            use_cp=split,
            max_seqlen=packed.T,
        )

    return run


def _kernels_alone(packed: Packed, split: Split) -> common.Call:
    kernels = importlib.import_module("flashinfer.gdn_kernels.delta_rule_dsl")
    _, heads, dim = packed.v.shape
    scale = dim**-0.5
    if split == "auto":
        split = _own_choice(packed.sequences * heads, packed.q.device)

    def run():
        output = torch.empty_like(packed.v)
        state = torch.empty(
            (packed.sequences, heads, dim, dim), dtype=torch.float32, device=output.device
        )
        if split:
            kernels.cp_delta_rule_dsl_sm90(
                output,
                state,
                packed.q,
                packed.k,
                packed.v,
                packed.alpha,
                packed.beta,
                packed.cu_seqlens,
                scale,
                initial_state=packed.initial_state,
                max_seqlen=packed.T,
            )
        else:
            kernels.chunk_gated_delta_rule_sm90(
                output,
                state,
                packed.q,
                packed.k,
                packed.v,
                packed.initial_state,
                packed.alpha,
                packed.beta,
                packed.cu_seqlens,
                scale,
            )
        return output, state

    return run


def _own_choice(states: int, device: torch.device) -> bool:
    """Whether FlashInfer's public function would split so many independent recurrences."""
    helper = importlib.import_module("flashinfer.gdn_kernels.delta_rule_dsl.varlen_helper")
    facts = importlib.import_module("flashinfer.utils")
    return helper.should_use_cp_host(
        states,
        facts.get_device_sm_count(device),
        facts.get_device_name(device),
        device_capability=facts.get_compute_capability(device),
    )


IMPLEMENTATIONS = (
    FlashInfer(),
    FlashInfer(name="flashinfer_one_kernel", split=False),
    FlashInfer(name="flashinfer_split", split=True),
)
