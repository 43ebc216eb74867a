"""The results schema: what a row may be, and that what is written is what is loaded."""

import csv
import json
from dataclasses import asdict, replace

import pytest
import torch

from harness.check import Status
from harness.evaluate import Outcome
from harness.results import (
    COLUMNS,
    RESULTS,
    Recorder,
    Row,
    Stamp,
    begin_metadata,
    command_line,
    finish_metadata,
    load_results,
    load_rows,
    read_rows,
    revision,
    to_row,
    write_results,
)

ROW = Row(
    device="nvidia-h200",
    date="2026-01-01T00:00:00+00:00",
    revision="abc",
    implementation="gdn_prefill",
    version="0.1.0",
    scope="core",
    protocol="oj",
    case="chain_equal",
    correctness="PASS",
    median_ms=0.2,
    p20_ms=0.1,
    p80_ms=0.3,
    repetitions=100,
)


def test_the_columns_are_the_agreed_ones():
    agreed = (
        "device,date,revision,implementation,version,scope,protocol,case,correctness,"
        "median_ms,p20_ms,p80_ms,repetitions,sm_mhz"
    )
    assert ",".join(COLUMNS) == agreed


@pytest.mark.parametrize(
    "change, message",
    [
        ({"scope": "half"}, "scope"),
        ({"protocol": "fast"}, "protocol"),
        ({"correctness": "OK"}, "correctness"),
        ({"device": ""}, "device"),
        ({"median_ms": None}, "all there or none"),
        ({"median_ms": 0.05}, "must rise"),
        ({"p20_ms": 0.0}, "must rise"),
        ({"repetitions": 0}, "must rise"),
        ({"correctness": "WRONG"}, "only a PASS"),
        ({"sm_mhz": 0}, "sm_mhz is 0"),
        (
            {"sm_mhz": 1980, "median_ms": None, "p20_ms": None, "p80_ms": None, "repetitions": 0},
            "go with a time",
        ),
    ],
)
def test_what_a_row_may_not_be(change, message):
    with pytest.raises(ValueError, match=message):
        replace(ROW, **change)


def untimed(row, correctness):
    return replace(
        row, correctness=correctness, median_ms=None, p20_ms=None, p80_ms=None, repetitions=0
    )


def test_written_rows_are_read_back(tmp_path):
    rows = [replace(ROW, sm_mhz=1710), ROW, untimed(replace(ROW, case="wide_gva_state"), "WRONG")]
    path = write_results("bench", rows, {"command": "x"}, root=tmp_path)
    assert path == tmp_path / "nvidia-h200" / "bench.csv"
    assert read_rows(path) == rows == load_rows(tmp_path)
    metadata = json.loads(path.with_suffix(".json").read_text())
    assert metadata == {"command": "x", "schema": "measurements"}
    assert not path.with_suffix(".samples.json").exists()


def test_the_loader_gives_one_table_of_all_files(tmp_path):
    write_results("a", [ROW], {}, root=tmp_path)
    write_results("b", [replace(ROW, device="other"), untimed(ROW, "PASS")][:1], {}, root=tmp_path)
    table = load_results(tmp_path)
    assert list(table.columns) == [*COLUMNS, "file"]
    assert sorted(zip(table.device, table.file, strict=True)) == [
        ("nvidia-h200", "a"),
        ("other", "b"),
    ]
    assert list(load_results(tmp_path, device="other").file) == ["b"]
    assert table.median_ms.dtype == float


def test_no_results_is_an_empty_table(tmp_path):
    assert list(load_results(tmp_path).columns) == [*COLUMNS, "file"]


def test_other_tables_are_left_alone(tmp_path):
    write_results("a", [ROW], {}, root=tmp_path)
    (tmp_path / "nvidia-h200" / "counters.csv").write_text("kernel,registers\nx,1\n")
    assert len(load_rows(tmp_path)) == 1


def test_further_columns_are_allowed(tmp_path):
    path = tmp_path / "more.csv"
    with path.open("w", newline="") as handle:
        writer = csv.writer(handle)
        writer.writerow([*COLUMNS, "registers"])
        writer.writerow([*asdict(ROW).values(), 168])
    assert read_rows(path) == [ROW]


def test_a_file_from_before_clocks_were_taken_is_read_and_merged_into(tmp_path):
    path = write_results("old", [ROW], {"date": 1}, root=tmp_path)
    lines = path.read_text().splitlines()
    assert lines[0].endswith(",repetitions,sm_mhz") and lines[1].endswith(",100,")
    path.write_text("".join(line.rsplit(",", 1)[0] + "\n" for line in lines))
    assert read_rows(path) == [ROW]
    newer = replace(ROW, case="other", sm_mhz=1975)
    write_results("old", [newer], {"date": 2}, root=tmp_path, merge=True)
    assert read_rows(path) == [ROW, newer]
    assert path.read_text().splitlines()[2].endswith(",100,1975")


