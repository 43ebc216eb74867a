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

from harness.timing import (
    HostTimer,
    NotCapturableError,
    Plan,
    Protocol,
    Sample,
    capture,
    interleave,
    launch_untimed,
    make_timer,
    paired_ratio,
    percentile,
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
    [({"warmup": -1}, "warmup is -1"), ({"repetitions": 0}, "repetitions is 0")],
)
def test_plans_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        Plan(**arguments)


class FakeTimer:
    """Counts; its nth call takes n milliseconds."""

    def __init__(self):
        self.order = []

    def __call__(self, call):
        result = call()
        self.order.append(result)
        return float(len(self.order)), result

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


def test_untimed_launches_are_as_many():
    ran = []
    launch_untimed({"a": lambda: ran.append(1)}, Plan(warmup=3, repetitions=4), CPU)
    assert len(ran) == 7


def test_the_host_timer_keeps_the_clock_it_was_made_with(monkeypatch):
    timer = make_timer(CPU)
    assert isinstance(timer, HostTimer)
    monkeypatch.setattr(time, "perf_counter_ns", lambda: pytest.fail("the patched clock"))
    milliseconds, result = timer(lambda: "done")
    assert (milliseconds >= 0, result) == (True, "done")


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
def test_a_call_that_synchronises_cannot_be_captured(gpu):
    x = torch.ones(8, device=gpu)
    with pytest.raises(NotCapturableError):
        capture(lambda: (x, float(x.sum())), gpu)
    assert float(x.sum()) == 8.0


@pytest.mark.gpu
def test_interleaved_samples_are_complete(gpu):
    samples = interleave({"a": spin, "b": spin}, Plan(repetitions=4), make_timer(gpu), gpu)
    assert {name: sample.repetitions for name, sample in samples.items()} == {"a": 4, "b": 4}
