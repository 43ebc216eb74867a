"""Fit the dispatch's cost model to a recorded sweep, and judge what it chooses.

    python benchmarks/fit_dispatch.py                 fit; print every point and a summary
    python benchmarks/fit_dispatch.py --write         the same, into the package's cost_model.json
    python benchmarks/fit_dispatch.py --packaged      only judge the constants that are shipped

The times of all plans are one linear system in the constants of all launches. It is solved by
least squares over the relative errors, no constant negative, outliers weighed down. Then rows are
weighed up that decide a point where the choice loses, as long as that helps.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "kernel"), str(ROOT / "benchmarks")]

from gdn_prefill.cost import (  # noqa: E402
    CONSTANTS,
    LAUNCHES,
    PACKAGED,
    CoreCall,
    CostModel,
    LaunchCost,
    launch_works,
    load_model,
)
from gdn_prefill.dispatch import TILES, core_plan  # noqa: E402
from gdn_prefill.split import CorePlan, SegmentPlan  # noqa: E402

SWEEP = ROOT / "results" / "nvidia-h200" / "dispatch_sweep.csv"
SIZES = tuple(CoreCall.__dataclass_fields__)
# The columns of a sweep that are read here.
COLUMNS = (*SIZES, "sms", "block_dv", "chunks_per_segment", "products", "median_us")

# What the choice must keep to, as a share of the time it is compared with.
WORST_LOSS = 0.08
# Two replays of one graph differ by this much; a split may not be slower than that.
NOISE = 0.01

HUBER = 0.03  # relative errors beyond it count linearly
REWEIGHTINGS = 8
EMPHASES = 12  # attempts at the points where the choice loses
EMPHASIS = 2.0


@dataclass(frozen=True)
class Measured:
    """One row of a sweep: a plan of a call took so many microseconds."""

    call: CoreCall
    sm_count: int
    plan: CorePlan
    us: float


@dataclass(frozen=True)
class Choice:
    """What the model chooses at a point, beside the best that was measured there."""

    call: CoreCall
    plan: CorePlan
    us: float
    best: CorePlan
    best_us: float
    unsplit_us: float

    @property
    def loss(self) -> float:
        """What the choice takes more than the best, as a share of it."""
        return self.us / self.best_us - 1

    @property
    def slower_than_unsplit(self) -> bool:
        """Does a split that was chosen take longer than not splitting?"""
        return self.plan.kind == "split" and self.us > self.unsplit_us * (1 + NOISE)


def violates(choice: Choice) -> bool:
    """Is it too far from the best, or a split that had better not been made?"""
    return choice.loss > WORST_LOSS or choice.slower_than_unsplit


def read_sweep(path: Path) -> list[Measured]:
    """The rows of a sweep. Raises ValueError, naming file and line, where it is none."""
    try:
        with path.open(newline="", encoding="utf-8") as handle:
            reader = csv.DictReader(handle)
            missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise ValueError(f"no column {missing[0]}; a sweep has {', '.join(COLUMNS)}")
            rows = [_measured(row, reader.line_num) for row in reader]
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no sweep: not UTF-8 text") from None
    except (csv.Error, ValueError) as error:
        raise ValueError(f"{path} is no sweep: {error}") from None
    if not rows:
        raise ValueError(f"{path} is no sweep: no row in it")
    return rows


def _measured(row: dict[str, str], line: int) -> Measured:
    try:
        call = CoreCall(*(_positive(row, name) for name in SIZES))
        plan = CorePlan(_positive(row, "block_dv"))
        if plan.block_dv not in TILES:
            raise ValueError(f"block_dv is {plan.block_dv}, must be one of {TILES}")
        if row["chunks_per_segment"]:
            cut = SegmentPlan(call.chunks, _positive(row, "chunks_per_segment"))
            plan = CorePlan(plan.block_dv, cut, _positive(row, "products"))
        return Measured(call, _positive(row, "sms"), plan, _positive(row, "median_us", float))
    except ValueError as error:
        raise ValueError(f"line {line}: {error}") from None


def _positive(row: dict[str, str | None], name: str, kind: type = int) -> float:
    try:
        value = kind(row[name] or "")
    except ValueError:
        value = 0
    if not value > 0:
        raise ValueError(f"{name} is {row[name]!r}, must be a number above 0 ({kind.__name__})")
    return value


def by_point(rows: Sequence[Measured]) -> dict[tuple[CoreCall, int], dict[CorePlan, float]]:
    points: dict[tuple[CoreCall, int], dict[CorePlan, float]] = {}
    for row in rows:
        points.setdefault((row.call, row.sm_count), {})[row.plan] = row.us
    return points


def nonnegative_least_squares(A: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The x >= 0 with the least |A x - b|, by the active-set method of Lawson and Hanson."""
    x = np.zeros(A.shape[1])
    free = np.zeros(A.shape[1], dtype=bool)
    enough = 1e-9 * np.abs(A.T @ b).max()
    for _ in range(3 * len(x)):
        slope = np.where(free, -np.inf, A.T @ (b - A @ x))
        if slope.max() <= enough:
            break
        free[slope.argmax()] = True
        while True:
            wanted = np.zeros_like(x)
            wanted[free] = np.linalg.lstsq(A[:, free], b, rcond=None)[0]
            below = free & (wanted <= 0)
            if not below.any():
                x = wanted
                break
            # Go towards it until the first constant is 0, and hold that one there.
            drop = np.maximum(x[below] - wanted[below], 1e-300)
            x += (x[below] / drop).min() * (wanted - x)
            free &= x > 1e-12
            x[~free] = 0.0
    return x


