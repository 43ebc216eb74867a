"""Samples, interleaving and timers; what needs a GPU is marked."""

import contextlib
import gc
import time
import types
import weakref

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness import timing
from harness.device import max_sm_mhz
from harness.timing import (
    LEAD_CYCLES,
    REST_S,
    SPIN_CYCLES,
    SPIN_OVERHEAD_US,
    HostTimer,
    NotCapturableError,
    Plan,
    Protocol,
    Sample,
    Taken,
    capture,
    interleave,
    launch_untimed,
    make_timer,
    median_known,
    paired_ratio,
    percentile,
    rest,
)

CPU = torch.device("cpu")
TIMES = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=50)


@given(TIMES, st.floats(0, 100))
def test_percentiles_are_numpys(values, percent):
    assert percentile(values, percent) == pytest.approx(numpy.percentile(values, percent))


@given(TIMES)
def test_a_sample_is_ordered(times):
    sample = Sample(tuple(times))
    assert sample.p20_ms <= sample.median_ms <= sample.p80_ms
    assert sample.repetitions == len(times)


def test_a_sample_holds_something():
    with pytest.raises(ValueError, match="empty"):
        Sample(())


def test_paired_ratio_is_the_median_of_ratios():
    # The clocks halve in the second round: medians would say otherwise.
    assert paired_ratio(Sample((2.0, 4.0, 2.0)), Sample((1.0, 2.0, 1.0))) == 2.0
    with pytest.raises(ValueError, match="3 and 1"):
        paired_ratio(Sample((1.0, 2.0, 3.0)), Sample((1.0,)))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"warmup": -1}, "warmup is -1"),
        ({"repetitions": 0}, "repetitions is 0"),
        ({"rest_s": -0.1}, "rest_s is -0.1"),
        ({"rest_s": float("nan")}, "rest_s is nan"),
    ],
)
def test_plans_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        Plan(**arguments)


def test_only_measured_clocks_count():
    assert median_known([]) is median_known([None, None]) is None
    assert median_known([None, 1700.0, 1980.0, 1900.0]) == 1900.0


def test_a_gpu_rests_and_a_cpu_does_not(monkeypatch):
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    rest(CPU)
    assert slept == []
    rest(torch.device("cuda:0"))
    rest(torch.device("cuda:0"), 0.25)
    assert slept == [REST_S, 0.25] and REST_S > 0


class FakeTimer:
    """Counts; its nth call takes n milliseconds, behind a spin at 1000 + n MHz."""

    def __init__(self):
        self.order = []

    def __call__(self, call):
        result = call()
        self.order.append(result)
        return Taken(float(len(self.order)), result, 1000.0 + len(self.order))

    def synchronize(self):
        pass


def test_interleaving_rotates_and_warms_up():
    warm, timer = [], FakeTimer()

    def call(name):
        return lambda: (warm.append(name), name)[1]

    calls = {name: call(name) for name in "abc"}
    samples = interleave(calls, Plan(warmup=2, repetitions=3), timer, CPU)
    assert warm[:6] == ["a", "a", "b", "b", "c", "c"]
    assert timer.order == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]
    assert samples["a"].times_ms == (1.0, 6.0, 8.0)
    assert samples["a"].clock_mhz == 1006.0


def test_the_rest_is_between_what_was_queued_and_the_warm_up(monkeypatch):
    said, timer = [], FakeTimer()
    timer.synchronize = lambda: said.append("waited")
    monkeypatch.setattr(timing, "rest", lambda device, seconds: said.append((device, seconds)))
    interleave({"a": lambda: said.append("a")}, Plan(warmup=2, repetitions=1), timer, CPU)
    assert said == ["waited", (CPU, REST_S), "a", "a", "waited", "a"]
    said.clear()
    interleave({"a": lambda: None}, Plan(warmup=1, repetitions=1, rest_s=0), timer, CPU)
    assert said[1] == (CPU, 0)


def test_untimed_launches_are_as_many():
    ran = []
    launch_untimed({"a": lambda: ran.append(1)}, Plan(warmup=3, repetitions=4), CPU)
    assert len(ran) == 7


def test_the_host_timer_keeps_the_clock_it_was_made_with(monkeypatch):
    timer = make_timer(CPU)
    assert isinstance(timer, HostTimer)
    monkeypatch.setattr(time, "perf_counter_ns", lambda: pytest.fail("the patched clock"))
    milliseconds, result, clock = timer(lambda: "done")
    assert (milliseconds >= 0, result, clock) == (True, "done", None)


class FakeGpu:
    """A device whose SMs run at a clock in MHz: what is queued takes its time, and is noted.

    An event and a launch take it a while; the host takes five microseconds to queue anything.
    """

    EVENT_US, LAUNCH_US, HOST_US = 1.0, SPIN_OVERHEAD_US - 1.0, 5.0

    def __init__(self, mhz):
        self.mhz, self.done, self.spins = mhz, [], []
        self.now_us = self.host_us = 0.0

    def queue(self, name, us):
        self.host_us += self.HOST_US
        self.now_us = max(self.now_us, self.host_us) + us
        self.done.append(name)

    def sleep(self, cycles):
        self.spins.append(cycles)
        self.queue("spin", cycles / self.mhz + self.LAUNCH_US)

    def event(self):
        gpu = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self, stream):
                gpu.queue("event", gpu.EVENT_US)
                self.at_us = gpu.now_us

            def synchronize(self):
                gpu.host_us = max(gpu.host_us, self.at_us)

            def elapsed_time(self, other):
                return (other.at_us - self.at_us) / 1e3

        return Event


