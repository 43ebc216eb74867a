"""The judge's half that shares a process with a submission: it obeys, measures and hands over.

It gives no verdict. On the judge's word it draws inputs, imports the submission, rewrites the
input buffers, makes one timed call, keeps copies of outputs and sends them.

Commands: load, refresh, capture, go, keep, send, inspect. Each is answered by one message.
"""

import contextlib
import gc
import importlib.util
import os
import sys
import time
import traceback
from pathlib import Path

import torch
from torch import Tensor

from cases import Case, make_inputs

from .channel import Channel, ClosedError, Message
from .check import (
    check_kinds,
    check_unmodified,
    expected_layout,
    poison,
    poison_pool,
)
from .guard import Guard, ThreadWatch
from .problem import Prepared, prepare_inputs
from .rotation import draw_signs, empty_like, write_flipped
from .timing import NotCapturableError, Protocol, capture, make_timer, profiled

ENTRY = "gdn_prefill_forward"
ENTRY_MODULE = "submission"


class Session:
    """One submission on one case: input sets, live buffers, the entry point, kept outputs."""

    def __init__(self, job: dict, channel: Channel) -> None:
        self._channel = channel
        self._case = Case(**job["case"])
        self._device = torch.device(job["device"])
        self._path = Path(job["submission"])
        self._protocol = Protocol(job["protocol"])
        self._sets = [
            prepare_inputs(make_inputs(self._case, self._device, seed), job["backend"])
            for seed in job["seeds"]
        ]
        self._buffers = {
            "usual": empty_like(self._sets[0]),
            "moved": empty_like(self._sets[0]),
        }
        # One call for each that the parent counts.
        self._timer = make_timer(self._device, self._protocol, lead_replays=0)
        self._live = self._buffers["usual"]
        self._entry = lambda *_: None
        self._replay = None
        self._result: object = None
        self._written: tuple[int, int] = (0, 0)
        self._kept: dict[str, tuple[Tensor, ...]] = {}
        self._guard: Guard | None = None
        self._threads: ThreadWatch | None = None
        self._now = time.perf_counter_ns

    def serve(self) -> None:
        """Answers commands until the judge closes its end."""
        self._channel.send("prepared")
        profiling = contextlib.ExitStack()
        while True:
            message = self._channel.receive()
            if message.kind == "range":
                profiling.enter_context(profiled(self._device))
                self._channel.send("ranged")
                continue
            if message.kind == "end":
                profiling.close()
                self._channel.send("ended")
                return
            getattr(self, f"_on_{message.kind}")(message)

    def _on_load(self, _: Message) -> None:
        self._threads = ThreadWatch()
        self._guard = Guard(self._timer)
        try:
            self._entry = _import_entry(self._path)
        except BaseException as error:
            self._channel.send("failed", reason=describe(error, self._path))
            return
        self._channel.send("loaded")

    def _on_refresh(self, message: Message) -> None:
        """New contents: set and signs as the judge says; outputs and free memory poisoned."""
        self._live = self._buffers[message.fields["where"]]
        poison(self._result)
        poison_pool(self._case, self._device)
        if message.fields["write"]:
            self._written = (message.fields["set"], message.fields["seed"])
            self._write(self._live)
        self._timer.synchronize()
        self._channel.send("ready")

    def _write(self, target: Prepared) -> None:
        index, seed = self._written
        write_flipped(self._sets[index], draw_signs(self._case, seed, self._device), target)

    def _on_capture(self, _: Message) -> None:
        try:
            self._replay = capture(lambda: self._entry(*self._live.arguments()), self._device)
        except NotCapturableError as error:
            self._channel.send("failed", reason=f"no CUDA graph: {error}")
            return
        self._channel.send("captured")

    def _on_go(self, message: Message) -> None:
        """One timed call. The time after it until the whole device is idle is measured too."""
        if self._replay is not None and message.fields["replay"]:
            call = self._replay
        else:
            arguments = self._live.arguments()
            call = lambda: self._entry(*arguments)  # noqa: E731 - built outside the timed call
        before = self._threads.extra() if self._threads else frozenset()
        self._result = None
        try:
            milliseconds, self._result, clock_mhz = self._timer(call)
            stop = self._now()
            self._timer.synchronize()
            drain_ms = (self._now() - stop) / 1e6
        except BaseException as error:
            self._channel.send("failed", reason=describe(error, self._path))
            return
        started = self._threads.extra() - before if self._threads else ()
        self._channel.send(
            "done",
            ms=milliseconds,
            clock_mhz=clock_mhz,
            drain_ms=drain_ms,
            threads=len(started),
        )

    def _on_keep(self, message: Message) -> None:
        """Copies the outputs of the last call and compares its inputs with what was written."""
        kinds = check_kinds(self._result, self._device)
        if not kinds.passed:
            self._channel.send("refused", status=kinds.status.value, reason=kinds.reason)
            return
        for layout, tensor in zip(expected_layout(self._case), self._result, strict=True):
            verdict = layout.layout(tensor)
            if not verdict.passed:
                self._channel.send("refused", status=verdict.status.value, reason=verdict.reason)
                return
        self._kept[message.fields["tag"]] = tuple(t.detach().clone() for t in self._result)
        clean = empty_like(self._live)
        self._write(clean)
        verdict = check_unmodified(self._live.tensors(), clean.tensors())
        if not verdict.passed:
            self._channel.send("refused", status=verdict.status.value, reason=verdict.reason)
            return
        self._channel.send("kept")

    def _on_send(self, message: Message) -> None:
        """The kept outputs as raw bytes, output first."""
        tensors = self._kept.pop(message.fields["tag"])
        self._channel.send("outputs", payload=[raw_bytes(tensor) for tensor in tensors])

    def _on_inspect(self, _: Message) -> None:
        stream = True
        if self._device.type == "cuda":
            stream = torch.cuda.current_stream(self._device) == self._timer.stream
        self._channel.send(
            "inspected",
            changed=self._guard.changed(),
            busy_ms=self._threads.busy_ms(),
            stream_unchanged=bool(stream),
        )


