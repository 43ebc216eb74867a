"""Hardware counters of the versions' kernels, by Nsight Compute: results/<device>/metrics.csv.

    python -m harness.metrics
    python -m harness.metrics --version v7 --version v15 --case wide_gva_state --merge
    python -m harness.metrics --pages results/nvidia-h200/ncu --device nvidia-h200 \
        --date 2026-11-29 --revision e5801a5b605b

One process a version, one after another under ncu. In it every case is called until its caches are
warm, then once between two marker kernels: the counters of that call's kernels are recorded, one
row each. Nothing is timed or checked here; ncu repeats each kernel with its caches flushed, so its
durations are not those of the measurements. --pages takes tables that ncu printed before.
"""

import argparse
import contextlib
import csv
import io
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

from cases import Case, make_inputs

from .child import ROOT, child_environment
from .device import pick_device
from .implementations import CORE, OURS, get, ladder_versions
from .options import seconds
from .problem import Problem, prepare_inputs
from .profile import MISSING, find_tool
from .progress import Progress, note
from .results import RESULTS, SHIPPED, Stamp, begin_metadata, finish_metadata
from .selection import select_cases

NAME = "metrics"
SCHEMA = "counters"
VERSIONS = ("v1", "v6", "v7", "v14", "v20", "four_group", "resident", SHIPPED)
# The kernel by which counters of an earlier release are told from those of the shipped one.
FORMER_KERNEL, FORMER_VERSION = "gdn_forward_kernel", "four_group"
CASES = ("long_low_gva", "wide_gva_state")
TIMEOUT_S = 120.0
# The first call compiles, the second captures a graph where there is one, the third replays it.
WARM_CALLS = 2
MARKER = "spin_kernel"
KERNELS = f"regex:^gdn_|{MARKER}"

# Why a warp that could not issue waited, and "selected" for the one that issued.
STALLS = (
    "barrier",
    "branch_resolving",
    "dispatch_stall",
    "drain",
    "gmma",
    "imc_miss",
    "lg_throttle",
    "long_scoreboard",
    "math_pipe_throttle",
    "membar",
    "mio_throttle",
    "misc",
    "no_instruction",
    "not_selected",
    "selected",
    "short_scoreboard",
    "sleeping",
    "tex_throttle",
    "wait",
)
# Recorded name -> ncu's, as ncu 2025.3 has them on sm_90. "active": over the cycles of the
# multiprocessors that had work; "elapsed": over those of all. hmma counts every bf16 product.
COUNTERS: Mapping[str, str] = {
    "duration": "gpu__time_duration.sum",
    "tensor_active": "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active",
    "issue_active": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "occupancy": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "dram_throughput": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "l2_throughput": "lts__t_sectors.avg.pct_of_peak_sustained_elapsed",
    "blocks": "launch__grid_size",
    "threads_per_block": "launch__block_size",
    "registers_per_thread": "launch__registers_per_thread",
    "shared_memory_per_block": "launch__shared_mem_per_block",
    **{
        f"stall_{reason}": f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio"
        for reason in STALLS
    },
}


@dataclass(frozen=True)
class Metric:
    """One counter of one kernel of one call; the fields are the columns.

    version is a version of the ladder or SHIPPED; launch the kernel's place in the call, from 0;
    metric a name of COUNTERS; unit ncu's base unit (ns, %, byte, ...), empty for a ratio or count.
    """

    device: str
    date: str
    revision: str
    version: str
    case: str
    launch: int
    kernel: str
    metric: str
    unit: str
    value: float


COLUMNS = tuple(field.name for field in fields(Metric))


@dataclass(frozen=True)
class Launch:
    """A kernel launch as ncu reports it; counters: recorded name -> (value, unit)."""

    kernel: str
    counters: Mapping[str, tuple[float, str]]


