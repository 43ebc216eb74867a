"""What a run found: issues (each once, with a count), roles, coverage of the outputs."""

from __future__ import annotations

from dataclasses import dataclass, field

from .errors import BarrierError, BoundsError, DeadlockError, InitError, KernelFault, RaceError

# kind of issue -> (group of the check= option, error raised for it)
KINDS: dict[str, tuple[str, type[KernelFault]]] = {
    "deadlock": ("deadlock", DeadlockError),
    "barrier": ("deadlock", BarrierError),
    "race": ("race", RaceError),
    "overlap": ("race", RaceError),
    "fence": ("race", RaceError),
    "sync": ("race", RaceError),
    "wgmma": ("race", RaceError),
    "async": ("race", RaceError),
    "exit": ("race", RaceError),
    "lap": ("race", RaceError),
    "bounds": ("bounds", BoundsError),
    "init": ("init", InitError),
}
GROUPS = ("race", "deadlock", "bounds", "init")


def parse_checks(check: str | None) -> frozenset[str]:
    """Groups named by a comma-separated string; None or "" is none of them.

    Raises ValueError for an unknown group.
    """
    names = frozenset(x.strip() for x in (check or "").split(",") if x.strip())
    if names - set(GROUPS):
        raise ValueError(f"check={check!r}: allowed are {', '.join(GROUPS)}, joined by commas")
    return names


@dataclass
class Issue:
    """One finding.  kind is a key of KINDS; subject the buffer or barrier; count how often it was
    met.
    """

    kind: str
    cta: tuple[int, ...]
    role: str
    where: str
    text: str
    subject: str = ""
    count: int = 1

    def __str__(self) -> str:
        times = f" (x{self.count})" if self.count > 1 else ""
        return f"[{self.kind}] CTA {self.cta}: {self.role} at {self.where}: {self.text}{times}"


@dataclass
class Report:
    """Result of emulate().  ok is True when nothing was found.

    notes are oddities that are no fault; arrivals tells how many threads of which role arrive at a
    barrier together; written is the fraction of each output's elements that were stored; timeline
    (timeline.Timeline) is there when asked for.
    """

    schedule: str = ""
    roles: tuple[str, ...] = ()
    ctas: int = 0
    steps: int = 0
    issues: list[Issue] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    written: dict[str, float] = field(default_factory=dict)
    arrivals: dict[str, dict[str, int]] = field(default_factory=dict)
    timeline: object | None = None
    _seen: dict[tuple, Issue] = field(default_factory=dict, repr=False)

    def add(self, issue: Issue, key: tuple = ()) -> None:
        """Record an issue; those with the same kind, role, line and key are counted once."""
        full = (issue.kind, issue.role, issue.where.split(" ")[0], *key)
        known = self._seen.get(full)
        if known is None:
            self._seen[full] = issue
            self.issues.append(issue)
        else:
            known.count += issue.count

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def merge(self, other: Report) -> None:
        """Add the findings of another run over other CTAs of the same launch."""
        self.roles = self.roles or other.roles
        self.ctas += other.ctas
        self.steps += other.steps
        for key, issue in other._seen.items():
            self.add(issue, key[3:])
        for barrier, threads in other.arrivals.items():
            self.arrivals.setdefault(barrier, {}).update(threads)
        for text in other.notes:
            self.note(text)
        self.timeline = self.timeline or other.timeline

    @property
    def ok(self) -> bool:
        return not self.issues

    @property
    def kinds(self) -> frozenset[str]:
        return frozenset(issue.kind for issue in self.issues)

    def error(self) -> KernelFault | None:
        """The typed error for what was found (a deadlock first), or None."""
        if self.ok:
            return None
        order = list(KINDS)
        first = min(self.issues, key=lambda issue: order.index(issue.kind))
        return KINDS[first.kind][1](str(self), self)

    def __str__(self) -> str:
        head = f"{self.ctas} CTA, schedule {self.schedule}, {self.steps} steps: "
        if self.ok:
            return head + "no issue"
        return head + f"{len(self.issues)} issue(s)\n" + "\n".join(map(str, self.issues))
