"""The lab's score: its fixed points, its shape, and what the sheet makes of a run."""

import json
import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import Baseline, Case, load_cases
from harness import score
from harness.check import Status
from harness.evaluate import Outcome
from harness.results import Row, load_rows
from harness.score import (
    CORE,
    FULL,
    SUBJECT,
    Timed,
    case_score,
    geometric_mean,
    main,
    points,
    recorded_sheet,
    render_sheet,
    score_sheet,
    standings_of_outcomes,
    standings_of_rows,
)

P60 = st.floats(min_value=1e-3, max_value=0.999)
SPEED = st.floats(min_value=1e-6, max_value=1e6)


@given(P60)
def test_fixed_points(p60):
    assert points(p60, p60) == pytest.approx(60)
    assert points(1.0, p60) == pytest.approx(100)
    assert points(1.5, p60) == pytest.approx(110)
    assert points(2.0, p60) == pytest.approx(120)
    assert points(p60 / 2, p60) == pytest.approx(30)


@given(P60, st.floats(min_value=2.0, max_value=1e9))
def test_never_more_than_120(p60, p):
    assert points(p, p60) == 120


@given(P60, SPEED, SPEED)
def test_faster_is_never_worse(p60, one, other):
    slow, fast = sorted((one, other))
    assert points(slow, p60) <= points(fast, p60)


@given(P60, SPEED)
def test_between_the_marks(p60, p):
    found = points(p, p60)
    assert 0 < found <= 120
    if p60 < p < 1:
        assert 60 <= found <= 100


def test_the_exponential_part_by_hand():
    # p60 = 0.2, p = 0.6: u = 0.5
    expected = 60 + 40 * (math.exp(0.75) - 1) / (math.exp(1.5) - 1)
    assert points(0.6, 0.2) == pytest.approx(expected)


@given(P60)
def test_no_jump_at_the_joints(p60):
    for joint in (p60, 1.0, 2.0):
        below, above = points(joint * (1 - 1e-9), p60), points(joint * (1 + 1e-9), p60)
        assert above - below < 1e-3


@pytest.mark.parametrize("p", [0.0, -1.0, math.nan, math.inf])
def test_bad_speed_is_refused(p):
    with pytest.raises(ValueError, match="p is"):
        points(p, 0.5)


@pytest.mark.parametrize("p60", [0.0, 1.0, 1.5])
def test_t60_must_be_longer_than_t100(p60):
    with pytest.raises(ValueError, match="t60 must be longer"):
        points(1.0, p60)


def baseline(case="a", t60=2.0, t100=1.0):
    return Baseline(case, t60, t100, "naive", "peer")


def test_what_did_not_pass_scores_nothing():
    for status in Status:
        expected = 100 if status is Status.PASS else 0
        assert case_score(status, 1.0, baseline()) == pytest.approx(expected)
    assert case_score(Status.PASS, None, baseline()) is None


def test_geometric_mean():
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    assert geometric_mean([]) is None


def case(name, twin_of=None):
    return Case(name, 1, 64, 1, 1, False, "random_decay", twin_of=twin_of)


PASS = Status.PASS
CASES = [case("a"), case("b"), case("hidden_a", twin_of="a")]
BASELINES = {"a": baseline("a"), "b": baseline("b")}
STANDINGS = {
    ("a", SUBJECT, CORE): Timed(PASS, 1.0),
    ("b", SUBJECT, CORE): Timed(PASS, 0.5),
    ("hidden_a", SUBJECT, CORE): Timed(PASS, 2.0),
    ("a", SUBJECT, FULL): Timed(PASS, 2.0),
    ("b", SUBJECT, FULL): Timed(PASS, 2.0),
    ("a", "fast", CORE): Timed(PASS, 2.0),
    ("b", "fast", CORE): Timed(PASS, 4.0),
    ("a", "slow", CORE): Timed(PASS, 9.0),
    ("a", "wrong", CORE): Timed(Status.WRONG, 0.1),
    ("a", "fast", FULL): Timed(PASS, 1.0),
    ("b", "fast", FULL): Timed(PASS, 4.0),
}


