"""Sustained load: the arguments, what is made of times and readings, the files."""

import csv
import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

from cases import load_cases
from harness.results import Stamp, begin_metadata, finish_metadata, write_table

PATH = Path(__file__).resolve().parents[1] / "benchmarks" / "sustained.py"
CPU = torch.device("cpu")


def load():
    before = list(sys.path)
    spec = importlib.util.spec_from_file_location("sustained", PATH)
    module = sys.modules["sustained"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


sustained = load()
# 2 ms at the boost clock, then 60 ms held down.
TIMES_US = [100.0] * 20 + [120.0] * 500
READINGS = [
    sustained.parse_reading(1.0, "1725, 701.5, 0x0000000000000004"),
    sustained.parse_reading(1.1, "1710, 699.5, 0x0000000000000024"),
    sustained.parse_reading(1.2, "1695, 690, 0x0000000000000000"),
]


def test_a_line_of_nvidia_smi_is_read():
    assert READINGS[0] == sustained.Reading(1.0, 1725.0, 701.5, 4)
    absent = sustained.Reading(0.0, None, None, 0)
    for line in ("[N/A], [N/A], [N/A]\n", "Unable to determine the device handle", ""):
        assert sustained.parse_reading(0.0, line) == absent


def test_first_and_last_replays_are_told_apart():
    row = sustained.summary("c", TIMES_US, READINGS)
    assert tuple(row) == sustained.COLUMNS
    assert (row["first_us"], row["last_us"], row["last_over_first"]) == (
        "100.00",
        "120.00",
        "1.200",
    )
    assert (row["replays"], row["sm_mhz"], row["power_w"]) == (520, "1710", "700")
    assert row["reasons"] == "sw_power_cap+sw_thermal_slowdown"


def test_the_last_replays_are_those_of_the_last_20_ms():
    assert len(sustained.last_of([100.0] * 1000)) == 200
    assert sustained.last_of([3e3] * 5 + [30e3]) == [30e3]
    assert sustained.last_of([1.0, 2.0]) == [1.0, 2.0]


def test_without_readings_the_times_remain():
    row = sustained.summary("c", TIMES_US, [])
    assert (row["sm_mhz"], row["power_w"], row["reasons"]) == (None, None, "")
    assert row["last_us"] == "120.00"


def test_rows_and_metadata_are_written(tmp_path):
    path = tmp_path / "sustained.csv"
    rows = [
        sustained.summary(name, TIMES_US, readings)
        for name, readings in (("a", READINGS), ("b", []))
    ]
    metadata = begin_metadata(Stamp.now(CPU)) | {"schema": sustained.SCHEMA, "unit": "us"}
    write_table(path, sustained.COLUMNS, rows, finish_metadata(metadata))
    with path.open(newline="") as handle:
        read = list(csv.DictReader(handle))
    assert tuple(read[0]) == sustained.COLUMNS
    assert [(row["case"], row["sm_mhz"]) for row in read] == [("a", "1710"), ("b", "")]
    about = json.loads(path.with_suffix(".json").read_text())
    assert {"device", "date", "revision", "software", "command", "driver"} <= set(about)
    assert (about["schema"], about["unit"]) == ("sustained", "us")


def test_without_a_gpu_it_says_so_in_a_line_and_writes_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sustained, "pick_device", lambda: CPU)
    path = tmp_path / "sustained.csv"
    assert sustained.main(["--out", str(path)]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("nothing to measure: no GPU") and printed.err.count("\n") == 1
    assert printed.out == "" and not path.exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--case", "x"], "no case named x"),
        (["--seconds", "0"], "0 is not above 0"),
        (["--seconds", "soon"], "invalid seconds value: 'soon'"),
        (["--out", "sustained.json"], "must end in .csv"),
        (["--out", "no/such/folder.csv"], "must be a file in a folder that exists"),
    ],
)
def test_senseless_arguments_exit_with_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        sustained.main(arguments)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


class Simulated:
    """What measure() needs of a GPU: replays whose times are given, and a clock of the host."""

    def __init__(self, monkeypatch):
        self.said = []
        monkeypatch.setattr(sustained, "captured", lambda *_: self.said.append("captured"))
        monkeypatch.setattr(sustained, "rest", lambda device: self.said.append("rest"))
        monkeypatch.setattr(sustained, "replay", self.replay)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: self.said.append("wait"))
        self.now = 10.0
        monkeypatch.setattr(sustained.time, "monotonic", lambda: self.now)

    def replay(self, call, duration_s):
        self.said.append("replay")
        self.now += duration_s
        return TIMES_US

    def between(self, start, end):
        self.said.append((start, end))
        return READINGS


def test_a_case_rests_behind_its_capture_and_is_read_at_its_end(monkeypatch):
    simulated = Simulated(monkeypatch)
    row = sustained.measure(load_cases()[0], 2.0, CPU, simulated)
    assert simulated.said == ["captured", "wait", "rest", "replay", (11.5, 12.0)]
    assert (row["case"], row["sm_mhz"]) == ("short_tail_state", "1710")


@pytest.mark.gpu
def test_a_small_case_is_replayed_without_a_pause(tmp_path):
    path = tmp_path / "sustained.csv"
    assert (
        sustained.main(["--case", "short_tail_state", "--seconds", "0.2", "--out", str(path)]) == 0
    )
    (row,) = csv.DictReader(path.open(newline=""))
    assert int(row["replays"]) * float(row["last_us"]) == pytest.approx(0.2e6, rel=0.3)
    assert float(row["sm_mhz"]) > 0 and float(row["power_w"]) > 0
