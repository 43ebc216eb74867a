"""Baselines: whose times count, and that what is written can be loaded."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from cases import Case, load_baselines, load_cases, load_provenance
from harness import baseline, bench
from harness.baseline import pick_baseline, pick_baselines, write_baselines
from harness.check import Status
from harness.evaluate import Outcome
from harness.results import Recorder, Stamp, read_rows, to_row
from reference.peers.fla import FLA


def outcome(implementation, version, scope, *times, status=Status.PASS):
    return Outcome("c", implementation, version, scope, "oj", status, "why" * (not times), times)


def rows(*outcomes):
    return [to_row(found, Stamp("some-gpu", "2026-01-01", "r")) for found in outcomes]


NAIVE = outcome("gdn_ladder", "v1", "core", 4.0, 5.0, 6.0)
OURS = outcome("gdn_prefill", "0.1.0", "full", 0.1)
FAST = outcome("flashinfer", "0.7", "full", 1.0)
SLOW = outcome("fla", "0.6", "full", 2.0)
FAST_CORE = outcome("flash_qla", "0.1", "core", 0.2)
FASTER_BUT_WRONG = outcome("flash_qla", "0.1", "full", status=Status.WRONG)


def test_the_fastest_right_full_forward_of_a_peer_counts():
    other = replace(outcome("fla", "0.6", "full", 0.5), case="other")
    found = pick_baseline("c", rows(SLOW, OURS, FAST_CORE, FASTER_BUT_WRONG, FAST, NAIVE, other))
    assert (found.t60_ms, found.t100_ms) == (5.0, 1.0)
    assert found.t60_implementation == "gdn_ladder v1"
    assert found.t100_implementation == "flashinfer 0.7"


@pytest.mark.parametrize(
    "outcomes, message",
    [
        ([FAST], "no t60, gdn_ladder v1 is not measured"),
        ([FAST, outcome("gdn_ladder", "v1", "core", status=Status.TIMEOUT)], "v1 is TIMEOUT"),
        ([NAIVE, OURS, FAST_CORE], "no t100, no peer's full forward is right"),
        ([NAIVE, FASTER_BUT_WRONG], "flash_qla WRONG"),
        ([NAIVE, outcome("fla", "0.6", "full", 7.0)], "must be longer"),
    ],
)
def test_what_is_no_baseline_is_refused(outcomes, message):
    with pytest.raises(ValueError, match=message):
        pick_baseline("c", rows(*outcomes))


def test_written_baselines_are_loaded(tmp_path):
    found = pick_baseline("c", rows(NAIVE, FAST))
    path = write_baselines("some-gpu", [found], {"protocol": "oj"}, tmp_path)
    assert path == tmp_path / "some-gpu.csv"
    assert load_baselines("some-gpu", tmp_path) == {"c": found}
    assert load_provenance("some-gpu", tmp_path) == {"protocol": "oj"}


def test_cases_without_a_baseline_are_listed():
    measured = rows(NAIVE, FAST)
    names = [case.name for case in load_cases()]
    found, refused = pick_baselines([replace(row, case=names[0]) for row in measured])
    assert [each.case for each in found] == names[:1]
    assert [line.split(":")[0] for line in refused] == names[1:]


@pytest.mark.parametrize("command", [baseline, bench])
def test_nothing_is_measured_without_a_gpu(command, capsys, monkeypatch):
    monkeypatch.setattr(command, "pick_device", lambda: torch.device("cpu"))
    assert command.main([]) == 1
    assert "no GPU" in capsys.readouterr().err


def test_the_benchmarks_lines_and_means():
    case = Case("c", 1, 64, 1, 1, False, "mixed")
    ours = outcome("gdn_prefill", "0.1.0", "core", 1.0, 2.0)
    replayed = replace(ours, protocol="graph", times_ms=(1.4, 1.4), clock_mhz=1711.6)
    peer = outcome("flash_qla", "0.1", "core", 3.0, 6.0)
    text = bench.report([case], [ours, replayed, peer, FASTER_BUT_WRONG])
    lines = text.splitlines()
    assert lines[0].split()[:5] == ["CASE", "SCOPE", "PROTOCOL", "IMPLEMENTATION", "RESULT"]
    assert lines[1].split()[3:8] == ["gdn_prefill", "0.1.0", "PASS", "1.500000", "1.200000"]
    assert lines[1].split()[9] == "100.0"
    assert lines[2].split()[2] == "graph"
    assert lines[0].index("SM(MHz)") == lines[2].index("   1712")
    assert lines[3].split()[-1] == "3.000"
    assert lines[4].split()[-1] == "WRONG"
    assert lines[-1].split() == ["core", "oj", "flash_qla", "0.1", "1", "3.000"]


class FakeSession:
    """Gives every entry one time: the ladder 5 ms, this package 0.5, peers 1."""

    def __init__(self, device, plans, **_):
        self.plans = plans

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def compare(self, case, entries):
        times = {"gdn_ladder": 5.0, "gdn_prefill": 0.5, "gdn_prefill_fresh": 0.6}
        return [
            Outcome(
                case.name,
                entry.implementation,
                entry.version or "1",
                entry.scope,
                plan.protocol.value,
                Status.PASS,
                times_ms=(times.get(entry.implementation, 1.0),),
            )
            for entry in entries
            for plan in self.plans
        ]


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """The commands on a machine that times, their files under tmp_path."""
    for command in (baseline, bench):
        monkeypatch.setattr(command, "Session", FakeSession)
        monkeypatch.setattr(command, "why_untimed", lambda _: None)
        monkeypatch.setattr(command, "available_peers", lambda: ([FLA()], ["x left out: y"]))
        monkeypatch.setattr(
            command, "Recorder", lambda *arguments: Recorder(*arguments, root=tmp_path)
        )
    monkeypatch.setattr(baseline, "write_baselines", partial(write_baselines, directory=tmp_path))
    return tmp_path


def test_baselines_are_written_once_all_cases_are_measured(measured, capsys):
    names = [case.name for case in load_cases()]
    assert baseline.main(["--case", names[0]]) == 1
    assert "the baselines stay as they are" in capsys.readouterr().err
    rest = [argument for name in names[1:] for argument in ("--case", name)]
    assert baseline.main(rest) == 0
    (device,) = {path.stem for path in measured.glob("*.csv")}
    found = load_baselines(device, measured)
    assert list(found) == names
    assert {(each.t60_ms, each.t100_ms) for each in found.values()} == {(5.0, 1.0)}
    assert load_provenance(device, measured)["warmup"] == 10
    assert len(read_rows(measured / device / "baseline.csv")) == 4 * len(names)


def test_the_benchmark_records_both_protocols_and_scopes(measured, capsys):
    assert bench.main(["--case", "chain_equal", "--name", "mine", "--version", "v1"]) == 0
    (path,) = measured.glob("*/mine.csv")
    found = {(row.implementation, row.scope, row.protocol) for row in read_rows(path)}
    assert found == {
        (implementation, scope, protocol)
        for implementation, scope in (
            ("gdn_prefill", "core"),
            ("gdn_prefill", "full"),
            ("gdn_prefill_fresh", "core"),
            ("gdn_prefill_lab", "full"),
            ("fla", "full"),
        )
        for protocol in ("oj", "graph")
    }
    printed = capsys.readouterr()
    assert "x left out: y" in printed.err
    assert printed.out.splitlines()[-1].split() == ["full", "graph", "fla", "1", "1", "2.000"]


@pytest.mark.parametrize("command", [baseline, bench])
@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--case", "nope"], "no case named nope; there are: short_tail_state"),
        (["--warmup", "-1"], "warmup is -1, must be an integer >= 0"),
        (["--repetitions", "0"], "repetitions is 0, must be an integer >= 1"),
        (["--timeout", "nan"], "nan is not above 0"),
    ],
)
def test_senseless_arguments_exit_with_2_gpu_or_not(command, arguments, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        command.main(arguments)
    assert exit_.value.code == 2
    printed = capsys.readouterr().err
    assert message in printed and "measured here" not in printed


def test_versions_and_files_that_do_not_exist_are_refused(capsys):
    for command, arguments, message in (
        (bench, ["--version", "v99"], "version is 'v99', must be one of v1"),
        (bench, ["--cases", "/no/such.csv"], "does not exist"),
        (baseline, ["--recorded", "/no/such.csv"], "No such file"),
    ):
        with pytest.raises(SystemExit) as exit_:
            command.main(arguments)
        assert exit_.value.code == 2
        assert message in capsys.readouterr().err


def test_a_fastest_peer_of_unknown_version_is_noted(measured, monkeypatch, capsys):
    assert baseline.main([]) == 0
    assert "version is unknown" not in capsys.readouterr().err
    original = FakeSession.compare

    def compare(self, case, entries):
        found = original(self, case, entries)
        return [replace(one, version="unknown") if one.scope == "full" else one for one in found]

    monkeypatch.setattr(FakeSession, "compare", compare)
    assert baseline.main([]) == 0
    assert capsys.readouterr().err.count("t100: fla's version is unknown") == 1
