"""When each role does what, in abstract cost units, and which chain of events takes longest.

The costs are ratios, not cycles: matrix products at 2048 multiply-adds a unit on one tensor pipe,
element-wise work by elements a thread, loads by latency and bytes. Times follow from the kernel's
own dependences (program order, barriers, the tensor pipe), not from the order of emulation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .barriers import Barrier
    from .regions import Region
    from .role import Role

MACS_PER_UNIT = 2048
UNITS_PER_ELEMENT = 2  # of a thread
OPERATION_UNITS = 20
ISSUE_UNITS = 10
BARRIER_UNITS = 20
LOAD_LATENCY = 500
LOAD_BYTES_PER_UNIT = 64

KINDS = ("load", "gemm", "work", "copy", "store", "wait")


@dataclass
class Event:
    """A bar: role's row, kind of KINDS, [start, end) in units.

    cause is the number of the event that let it start; critical marks the longest chain.
    """

    role: str
    kind: str
    start: float
    end: float
    label: str
    where: str
    cause: int | None = None
    critical: bool = False

    @property
    def length(self) -> float:
        return self.end - self.start


@dataclass
class Timeline:
    """Events of one CTA, or of the CTAs of its cluster."""

    block: tuple[int, ...]
    roles: tuple[str, ...]
    events: list[Event] = field(default_factory=list)

    @property
    def end(self) -> float:
        return max((event.end for event in self.events), default=0.0)

    def mark_critical(self) -> None:
        """Mark the chain of events that ends last."""
        for event in self.events:
            event.critical = False
        number = max(range(len(self.events)), key=lambda k: self.events[k].end, default=None)
        while number is not None:
            self.events[number].critical = True
            number = self.events[number].cause

    def share(self, role: str, kind: str) -> float:
        """Part of the whole time that a role spends on a kind."""
        spent = sum(e.length for e in self.events if e.role == role and e.kind == kind)
        return spent / self.end if self.end else 0.0

    def critical_shares(self) -> dict[str, float]:
        """Parts of the critical path by kind, the largest first."""
        total = sum(e.length for e in self.events if e.critical) or 1.0
        shares = {
            kind: sum(e.length for e in self.events if e.critical and e.kind == kind) / total
            for kind in KINDS
        }
        return dict(sorted(shares.items(), key=lambda item: -item[1]))


@dataclass(frozen=True)
class Moment:
    """A time and the event that ends then."""

    time: float = 0.0
    event: int | None = None


def later(a: Moment, b: Moment) -> Moment:
    return b if b.time > a.time else a


class Trace:
    """Collects the events of a CTA, and of those of its cluster, while they run."""

    def __init__(self, block: tuple[int, ...], roles: Sequence[str]):
        self.timeline = Timeline(block, tuple(roles))
        self.now = {role: Moment() for role in roles}
        self.tensor_pipe: dict[int, Moment] = defaultdict(Moment)
        self.load_engine: dict[int, Moment] = defaultdict(Moment)
        self.groups: dict[str, list[Moment]] = {role: [] for role in roles}
        self.arrived_at: dict[int, Moment] = {}
        self.completed: dict[tuple[int, int], Moment] = {}

    def add(self, role: Role, kind: str, begin: Moment, units: float, label: str) -> Moment:
        event = Event(
            role.name, kind, begin.time, begin.time + units, label, role.where(), begin.event
        )
        self.timeline.events.append(event)
        return Moment(event.end, len(self.timeline.events) - 1)

    def busy(self, role: Role, kind: str, units: float, label: str) -> None:
        """The role itself works for some units."""
        self.now[role.name] = self.add(role, kind, self.now[role.name], units, label)

    # ---- what operations report ----
    def elementwise(self, role: Role, extents: Sequence[int]) -> None:
        units = OPERATION_UNITS + UNITS_PER_ELEMENT * prod(extents) / role.width
        share = role.active_count / role.width  # warps that take other branches work meanwhile
        self.busy(role, "work", units * share, "x".join(map(str, extents)))

    def thread_code(self, role: Role) -> None:
        """One statement of thread-level code; consecutive ones make one bar."""
        last = self.now[role.name].event
        event = self.timeline.events[last] if last is not None else None
        if event and event.role == role.name and event.label == "threads":
            event.end += UNITS_PER_ELEMENT
            self.now[role.name] = Moment(event.end, last)
        else:
            self.busy(role, "work", UNITS_PER_ELEMENT, "threads")

    def copy(self, role: Role, source: Region, target: Region) -> None:
        units = OPERATION_UNITS + UNITS_PER_ELEMENT * prod(target.extent) / role.width
        kind = "store" if target.tile.is_global else "load" if source.tile.is_global else "copy"
        self.busy(role, kind, units, target.tile.name)

    def store(self, role: Role, target: Region) -> None:
        self.busy(role, "store", ISSUE_UNITS, target.tile.name)

    def load(self, role: Role, target: Region) -> Moment:
        """A TMA load; the moment it lands."""
        begin = later(self.now[role.name], self.load_engine[role.cta.rank])
        self.now[role.name] = Moment(self.now[role.name].time + ISSUE_UNITS, begin.event)
        units = target.bytes / LOAD_BYTES_PER_UNIT
        end = self.add(role, "load", begin, units + LOAD_LATENCY, target.tile.name)
        self.load_engine[role.cta.rank] = Moment(begin.time + units, end.event)
        return end

    def landed(self, barrier: Barrier, moment: Moment) -> None:
        known = self.arrived_at.get(id(barrier), Moment())
        self.arrived_at[id(barrier)] = later(known, moment)

    def gemm(self, role: Role, macs: int, is_wgmma: bool, label: str) -> None:
        units = macs / MACS_PER_UNIT
        begin = later(self.now[role.name], self.tensor_pipe[role.cta.rank])
        end = self.add(role, "gemm", begin, units, label)
        self.tensor_pipe[role.cta.rank] = end
        if is_wgmma:
            self.groups[role.name].append(end)
            issued = self.now[role.name]
            self.now[role.name] = Moment(issued.time + ISSUE_UNITS, issued.event)
        else:
            self.now[role.name] = end

    def wait_groups(self, role: Role, left: int) -> None:
        groups = self.groups[role.name]
        cut = max(len(groups) - left, 0)
        for end in groups[:cut]:
            self.now[role.name] = later(self.now[role.name], end)
        self.groups[role.name] = groups[cut:]

    def wait_stores(self, role: Role, left: int) -> None:
        self.busy(role, "store", BARRIER_UNITS, "store wait")

    def arrived(self, role: Role, barrier: Barrier) -> None:
        known = self.arrived_at.get(id(barrier), Moment())
        self.arrived_at[id(barrier)] = later(known, self.now[role.name])

    def completed_phase(self, barrier: Barrier) -> None:
        moment = self.arrived_at.pop(id(barrier), Moment())
        self.completed[id(barrier), barrier.phase] = moment

    def waited(self, role: Role, barrier: Barrier) -> None:
        """A wait ended; it is a bar only where the role came before the phase was complete."""
        mine = self.now[role.name]
        ready = self.completed.get((id(barrier), barrier.phase - 1), Moment())
        if ready.time > mine.time:
            wait = Event(
                role.name, "wait", mine.time, ready.time, barrier.name, role.where(), mine.event
            )
            self.timeline.events.append(wait)
        after = later(mine, ready)
        self.now[role.name] = Moment(after.time + BARRIER_UNITS, after.event)

    def finish(self) -> Timeline:
        self.timeline.mark_critical()
        return self.timeline
