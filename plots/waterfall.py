"""The way of long_low_gva from v1 to the shipped kernel, step by step, and the floor."""

import textwrap

from matplotlib.figure import Figure

from gdn_ladder.versions import BY_NAME
from harness.device import H200
from harness.floors import floor_ms
from harness.implementations import CORE
from harness.timing import Protocol

from .common import (
    ACCENT,
    DARK,
    GREY,
    INK,
    LIGHT,
    SLOWER,
    SMALL_POINTS,
    Sheet,
    case_rows,
    factor,
    milliseconds,
    provenance,
    signed,
    version_name,
)
from .data import SHIPPED, Recorded

CASE = "long_low_gva"
PROTOCOL = "oj"
SHIPPED_IDEA = "what the package runs by default"


def draw(recorded: Recorded) -> Figure:
    rows = {v: recorded.right_times(v, PROTOCOL)[CASE] for v in recorded.path_versions}
    medians = {version: row.median_ms for version, row in rows.items()}
    floor = floor_ms(recorded.case(CASE), CORE, Protocol.COLD, H200)
    sheet = Sheet(
        1.0 + 0.42 * len(rows),
        title(medians, floor),
        f"core · {provenance(recorded, PROTOCOL, rows.values())}; floor: datasheet rates of HBM"
        " and tensor cores, the later of the two",
    )
    (axes,) = sheet.grid(left=3.45, right=0.3)
    axes.set_xlim(0, 1.25 * max(medians.values()))
    _bars(axes, list(medians.values()))
    case_rows(axes, [_label(version) for version in medians])
    axes.axvline(floor, color=INK, linewidth=1, linestyle=(0, (4, 2)))
    axes.annotate(
        f"floor {milliseconds(floor)}",
        (floor, -0.45),
        xytext=(4, 0),
        textcoords="offset points",
        size=SMALL_POINTS,
        va="bottom",
    )
    axes.set_ylim(len(medians) - 0.4, -1.0)
    axes.set_xlabel("ms")
    return sheet.figure


def _label(version: str) -> str:
    idea = SHIPPED_IDEA if version == SHIPPED else BY_NAME[version].idea.split(";")[0]
    return "\n".join(textwrap.wrap(f"{version}: {idea}", 48, max_lines=2, placeholder=" …"))


def _bars(axes, medians: list[float]) -> None:
    """The first and the last time as bars from 0, every step between as the part it took away."""
    last = len(medians) - 1
    for row, time in enumerate(medians):
        before = medians[row - 1] if row else 0.0
        if row in (0, last):
            axes.barh(row, time, height=0.62, color=ACCENT if row == last else GREY)
        if row > 0:
            slower = time > before
            colour = SLOWER if slower else LIGHT
            low, high = sorted((before, time))
            axes.barh(row, high - low, left=low, height=0.62, color=colour)
            axes.plot([before, before], [row - 0.69, row + 0.31], color=DARK, linewidth=0.8)
        step = "" if row == 0 else f" ({signed(time - before, '.3g')})"
        axes.annotate(
            f"{milliseconds(time)}{step}",
            (max(time, before), row),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            size=SMALL_POINTS,
            color=ACCENT if row == last else INK,
            weight="bold" if row == last else "normal",
        )


def title(medians: dict[str, float], floor: float) -> str:
    names, values = list(medians), list(medians.values())
    saved = {
        after: before_ms - after_ms
        for after, before_ms, after_ms in zip(names[1:], values, values[1:], strict=False)
    }
    best = max(saved, key=saved.get)
    return (
        f"{CASE}: {milliseconds(values[0])} in {names[0]}, {milliseconds(values[-1])} in"
        f" {version_name(names[-1])}, still {factor(values[-1] / floor)} the floor; the largest"
        f" step is {version_name(best)} ({milliseconds(saved[best])})"
    )
