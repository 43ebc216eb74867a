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
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from cases import SEED, Case

from .check import Status
from .evaluate import NOT_CAPTURED, Entry, Outcome
from .implementations import get
from .timing import Plan, Protocol

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 600.0


def child_environment() -> dict[str, str]:
    """The environment of a child: this repository first on its path, installed or not."""
    paths = [str(ROOT), str(ROOT / "kernel"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


class Worker:
    """Runs evaluate.compare() in a child process; a context manager that ends the child."""

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._process: subprocess.Popen | None = None

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
        backend: str = "auto",
        cpu: bool = False,
    ) -> list[Outcome]:
        """As evaluate.compare(), but always returns: TIMEOUT or ERROR outcomes say what happened.

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
        }
        answer = self._ask(job)
        spoiled = answer.get("spoiled") and len(entries) > 1
        if "outcomes" in answer and not spoiled:
            return [Outcome.from_json(outcome) for outcome in answer["outcomes"]]
        if len(entries) > 1:
            alone = [self.compare(case, [e], plans, seed, backend, cpu) for e in entries]
            return [outcome for outcomes in alone for outcome in outcomes]
        status, reason = Status(answer["status"]), answer["reason"]
        return [_failed(case, entries[0], backend, plan, status, reason) for plan in plans]

    def close(self) -> None:
        """Ends the child, if there is one."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdin.close()
        process.stdout.close()

    def _ask(self, job: dict) -> dict:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "harness.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd=ROOT,
                env=child_environment(),
                start_new_session=True,
            )
        process = self._process
        try:
            process.stdin.write(json.dumps(job).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass
        line = self._read_line(time.monotonic() + self._timeout_s)
        if line is None:
            self.close()
            return {
                "status": Status.TIMEOUT.value,
                "reason": f"no answer within {self._timeout_s:g} s",
            }
        if not line.endswith(b"\n"):
            code = process.wait()
            self.close()
            return {"status": Status.ERROR.value, "reason": describe_exit(code)}
        answer = json.loads(line)
        if answer.get("spoiled") or answer.get("stale"):
            self.close()
        return answer

    def _read_line(self, deadline: float) -> bytes | None:
        """One line of the child's, what it left behind if it ended, or None when time is up."""
        stream, line = self._process.stdout, b""
        with selectors.DefaultSelector() as selector:
            selector.register(stream, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    return None
                part = os.read(stream.fileno(), 1 << 20)
                if not part:
                    return line
                line += part
        return line


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
    )


def _answer(job: dict) -> dict:
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
    )
    # A capture that failed may leave allocator and generator state behind; the results are good.
    stale = any(outcome.reason.startswith(NOT_CAPTURED) for outcome in outcomes)
    return {
        "outcomes": [outcome.to_json() for outcome in outcomes],
        "spoiled": not _gpu_answers(device),
        "stale": stale,
    }


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
    for line in sys.stdin:
        try:
            answer = _answer(json.loads(line))
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            answer = {"status": Status.ERROR.value, "reason": reason, "spoiled": True}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
