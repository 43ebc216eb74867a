"""Baselines: whose times count, and that what is written can be loaded."""

from dataclasses import replace

import pytest
import torch

from cases import Case, load_baselines, load_provenance
from harness import baseline, bench
from harness.baseline import pick_baseline, write_baselines
from harness.check import Status
from harness.evaluate import Outcome


def outcome(implementation, version, scope, *times, status=Status.PASS):
    return Outcome("c", implementation, version, scope, "oj", status, "why" * (not times), times)


NAIVE = outcome("gdn_ladder", "v1", "core", 4.0, 5.0, 6.0)
OURS = outcome("gdn_prefill", "0.1.0", "full", 0.1)
FAST = outcome("flashinfer", "0.7", "full", 1.0)
SLOW = outcome("fla", "0.6", "full", 2.0)
FAST_CORE = outcome("flash_qla", "0.1", "core", 0.2)
FASTER_BUT_WRONG = outcome("flash_qla", "0.1", "full", status=Status.WRONG)


def test_the_fastest_right_full_forward_of_a_peer_counts():
    found = pick_baseline("c", [SLOW, OURS, FAST_CORE, FASTER_BUT_WRONG, FAST, NAIVE])
    assert (found.t60_ms, found.t100_ms) == (5.0, 1.0)
    assert found.t60_implementation == "gdn_ladder v1"
    assert found.t100_implementation == "flashinfer 0.7"


@pytest.mark.parametrize(
    "outcomes, message",
    [
        ([FAST], "no t60, gdn_ladder v1 is not measured"),
        ([FAST, outcome("gdn_ladder", "v1", "core", status=Status.TIMEOUT)], "v1 is TIMEOUT: why"),
        ([NAIVE, OURS, FAST_CORE], "no t100, no peer's full forward is right"),
        ([NAIVE, FASTER_BUT_WRONG], "flash_qla WRONG: why"),
        ([NAIVE, outcome("fla", "0.6", "full", 7.0)], "must be longer"),
    ],
)
def test_what_is_no_baseline_is_refused(outcomes, message):
    with pytest.raises(ValueError, match=message):
        pick_baseline("c", outcomes)


def test_written_baselines_are_loaded(tmp_path):
    found = pick_baseline("c", [NAIVE, FAST])
    path = write_baselines("some-gpu", [found], {"protocol": "oj"}, tmp_path)
    assert path == tmp_path / "some-gpu.csv"
    assert load_baselines("some-gpu", tmp_path) == {"c": found}
    assert load_provenance("some-gpu", tmp_path) == {"protocol": "oj"}


@pytest.mark.parametrize("command", [baseline, bench])
def test_nothing_is_measured_without_a_gpu(command, capsys, monkeypatch):
    monkeypatch.setattr(command, "pick_device", lambda: torch.device("cpu"))
    assert command.main([]) == 1
    assert "no GPU" in capsys.readouterr().err


def test_the_benchmarks_lines_and_means():
    case = Case("c", 1, 64, 1, 1, False, "mixed")
    ours = outcome("gdn_prefill", "0.1.0", "core", 1.0, 2.0)
    replayed = replace(ours, protocol="graph", times_ms=(1.4, 1.4))
    peer = outcome("flash_qla", "0.1", "core", 3.0, 6.0)
    text = bench.report([case], [ours, replayed, peer, FASTER_BUT_WRONG])
    lines = text.splitlines()
    assert lines[0].split()[:5] == ["CASE", "SCOPE", "PROTOCOL", "IMPLEMENTATION", "RESULT"]
    assert lines[1].split()[3:8] == ["gdn_prefill", "0.1.0", "PASS", "1.500000", "1.200000"]
    assert lines[1].split()[9] == "100.0"
    assert lines[2].split()[2] == "graph"
    assert lines[3].split()[-1] == "3.000"
    assert lines[4].split()[-1] == "WRONG"
    assert lines[-1].split() == ["core", "oj", "flash_qla", "0.1", "1", "3.000"]
