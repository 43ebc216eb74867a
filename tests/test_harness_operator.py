"""The operator's benchmark: workloads, processes, what survives a crash, a hang and a limit."""

import csv
import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from cases import Case, PackedCase, load_cases, load_packed, make_packed_inputs
from harness import bench_operator, operator_child
from harness.bench_operator import (
    Contender,
    Effort,
    Log,
    Measured,
    host_times,
    measure,
    run,
    select_workloads,
    write_hosts,
)
from harness.check import Status
from harness.implementations import get
from harness.operator_child import LIMIT, checked, from_json, to_json
from harness.problem import operator_problem
from harness.results import Recorder, Stamp, read_rows
from harness.timing import REST_S, Protocol
from reference.operator import gated_delta_rule

DENSE = Case("dense", 2, 70, 1, 2, True, "mixed")
PACKED = PackedCase("packed_small", 1, 2, (65, 1, 130, 3), True, "mixed")
STATELESS = PackedCase("packed_zero", 1, 1, (64, 20), False, "random_decay")
EFFORT = Effort(rounds=2, replays=3, timeout_s=100)
STAMP = Stamp("some-gpu", "2026-01-01T00:00:00+00:00", "abc")


@pytest.fixture(autouse=True)
def fakes(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_the_packed_batches_hold_about_the_tokens_they_are_named_for():
    cases = {case.name: case for case in load_packed()}
    assert cases["packed_8x1024"].lengths == (1024,) * 8
    assert cases["packed_few_32x256_state"].lengths == (256,) * 32
    mixed = cases["packed_mixed_state"]
    assert sum(mixed.lengths) == 16384 == mixed.bounds[-1]
    assert (min(mixed.lengths), max(mixed.lengths)) == (32, 8192)
    assert {(case.Hq, case.Hv) for case in cases.values()} == {(16, 64), (2, 8)}


@pytest.mark.parametrize(
    "line, message",
    [
        ("a,1,2,8x,no,mixed", "line 2"),
        ("a,1,2,,no,mixed", "lengths are"),
        ("a,1,2,8 0,no,mixed", "each must be >= 1"),
        ("a,1,2,8,maybe,mixed", "must be yes or no"),
        ("a,2,3,8,no,mixed", "not a multiple"),
    ],
)
def test_a_packed_case_that_cannot_be_is_refused_by_line(tmp_path, line, message):
    path = tmp_path / "packed.csv"
    path.write_text(f"name,Hq,Hv,lengths,initial_state,gate\n{line}\n")
    with pytest.raises(ValueError, match=message) as raised:
        load_packed(path)
    assert "line 2" in str(raised.value)


def test_packed_inputs_have_a_state_for_every_sequence():
    inputs = make_packed_inputs(PACKED)
    assert inputs.q.shape == (1, 199, 1, 128) and inputs.initial_state.shape == (4, 2, 128, 128)
    assert make_packed_inputs(STATELESS).initial_state is None
    again = make_packed_inputs(PACKED)
    assert torch.equal(inputs.initial_state, again.initial_state)


@pytest.mark.parametrize("case", [PACKED, STATELESS], ids=lambda case: case.name)
def test_expected_values_of_packed_sequences_are_the_references(case):
    problem = operator_problem(case)
    x = problem.inputs
    states = None if x.initial_state is None else list(x.initial_state)
    found = gated_delta_rule(
        x.q, x.k, x.v, x.g, x.beta, initial_states=states, cu_seqlens=list(case.bounds)
    )
    torch.testing.assert_close(problem.expected_output, found.output)
    torch.testing.assert_close(problem.expected_state, torch.stack(found.final_states))
    assert problem.cu_seqlens.tolist() == list(case.bounds)


@pytest.mark.parametrize("name", ["gdn_prefill", "gdn_prefill_fresh", "gdn_prefill_lab"])
@pytest.mark.parametrize("case", [DENSE, PACKED, STATELESS], ids=lambda case: case.name)
def test_our_full_forward_is_the_operator(name, case):
    problem = operator_problem(case)
    if name == "gdn_prefill_lab" and problem.lengths:
        with pytest.raises(ValueError, match="packed"):
            get(name, "torch").bind(problem, "full")
        return
    call = get(name, "torch").bind(problem, "full")
    for _ in range(3):
        errors, verdict = checked(call, problem)
        assert verdict.passed and max(errors) < LIMIT
    first, second = call()[0], call()[0]
    assert (first.data_ptr() == second.data_ptr()) == (name == "gdn_prefill")


@pytest.mark.parametrize("workload", [*load_cases(), *load_packed()], ids=lambda work: work.name)
def test_workloads_survive_json(workload):
    assert from_json(json.loads(json.dumps(to_json(workload)))) == workload


def test_workloads_by_name():
    assert select_workloads() == [*load_cases(), *load_packed()]
    assert [found.name for found in select_workloads(["packed_8x1024", "chain_equal"])] == [
        "packed_8x1024",
        "chain_equal",
    ]
    with pytest.raises(ValueError, match="no workload named x; there are: short_tail_state"):
        select_workloads(["x"])


@pytest.mark.parametrize(
    "result, status",
    [
        (lambda o, s: (o, s), Status.PASS),
        (lambda o, s: (o, s + 0.01 * s.abs().max()), Status.WRONG),
        (lambda o, s: (o * torch.nan, s), Status.WRONG),
        (lambda o, s: (o, s * torch.nan), Status.WRONG),
        (lambda o, s: (o[:, 1:], s), Status.WRONG_SHAPE),
        (lambda o, s: o, Status.ERROR),
    ],
)
def test_wrong_results_are_named(result, status):
    problem = operator_problem(STATELESS)
    made = problem.expected_output.bfloat16(), problem.expected_state.float()
    _, verdict = checked(lambda: result(*made), problem)
    assert verdict.status is status


def test_one_that_crashes_or_is_wrong_costs_itself_alone():
    names = ["gdn_prefill", "fakes:CRASHING", "fakes:ZEROS", "fakes:ABSENT"]
    contenders = [Contender(name, cpu=True) for name in names]
    recorded, hosts = {}, {}
    left_out = run(
        [PACKED, DENSE],
        contenders,
        EFFORT,
        1e3,
        lambda work, found: recorded.update({work.name: found}),
        lambda work, us: hosts.update({work.name: us}),
    )
    assert left_out == []
    ours, crashed, zeros, absent = recorded["packed_small"]
    assert ours.ready and len(ours.times_ms) == 6 and max(ours.relative_l2) < LIMIT
    assert ours.contender.version == get("gdn_prefill").version
    assert (crashed.status, "exit code 7" in crashed.reason) == (Status.ERROR, True)
    assert (zeros.status, "relative L2" in zeros.reason) == (Status.WRONG, True)
    assert (absent.status, "not installed" in absent.reason) == (Status.ERROR, True)
    assert recorded["dense"][0].ready and len(recorded["dense"][0].times_ms) == 6
    assert set(hosts["dense"]) == {"plan", "fresh"} and min(hosts["dense"].values()) > 0


def test_one_that_hangs_is_ended():
    hanging = Contender("fakes:HANGING", cpu=True)
    (found,) = measure(STATELESS, [hanging], Effort(timeout_s=0.2))
    assert (found.status, found.reason[:16]) == (Status.TIMEOUT, "no answer within")
    assert hanging.child._process is None


class Answering:
    """A child's stand-in that answers from a list; an exception in it is raised."""

    def __init__(self, *answers):
        self.answers, self.asked, self.closed = list(answers), [], False

    def send(self, message):
        self.asked.append(message)

    def receive(self, timeout_s):
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self):
        self.closed = True


