"""Measures this device's baselines: t60 (the ladder's v1, core) and t100 (the fastest peer, full).

Both are taken under the oj protocol, interleaved with this package's core and full forward on the
same inputs, and written to cases/baselines/<device>.csv with their provenance; the rows go to
results/<device>/baseline.csv. Only right results count. A case with t60 <= t100 is refused.
"""

import argparse
import csv
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path

from cases import Baseline, Case
from cases.baseline import DIRECTORY

from .check import Status
from .device import pick_device, why_untimed
from .evaluate import Entry, Outcome
from .implementations import CORE, FULL, LADDER, OURS, OWN
from .progress import Progress, note
from .results import RESULTS, Stamp, begin_metadata, finish_metadata, to_row, write_results
from .selection import available_peers, peer_entries, select_cases
from .session import Session
from .tables import fixed, render
from .timing import REPETITIONS, WARMUP, Plan, Protocol

NAIVE = "v1"
TIMEOUT_S = 1800.0


def pick_baseline(case: str, outcomes: Sequence[Outcome]) -> Baseline:
    """The baseline that `outcomes` of one case give. Raises ValueError saying what is missing."""
    naive = [o for o in outcomes if (o.implementation, o.version) == (LADDER, NAIVE)]
    peers = [o for o in outcomes if o.implementation not in OWN and o.scope == FULL]
    if not naive or naive[0].median_ms is None:
        why = f"{naive[0].status}: {naive[0].reason}" if naive else "not measured"
        raise ValueError(f"{case}: no t60, {LADDER} {NAIVE} is {why}")
    right = [peer for peer in peers if peer.median_ms is not None]
    if not right:
        tried = "; ".join(f"{p.implementation} {p.status}: {p.reason}" for p in peers)
        raise ValueError(f"{case}: no t100, no peer's full forward is right ({tried or 'none'})")
    fastest = min(right, key=lambda peer: peer.median_ms)
    return Baseline(
        case=case,
        t60_ms=round(naive[0].median_ms, 6),
        t100_ms=round(fastest.median_ms, 6),
        t60_implementation=f"{LADDER} {NAIVE}",
        t100_implementation=f"{fastest.implementation} {fastest.version}",
    )


def write_baselines(
    device: str,
    baselines: Sequence[Baseline],
    provenance: Mapping[str, object],
    directory: Path = DIRECTORY,
) -> Path:
    """Writes <device>.csv and <device>.json; returns the CSV's path."""
    path = directory / f"{device}.csv"
    with path.open("w", newline="", encoding="utf-8") as handle:
        writer = csv.writer(handle, lineterminator="\n")
        writer.writerow(field.name for field in fields(Baseline))
        for baseline in baselines:
            writer.writerow(
                f"{value:.6f}" if isinstance(value, float) else value
                for value in asdict(baseline).values()
            )
    text = json.dumps(provenance, indent=2, default=str)
    path.with_suffix(".json").write_text(text + "\n", encoding="utf-8")
    return path


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 only if every case has a baseline; writes nothing otherwise, nor for some cases."""
    options = _parser().parse_args(argv)
    device = pick_device()
    untimed = why_untimed(device)
    if untimed:
        note(f"no baseline can be measured here: {untimed}")
        return 1
    present, absent = available_peers()
    for line in absent:
        note(line)
    if not present:
        note("no baseline without a peer: pip install 'gdn-prefill[peers]'")
        return 1
    cases = select_cases(options.case)
    entries = [
        Entry(LADDER, CORE, NAIVE),
        Entry(OURS, CORE),
        Entry(OURS, FULL),
        *(entry for entry in peer_entries(present) if entry.scope == FULL),
    ]
    stamp = Stamp.now(device)
    metadata = begin_metadata(stamp)
    outcomes, baselines, refused = _measure(options, cases, entries)
    finished = finish_metadata(metadata)
    print(_text(baselines, outcomes), end="")
    for line in refused:
        note(line)
    if options.dry_run or options.case:
        note("nothing written: --dry-run, or not all cases were measured")
        return 1 if refused else 0
    rows = [to_row(outcome, stamp) for outcome in outcomes]
    note(f"recorded in {write_results('baseline', rows, finished, outcomes, RESULTS)}")
    if refused:
        note("the baselines stay as they are: not every case has one")
        return 1
    note(f"written to {write_baselines(stamp.device, baselines, _provenance(finished, options))}")
    return 0


def _measure(
    options: argparse.Namespace, cases: Sequence[Case], entries: Sequence[Entry]
) -> tuple[list[Outcome], list[Baseline], list[str]]:
    outcomes: list[Outcome] = []
    baselines: list[Baseline] = []
    refused: list[str] = []
    plan = Plan(Protocol.OJ, options.warmup, options.repetitions)
    progress = Progress("case")
    with Session(pick_device(), [plan], timeout_s=options.timeout) as session:
        for case in progress.over(cases):
            progress.say(case.name)
            measured = session.compare(case, entries)
            outcomes += measured
            for outcome in measured:
                if outcome.status is not Status.PASS:
                    note(f"{case.name}: {outcome.implementation} {outcome.scope}: {outcome.reason}")
            try:
                baselines.append(pick_baseline(case.name, measured))
            except ValueError as error:
                refused.append(str(error))
    return outcomes, baselines, refused


def _provenance(metadata: Mapping[str, object], options: argparse.Namespace) -> dict:
    return {
        **{key: value for key, value in metadata.items() if key != "schema"},
        "protocol": Protocol.OJ.value,
        "warmup": options.warmup,
        "repetitions": options.repetitions,
        "t60": f"median core time of {LADDER} {NAIVE}",
        "t100": "median full forward (raw gate in) of the fastest peer whose result is right",
        "interleaved_with": f"{OURS}, core and full",
    }


def _text(baselines: Sequence[Baseline], outcomes: Sequence[Outcome]) -> str:
    ours = {o.case: o.median_ms for o in outcomes if (o.implementation, o.scope) == (OURS, CORE)}
    rows = [
        (b.case, fixed(b.t60_ms, 6), fixed(b.t100_ms, 6), b.t100_implementation, fixed(own, 6))
        for b in baselines
        for own in [ours.get(b.case)]
    ]
    return render(("CASE", "T60(ms)", "T100(ms)", "T100 BY", "OUR CORE(ms)"), rows)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m harness.baseline", description="Measures t60 and t100 on this device."
    )
    parser.add_argument("--case", action="append", default=[], help="some cases; writes nothing")
    parser.add_argument("--dry-run", action="store_true", help="print, write nothing")
    parser.add_argument("--warmup", type=int, default=WARMUP, metavar="N")
    parser.add_argument("--repetitions", type=int, default=REPETITIONS, metavar="N")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, metavar="SECONDS")
    return parser


if __name__ == "__main__":
    sys.exit(main())
