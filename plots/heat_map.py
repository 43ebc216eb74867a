"""Figure 3: every version on every case, against v7."""

import math

from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize, to_rgb
from matplotlib.figure import Figure

from .common import (
    DIVERGING,
    FAINT,
    INK,
    SMALL_POINTS,
    Sheet,
    provenance,
    span,
    version_name,
)
from .data import Recorded, Times

PROTOCOL = "oj"
REFERENCE = "v7"


def draw(recorded: Recorded) -> Figure:
    measured = {version: recorded.times(version, PROTOCOL) for version in recorded.versions}
    measured[REFERENCE] = recorded.right_times(REFERENCE, PROTOCOL)
    cases = [case.name for case in recorded.cases]
    ratios = {
        (version, case): rows[case].median_ms / measured[REFERENCE][case].median_ms
        for version, rows in measured.items()
        for case in cases
        if rows[case].median_ms
    }
    rows = [row for of_version in measured.values() for row in of_version.values()]
    sheet = Sheet(
        1.0 + 0.3 * len(measured),
        title(measured, cases),
        f"core · {provenance(recorded, PROTOCOL, rows)}; number: time over {REFERENCE}'s",
    )
    axes, scale = sheet.grid(
        columns=2, left=1.15, right=0.75, top=0.65, bottom=0.15, wspace=0.04, width_ratios=(40, 1)
    )
    limit = max(abs(math.log2(ratio)) for ratio in ratios.values()) or 1.0
    norm = Normalize(-limit, limit)
    for i, version in enumerate(measured):
        for j, case in enumerate(cases):
            ratio = ratios.get((version, case))
            _cell(axes, j, i, ratio, norm)
    axes.set_xlim(-0.5, len(cases) - 0.5)
    axes.set_ylim(len(measured) - 0.5, -0.5)
    axes.set_xticks(range(len(cases)), [case.replace("_", "\n") for case in cases])
    axes.set_yticks(range(len(measured)), list(measured))
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    bar = sheet.figure.colorbar(ScalarMappable(norm, DIVERGING), cax=scale)
    steps = range(math.ceil(-limit), math.floor(limit) + 1)
    bar.set_ticks(list(steps), labels=[f"{2.0**step:g}x" for step in steps])
    bar.outline.set_visible(False)
    return sheet.figure


def _cell(axes, x: int, y: int, ratio: float | None, norm: Normalize) -> None:
    colour = FAINT if ratio is None else DIVERGING(norm(math.log2(ratio)))
    axes.bar(x, 0.94, bottom=y - 0.47, width=0.96, color=colour)
    axes.text(
        x,
        y,
        "wrong" if ratio is None else f"{ratio:.2f}",
        ha="center",
        va="center",
        size=SMALL_POINTS,
        color="white" if _luminance(colour) < 0.2 else INK,
    )


def _luminance(colour) -> float:
    """Relative luminance, 0 to 1, as WCAG defines it."""
    linear = [
        part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4
        for part in to_rgb(colour)
    ]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def title(measured: dict[str, Times], cases: list[str]) -> str:
    """Which version wins most cases, and how far the ladder spreads."""
    winners = [
        min(
            (version for version in measured if measured[version][case].median_ms),
            key=lambda version: measured[version][case].median_ms,
        )
        for case in cases
    ]
    best = max(measured, key=winners.count)
    spreads = [
        max(rows[case].median_ms or 0 for rows in measured.values())
        / min(rows[case].median_ms or math.inf for rows in measured.values())
        for case in cases
    ]
    return (
        f"Fastest in {winners.count(best)} of {len(cases)} cases: {version_name(best)}; the slowest"
        f" version takes {span(spreads)} the fastest's time"
    )
