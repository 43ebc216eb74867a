"""The lab's score: per case, the public and hidden means, the total, and the like-for-like ratios.

p = t100 / t and p60 = t100 / t60, where t is the core's time, t100 the fastest public
implementation's full forward and t60 the naive version's core, all on this device. Since the core
is scored against full forwards, core against core and full against full stand beside the score.

    python -m harness.score                     measure and score
    python -m harness.score --recorded DEVICE   score the recorded rows, no GPU needed

Recorded times are the latest of each case. The ratios against the other implementations come from
one recorded run that timed both on the same inputs; the sheet says which runs those are.
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from cases import Baseline, Case, load_baselines, load_cases

from .check import Status
from .device import pick_device, why_untimed
from .emulation import EMULATOR
from .evaluate import Outcome
from .implementations import ALIASES, CORE, FULL, LADDER, OURS, OWN, SCOPES
from .options import seconds
from .progress import Progress, note
from .results import Recorder, Row, Stamp, load_rows, measurement_files
from .selection import Subject, available_peers, draw_seed, peer_entries, select_cases
from .session import Session
from .tables import fixed, render
from .timing import REPETITIONS, WARMUP, Plan, Protocol
from .worker import TIMEOUT_S

PUBLIC_WEIGHT, HIDDEN_WEIGHT = 0.6, 0.4
PASS_MARK, FULL_MARK, BONUS = 60.0, 100.0, 20.0
STEEPNESS = 1.5
SUBJECT = "subject"


def points(p: float, p60: float) -> float:
    """The score of a right result whose speed is p = t100/t; p60 = t100/t60 < 1 earns 60.

    Raises ValueError for a p that is not positive or a p60 outside (0, 1).
    """
    if not (math.isfinite(p) and p > 0):
        raise ValueError(f"p is {p!r}, must be > 0")
    if not 0 < p60 < 1:
        raise ValueError(f"p60 is {p60!r}, must be between 0 and 1: t60 must be longer than t100")
    if p <= p60:
        return PASS_MARK * p / p60
    if p <= 1:
        u = (p - p60) / (1 - p60)
        return PASS_MARK + (FULL_MARK - PASS_MARK) * math.expm1(STEEPNESS * u) / math.expm1(
            STEEPNESS
        )
    return FULL_MARK + BONUS * (min(p, 2.0) - 1)


def case_score(status: Status, median_ms: float | None, baseline: Baseline) -> float | None:
    """0 for what did not pass; None for a pass without a time, which cannot be scored."""
    if status is not Status.PASS:
        return 0.0
    if median_ms is None:
        return None
    return points(baseline.t100_ms / median_ms, baseline.t100_ms / baseline.t60_ms)


def geometric_mean(values: Sequence[float]) -> float | None:
    """None for no values."""
    return math.exp(statistics.fmean(map(math.log, values))) if values else None


@dataclass(frozen=True)
class Timed:
    """A status and a median, however they were come by."""

    status: Status
    median_ms: float | None


# (case, implementation, scope) -> what came of it; the implementation graded is SUBJECT.
Standings = Mapping[tuple[str, str, str], Timed]


@dataclass(frozen=True)
class CaseLine:
    """One case of the score sheet. Ratios above 1 say that the subject is faster; None: unknown."""

    case: str
    hidden: bool
    status: Status
    median_ms: float | None
    t100_ms: float | None
    ratio: float | None
    score: float | None
    core_over_core: float | None
    full_over_full: float | None


@dataclass(frozen=True)
class Sheet:
    """The cases and what follows from them; means are None unless every case of theirs counts."""

    lines: tuple[CaseLine, ...]
    public_mean: float | None
    hidden_mean: float | None
    total: float | None
    against_fastest: float | None
    core_against_core: float | None
    full_against_full: float | None
    times_of: tuple[str, ...] = ()
    ratios_of: str = ""


@dataclass(frozen=True)
class Recorded:
    """Recorded standings. `latest`: the subject's newest row of each case; `times_of`: their runs.

    `beside` holds the subject and the peers as the one run `ratios_of` timed them; empty, and ""
    for the run, where none holds both. Runs are told by their date.
    """

    latest: Standings
    times_of: tuple[str, ...]
    beside: Standings
    ratios_of: str


def recorded_sheet(
    cases: Sequence[Case], recorded: Recorded, baselines: Mapping[str, Baseline]
) -> Sheet:
    """Scores the latest times; the ratios against peers are those of one run."""
    sheet = score_sheet(cases, recorded.latest, baselines, recorded.beside)
    return replace(sheet, times_of=recorded.times_of, ratios_of=recorded.ratios_of)


def score_sheet(
    cases: Sequence[Case],
    standings: Standings,
    baselines: Mapping[str, Baseline],
    beside: Standings | None = None,
) -> Sheet:
    """Scores `cases`; a case without a baseline gets no score, nor does a mean with it.

    The ratios against peers are taken from `beside`, or from `standings` if it is None.
    """
    beside = standings if beside is None else beside
    lines = tuple(
        _line(case, standings, beside, baselines.get(case.baseline_name)) for case in cases
    )
    public = _mean([line.score for line in lines if not line.hidden])
    hidden = _mean([line.score for line in lines if line.hidden])
    total = None
    if public is not None and hidden is not None:
        total = PUBLIC_WEIGHT * public + HIDDEN_WEIGHT * hidden
    return Sheet(
        lines=lines,
        public_mean=public,
        hidden_mean=hidden,
        total=total,
        against_fastest=_public_geometric(lines, "ratio"),
        core_against_core=_public_geometric(lines, "core_over_core"),
        full_against_full=_public_geometric(lines, "full_over_full"),
    )


def _line(
    case: Case, standings: Standings, beside: Standings, baseline: Baseline | None
) -> CaseLine:
    subject = standings.get((case.name, SUBJECT, CORE), Timed(Status.ERROR, None))
    ratio = None
    if baseline and subject.median_ms is not None:
        ratio = baseline.t100_ms / subject.median_ms
    core, full = (_over_fastest_peer(case, scope, beside) for scope in SCOPES)
    return CaseLine(
        case=case.name,
        hidden=case.twin_of is not None,
        status=subject.status,
        median_ms=subject.median_ms,
        t100_ms=baseline.t100_ms if baseline else None,
        ratio=ratio,
        score=case_score(subject.status, subject.median_ms, baseline) if baseline else None,
        core_over_core=core,
        full_over_full=full,
    )


def _over_fastest_peer(case: Case, scope: str, standings: Standings) -> float | None:
    """The fastest right peer's time over the subject's, in the same scope."""
    ours = standings.get((case.name, SUBJECT, scope))
    theirs = [
        timed.median_ms
        for (name, implementation, peer_scope), timed in standings.items()
        if (name, peer_scope) == (case.name, scope)
        and implementation != SUBJECT
        and timed.status is Status.PASS
        and timed.median_ms is not None
    ]
    if ours is None or ours.median_ms is None or not theirs:
        return None
    return min(theirs) / ours.median_ms


def _mean(scores: Sequence[float | None]) -> float | None:
    return None if not scores or None in scores else statistics.fmean(scores)


def _public_geometric(lines: Sequence[CaseLine], attribute: str) -> float | None:
    values = [getattr(line, attribute) for line in lines if not line.hidden]
    return None if None in values else geometric_mean(values)


def standings_of_outcomes(outcomes: Iterable[Outcome], subject: str) -> Standings:
    """From one run; `subject` is the implementation that is graded."""
    return {
        (o.case, _role(o.implementation, subject), o.scope): Timed(o.status, o.median_ms)
        for o in outcomes
    }


def standings_of_rows(
    rows: Iterable[Row], implementation: str, version: str | None = None
) -> Recorded:
    """From recorded rows under the oj protocol; our other variants left out.

    The subject is `implementation`, at `version` or any; a version of the ladder may be asked of
    this package. Raises ValueError, listing what is recorded, if no row is the subject's.
    """
    timed = [row for row in rows if row.protocol == Protocol.OJ.value]
    ours = sorted(
        (row for row in timed if _is_subject(row, implementation, version)),
        key=lambda row: row.date,
    )
    if not ours:
        known = sorted({f"{row.implementation} {row.version}" for row in timed})
        wanted = " ".join(filter(None, (implementation, version)))
        raise ValueError(f"nothing recorded of {wanted}; there is: {', '.join(known) or 'nothing'}")
    latest = {(row.case, row.scope): row for row in ours}
    peers = [row for row in timed if row.implementation not in (*OWN, ours[0].implementation)]
    date, beside = _one_run(ours, peers)
    return Recorded(
        latest={_key(row, True): _timed(row) for row in latest.values()},
        times_of=tuple(sorted({row.date for (_, scope), row in latest.items() if scope == CORE})),
        beside=beside,
        ratios_of=date,
    )


def _is_subject(row: Row, implementation: str, version: str | None) -> bool:
    if version is None:
        return row.implementation == implementation
    names = (OURS, LADDER) if implementation == OURS else (implementation,)
    return row.implementation in names and row.version == version


def _one_run(ours: Sequence[Row], peers: Sequence[Row]) -> tuple[str, Standings]:
    """The run that holds the most of both side by side, the latest of several: date, standings."""
    compared: dict[str, set[tuple[str, str]]] = {}
    for row in ours:
        for peer in peers:
            if (peer.date, peer.case, peer.scope) == (row.date, row.case, row.scope):
                compared.setdefault(row.date, set()).add((row.case, row.scope))
    if not compared:
        return "", {}
    date = max(compared, key=lambda date: (len(compared[date]), date))
    standings = {_key(row, False): _timed(row) for row in peers if row.date == date}
    standings |= {_key(row, True): _timed(row) for row in ours if row.date == date}
    return date, standings


def _key(row: Row, subject: bool) -> tuple[str, str, str]:
    return row.case, SUBJECT if subject else row.implementation, row.scope


def _timed(row: Row) -> Timed:
    return Timed(Status(row.correctness), row.median_ms)


def _role(implementation: str, subject: str) -> str:
    return SUBJECT if implementation == subject else implementation


def render_sheet(sheet: Sheet) -> str:
    """The sheet as text."""
    rows = [
        (
            line.case,
            line.status,
            fixed(line.median_ms, 6),
            fixed(line.t100_ms, 6),
            fixed(line.ratio, 3),
            fixed(line.score, 2),
            fixed(line.core_over_core, 3),
            fixed(line.full_over_full, 3),
        )
        for line in sheet.lines
    ]
    header = ("CASE", "RESULT", "TIME(ms)", "T100(ms)", "T100/T", "SCORE", "CORE/CORE", "FULL/FULL")
    summary = (
        ("public mean", fixed(sheet.public_mean, 2)),
        ("hidden mean", fixed(sheet.hidden_mean, 2)),
        ("total, 0.6 public + 0.4 hidden", fixed(sheet.total, 2)),
        ("geometric mean of t100/t, our core over the fastest full", _times(sheet.against_fastest)),
        ("core over the fastest core, geometric mean", _times(sheet.core_against_core)),
        ("full over the fastest full, geometric mean", _times(sheet.full_against_full)),
    )
    if sheet.times_of:
        summary += (
            ("times of the run", ", ".join(sheet.times_of)),
            ("core and full ratios of the run", sheet.ratios_of or "none timed both"),
        )
    width = max(len(name) for name, _ in summary)
    text = "".join(f"{name:{width}}  {value or 'unknown'}\n" for name, value in summary)
    return render(header, rows) + "\n" + text


def _times(value: float | None) -> str | None:
    return None if value is None else f"{value:.3f}x"


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 only if every case passed; 2 for arguments that make no sense."""
    parser = _parser()
    options = parser.parse_args(argv)
    subject = Subject(options.impl, options.backend, options.version)
    try:
        plan = Plan(Protocol.OJ, options.warmup, options.repetitions)
        if options.baseline:
            _known_baselines(options.baseline)
        if options.recorded:
            sheet = _from_recorded(options.recorded, subject, options.baseline)
        elif options.backend == EMULATOR:
            raise ValueError(f"backend {EMULATOR!r} takes no times, there is nothing to score")
        else:
            subject.check(CORE)
            sheet = None
    except (ValueError, ImportError) as error:
        parser.error(str(error))
    if sheet is None:
        device, cases, outcomes = _measure(options, subject, plan)
        standings = standings_of_outcomes(outcomes, outcomes[0].implementation)
        sheet = score_sheet(cases, standings, _baselines(options.baseline or device))
    if options.output_format == "json":
        print(json.dumps(asdict(sheet), indent=2, default=str))
    else:
        print(render_sheet(sheet), end="")
    return 0 if all(line.status is Status.PASS for line in sheet.lines) else 1