def raw_bytes(tensor: Tensor) -> memoryview:
    """The elements of a tensor in row-major order, as bytes."""
    return memoryview(tensor.contiguous().view(torch.uint8).cpu().numpy()).cast("B")


def _import_entry(path: Path):
    """Imports the submission file and gives its entry point."""
    spec = importlib.util.spec_from_file_location(ENTRY_MODULE, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[ENTRY_MODULE] = module
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    entry = getattr(module, ENTRY, None)
    if not callable(entry):
        raise AttributeError(f"{path.name} defines no function {ENTRY}")
    return entry


def describe(error: BaseException, path: Path) -> str:
    """An exception in one line, with the submission's line it came through."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    where = f" ({path.name}:{frames[-1].lineno})" if frames else ""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}{where}"


def main() -> None:
    """Arguments: the file descriptors to read and to write. The nonce comes on standard input."""
    read_fd, write_fd = (int(argument) for argument in sys.argv[1:3])
    nonce = sys.stdin.readline().strip()
    del sys.argv[1:]
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    sys.stdout.reconfigure(line_buffering=True)
    _quiet_progress_bars()
    channel = Channel(read_fd, write_fd, nonce)
    gc.collect()
    with contextlib.suppress(ClosedError):
        Session(channel.receive().fields, channel).serve()
    # A submission's own exit handlers have no say in how the child ends.
    os._exit(0)


def _quiet_progress_bars() -> None:
    """tqdm's monitor would be an extra thread beside a submission that compiles something."""
    with contextlib.suppress(ImportError):
        import tqdm

        tqdm.tqdm.monitor_interval = 0


if __name__ == "__main__":
    main()
