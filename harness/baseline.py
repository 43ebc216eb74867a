"""Measures this device's baselines: t60 (the ladder's v1, core) and t100 (the fastest peer, full).

Both are taken under the oj protocol, interleaved with this package's core and full forward on the
same inputs. The rows go to results/<device>/baseline.csv; once they cover every public case (--case
measures some of them), cases/baselines/<device>.csv is written with its provenance. Only right
results count. A case with t60 <= t100 is refused.
"""

import argparse
import csv
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path

from cases import Baseline, Case, load_cases
from cases.baseline import DIRECTORY

from .device import pick_device, why_untimed
from .evaluate import Entry, Outcome
from .implementations import CORE, FULL, LADDER, OURS, OWN, Implementation
from .options import seconds
from .progress import Progress, note
from .results import Recorder, Row, Stamp, finish_metadata, read_rows, to_row
from .selection import available_peers, peer_entries, select_cases
from .session import Session
from .tables import fixed, render
from .timing import REPETITIONS, WARMUP, Plan, Protocol

NAIVE = "v1"
UNKNOWN = " unknown"
TIMEOUT_S = 1800.0


def pick_baseline(case: str, rows: Sequence[Row]) -> Baseline:
    """The baseline that the rows of one case give. Raises ValueError saying what is missing."""
    rows = [row for row in rows if row.case == case]
    naive = [row for row in rows if (row.implementation, row.version) == (LADDER, NAIVE)]
    peers = [row for row in rows if row.implementation not in OWN and row.scope == FULL]
    if not naive or naive[0].median_ms is None:
        why = naive[0].correctness if naive else "not measured"
        raise ValueError(f"{case}: no t60, {LADDER} {NAIVE} is {why}")
    right = [peer for peer in peers if peer.median_ms is not None]
    if not right:
        tried = ", ".join(f"{peer.implementation} {peer.correctness}" for peer in peers)
        raise ValueError(f"{case}: no t100, no peer's full forward is right ({tried or 'none'})")
    fastest = min(right, key=lambda peer: peer.median_ms)
    return Baseline(
        case=case,
        t60_ms=naive[0].median_ms,
        t100_ms=fastest.median_ms,
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
    """Returns 0 only if every public case has a baseline; the file is written only then.

    2 for arguments that make no sense.
    """
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        cases = select_cases(options.case)
        plan = Plan(Protocol.OJ, options.warmup, options.repetitions)
        recorded = read_rows(options.recorded) if options.recorded else []
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if options.recorded:
        return _from_recorded(options.recorded, recorded)
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
    stamp = Stamp.now(device)
    recorder = None if options.dry_run else Recorder("baseline", stamp, bool(options.case))
    with Session(device, [plan], timeout_s=options.timeout) as session:
        outcomes = _measure(session, cases, _entries(present), recorder)
    rows = [to_row(outcome, stamp) for outcome in outcomes]
    if recorder:
        path = recorder.add([])
        rows = read_rows(path)
        note(f"recorded in {path}")
    baselines, refused = pick_baselines(rows)
    print(_text(baselines, rows), end="")
    for line in (*refused, *_doubts(baselines)):
        note(line)
    if refused or options.dry_run:
        note("the baselines stay as they are")
        return 1 if refused else 0
    calls = {"warmup": plan.warmup, "repetitions": plan.repetitions}
    provenance = _provenance(finish_metadata(recorder.metadata, **calls), path)
    note(f"written to {write_baselines(stamp.device, baselines, provenance)}")
    return 0


def _from_recorded(path: Path, rows: Sequence[Row]) -> int:
    """The baselines that a recorded run holds; it must have timed v1 and the peers in turn."""
    rows = [row for row in rows if row.protocol == Protocol.OJ.value]
    baselines, refused = pick_baselines(rows)
    print(_text(baselines, rows), end="")
    for line in (*refused, *_doubts(baselines)):
        note(line)
    if refused:
        note("the baselines stay as they are")
        return 1
    metadata = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    note(f"written to {write_baselines(rows[0].device, baselines, _provenance(metadata, path))}")
    return 0


def pick_baselines(rows: Sequence[Row]) -> tuple[list[Baseline], list[str]]:
    """The baselines of the public cases, and why the others have none."""
    baselines, refused = [], []
    for case in load_cases():
        try:
            baselines.append(pick_baseline(case.name, rows))
        except ValueError as error:
            refused.append(str(error))
    return baselines, refused


def _doubts(baselines: Sequence[Baseline]) -> list[str]:
    """One line about each t100 implementation whose release nobody could tell later."""
    unknown = {b.t100_implementation for b in baselines if b.t100_implementation.endswith(UNKNOWN)}
    return [f"t100: {name.removesuffix(UNKNOWN)}'s version is unknown" for name in sorted(unknown)]


def _entries(present: Sequence[Implementation]) -> list[Entry]:
    ours = [Entry(LADDER, CORE, NAIVE), Entry(OURS, CORE), Entry(OURS, FULL)]
    return ours + [entry for entry in peer_entries(present) if entry.scope == FULL]


def _measure(
    session: Session,
    cases: Sequence[Case],
    entries: Sequence[Entry],
    recorder: Recorder | None,
) -> list[Outcome]:
    outcomes: list[Outcome] = []
    progress = Progress("case")
    for case in progress.over(cases):
        progress.say(case.name)
        measured = session.compare(case, entries)
        outcomes += measured
        if recorder:
            recorder.add(measured)
        for outcome in measured:
            if outcome.reason:
                note(f"{case.name}: {outcome.implementation} {outcome.scope}: {outcome.reason}")
    return outcomes


def _provenance(metadata: Mapping[str, object], rows: Path) -> dict:
    return {
        **{key: value for key, value in metadata.items() if key != "schema"},
        "protocol": Protocol.OJ.value,
        "t60": f"median core time of {LADDER} {NAIVE}",
        "t100": "median full forward (raw gate in) of the fastest peer whose result is right",
        "interleaved_with": f"{OURS}, core and full",
        "rows": f"results/{metadata['device']}/{rows.name}",
    }


def _text(baselines: Sequence[Baseline], rows: Sequence[Row]) -> str:
    ours = {
        row.case: row.median_ms for row in rows if (row.implementation, row.scope) == (OURS, CORE)
    }
    lines = [
        (
            baseline.case,
            fixed(baseline.t60_ms, 6),
            fixed(baseline.t100_ms, 6),
            baseline.t100_implementation,
            fixed(ours.get(baseline.case), 6),
        )
        for baseline in baselines
    ]
    return render(("CASE", "T60(ms)", "T100(ms)", "T100 BY", "OUR CORE(ms)"), lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m harness.baseline", description="Measures t60 and t100 on this device."
    )
    parser.add_argument(
        "--case", action="append", default=[], help="measure these only; repeatable"
    )
    parser.add_argument(
        "--recorded",
        type=Path,
        metavar="CSV",
        help="take them from a recorded run of harness.bench --version v1, measuring nothing",
    )
    parser.add_argument("--dry-run", action="store_true", help="print, write nothing")
    parser.add_argument("--warmup", type=int, default=WARMUP, metavar="N")
    parser.add_argument("--repetitions", type=int, default=REPETITIONS, metavar="N")
    parser.add_argument("--timeout", type=seconds, default=TIMEOUT_S, metavar="SECONDS")
    return parser


if __name__ == "__main__":
    sys.exit(main())
