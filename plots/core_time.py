"""Figure 2: the core's time over the versions, on the four long cases."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .common import (
    ACCENT,
    DARK,
    GREY,
    INK,
    SMALL_POINTS,
    Sheet,
    case_rows,
    milliseconds,
    plain_log,
    provenance,
    span,
    version_name,
)
from .data import LONG_CASES, REJECTED, Recorded, Times

PROTOCOL = "oj"


def draw(recorded: Recorded) -> Figure:
    measured = {version: recorded.times(version, PROTOCOL) for version in recorded.versions}
    first, last = recorded.path_versions[0], recorded.path_versions[-1]
    for version in (first, last):
        measured[version] = recorded.right_times(version, PROTOCOL)
    rows = [row for of_version in measured.values() for row in of_version.values()]
    sheet = Sheet(
        1.1 + 0.25 * len(measured),
        title(measured[first], measured[last], first, last),
        f"core · {provenance(recorded, PROTOCOL, rows)}; filled: kept, hollow: rejected",
    )
    panels = sheet.grid(columns=len(LONG_CASES), left=1.15, right=0.25, top=0.35, wspace=0.09)
    for place, (axes, case) in enumerate(zip(panels, LONG_CASES, strict=True)):
        _panel(axes, case, measured)
        case_rows(axes, list(measured), labels=place == 0)
        axes.set_title(case)
        axes.set_xlabel("ms, log scale")
    return sheet.figure


def _panel(axes: Axes, case: str, measured: dict[str, Times]) -> None:
    found = [times[case].median_ms for times in measured.values() if times[case].median_ms]
    axes.set_xscale("log")
    axes.set_xlim(min(found) / 1.5, max(found) * 1.5)
    plain_log(axes.xaxis)
    axes.grid(axis="x")
    kept = [
        (times[case].median_ms, row)
        for row, (version, times) in enumerate(measured.items())
        if version not in REJECTED and times[case].median_ms
    ]
    axes.plot(*zip(*kept, strict=True), color=GREY, linewidth=1.2, zorder=2)
    last = len(measured) - 1
    for row, (version, times) in enumerate(measured.items()):
        time = times[case]
        if not time.median_ms:
            axes.text(min(found), row, "wrong", va="center", size=SMALL_POINTS, color=DARK)
            continue
        colour = ACCENT if row == last else GREY
        axes.plot(
            time.median_ms,
            row,
            "o",
            markersize=7 if row == last else 6,
            color=colour,
            markerfacecolor="white" if version in REJECTED else colour,
            zorder=3,
        )
        if row in (0, last):
            axes.annotate(
                milliseconds(time.median_ms),
                (time.median_ms, row),
                xytext=(7 if row else -7, 0),
                textcoords="offset points",
                ha="left" if row else "right",
                va="center",
                size=SMALL_POINTS,
                color=ACCENT if row == last else INK,
                weight="bold" if row == last else "normal",
            )


def title(before: Times, after: Times, first: str, last: str) -> str:
    ratios = [before[case].median_ms / after[case].median_ms for case in LONG_CASES]
    return (
        f"The four long cases: {version_name(last)} is {span(ratios)} as fast as"
        f" {version_name(first)}"
    )
