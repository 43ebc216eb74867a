"""The timer and the three protocols: oj (the lab's), graph (kernels only), cold (kernels, no L2).

oj     each call between its own pair of CUDA events, then synchronised; Python dispatch,
       allocation and launch are inside
graph  one replay of a captured CUDA Graph between the pair, queued behind a spinning kernel so
       that no host time is inside, and behind an untimed replay of the same graph, so that it runs
       as in a stream of work; inputs warm in L2 where they fit
cold   one replay between the pair, behind a kernel that overwrites more than the L2 holds and
       nothing else

Several implementations are timed call by call in turn on the same problem, so that a change of
clocks meets all of them, and compared by paired ratios.

Kernels that fill the device draw more than it may for long, and its SM clock falls within some
20 ms of work. So timing starts behind a rest, at the boost clock, whatever ran before; and under
the graph protocol the clock of every sample is taken, by how long the spinning kernel took. What
follows upon an idle device is slower all the same: a forward of 175 us on all SMs of an H200 takes
185 right behind the spin, which is why the replay before is there.
"""

import contextlib
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch

Call = Callable[[], object]

WARMUP = 10
REPETITIONS = 100
# Seconds of idleness after which the SMs are back at the boost clock.
REST_S = 0.5
# Long enough to queue an event, a replay and an event behind it: about 100 us at 1.98 GHz.
SPIN_CYCLES = 200_000
# A spin ahead of that one, about 20 us, behind which its event and itself are queued together.
LEAD_CYCLES = 40_000
# What the events and the launch take beyond the cycles: on an H200 the same for 50 to 800 thousand.
SPIN_OVERHEAD_US = 2.8
# Untimed replays ahead of a timed one.
LEAD_REPLAYS = 1
# The flush writes this many times the L2.
FLUSH_RATIO = 4


