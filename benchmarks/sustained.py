"""What the power limit does to the shipped core under sustained load.

    python benchmarks/sustained.py                       every public case, about 20 s
    python benchmarks/sustained.py --case wide_gva_state --seconds 3 --out sustained.csv

Kernels that fill the device draw more than it may for long: the first replays after a rest run at
the boost clock, those after some 20 ms of work at what the limit leaves. Each case's core, as
gdn_prefill_forward launches it by default, is captured, rests for 0.5 s and is replayed back to
back for --seconds. The columns:

    replays              so many, without a pause
    first_us             median of the first 20: at the boost clock
    last_us              median of those of the last 20 ms: at the clock that can be sustained
    last_over_first      what sustained load costs
    sm_mhz, power_w      medians of what nvidia-smi said over the last quarter of the replays
    reasons              why the clock was held down then, by nvidia-smi's names

Times are microseconds from the start of a replay to that of the next. What nvidia-smi does not tell
is empty. --out writes the rows and, beside them, device, versions and revision as JSON. Clocks and
limits are read, never set.
"""

import argparse
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernel")]

import gdn_prefill  # noqa: E402
from cases import Case, make_inputs  # noqa: E402
from gdn_prefill.runtime import record  # noqa: E402
from harness.device import pick_device, why_untimed  # noqa: E402
from harness.options import seconds  # noqa: E402
from harness.results import Stamp, begin_metadata, finish_metadata, write_table  # noqa: E402
from harness.selection import select_cases  # noqa: E402
from harness.tables import fixed, render  # noqa: E402
from harness.timing import REST_S, Replay, median_known, rest  # noqa: E402

SCHEMA = "sustained"
COLUMNS = (
    "case",
    "replays",
    "first_us",
    "last_us",
    "last_over_first",
    "sm_mhz",
    "power_w",
    "reasons",
)
FIRST_REPLAYS = 20
LAST_US = 20e3
# Readings from this share of the replays' duration on are of the end.
LATE = 0.75
BATCH = 100
# Half a millisecond of spinning, in which the first replays are queued.
LEAD_CYCLES = 1_000_000
QUERY = ("clocks.sm", "power.draw.instant", "clocks_event_reasons.active")
PERIOD_MS = 20
# Bits of clocks_event_reasons.active.
REASONS = {
    0x1: "gpu_idle",
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}


@dataclass(frozen=True)
class Reading:
    """What nvidia-smi said at a time of time.monotonic(); None and 0 where it did not tell."""

    at: float
    sm_mhz: float | None
    power_w: float | None
    reasons: int


def parse_reading(at: float, line: str) -> Reading:
    """A line of nvidia-smi's CSV, without units, of QUERY."""
    fields = [field.strip() for field in line.split(",")]
    clock, power, reasons = (*fields, "", "", "")[: len(QUERY)]
    return Reading(at, _number(clock), _number(power), int(_number(reasons, 16) or 0))


def _number(text: str, base: int = 10) -> float | None:
    try:
        return float(int(text, base)) if base != 10 else float(text)
    except ValueError:  # such as [N/A]
        return None


class Monitor:
    """nvidia-smi in the background, while it is entered; without one there are no readings."""

    def __init__(self, device: torch.device) -> None:
        self._uuid = torch.cuda.get_device_properties(device).uuid
        self._readings: list[Reading] = []
        self._process: subprocess.Popen | None = None

    def __enter__(self) -> "Monitor":
        command = ["nvidia-smi", f"--id=GPU-{self._uuid}", f"--query-gpu={','.join(QUERY)}"]
        command += ["--format=csv,noheader,nounits", f"--loop-ms={PERIOD_MS}"]
        try:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        except OSError as error:
            print(f"no clocks and power: nvidia-smi: {error.strerror}", file=sys.stderr)
            return self
        threading.Thread(target=self._read, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _read(self) -> None:
        for line in self._process.stdout:
            self._readings.append(parse_reading(time.monotonic(), line))

    def between(self, start: float, end: float) -> list[Reading]:
        """The readings that came between two times of time.monotonic()."""
        return [reading for reading in tuple(self._readings) if start <= reading.at <= end]


def captured(case: Case, device: torch.device) -> Replay:
    """The case's core as a graph, after a call whose results are finite."""
    inputs = make_inputs(case, device)
    g_cumsum, A = gdn_prefill.prepare(inputs.k, inputs.g, inputs.beta)
    arguments = (inputs.q, inputs.k, inputs.v, g_cumsum, inputs.beta, A, inputs.initial_state)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        return gdn_prefill.gdn_prefill_forward(*arguments)

    if not all(bool(torch.isfinite(result).all()) for result in run()):
        raise ValueError(f"{case.name}: results are not finite, must be to draw the usual power")
    return Replay(record(device, run), run, None)


def replay(call: Replay, duration_s: float) -> list[float]:
    """Replays back to back for so long; microseconds from each one's start to the next one's.

    A batch is queued before the one ahead of it is waited for, so that the device never is idle.
    """
    times: list[float] = []
    ahead: list[torch.cuda.Event] = []
    end = time.monotonic() + duration_s
    torch.cuda._sleep(LEAD_CYCLES)
    while time.monotonic() < end:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(BATCH + 1)]
        for mark in marks[:-1]:
            mark.record()
            call()
        marks[-1].record()
        times += _intervals(ahead)
        ahead = marks
    return times + _intervals(ahead)