@pytest.fixture
def fake_gpu(monkeypatch):
    def make(mhz):
        fake = FakeGpu(mhz)
        monkeypatch.setattr(torch.cuda, "Event", fake.event())
        monkeypatch.setattr(torch.cuda, "_sleep", fake.sleep)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "stream")
        return fake

    return make


@pytest.mark.parametrize("mhz", [1980.0, 1710.0])
def test_the_spin_before_a_replay_tells_the_clock(fake_gpu, mhz):
    fake = fake_gpu(mhz)
    timer = make_timer(torch.device("cuda:0"), Protocol.GRAPH)
    taken = timer(lambda: fake.queue("call", 50.0))
    assert fake.spins == [LEAD_CYCLES, SPIN_CYCLES]
    ahead = ["spin", "event", "spin", "event"]
    # The first call follows upon an idle device and is not timed.
    assert fake.done == [*ahead, "call", "event", "call", "event"]
    assert taken.ms == pytest.approx(0.051)
    # Although the host is slow: spin and event are queued behind the other spin.
    assert taken.clock_mhz == pytest.approx(mhz)


def test_the_judge_counts_every_call(fake_gpu):
    fake = fake_gpu(1980.0)
    timer = make_timer(torch.device("cuda:0"), Protocol.GRAPH, lead_replays=0)
    timer(lambda: fake.queue("call", 50.0))
    assert fake.done.count("call") == 1


def test_the_labs_protocol_has_its_two_events_and_no_clock(fake_gpu):
    fake = fake_gpu(1980.0)
    taken = make_timer(torch.device("cuda:0"), Protocol.OJ)(lambda: fake.queue("call", 50.0))
    assert fake.done == ["event", "call", "event"]
    assert taken.clock_mhz is None


class Graph:
    """A CUDA Graph that records nothing: like a real one it keeps nothing alive."""

    def replay(self):
        pass


def test_a_replay_keeps_the_call_and_what_it_owns(monkeypatch):
    """Else the replays would go on writing to memory that has become somebody else's."""
    nothing = contextlib.nullcontext()
    for name, stand_in in {
        "Stream": lambda device: types.SimpleNamespace(wait_stream=lambda other: None),
        "current_stream": lambda device: types.SimpleNamespace(wait_stream=lambda other: None),
        "stream": lambda stream: nothing,
        "synchronize": lambda device: None,
        "CUDAGraph": Graph,
        "graph": lambda graph, stream: nothing,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    workspace = torch.zeros(3)

    def call(workspace=workspace):
        return workspace + 1, workspace + 2

    alive = weakref.ref(call), weakref.ref(workspace)
    replay = capture(call, CPU)
    del call, workspace
    gc.collect()
    assert all(reference() is not None for reference in alive)
    assert replay()[1].tolist() == [2, 2, 2]
    del replay
    gc.collect()
    assert all(reference() is None for reference in alive)


@pytest.fixture
def gpu():
    return torch.device("cuda:0")


def spin():
    """About 1 ms of one SM's time."""
    torch.cuda._sleep(2_000_000)


@pytest.mark.gpu
def test_events_see_the_work_of_the_stream(gpu):
    timer = make_timer(gpu)
    busy = [timer(spin)[0] for _ in range(5)]
    idle = [timer(lambda: None)[0] for _ in range(5)]
    assert min(busy) > 10 * min(idle)


@pytest.mark.gpu
@pytest.mark.parametrize("protocol", [Protocol.GRAPH, Protocol.COLD])
def test_graph_protocols_leave_host_time_out(gpu, protocol):
    x = torch.ones(1024, device=gpu)

    def slow_host():
        deadline = time.perf_counter() + 2e-3
        while time.perf_counter() < deadline:
            pass
        return x + 1, x

    replay = capture(slow_host, gpu)
    in_graph = [make_timer(gpu, protocol)(replay)[0] for _ in range(9)]
    called = [make_timer(gpu)(slow_host)[0] for _ in range(3)]
    assert sorted(in_graph)[4] < min(called) / 10
    assert torch.equal(replay()[0], x + 1)


@pytest.mark.gpu
def test_the_clock_of_a_rested_gpu_is_near_its_fastest(gpu):
    x = torch.ones(1024, device=gpu)
    replay = capture(lambda: x + 1, gpu)
    timer = make_timer(gpu, Protocol.GRAPH)
    sample = interleave({"": replay}, Plan(Protocol.GRAPH, 3, 30), timer, gpu)[""]
    assert 0.97 * max_sm_mhz() < sample.clock_mhz < 1.02 * max_sm_mhz()


@pytest.mark.gpu
def test_a_call_that_synchronises_cannot_be_captured(gpu):
    x = torch.ones(8, device=gpu)
    with pytest.raises(NotCapturableError):
        capture(lambda: (x, float(x.sum())), gpu)
    assert float(x.sum()) == 8.0


@pytest.mark.gpu
def test_interleaved_samples_are_complete(gpu):
    samples = interleave({"a": spin, "b": spin}, Plan(repetitions=4), make_timer(gpu), gpu)
    assert {name: sample.repetitions for name, sample in samples.items()} == {"a": 4, "b": 4}
