"""A child process that evaluates trusted implementations, so that a crash or a hang stays there.

One child serves many jobs; after a crash, a hang or an error that leaves the GPU unusable the next
job gets a new one.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

from cases import SEED, Case

from .check import Status
from .child import Child, EndedError, LateError, conversation
from .emulation import AUTO, Emulation, Steps
from .evaluate import NOT_CAPTURED, Entry, Outcome
from .implementations import get
from .timing import Plan, Protocol

TIMEOUT_S = 600.0
STEPS_S = 0.1


class Worker:
    """Runs evaluate.compare() in a child process; a context manager that ends the child.

    steps(done, total) is told how far an emulation is.
    """

    def __init__(
        self, timeout_s: float = TIMEOUT_S, steps: Steps = lambda done, total: None
    ) -> None:
        self._timeout_s = timeout_s
        self._steps = steps
        self._child: Child | None = None

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def compare(
        self,
        case: Case,
        entries: Sequence[Entry],
        plans: Sequence[Plan],
        seed: int = SEED,
        backend: str = AUTO,
        cpu: bool = False,
        check: str | None = None,
        timeout_s: float | None = None,
    ) -> list[Outcome]:
        """As evaluate.compare(), but always returns: TIMEOUT or ERROR outcomes say what happened.

        `check` is the emulator's; `timeout_s` stands for the worker's own.

        After a crash or an unusable GPU with several entries each is run again on its own, so that
        it is charged to the one that caused it.
        """
        job = {
            "case": asdict(case),
            "entries": [asdict(entry) for entry in entries],
            "plans": [{**asdict(plan), "protocol": plan.protocol.value} for plan in plans],
            "seed": seed,
            "backend": backend,
            "cpu": cpu,
            "check": check,
        }
        answer = self._ask(job, self._timeout_s if timeout_s is None else timeout_s)
        spoiled = answer.get("spoiled") and len(entries) > 1
        if "outcomes" in answer and not spoiled:
            return [Outcome.from_json(outcome) for outcome in answer["outcomes"]]
        if len(entries) > 1:
            alone = [
                self.compare(case, [entry], plans, seed, backend, cpu, check, timeout_s)
                for entry in entries
            ]
            return [outcome for outcomes in alone for outcome in outcomes]
        status, reason = Status(answer["status"]), answer["reason"]
        return [_failed(case, entries[0], backend, plan, status, reason) for plan in plans]

    def close(self) -> None:
        """Ends the child, if there is one."""
        child, self._child = self._child, None
        if child is not None:
            child.close()

    def _ask(self, job: dict, timeout_s: float) -> dict:
        if self._child is None:
            self._child = Child("harness.worker", job["cpu"])
        self._child.send(job)
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                answer = self._child.receive(max(0.0, deadline - time.monotonic()))
            except LateError:
                self.close()
                reason = f"no answer within {timeout_s:g} s"
                return {"status": Status.TIMEOUT.value, "reason": reason}
            except EndedError as error:
                self.close()
                return {"status": Status.ERROR.value, "reason": str(error)}
            if "steps" not in answer:
                break
            self._steps(*answer["steps"])
        if answer.get("spoiled") or answer.get("stale"):
            self.close()
        return answer


def _failed(
    case: Case, entry: Entry, backend: str, plan: Plan, status: Status, reason: str
) -> Outcome:
    implementation = get(entry.implementation, backend, entry.version)
    return Outcome(
        case.name,
        implementation.name,
        implementation.version,
        entry.scope,
        plan.protocol.value,
        status,
        reason,
        backend=backend,
    )


def _answer(job: dict, say: Callable[[dict], None]) -> dict:
    import torch

    from .device import pick_device
    from .evaluate import compare

    device = torch.device("cpu") if job["cpu"] else pick_device()
    outcomes = compare(
        Case(**job["case"]),
        [Entry(**entry) for entry in job["entries"]],
        [Plan(**{**plan, "protocol": Protocol(plan["protocol"])}) for plan in job["plans"]],
        device,
        job["seed"],
        job["backend"],
        emulation=Emulation(job["check"], steps=_seldom(say)),
    )
    # A capture that failed may leave allocator and generator state behind; the results are good.
    stale = any(outcome.reason.startswith(NOT_CAPTURED) for outcome in outcomes)
    return {
        "outcomes": [outcome.to_json() for outcome in outcomes],
        "spoiled": not _gpu_answers(device),
        "stale": stale,
    }


def _seldom(say: Callable[[dict], None]) -> Steps:
    """Passes on what a reader of the steps can follow."""
    last = 0.0

    def steps(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= STEPS_S or done == total:
            last = now
            say({"steps": [done, total]})

    return steps


def _gpu_answers(device) -> bool:
    """False after a CUDA error that leaves the process without a usable device."""
    import torch

    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
        return True
    except RuntimeError:
        return False


def main() -> None:
    """Answers jobs, one JSON line each, until standard input ends."""
    jobs, say = conversation()
    for job in jobs:
        try:
            answer = _answer(job, say)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            answer = {"status": Status.ERROR.value, "reason": reason, "spoiled": True}
        say(answer)


if __name__ == "__main__":
    main()
