"""Figure 5: the ideas that were tried on v7 and not kept, normalised to it."""

from matplotlib.figure import Figure

from gdn_ladder.versions import BY_NAME
from harness.results import Row
from harness.score import geometric_mean

from .common import (
    ACCENT,
    DARK,
    GREY,
    INK,
    LIGHT,
    SMALL_POINTS,
    Sheet,
    case_rows,
    factor,
    provenance,
    span,
)
from .data import REJECTED, Recorded, Times

PROTOCOL = "graph"
REFERENCE = "v7"


def draw(recorded: Recorded) -> Figure:
    reference = recorded.right_times(REFERENCE, PROTOCOL)
    order = list(BY_NAME)
    tried = [v for v in REJECTED if order.index(v) > order.index(REFERENCE)]
    measured = {v: recorded.right_times(v, PROTOCOL) for v in tried if v in recorded.versions}
    failures = {v: row for v, row in recorded.failures().items() if v in REJECTED}
    ratios = {version: over(rows, reference) for version, rows in measured.items()}
    shown = sorted(ratios, key=lambda version: geometric_mean([*ratios[version].values()]))
    rows = [row for of_version in (reference, *measured.values()) for row in of_version.values()]
    sheet = Sheet(
        1.0 + 0.34 * (len(shown) + len(failures)),
        title(ratios),
        f"core · {provenance(recorded, PROTOCOL, rows)}; bar: geometric mean, dot: a case",
    )
    (axes,) = sheet.grid(left=0.8, right=0.3)
    furthest = max(max(of_case.values()) for of_case in ratios.values())
    axes.set_xlim(0, 1.45 * furthest)
    axes.plot([1, 1], [-0.6, len(shown) - 0.5], color=INK, linewidth=1)
    for row, version in enumerate(shown):
        _bar(axes, row, ratios[version])
    for row, (version, found) in enumerate(failures.items(), start=len(shown)):
        axes.annotate(
            _why(version, found),
            (0, row),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            size=SMALL_POINTS,
            color=DARK,
        )
    case_rows(axes, [*shown, *failures])
    axes.set_xlabel(f"time over {REFERENCE}'s")
    return sheet.figure


def over(times: Times, reference: Times) -> dict[str, float]:
    return {case: row.median_ms / reference[case].median_ms for case, row in times.items()}


def _bar(axes, row: int, ratios: dict[str, float]) -> None:
    mean = geometric_mean([*ratios.values()])
    axes.barh(row, mean, height=0.6, color=ACCENT if mean < 1 else LIGHT)
    axes.plot(list(ratios.values()), [row] * len(ratios), "o", color=GREY, markersize=4, alpha=0.8)
    axes.annotate(
        f"{factor(mean)} ({span(ratios.values())})",
        (max(*ratios.values(), 1.0), row),
        xytext=(8, 0),
        textcoords="offset points",
        va="center",
        size=SMALL_POINTS,
    )


def _why(version: str, row: Row | None) -> str:
    status = "not run" if row is None else row.correctness
    return f"{status}: {BY_NAME[version].reason}"


def title(ratios: dict[str, dict[str, float]]) -> str:
    means = {version: geometric_mean([*of_case.values()]) for version, of_case in ratios.items()}
    faster = sorted((version for version in means if means[version] < 1), key=means.get)
    others = [mean for version, mean in means.items() if version not in faster]
    won = " and ".join(
        f"{version} {'takes ' * (place == 0)}{factor(means[version])}"
        for place, version in enumerate(faster)
    )
    lost = f"{len(others)} {'other ' * bool(won)}rejected ideas {'take ' * (not won)}{span(others)}"
    parts = [won and f"{won} the time", f"the {lost}{' the time' * (not won)}" if others else ""]
    return f"Against {REFERENCE}, by geometric means: {', '.join(filter(None, parts))}"
