"""Every version on one command line, and the ladder's table."""

import csv
import io
import json
from dataclasses import replace

import pytest
import torch

from cases import load_cases
from gdn_ladder import VERSIONS
from harness import cli
from harness.check import Status
from harness.evaluate import Outcome
from harness.results import Row
from harness.selection import Subject
from harness.versions import (
    as_expected,
    check_heads,
    every_version,
    expected,
    recorded_times,
    versions_table,
)

HEADER = "name,B,T,Hq,Hv,initial_state,gate\n"


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(cli, "pick_device", lambda: torch.device("cpu"))


def outcome(status, reason=""):
    return Outcome("c", "gdn_ladder", "v9", "core", "oj", status, reason)


@pytest.mark.parametrize(
    "expectation, status, reason, wanted",
    [
        ("pass", Status.PASS, "", True),
        ("pass", Status.WRONG, "output", False),
        ("fail", Status.WRONG, "output", True),
        ("fail", Status.TIMEOUT, "no answer", True),
        ("fail", Status.ERROR, "RaceError: 1 CTA", True),
        ("fail", Status.ERROR, "DeadlockError: 1 CTA", True),
        ("fail", Status.ERROR, "not available here: no GPU", False),
        ("fail", Status.PASS, "", False),
        ("fail", Status.SUSPECT, "under the floor", False),
    ],
)
def test_what_counts_as_expected(expectation, status, reason, wanted):
    assert as_expected(outcome(status, reason), expectation) is wanted


def test_what_is_expected_stands_in_the_table():
    assert [expected(name) for name in (None, "v7", "v4", "v9", "w8a8")] == [
        "pass",
        "pass",
        "fail",
        "fail",
        "fail",
    ]


def test_versions_that_cannot_run_here_are_named():
    found, absent = every_version(Subject("ours"))
    names = [subject.version for subject in found]
    assert names == [version.name for version in VERSIONS if version.name != "v14"]
    assert absent == [
        "v14 left out: v14 is the package's way of launching a kernel, it needs a GPU"
    ]
    with pytest.raises(ValueError, match="no version can run here: v1 left out"):
        every_version(Subject("ours", "cuda"))


@pytest.fixture
def three(monkeypatch):
    subjects = [Subject("ours", "auto", name) for name in ("v2b", "v4", "v9")]
    monkeypatch.setattr(cli, "every_version", lambda _: (subjects, ["v14 left out: no GPU"]))


@pytest.fixture
def arguments(tmp_path):
    path = tmp_path / "cases.csv"
    path.write_text(HEADER + "gva,1,192,1,1,no,random_decay\n")
    return ["--cases", str(path), "--in-process", "--version", "all"]


@pytest.fixture
def canned(monkeypatch):
    """What the emulator says of the three, without it."""
    found = {
        "v2b": (Status.PASS, ""),
        "v4": (Status.WRONG, "output: 10 elements off"),
        "v9": (Status.ERROR, "RaceError: 1 CTA"),
    }

    def grade(self, case, subject, *_):
        name = subject.version
        return [Outcome(case.name, "gdn_ladder", name, "core", "oj", *found[name])], []

    monkeypatch.setattr(cli.Session, "grade", grade)


def test_all_versions_one_after_the_other(three, arguments, capsys):
    assert cli.main([*arguments, "--output-format", "csv"]) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines() == [
        "case,version,expected,correctness,median_ms",
        "gva,v2b,pass,PASS,",
        "gva,v4,fail,WRONG,",
        "gva,v9,fail,ERROR,",
    ]
    assert "v14 left out: no GPU" in printed.err
    assert "gva: v9: RaceError: " in printed.err
    assert printed.err.count("in the emulator") == 1


def test_the_table_says_what_was_expected(three, canned, arguments, capsys):
    assert cli.main(arguments) == 0
    lines = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    assert lines[1:] == [
        ["gva", "v2b", "PASS"],
        ["gva", "v4", "WRONG, as expected"],
        ["gva", "v9", "ERROR, as expected"],
    ]


