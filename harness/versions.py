"""The kernel's ladder on the command line: which versions run here, what is expected, the table."""

import csv
import io
import json
import textwrap
from collections.abc import Mapping, Sequence

from cases import Case

from .check import Status
from .emulation import NothingRunsError
from .evaluate import Outcome
from .implementations import CORE, get, ladder_versions
from .results import Row, version_of
from .selection import Subject
from .tables import fixed
from .timing import Protocol

ALL = "all"
# On a GPU an expected failure may hang, which says enough after this long (compiling included).
FAILURE_TIMEOUT_S = 180.0
TABLE_COLUMNS = ("version", "expected", "origin", "case", "median_ms", "idea", "lesson", "reason")
_FAULTS = ("RaceError:", "DeadlockError:")
_TEXT_WIDTH = 100


def every_version(subject: Subject) -> tuple[list[Subject], list[str]]:
    """A subject for each version that can run here, and one line about each that cannot.

    Raises ValueError if that leaves none.
    """
    found, absent = [], []
    for version in ladder_versions():
        missing = get(subject.name, subject.backend, version).unavailable()
        if missing:
            absent.append(f"{version} left out: {missing}")
        else:
            found.append(Subject(subject.name, subject.backend, version))
    if not found:
        raise ValueError(f"no version can run here: {absent[0]}")
    return found, absent


def expected(version: str | None) -> str:
    """ "pass" or "fail", what the ladder's table says of the version; "pass" for none."""
    from gdn_ladder import get_version

    return get_version(version).expected if version else "pass"


def check_heads(version: str, case: Case) -> None:
    """Raises NothingRunsError where the version has no kernel for the case's head counts."""
    from gdn_ladder import LadderShape, kernels_of

    try:
        kernels_of(version, LadderShape(case.B, case.T, case.Hq, case.Hv, case.initial_state))
    except ValueError as error:
        raise NothingRunsError(str(error)) from error


def as_expected(outcome: Outcome, expectation: str) -> bool:
    """Did it pass, or fail for what the table keeps it for: a wrong result, a race, a hang?"""
    if expectation == "pass":
        return outcome.status is Status.PASS
    if outcome.status is Status.ERROR:
        return outcome.reason.startswith(_FAULTS)
    return outcome.status in (Status.WRONG, Status.TIMEOUT)


def recorded_times(rows: Sequence[Row], case: str) -> Mapping[str, Row]:
    """Each version's newest recorded row on `case`: kernels alone (graph replay)."""
    wanted = (CORE, Protocol.GRAPH.value, case)
    return {
        version_of(row): row
        for row in sorted(rows, key=lambda row: row.date)
        if version_of(row) and (row.scope, row.protocol, row.case) == wanted
    }


def versions_table(rows: Sequence[Row], case: str, style: str) -> str:
    """The ladder with the recorded time of each version on `case`, as "table", "csv" or "json"."""
    from gdn_ladder import VERSIONS

    times = recorded_times(rows, case)
    lines = [
        {
            "version": version.name,
            "expected": version.expected,
            "origin": version.origin,
            "case": case,
            "median_ms": times[version.name].median_ms if version.name in times else None,
            "idea": version.idea,
            "lesson": version.lesson,
            "reason": version.reason,
        }
        for version in VERSIONS
    ]
    if style == "json":
        return json.dumps(lines, indent=2) + "\n"
    if style == "csv":
        buffer = io.StringIO()
        writer = csv.DictWriter(buffer, TABLE_COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows({**line, "median_ms": fixed(line["median_ms"], 6)} for line in lines)
        return buffer.getvalue()
    return _text(lines, times, case)


def _text(lines: Sequence[Mapping], times: Mapping[str, Row], case: str) -> str:
    width = max(len(line["version"]) for line in lines)
    indent = " " * (width + 2 + 4 + 2 + 8 + 2)
    text = []
    for line in lines:
        row = times.get(line["version"])
        time = fixed(line["median_ms"], 4) or ("" if row is None else row.correctness)
        start = f"{line['version']:{width}}  {line['expected']:4}  {time:>8}  "
        found = "the source" if line["origin"] == "source" else "here"
        said = [line["idea"], f"{found}: {line['lesson']}"]
        if line["reason"]:
            said.append(f"fails: {line['reason']}")
        for first, what in zip((start, *[indent] * 2), said, strict=False):
            wrapped = textwrap.wrap(what, _TEXT_WIDTH, subsequent_indent="  ")
            text.append(first + f"\n{indent}".join(wrapped))
    if times:
        row = next(iter(times.values()))
        source = f"ms: median core time of {case}, graph replay, {row.device} of {row.date[:10]}"
    else:
        source = f"ms: no time of {case} is recorded"
    return "\n".join([*text, "", source, "the source: a slice of an H800, 14 SMs"]) + "\n"