class Protocol(str, Enum):
    """How a call is timed."""

    OJ = "oj"
    GRAPH = "graph"
    COLD = "cold"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Plan:
    """A protocol with its untimed and timed calls; rest_s: seconds of rest before all of them."""

    protocol: Protocol = Protocol.OJ
    warmup: int = WARMUP
    repetitions: int = REPETITIONS
    rest_s: float = REST_S

    def __post_init__(self) -> None:
        for name, least in (("warmup", 0), ("repetitions", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} is {value!r}, must be an integer >= {least}")
        if not 0 <= self.rest_s < math.inf:
            raise ValueError(f"rest_s is {self.rest_s!r}, must be >= 0 and finite")


@dataclass(frozen=True)
class Sample:
    """The times of one implementation in milliseconds, in the order they were taken.

    clock_mhz: the median SM clock that they were taken at; None where it was not measured.
    """

    times_ms: tuple[float, ...]
    clock_mhz: float | None = None

    def __post_init__(self) -> None:
        if not self.times_ms:
            raise ValueError("times_ms is empty, must hold at least one time")

    @property
    def repetitions(self) -> int:
        return len(self.times_ms)

    @property
    def median_ms(self) -> float:
        return statistics.median(self.times_ms)

    @property
    def p20_ms(self) -> float:
        return percentile(self.times_ms, 20)

    @property
    def p80_ms(self) -> float:
        return percentile(self.times_ms, 80)


def percentile(values: Sequence[float], percent: float) -> float:
    """The percentile by linear interpolation between the sorted values; 0 <= percent <= 100."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def paired_ratio(numerator: Sample, denominator: Sample) -> float:
    """The median over rounds of numerator / denominator; both come from one interleaved run."""
    if numerator.repetitions != denominator.repetitions:
        raise ValueError(
            f"paired samples have {numerator.repetitions} and {denominator.repetitions} times"
        )
    pairs = zip(numerator.times_ms, denominator.times_ms, strict=True)
    return statistics.median(a / b for a, b in pairs)


def median_known(values: Iterable[float | None]) -> float | None:
    """The median of what was measured, such as clocks; None if nothing was."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def rest(device: torch.device, seconds: float = REST_S) -> None:
    """Lets a GPU that has done its work idle for some seconds; without one, nothing."""
    if device.type == "cuda":
        time.sleep(seconds)


class Taken(NamedTuple):
    """A timed call: milliseconds, what it returned, the SM clock before it (None: not measured)."""

    ms: float
    result: object
    clock_mhz: float | None = None


class HostTimer:
    """Wall clock on a machine with no GPU. Its clock is looked up once, when it is made."""

    def __init__(self) -> None:
        self._now = time.perf_counter_ns

    def __call__(self, call: Call) -> Taken:
        """Runs `call` and times it."""
        start = self._now()
        result = call()
        return Taken((self._now() - start) / 1e6, result)

    def synchronize(self) -> None:
        """Nothing runs behind the host here."""


class EventTimer:
    """CUDA events on the stream that is current when it is made.

    Every function it needs is looked up once, then: what a submission does to torch.cuda later
    does not reach it. `before` is queued ahead of the first event of each pair; behind it, if
    spin_cycles is not 0, a kernel that spins for so many cycles of an SM, between events of its
    own, which tell the clock. What they and the launch cost, 2.8 us of about 100, is taken off; the
    clock is then right to about 1 %. untimed: calls ahead of each that is timed.
    """

    def __init__(
        self,
        device: torch.device,
        before: Callable[[], None] | None = None,
        spin_cycles: int = 0,
        untimed: int = 0,
    ) -> None:
        self._event = torch.cuda.Event
        self._record = torch.cuda.Event.record
        self._wait = torch.cuda.Event.synchronize
        self._elapsed = torch.cuda.Event.elapsed_time
        self._synchronize = torch.cuda.synchronize
        self._device = device
        self.stream = torch.cuda.current_stream(device)
        self._before = before
        self._spin, self._spin_cycles = torch.cuda._sleep, spin_cycles
        self._untimed = untimed

    def __call__(self, call: Call) -> Taken:
        """Runs `call` and times it."""
        spin, spun, start, end = (self._event(enable_timing=True) for _ in range(4))
        if self._before is not None:
            self._before()
        if self._spin_cycles:
            self._record(spin, self.stream)
            self._spin(self._spin_cycles)
            self._record(spun, self.stream)
        for _ in range(self._untimed):
            call()
        self._record(start, self.stream)
        result = call()
        self._record(end, self.stream)
        self._wait(end)
        clock_mhz = None
        if self._spin_cycles:
            spun_us = 1e3 * self._elapsed(spin, spun) - SPIN_OVERHEAD_US
            clock_mhz = self._spin_cycles / spun_us
        return Taken(self._elapsed(start, end), result, clock_mhz)

    def synchronize(self) -> None:
        """Waits for everything on the device, whatever its stream."""
        self._synchronize(self._device)


Timer = HostTimer | EventTimer


def make_timer(
    device: torch.device, protocol: Protocol = Protocol.OJ, lead_replays: int = LEAD_REPLAYS
) -> Timer:
    """The timer of `protocol` on `device`; without a GPU it is the wall clock, for any protocol.

    lead_replays: of the graph protocol, untimed ones ahead of each that is timed; none where every
    call is counted.
    """
    if device.type != "cuda":
        return HostTimer()
    if protocol is Protocol.GRAPH:
        ahead = functools.partial(torch.cuda._sleep, LEAD_CYCLES)
        return EventTimer(device, ahead, SPIN_CYCLES, lead_replays)
    if protocol is Protocol.COLD:
        size = FLUSH_RATIO * torch.cuda.get_device_properties(device).L2_cache_size
        scratch = torch.empty(size, dtype=torch.uint8, device=device)
        return EventTimer(device, scratch.zero_)
    return EventTimer(device)


class NotCapturableError(RuntimeError):
    """A call that cannot be put in a CUDA Graph; the message says what stopped it."""


@dataclass(frozen=True)
class Replay:
    """A captured call: calling it replays the graph and gives what the captured call returned.

    Keeps the call alive, and with it all that it closes over. A graph holds bare addresses: were
    memory that the call owns, such as a plan's workspace, freed, the allocator would give it to
    others, and every replay would write into their tensors.
    """

    graph: torch.cuda.CUDAGraph
    call: Call
    result: object

    def __call__(self) -> object:
        self.graph.replay()
        return self.result


def capture(call: Call, device: torch.device, warmup: int = 3) -> Replay:
    """Captures `call` in a CUDA Graph after `warmup` calls on the capturing stream.

    Raises NotCapturableError where it does something that a capture forbids.
    """
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.stream(stream):
            for _ in range(warmup):
                call()
            torch.cuda.synchronize(device)
            with torch.cuda.graph(graph, stream=stream):
                result = call()
    except Exception as error:
        raise NotCapturableError(f"{type(error).__name__}: {error}".splitlines()[0]) from error
    torch.cuda.current_stream(device).wait_stream(stream)
    return Replay(graph, call, result)


@contextlib.contextmanager
def profiled(device: torch.device) -> Iterator[None]:
    """Brackets what it holds with cudaProfilerStart and cudaProfilerStop, where there is a GPU."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.synchronize(device)
    torch.cuda.profiler.start()
    try:
        yield
        torch.cuda.synchronize(device)
    finally:
        torch.cuda.profiler.stop()


def interleave(
    calls: dict[str, Call], plan: Plan, timer: Timer, device: torch.device
) -> dict[str, Sample]:
    """Times every call plan.repetitions times, one of each a round, the order rotating by round.

    Before that it waits for what is queued, rests for plan.rest_s and makes the untimed calls.
    """
    timer.synchronize()
    rest(device, plan.rest_s)
    for call in calls.values():
        for _ in range(plan.warmup):
            call()
    timer.synchronize()
    taken: dict[str, list[tuple[float, float | None]]] = {name: [] for name in calls}
    with profiled(device):
        for repetition in range(plan.repetitions):
            for name in _rotated(list(calls), repetition):
                # Results are not kept: they would fill the device's memory.
                milliseconds, _, clock_mhz = timer(calls[name])
                taken[name].append((milliseconds, clock_mhz))
    return {name: _sample(pairs) for name, pairs in taken.items()}


def _sample(pairs: Iterable[tuple[float, float | None]]) -> Sample:
    """Of pairs of milliseconds and clock."""
    times_ms, clocks_mhz = zip(*pairs, strict=True)
    return Sample(times_ms, median_known(clocks_mhz))


def launch_untimed(calls: dict[str, Call], plan: Plan, device: torch.device) -> None:
    """The launches of interleave() without a timer, for a profiler to look at."""
    for call in calls.values():
        for _ in range(plan.warmup):
            call()
    with profiled(device):
        for repetition in range(plan.repetitions):
            for name in _rotated(list(calls), repetition):
                calls[name]()


def _rotated(names: list[str], by: int) -> list[str]:
    by %= max(len(names), 1)
    return names[by:] + names[:by]