def _from_recorded(device: str, subject: Subject, baseline: str | None) -> Sheet:
    """Raises ValueError listing what is recorded if nothing is of that device or subject."""
    known = sorted({path.parent.name for path in measurement_files()})
    if device not in known:
        there = ", ".join(known) or "nothing"
        raise ValueError(f"nothing recorded for {device!r}; there is: {there}")
    name = ALIASES.get(subject.name, subject.name)
    name = name if subject.submission is None else subject.submission.stem
    if name == LADDER and subject.version is None:
        raise ValueError(f"{LADDER} has many versions, choose one with --version")
    recorded = standings_of_rows(load_rows(device=device), name, subject.version)
    found = {case for case, _, scope in recorded.latest if scope == CORE}
    cases = load_cases()
    missing = [case.name for case in cases if case.name not in found]
    if missing:
        note(f"not recorded: {', '.join(missing)}")
    cases += [case for case in select_cases(hidden_seed=0) if case.name in found]
    return recorded_sheet(cases, recorded, _baselines(baseline or device))


def _measure(
    options: argparse.Namespace, subject: Subject, plan: Plan
) -> tuple[str, list[Case], list[Outcome]]:
    """Runs the public and the hidden cases; the peers beside the public ones."""
    device = pick_device()
    untimed = why_untimed(device)
    if untimed:
        note(f"nothing is timed, so nothing is scored: {untimed}")
    seed = draw_seed() if options.hidden is None else options.hidden
    note(f"hidden cases of seed {seed} (--hidden {seed} draws them again)")
    public, hidden = load_cases(), select_cases(hidden_seed=seed)
    present = []
    if not options.no_peers and not untimed:
        present, absent = available_peers()
        for line in absent:
            note(line)
    beside = peer_entries(present)
    if subject.submission is None and not untimed and FULL in subject.implementation().scopes:
        beside.insert(0, subject.entry(FULL))
    stamp = Stamp.now(device)
    recorder = Recorder("score", stamp) if options.record else None
    outcomes: list[Outcome] = []
    progress = Progress("case")
    with Session(
        device, [plan], options.backend, options.timeout, progress=progress.say
    ) as session:
        for case in progress.over([*public, *hidden]):
            progress.say(case.name)
            entries = [] if case.twin_of else beside
            graded, others = session.grade(case, subject, CORE, entries)
            for outcome in (*graded, *others):
                if outcome.reason:
                    note(f"{case.name}: {outcome.implementation}: {outcome.reason}")
            outcomes += [*graded, *others]
            if recorder:
                recorder.add([*graded, *others], hidden_seed=seed)
    return stamp.device, [*public, *hidden], outcomes


