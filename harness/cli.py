"""run.py's command line: the lab's options and outputs, and what this project adds."""

import argparse
import csv
import io
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from cases import Case

from .check import Status
from .device import pick_device, why_untimed
from .evaluate import Outcome
from .implementations import BACKENDS, CORE, OURS, SCOPES, names
from .progress import Progress, note
from .results import Stamp, begin_metadata, finish_metadata, to_row
from .selection import Subject, available_peers, draw_seed, peer_entries, select_cases
from .session import Session
from .timing import REPETITIONS, WARMUP, Plan, Protocol, paired_ratio
from .worker import TIMEOUT_S

# What --hidden without a number stands for.
NEW_SEED = -1
FORMATS = ("table", "csv", "json")
HEADER = ("CASE", "B", "T", "Hq", "Hv", "STATE", "RESULT", "MEDIAN(ms)")
REFERENCE_HEADER = ("CASE", "SCOPE", "IMPLEMENTATION", "RESULT", "MEDIAN(ms)", "REF/STUDENT")
CSV_COLUMNS = ("case", "correctness", "median_ms")
REFERENCE_COLUMNS = (
    "case",
    "scope",
    "implementation",
    "correctness",
    "median_ms",
    "reference_over_student",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 only if every case passed; 2 for arguments that make no sense."""
    parser = _parser()
    options = parser.parse_args(argv)
    hidden_seed = draw_seed() if options.hidden == NEW_SEED else options.hidden
    subject = Subject(options.impl, options.backend, options.version)
    try:
        cases = select_cases(options.case, options.cases, hidden_seed)
        plan = Plan(Protocol(options.protocol), options.warmup, options.repetitions)
        if not options.list:
            subject.check(options.scope)
    except (ValueError, FileNotFoundError, ImportError) as error:
        parser.error(str(error))
    if hidden_seed is not None:
        note(f"hidden cases of seed {hidden_seed} (--hidden {hidden_seed} draws them again)")
    if options.list:
        _list(cases)
        return 0
    return _run(options, cases, subject, plan)


def _run(options: argparse.Namespace, cases: list[Case], subject: Subject, plan: Plan) -> int:
    device = pick_device()
    untimed = why_untimed(device)
    if untimed:
        note(f"nothing is timed: {untimed}")
    beside = []
    if options.reference_benchmarks:
        present, absent = available_peers()
        beside = peer_entries(present)
        for line in absent:
            note(line)
    report = Report(options.output_format, options.reference_benchmarks, cases)
    metadata = begin_metadata(Stamp.now(device))
    progress = Progress("case")
    passed = True
    with Session(
        device,
        [plan],
        options.backend,
        options.timeout,
        isolated=not options.in_process,
        progress=progress.say,
    ) as session:
        for case in progress.over(cases):
            progress.say(case.name)
            (student,), references = session.grade(case, subject, options.scope, beside)
            passed = passed and student.status is Status.PASS
            report.add(case, student, references)
            for outcome in (student, *references):
                if outcome.reason:
                    note(f"{case.name}: {outcome.implementation}: {outcome.reason}")
    report.finish(finish_metadata(metadata))
    if options.out:
        Path(options.out).write_text(report.text, encoding="utf-8")
    return 0 if passed else 1


class Report:
    """The rows, printed to standard output as they come (JSON: at the end) and kept as text."""

    def __init__(self, style: str, references: bool, cases: Sequence[Case]) -> None:
        self._style, self._references = style, references
        self._width = max(len(case.name) for case in cases)
        self._outcomes: list[Outcome] = []
        self.text = ""
        if style == "csv":
            self._print(_csv_line(REFERENCE_COLUMNS if references else CSV_COLUMNS))
        elif style == "table":
            self._print(self._table_line(REFERENCE_HEADER if references else HEADER))

    def add(self, case: Case, student: Outcome, references: Sequence[Outcome]) -> None:
        """One case: the student's row, then the references' if they were asked for."""
        self._outcomes += [student, *references]
        if self._style == "json":
            return
        if not self._references:
            self._line(case, student)
            return
        self._reference_line(student, None)
        for reference in references:
            self._reference_line(reference, reference_over_student(reference, student))

    def finish(self, metadata: dict) -> None:
        """Ends the report; JSON is printed here."""
        if self._style != "json":
            return
        stamp = Stamp(*(metadata[key] for key in ("device", "date", "revision")))
        rows = [
            {**asdict(to_row(outcome, stamp)), "reason": outcome.reason}
            for outcome in self._outcomes
        ]
        self._print(json.dumps({"metadata": metadata, "rows": rows}, indent=2) + "\n")

    def _line(self, case: Case, outcome: Outcome) -> None:
        median = _milliseconds(outcome.median_ms)
        if self._style == "csv":
            self._print(_csv_line((case.name, outcome.status.value, median)))
            return
        state = "yes" if case.initial_state else "no"
        values = (case.name, case.B, case.T, case.Hq, case.Hv, state, outcome.status, median)
        self._print(self._table_line(values))

    def _reference_line(self, outcome: Outcome, ratio: float | None) -> None:
        values = (
            outcome.case,
            outcome.scope,
            outcome.implementation,
            outcome.status.value,
            _milliseconds(outcome.median_ms),
            "" if ratio is None else f"{ratio:.4f}",
        )
        self._print(_csv_line(values) if self._style == "csv" else self._table_line(values))

    def _table_line(self, values: Sequence[object]) -> str:
        if self._references:
            widths = (-self._width, -5, -22, -14, 11, 12)
        else:
            widths = (-self._width, 3, 6, 4, 4, 6, -14, 11)
        cells = (
            str(value).ljust(-width) if width < 0 else str(value).rjust(width)
            for value, width in zip(values, widths, strict=True)
        )
        return "  ".join(cells).rstrip() + "\n"

    def _print(self, text: str) -> None:
        self.text += text
        sys.stdout.write(text)
        sys.stdout.flush()


def reference_over_student(reference: Outcome, student: Outcome) -> float | None:
    """Reference time over student time, above 1 where the student is faster; None if untimed.

    Paired round by round where both were timed in turn, else a ratio of medians.
    """
    ours, theirs = student.sample, reference.sample
    if ours is None or theirs is None:
        return None
    if ours.repetitions == theirs.repetitions and student.version != "submission":
        return paired_ratio(theirs, ours)
    return theirs.median_ms / ours.median_ms


def _csv_line(values: Sequence[object]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow(values)
    return buffer.getvalue()


def _milliseconds(value: float | None) -> str:
    return "" if value is None else f"{value:.6f}"


def _list(cases: Sequence[Case]) -> None:
    width = max(len(case.name) for case in cases)
    for case in cases:
        state = "state" if case.initial_state else "no state"
        print(
            f"{case.name:{width}}  B={case.B} T={case.T} Hq={case.Hq} Hv={case.Hv} {state}"
            f" {case.gate} rtol={case.rtol:g} atol={case.atol:g}"
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="run.py",
        description="Checks Gated DeltaNet prefill on the lab's cases, then times what is right."
        " Exit code 0 only if every case passed.",
    )
    what = parser.add_argument_group("what to run")
    what.add_argument("--case", action="append", default=[], metavar="NAME", help="repeatable")
    what.add_argument("--cases", metavar="PATH", help="a case file instead of cases/public.csv")
    what.add_argument(
        "--hidden",
        nargs="?",
        const=NEW_SEED,
        metavar="SEED",
        type=int,
        help="the hidden cases of SEED (a new one if left out) instead of the public ones",
    )
    what.add_argument("--list", action="store_true", help="list the cases and stop")
    what.add_argument(
        "--impl",
        default=OURS,
        metavar="NAME|FILE",
        help=f"{', '.join(names())}, package.module:NAME, or a submission file that defines"
        " gdn_prefill_forward (default: %(default)s)",
    )
    what.add_argument(
        "--version", metavar="VERSION", help="a version of the kernel's ladder, such as v1"
    )
    what.add_argument("--backend", choices=BACKENDS, default="auto")
    what.add_argument("--scope", choices=SCOPES, default=CORE)
    how = parser.add_argument_group("how to time it")
    how.add_argument("--protocol", choices=[p.value for p in Protocol], default=Protocol.OJ.value)
    how.add_argument("--warmup", type=int, default=WARMUP, metavar="N")
    how.add_argument("--repetitions", type=int, default=REPETITIONS, metavar="N")
    how.add_argument(
        "--timeout", type=float, default=TIMEOUT_S, metavar="SECONDS", help="for one case"
    )
    how.add_argument(
        "--in-process",
        action="store_true",
        help="trusted implementations in this process, not in a child (under a profiler always)",
    )
    out = parser.add_argument_group("what to print")
    out.add_argument("--output-format", choices=FORMATS, default=FORMATS[0])
    out.add_argument("--out", metavar="FILE", help="write what is printed to FILE as well")
    out.add_argument(
        "--reference-benchmarks",
        action="store_true",
        help="time the public implementations that are installed, in turn with the student",
    )
    return parser
