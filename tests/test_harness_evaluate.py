"""Trusted implementations on one case: gates, rechecks, and times where there is a GPU."""

from pathlib import Path

import pytest
import torch

from cases import Case
from harness.check import Status
from harness.evaluate import Entry, Outcome, compare, under_floor
from harness.timing import Plan, Protocol
from harness.worker import Worker

CPU = torch.device("cpu")
CASE = Case("tiny", 1, 70, 1, 2, True, "mixed")
PLAN = Plan(warmup=1, repetitions=2)


@pytest.fixture(autouse=True)
def fakes(monkeypatch):
    folder = str(Path(__file__).parent)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", folder)


def outcome(name, thorough=False):
    (found,) = compare(CASE, [Entry(f"fakes:{name}")], [PLAN], CPU, thorough=thorough)
    return found


@pytest.mark.parametrize(
    "name, status, reason",
    [
        ("RIGHT", Status.PASS, ""),
        ("ZEROS", Status.WRONG, "output:"),
        ("SCRIBBLING", Status.INPUT_MODIFIED, "beta was changed"),
        ("RAISING", Status.ERROR, "RuntimeError: this one raises ("),
        ("ABSENT", Status.ERROR, "not available here: the package absent is not installed"),
    ],
)
def test_statuses(name, status, reason):
    found = outcome(name)
    assert found.status is status
    assert found.reason.startswith(reason)
    assert found.times_ms == ()


def test_a_kept_result_shows_when_inputs_are_refilled():
    assert outcome("STALE").status is Status.PASS
    found = outcome("STALE", thorough=True)
    assert (found.status, found.reason[:16]) == (Status.WRONG, "inputs refilled:")
    assert outcome("RIGHT", thorough=True).status is Status.PASS


def test_one_bad_entry_does_not_stop_the_others():
    entries = [Entry(f"fakes:{name}") for name in ("RAISING", "RIGHT", "ZEROS")]
    plans = [PLAN, Plan(Protocol.GRAPH, 1, 1)]
    found = compare(CASE, entries, plans, CPU)
    assert [(o.implementation, o.protocol) for o in found] == [
        (name, protocol) for name in ("raising", "right", "zeros") for protocol in ("oj", "graph")
    ]
    assert [o.status for o in found[::2]] == [Status.ERROR, Status.PASS, Status.WRONG]


def test_outcomes_survive_json():
    found = Outcome("c", "i", "1", "core", "oj", Status.SUSPECT, "why", (1.5, 2.5), "", 1710.0)
    assert found.sample.clock_mhz == 1710.0
    assert Outcome.from_json(found.to_json()) == found


def test_both_scopes_of_this_package_pass():
    entries = [Entry("ours", "core"), Entry("ours", "full"), Entry("gdn_prefill_lab", "full")]
    entries.append(Entry("gdn_prefill_fresh", "full"))
    found = compare(CASE, entries, [PLAN], CPU, backend="torch", thorough=True)
    assert [(o.status, o.reason) for o in found] == [(Status.PASS, "")] * 4
    assert [o.scope for o in found] == ["core", "full", "full", "full"]


def test_the_worker_outlives_a_crash_and_a_hang():
    plans = [PLAN]
    with Worker(timeout_s=120) as worker:

        def status(*names):
            entries = [Entry(f"fakes:{name}") for name in names]
            return [(o.status, o.reason) for o in worker.compare(CASE, entries, plans, cpu=True)]

        crash = (Status.ERROR, "the process ended with exit code 7 before it was done")
        assert status("RIGHT", "CRASHING") == [(Status.PASS, ""), crash]
        assert status("RIGHT") == [(Status.PASS, "")]
        worker._timeout_s = 1
        assert status("HANGING") == [(Status.TIMEOUT, "no answer within 1 s")]
        worker._timeout_s = 120
        assert status("RIGHT") == [(Status.PASS, "")]


@pytest.mark.gpu
def test_times_are_taken_interleaved_and_above_the_floor():
    gpu = torch.device("cuda:0")
    case = Case("small", 1, 1025, 2, 8, True, "random_decay")
    plans = [Plan(protocol, 3, 20) for protocol in Protocol]
    entries = [Entry("gdn_prefill"), Entry("gdn_prefill_fresh"), Entry("gdn_prefill", "full")]
    found = compare(case, entries, plans, gpu)
    assert [(o.status, o.reason) for o in found] == [(Status.PASS, "")] * 9
    assert all(len(o.times_ms) == 20 for o in found)
    assert all((o.clock_mhz is not None) == (o.protocol == "graph") for o in found)
    assert under_floor(case, "core", Protocol.OJ, 1e-5).status is Status.SUSPECT


@pytest.mark.gpu
def test_a_wrong_implementation_is_not_timed():
    found = compare(CASE, [Entry("fakes:ZEROS")], [PLAN], torch.device("cuda:0"))
    assert (found[0].status, found[0].times_ms) == (Status.WRONG, ())
