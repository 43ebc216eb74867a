"""A child process that evaluates trusted implementations, so that a crash or a hang stays there.

One child serves many jobs; after a crash, a hang or an error that leaves the GPU unusable the next
job gets a new one.
"""

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from cases import SEED, Case

from .check import Status
from .emulation import AUTO, Emulation, Steps
from .evaluate import NOT_CAPTURED, Entry, Outcome
from .implementations import get
from .timing import Plan, Protocol

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 600.0
# On cores that are shared, with others or among the emulator's processes, threads that spin while
# they wait cost more than they compute.
CPU_ENVIRONMENT = {"OMP_WAIT_POLICY": "passive", "OPENBLAS_NUM_THREADS": "1"}
STEPS_S = 0.1


def child_environment(cpu: bool = False) -> dict[str, str]:
    """The environment of a child: this repository first on its path, installed or not.

    `cpu`: it computes on the CPU; what the user has set stays.
    """
    paths = [str(ROOT), str(ROOT / "kernel"), os.environ.get("PYTHONPATH", "")]
    return {
        **(CPU_ENVIRONMENT if cpu else {}),
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
    }


class Worker:
    """Runs evaluate.compare() in a child process; a context manager that ends the child.

    steps(done, total) is told how far an emulation is.
    """

    def __init__(
        self, timeout_s: float = TIMEOUT_S, steps: Steps = lambda done, total: None
    ) -> None:
        self._timeout_s = timeout_s
        self._steps = steps
        self._process: subprocess.Popen | None = None
        self._unread = b""

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
        process, self._process = self._process, None
        self._unread = b""
        if process is None:
            return
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdin.close()
        process.stdout.close()

    def _ask(self, job: dict, timeout_s: float) -> dict:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "harness.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd=ROOT,
                env=child_environment(job["cpu"]),
                start_new_session=True,
            )
        process = self._process
        try:
            process.stdin.write(json.dumps(job).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass
        deadline = time.monotonic() + timeout_s
        while True:
            line = self._read_line(deadline)
            if line is None:
                self.close()
                return {
                    "status": Status.TIMEOUT.value,
                    "reason": f"no answer within {timeout_s:g} s",
                }
            if not line.endswith(b"\n"):
                code = process.wait()
                self.close()
                return {"status": Status.ERROR.value, "reason": describe_exit(code)}
            answer = json.loads(line)
            if "steps" not in answer:
                break
            self._steps(*answer["steps"])
        if answer.get("spoiled") or answer.get("stale"):
            self.close()
        return answer

    def _read_line(self, deadline: float) -> bytes | None:
        """One line of the child's, what it left behind if it ended, or None when time is up."""
        stream = self._process.stdout
        with selectors.DefaultSelector() as selector:
            selector.register(stream, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    return None
                part = os.read(stream.fileno(), 1 << 20)
                if not part:
                    break
                self._unread += part
        line, newline, self._unread = self._unread.partition(b"\n")
        return line + newline


def describe_exit(code: int) -> str:
    """How a child ended, in words, from its return code."""
    if code < 0:
        return f"the process was ended by signal {-code} ({signal.Signals(-code).name})"
    return f"the process ended with exit code {code} before it was done"


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
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def say(message: dict) -> None:
        print(json.dumps(message), file=answers, flush=True)

    for line in sys.stdin:
        try:
            answer = _answer(json.loads(line), say)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            answer = {"status": Status.ERROR.value, "reason": reason, "spoiled": True}
        say(answer)


if __name__ == "__main__":
    main()
