"""Runs a subject over cases, isolated: a child for trusted code, one a case for submissions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from cases import SEED, Case

from . import evaluate
from .device import attached_profiler
from .emulation import AUTO, Emulation, Steps
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
    check: what the emulator looks for. progress is told what a submission's judge is at,
    steps(done, total) how far an emulation is.
    """

    device: torch.device
    plans: Sequence[Plan]
    backend: str = AUTO
    timeout_s: float = TIMEOUT_S
    seed: int = SEED
    isolated: bool = True
    check: str | None = None
    progress: Callable[[str], None] = lambda _: None
    steps: Steps = lambda done, total: None
    _worker: Worker = field(init=False)

    def __post_init__(self) -> None:
        self._worker = Worker(self.timeout_s, self.steps)
        self.isolated = self.isolated and attached_profiler() is None

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.close()

    def compare(
        self,
        case: Case,
        entries: Sequence[Entry],
        backend: str | None = None,
        timeout_s: float | None = None,
    ) -> list[Outcome]:
        """Trusted entries on one case, interleaved; entry by entry, plan by plan.

        `backend` and `timeout_s` stand for the session's own.
        """
        if not entries:
            return []
        backend = backend or self.backend
        if self.isolated:
            cpu = self.device.type == "cpu"
            return self._worker.compare(
                case, entries, self.plans, self.seed, backend, cpu, self.check, timeout_s
            )
        emulation = Emulation(self.check, steps=self.steps)
        return evaluate.compare(
            case, entries, self.plans, self.device, self.seed, backend, emulation=emulation
        )

    def grade(
        self,
        case: Case,
        subject: Subject,
        scope: str = CORE,
        beside: Sequence[Entry] = (),
        timeout_s: float | None = None,
    ) -> tuple[list[Outcome], list[Outcome]]:
        """The subject's outcomes and those of the entries `beside` it.

        Trusted subjects are timed in turn with the others, on the subject's backend; a submission
        is judged on its own.
        """
        if subject.submission is None:
            entries = [subject.entry(scope), *beside]
            outcomes = self.compare(case, entries, subject.backend, timeout_s)
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
