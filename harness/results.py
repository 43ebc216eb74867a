"""The one schema of recorded measurements: a writer, a loader, the metadata beside each file.

results/<device>/<name>.csv holds the rows, <name>.json the metadata (marked by "schema"), and
<name>.samples.json, where kept, the raw times. Anything else under results/ is left alone.
"""

import csv
import datetime
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .check import Status
from .device import device_slug, query_clocks, software
from .evaluate import Outcome
from .implementations import FORMERLY_SHIPPED, LADDER, OURS, SCOPES
from .timing import Protocol

if TYPE_CHECKING:
    import pandas

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
SCHEMA = "measurements"
# What the package runs by default, as opposed to a version of its ladder.
SHIPPED = "shipped"


@dataclass(frozen=True)
class Row:
    """One measurement; the fields are the columns, in order. Times in milliseconds, None untimed.

    device is a slug, date ISO 8601 in UTC, revision the commit (with "+" where files had changed).
    sm_mhz is the median SM clock that the times were taken at, None where it was not measured.
    """

    device: str
    date: str
    revision: str
    implementation: str
    version: str
    scope: str
    protocol: str
    case: str
    correctness: str
    median_ms: float | None
    p20_ms: float | None
    p80_ms: float | None
    repetitions: int
    sm_mhz: int | None = None

    def __post_init__(self) -> None:
        for name in ("device", "date", "revision", "implementation", "version", "case"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty, must say something")
        for name, allowed in (
            ("scope", SCOPES),
            ("protocol", [protocol.value for protocol in Protocol]),
            ("correctness", [status.value for status in Status]),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}, must be one of {', '.join(allowed)}"
                )
        times = (self.p20_ms, self.median_ms, self.p80_ms)
        if any(time is None for time in times):
            if times != (None, None, None) or self.repetitions:
                raise ValueError(f"times are {times}, must be all there or none")
        elif self.correctness != Status.PASS.value:
            raise ValueError(f"a time with {self.correctness}, only a PASS has one")
        elif not 0 < times[0] <= times[1] <= times[2] or self.repetitions < 1:
            raise ValueError(
                f"p20, median, p80 are {times} of {self.repetitions}, must rise from above 0"
            )
        if self.sm_mhz is not None and (self.sm_mhz <= 0 or self.median_ms is None):
            raise ValueError(f"sm_mhz is {self.sm_mhz}, must be above 0 and go with a time")


COLUMNS = tuple(field.name for field in fields(Row))
# Files recorded before a clock was taken lack it.
OPTIONAL = ("sm_mhz",)


@dataclass(frozen=True)
class Stamp:
    """What all rows of one run share."""

    device: str
    date: str
    revision: str

    @classmethod
    def now(cls, device: torch.device) -> "Stamp":
        date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        return cls(device=device_slug(device), date=date, revision=revision())


def version_of(row: Row) -> str | None:
    """The version of the kernel that a row measured: of the ladder, or SHIPPED; None for others.

    What an earlier release shipped goes by the name that it has in the ladder.
    """
    if row.implementation == OURS:
        return FORMERLY_SHIPPED.get(row.version, SHIPPED)
    return row.version if row.implementation == LADDER else None


def to_row(outcome: Outcome, stamp: Stamp) -> Row:
    """The row of an outcome."""
    sample = outcome.sample
    return Row(
        device=stamp.device,
        date=stamp.date,
        revision=stamp.revision,
        implementation=outcome.implementation,
        version=outcome.version,
        scope=outcome.scope,
        protocol=outcome.protocol,
        case=outcome.case,
        correctness=outcome.status.value,
        median_ms=sample.median_ms if sample else None,
        p20_ms=sample.p20_ms if sample else None,
        p80_ms=sample.p80_ms if sample else None,
        repetitions=sample.repetitions if sample else 0,
        sm_mhz=round(sample.clock_mhz) if sample and sample.clock_mhz else None,
    )


