"""The kernels that the operator's options need, and their compilation ahead of time.

Sizes, and the contents of every tensor, are run-time arguments: a `Usage` with its head counts and
dtype names all that a call may compile, so the list for a deployment is short and known.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from .specialisations import HEADS, Specialisation

DTYPES = ("bfloat16", "float16")


@dataclass(frozen=True)
class Usage:
    """How the operator will be called, as far as its kernels depend on it.

    gate: "log", "linear" or "raw", dt_bias: with a raw gate. beta: "plain", "sigmoid" or
    "twice_sigmoid" (allow_neg_eigval). cu_seqlens, state_indices: their dtype, None where absent.
    initial_state, final_state: dtype, None where absent. kept_states: None, "h" or "checkpoints",
    of the final state's dtype. strided: q and k are views of a projection.
    """

    gate: str = "log"
    gate_dtype: str = "float32"
    dt_bias: bool = False
    beta: str = "plain"
    beta_dtype: str = "float32"
    l2norm: bool = False
    cu_seqlens: str | None = None
    initial_state: str | None = None
    final_state: str | None = "float32"
    state_indices: str | None = None
    state_v_first: bool = False
    kept_states: str | None = None
    batch_invariant: bool = False
    strided: bool = False


# Dense calls, FLA's packed ones and what the adapters of integrations/ make of SGLang's and vLLM's.
USAGES = (
    Usage(),
    Usage(l2norm=True),
    Usage(l2norm=True, initial_state="float32"),
    Usage(l2norm=True, gate="raw", dt_bias=True, gate_dtype="bfloat16", beta_dtype="bfloat16"),
    Usage(l2norm=True, cu_seqlens="int64", initial_state="float32"),
    Usage(
        l2norm=True,
        cu_seqlens="int32",
        initial_state="float32",
        state_indices="int32",
        state_v_first=True,
    ),
    Usage(l2norm=True, cu_seqlens="int32", initial_state="float32", state_v_first=True),
)


def operator_variants(
    head_configs: Iterable[tuple[int, int]] = HEADS,
    dtypes: Sequence[str | torch.dtype] = ("bfloat16",),
    options: Iterable[Usage] = USAGES,
) -> list[Specialisation]:
    """Every kernel that calls of these heads (Hq, Hv), dtypes and usages launch, none twice.

    Raises TypeError or ValueError for a wrong argument.
    """
    from .operator_cuda import forward_specialisations

    head_configs = _items("head_configs", head_configs, "pairs (Hq, Hv), such as [(16, 32)]")
    dtypes = _items("dtypes", dtypes, f"a list of {' and '.join(DTYPES)}")
    options = _items("options", options, "Usage objects, such as [Usage(l2norm=True)]")
    for usage in options:
        if not isinstance(usage, Usage):
            raise TypeError(f"options has {usage!r}; it must be a gdn_prefill.variants.Usage")
    names = [_dtype_name(dtype) for dtype in dtypes]
    found: dict[str, Specialisation] = {}
    for heads_q, heads_v in map(_heads, head_configs):
        for dtype in names:
            for usage in options:
                for item in (
                    *_preprocessing(heads_q, heads_v, dtype, usage),
                    *forward_specialisations(heads_q, heads_v, dtype, usage),
                ):
                    found.setdefault(item.name, item)
    return list(found.values())


def warmup(
    head_configs: Iterable[tuple[int, int]] = HEADS,
    dtypes: Sequence[str | torch.dtype] = ("bfloat16",),
    options: Iterable[Usage] = USAGES,
) -> list[str]:
    """Compile all of `operator_variants` into TileLang's cache; returns their names.

    Needs nvcc and no GPU; where there is a Hopper one the kernels are loaded into this process as
    well, so that no call compiles or loads anything. Raises TypeError or ValueError for a wrong
    argument, gdn_prefill.toolchain.ToolchainError where compiling fails.
    """
    items = operator_variants(head_configs, dtypes, options)
    for item in items:
        compile_variant(item)
    return [item.name for item in items]


def compile_variant(item: Specialisation) -> None:
    """Into the cache on disk, and into the process where its kernels can run."""
    from .runtime import RUNTIME
    from .toolchain import compile_for_hopper

    if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
        factory, (config,) = item.build.func, item.build.args
        RUNTIME.kernel(factory, config, item.pass_configs)
    else:
        compile_for_hopper(item.build(), item.pass_configs)


def _preprocessing(heads_q: int, heads_v: int, dtype: str, usage: Usage) -> list[Specialisation]:
    """One for every layout of A that the forward kernels of such calls read."""
    from .kernels.preprocess import OperatorPreprocessConfig
    from .kernels.preprocess_fused import PASS_CONFIGS, operator_preprocess_kernel
    from .operator_forward import inverse_layout, usage_plans

    found = []
    for inverse in dict.fromkeys(inverse_layout(plan) for plan in usage_plans(usage)):
        config = OperatorPreprocessConfig(
            heads_q,
            heads_v,
            dtype=dtype,
            gate=usage.gate,
            gate_dtype=usage.gate_dtype,
            dt_bias=usage.dt_bias,
            beta=usage.beta,
            beta_dtype=usage.beta_dtype,
            l2norm=usage.l2norm,
            cu_seqlens=usage.cu_seqlens,
            strided=usage.strided,
            inverse=inverse,
        )
        build = partial(operator_preprocess_kernel, config)
        found.append(Specialisation(config.name, build, dict(PASS_CONFIGS)))
    return found


def _items(name: str, values: object, allowed: str) -> list:
    """The items of an argument that is a collection and no string."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(f"{name} is {values!r}; it must be {allowed}")
    return list(values)


def _heads(pair: object) -> tuple[int, int]:
    if (
        not isinstance(pair, (tuple, list))
        or len(pair) != 2
        or not all(type(heads) is int for heads in pair)
    ):
        raise TypeError(
            f"head_configs has {pair!r}; it must be a pair of integers (Hq, Hv), such as (16, 32)"
        )
    heads_q, heads_v = pair
    if heads_q < 1 or heads_v < 1 or heads_v % heads_q:
        raise ValueError(
            f"head_configs has {heads_q}/{heads_v}; Hv must be a positive multiple of Hq"
        )
    return heads_q, heads_v


def _dtype_name(dtype: str | torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"dtypes has {dtype!r}; it must be {' or '.join(DTYPES)}")
    return name
