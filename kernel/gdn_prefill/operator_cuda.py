"""The operator on Hopper: the preprocessing launch, then the forward launch.

Both grids come from shapes alone and nothing is copied to the host, so that a captured call may be
replayed with other contents of every tensor, cu_seqlens and state_indices included.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .dispatch import TILES, core_plan
from .operator_results import Results
from .operator_validation import Operands, OperatorShape, Options
from .runtime import RUNTIME, sm_count
from .validation import CHUNK

if TYPE_CHECKING:
    from .kernels.resident_operator import OperatorConfig
    from .specialisations import Specialisation
    from .variants import Usage

NORMS = ("query_norm", "key_norm")
# The tile of calls whose bits must not depend on what else is in the batch, and of those that keep
# states along the way, which wait for memory more than for the chain.
NARROW_TILE = 64
# Shape and dtype of every temporary of a call, by name.
Specification = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


def launch_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    A: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    cu_seqlens: Tensor | None,
    initial_state: Tensor | None,
    initial_rows: Tensor | None,
    output: Tensor,
    final_state: Tensor | None,
    final_rows: Tensor | None,
    states: Tensor | None,
    states_starts: Tensor | None,
    *,
    scale: float,
    states_every: int,
    states_before: bool,
    state_v_first: bool,
    batch_invariant: bool,
) -> None:
    """Stage 2: one walk over the chunks of every sequence and V head, on the current stream.

    Args:
        q, k, v: [B, T, Hq or Hv, 128], one dtype, bf16 or fp16.
        gate, beta: [B, Hv, T] fp32 and A: [B, T, Hv, 64] as prepare_operator wrote them; the gate
            is summed within the chunks of its sequence.
        query_norm, key_norm: [B, Hq, T] fp32 factors of the rows of q and k, or None.
        cu_seqlens: [N + 1] int32 or int64, or None: N = B sequences of T tokens.
        initial_state: [rows, Hv, 128, 128] fp32, bf16 or fp16, rows apart by stride(0), or None.
        initial_rows: [N] int32 or int64 row of each sequence, below 0 for zeros; None: row n.
        output: [B, T, Hv, 128] like v.
        final_state, final_rows: the same for what is written, below 0 writes nothing.
        states: [rows, Hv, 128, 128] or None; states_starts: [N + 1] int64 or int32, each
            sequence's first row there; rows past the end of `states` are dropped.
        scale: factor of the output.
        states_every, states_before: keep the state before the chunks that start at multiples of
            this many tokens, in row start + i, or else after each full so many, in
            row start + i - 1.
        state_v_first: all states are [dv, dk].
        batch_invariant: no choice may depend on the other sequences.

    An empty sequence's state is copied, and left alone where both states are the same memory.
    """
    from .kernels.resident_operator import PASS_CONFIGS, operator_kernel

    B, T, heads_q, _ = q.shape
    heads_v = v.shape[2]
    sequences = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    # A pool without rows holds no state.
    initial_state, final_state, states = (
        tensor if tensor is not None and tensor.shape[0] else None
        for tensor in (initial_state, final_state, states)
    )
    config = forward_config(
        heads_q,
        heads_v,
        NARROW_TILE
        if batch_invariant or states is not None
        else tile(sequences, B * T, heads_q, heads_v, sm_count(q.device)),
        q.dtype,
        query_norm is not None,
        cu_seqlens is not None,
        *(None if tensor is None else tensor.dtype for tensor in (initial_state, final_state)),
        None if states is None else states.dtype,
        state_v_first and not (initial_state is None and final_state is None and states is None),
    )
    launch = RUNTIME.kernel(operator_kernel, config, PASS_CONFIGS)
    in_place = (
        initial_state is not None
        and final_state is not None
        and initial_state.data_ptr() == final_state.data_ptr()
        and address(initial_rows) == address(final_rows)
    )
    absent = gate.view(-1)[:1]
    (bounds, bounds_step), (reads, reads_step), (writes, writes_step), (starts, starts_step) = (
        words(numbers, absent)
        for numbers in (
            cu_seqlens,
            initial_rows,
            final_rows,
            states_starts if states is not None else None,
        )
    )
    launch(
        q,
        k,
        v,
        gate,
        beta,
        A,
        absent if query_norm is None else query_norm,
        absent if key_norm is None else key_norm,
        bounds,
        absent if initial_state is None else initial_state,
        reads,
        absent,
        output,
        absent if final_state is None else final_state,
        writes,
        absent if states is None else states,
        starts,
        scale,
        config.flush_limit(batch_invariant),
        sequences,
        bounds_step,
        reads_step,
        writes_step,
        starts_step,
        int(in_place),
        states_every // CHUNK,
        int(not states_before),
        0,
    )


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def words(numbers: Tensor | None, absent: Tensor) -> tuple[Tensor, int]:
    """Integers as 32-bit words, and how many words apart they are: 0 where there are none.

    The low word of an int64 is the number, also of a negative one, as all are small.
    """
    if numbers is None:
        return absent.view(torch.int32), 0
    if numbers.dtype == torch.int32:
        return numbers, 1
    return numbers.view(torch.int32), 2


@functools.lru_cache(maxsize=1024)
def tile(sequences: int, tokens: int, heads_q: int, heads_v: int, sm_count: int) -> int:
    """State columns of a CTA for so many sequences, of all together so many tokens."""
    mean = max(1, tokens // sequences)
    return core_plan(sequences, mean, heads_q, heads_v, sm_count, split=False).block_dv


@functools.lru_cache(maxsize=256)
def forward_config(
    heads_q: int,
    heads_v: int,
    block_dv: int,
    dtype: torch.dtype,
    l2norm: bool,
    packed: bool,
    initial_state: torch.dtype | None,
    final_state: torch.dtype | None,
    kept_states: torch.dtype | None,
    state_v_first: bool,
) -> OperatorConfig:
    """The specialisation that serves such a launch."""
    from .kernels.resident_operator import OperatorConfig

    return OperatorConfig(
        heads_q,
        heads_v,
        block_dv,
        dtype=dtype_name(dtype),
        l2norm=l2norm,
        packed=packed,
        initial_state=dtype_name(initial_state),
        final_state=dtype_name(final_state),
        kept_states=dtype_name(kept_states),
        state_v_first=state_v_first,
    )


def dtype_name(dtype: torch.dtype | None) -> str | None:
    """TileLang's name of a dtype."""
    return None if dtype is None else str(dtype).removeprefix("torch.")