def _baselines(device: str) -> Mapping[str, Baseline]:
    try:
        return _known_baselines(device)
    except ValueError as error:
        note(f"no score: {error} (measure them here with: make baseline)")
        return {}


def _known_baselines(device: str) -> Mapping[str, Baseline]:
    """Raises ValueError listing the devices that have baselines."""
    try:
        return load_baselines(device)
    except KeyError as error:
        raise ValueError(error.args[0]) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m harness.score", description="Measures all cases and scores them."
    )
    parser.add_argument("--impl", default=OURS, metavar="NAME|FILE")
    parser.add_argument("--version", metavar="VERSION", help="a version of the ladder")
    parser.add_argument("--backend", default="auto")
    parser.add_argument(
        "--hidden", type=int, metavar="SEED", help="the hidden cases' seed (drawn if left out)"
    )
    parser.add_argument(
        "--baseline", metavar="DEVICE", help="baselines of another device than this one"
    )
    parser.add_argument(
        "--recorded", metavar="DEVICE", help="score what results/DEVICE holds, measuring nothing"
    )
    parser.add_argument("--record", action="store_true", help="write results/<device>/score.csv")
    parser.add_argument("--no-peers", action="store_true", help="leave the peers out")
    parser.add_argument("--warmup", type=int, default=WARMUP, metavar="N")
    parser.add_argument("--repetitions", type=int, default=REPETITIONS, metavar="N")
    parser.add_argument("--timeout", type=seconds, default=TIMEOUT_S, metavar="SECONDS")
    parser.add_argument("--output-format", choices=("table", "json"), default="table")
    return parser


if __name__ == "__main__":
    sys.exit(main())
