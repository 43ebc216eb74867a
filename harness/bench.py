"""Measures this package and every peer at hand, core and full, on the public cases, interleaved.

    python -m harness.bench                          oj and graph, into results/<device>/bench.csv
    python -m harness.bench --protocol cold --name cold --case long_low_gva

One dense line a case, scope and implementation: time, spread, SM clock, host overhead (oj minus
graph), TFLOP/s, share of the floor, paired ratio to this package; then the geometric means.
"""

import argparse
import sys
from collections.abc import Sequence

from cases import Case

from .check import Status
from .device import ceilings, pick_device, why_untimed
from .evaluate import Entry, Outcome
from .floors import core_flops, floor_ms, full_flops
from .implementations import CORE, FULL, OURS, OURS_FRESH, OURS_LAB, SCOPES, get
from .options import seconds
from .progress import Progress, note
from .results import Recorder, Stamp
from .score import geometric_mean
from .selection import available_peers, peer_entries, select_cases
from .session import Session
from .tables import fixed, render
from .timing import REPETITIONS, WARMUP, Plan, Protocol, paired_ratio

TIMEOUT_S = 1800.0
HEADER = ("CASE", "SCOPE", "PROTOCOL", "IMPLEMENTATION", "RESULT", "MEDIAN(ms)", "P20", "P80")
HEADER += ("SM(MHz)", "HOST(us)", "TFLOP/s", "FLOOR", "OVER OURS")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 only if every result of this package is right; 2 for senseless arguments."""
    parser = _parser()
    options = parser.parse_args(argv)
    chosen = options.protocol or [Protocol.OJ.value, Protocol.GRAPH.value]
    try:
        cases = select_cases(options.case, options.cases)
        plans = [Plan(Protocol(name), options.warmup, options.repetitions) for name in chosen]
        for version in options.version:
            get(OURS, version=version)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    device = pick_device()
    untimed = why_untimed(device)
    if untimed:
        note(f"nothing can be benchmarked here: {untimed}")
        return 1
    entries = _entries(options)
    recorder = Recorder(options.name, Stamp.now(device), options.merge)
    outcomes: list[Outcome] = []
    progress = Progress("case")
    with Session(device, plans, timeout_s=options.timeout) as session:
        for case in progress.over(cases):
            progress.say(case.name)
            measured = session.compare(case, entries)
            outcomes += measured
            if options.name:
                recorder.add(measured)
            for outcome in measured:
                if outcome.reason:
                    note(f"{case.name}: {outcome.implementation} {outcome.scope}: {outcome.reason}")
    print(report(cases, outcomes), end="")
    ours = [outcome for outcome in outcomes if outcome.implementation == OURS]
    return 0 if all(outcome.status is Status.PASS for outcome in ours) else 1


def _entries(options: argparse.Namespace) -> list[Entry]:
    """Ours and its variants, the ladder's versions asked for, every peer at hand."""
    entries = [Entry(OURS, CORE), Entry(OURS, FULL), Entry(OURS_FRESH, CORE)]
    entries.append(Entry(OURS_LAB, FULL))
    entries += [Entry(OURS, CORE, version) for version in options.version]
    if not options.no_peers:
        present, absent = available_peers()
        for line in absent:
            note(line)
        entries += peer_entries(present)
    return [entry for entry in entries if entry.scope in (options.scope or SCOPES)]


def report(cases: Sequence[Case], outcomes: Sequence[Outcome]) -> str:
    """The lines of every case, scope and protocol, then the geometric means over the cases."""
    by_name = {case.name: case for case in cases}
    rows, ratios = [], {}
    for outcome in sorted(outcomes, key=lambda o: (list(by_name).index(o.case), o.scope)):
        ours = _ours_beside(outcome, outcomes)
        ratio = None
        if outcome.sample and ours is not None and ours is not outcome:
            ratio = paired_ratio(outcome.sample, ours.sample)
            ratios.setdefault((outcome.scope, outcome.protocol, _label(outcome)), []).append(ratio)
        host = _host_us(outcome, outcomes)
        rows.append(_cells(by_name[outcome.case], outcome, host, ratio))
    summary = render(
        ("GEOMETRIC MEAN", "PROTOCOL", "IMPLEMENTATION", "CASES", "OVER OURS"),
        [(*key, len(values), fixed(geometric_mean(values), 3)) for key, values in ratios.items()],
    )
    return render(HEADER, rows) + ("\n" + summary if ratios else "")


def _ours_beside(outcome: Outcome, outcomes: Sequence[Outcome]) -> Outcome | None:
    key = (outcome.case, outcome.scope, outcome.protocol)
    for other in outcomes:
        if other.implementation == OURS and (other.case, other.scope, other.protocol) == key:
            return other if other.sample else None
    return None


def _host_us(outcome: Outcome, outcomes: Sequence[Outcome]) -> float | None:
    """What a call takes beyond its kernels: its oj time less the same call's graph time."""
    if outcome.protocol != Protocol.OJ.value or outcome.sample is None:
        return None
    key = (outcome.case, outcome.scope, _label(outcome))
    for other in outcomes:
        same = (other.case, other.scope, _label(other)) == key
        if same and other.protocol == Protocol.GRAPH.value and other.sample:
            return 1e3 * (outcome.sample.median_ms - other.sample.median_ms)
    return None


def _label(outcome: Outcome) -> str:
    return f"{outcome.implementation} {outcome.version}"


def _cells(
    case: Case, outcome: Outcome, host: float | None, ratio: float | None
) -> tuple[object, ...]:
    sample = outcome.sample
    rate = share = None
    if sample:
        flops = {CORE: core_flops, FULL: full_flops}[outcome.scope](case)
        rate = flops / sample.median_ms / 1e9
        rates = ceilings(pick_device())
        if rates:
            floor = floor_ms(case, outcome.scope, Protocol(outcome.protocol), rates)
            share = floor / sample.median_ms
    return (
        outcome.case,
        outcome.scope,
        outcome.protocol,
        _label(outcome),
        outcome.status,
        fixed(sample.median_ms if sample else None, 6),
        fixed(sample.p20_ms if sample else None, 6),
        fixed(sample.p80_ms if sample else None, 6),
        fixed(sample.clock_mhz if sample else None, 0),
        fixed(host, 1),
        fixed(rate, 1),
        None if share is None else f"{100 * share:.1f}%",
        fixed(ratio, 3),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m harness.bench", description="Benchmarks this package against the peers."
    )
    parser.add_argument("--case", action="append", default=[], metavar="NAME")
    parser.add_argument("--cases", metavar="PATH")
    parser.add_argument(
        "--protocol", action="append", choices=[p.value for p in Protocol], help="default: oj graph"
    )
    parser.add_argument("--scope", action="append", choices=SCOPES, help="default: both")
    parser.add_argument(
        "--version", action="append", default=[], help="versions of the ladder to take along"
    )
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument(
        "--name", default="bench", help="results/<device>/NAME.csv; empty: record nothing"
    )
    parser.add_argument(
        "--merge", action="store_true", help="keep the other rows that the file already holds"
    )
    parser.add_argument("--warmup", type=int, default=WARMUP, metavar="N")
    parser.add_argument("--repetitions", type=int, default=REPETITIONS, metavar="N")
    parser.add_argument("--timeout", type=seconds, default=TIMEOUT_S, metavar="SECONDS")
    return parser


if __name__ == "__main__":
    sys.exit(main())
