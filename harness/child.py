"""A child process that answers JSON lines, and may crash or hang without harm to its parent."""

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# On cores that are shared, with others or among the emulator's processes, threads that spin while
# they wait cost more than they compute.
CPU_ENVIRONMENT = {"OMP_WAIT_POLICY": "passive", "OPENBLAS_NUM_THREADS": "1"}


class ChildError(Exception):
    """A child that gave no answer; the message says why. It has been ended."""


class LateError(ChildError):
    """It did not answer in time."""


class EndedError(ChildError):
    """It ended before it answered."""


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


class Child:
    """Runs `python -m module`, started by the first message; its standard error is this one's."""

    def __init__(self, module: str, cpu: bool = False) -> None:
        self._module, self._cpu = module, cpu
        self._process: subprocess.Popen | None = None
        self._unread = b""

    def send(self, message: dict) -> None:
        """Hands over a message, to a new process where there is none."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self._module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd=ROOT,
                env=child_environment(self._cpu),
                start_new_session=True,
            )
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # receive() says how it ended

    def receive(self, timeout_s: float) -> dict:
        """The next message of the child's. Raises LateError or EndedError, and ends it then."""
        line = self._read_line(time.monotonic() + timeout_s)
        if line is None:
            self.close()
            raise LateError(f"no answer within {timeout_s:g} s")
        if not line.endswith(b"\n"):
            code = self._process.wait()
            self.close()
            raise EndedError(describe_exit(code))
        return json.loads(line)

    def close(self) -> None:
        """Ends the process, if there is one."""
        process, self._process = self._process, None
        self._unread = b""
        if process is None:
            return
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdin.close()
        process.stdout.close()

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


def conversation() -> tuple[Iterator[dict], Callable[[dict], None]]:
    """In the child: the messages as they come, and what sends one back.

    Whatever else is printed goes to standard error.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def say(message: dict) -> None:
        print(json.dumps(message), file=answers, flush=True)

    return (json.loads(line) for line in sys.stdin), say