def test_sheet_weighs_public_and_hidden():
    sheet = score_sheet(CASES, STANDINGS, BASELINES)
    assert [line.score for line in sheet.lines] == pytest.approx([100, 120, 60])
    assert sheet.public_mean == pytest.approx(110)
    assert sheet.hidden_mean == pytest.approx(60)
    assert sheet.total == pytest.approx(0.6 * 110 + 0.4 * 60)


def test_sheet_compares_like_with_like():
    sheet = score_sheet(CASES, STANDINGS, BASELINES)
    assert sheet.against_fastest == pytest.approx(math.sqrt(1 * 2))
    # The fastest right peer of the same scope: 2/1 and 4/0.5; 1/2 and 4/2.
    assert sheet.core_against_core == pytest.approx(math.sqrt(2 * 8))
    assert sheet.full_against_full == pytest.approx(math.sqrt(0.5 * 2))
    assert "4.000x" in render_sheet(sheet)


def test_a_failed_case_pulls_the_mean_down():
    standings = {**STANDINGS, ("b", SUBJECT, CORE): Timed(Status.TIMEOUT, None)}
    sheet = score_sheet(CASES, standings, BASELINES)
    assert sheet.public_mean == pytest.approx(50)
    assert sheet.against_fastest is None


def test_untimed_cases_have_no_score():
    standings = {key: Timed(PASS, None) for key in STANDINGS}
    sheet = score_sheet(CASES, standings, BASELINES)
    assert (sheet.public_mean, sheet.total, sheet.core_against_core) == (None, None, None)
    assert "unknown" in render_sheet(sheet)


def test_a_case_without_baseline_leaves_the_mean_open():
    sheet = score_sheet(CASES, STANDINGS, {"a": baseline("a")})
    assert sheet.lines[1].score is None
    assert sheet.public_mean is None
    assert sheet.hidden_mean == pytest.approx(60)


def outcome(implementation, scope=CORE, time=1.0):
    return Outcome("a", implementation, "1", scope, "oj", PASS, times_ms=(time,))


def test_standings_of_a_run_name_the_subject():
    standings = standings_of_outcomes([outcome("mine"), outcome("fla", FULL)], "mine")
    assert set(standings) == {("a", SUBJECT, CORE), ("a", "fla", FULL)}


def row(implementation, date, time, protocol="oj", version="1", case="a"):
    what = ("d", date, "r", implementation, version, CORE, protocol, case)
    return Row(*what, "PASS", time, time, time, 1)


OLD, NEW = "2026-01-01", "2026-02-02"


def test_recorded_standings_take_the_latest_oj_row_and_no_variant_of_ours():
    rows = [
        row("gdn_prefill", NEW, 2.0),
        row("gdn_prefill", OLD, 1.0),
        row("gdn_prefill", "2026-03-03", 3.0, protocol="graph"),
        row("gdn_prefill_fresh", OLD, 0.1),
        row("gdn_ladder", OLD, 0.1),
        row("fla", OLD, 5.0),
    ]
    recorded = standings_of_rows(rows, "gdn_prefill")
    assert recorded.latest == {("a", SUBJECT, CORE): Timed(PASS, 2.0)}
    assert recorded.times_of == (NEW,)
    assert recorded.beside == {
        ("a", SUBJECT, CORE): Timed(PASS, 1.0),
        ("a", "fla", CORE): Timed(PASS, 5.0),
    }
    assert recorded.ratios_of == OLD


def test_recorded_ratios_never_mix_runs():
    rows = [
        row("gdn_prefill", NEW, 2.0),
        row("gdn_prefill", OLD, 1.0),
        row("fla", OLD, 5.0),
        row("flash_qla", "2026-03-03", 0.5),
    ]
    sheet = recorded_sheet([case("a")], standings_of_rows(rows, "gdn_prefill"), BASELINES)
    assert sheet.lines[0].median_ms == 2.0
    assert sheet.lines[0].core_over_core == pytest.approx(5.0)
    text = render_sheet(sheet)
    assert re.search(f"times of the run +{NEW}\n", text)
    assert re.search(f"core and full ratios of the run +{OLD}\n", text)


