"""One round of optimisation, from a prediction to a report.

    python -m harness.round --version v15 --case long_low_gva --case wide_gva_state \
        --prediction "K arrives one chunk earlier: 3 % less wherever loads are waited for"

1. gates: the changed kernel is right on the public cases, on edge cases and on a hidden draw, and
   the emulator finds no race in it; nothing is measured before that
2. kernel time: baseline and change in turn, CUDA Graph replay, one launch's wall clock
3. counters of both under Nsight Compute, for the reason
4. a report in Markdown: prediction, gates, times, counters, outcome

A version is a name of the ladder, "shipped" (what the package runs), or package.module:NAME for an
Implementation of one's own. Without a GPU the gates run in the emulator and nothing is timed.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from cases import Case, load_cases

from .device import CPU, pick_device, why_untimed
from .emulation import ALL_CHECKS, AUTO, AUTO_LIMIT, EMULATOR, emulated_chunks
from .evaluate import Entry
from .implementations import CORE, OURS, get
from .metrics import by_kernel, collect
from .options import seconds
from .profile import find_tool
from .progress import Progress, note
from .results import RESULTS, SHIPPED, Stamp, begin_metadata, finish_metadata, to_row, write_csv
from .round_report import GATES, Gate, Round, Timing, failed, render
from .selection import draw_seed, select_cases
from .session import Session
from .timing import REPETITIONS, WARMUP, Plan, Protocol
from .worker import TIMEOUT_S

CASES = ("long_low_gva", "wide_gva_state")
ONE_CALL = Plan(Protocol.OJ, warmup=1, repetitions=1, rest_s=0)
# Three whole chunks and a ragged tail: less would not show a slot that is reused too early.
RACE_CASE = Case("races", 1, 3 * 64 + 37, 1, 2, True, "mixed")
EDGE_CASES = (
    *(Case(f"tokens_{T}", 1, T, 2, 4, T % 2 == 1, "mixed") for T in (1, 63, 64, 65, 127, 4097)),
    *(Case(f"group_{n}", 1, 200, 24 // n, 24, True, "random_decay") for n in (1, 2, 3, 4, 8)),
    Case("batch_3", 3, 130, 1, 2, False, "mixed"),
    Case("tail_2048", 1, 2048 + 1, 1, 2, True, "random_decay"),
)


def entry_of(version: str) -> Entry:
    """What a session measures for a version's name. Raises ValueError for one that cannot be."""
    if version == SHIPPED:
        found = Entry(OURS)
    elif ":" in version:
        found = Entry(version)
    else:
        found = Entry(OURS, CORE, version)
    get(found.implementation, version=found.version)
    return found


def run_gates(
    version: str,
    device: torch.device,
    chosen: Sequence[str],
    seed: int,
    timeout_s: float,
    progress: Progress,
) -> list[Gate]:
    """Every chosen gate on `device`; without a GPU in the emulator, where that is small enough."""
    sets: dict[str, Sequence[Case]] = {
        "edge": EDGE_CASES,
        "public": load_cases(),
        "hidden": select_cases(hidden_seed=seed),
        "race": (RACE_CASE,),
    }
    cases = [(gate, case) for gate in GATES if gate in chosen for case in sets[gate]]
    entry, on_cpu = entry_of(version), device.type == CPU
    gates = []
    with (
        Session(device, [ONE_CALL], timeout_s=timeout_s, steps=progress.steps) as session,
        Session(
            torch.device(CPU),
            [ONE_CALL],
            timeout_s=timeout_s,
            check=ALL_CHECKS,
            steps=progress.steps,
        ) as detector,
    ):
        for gate, case in progress.over(cases):
            progress.say(f"{gate}: {case.name}")
            race = gate == "race"
            emulated = race or (on_cpu and ":" not in version)
            backend = EMULATOR if emulated else AUTO
            missing = _unavailable(entry, backend, case, emulated)
            if missing:
                gates.append(Gate(gate, case.name, None, missing))
                continue
            (found,) = (detector if race else session).compare(case, [entry], backend)
            gates.append(Gate(gate, case.name, found.status, found.reason))
            if found.reason:
                note(f"{case.name}: {found.reason}")
    return gates


def _unavailable(entry: Entry, backend: str, case: Case, emulated: bool) -> str | None:
    """Why a gate cannot run here, in words."""
    if not emulated:
        return get(entry.implementation, backend, entry.version).unavailable()
    if ":" in entry.implementation:
        return "the emulator takes the ladder's versions and the shipped kernel"
    if emulated_chunks(case) > AUTO_LIMIT:
        return "no GPU, and too large for the emulator"
    return get(entry.implementation, backend, entry.version).unavailable()


def measure(
    baseline: str,
    change: str,
    cases: Sequence[Case],
    plan: Plan,
    device: torch.device,
    timeout_s: float,
    progress: Progress,
) -> list[Timing]:
    """Both kernels on every case, in turn."""
    entries = [entry_of(baseline), entry_of(change)]
    timings = []
    with Session(device, [plan], timeout_s=timeout_s) as session:
        for case in progress.over(cases):
            progress.say(case.name)
            timings.append(Timing(case, *session.compare(case, entries)))
            for outcome in (timings[-1].baseline, timings[-1].change):
                if outcome.reason:
                    note(f"{case.name}: {outcome.version}: {outcome.reason}")
    return timings


