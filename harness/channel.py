"""Framed messages between the judge and the child that holds a submission.

A message is one JSON line {"nonce", "kind", "bytes", ...} and that many raw bytes behind it. The
nonce is the judge's; whatever comes without it is not the child's harness speaking.
"""

import json
import os
import select
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

# A reply is spun for before it is slept for, so that the timed host code does not start cold.
SPIN_S = 2e-3
HEADER_LIMIT = 1 << 20


class ChannelError(Exception):
    """The other side cannot be talked to; the message says why."""


class ClosedError(ChannelError):
    """The other side has gone."""


class LateError(ChannelError):
    """The other side did not answer in time."""


class ForgedError(ChannelError):
    """A message that is not of this protocol."""


@dataclass(frozen=True)
class Message:
    """What was received: its kind, its fields and its raw bytes."""

    kind: str
    fields: dict = field(default_factory=dict)
    payload: bytes = b""


class Channel:
    """One end of a pair of pipes. Its system calls are looked up once, when it is made."""

    def __init__(self, read_fd: int, write_fd: int, nonce: str) -> None:
        self._read_fd, self._write_fd, self._nonce = read_fd, write_fd, nonce
        self._read, self._write, self._select = os.read, os.write, select.select
        self._now, self._dumps, self._loads = time.perf_counter, json.dumps, json.loads
        self._pending = bytearray()
        os.set_blocking(read_fd, False)

    def send(self, kind: str, payload: Sequence[bytes | memoryview] = (), **fields: object) -> None:
        """Sends a message; raises ClosedError if nobody reads."""
        size = sum(len(part) for part in payload)
        header = {"nonce": self._nonce, "kind": kind, "bytes": size, **fields}
        try:
            for part in (self._dumps(header).encode() + b"\n", *payload):
                view = memoryview(part)
                while view:
                    view = view[self._write(self._write_fd, view) :]
        except BrokenPipeError:
            raise ClosedError("the other end of the pipe is closed") from None

    def receive(self, timeout_s: float | None = None, limit: int = 0) -> Message:
        """Waits for one message with at most `limit` raw bytes.

        Raises LateError, ClosedError or ForgedError.
        """
        deadline = None if timeout_s is None else self._now() + timeout_s
        while (end := self._pending.find(b"\n")) < 0:
            if len(self._pending) > HEADER_LIMIT:
                raise ForgedError("a header without an end")
            self._pending += self._some(deadline)
        line = self._take(end + 1)
        try:
            fields = self._loads(line)
            nonce, kind, size = fields.pop("nonce"), fields.pop("kind"), fields.pop("bytes")
        except (ValueError, KeyError, AttributeError, TypeError):
            raise ForgedError(f"not a message of this protocol: {line[:80]!r}") from None
        if nonce != self._nonce:
            raise ForgedError(f"a message {kind!r} without the judge's nonce")
        if not isinstance(size, int) or not 0 <= size <= limit:
            raise ForgedError(f"a message {kind!r} with {size!r} bytes, at most {limit} expected")
        while len(self._pending) < size:
            self._pending += self._some(deadline)
        return Message(kind, fields, self._take(size))

    def _take(self, count: int) -> bytes:
        taken = bytes(self._pending[:count])
        del self._pending[:count]
        return taken

    def _some(self, deadline: float | None) -> bytes:
        """What is there to read, at least one byte."""
        spin_until = self._now() + SPIN_S
        while True:
            try:
                part = self._read(self._read_fd, 1 << 20)
            except BlockingIOError:
                now = self._now()
                if deadline is not None and now > deadline:
                    raise LateError("no message in time") from None
                if now > spin_until:
                    wait = None if deadline is None else deadline - now
                    self._select([self._read_fd], [], [], wait)
                continue
            if not part:
                raise ClosedError("the other end of the pipe is closed")
            return part
