"""A round of optimisation: gates before times, and a report that says what was found."""

from dataclasses import replace

import pytest
import torch

from cases import Case, load_cases
from harness import round as round_module
from harness import round_report
from harness.check import Status
from harness.evaluate import Entry, Outcome
from harness.metrics import Metric
from harness.results import read_rows
from harness.round import EDGE_CASES, count, entry_of, main
from harness.round_report import Gate, Round, Timing, render

CASE = load_cases()[4]
METADATA = {
    "device": "nvidia-h200",
    "date": "2025-01-01T00:00:00+00:00",
    "revision": "abc",
    "command": "python harness/round.py",
    "software": {"torch": "2.11.0", "triton": None},
    "clocks_after": {"clocks.sm": "1980 MHz"},
    "untimed": "no GPU",
}
PASSED = [Gate("edge", "tokens_1", Status.PASS), Gate("public", "deep", None, "too large")]
ARGUMENTS = ["--version", "v15", "--baseline", "v7", "--prediction", "3 % less"]


@pytest.fixture(autouse=True)
def cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(round_module, "pick_device", lambda: torch.device("cpu"))


def outcome(version, times, case=CASE):
    status = Status.PASS if times else Status.WRONG
    return Outcome(case.name, "gdn_ladder", version, "core", "graph", status, "", times)


def done(before=(1.0, 2.0), after=(0.5, 1.0), gates=PASSED, counters=None):
    timings = [Timing(CASE, outcome("v7", before), outcome("v15", after))]
    return Round("v7", "v15", "3 % less", METADATA, gates, timings, counters or {}, (), "measure")


def test_edge_cases_cover_lengths_groups_and_batch():
    assert {case.T for case in EDGE_CASES} >= {1, 63, 64, 65, 127, 4097}
    assert {case.group for case in EDGE_CASES} >= {1, 2, 3, 4, 8}
    assert {case.initial_state for case in EDGE_CASES} == {True, False}
    assert max(case.B for case in EDGE_CASES) == 3


def test_names_of_versions(monkeypatch):
    assert entry_of("shipped") == Entry("gdn_prefill")
    assert entry_of("v6") == Entry("gdn_prefill", "core", "v6")
    with pytest.raises(ValueError, match="version is 'v8'"):
        entry_of("v8")
    with pytest.raises(ValueError, match="cannot be imported"):
        entry_of("no_such_module:NAME")


@pytest.mark.parametrize(
    "after, said",
    [
        ((0.9, 1.8), "Faster by 10.0% in the geometric mean"),
        ((1.01, 2.02), "Within 2% of its baseline (+1.0%)"),
        ((1.5, 3.0), "Slower by 50.0% in the geometric mean: it stays in the ladder as a loser"),
    ],
)
def test_the_numbers_decide(after, said):
    assert done(after=after).outcome.startswith(said)


def test_a_failed_gate_ends_the_round():
    wrong = [*PASSED, Gate("race", "races", Status.ERROR, "RaceError: 1 CTA\nmore")]
    found = done(gates=wrong)
    assert not found.passed
    assert found.outcome == "Rejected: 1 of 3 gates failed. Nothing was measured."
    text = render(found)
    assert "* races: ERROR: RaceError: 1 CTA\n" in text
    assert "Not measured: a gate failed." in text


def test_without_times_nothing_is_decided():
    found = Round("v7", "v15", "p", METADATA, PASSED, [], {}, (), "measure")
    assert found.outcome.startswith("Undecided")
    assert "Not measured: no GPU." in render(found)
    missing = done(before=())
    assert (missing.ratio, missing.outcome[:9]) == (None, "Undecided")


def test_the_report_holds_prediction_gates_times_and_environment():
    text = render(done())
    assert text.startswith("# v15 against v7\n\nv7 with three stages for K (`block_dv=gva_aware")
    assert "**Prediction.** 3 % less" in text
    assert "| edge | 1 of 1 pass | 0 not run |" in text
    assert "| public | 0 of 0 pass | 1 not run |" in text
    assert "Not run: deep (too large)." in text
    row = next(line for line in text.splitlines() if line.startswith("| long_low_gva"))
    assert row.split(" | ")[:6] == [
        "| long_low_gva",
        "1.500000",
        "1.200000 to 1.800000",
        "0.750000",
        "0.600000 to 0.900000",
        "0.500",
    ]
    assert "Geometric mean of the paired ratios: 0.500." in text
    assert "`python harness/round.py`" in text
    assert "torch 2.11.0" in text and "triton" not in text
    assert "Not taken. Where there are ncu and a GPU: `measure`" in text