def contender(name, *answers):
    found = Contender(name, cpu=True)
    found.child = Answering(*answers)
    return found


DRAWN = {"version": "1", "status": "PASS"}
READY = DRAWN, {"status": "PASS", "relative_l2": [1e-3, 2e-3]}, {}


def test_turns_are_interleaved_and_the_order_rotates():
    order = []
    both = [contender(name, *READY, *[{"times_ms": [1.0]}] * 3) for name in "ab"]
    for one in both:
        one.child.send = lambda job, name=one.name: order.append((name, job["do"]))
    found = measure(DENSE, both, Effort(rounds=3, replays=1))
    assert order[:4] == [("a", "draw"), ("b", "draw"), ("a", "prepare"), ("b", "prepare")]
    assert order[4:6] == [("a", "warm"), ("b", "warm")]
    assert order[6:] == [(name, "time") for name in "abbaab"]
    assert [one.times_ms for one in found] == [[1.0] * 3] * 2


@pytest.mark.parametrize("cpu", [False, True])
def test_a_gpu_rests_once_before_the_first_turn(monkeypatch, cpu):
    order = []
    monkeypatch.setattr(bench_operator.time, "sleep", lambda seconds: order.append(seconds))
    both = [contender(name, *READY, *[{"times_ms": [1.0]}] * 2) for name in "ab"]
    for one in both:
        one.cpu = cpu
        one.child.send = lambda job: order.append(job["do"])
    measure(DENSE, both, Effort(rounds=2, replays=1))
    rests = [] if cpu else [REST_S]
    prepared = ["draw", "draw", "prepare", "prepare"]
    assert order == [*prepared, *rests, "warm", "warm", *["time"] * 4]


