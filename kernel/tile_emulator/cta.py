"""One CTA: its roles, barriers and in-flight loads, run to the end under a schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .barriers import Barrier
from .detector import Detector
from .errors import DeadlockError, EmulatorError, UnsupportedOperation
from .report import KINDS, Issue, Report
from .role import Role
from .scheduler import Schedule


@dataclass(frozen=True)
class Options:
    """checks: groups of the check= option.

    auto_fence models TileLang's InjectFenceProxy, auto_sync its ThreadSync.
    timeline: trace the first CTA.
    """

    checks: frozenset[str]
    auto_fence: bool = True
    auto_sync: bool = True
    timeline: bool = False

    @property
    def tracking(self) -> bool:
        return bool(self.checks & {"race", "init"})


class Load(NamedTuple):
    """A TMA load: its stamp, and its text for messages."""

    clock: int
    time: int
    what: str


class Cta:
    """Run-time state shared by the roles of one thread block."""

    def __init__(
        self, number: int, block: tuple[int, ...], report: Report, options: Options, trace=None
    ):
        self.number, self.block, self.report, self.options = number, block, report, options
        self.detector = Detector(
            self.issue, "race" in options.checks, "init" in options.checks, options.auto_sync
        )
        self.barriers: dict[int, list[Barrier]] = {}
        self.named: dict[int | str, Barrier] = {}
        self.in_flight: list[Callable] = []
        self.loads: list[Load] = []
        self.trace = trace
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
        barrier = Barrier(name, count, self.issue)
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

    def run(self, programs: Sequence[Iterator], schedule: Schedule) -> None:
        """Raises DeadlockError when nothing can go on."""
        roles = self.roles
        live = list(range(len(roles)))
        engine = len(roles)
        while live:
            runnable = [k for k in live if roles[k].wait is None or not roles[k].wait.blocked]
            if self.in_flight:
                runnable.append(engine)
            if not runnable:
                self.report.ctas += 1
                raise DeadlockError(self.deadlock([roles[k] for k in live]), self.report)
            unit = schedule.next_unit(runnable)
            self.report.steps += 1
            if unit == engine:
                self.in_flight.pop(schedule.next_load(len(self.in_flight)))()
                continue
            try:
                next(programs[unit])
            except StopIteration:
                live.remove(unit)
            except EmulatorError:
                raise
            except Exception as error:
                role = roles[unit]
                what = f"{type(error).__name__}: {error}"
                text = f"{role.name} at {role.where()} cannot be executed: {what}"
                raise UnsupportedOperation(text, self.report, role.where()) from error
        self.finish(roles)

    def finish(self, roles: Sequence[Role]) -> None:
        """What must not be left open when the CTA ends."""
        while self.in_flight:
            self.in_flight.pop(0)()
        for role in roles:
            if role.groups:
                self.issue(role, "wgmma", f"ends with {len(role.groups)} outstanding wgmma", "end")
            if role.stores:
                self.issue(
                    role, "async", f"ends with {len(role.stores)} TMA stores not waited for", "end"
                )
        for load in self.loads:
            if not any(role.all[load.clock] >= load.time for role in roles):
                self.issue(
                    None, "async", f"nobody waits for the TMA load of {load.what}", load.what
                )
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

    def deadlock(self, blocked: Sequence[Role]) -> str:
        lines = [f"CTA {self.block}: deadlock, {len(blocked)} role(s) blocked:"]
        for role in blocked:
            wait = role.wait
            what = (
                f"parity {wait.parity}"
                if wait.parity is not None
                else f"the end of phase {wait.phase}"
            )
            barrier = f"{wait.barrier}; {wait.barrier.pending} missing"
            lines.append(f"  {role.name} at {role.where()} waits for {what} of {barrier}")
        text = "\n".join(lines)
        first = blocked[0]
        self.report.add(
            Issue("deadlock", self.block, first.name, first.where(), text), ("deadlock",)
        )
        return text