def test_a_missing_column_is_named(tmp_path):
    path = tmp_path / "less.csv"
    path.write_text("device,date\na,b\n")
    with pytest.raises(ValueError, match=r"less\.csv: columns missing: revision"):
        read_rows(path)


def test_a_bad_row_is_named_by_file_and_line(tmp_path):
    path = write_results("a", [ROW], {}, root=tmp_path)
    path.write_text(path.read_text().replace("core", "half"))
    with pytest.raises(ValueError, match=r"a\.csv, line 2: scope"):
        load_rows(tmp_path)


def test_rows_of_two_devices_are_refused(tmp_path):
    with pytest.raises(ValueError, match="must be of one"):
        write_results("a", [ROW, replace(ROW, device="other")], {}, root=tmp_path)


def test_outcomes_become_rows_and_their_times_are_kept(tmp_path):
    stamp = Stamp("nvidia-h200", "2026-01-01", "abc")
    times = (3.0, 1.0, 2.0)
    timed = Outcome("c", "fla", "0.6.0", "full", "graph", Status.PASS, "", times, "", 1714.6)
    failed = Outcome("c", "ours", "1", "core", "oj", Status.TIMEOUT, "no answer")
    rows = [to_row(timed, stamp), to_row(failed, stamp)]
    assert (rows[0].median_ms, rows[0].repetitions) == (2.0, 3)
    assert rows[0].p20_ms == pytest.approx(1.4)
    assert (rows[0].sm_mhz, rows[1].sm_mhz) == (1715, None)
    assert (rows[1].correctness, rows[1].median_ms) == ("TIMEOUT", None)
    path = write_results("x", rows, {}, [timed, failed], root=tmp_path)
    samples = json.loads(path.with_suffix(".samples.json").read_text())
    assert [sample["times_ms"] for sample in samples] == [[3.0, 1.0, 2.0]]
    assert read_rows(path) == rows


def test_merging_keeps_the_other_measurements(tmp_path):
    first = Outcome("a", "fla", "1", "full", "oj", Status.PASS, times_ms=(1.0,))
    other = replace(first, case="b", times_ms=(2.0,))
    again = replace(first, times_ms=(3.0,))
    stamp = Stamp("gpu", "2026-01-01", "r")

    def write(outcome, run, merge=True):
        rows, metadata = [to_row(outcome, stamp)], {"date": run}
        return write_results("x", rows, metadata, [outcome], root=tmp_path, merge=merge)

    write(first, 1)
    write(other, 2)
    write(again, 3)
    path = write(again, 3)
    assert [(row.case, row.median_ms) for row in read_rows(path)] == [("b", 2.0), ("a", 3.0)]
    samples = json.loads(path.with_suffix(".samples.json").read_text())
    assert [sample["times_ms"] for sample in samples] == [[2.0], [3.0]]
    metadata = json.loads(path.with_suffix(".json").read_text())
    assert metadata["date"] == 3
    assert [earlier["date"] for earlier in metadata["earlier"]] == [1, 2]
    assert len(read_rows(write(first, 4, merge=False))) == 1


def test_a_run_is_recorded_as_it_goes(tmp_path):
    stamp = Stamp("gpu", "2026-01-01", "r")
    recorder = Recorder("x", stamp, root=tmp_path)
    first = Outcome("a", "fla", "1", "full", "oj", Status.PASS, times_ms=(1.0,))
    assert len(read_rows(recorder.add([first]))) == 1
    path = recorder.add([replace(first, case="b")], hidden_seed=5)
    assert [row.case for row in read_rows(path)] == ["a", "b"]
    metadata = json.loads(path.with_suffix(".json").read_text())
    assert (metadata["revision"], metadata["hidden_seed"]) == ("r", 5)


def test_metadata_says_what_it_was_measured_with():
    stamp = Stamp.now(torch.device("cpu"))
    metadata = finish_metadata(begin_metadata(stamp), seed=3)
    assert metadata["device"] == "cpu"
    assert metadata["software"]["torch"].startswith(torch.__version__.split("+")[0])
    assert {"command", "clocks_before", "clocks_after", "driver", "seed"} <= set(metadata)


def test_the_command_is_told_without_the_machines_paths():
    root = RESULTS.parent
    argv = [str(root / "harness" / "bench.py"), "--case", "a b"]
    assert command_line(argv) == "python harness/bench.py --case 'a b'"
    assert command_line(["run.py"]) == "python run.py"
    assert command_line(["/elsewhere/x.py"]) == "python /elsewhere/x.py"


def test_the_revision_of_no_repository(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.delenv("GDN_REVISION", raising=False)
    assert revision(tmp_path) == "unknown"
    monkeypatch.setenv("GDN_REVISION", "abc123")
    assert revision(tmp_path) == "abc123"


def test_the_recorded_results_of_this_repository_load():
    for row in load_rows(RESULTS):
        assert row.device != "cpu"
