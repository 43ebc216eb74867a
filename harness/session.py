"""Runs a subject over cases, isolated: a child for trusted code, one a case for submissions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from cases import SEED, Case

from . import evaluate
from .device import attached_profiler
from .evaluate import Entry, Outcome
from .implementations import CORE
from .judge import judge
from .selection import Subject
from .timing import Plan
from .worker import TIMEOUT_S, Worker


@dataclass
class Session:
    """How cases are run: device, plans, isolation. A context manager that ends its children.

    In this process, without a child, where a profiler is attached or `isolated` is False.
    """

    device: torch.device
    plans: Sequence[Plan]
    backend: str = "auto"
    timeout_s: float = TIMEOUT_S
    seed: int = SEED
    isolated: bool = True
    progress: Callable[[str], None] = lambda _: None
    _worker: Worker = field(init=False)

    def __post_init__(self) -> None:
        self._worker = Worker(self.timeout_s)
        self.isolated = self.isolated and attached_profiler() is None

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.close()

    def compare(self, case: Case, entries: Sequence[Entry]) -> list[Outcome]:
        """Trusted entries on one case, interleaved; entry by entry, plan by plan."""
        if not entries:
            return []
        if self.isolated:
            return self._worker.compare(
                case, entries, self.plans, self.seed, self.backend, self.device.type == "cpu"
            )
        return evaluate.compare(case, entries, self.plans, self.device, self.seed, self.backend)

    def grade(
        self, case: Case, subject: Subject, scope: str = CORE, beside: Sequence[Entry] = ()
    ) -> tuple[list[Outcome], list[Outcome]]:
        """The subject's outcomes and those of the entries `beside` it.

        Trusted subjects are timed in turn with the others; a submission is judged on its own.
        """
        if subject.submission is None:
            outcomes = self.compare(case, [subject.entry(scope), *beside])
            count = len(self.plans)
            return outcomes[:count], outcomes[count:]
        judged = [
            judge(
                subject.submission,
                case,
                plan,
                self.device,
                self.backend,
                self.timeout_s,
                lambda stage: self.progress(f"{case.name}: {stage}"),
            )
            for plan in self.plans
        ]
        return judged, self.compare(case, beside)
