"""Stage two of the operator: which kernels run a call, and their launches.

A dense call with few states is split over time where the cost model says that it pays, in up to
three launches more; a packed one never is, nor one that is_fixed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .dispatch import PRODUCTS, TILES, core_plan
from .runtime import RUNTIME, sm_count
from .split import CorePlan, ordered_launches
from .validation import CHUNK, HEAD_DIM

if TYPE_CHECKING:
    from .specialisations import Specialisation
    from .variants import Usage

# The tile of calls whose bits must not depend on what else is in the batch, of those that keep
# states along the way, which wait for memory more than for the chain, and of those with eigenvalues
# down to -1: without decay they forget nothing that is wrong, and at 128 columns A is rounded once
# more, in a split the transitions are.
NARROW_TILE = 64


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
    workspace: Mapping[str, Tensor],
    *,
    scale: float,
    states_every: int,
    states_before: bool,
    state_v_first: bool,
    batch_invariant: bool,
    allow_neg_eigval: bool,
) -> None:
    """Stage 2: all chunks of every sequence and V head, on the current stream.

    Args:
        q, k, v: [B, T, Hq or Hv, 128], one dtype, bf16 or fp16.
        gate, beta: [B, Hv, T] fp32 and A as prepare_operator wrote them, A in the inverse_layout of
            the call's plan; the gate is summed within the chunks of its sequence.
        query_norm, key_norm: [B, Hq, T] fp32 factors of the rows of q and k, or None.
        cu_seqlens: [N + 1] int32 or int64, or None: N = B sequences of T tokens.
        initial_state: [rows, Hv, 128, 128] fp32, bf16 or fp16, rows apart by stride(0), or None.
        initial_rows: [N] int32 or int64 row of each sequence, below 0 for zeros; None: row n.
        output: [B, T, Hv, 128] like v.
        final_state, final_rows: the same for what is written, below 0 writes nothing.
        states: [rows, Hv, 128, 128] or None; states_starts: [N + 1] int64 or int32, each
            sequence's first row there; rows past the end of `states` are dropped.
        workspace: with cu_seqlens order as prepare_operator wrote it, and what a split over time
            needs between its launches, by the names of CorePlan.workspaces().
        scale: factor of the output.
        states_every, states_before: keep the state before the chunks that start at multiples of
            this many tokens, in row start + i, or else after each full so many, in
            row start + i - 1.
        state_v_first: all states are [dv, dk].
        batch_invariant: no choice may depend on the other sequences.
        allow_neg_eigval: beta is up to 2.

    An empty sequence's state is copied, and left alone where both states are the same memory.
    """
    B, T, heads_q, _ = q.shape
    heads_v = v.shape[2]
    sequences = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    # A pool without rows holds no state.
    initial_state, final_state, states = (
        tensor if tensor is not None and tensor.shape[0] else None
        for tensor in (initial_state, final_state, states)
    )
    in_place = (
        initial_state is not None
        and final_state is not None
        and initial_state.data_ptr() == final_state.data_ptr()
    )
    plan = call_plan(
        sequences,
        B * T,
        heads_q,
        heads_v,
        q.device,
        packed=cu_seqlens is not None,
        batch_invariant=batch_invariant,
        keeps_states=bool(states_every),
        allow_neg_eigval=allow_neg_eigval,
    )
    kernels = forward_kernels(
        plan,
        heads_q,
        heads_v,
        q.dtype,
        query_norm is not None,
        cu_seqlens is not None,
        *(None if s is None else s.dtype for s in (initial_state, final_state, states)),
        state_v_first,
    )
    launchers = {name: RUNTIME.kernel(*kernel) for name, kernel in kernels.items()}
    absent = gate.view(-1)[:1]
    # CTAs that all run at once may begin in any order.
    ctas = sequences * heads_v * HEAD_DIM // plan.block_dv
    ordered = cu_seqlens is not None and ctas > sm_count(q.device)
    (
        (bounds, bounds_step),
        (order, order_step),
        (reads, reads_step),
        (writes, writes_step),
        (starts, starts_step),
    ) = (
        words(numbers, absent)
        for numbers in (
            cu_seqlens,
            workspace["order"] if ordered else None,
            initial_rows,
            final_rows,
            states_starts if states is not None else None,
        )
    )
    same_rows = address(initial_rows) == address(final_rows)
    initial_state, final_state, states, query_norm, key_norm = (
        absent if tensor is None else tensor
        for tensor in (initial_state, final_state, states, query_norm, key_norm)
    )
    segment_states, length = absent, 0
    if plan.cut is not None:
        length = plan.cut.chunks_per_segment
        segment_states, transitions, residuals, decays = (
            workspace[name] for name in ("states", "transitions", "residuals", "decays")
        )
        between = (segment_states, transitions, residuals, decays)

    def forward(first_segment, segments, beside):
        launchers["forward"](
            q,
            k,
            v,
            gate,
            beta,
            A,
            query_norm,
            key_norm,
            bounds,
            order,
            initial_state,
            reads,
            segment_states,
            output,
            final_state,
            writes,
            states,
            starts,
            scale,
            kernels["forward"].config.flush_limit(batch_invariant),
            sequences,
            bounds_step,
            order_step,
            reads_step,
            writes_step,
            starts_step,
            int(in_place and same_rows),
            states_every // CHUNK,
            int(not states_before),
            length,
            first_segment,
            segments,
            beside,
        )

    if plan.cut is None:
        forward(0, 1, 0)
        return

    def summary():
        launchers["summary"](k, v, A, gate, beta, key_norm, *between, length)

    def scan():
        launchers["scan"](*between)

    for _, launch in ordered_launches(plan.cut, summary, scan, forward):
        launch()


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


def inverse_layout(plan: CorePlan) -> str:
    """How a plan's kernels read A: "rows" or "blocks", an OperatorPreprocessConfig's inverse.

    The summary of a split reads rows, and so does the narrow tile, which does not rewrite A.
    """
    return "blocks" if plan.block_dv != NARROW_TILE and plan.cut is None else "rows"


def is_fixed(batch_invariant: bool, keeps_states: bool, allow_neg_eigval: bool) -> bool:
    """Whether such calls always run NARROW_TILE and are never split over time."""
    return batch_invariant or keeps_states or allow_neg_eigval


def call_plan(
    sequences: int,
    tokens: int,
    heads_q: int,
    heads_v: int,
    device: torch.device,
    *,
    packed: bool,
    batch_invariant: bool,
    keeps_states: bool,
    allow_neg_eigval: bool,
) -> CorePlan:
    """The plan that such a call runs and has its workspace for; tokens: of all sequences."""
    if is_fixed(batch_invariant, keeps_states, allow_neg_eigval):
        return CorePlan(NARROW_TILE)
    return sequence_plan(sequences, tokens, heads_q, heads_v, sm_count(device), not packed)


@functools.lru_cache(maxsize=1024)
def sequence_plan(
    sequences: int, tokens: int, heads_q: int, heads_v: int, sm_count: int, cut: bool
) -> CorePlan:
    """The plan for so many sequences with so many tokens all together; cut: it may be a split."""
    mean = max(1, tokens // sequences)
    split = "auto" if cut else False
    return core_plan(sequences, mean, heads_q, heads_v, sm_count, split=split)


class Kernel(NamedTuple):
    """The arguments of RUNTIME.kernel."""

    factory: Callable[[Any], Any]
    config: Any
    pass_configs: Mapping


@functools.lru_cache(maxsize=256)
def forward_kernels(
    plan: CorePlan,
    heads_q: int,
    heads_v: int,
    dtype: torch.dtype,
    l2norm: bool,
    packed: bool,
    initial_state: torch.dtype | None,
    final_state: torch.dtype | None,
    kept_states: torch.dtype | None,
    state_v_first: bool,
) -> dict[str, Kernel]:
    """What serves such a call: "summary" and "scan" of a split (neither with two segments), and
    "forward".
    """
    from .kernels import resident_operator, split, split_operator

    kernels = {}
    if plan.cut is not None and plan.cut.scan_steps:
        summary = split_operator.OperatorSummaryConfig(
            heads_q,
            heads_v,
            residual=plan.products == 3,
            dtype=dtype_name(dtype),
            l2norm=l2norm,
        )
        kernels["summary"] = Kernel(
            split_operator.operator_summary_kernel, summary, split.PASS_CONFIGS
        )
        scan = split.ScanConfig(heads_v, plan.products)
        kernels["scan"] = Kernel(split.scan_kernel, scan, split.PASS_CONFIGS)
    states = (initial_state, final_state, kept_states)
    forward = resident_operator.OperatorConfig(
        heads_q,
        heads_v,
        plan.block_dv,
        dtype=dtype_name(dtype),
        l2norm=l2norm,
        packed=packed,
        initial_state=dtype_name(initial_state),
        final_state=dtype_name(final_state),
        kept_states=dtype_name(kept_states),
        state_v_first=state_v_first and any(states),
        segmented=plan.cut is not None,
    )
    kernels["forward"] = Kernel(
        resident_operator.operator_kernel, forward, resident_operator.PASS_CONFIGS
    )
    return kernels


def dtype_name(dtype: torch.dtype | None) -> str | None:
    """TileLang's name of a dtype."""
    return None if dtype is None else str(dtype).removeprefix("torch.")