def unsupported(x: Operands, options: Options) -> str | None:
    """Why the kernels cannot run a checked call, or None."""
    return None


def forward_specialisations(
    heads_q: int, heads_v: int, dtype: str, usage: Usage
) -> tuple[Specialisation, ...]:
    """The kernels that launch_forward may launch for such calls, whatever their sizes."""
    from .kernels.resident_operator import PASS_CONFIGS, operator_kernel
    from .specialisations import Specialisation

    kept = None
    if usage.kept_states is not None:
        kept = usage.final_state or "float32"
    states = (usage.initial_state, usage.final_state, kept)
    configs = [
        forward_config(
            heads_q,
            heads_v,
            block_dv,
            torch_dtype(dtype),
            usage.l2norm,
            usage.cu_seqlens is not None,
            *map(torch_dtype, states),
            usage.state_v_first and any(states),
        )
        for block_dv in ((NARROW_TILE,) if usage.batch_invariant or kept else TILES)
    ]
    return tuple(
        Specialisation(config.name, partial(operator_kernel, config), dict(PASS_CONFIGS))
        for config in configs
    )


def torch_dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)


def run_cuda(
    x: Operands,
    results: Results,
    options: Options,
    shape: OperatorShape,
    workspace: Mapping[str, Tensor] | None = None,
) -> None:
    """Fills the results of a checked call; without a workspace it comes from torch's allocator.

    q, k and v that are neither contiguous nor views the kernels can read, g and beta that are not
    contiguous and A_log and dt_bias that are not fp32 are copied first. Raises NotImplementedError
    for what the kernels do not support.
    """
    from .preprocess import prepare_operator

    reason = unsupported(x, options)
    if reason is not None:
        raise NotImplementedError(reason)
    with torch.cuda.device(x.q.device):
        x = readable(x)
        if workspace is None:
            workspace = new_workspace(workspaces(shape, options, x.q.dtype), x.q.device)
        A, gate, beta = (workspace[name] for name in ("A", "gate", "beta_out"))
        query_norm, key_norm = (workspace.get(name) for name in NORMS)
        prepare_operator(
            x.k,
            x.g,
            x.beta,
            A,
            gate,
            beta,
            q=x.q if options.use_qk_l2norm else None,
            query_norm=query_norm,
            key_norm=key_norm,
            gate_mode=options.gate,
            A_log=x.A_log,
            dt_bias=x.dt_bias,
            beta_mode=beta_mode(options),
            cu_seqlens=x.cu_seqlens,
        )
        launch_forward(
            x.q,
            x.k,
            x.v,
            gate,
            beta,
            A,
            query_norm,
            key_norm,
            x.cu_seqlens,
            x.initial_state,
            x.state_indices if x.initial_state is not None else None,
            results.output,
            results.final_state,
            x.state_indices if x.output_state is not None else None,
            None if results.states is None else results.states.flatten(0, -4),
            states_starts(x, options, shape),
            scale=options.scale,
            states_every=options.states_every,
            states_before=options.output_h,
            state_v_first=options.state_v_first,
            batch_invariant=options.batch_invariant,
        )


