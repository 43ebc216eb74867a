"""Host side of the core: how a sequence is cut, what a split needs, what is launched in what order.

Nothing here imports TileLang or touches a device at import; shapes in, shapes and numbers out. The
kernels are in kernels/split.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

CHUNK = 64
HEAD_DIM = 128
BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class SegmentPlan:
    """A sequence of `chunks` chunks cut into segments of chunks_per_segment; the last is shorter.

    chunks_per_segment must leave at least two segments.
    """

    chunks: int
    chunks_per_segment: int

    def __post_init__(self) -> None:
        if not 1 <= self.chunks_per_segment < self.chunks:
            raise ValueError(
                f"chunks_per_segment={self.chunks_per_segment} must be from 1 to chunks - 1 = "
                f"{self.chunks - 1}: a split has at least two segments"
            )

    @property
    def segments(self) -> int:
        return -(-self.chunks // self.chunks_per_segment)

    @property
    def scan_steps(self) -> int:
        """Segments whose transition is needed: all but the first and the last."""
        return self.segments - 2

    def opening_ctas(self, states: int, block_dv: int) -> int:
        """CTAs of the two launches that run first and side by side, for `states` = B * Hv states:
        the forward pass over the first segment, and the summary.
        """
        return states * (HEAD_DIM // block_dv + 2 * self.scan_steps)

    def forward_ctas(self, states: int, block_dv: int) -> int:
        """CTAs of the forward pass over all segments but the first."""
        return states * (self.segments - 1) * (HEAD_DIM // block_dv)


def plan_segments(tokens: int, segments: int) -> SegmentPlan:
    """The plan of at most `segments` segments of equal length; ValueError below two chunks."""
    if tokens < 1 or segments < 2:
        raise ValueError(f"tokens={tokens} must be at least 1, segments={segments} at least 2")
    chunks = -(-tokens // CHUNK)
    return SegmentPlan(chunks, -(-chunks // segments))


@dataclass(frozen=True)
class Workspace:
    """Shape and dtype name of one temporary tensor."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * BYTES[self.dtype]


def workspaces(plan: SegmentPlan, B: int, Hv: int, products: int = 3) -> dict[str, Workspace]:
    """The temporaries of a split call, by the names of the kernels' arguments.

    products: those of the scan (1, 2 or 3); below 3 residuals is a one-element dummy. All are
    written before they are read: none needs clearing.
    """
    if products not in (1, 2, 3):
        raise ValueError(f"products={products} must be 1, 2 or 3")
    middle = max(plan.scan_steps, 1)
    square = (B, Hv, HEAD_DIM, HEAD_DIM)
    return {
        "states": Workspace((plan.segments - 1, *square), "float32"),
        "transitions": Workspace((middle, *square), "bfloat16"),
        "residuals": Workspace((middle, *square) if products == 3 else (1,), "bfloat16"),
        "decays": Workspace((middle, B, Hv), "float32"),
    }


@dataclass(frozen=True)
class CorePlan:
    """How the core runs: in one launch, or split over time in two or four.

    block_dv: state columns of one CTA of the forward launch. cut: the segments of every sequence,
    None where it is not split. products: those of the scan, None where there is no cut.
    """

    block_dv: int
    cut: SegmentPlan | None = None
    products: int | None = None

    def __post_init__(self) -> None:
        if (self.cut is None) != (self.products is None):
            raise ValueError(
                f"cut={self.cut} with products={self.products}: a split has both, an unsplit plan "
                "neither"
            )
        if self.products not in (None, 1, 2, 3):
            raise ValueError(f"products={self.products} must be 1, 2 or 3")

    @property
    def kind(self) -> str:
        """ "split" or "unsplit"."""
        return "unsplit" if self.cut is None else "split"

    @property
    def segments(self) -> int:
        return 1 if self.cut is None else self.cut.segments

    @property
    def chunks_per_segment(self) -> int | None:
        return None if self.cut is None else self.cut.chunks_per_segment

    def workspaces(self, sequences: int, heads_v: int) -> dict[str, Workspace]:
        """The temporaries of a call by name; none where nothing is split."""
        if self.cut is None:
            return {}
        return workspaces(self.cut, sequences, heads_v, self.products)

    def workspace_bytes(self, sequences: int, heads_v: int) -> int:
        """Device memory that a call needs beyond its inputs and outputs."""
        return sum(item.bytes for item in self.workspaces(sequences, heads_v).values())


@dataclass(frozen=True)
class SplitLaunchers:
    """The compiled kernels; each is called with the arguments of its PrimFunc.

    summary and scan may be None where a plan has no scan_steps.
    """

    summary: Callable[..., Any] | None
    scan: Callable[..., Any] | None
    forward: Callable[..., Any]


def split_forward(
    launchers: SplitLaunchers,
    plan: SegmentPlan,
    temporaries: Mapping[str, Any],
    inputs: tuple,
    initial_state,
    output,
    final_state,
    scale: float,
) -> None:
    """Launch the split forward pass: two launches, or four with a summary and a scan.

    temporaries: tensors of `workspaces`. inputs: q, k, v, g_cumsum, beta, A. initial_state: the
    tensor, or the one-element dummy of kernels built without it. output and final_state are
    written whole. Everything is ordered by the stream, allocates nothing and can be captured.
    """
    for _, launch in split_launches(
        launchers, plan, temporaries, inputs, initial_state, output, final_state, scale
    ):
        launch()


def split_launches(
    launchers: SplitLaunchers,
    plan: SegmentPlan,
    temporaries: Mapping[str, Any],
    inputs: tuple,
    initial_state,
    output,
    final_state,
    scale: float,
) -> tuple[tuple[str, Callable[[], Any]], ...]:
    """The launches of `split_forward` in order, each with its name, for callers that time them.

    "first" runs beside "summary" where that is the launch before it on the stream.
    """
    q, k, v, g_cumsum, beta, A = inputs
    states, transitions, residuals, decays = (
        temporaries[name] for name in ("states", "transitions", "residuals", "decays")
    )
    length = plan.chunks_per_segment

    def summary():
        launchers.summary(k, v, A, g_cumsum, beta, states, transitions, residuals, decays, length)

    def scan():
        launchers.scan(states, transitions, residuals, decays)

    def forward(first, segments, beside):
        launchers.forward(
            *(q, k, v, g_cumsum, beta, A, initial_state, states, output, final_state, scale),
            *(length, first, segments, beside),
        )

    return ordered_launches(plan, summary, scan, forward)


def ordered_launches(
    plan: SegmentPlan,
    summary: Callable[[], Any],
    scan: Callable[[], Any],
    forward: Callable[..., Any],
) -> tuple[tuple[str, Callable[[], Any]], ...]:
    """The launches of a split in order, each with its name; forward(first, segments, beside) runs
    the forward kernel over some segments, beside the launch before it where beside is 1.
    """

    def rest():
        forward(1, plan.segments - 1, 0)

    if not plan.scan_steps:
        return ("first", lambda: forward(0, 1, 0)), ("rest", rest)
    return (
        ("summary", summary),
        ("first", lambda: forward(0, 1, 1)),
        ("scan", scan),
        ("rest", rest),
    )