def test_the_clock_is_the_median_of_the_turns():
    turns = [{"times_ms": [1.0], "clock_mhz": clock} for clock in (1980.0, None, 1700.0, 1710.0)]
    (found,) = measure(DENSE, [contender("a", *READY, *turns)], Effort(rounds=4, replays=1))
    assert found.outcome(DENSE, Protocol.GRAPH).clock_mhz == 1710.0
    ended = bench_operator.ChildError("ended")
    (found,) = measure(DENSE, [contender("a", *READY, turns[0], ended)], EFFORT)
    assert found.outcome(DENSE, Protocol.GRAPH).clock_mhz is None


def test_one_that_dies_while_it_warms_up_is_not_timed():
    ended = bench_operator.ChildError("ended")
    dying = contender("a", *READY[:2], ended)
    (found,) = measure(DENSE, [dying], EFFORT)
    assert (found.status, found.reason) == (Status.ERROR, "ended")
    assert [job["do"] for job in dying.child.asked] == ["draw", "prepare", "warm"]


def test_a_hang_ends_the_rest_and_a_second_crash_too():
    late, ended = bench_operator.LateError("late"), bench_operator.ChildError("ended")
    hangs, crashes = contender("hangs", late), contender("crashes", ended, ended)
    for _ in range(3):
        found = measure(DENSE, [hangs, crashes], EFFORT)
    assert [one.reason for one in found] == ["given up: it hung or crashed before"] * 2
    assert (len(hangs.child.asked), len(crashes.child.asked)) == (1, 2)


def test_one_that_dies_while_it_is_timed_has_no_times():
    ended = bench_operator.ChildError("ended")
    found = measure(DENSE, [contender("a", *READY, {"times_ms": [1.0]}, ended)], EFFORT)
    (outcome,) = [one.outcome(DENSE, Protocol.GRAPH) for one in found]
    assert (outcome.status, outcome.times_ms, outcome.reason) == (Status.ERROR, (), "ended")


