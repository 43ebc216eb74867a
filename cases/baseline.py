"""Baseline times by device: t60 and t100 of every case, with where they come from."""

import csv
import json
import math
from dataclasses import dataclass, fields
from pathlib import Path

DIRECTORY = Path(__file__).with_name("baselines")


@dataclass(frozen=True)
class Baseline:
    """The two times that anchor a case's score, in milliseconds.

    t60_ms earns 60 points, t100_ms earns 100; t60_ms must be the longer one. The implementations
    say whose times they are.
    """

    case: str
    t60_ms: float
    t100_ms: float
    t60_implementation: str
    t100_implementation: str

    def __post_init__(self) -> None:
        for field in ("t60_ms", "t100_ms"):
            value = getattr(self, field)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"baseline of {self.case}: {field} is {value!r}, must be > 0")
        if self.t60_ms <= self.t100_ms:
            raise ValueError(
                f"baseline of {self.case}: t60_ms={self.t60_ms} must be longer than "
                f"t100_ms={self.t100_ms}"
            )


def load_baselines(device: str, directory: Path = DIRECTORY) -> dict[str, Baseline]:
    """The baselines of a device slug such as "nvidia-h200", by case name.

    Raises KeyError listing the devices that have baselines, ValueError for a bad file.
    """
    path = _file(device, "csv", directory)
    columns = [field.name for field in fields(Baseline)]
    baselines: dict[str, Baseline] = {}
    with path.open(newline="", encoding="utf-8") as handle:
        reader = csv.DictReader(handle)
        if reader.fieldnames != columns:
            raise ValueError(f"{path}: columns {reader.fieldnames}, must be {columns}")
        for row in reader:
            where = f"{path}, line {reader.line_num}"
            try:
                times = {field: float(row.pop(field)) for field in ("t60_ms", "t100_ms")}
                baseline = Baseline(**row, **times)
            except (TypeError, ValueError) as error:
                raise ValueError(f"{where}: {error}") from None
            if baseline.case in baselines:
                raise ValueError(f"{where}: the case {baseline.case!r} is given twice")
            baselines[baseline.case] = baseline
    return baselines


def load_provenance(device: str, directory: Path = DIRECTORY) -> dict:
    """Where the baselines of a device come from (a flat dict). Raises KeyError as above."""
    return json.loads(_file(device, "json", directory).read_text(encoding="utf-8"))


def _file(device: str, suffix: str, directory: Path) -> Path:
    path = directory / f"{device}.{suffix}"
    known = sorted(entry.stem for entry in directory.glob(f"*.{suffix}"))
    if device not in known:
        raise KeyError(
            f"no baselines for device {device!r}; there are some for: {', '.join(known) or 'none'}"
        )
    return path