def usage_plans(usage: Usage) -> list[CorePlan]:
    """A plan of every kind that such calls may run, whatever their sizes."""
    from .specialisations import THREE_SEGMENTS

    keeps_states = usage.kept_states is not None
    if is_fixed(usage.batch_invariant, keeps_states, usage.beta == "twice_sigmoid"):
        return [CorePlan(NARROW_TILE)]
    plans = [CorePlan(tile) for tile in TILES]
    if usage.cu_seqlens is None:
        plans += [CorePlan(tile, THREE_SEGMENTS, PRODUCTS) for tile in TILES]
    return plans


def forward_specialisations(
    heads_q: int, heads_v: int, dtype: str, usage: Usage
) -> tuple[Specialisation, ...]:
    """The kernels that launch_forward may launch for such calls, whatever their sizes."""
    from .specialisations import Specialisation

    kept = (usage.final_state or "float32") if usage.kept_states else None
    found = {}
    for plan in usage_plans(usage):
        kernels = forward_kernels(
            plan,
            heads_q,
            heads_v,
            getattr(torch, dtype),
            usage.l2norm,
            usage.cu_seqlens is not None,
            *(
                None if name is None else getattr(torch, name)
                for name in (usage.initial_state, usage.final_state, kept)
            ),
            usage.state_v_first,
        )
        for factory, config, pass_configs in kernels.values():
            found[config.name] = Specialisation(
                config.name, partial(factory, config), dict(pass_configs)
            )
    return tuple(found.values())
