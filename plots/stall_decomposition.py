"""Figure 1: what the warps of long_low_gva wait for, version by version."""

from matplotlib.figure import Figure

from harness.metrics import STALLS

from .common import (
    ACCENT,
    DARK,
    FAINT,
    GREY,
    INK,
    LIGHT,
    SMALL_POINTS,
    Sheet,
    case_rows,
    percent,
    profiled,
    version_name,
)
from .data import Kernel, Recorded

CASE = "long_low_gva"
NAMED = 5
ISSUING, OTHER = "selected", "other"
REASONS = {
    "long_scoreboard": "long scoreboard: loads, mbarriers",
    "short_scoreboard": "short scoreboard: shared memory",
    "barrier": "barrier",
    "wait": "fixed latency",
    "gmma": "warp group of a matrix product",
    "not_selected": "not selected",
    "math_pipe_throttle": "pipe busy",
    "mio_throttle": "shared-memory queue full",
    "lg_throttle": "global-memory queue full",
    "dispatch_stall": "dispatch",
    "no_instruction": "instruction fetch",
    "branch_resolving": "branch",
    ISSUING: "issuing",
    OTHER: "all others",
}
SHADES = (ACCENT, "#4F4F4F", "#7A7A7A", "#A0A0A0", LIGHT)
TEXT_SHARE = 0.045  # of the axis: narrower segments carry no text


def draw(recorded: Recorded) -> Figure:
    counters = [f"stall_{reason}" for reason in STALLS]
    kernels = {v: recorded.kernel(v, CASE, counters) for v in recorded.profiled_versions}
    stalls = {version: _stalls(kernel) for version, kernel in kernels.items()}
    named = _largest(stalls)
    sheet = Sheet(
        1.15 + 0.42 * len(stalls),
        title(stalls),
        profiled(recorded, any(kernel.of > 1 for kernel in kernels.values())),
    )
    (axes,) = sheet.grid(left=0.85, right=0.75, top=0.55, bottom=0.5)
    axes.set_xlim(0, max(sum(values.values()) for values in stalls.values()))
    for row, values in enumerate(stalls.values()):
        _bar(axes, row, values, named)
    case_rows(axes, list(stalls))
    axes.set_xlabel("warp cycles per issued instruction")
    axes.spines["left"].set_visible(False)
    axes.legend(loc="lower left", bbox_to_anchor=(-0.1, 1.0), ncols=4, handlelength=1.0)
    return sheet.figure


def _stalls(kernel: Kernel) -> dict[str, float]:
    return {reason: kernel.counters[f"stall_{reason}"] for reason in STALLS}


def _largest(stalls: dict[str, dict[str, float]]) -> list[str]:
    """The reasons to show by name, the largest over all versions first."""
    waits = [reason for reason in STALLS if reason != ISSUING]
    weight = {
        reason: sum(values[reason] / sum(values.values()) for values in stalls.values())
        for reason in waits
    }
    return sorted(waits, key=weight.get, reverse=True)[:NAMED]


def _bar(axes, row: int, values: dict[str, float], named: list[str]) -> None:
    total = sum(values.values())
    parts = {reason: values[reason] for reason in named}
    parts[OTHER] = total - sum(parts.values()) - values[ISSUING]
    parts[ISSUING] = values[ISSUING]
    colours = dict(zip(named, SHADES, strict=True)) | {OTHER: FAINT, ISSUING: "white"}
    start = 0.0
    for reason, width in parts.items():
        label = REASONS.get(reason, reason.replace("_", " ")) if row == 0 else None
        axes.barh(
            row,
            width,
            left=start,
            height=0.72,
            color=colours[reason],
            edgecolor=GREY if reason == ISSUING else "white",
            linewidth=0.6,
            label=label,
        )
        if width > TEXT_SHARE * axes.get_xlim()[1]:
            dark = reason in named[:3]
            axes.text(
                start + width / 2,
                row,
                percent(100 * width / total),
                ha="center",
                va="center",
                size=SMALL_POINTS,
                color="white" if dark else INK,
            )
        start += width
    axes.text(start, row, f" {total:.1f}", va="center", size=SMALL_POINTS, color=DARK)


def title(stalls: dict[str, dict[str, float]]) -> str:
    """The largest stall of the first and of the last version, as shares of all warp cycles."""
    (first, before), *_, (last, after) = stalls.items()
    (reason, share), (later, later_share) = _dominant(before), _dominant(after)
    if reason == later:
        return (
            f"{CASE}: {reason} is the largest stall, {percent(100 * share)} of the warp cycles in"
            f" {version_name(first)} and {percent(100 * later_share)} in {version_name(last)}"
        )
    return (
        f"{CASE}: the largest stall was {reason} ({percent(100 * share)}) in"
        f" {version_name(first)} and is {later} ({percent(100 * later_share)}) in"
        f" {version_name(last)}"
    )


def _dominant(values: dict[str, float]) -> tuple[str, float]:
    reason = max((r for r in values if r != ISSUING), key=values.get)
    return REASONS.get(reason, reason).split(":")[0], values[reason] / sum(values.values())
