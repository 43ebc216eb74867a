"""run.py's outputs to the letter, its exit codes, and what it does without a GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cases import load_cases
from harness import cli
from harness.check import Status
from harness.evaluate import Outcome
from harness.report import Kind, Report

ROOT = Path(__file__).parent.parent
HEADER = "name,B,T,Hq,Hv,initial_state,gate\n"
BOTH = ["--in-process", "--backend", "torch"]
SUBMISSION = "tests/submissions/honest.py"


@pytest.fixture(autouse=True)
def cpu(monkeypatch):
    folder = str(Path(__file__).parent)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(cli, "pick_device", lambda: torch.device("cpu"))


@pytest.fixture
def cases(tmp_path):
    path = tmp_path / "cases.csv"
    path.write_text(HEADER + "tiny_a,1,65,1,2,yes,mixed\ntiny_b,2,10,1,1,no,random_decay\n")
    return str(path)


def run(*arguments):
    return cli.main([*BOTH, *arguments])


def test_the_labs_csv(cases, capsys):
    assert run("--cases", cases, "--output-format", "csv") == 0
    printed = capsys.readouterr()
    assert printed.out == "case,correctness,median_ms\ntiny_a,PASS,\ntiny_b,PASS,\n"
    assert "nothing is timed: no GPU" in printed.err


def test_the_labs_table(cases, capsys):
    assert run("--cases", cases, "--case", "tiny_b") == 0
    header, line = capsys.readouterr().out.splitlines()
    assert header.split() == ["CASE", "B", "T", "Hq", "Hv", "STATE", "RESULT", "MEDIAN(ms)"]
    assert line.split() == ["tiny_b", "2", "10", "1", "1", "no", "PASS"]


def test_json_holds_schema_rows_and_metadata(cases, capsys):
    assert run("--cases", cases, "--case", "tiny_a", "--output-format", "json") == 0
    printed = json.loads(capsys.readouterr().out)
    (row,) = printed["rows"]
    assert (row["case"], row["correctness"], row["median_ms"]) == ("tiny_a", "PASS", None)
    assert (row["device"], row["scope"], row["protocol"]) == ("cpu", "core", "oj")
    assert printed["metadata"]["software"]["torch"]


def test_a_wrong_case_fails_the_run_and_says_why(cases, capsys):
    arguments = ["--cases", cases, "--output-format", "csv", "--impl", "fakes:ZEROS"]
    assert run(*arguments) == 1
    printed = capsys.readouterr()
    assert printed.out.splitlines()[1:] == ["tiny_a,WRONG,", "tiny_b,WRONG,"]
    assert "tiny_a: zeros: output: " in printed.err


def test_reference_rows_follow_the_students(cases, capsys, monkeypatch):
    monkeypatch.setattr(cli, "available_peers", lambda: ([], ["fla left out: not installed"]))
    monkeypatch.setattr(cli, "peer_entries", lambda _: [cli.Subject("fakes:RIGHT").entry("full")])
    arguments = ["--cases", cases, "--case", "tiny_a", "--reference-benchmarks"]
    assert run(*arguments, "--output-format", "csv") == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines() == [
        "case,scope,implementation,correctness,median_ms,reference_over_student",
        "tiny_a,core,gdn_prefill,PASS,,",
        "tiny_a,full,right,PASS,,",
    ]
    assert "fla left out: not installed" in printed.err
    assert run(*arguments) == 0
    assert capsys.readouterr().out.split()[:6] == [
        "CASE",
        "SCOPE",
        "IMPLEMENTATION",
        "RESULT",
        "MEDIAN(ms)",
        "REF/STUDENT",
    ]


def test_times_are_printed_with_six_digits(capsys):
    case = load_cases()[0]
    student = Outcome(case.name, "mine", "1", "core", "oj", Status.PASS, "", (0.1, 0.2, 0.4))
    peer = Outcome(case.name, "fla", "1", "full", "oj", Status.PASS, "", (0.2, 0.8, 0.4))
    report = Report("csv", Kind.PLAIN, [case])
    report.add(case, student, [])
    assert report.text.splitlines()[1] == "short_tail_state,PASS,0.200000"
    report = Report("csv", Kind.REFERENCES, [case])
    report.add(case, student, [peer])
    # Ratios of the rounds: 2, 4, 1.
    assert report.text.splitlines()[2] == "short_tail_state,full,fla,PASS,0.400000,2.0000"
    capsys.readouterr()


def test_a_time_below_the_fastest_clock_is_noted(cases, capsys, monkeypatch):
    slow = Outcome("tiny_a", "mine", "1", "core", "graph", Status.PASS, "", (0.1,), "", 1710.0)
    monkeypatch.setattr(cli.Session, "grade", lambda *_: ([slow], []))
    monkeypatch.setattr(cli, "throttled", lambda clock: f"throttled: {clock:.0f} MHz")
    assert run("--cases", cases, "--case", "tiny_a") == 0
    assert "tiny_a: mine: throttled: 1710 MHz\n" in capsys.readouterr().err


def test_out_writes_what_is_printed(cases, capsys, tmp_path):
    path = tmp_path / "out.csv"
    assert run("--cases", cases, "--output-format", "csv", "--out", str(path)) == 0
    assert path.read_text() == capsys.readouterr().out


def test_the_list_names_the_public_cases_and_runs_none(capsys):
    assert run("--list") == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == [case.name for case in load_cases()]


def test_hidden_cases_are_drawn_from_the_seed_that_is_printed(capsys):
    assert run("--list", "--hidden", "7") == 0
    first = capsys.readouterr()
    assert "hidden cases of seed 7" in first.err
    assert all(line.startswith("hidden_") for line in first.out.splitlines())
    assert run("--list", "--hidden", "7") == 0
    assert capsys.readouterr().out == first.out
    assert run("--list", "--hidden") == 0
    assert "hidden cases of seed" in capsys.readouterr().err


def test_every_number_is_a_seed(capsys):
    assert run("--list", "--hidden", "-1") == 0
    assert "hidden cases of seed -1 " in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--case", "nope"], "no case named nope; there are: short_tail_state"),
        (["--cases", "/no/such.csv"], "does not exist"),
        (["--repetitions", "0"], "repetitions is 0"),
        (["--impl", "nope"], "implementation is 'nope', must be one of gdn_prefill"),
        (["--impl", "nope.py"], "submission nope.py does not exist"),
        (["--impl", "fakes:ABSENT"], "not available here: the package absent is not installed"),
        (["--impl", "fakes:CORE_ONLY", "--scope", "full"], "fakes:CORE_ONLY has core"),
        (["--version", "v8"], "version is 'v8', must be one of v1"),
        (["--version", "v1"], "backend is 'torch', a version of the ladder has none"),
        (["--version", "all", "--impl", "fla"], "is of this package's ladder, not of fla"),
        (["--check"], "--check is the emulator's, add --backend emulator"),
        (["--backend", "emulator", "--check", "taste"], "check='taste': allowed are race"),
        (["--backend", "emulator", "--impl", "fla"], "runs this package's kernels, not fla"),
        (["--backend", "emulator", "--impl", SUBMISSION], "kernels, not a submission"),
        (["--backend", "emulator", "--version", "v14"], "v14 is the package's way of launching"),
        (["--backend", "emulator", "--reference-benchmarks"], "the emulator has none"),
        (["--version", "all", "--reference-benchmarks"], "goes with one version"),
        (["--protocol", "fast"], "invalid choice"),
        (["--out", "/no/such/folder/x"], "--out /no/such/folder/x: there is no folder"),
        (["--out", "tests"], "--out tests is a directory, must be a file"),
        (["--timeout", "0"], "0 is not above 0"),
        (["--timeout", "-1"], "-1 is not above 0"),
        (["--timeout", "nan"], "nan is not above 0"),
        (["--timeout", "inf"], "at most 1000000"),
        (["--timeout", "soon"], "invalid seconds value: 'soon'"),
        (["--impl", "tests"], "submission tests is a directory, must be a .py file"),
        (["--impl", "tests/submissions"], "is a directory, must be a .py file"),
        (["--impl", "Makefile"], "submission Makefile is not named .py"),
        (["--cases", "tests"], "case file tests is a directory"),
        (["--cases", "x.csv", "--hidden", "7"], "--cases is x.csv and --hidden is given"),
        (["--cases", "x.csv", "--hidden"], "cases come from one of the two"),
    ],
)
def test_senseless_arguments_exit_with_2(arguments, message, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as exit_:
        run(*arguments)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_the_command_itself_with_a_submission_and_without(cases):
    for arguments in ([], ["--impl", SUBMISSION]):
        command = [sys.executable, "run.py", "--cases", cases, "--case", "tiny_a", *arguments]
        command += ["--output-format", "csv", "--repetitions", "2", "--warmup", "1"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        if not torch.cuda.is_available():
            assert done.stdout == "case,correctness,median_ms\ntiny_a,PASS,\n"
            assert ("in the emulator" in done.stderr) is (arguments == [])


@pytest.mark.gpu
def test_timed_columns_are_filled_on_a_gpu(cases):
    command = [sys.executable, "run.py", "--cases", cases, "--output-format", "csv"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines()[1:]:
        assert float(line.split(",")[2]) > 0