def revision(root: Path = ROOT) -> str:
    """The commit checked out at `root`, "+" behind it where tracked files differ; else "unknown".

    GDN_REVISION goes before: a copied work tree may have no repository, or that of another commit.
    """
    given = os.environ.get("GDN_REVISION")
    if given:
        return given
    try:
        commit = _git(root, "rev-parse", "--short=12", "HEAD")
        return commit + ("+" if _git(root, "status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def begin_metadata(stamp: Stamp) -> dict:
    """What is known before the measurement; finish_metadata() adds what is known after it."""
    return {
        "schema": SCHEMA,
        **asdict(stamp),
        "command": command_line(sys.argv),
        "software": software(),
        "clocks_before": query_clocks(),
    }


def command_line(argv: Sequence[str], root: Path = ROOT) -> str:
    """What was typed, without the paths of the machine it was typed on."""
    script = Path(argv[0])
    if script.is_absolute() and script.is_relative_to(root):
        script = script.relative_to(root)
    return shlex.join(["python", str(script), *argv[1:]])


def finish_metadata(begun: Mapping[str, object], **more: object) -> dict:
    """`begun` with the clocks after the measurement, the driver and whatever else is given."""
    clocks = query_clocks()
    return {**begun, "clocks_after": clocks, "driver": clocks.get("driver_version"), **more}


def write_table(
    path: Path,
    columns: Sequence[str],
    rows: Iterable[Mapping[str, object]],
    metadata: Mapping[str, object],
) -> None:
    """Rows that are no measurements of implementations, as CSV, and their metadata beside them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as handle:
        writer = csv.DictWriter(handle, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    text = json.dumps(metadata, indent=2, default=str)
    path.with_suffix(".json").write_text(text + "\n", encoding="utf-8")


def write_results(
    name: str,
    rows: Sequence[Row],
    metadata: Mapping[str, object],
    outcomes: Iterable[Outcome] = (),
    root: Path = RESULTS,
    merge: bool = False,
) -> Path:
    """Writes results/<device>/<name>.csv and what belongs beside it; returns the CSV's path.

    `outcomes` gives the raw times to keep. An earlier file of that name is replaced; with `merge`
    its rows of other measurements stay, and its metadata moves under "earlier". Raises ValueError
    if there are no rows or they are of several devices.
    """
    devices = {row.device for row in rows}
    if len(devices) != 1:
        raise ValueError(f"rows of the devices {sorted(devices)}, must be of one")
    directory = root / devices.pop()
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.csv"
    samples = [_sample(outcome) for outcome in outcomes if outcome.times_ms]
    rows, metadata = list(rows), {**metadata, "schema": SCHEMA}
    if merge and path.is_file():
        new = {_key(row) for row in rows}
        rows = [row for row in read_rows(path) if _key(row) not in new] + rows
        samples = [old for old in _read_samples(path) if _key(old) not in new] + samples
        before = json.loads(path.with_suffix(".json").read_text())
        metadata["earlier"] = before.pop("earlier", [])
        if before.get("date") != metadata.get("date"):
            metadata["earlier"].append(before)
    with path.open("w", newline="", encoding="utf-8") as handle:
        write_csv(handle, rows)
    text = json.dumps(metadata, indent=2, default=str)
    path.with_suffix(".json").write_text(text + "\n", encoding="utf-8")
    kept = path.with_suffix(".samples.json")
    kept.unlink(missing_ok=True)
    if samples:
        lines = ",\n".join(map(json.dumps, samples))
        kept.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    return path


class Recorder:
    """Records a run as it goes, so that what was measured stays when the machine goes away.

    With `merge` the file's rows of other measurements stay.
    """

    def __init__(self, name: str, stamp: Stamp, merge: bool = False, root: Path = RESULTS) -> None:
        self._name, self._stamp, self._merge, self._root = name, stamp, merge, root
        self._metadata = begin_metadata(stamp)
        self._outcomes: list[Outcome] = []

    def add(self, outcomes: Iterable[Outcome], **more: object) -> Path:
        """Writes all outcomes so far; `more` goes into the metadata. Returns the CSV's path."""
        self._outcomes += outcomes
        rows = [to_row(outcome, self._stamp) for outcome in self._outcomes]
        metadata = finish_metadata(self._metadata, **more)
        return write_results(self._name, rows, metadata, self._outcomes, self._root, self._merge)

    @property
    def metadata(self) -> dict:
        """What was known when the run began."""
        return dict(self._metadata)


# What tells one measurement from another.
_KEYS = ("implementation", "version", "scope", "protocol", "case")


def _key(measured: Row | Mapping[str, object]) -> tuple[object, ...]:
    values = asdict(measured) if isinstance(measured, Row) else measured
    return tuple(values[key] for key in _KEYS)


def _sample(outcome: Outcome) -> dict:
    """Nanoseconds are as fine as an event's time is."""
    times = [round(time, 6) for time in outcome.times_ms]
    return {**{key: getattr(outcome, key) for key in _KEYS}, "times_ms": times}


def _read_samples(path: Path) -> list[dict]:
    kept = path.with_suffix(".samples.json")
    return json.loads(kept.read_text()) if kept.is_file() else []


def write_csv(handle, rows: Iterable[Row]) -> None:
    """The rows as CSV, header first; an absent time or clock is an empty field."""
    writer = csv.writer(handle, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows:
        writer.writerow(
            f"{value:.6f}" if isinstance(value, float) else value for value in asdict(row).values()
        )


def read_rows(path: Path) -> list[Row]:
    """The rows of one file. Raises ValueError naming the file and line of what is not a row.

    Further columns are allowed and left out; the optional ones may be missing.
    """
    with path.open(newline="", encoding="utf-8") as handle:
        reader = csv.DictReader(handle)
        there = (*OPTIONAL, *(reader.fieldnames or []))
        missing = [column for column in COLUMNS if column not in there]
        if missing:
            raise ValueError(f"{path}: columns missing: {', '.join(missing)}")
        rows = []
        for raw in reader:
            try:
                rows.append(_parse(raw))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {reader.line_num}: {error}") from None
        return rows


def _parse(raw: Mapping[str, str]) -> Row:
    times = {
        name: float(raw[name]) if raw[name] else None for name in ("median_ms", "p20_ms", "p80_ms")
    }
    clock = raw.get("sm_mhz")
    numbers = {"repetitions": int(raw["repetitions"]), "sm_mhz": int(clock) if clock else None}
    text = {name: raw[name] for name in COLUMNS if name not in (*times, *numbers)}
    return Row(**text, **times, **numbers)


def measurement_files(root: Path = RESULTS, device: str | None = None) -> list[Path]:
    """The CSV files of the schema, of one device or of all: those whose metadata says so."""
    return [
        path
        for path in sorted(root.glob(f"{device or '*'}/*.csv"))
        if path.with_suffix(".json").is_file()
        and json.loads(path.with_suffix(".json").read_text()).get("schema") == SCHEMA
    ]


def load_rows(root: Path = RESULTS, device: str | None = None) -> list[Row]:
    """Every recorded row, file by file."""
    return [row for path in measurement_files(root, device) for row in read_rows(path)]


def load_results(root: Path = RESULTS, device: str | None = None) -> "pandas.DataFrame":
    """Every recorded measurement as a table: the schema's columns and `file`, the file's stem."""
    import pandas

    tables = []
    for path in measurement_files(root, device):
        table = pandas.DataFrame([asdict(row) for row in read_rows(path)], columns=list(COLUMNS))
        tables.append(table.assign(file=path.stem))
    if not tables:
        return pandas.DataFrame(columns=[*COLUMNS, "file"])
    return pandas.concat(tables, ignore_index=True)
