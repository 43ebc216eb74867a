"""One CTA: its roles, tiles and barriers, and what must be in order when it ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from .barriers import Barrier
from .detector import Stamp
from .memory import Tile
from .report import KINDS, Issue
from .role import Role

if TYPE_CHECKING:
    from .cluster import Cluster


@dataclass(frozen=True)
class Options:
    """checks: groups of the check= option.

    auto_fence models TileLang's InjectFenceProxy, auto_sync its ThreadSync.
    timeline: trace the first CTA, with those of its cluster.
    """

    checks: frozenset[str]
    auto_fence: bool = True
    auto_sync: bool = True
    timeline: bool = False

    @property
    def tracking(self) -> bool:
        return bool(self.checks & {"race", "init"})


class Load(NamedTuple):
    """A TMA load, or an access by another CTA: its stamp, and its text for messages."""

    clock: int
    time: int
    what: str


def suffix(rank: int) -> str:
    """What tells the names of a CTA of this rank apart."""
    return f"@{rank}" if rank else ""


class Cta:
    """Run-time state shared by the roles of one thread block.

    tiles: its shared memory by the key of the buffer; common: the clock of the stores in code that
    all its threads run; begun: that of the initialisation of its barriers; visits: the last access
    of every clock that another CTA, or a copy to one, makes to its shared memory.
    """

    def __init__(self, cluster: Cluster, rank: int, number: int, block: tuple[int, ...]):
        self.cluster, self.rank, self.number, self.block = cluster, rank, number, block
        self.report, self.options, self.trace = cluster.report, cluster.options, cluster.trace
        self.detector, self.in_flight = cluster.detector, cluster.in_flight
        self.common = self.detector.clock("common", rank)
        self.common_fenced = 0
        self.begun = self.detector.clock("begun", rank)
        self.tiles: dict[int, Tile] = {}
        self.barriers: dict[int, list[Barrier]] = {}
        self.named: dict[int | str, Barrier] = {}
        self.loads: list[Load] = []
        self.visits: dict[int, Load] = {}
        self.roles: list[Role] = []

    def issue(self, role: Role | None, kind: str, text: str, *key) -> None:
        """Record a finding.  key tells findings of one line apart; its first entry is the buffer or
        barrier.
        """
        if KINDS[kind][0] in self.options.checks:
            name, where = (role.name, role.where()) if role else ("-", "end")
            subject = key[0] if key and isinstance(key[0], str) else ""
            self.report.add(Issue(kind, self.block, name, where, text, subject), key or (text,))

    def barrier(self, name: str, count: int) -> Barrier:
        name += suffix(self.rank)
        barrier = Barrier(name, count, self.issue, self.detector.width)
        if self.trace:
            barrier.on_complete = self.trace.completed_phase
        return barrier

    def make_barriers(self, specs: dict[int, tuple[str, Sequence[int]]]) -> None:
        for key, (name, counts) in specs.items():
            self.barriers[key] = [self.barrier(f"{name}[{i}]", n) for i, n in enumerate(counts)]

    def named_barrier(self, ident: int | str, count: int, role: Role) -> Barrier:
        barrier = self.named.get(ident)
        if barrier is None:
            barrier = self.named[ident] = self.barrier(f"named barrier {ident}", count)
        if barrier.count != count:
            if not barrier.half_used:
                barrier.count = barrier.pending = count
            else:
                text = f"{barrier.name} is in use with {barrier.count} threads, now with {count}"
                self.issue(role, "barrier", text, ident)
        return barrier

    def all_barriers(self) -> Iterator[Barrier]:
        for group in self.barriers.values():
            yield from group
        yield from self.named.values()

    # ---- code that all threads run ----
    def common_stamp(self) -> Stamp:
        """Of a store in it."""
        return self.detector.stamp("common", self.rank)

    def common_times(self) -> tuple[int, int]:
        """Of its last store, and of the last one that passed a proxy fence in it."""
        return self.detector.now.get(self.common, 0), self.common_fenced

    def fence_common(self) -> None:
        self.common_fenced = self.common_times()[0]

    # ---- other CTAs of the cluster ----
    def peer(self, role: Role, rank) -> Cta:
        """The CTA of a rank that a role names."""
        ctas, rank = self.cluster.ctas, int(rank)
        if not 0 <= rank < len(ctas):
            text = f"CTA rank {rank} is outside of the cluster's 0..{len(ctas) - 1}"
            self.issue(role, "bounds", text, "rank")
        return ctas[min(max(rank, 0), len(ctas) - 1)]

    def visit(self, role: Role, stamp: Stamp, what: str, subject: str) -> None:
        """An access to this CTA's shared memory that must not come before its barriers are
        initialised, nor after its end.
        """
        if not role.all[self.begun]:
            text = (
                f"{what}: CTA rank {self.rank} may not have initialised its barriers "
                "(without a cluster barrier or a cluster_sync)"
            )
            role.cta.issue(role, "race", text, subject)
        self.visits[stamp.clock] = Load(*stamp, f"{what} by {role.name} at {role.where()}")

    # ---- the end ----
    def finish(self) -> None:
        """What must not be left open when the CTA ends."""
        for role in self.roles:
            if role.groups:
                self.issue(role, "wgmma", f"ends with {len(role.groups)} outstanding wgmma", "end")
            if role.stores:
                self.issue(
                    role, "async", f"ends with {len(role.stores)} TMA stores not waited for", "end"
                )
        for load in self.loads:
            if not any(role.all[load.clock] >= load.time for role in self.roles):
                self.issue(
                    None, "async", f"nobody waits for the TMA load of {load.what}", load.what
                )
        for visit in self.visits.values():
            if not any(role.knows(visit.clock, visit.time) for role in self.roles):
                text = f"the CTA of rank {self.rank} may end before the {visit.what}"
                self.issue(None, "exit", text, visit.what.split(" at ")[0], self.rank)
        for barrier in self.all_barriers():
            if barrier.outstanding:
                self.issue(
                    None,
                    "barrier",
                    f"bytes are expected that no load brings: {barrier}",
                    barrier.name,
                )
            elif barrier.half_used:
                self.report.note(f"CTA {self.block}: left half used at the end: {barrier}")
            self.report.arrivals.setdefault(barrier.base, {}).update(barrier.threads_of)
        self.report.ctas += 1