def count(
    versions: Sequence[str], cases: Sequence[Case], tool: str, stamp: Stamp
) -> tuple[dict[tuple[str, str], dict[str, float]], list[str]]:
    """The counters of each version's longest kernel by case, and what could not be had."""
    counters: dict[tuple[str, str], dict[str, float]] = {}
    missing = []
    for version in versions:
        try:
            found = by_kernel(collect(tool, version, cases, stamp))
        except ValueError as error:
            missing.append(f"no counters of {version}: {error}")
            continue
        for (_, case, _, _), values in found.items():
            longest = counters.get((version, case), {}).get("duration", 0.0)
            if values.get("duration", 0.0) > longest:
                counters[version, case] = values
    return counters, missing


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 if no gate failed."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        cases = select_cases(options.case or CASES)
        plan = Plan(Protocol.GRAPH, options.warmup, options.repetitions)
        for version in (options.baseline, options.version):
            entry_of(version)
    except (ValueError, ImportError) as error:
        parser.error(str(error))
    device = pick_device()
    done = run_round(options, cases, plan, device)
    text = render(done)
    path = options.out or _default_path(options, device)
    if path is None:
        print(text, end="")
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        _write_rows(path.with_suffix(".csv"), done)
        note(f"written to {path}")
        print(done.outcome)
    return 0 if done.passed else 1


def run_round(
    options: argparse.Namespace,
    cases: Sequence[Case],
    plan: Plan,
    device: torch.device,
) -> Round:
    """The whole round, in its order."""
    stamp = Stamp.now(device)
    metadata = begin_metadata(stamp)
    untimed = why_untimed(device)
    seed = draw_seed() if options.hidden is None else options.hidden
    gates = run_gates(
        options.version,
        device,
        options.gate or GATES,
        seed,
        options.timeout,
        Progress("gate"),
    )
    names = (options.baseline, options.version)
    timings: list[Timing] = []
    counters: dict[tuple[str, str], dict[str, float]] = {}
    notes = []
    if not failed(gates) and not untimed:
        timings = measure(*names, cases, plan, device, options.timeout, Progress("case"))
        tool = None if options.no_profile else find_tool("ncu")
        if tool:
            counters, notes = count(names, cases, tool, stamp)
    for text in (untimed, *notes):
        if text:
            note(text)
    arguments = [f"--version {name}" for name in names if ":" not in name]
    arguments += [f"--case {case.name}" for case in cases]
    return Round(
        baseline=options.baseline,
        change=options.version,
        prediction=options.prediction,
        metadata=finish_metadata(metadata, untimed=untimed, hidden_seed=seed),
        gates=gates,
        timings=timings,
        counters=counters,
        notes=notes,
        command=f"python -m harness.metrics {' '.join(arguments)} --name round",
    )


def _default_path(options: argparse.Namespace, device: torch.device) -> Path | None:
    if device.type == CPU:
        return None
    name = f"{options.version}_over_{options.baseline}".replace(":", ".")
    return RESULTS / Stamp.now(device).device / "rounds" / f"{name}.md"


def _write_rows(path: Path, done: Round) -> None:
    """The times beside the report, in the schema of results/."""
    stamp = Stamp(*(done.metadata[key] for key in ("device", "date", "revision")))
    outcomes = [one for timing in done.timings for one in (timing.baseline, timing.change)]
    if outcomes:
        with path.open("w", newline="", encoding="utf-8") as handle:
            write_csv(handle, [to_row(outcome, stamp) for outcome in outcomes])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m harness.round",
        description="Gates a changed kernel, times it against its baseline, writes the report.",
    )
    parser.add_argument("--version", required=True, help="the changed kernel")
    parser.add_argument("--baseline", default=SHIPPED, help="what it changes (%(default)s)")
    parser.add_argument(
        "--prediction",
        required=True,
        metavar="TEXT",
        help="what you expect, and why",
    )
    parser.add_argument(
        "--case",
        action="append",
        default=[],
        metavar="NAME",
        help=f"to measure; repeatable (default: {' '.join(CASES)})",
    )
    parser.add_argument(
        "--gate", action="append", choices=GATES, help="run these only (default: all)"
    )
    parser.add_argument("--hidden", type=int, metavar="SEED", help="of the hidden draw")
    parser.add_argument("--no-profile", action="store_true", help="leave the counters out")
    parser.add_argument("--warmup", type=int, default=WARMUP, metavar="N")
    parser.add_argument("--repetitions", type=int, default=REPETITIONS, metavar="N")
    parser.add_argument("--timeout", type=seconds, default=TIMEOUT_S, metavar="SECONDS")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="the report; default: printed without a GPU, else"
        " results/<device>/rounds/VERSION_over_BASELINE.md",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