def _intervals(marks: Sequence[torch.cuda.Event]) -> list[float]:
    """Microseconds between events, the last of which is waited for."""
    if marks:
        marks[-1].synchronize()
    return [1e3 * a.elapsed_time(b) for a, b in zip(marks, marks[1:], strict=False)]


def last_of(times_us: Sequence[float], span_us: float = LAST_US) -> Sequence[float]:
    """The times at the end that together last `span_us`, or all."""
    total = 0.0
    for number, taken in enumerate(reversed(times_us), 1):
        total += taken
        if total >= span_us:
            return times_us[-number:]
    return times_us


def summary(case: str, times_us: Sequence[float], readings: Iterable[Reading]) -> dict:
    """The row of a case, of the times of its replays and of what was read at their end."""
    readings = list(readings)
    first = statistics.median(times_us[:FIRST_REPLAYS])
    last = statistics.median(last_of(times_us))
    held = 0
    for reading in readings:
        held |= reading.reasons
    clock = median_known(reading.sm_mhz for reading in readings)
    power = median_known(reading.power_w for reading in readings)
    return {
        "case": case,
        "replays": len(times_us),
        "first_us": fixed(first, 2),
        "last_us": fixed(last, 2),
        "last_over_first": fixed(last / first, 3),
        "sm_mhz": fixed(clock, 0),
        "power_w": fixed(power, 0),
        "reasons": "+".join(name for bit, name in REASONS.items() if held & bit),
    }


def measure(case: Case, duration_s: float, device: torch.device, monitor: Monitor) -> dict:
    """The row of a case."""
    call = captured(case, device)
    torch.cuda.synchronize(device)
    rest(device)
    start = time.monotonic()
    times_us = replay(call, duration_s)
    end = time.monotonic()
    return summary(case.name, times_us, monitor.between(start + LATE * (end - start), end))


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 if every case was measured, 2 where nothing can be or arguments make no sense."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        cases = select_cases(options.case)
        if options.out is not None:
            _check_out(options.out)
    except ValueError as error:
        parser.error(str(error))
    device = pick_device()
    untimed = why_untimed(device)
    if untimed:
        print(f"nothing to measure: {untimed}", file=sys.stderr)
        return 2
    metadata = begin_metadata(Stamp.now(device))
    metadata |= {"schema": SCHEMA, "unit": "us", "rest_s": REST_S, "seconds": options.seconds}
    rows: list[dict] = []
    with Monitor(device) as monitor:
        for case in cases:
            rows.append(measure(case, options.seconds, device, monitor))
            if options.out is not None:
                write_table(options.out, COLUMNS, rows, finish_metadata(metadata))
    print(render(COLUMNS, [tuple(row.values()) for row in rows]), end="")
    return 0


def _check_out(path: Path) -> None:
    """Raises ValueError, before anything runs, for what is no CSV or lies in no folder."""
    if path.suffix != ".csv":
        raise ValueError(f"--out is {path}, must end in .csv")
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"--out is {path}, must be a file in a folder that exists")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--case", action="append", default=[], metavar="NAME", help="default: all public cases"
    )
    parser.add_argument(
        "--seconds",
        type=seconds,
        default=1.0,
        metavar="S",
        help="of replays of each case (default: %(default)s)",
    )
    parser.add_argument("--out", type=Path, metavar="CSV", help="and its metadata as .json")
    return parser


if __name__ == "__main__":
    sys.exit(main())