def test_no_run_with_both_gives_no_ratio():
    rows = [row("gdn_prefill", NEW, 2.0), row("fla", OLD, 5.0)]
    sheet = recorded_sheet([case("a")], standings_of_rows(rows, "gdn_prefill"), BASELINES)
    assert sheet.lines[0].core_over_core is None
    assert "none timed both" in render_sheet(sheet)


def test_the_run_with_the_most_to_compare_counts():
    late = "2026-03-03"
    rows = [row(name, OLD, 1.0, case=one) for name in ("gdn_prefill", "fla") for one in "ab"]
    rows += [row(name, NEW, 1.0, case=one) for name in ("gdn_prefill", "fla") for one in "ab"]
    rows += [row(name, late, 1.0) for name in ("gdn_prefill", "fla")]
    assert standings_of_rows(rows, "gdn_prefill").ratios_of == NEW


def test_recorded_rows_are_chosen_by_implementation_and_version():
    rows = [row("gdn_prefill", OLD, 1.0), row("gdn_ladder", OLD, 4.0, version="v7")]
    found = {
        (name, version): standings_of_rows(rows, name, version).latest["a", SUBJECT, CORE].median_ms
        for name, version in (
            ("gdn_prefill", None),
            ("gdn_prefill", "1"),
            ("gdn_prefill", "v7"),
            ("gdn_ladder", "v7"),
        )
    }
    assert list(found.values()) == [1.0, 1.0, 4.0, 4.0]
    for name, version in (("gdn_prefill", "v6"), ("fla", None)):
        with pytest.raises(ValueError, match="there is: gdn_ladder v7, gdn_prefill 1"):
            standings_of_rows(rows, name, version)


def test_a_recorded_version_is_not_the_package(capsys):
    def times(*arguments):
        assert main(["--recorded", "nvidia-h200", "--output-format", "json", *arguments]) == 0
        return [line["median_ms"] for line in json.loads(capsys.readouterr().out)["lines"][:8]]

    rows = [
        row
        for row in load_rows(device="nvidia-h200")
        if (row.implementation, row.version, row.protocol) == ("gdn_ladder", "v7", "oj")
    ]
    latest = {row.case: row.median_ms for row in sorted(rows, key=lambda row: row.date)}
    assert times("--version", "v7") == [latest[case.name] for case in load_cases()]
    assert times() != times("--version", "v7")


COURSE = "nvidia-h800-mig-1g-10gb"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--recorded", "nope"], "nothing recorded for 'nope'; there is: nvidia-h200"),
        (["--recorded", COURSE], f"nothing recorded for '{COURSE}'; there is: nvidia-h200"),
        (["--recorded", "nvidia-h200", "--version", "v99"], "nothing recorded of gdn_prefill v99"),
        (["--recorded", "nvidia-h200", "--impl", "mine.py"], "nothing recorded of mine; there is"),
        (["--recorded", "nvidia-h200", "--impl", "gdn_ladder"], "choose one with --version"),
        (["--recorded", "nvidia-h200", "--baseline", "nope"], "no baselines for device 'nope'"),
        (
            ["--baseline", "nope"],
            f"no baselines for device 'nope'; there are some for: {{}}{COURSE}",
        ),
        (["--warmup", "-1"], "warmup is -1, must be an integer >= 0"),
        (["--timeout", "0"], "0 is not above 0"),
    ],
)
def test_senseless_arguments_exit_with_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert message.format("nvidia-h200, ") in capsys.readouterr().err


def test_without_a_gpu_the_sheet_has_results_and_no_scores(capsys, monkeypatch):
    monkeypatch.setattr(score, "pick_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(score, "load_cases", lambda: [case("a")])
    monkeypatch.setattr(score, "select_cases", lambda hidden_seed: [case("hidden_a", "a")])
    assert main(["--backend", "torch", "--hidden", "5"]) == 0
    printed = capsys.readouterr()
    assert [line.split() for line in printed.out.splitlines()[1:3]] == [
        ["a", "PASS"],
        ["hidden_a", "PASS"],
    ]
    assert "nothing is timed, so nothing is scored: no GPU" in printed.err
    assert "hidden cases of seed 5" in printed.err


def test_the_emulator_has_nothing_to_score(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["--backend", "emulator"])
    assert exit_.value.code == 2
    assert "takes no times, there is nothing to score" in capsys.readouterr().err