def test_json_rows_hold_it_too(three, arguments, capsys):
    assert cli.main([*arguments, "--output-format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["version"], row["expected"]) for row in rows] == [
        ("v2b", "pass"),
        ("v4", "fail"),
        ("v9", "fail"),
    ]
    assert {row["backend"] for row in rows} == {"emulator"}


def test_a_loser_that_passes_fails_the_run(three, canned, arguments, capsys, monkeypatch):
    monkeypatch.setattr(cli, "expected", lambda _: "fail")
    assert cli.main(arguments) == 1
    assert "PASS, should fail" in capsys.readouterr().out


def test_a_winner_that_fails_fails_the_run(three, canned, arguments, capsys, monkeypatch):
    monkeypatch.setattr(cli, "expected", lambda _: "pass")
    assert cli.main(arguments) == 1
    assert "WRONG, should pass" in capsys.readouterr().out


@pytest.fixture
def graded(monkeypatch):
    """The versions that were graded; each passes."""
    names = []

    def grade(self, case, subject, *_):
        names.append(subject.version)
        return [Outcome(case.name, "gdn_ladder", subject.version, "core", "oj", Status.PASS)], []

    monkeypatch.setattr(cli.Session, "grade", grade)
    monkeypatch.setattr(cli, "expected", lambda _: "pass")
    return names


def test_versions_without_the_cases_heads_are_left_out(arguments, graded, capsys):
    assert cli.main([*arguments, "--output-format", "csv"]) == 0
    printed = capsys.readouterr()
    absent = {"v10", "v11", "v14"}
    assert graded == [version.name for version in VERSIONS if version.name not in absent]
    assert not any(f"gva,{name}," in printed.out for name in absent)
    for name, gates in (("v10", "box"), ("v11", "rows")):
        assert f"gva: {name} left out: heads_v = 1 with gates = '{gates}': allowed" in printed.err


def test_with_those_heads_alone_nothing_can_run(arguments, graded, capsys):
    assert cli.main([*arguments[:-1], "v10"]) == 2
    assert not graded and "nothing can run here" in capsys.readouterr().err


@pytest.mark.parametrize("case", load_cases(), ids=lambda case: case.name)
def test_every_version_takes_the_public_cases(case):
    for version in VERSIONS:
        check_heads(version.name, case)


def test_alone_a_loser_fails_the_run(arguments, capsys):
    assert cli.main([*arguments[:-1], "v4"]) == 1
    assert capsys.readouterr().out.split()[-1] == "WRONG"


def row(version, ms, date="2025-01-01T00:00:00+00:00", protocol="graph", case="long_low_gva"):
    status = "WRONG" if ms is None else "PASS"
    times = (ms, ms, ms, 0 if ms is None else 5)
    fixed = ("nvidia-h200", date, "abc", "gdn_ladder", version, "core", protocol, case, status)
    return Row(*fixed, *times)


ROWS = [
    row("v1", 9.0, "2025-02-01T00:00:00+00:00"),
    row("v1", 8.0),
    row("v7", 1.25),
    row("v7", 1.5, protocol="oj"),
    row("v6", 2.0, case="chain_equal"),
    row("v4", None),
]


def test_the_newest_graph_times_count():
    times = recorded_times(ROWS, "long_low_gva")
    assert {version: found.median_ms for version, found in times.items()} == {
        "v1": 9.0,
        "v7": 1.25,
        "v4": None,
    }


def test_what_a_release_shipped_counts_as_its_version():
    def ours(release, ms):
        return replace(row("x", ms), implementation="gdn_prefill", version=release)

    times = recorded_times([ours("0.1.0", 0.75), ours("9.9.9", 0.5)], "long_low_gva")
    assert {version: found.median_ms for version, found in times.items()} == {
        "four_group": 0.75,
        "shipped": 0.5,
    }
    full = replace(ours("9.9.9", 1.0), scope="full")
    assert recorded_times([full], "long_low_gva") == {}


def test_the_table_holds_every_version_with_its_time():
    text = versions_table(ROWS, "long_low_gva", "table")
    starts = [line.split()[:3] for line in text.splitlines() if line and line[0] != " "]
    assert [start[0] for start in starts[: len(VERSIONS)]] == [v.name for v in VERSIONS]
    by_name = {start[0]: start for start in starts}
    assert by_name["v1"] == ["v1", "pass", "9.0000"]
    assert by_name["v7"] == ["v7", "pass", "1.2500"]
    assert by_name["v4"] == ["v4", "fail", "WRONG"]
    assert max(map(len, text.splitlines())) <= 130
    assert "median core time of long_low_gva, graph replay, nvidia-h200 of 2025-0" in text
    assert "no time of chain_equal is recorded" in versions_table([], "chain_equal", "table")


def test_the_table_as_data():
    lines = list(csv.DictReader(io.StringIO(versions_table(ROWS, "long_low_gva", "csv"))))
    assert [line["version"] for line in lines] == [version.name for version in VERSIONS]
    times = {line["version"]: line["median_ms"] for line in lines}
    assert (times["v1"], times["v6"]) == ("9.000000", "")
    assert {line["origin"] for line in lines} == {"source", "here"}
    assert json.loads(versions_table(ROWS, "long_low_gva", "json"))[0]["median_ms"] == 9.0


def test_the_command_prints_the_table(capsys):
    assert cli.main(["--versions-table"]) == 0
    assert capsys.readouterr().out.split()[:2] == ["v1", "pass"]
