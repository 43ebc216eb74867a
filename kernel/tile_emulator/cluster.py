"""A cluster of CTAs: what they share, run to the end under one schedule.

A launch without cluster operations is made of clusters of one CTA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from .barriers import CLOCKS, Barrier
from .cta import Cta, Options
from .detector import Detector
from .errors import DeadlockError, EmulatorError, UnsupportedOperation
from .report import Issue, Report
from .role import Role
from .scheduler import Schedule
from .tir import is_op, kind, op_name, visit

OPERATIONS = frozenset({"block_rank_in_cluster", "cluster_sync", "ptx_arrive_cluster_barrier"})
BARRIER_SCOPE = "shared.cluster_barrier"


class Cluster:
    """CTAs of one cluster by rank, with one detector, one list of loads in flight, one barrier of
    all their threads.  meets_at_start: no CTA begins before all have initialised their barriers.
    """

    def __init__(
        self, size: int, report: Report, options: Options, trace=None, meets_at_start: bool = False
    ):
        self.report, self.options, self.trace = report, options, trace
        self.meets_at_start = meets_at_start
        self.detector = Detector(
            lambda role, *finding: role.cta.issue(role, *finding),
            "race" in options.checks,
            "init" in options.checks,
            options.auto_sync,
            CLOCKS * size,
        )
        self.in_flight: list[Callable] = []
        self.ctas: list[Cta] = []
        self.meeting: Barrier | None = None

    def add(self, number: int, block: tuple[int, ...]) -> Cta:
        """The CTA of the next rank."""
        self.ctas.append(Cta(self, len(self.ctas), number, block))
        return self.ctas[-1]

    @property
    def roles(self) -> list[Role]:
        return [role for cta in self.ctas for role in cta.roles]

    def run(self, programs: Sequence[Iterator], schedule: Schedule) -> None:
        """Raises DeadlockError when nothing can go on."""
        roles = self.roles
        self.prepare(roles)
        live = list(range(len(roles)))
        engine = len(roles)
        while live:
            runnable = [k for k in live if roles[k].wait is None or not roles[k].wait.blocked]
            if self.in_flight:
                runnable.append(engine)
            if not runnable:
                self.report.ctas += len(self.ctas)
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
                self.meeting.leave(roles[unit].width)
            except EmulatorError:
                raise
            except Exception as error:
                role = roles[unit]
                what = f"{type(error).__name__}: {error}"
                text = f"{role.name} at {role.where()} cannot be executed: {what}"
                raise UnsupportedOperation(text, self.report, role.where()) from error
        while self.in_flight:
            self.in_flight.pop(0)()
        for cta in self.ctas:
            cta.finish()

    def prepare(self, roles: Sequence[Role]) -> None:
        """The barrier that all threads meet at, and which CTAs are known to have begun."""
        threads = sum(role.width for role in roles)
        self.meeting = self.ctas[0].barrier("cluster_sync", threads)
        for role in roles:
            for cta in self.ctas if self.meets_at_start else (role.cta,):
                role.all[cta.begun] = 1

    def deadlock(self, blocked: Sequence[Role]) -> str:
        where = ", ".join(str(cta.block) for cta in self.ctas)
        lines = [f"CTA {where}: deadlock, {len(blocked)} role(s) blocked:"]
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
            Issue("deadlock", first.cta.block, first.name, first.where(), text), ("deadlock",)
        )
        return text


def uses_cluster(func) -> bool:
    """Does a kernel have an operation that needs the other CTAs of its cluster?"""
    found = []

    def look(node):
        if kind(node) != "Call" or not is_op(node):
            return
        notes = dict(getattr(node, "annotations", None) or {})
        scope = notes["barrier"].buffer.scope() if "barrier" in notes else ""
        if (
            op_name(node) in OPERATIONS
            or "dst_block" in notes
            or "cluster_mask" in notes
            or (op_name(node) == "tma_copy" and str(scope) == BARRIER_SCOPE)
        ):
            found.append(node)

    visit(func.body, look)
    return bool(found)


def group_blocks(blocks: Sequence[tuple[int, ...]], dims: Sequence[int]) -> list[tuple[int, ...]]:
    """Numbers of the CTAs of each cluster, by rank: neighbours, x first."""
    clusters: dict[tuple, list[int]] = {}
    for number, block in enumerate(blocks):
        home = tuple(b // n for b, n in zip(block, dims, strict=False))
        clusters.setdefault(home, []).append(number)
    return [tuple(sorted(c, key=lambda n: blocks[n][::-1])) for c in clusters.values()]