def test_a_time_below_the_fastest_clock_is_marked(monkeypatch):
    said = {None: None, 1710.0: "throttled: at 1710 MHz"}
    monkeypatch.setattr(round_report, "throttled", said.get)
    assert "throttled" not in render(done())
    slow = replace(outcome("v15", (0.5, 1.0)), clock_mhz=1710.0)
    found = replace(done(), timings=[Timing(CASE, outcome("v7", (1.0, 2.0)), slow)])
    assert "\n* long_low_gva, v15: throttled: at 1710 MHz\n" in render(found)


def test_counters_stand_side_by_side():
    counters = {
        ("v7", CASE.name): {"duration": 1.5e6, "stall_barrier": 3.0, "stall_selected": 9.0},
        ("v15", CASE.name): {"duration": 1.25e6, "stall_barrier": 2.0, "stall_wait": 0.5},
    }
    text = render(done(counters=counters))
    assert "| long_low_gva | v7 | v15 |" in text
    assert "| duration, us | 1500 | 1250 |" in text
    assert "| stall barrier | 3 | 2 |" in text
    assert "stall selected" not in text


def test_counters_are_the_longest_kernels(monkeypatch):
    def collect(tool, version, cases, stamp):
        if version == "v7":
            raise ValueError("no permission")
        return [
            Metric("d", "t", "r", version, CASE.name, launch, f"k{launch}", "duration", "ns", ns)
            for launch, ns in enumerate((10.0, 30.0, 20.0))
        ]

    monkeypatch.setattr(round_module, "collect", collect)
    counters, notes = count(["v7", "scan"], [CASE], "ncu", None)
    assert counters == {("scan", CASE.name): {"duration": 30.0}}
    assert notes == ["no counters of v7: no permission"]


def test_a_round_on_a_cpu(capsys, monkeypatch):
    small = [Case("tokens_65", 1, 65, 1, 2, True, "mixed")]
    monkeypatch.setattr(round_module, "EDGE_CASES", small)
    monkeypatch.setattr(round_module, "load_cases", lambda: [load_cases()[-1]])
    arguments = ["--gate", "edge", "--gate", "public", "--gate", "race"]
    assert main([*ARGUMENTS, *arguments]) == 0
    text = capsys.readouterr().out
    assert "| edge | 1 of 1 pass | 0 not run |" in text
    assert "| race | 1 of 1 pass | 0 not run |" in text
    assert "deep_gva_state (no GPU, and too large for the emulator)" in text
    assert "Undecided: the gates that ran passed" in text


def test_a_racing_version_is_rejected(tmp_path, capsys):
    path = tmp_path / "deep" / "v9.md"
    arguments = ["--version", "v9", "--prediction", "fewer waits", "--gate", "race"]
    assert main([*arguments, "--out", str(path)]) == 1
    assert "* races: ERROR: RaceError" in path.read_text()
    assert capsys.readouterr().out == "Rejected: 1 of 1 gates failed. Nothing was measured.\n"


def test_what_cannot_run_is_left_out_by_name(capsys):
    arguments = ["--version", "v14", "--prediction", "p", "--gate", "race"]
    assert main(arguments) == 0
    assert "races (v14 is the package's way of launching a kernel" in capsys.readouterr().out


@pytest.fixture
def gpu(monkeypatch):
    """What a GPU would give, without one."""
    calls = []
    monkeypatch.setattr(round_module, "why_untimed", lambda _: None)
    monkeypatch.setattr(round_module, "find_tool", lambda _: "ncu")
    monkeypatch.setattr(round_module, "count", lambda *_: ({}, ["no counters: no permission"]))
    monkeypatch.setattr(round_module, "run_gates", lambda *_: calls.append("gates") or PASSED)

    def measure(*_):
        calls.append("measure")
        return done().timings

    monkeypatch.setattr(round_module, "measure", measure)
    return calls


def test_times_are_recorded_beside_the_report(gpu, tmp_path):
    path = tmp_path / "round.md"
    assert main([*ARGUMENTS, "--out", str(path)]) == 0
    assert gpu == ["gates", "measure"]
    assert [row.median_ms for row in read_rows(tmp_path / "round.csv")] == [1.5, 0.75]
    assert "* no counters: no permission" in path.read_text()
    assert "harness.metrics --version v7 --version v15 --case long_low_gva" in path.read_text()


def test_nothing_is_measured_behind_a_failed_gate(gpu, monkeypatch, tmp_path):
    wrong = [Gate("edge", "tokens_1", Status.WRONG, "output off")]
    monkeypatch.setattr(round_module, "run_gates", lambda *_: wrong)
    assert main([*ARGUMENTS, "--out", str(tmp_path / "round.md")]) == 1
    assert gpu == []
    assert not (tmp_path / "round.csv").exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--version", "v8", "--prediction", "p"], "version is 'v8'"),
        (["--version", "v7", "--prediction", "p", "--case", "nope"], "no case named nope"),
        (["--version", "v7"], "--prediction"),
    ],
)
def test_senseless_arguments_exit_with_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err