def features(row: Measured) -> np.ndarray:
    """What the constants, launch after launch, are multiplied by in the time of a row."""
    found = np.zeros((len(LAUNCHES), len(CONSTANTS)))
    for name, work in launch_works(row.plan, row.call, row.sm_count).items():
        found[LAUNCHES.index(name)] = work.features
    return found.ravel()


def solve(relative: np.ndarray, weights: np.ndarray, provenance: dict) -> CostModel:
    """The model with the least weighted relative errors.

    relative: a row for each measurement, its features over its time: their product with the
    constants should be 1.
    """
    scale = relative.max(axis=0)
    scale[scale == 0] = 1.0
    outlying = np.ones(len(relative))
    for _ in range(REWEIGHTINGS):
        root = np.sqrt(weights * outlying)
        constants = nonnegative_least_squares(relative / scale * root[:, None], root) / scale
        error = np.abs(relative @ constants - 1)
        outlying = HUBER / np.maximum(error, HUBER)
    table = constants.reshape(len(LAUNCHES), len(CONSTANTS))
    launches = {
        name: LaunchCost(*(float(f"{value:.6g}") for value in values))
        for name, values in zip(LAUNCHES, table, strict=True)
    }
    return CostModel(launches, provenance)


def fit(rows: Sequence[Measured], provenance: dict) -> CostModel:
    """The model whose choices break the rules least often, then lose least."""
    relative = np.stack([features(row) / row.us for row in rows])
    weights = np.ones(len(rows))
    best: tuple[tuple[int, float, float], CostModel] | None = None
    for _ in range(EMPHASES):
        model = solve(relative, weights, provenance)
        choices = assess(rows, model)
        losses = [choice.loss for choice in choices]
        rank = (sum(map(violates, choices)), max(losses), sum(losses) / len(losses))
        if best is None or rank < best[0]:
            best = (rank, model)
        if max(losses) <= NOISE:
            break
        deciding = {
            (choice.call, plan)
            for choice in choices
            if choice.loss > max(losses) / 2 or violates(choice)
            for plan in (choice.plan, choice.best)
        }
        weights *= [EMPHASIS if (row.call, row.plan) in deciding else 1.0 for row in rows]
    return best[1]


