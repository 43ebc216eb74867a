"""One change to a kernel's synchronisation, for mutation testing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

WAITS = frozenset({"mbarrier_wait_parity"})
ARRIVALS = frozenset({
    "ptx_arrive_barrier", "ptx_arrive_barrier_expect_tx", "named_barrier_arrive",
    "ptx_arrive_cluster_barrier",
})  # fmt: skip
SYNCS = frozenset({"tvm_storage_sync", "sync_warp", "cluster_sync"})
OTHERS = frozenset({"fence_proxy_async", "wait_wgmma", "warpgroup_wait", "tma_store_wait"})
SYNCHRONISATION = WAITS | ARRIVALS | SYNCS | OTHERS
HOLDS_BACK = WAITS | {"tvm_storage_sync", "cluster_sync"}  # what an early release is not moved over


@dataclass(frozen=True)
class Site:
    """A synchronisation statement: its number in program order, text and place."""

    number: int
    operation: str
    text: str
    line: str
    around: tuple = ()


@dataclass(frozen=True)
class Edit:
    """action on the statement number ``site``; counts overrides arrival counts by barrier name.

    drop leaves the statement out, flip inverts the parity of a wait, early moves an arrival ahead
    of the statements it comes after in its loop body, up to the last wait.
    """

    site: int | None = None
    action: str = "drop"
    counts: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.action not in ("drop", "flip", "early"):
            raise ValueError(f"action={self.action!r}: allowed are drop, flip, early")
