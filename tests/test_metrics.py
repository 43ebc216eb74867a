"""Counters: ncu's table read, the calls between markers, what is recorded; ncu is a stand-in."""

import csv
import io
import sys
from pathlib import Path

import pytest
import torch

from cases import load_cases
from harness import metrics
from harness.metrics import (
    COUNTERS,
    MARKER,
    SHIPPED,
    Launch,
    calls_between_markers,
    collect,
    main,
    parse_report,
    read_metrics,
)
from harness.profile import MISSING
from harness.results import Stamp

CASES = [case for case in load_cases() if case.name in ("long_low_gva", "wide_gva_state")]
STAMP = Stamp("nvidia-h200", "2026-01-01T00:00:00+00:00", "abc")
CALL = ["gdn_chunk_cumsum_kernel", "gdn_forward_kernel", MARKER, "gdn_forward_kernel", MARKER]


def report(kernels, duration="664,704", without=(), tensor="32.889884"):
    """ncu's output for launches of `kernels`; the n-th forward launch takes n ns more."""
    names = [name for name in COUNTERS.values() if name not in without]
    buffer = io.StringIO()
    writer = csv.writer(buffer, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writerow(["ID", "Process ID", "Kernel Name", *names])
    writer.writerow(["", "", "", *("ns" if "time" in name else "%" for name in names)])
    for place, kernel in enumerate(kernels):
        values = ["1"] * len(names)
        values[names.index("gpu__time_duration.sum")] = duration
        active = COUNTERS["tensor_active"]
        if active in names:
            values[names.index(active)] = tensor
        writer.writerow([place, 456, kernel, *values])
    return f'==PROF== Profiling "gdn"\n{buffer.getvalue()}==PROF== Disconnected\n'


@pytest.fixture
def ncu(tmp_path):
    """Makes an executable that stands in for ncu, from the lines of its Python."""

    def make(body):
        tool = tmp_path / "ncu"
        log = "log = sys.argv[sys.argv.index('--log-file') + 1]"
        tool.write_text(f"#!{sys.executable}\nimport sys, time\n{log}\n{body}\n")
        tool.chmod(0o755)
        return str(tool)

    return make


def writes(text):
    return f"open(log, 'w').write({text!r})"


def test_numbers_and_units_are_read():
    first, marker = parse_report(report(["gdn_forward_kernel", MARKER]))
    assert first.kernel == "gdn_forward_kernel"
    assert first.counters["duration"] == (664704.0, "ns")
    assert first.counters["tensor_active"] == (32.889884, "%")
    assert set(first.counters) == set(COUNTERS)
    assert marker.kernel == MARKER


def test_what_ncu_lacks_is_left_out():
    lacking = report(["gdn_x"], without=[COUNTERS["occupancy"]], tensor="n/a")
    (launch,) = parse_report(lacking)
    assert set(COUNTERS) - set(launch.counters) == {"occupancy", "tensor_active"}


def test_no_table_shows_the_output():
    with pytest.raises(ValueError, match="no table.*No kernels were profiled"):
        parse_report("==WARNING== No kernels were profiled.")


def test_only_calls_between_markers_are_kept():
    names = ["a", "b", MARKER, "b", "c", MARKER, "a", MARKER, "d", MARKER, "e"]
    calls = calls_between_markers([Launch(name, {}) for name in names], 2)
    assert [[launch.kernel for launch in call] for call in calls] == [["b", "c"], ["d"]]


@pytest.mark.parametrize(
    "names, message",
    [(["a", MARKER, "b"], "1 markers.*must be 2"), (["a", MARKER, MARKER], "launched no kernel")],
)
def test_a_report_that_does_not_fit(names, message):
    with pytest.raises(ValueError, match=message):
        calls_between_markers([Launch(name, {}) for name in names], 1)


def test_a_version_gives_a_row_a_counter_a_kernel(ncu):
    found = collect(ncu(writes(report(CALL + CALL))), "v7", CASES, STAMP)
    assert len(found) == 2 * len(COUNTERS)
    assert [metric.case for metric in found[:: len(COUNTERS)]] == [case.name for case in CASES]
    duration = found[0]
    assert (duration.metric, duration.value, duration.unit) == ("duration", 664704.0, "ns")
    assert (duration.version, duration.kernel, duration.launch) == ("v7", "gdn_forward_kernel", 0)


def test_a_failure_shows_what_ncu_and_the_program_said(ncu):
    tool = ncu(writes("==ERROR== lost") + "\nprint('RuntimeError: boom')\nsys.exit(9)")
    with pytest.raises(ValueError, match="exit code 9: ==ERROR== lostRuntimeError: boom"):
        collect(tool, "v7", CASES, STAMP)


def test_a_hang_is_ended(ncu):
    with pytest.raises(ValueError, match="took over 0.5 s"):
        collect(ncu("time.sleep(60)"), "v7", CASES, STAMP, timeout_s=0.5)


@pytest.fixture
def on_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(metrics, "pick_device", lambda: torch.device("cuda"))
    monkeypatch.setattr(metrics.Stamp, "now", lambda _: STAMP)
    monkeypatch.setattr(metrics, "RESULTS", tmp_path)
    # write_metrics() took its default before.
    write = metrics.write_metrics
    monkeypatch.setattr(
        metrics, "write_metrics", lambda found, data, name: write(found, data, name, tmp_path)
    )
    return tmp_path / STAMP.device / "metrics.csv"


def test_versions_are_recorded_and_merged(ncu, on_gpu, monkeypatch, capsys):
    monkeypatch.setattr(metrics, "find_tool", lambda _: ncu(writes(report(CALL + CALL))))
    assert main(["--version", "v7", "--version", SHIPPED]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4
    monkeypatch.setattr(metrics, "find_tool", lambda _: ncu(writes(report(CALL, duration="5"))))
    assert main(["--version", "v7", "--case", "long_low_gva", "--merge"]) == 0
    durations = {
        (metric.version, metric.case): metric.value
        for metric in read_metrics(on_gpu)
        if metric.metric == "duration"
    }
    assert durations == {
        ("v7", "long_low_gva"): 5,
        ("v7", "wide_gva_state"): 664704,
        (SHIPPED, "long_low_gva"): 664704,
        (SHIPPED, "wide_gva_state"): 664704,
    }
    assert '"schema": "counters"' in on_gpu.with_suffix(".json").read_text()


def test_a_counter_that_is_absent_fails_but_the_others_are_recorded(
    ncu, on_gpu, monkeypatch, capsys
):
    lacking = report(CALL, without=[COUNTERS["occupancy"]])
    monkeypatch.setattr(metrics, "find_tool", lambda _: ncu(writes(lacking)))
    assert main(["--version", "v7", "--case", "long_low_gva"]) == 1
    assert "v7: ncu has no occupancy" in capsys.readouterr().err
    assert len(read_metrics(on_gpu)) == len(COUNTERS) - 1


def test_one_version_that_fails_leaves_the_others(ncu, on_gpu, monkeypatch, capsys):
    body = f"sys.exit(7) if 'v1' in sys.argv else {writes(report(CALL))}"
    monkeypatch.setattr(metrics, "find_tool", lambda _: ncu(body))
    assert main(["--version", "v1", "--version", "v7", "--case", "long_low_gva"]) == 1
    assert "v1: ncu ended with exit code 7" in capsys.readouterr().err
    assert {metric.version for metric in read_metrics(on_gpu)} == {"v7"}


def test_without_ncu_or_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(metrics, "find_tool", lambda _: None)
    assert main([]) == MISSING
    assert "not run: it needs ncu" in capsys.readouterr().err


def test_the_command_is_shown(monkeypatch, capsys):
    monkeypatch.setattr(metrics, "find_tool", lambda _: None)
    assert main(["--print-only", "--version", "v7"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert "--clock-control none" in line and f"'regex:^gdn_|{MARKER}'" in line
    assert line.endswith("--launch v7 --case long_low_gva --case wide_gva_state")


def test_an_unknown_version(capsys):
    with pytest.raises(SystemExit):
        main(["--version", "v8"])
    assert "version is 'v8', must be one of v1, " in capsys.readouterr().err


def test_a_bad_row_is_named(tmp_path):
    path = Path(tmp_path) / "metrics.csv"
    path.write_text(",".join(metrics.COLUMNS) + "\na,b,c,v7,x,0,k,duration,ns,fast\n")
    with pytest.raises(ValueError, match=r"metrics\.csv, line 2: .*fast"):
        read_metrics(path)


PAGES = ["--device", "nvidia-h200", "--date", "2026-01-01", "--revision", "abc"]


def test_printed_pages_are_taken_over(on_gpu, tmp_path, capsys):
    folder = tmp_path / "ncu"
    folder.mkdir()
    (folder / "v7_long_low_gva.csv").write_text(report(["gdn_forward_kernel"], duration="1,000"))
    (folder / "shipped_wide_gva_state.csv").write_text(report(["gdn_summary", "gdn_scan"]))
    assert main(["--pages", str(folder), *PAGES]) == 0
    found = {(metric.version, metric.case, metric.kernel) for metric in read_metrics(on_gpu)}
    assert found == {
        ("v7", "long_low_gva", "gdn_forward_kernel"),
        (SHIPPED, "wide_gva_state", "gdn_summary"),
        (SHIPPED, "wide_gva_state", "gdn_scan"),
    }
    assert read_metrics(on_gpu)[-1].date == "2026-01-01"
    assert len(capsys.readouterr().out.splitlines()) == 3


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("v8_long_low_gva", report(["gdn_x"]), "version is 'v8'"),
        ("v7_nowhere", report(["gdn_x"]), "no case named nowhere"),
        ("v7_chain_equal", "==ERROR== nothing", "no table of counters"),
        (None, "", "holds no .csv file"),
    ],
)
def test_pages_that_cannot_be_taken_over(name, text, message, tmp_path, capsys):
    if name:
        (tmp_path / f"{name}.csv").write_text(text)
    with pytest.raises(SystemExit):
        main(["--pages", str(tmp_path), *PAGES])
    assert message in capsys.readouterr().err


def test_pages_need_to_be_dated(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["--pages", str(tmp_path)])
    assert "--pages needs --device, --date and --revision" in capsys.readouterr().err


@pytest.mark.gpu
def test_what_runs_under_ncu(monkeypatch):
    markers = []
    monkeypatch.setattr(torch.cuda, "_sleep", markers.append)
    small = [case for case in load_cases() if case.name == "short_tail_state"]
    metrics.launch("v7", small, torch.device("cuda"))
    metrics.launch(SHIPPED, small, torch.device("cuda"))
    assert len(markers) == 4
