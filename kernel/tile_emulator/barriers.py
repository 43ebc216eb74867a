"""mbarriers and named barriers: pending count, transaction bytes, phase, and the clocks they carry
from arrivals to waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .role import Role

CLOCKS = 256  # of a CTA


class Barrier:
    """An mbarrier, or a named barrier (name starts with "named").

    threads_of: threads of each role that arrive together.
    phase is the number of completed phases; count and pending are in threads, outstanding in bytes.
    incoming and released are [2, clocks]: what the arrivals of this phase publish, and what a wait
    acquires (row 0 all accesses, row 1 those that passed a proxy fence).
    """

    def __init__(self, name: str, count: int, issue: Callable, clocks: int = CLOCKS):
        self.name, self.count, self.pending = name, count, count
        self.outstanding = 0
        self.phase = 0
        self.issue = issue
        self.incoming = np.zeros((2, clocks), np.int32)
        self.released = np.zeros((2, clocks), np.int32)
        self.arrivals: list[tuple[str, int]] = []
        self.threads_of: dict[str, int] = {}
        self.loads = 0
        self.observers: list[tuple[Role, int, str]] = []
        self.on_complete: Callable | None = None

    def blocks(self, parity: int) -> bool:
        """Would a wait for the completion of the phase of this parity block?"""
        return self.phase % 2 == parity

    def next_load(self) -> int:
        self.loads += 1
        return self.loads

    def observe(self, role: Role) -> None:
        """A wait saw the last phase complete: the role acquires it.

        Before the next phase completes, every observer must be known to be through, or the parity
        can alias.
        """
        self.observers.append((role, int(role.all[role.reads]), role.where()))
        role.acquire(self.released)

    def arrive(self, role: Role, threads: int, released: np.ndarray) -> None:
        np.maximum(self.incoming, released, out=self.incoming)
        self.arrivals.append((role.name, threads))
        self.threads_of[role.name] = threads
        while threads:
            if self.pending == 0:
                text = (
                    f"{self.name}: arrival beyond the count {self.count} "
                    f"while {self.outstanding} bytes are outstanding"
                )
                self.issue(role, "barrier", text, self.name)
                return
            taken = min(threads, self.pending)
            if taken < threads:
                text = (
                    f"{self.name} (count {self.count}): {threads} threads arrive "
                    f"where {taken} are missing; {threads - taken} count for the next phase"
                )
                self.issue(role, "barrier", text, self.name)
            self.pending -= taken
            threads -= taken
            self.complete_if_done()

    def leave(self, threads: int) -> None:
        """Threads that will not arrive any more: they have ended."""
        self.count -= threads
        self.pending -= threads
        self.complete_if_done()

    def expect(self, size: int) -> None:
        self.outstanding += size

    def complete_bytes(self, size: int, clock: int, time: int) -> None:
        """A TMA load of ``size`` bytes landed; its writes carry (clock, time)."""
        self.outstanding -= size
        self.incoming[0, clock] = max(self.incoming[0, clock], time)
        self.complete_if_done()

    def complete_if_done(self) -> None:
        if self.pending or self.outstanding:
            return
        for role, time, where in self.observers:
            if self.incoming[0, role.reads] < time:
                text = (
                    f"{self.name}: phase {self.phase} can complete before the wait of {role.name} "
                    f"at {where} has seen phase {self.phase - 1}"
                )
                self.issue(role, "lap", text, self.name)
        self.observers = []
        np.maximum(self.released, self.incoming, out=self.released)
        if self.on_complete:
            self.on_complete(self)
        self.phase += 1
        self.pending, self.arrivals, self.loads = self.count, [], 0

    @property
    def base(self) -> str:
        """Name without the index."""
        return self.name.split("[")[0]

    @property
    def half_used(self) -> bool:
        return self.pending != self.count or self.outstanding != 0

    def __str__(self) -> str:
        got = ", ".join(f"{n} of {name}" for name, n in self.arrivals) or "nothing"
        return (
            f"{self.name} (phase {self.phase}, {self.count - self.pending}/{self.count} arrived: "
            f"{got}; {self.outstanding} bytes outstanding)"
        )
