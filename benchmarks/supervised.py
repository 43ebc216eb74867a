"""A benchmark's worker: a process that says what it measured line by line, and may hang or die."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

MARK = "@"


def say(**event: object) -> None:
    """Report an event to the supervising process."""
    print(MARK + json.dumps(event), flush=True)


def supervise(
    script: Path, arguments: Sequence[str], timeout: float, heard: Callable[[dict], None]
) -> str | None:
    """Run `python script arguments`, pass on each event as it comes, and print everything else.

    timeout: seconds of silence after which the worker is killed. Returns why it ended badly, None
    where it did not.
    """
    process = subprocess.Popen(
        [sys.executable, str(script), *arguments], stdout=subprocess.PIPE, text=True
    )
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    try:
        while (line := lines.get(timeout=timeout)) is not None:
            if line.startswith(MARK):
                heard(json.loads(line[len(MARK) :]))
            else:
                print(line, end="", flush=True)
        status = process.wait(timeout=timeout)
    except (queue.Empty, subprocess.TimeoutExpired):
        return f"nothing for {timeout:.0f} s"
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    return f"exit status {status}" if status else None