def parse_report(text: str) -> list[Launch]:
    """The launches in ncu's raw page as CSV, in order; other lines of its output are skipped.

    A counter that ncu left out, or has no number for, is left out. Raises ValueError where there is
    no table.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID",')), None)
    if start is None:
        raise ValueError(f"no table of counters in ncu's output, which ends {text[-600:].strip()}")
    table = [line for line in lines[start:] if line.startswith('"')]
    units, *rows = csv.DictReader(io.StringIO("\n".join(table)), restval="")
    return [Launch(row["Kernel Name"], _counters(row, units)) for row in rows]


def _counters(row: Mapping[str, str], units: Mapping[str, str]) -> dict[str, tuple[float, str]]:
    counters = {}
    for name, counter in COUNTERS.items():
        number = row.get(counter, "").replace(",", "")
        with contextlib.suppress(ValueError):
            counters[name] = float(number), units[counter]
    return counters


def calls_between_markers(launches: Sequence[Launch], count: int) -> list[list[Launch]]:
    """The launches of each of the `count` calls that a pair of markers encloses.

    Raises ValueError for another number of markers, or a call without a kernel.
    """
    parts: list[list[Launch]] = [[]]
    for launch in launches:
        if MARKER in launch.kernel:
            parts.append([])
        else:
            parts[-1].append(launch)
    if len(parts) != 2 * count + 1:
        raise ValueError(f"{len(parts) - 1} markers in the report, must be {2 * count}")
    calls = parts[1::2]
    if not all(calls):
        raise ValueError("a call launched no kernel that ncu saw")
    return calls


def ncu_command(tool: str, log: Path, version: str, cases: Sequence[Case]) -> list[str]:
    """ncu around this module's --launch."""
    return [
        tool,
        "--clock-control",
        "none",
        "--kernel-name",
        KERNELS,
        "--metrics",
        ",".join(COUNTERS.values()),
        "--page",
        "raw",
        "--csv",
        "--print-units",
        "base",
        "--log-file",
        str(log),
        sys.executable,
        "-m",
        "harness.metrics",
        "--launch",
        version,
        *(argument for case in cases for argument in ("--case", case.name)),
    ]


def launch(version: str, cases: Sequence[Case], device: torch.device) -> None:
    """What runs under ncu: every case warm, then one call of it between two markers."""
    implementation = get(OURS) if version == SHIPPED else get(OURS, version=version)
    unsolved = torch.empty(0)
    for case in cases:
        inputs = make_inputs(case, device)
        prepared = prepare_inputs(inputs)
        problem = Problem(case, inputs, prepared.g_cumsum, prepared.A, unsolved, unsolved)
        call = implementation.bind(problem, CORE)
        for _ in range(WARM_CALLS):
            call()
        torch.cuda._sleep(1)
        call()
        torch.cuda._sleep(1)
        torch.cuda.synchronize(device)


def collect(
    tool: str, version: str, cases: Sequence[Case], stamp: Stamp, timeout_s: float = TIMEOUT_S
) -> list[Metric]:
    """Runs one version under ncu. Raises ValueError saying what went wrong, its output included."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.log"
        code, output = _run(ncu_command(tool, log, version, cases), timeout_s)
        report = log.read_text(errors="replace") if log.is_file() else ""
    if code != 0:
        ended = f"took over {timeout_s:g} s" if code is None else f"ended with exit code {code}"
        raise ValueError(f"ncu {ended}: {(report + output)[-600:].strip()}")
    calls = calls_between_markers(parse_report(report), len(cases))
    return [
        metric
        for case, launches in zip(cases, calls, strict=True)
        for metric in _metrics(launches, version, case.name, stamp)
    ]


def _metrics(launches: Iterable[Launch], version: str, case: str, stamp: Stamp) -> list[Metric]:
    return [
        Metric(
            **asdict(stamp),
            version=version,
            case=case,
            launch=place,
            kernel=found.kernel,
            metric=name,
            unit=unit,
            value=value,
        )
        for place, found in enumerate(launches)
        for name, (value, unit) in found.counters.items()
    ]


def read_pages(folder: Path, stamp: Stamp) -> list[Metric]:
    """The counters in VERSION_CASE.csv files, ncu's raw pages of one call each.

    Raises ValueError for a folder without such files, another name, or a file without a table.
    """
    paths = sorted(folder.glob("*.csv"))
    if not paths:
        raise ValueError(f"{folder} holds no .csv file")
    metrics = []
    for path in paths:
        version, _, case = path.stem.partition("_")
        try:
            check_versions([version])
            select_cases([case])
            metrics += _metrics(parse_report(path.read_text()), version, case, stamp)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    return metrics


def _run(command: Sequence[str], timeout_s: float) -> tuple[int | None, str]:
    """Exit code and output; the code is None if it was ended after `timeout_s`."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**child_environment(), "GDN_PROFILING": "ncu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return None, output
    return process.returncode, output