def assess(rows: Sequence[Measured], model: CostModel) -> list[Choice]:
    """The model's choice at every point. Raises ValueError where a choice was not measured."""
    choices = []
    for (call, sm_count), times in by_point(rows).items():
        sizes = (call.sequences, call.tokens, call.heads_q, call.heads_v)
        plan = core_plan(*sizes, sm_count, model=model)
        if plan not in times:
            raise ValueError(f"{call}: {plan} was chosen but not measured; sweep again")
        best = min(times, key=times.get)
        unsplit = min(us for each, us in times.items() if each.kind == "unsplit")
        choices.append(Choice(call, plan, times[plan], best, times[best], unsplit))
    return choices


def relative_errors(rows: Sequence[Measured], model: CostModel) -> np.ndarray:
    """Of every row, (predicted - measured) / measured."""
    return np.array([model.predict(row.plan, row.call, row.sm_count) / row.us - 1 for row in rows])


def provenance(path: Path, rows: Sequence[Measured]) -> dict:
    """Where a model comes from: the sweep by name and digest, and how it was taken."""
    beside = path.with_suffix(".json")
    taken = json.loads(beside.read_text()) if beside.is_file() else {}
    return {
        "device": taken.get("device", "unknown"),
        "date": taken.get("date", "unknown"),
        "revision": taken.get("revision", "unknown"),
        "sweep": str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name,
        "sha256": digest(path),
        "points": len(by_point(rows)),
        "rows": len(rows),
    }


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def report(rows: Sequence[Measured], model: CostModel, every: bool = True) -> list[str]:
    """The table of choices, and what it comes to."""
    choices = assess(rows, model)
    lines = []
    for choice in sorted(choices, key=lambda choice: choice.loss) if every else ():
        call = choice.call
        mark = "  SLOWER THAN UNSPLIT" if choice.slower_than_unsplit else ""
        lines.append(
            f"B {call.sequences:3d} T {call.tokens:6d} heads {call.heads_q:2d}/{call.heads_v:2d}  "
            f"chosen {_short(choice.plan):>18} {choice.us:9.1f} us  "
            f"best {_short(choice.best):>18} {choice.best_us:9.1f} us  {choice.loss:6.1%}{mark}"
        )
    losses = np.array([choice.loss for choice in choices])
    errors = np.abs(relative_errors(rows, model))
    splits = [choice for choice in choices if choice.plan.kind == "split"]
    slower = sum(choice.slower_than_unsplit for choice in choices)
    lines.append(
        f"{len(choices)} points, {len(splits)} split; loss worst {losses.max():.1%}, "
        f"mean {losses.mean():.2%}; {slower} slower than unsplit; prediction off by "
        f"{np.median(errors):.1%} (median), {np.quantile(errors, 0.95):.1%} (95 %)"
    )
    return lines


def _short(plan: CorePlan) -> str:
    if plan.cut is None:
        return f"dv {plan.block_dv}"
    return f"{plan.segments} x {plan.chunks_per_segment} dv {plan.block_dv}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sweep", type=Path, default=SWEEP, help="CSV (default %(default)s)")
    parser.add_argument("--write", action="store_true", help="into the package")
    parser.add_argument("--packaged", action="store_true", help="judge, do not fit")
    parser.add_argument("--brief", action="store_true", help="only the summary")
    options = parser.parse_args(arguments)
    try:
        rows = read_sweep(options.sweep)
    except ValueError as error:
        parser.error(f"argument --sweep: {error} (dispatch_sweep.py makes one)")
    model = load_model() if options.packaged else fit(rows, provenance(options.sweep, rows))
    print("\n".join(report(rows, model, not options.brief)))
    if options.write and not options.packaged:
        PACKAGED.write_text(model.to_json(), encoding="utf-8")
        print(f"written: {PACKAGED}")
    return int(any(map(violates, assess(rows, model))))


if __name__ == "__main__":
    sys.exit(main())
