"""What run.py prints: the lab's table and CSV, JSON, and each with references or versions."""

import csv
import io
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from enum import Enum

from cases import Case

from .evaluate import Outcome
from .results import Stamp, to_row
from .timing import paired_ratio
from .versions import as_expected

FORMATS = ("table", "csv", "json")


class Kind(Enum):
    """What the rows are about."""

    PLAIN = "plain"
    REFERENCES = "references"
    VERSIONS = "versions"


HEADERS = {
    Kind.PLAIN: ("CASE", "B", "T", "Hq", "Hv", "STATE", "RESULT", "MEDIAN(ms)"),
    Kind.REFERENCES: ("CASE", "SCOPE", "IMPLEMENTATION", "RESULT", "MEDIAN(ms)", "REF/STUDENT"),
    Kind.VERSIONS: ("CASE", "VERSION", "RESULT", "MEDIAN(ms)"),
}
COLUMNS = {
    Kind.PLAIN: ("case", "correctness", "median_ms"),
    Kind.REFERENCES: (
        "case",
        "scope",
        "implementation",
        "correctness",
        "median_ms",
        "reference_over_student",
    ),
    Kind.VERSIONS: ("case", "version", "expected", "correctness", "median_ms"),
}
# Of the columns behind the case's name; negative ones are aligned to the left.
WIDTHS = {
    Kind.PLAIN: (3, 6, 4, 4, 6, -14, 11),
    Kind.REFERENCES: (-5, -22, -14, 11, 12),
    Kind.VERSIONS: (-7, -24, 11),
}


class Report:
    """The rows, printed to standard output as they come (JSON: at the end) and kept as text."""

    def __init__(self, style: str, kind: Kind, cases: Sequence[Case]) -> None:
        self._style, self._kind = style, kind
        self._widths = (-max(len(case.name) for case in cases), *WIDTHS[kind])
        self._rows: list[tuple[Outcome, str]] = []
        self.text = ""
        if style == "csv":
            self._print(_csv_line(COLUMNS[kind]))
        elif style == "table":
            self._print(self._table_line(HEADERS[kind]))

    def add(
        self,
        case: Case,
        student: Outcome,
        references: Sequence[Outcome] = (),
        expected: str = "pass",
    ) -> None:
        """One row: the student's, then the references' if they were asked for.

        expected: "pass", or "fail" for a version that is kept to show how it fails.
        """
        self._rows += [(student, expected), *((reference, "pass") for reference in references)]
        if self._style == "json":
            return
        if self._kind is Kind.REFERENCES:
            self._reference_line(student, None)
            for reference in references:
                self._reference_line(reference, reference_over_student(reference, student))
        elif self._kind is Kind.VERSIONS:
            self._version_line(student, expected)
        else:
            self._line(case, student)

    def finish(self, metadata: dict) -> None:
        """Ends the report; JSON is printed here."""
        if self._style != "json":
            return
        stamp = Stamp(*(metadata[key] for key in ("device", "date", "revision")))
        rows = [
            {
                **asdict(to_row(outcome, stamp)),
                "backend": outcome.backend,
                "expected": expected,
                "reason": outcome.reason,
            }
            for outcome, expected in self._rows
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

    def _version_line(self, outcome: Outcome, expected: str) -> None:
        median, status = _milliseconds(outcome.median_ms), outcome.status.value
        if self._style == "csv":
            self._print(_csv_line((outcome.case, outcome.version, expected, status, median)))
            return
        if not as_expected(outcome, expected):
            status += f", should {expected}"
        elif expected == "fail":
            status += ", as expected"
        self._print(self._table_line((outcome.case, outcome.version, status, median)))

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
        cells = (
            str(value).ljust(-width) if width < 0 else str(value).rjust(width)
            for value, width in zip(values, self._widths, strict=True)
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