def write_metrics(
    metrics: Sequence[Metric],
    metadata: Mapping[str, object],
    name: str = NAME,
    root: Path = RESULTS,
) -> Path:
    """Writes results/<device>/<name>.csv and .json; returns the CSV's path."""
    path = root / metrics[0].device / f"{name}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as handle:
        writer = csv.writer(handle, lineterminator="\n")
        writer.writerow(COLUMNS)
        for metric in metrics:
            writer.writerow({**asdict(metric), "value": f"{metric.value:.6g}"}.values())
    text = json.dumps({**metadata, "schema": SCHEMA, "counters": COUNTERS}, indent=2, default=str)
    path.with_suffix(".json").write_text(text + "\n", encoding="utf-8")
    return path


def read_metrics(path: Path) -> list[Metric]:
    """The recorded counters of one file. Raises ValueError naming its file and line."""
    with path.open(newline="", encoding="utf-8") as handle:
        reader = csv.DictReader(handle)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise ValueError(f"{path}: columns {reader.fieldnames}, must be {list(COLUMNS)}")
        metrics = []
        for raw in reader:
            try:
                numbers = {"launch": int(raw["launch"]), "value": float(raw["value"])}
                metrics.append(Metric(**{**raw, **numbers}))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {reader.line_num}: {error}") from None
        return metrics


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 if every counter of every version was recorded, 3 where ncu or a GPU is missing."""
    parser = _parser()
    options = parser.parse_args(argv)
    versions = options.version or list(VERSIONS)
    try:
        cases = select_cases(options.case or CASES)
        check_versions([options.launch] if options.launch else versions)
        if options.pages:
            return _import(options)
    except ValueError as error:
        parser.error(str(error))
    device = pick_device()
    if options.launch:
        launch(options.launch, cases, device)
        return 0
    tool = find_tool("ncu")
    if options.print_only:
        for version in versions:
            print(shlex.join(ncu_command(tool or "ncu", Path("ncu.log"), version, cases)))
        return 0
    if tool is None or device.type != "cuda":
        note("not run: it needs ncu, on PATH or where NVIDIA installs it, and a GPU")
        return MISSING
    return _measure(options, tool, versions, cases, Stamp.now(device))


def _import(options: argparse.Namespace) -> int:
    if not (options.device and options.date and options.revision):
        raise ValueError("--pages needs --device, --date and --revision of the run")
    stamp = Stamp(options.device, options.date, options.revision)
    metrics = read_pages(options.pages, stamp)
    metadata = {**asdict(stamp), "pages": options.pages.name}
    write_metrics(metrics, metadata, options.name)
    return 0 if _show(metrics) else 1


def _show(metrics: Iterable[Metric]) -> bool:
    """Prints a line a kernel and what ncu left out; False if it left out anything."""
    complete = True
    for kernel, counters in by_kernel(metrics).items():
        print(_line(kernel, counters), flush=True)
        absent = [name for name in COUNTERS if name not in counters]
        if absent:
            note(f"{kernel[0]}: ncu has no {', '.join(absent)}")
            complete = False
    return complete


def _measure(
    options: argparse.Namespace,
    tool: str,
    versions: Sequence[str],
    cases: Sequence[Case],
    stamp: Stamp,
) -> int:
    path = RESULTS / stamp.device / f"{options.name}.csv"
    metrics = read_metrics(path) if options.merge and path.is_file() else []
    begun, complete = begin_metadata(stamp), True
    progress = Progress("version")
    for version in progress.over(versions):
        progress.say(version)
        try:
            found = collect(tool, version, cases, stamp, options.timeout)
        except ValueError as error:
            note(f"{version}: {error}")
            complete = False
            continue
        metrics = _without(metrics, found) + found
        write_metrics(metrics, finish_metadata(begun), options.name)
        complete = _show(found) and complete
    return 0 if complete else 1


def _without(metrics: Iterable[Metric], newer: Iterable[Metric]) -> list[Metric]:
    measured = {(metric.version, metric.case) for metric in newer}
    return [metric for metric in metrics if (metric.version, metric.case) not in measured]


# (version, case, launch, kernel)
KernelKey = tuple[str, str, int, str]


def by_kernel(metrics: Iterable[Metric]) -> dict[KernelKey, dict[str, float]]:
    """The counters of every kernel launch, by name.

    What an earlier release shipped goes by the name that it has in the ladder.
    """
    kernels: dict[KernelKey, dict[str, float]] = {}
    for metric in metrics:
        former = (metric.version, metric.kernel) == (SHIPPED, FORMER_KERNEL)
        version = FORMER_VERSION if former else metric.version
        key = (version, metric.case, metric.launch, metric.kernel)
        kernels.setdefault(key, {})[metric.metric] = metric.value
    return kernels


def _line(key: KernelKey, counters: Mapping[str, float]) -> str:
    version, case, _, kernel = key
    shown = ("tensor_active", "issue_active", "occupancy", "stall_long_scoreboard")
    values = "  ".join(f"{name} {counters.get(name, float('nan')):.3g}" for name in shown)
    duration = counters.get("duration", float("nan")) / 1e3
    return f"{version:10} {case:16} {kernel:28} {duration:9.1f} us  {values}"


def check_versions(versions: Iterable[str]) -> None:
    """Raises ValueError for what is neither a version of the ladder nor SHIPPED."""
    allowed = (*ladder_versions(), SHIPPED)
    for version in versions:
        if version not in allowed:
            raise ValueError(f"version is {version!r}, must be one of {', '.join(allowed)}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m harness.metrics",
        description="Records hardware counters of the versions' kernels with Nsight Compute.",
    )
    parser.add_argument(
        "--version",
        action="append",
        default=[],
        help=f"of the ladder, or {SHIPPED}; repeatable (default: {' '.join(VERSIONS)})",
    )
    parser.add_argument(
        "--case",
        action="append",
        default=[],
        metavar="NAME",
        help=f"repeatable (default: {' '.join(CASES)})",
    )
    parser.add_argument("--print-only", action="store_true", help="show the commands, run nothing")
    parser.add_argument("--name", default=NAME, help="results/<device>/NAME.csv")
    parser.add_argument(
        "--merge", action="store_true", help="keep the other rows that the file already holds"
    )
    parser.add_argument(
        "--timeout", type=seconds, default=TIMEOUT_S, metavar="SECONDS", help="for one version"
    )
    pages = parser.add_argument_group("counters that ncu printed before")
    pages.add_argument(
        "--pages", type=Path, metavar="FOLDER", help="of VERSION_CASE.csv files, its raw pages"
    )
    for option in ("--device", "--date", "--revision"):
        pages.add_argument(option, help="of that run")
    parser.add_argument("--launch", metavar="VERSION", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
