"""What the child remembers of the interpreter it shares with a submission."""

import sys
import threading
import time

import pytest
import torch

from harness import check
from harness.guard import Guard, ThreadWatch
from harness.timing import HostTimer


def test_nothing_changed_is_nothing_found():
    assert Guard(HostTimer()).changed() == []


@pytest.mark.parametrize(
    "owner, attribute, name",
    [
        (time, "perf_counter_ns", "time.perf_counter_ns"),
        (torch.cuda.Event, "elapsed_time", "Event.elapsed_time"),
        (torch.cuda, "synchronize", "torch.cuda.synchronize"),
        (torch.Tensor, "copy_", "Tensor.copy_"),
        (torch, "equal", "torch.equal"),
        (check, "check_values", "harness.check.check_values"),
        (HostTimer, "__call__", "HostTimer.__call__"),
    ],
)
def test_a_replaced_function_is_named(monkeypatch, owner, attribute, name):
    guard = Guard()
    monkeypatch.setattr(owner, attribute, lambda *_: None, raising=False)
    assert guard.changed() == [name]


def test_replaced_code_and_instance_attributes_are_named(monkeypatch):
    timer = HostTimer()
    guard = Guard(timer)
    monkeypatch.setattr(check.poison, "__code__", (lambda result: None).__code__)
    timer._now = lambda: 0
    assert guard.changed() == ["harness.check.poison", "HostTimer._now"]


def test_interpreter_hooks_are_named():
    guard = Guard()
    previous = sys.getprofile()
    sys.setprofile(lambda *_: None)
    try:
        assert guard.changed() == ["sys.setprofile"]
    finally:
        sys.setprofile(previous)
    with torch.overrides.TorchFunctionMode():
        assert guard.changed() == ["a torch function mode"]


def test_threads_are_counted_and_clocked():
    watch = ThreadWatch()
    assert (watch.extra(), watch.busy_ms()) == (frozenset(), 0)
    stop = threading.Event()
    idle = threading.Thread(target=stop.wait)
    idle.start()
    assert watch.extra() == {idle.ident}
    before = watch.busy_ms()

    def work():
        while not stop.is_set():
            sum(range(1000))

    busy = threading.Thread(target=work)
    busy.start()
    while watch.busy_ms() < before + 20:
        time.sleep(0.01)
    assert watch.extra() == {idle.ident, busy.ident}
    stop.set()
    idle.join()
    busy.join()
    assert watch.extra() == frozenset()