def beta_mode(options: Options) -> str:
    """What the preprocessing does to beta."""
    if not options.use_beta_sigmoid:
        return "plain"
    return "twice_sigmoid" if options.allow_neg_eigval else "sigmoid"


def readable(x: Operands) -> Operands:
    """x with copies of what the kernels cannot read where it is; x itself in the usual case."""
    copies = {
        name: tensor.contiguous()
        for name, tensor in (("q", x.q), ("k", x.k), ("v", x.v), ("g", x.g), ("beta", x.beta))
        if not tensor.is_contiguous()
    }
    copies |= {
        name: tensor.to(torch.float32)
        for name, tensor in (("A_log", x.A_log), ("dt_bias", x.dt_bias))
        if tensor is not None and tensor.dtype != torch.float32
    }
    return x._replace(**copies) if copies else x


def workspaces(shape: OperatorShape, options: Options, dtype: torch.dtype) -> Specification:
    """The temporaries of a call; all are written before they are read."""
    from .preprocess import operator_outputs

    return operator_outputs(shape.B, shape.T, shape.Hq, shape.Hv, dtype, options.use_qk_l2norm)


def new_workspace(specification: Specification, device: torch.device) -> dict[str, Tensor]:
    """Uninitialised temporaries."""
    return {
        name: torch.empty(shape, dtype=dtype, device=device)
        for name, (shape, dtype) in specification.items()
    }


def states_starts(x: Operands, options: Options, shape: OperatorShape) -> Tensor | None:
    """First row of each sequence's kept states, [N + 1], on the device."""
    if not options.states_every:
        return None
    if x.checkpoint_cu_starts is not None:
        return x.checkpoint_cu_starts
    if x.cu_seqlens is None:
        chunks = shape.T / options.states_every
        rows = math.ceil(chunks) if options.output_h else math.floor(chunks)
        return torch.arange(shape.N + 1, device=x.q.device) * rows
    starts = torch.zeros(shape.N + 1, dtype=torch.int64, device=x.q.device)
    torch.cumsum((x.cu_seqlens.diff() + (CHUNK - 1)) // CHUNK, 0, out=starts[1:])
    return starts
