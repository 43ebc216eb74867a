"""Passes on what a child writes to its standard error, every line marked as the child's."""

import re
import threading
from typing import IO

from .progress import note

# A longer line is passed on in pieces.
LONGEST = 4096
# A process that the child left behind may keep the stream open.
PATIENCE_S = 1.0


class Relay:
    """Reads `stream` (bytes) to its end in a thread and notes its lines behind `prefix`.

    Control characters are spelled out, so that no line can hide its prefix on a terminal.
    """

    def __init__(self, stream: IO[bytes], prefix: str) -> None:
        self._stream, self._prefix = stream, prefix
        self._thread = threading.Thread(target=self._pass_on, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Waits for what the child has written; to be called when it has ended."""
        self._thread.join(PATIENCE_S)

    def _pass_on(self) -> None:
        with self._stream as stream:
            for raw in iter(lambda: stream.readline(LONGEST), b""):
                text = raw.decode("utf-8", "backslashreplace")
                for line in filter(None, re.split(r"[\r\n]+", text)):
                    note(self._prefix + printable(line))


def printable(line: str) -> str:
    """The line with its control characters, other than tabs, spelled out."""
    return "".join(
        mark if mark.isprintable() or mark == "\t" else mark.encode("unicode_escape").decode()
        for mark in line
    )