def test_what_the_budget_has_no_time_for_is_left_out(monkeypatch):
    clock = iter(range(0, 1000, 40))
    monkeypatch.setattr(bench_operator.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(bench_operator, "measure", lambda *_: [])
    recorded = []
    works = [DENSE, PACKED, STATELESS]
    one = contender("a")
    left_out = run(works, [one], EFFORT, 130.0, lambda work, _: recorded.append(work))
    assert (recorded, left_out) == ([DENSE], [PACKED, STATELESS])
    assert one.child.closed


def measured(name, times, status=Status.PASS, **more):
    one = contender(name)
    one.version = "1"
    return Measured(one, status, times_ms=list(times), clocks_mhz=[1711.6], **more)


def test_rows_errors_and_ratios_are_recorded_and_reported(tmp_path, capsys):
    log = Log(EFFORT, Recorder("operator", STAMP, False, tmp_path))
    ours = measured("gdn_prefill", (1.0, 1.0), relative_l2=[1e-3, 2e-3])
    wrong = measured("fla", (), Status.WRONG, reason="off", relative_l2=[1.0, 1.0])
    for work in (DENSE, PACKED):
        log.add(work, [ours, measured("flash_qla", (2.0, 4.0), relative_l2=[1e-3, 1e-3]), wrong])
    rows = read_rows(tmp_path / "some-gpu" / "operator.csv")
    assert {(row.case, row.scope, row.protocol) for row in rows} == {
        (name, "full", "graph") for name in ("dense", "packed_small")
    }
    about = json.loads((tmp_path / "some-gpu" / "operator.json").read_text())
    assert about["relative_l2"]["dense"]["flash_qla"] == [1e-3, 1e-3]
    assert about["workloads"][1]["lengths"] == list(PACKED.lengths)
    assert "2 rounds in turn of 3 calls" in about["protocol"] and about["device"] == "some-gpu"
    assert "dense: fla: off" in capsys.readouterr().err
    lines = [line.split() for line in log.report().splitlines()]
    assert lines[2][:5] == ["dense", "flash_qla", "1", "PASS", "3.000000"]
    assert (lines[0][6], lines[2][7]) == ("SM(MHz)", "1712")
    assert [row.sm_mhz for row in rows] == [1712, 1712, None] * 2
    assert lines[-1] == ["packed", "flash_qla", "1", "3.000"]
    assert log.ours_right
    log.add(DENSE, [measured("gdn_prefill", (), Status.WRONG)])
    assert not log.ours_right


def test_host_times_are_ours_alone_and_written(tmp_path):
    assert host_times([measured("fla", (1.0,))]) == {}
    ours = Measured(contender("gdn_prefill", {"us": {"plan": 4.0, "fresh": 30.0}}))
    us = host_times([ours])
    path = write_hosts([{"case": "dense"} | us], asdict(STAMP), "some-gpu", tmp_path)
    assert list(csv.DictReader(path.open())) == [{"case": "dense", "plan": "4.0", "fresh": "30.0"}]
    assert json.loads(path.with_suffix(".json").read_text())["schema"] == "operator_host"
    for merge, cases in ((True, ["dense", "packed"]), (False, ["packed"])):
        write_hosts([{"case": "packed"} | us], asdict(STAMP), "some-gpu", tmp_path, merge=merge)
        assert [row["case"] for row in csv.DictReader(path.open())] == cases


def test_without_a_gpu_the_command_says_so(capsys):
    assert bench_operator.main([]) == 1
    assert "nothing can be benchmarked here: no GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--case", "x"], "no workload named x"),
        (["--implementation", "x"], "implementation is 'x'"),
        (["--implementation", "fakes:NOT_ONE"], "not an Implementation"),
        (["--rounds", "0"], "0 is not at least 1"),
        (["--budget", "0"], "0 is not above 0"),
    ],
)
def test_senseless_arguments_exit_with_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        bench_operator.main(arguments)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_what_cannot_be_bound_says_so(monkeypatch):
    monkeypatch.setattr(operator_child, "get", lambda name: get(name, "torch"))
    job = {"cpu": True, "protocol": "graph", "workload": to_json(STATELESS)}
    answer, drawn = operator_child.draw({**job, "implementation": "gdn_prefill"})
    assert answer == {"version": get("gdn_prefill").version, "status": "PASS"}
    answer, prepared = operator_child.prepare(drawn)
    assert answer["status"] == "PASS" and max(answer["relative_l2"]) < LIMIT
    assert operator_child.warm(prepared) == {}
    taken = operator_child.take(prepared, 4)
    assert (len(taken["times_ms"]), taken["clock_mhz"]) == (4, None)
    _, drawn = operator_child.draw({**job, "implementation": "gdn_prefill_lab"})
    answer, prepared = operator_child.prepare(drawn)
    assert (answer["status"], prepared) == ("ERROR", None) and "packed" in answer["reason"]
