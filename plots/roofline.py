"""The cores of v1 and of the shipped kernel under the roofs of memory and tensor cores."""

import math
from dataclasses import dataclass

from matplotlib.figure import Figure

from harness.device import H200
from harness.floors import core_bytes, core_flops

from .common import (
    ACCENT,
    GREY,
    INK,
    LIGHT,
    SMALL_POINTS,
    Sheet,
    percent,
    plain_log,
    provenance,
)
from .data import SHIPPED, Recorded

PROTOCOL = "graph"
FIRST = "v1"
GAP = 0.115  # between labels, in decades: a line of small text


@dataclass(frozen=True)
class Point:
    case: str
    intensity: float  # FLOP per byte
    before: float  # TFLOP/s of FIRST
    after: float  # TFLOP/s of SHIPPED

    @property
    def share(self) -> float:
        """Of the roof above it."""
        return self.after / roof(self.intensity)


def roof(intensity: float) -> float:
    """TFLOP/s that the datasheet allows at `intensity` FLOP per byte."""
    return min(intensity * H200.bytes_per_s, H200.flops_per_s) / 1e12


def draw(recorded: Recorded) -> Figure:
    before, after = (recorded.right_times(version, PROTOCOL) for version in (FIRST, SHIPPED))
    points = []
    for case in recorded.cases:
        flops, moved = core_flops(case), core_bytes(case)
        rates = [flops / times[case.name].median_ms / 1e9 for times in (before, after)]
        points.append(Point(case.name, flops / moved, *rates))
    sheet = Sheet(
        4.6,
        title(points),
        f"core · {provenance(recorded, PROTOCOL, [*before.values(), *after.values()])}; traffic:"
        " every tensor once",
    )
    (axes,) = sheet.grid(left=0.75, right=0.2)
    low, high = 40.0, 700.0
    ridge = H200.flops_per_s / H200.bytes_per_s
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(min(point.before for point in points) / 1.5, 1900)
    axes.plot([low, ridge, high], [roof(low), roof(ridge), roof(high)], color=INK, linewidth=1.5)
    axes.text(
        ridge * 1.05, roof(high) * 1.1, f"tensor cores, bf16: {roof(high):.0f} TFLOP/s", size=9
    )
    axes.text(
        low * 1.05,
        roof(low) * 1.9,
        f"HBM: {H200.bytes_per_s / 1e12:.1f} TB/s",
        size=SMALL_POINTS,
    )
    for point in points:
        pair = [point.before, point.after]
        axes.plot([point.intensity] * 2, pair, color=LIGHT, linewidth=1, zorder=1)
        axes.plot(point.intensity, point.before, "o", color=GREY, markersize=6, zorder=2)
        axes.plot(point.intensity, point.after, "o", color=ACCENT, markersize=7, zorder=3)
    _labels(axes, points)
    _key(axes, points)
    for axis in (axes.xaxis, axes.yaxis):
        plain_log(axis)
    axes.set_xlabel("FLOP per byte, log scale")
    axes.set_ylabel("TFLOP/s, log scale")
    axes.grid()
    return sheet.figure


def _labels(axes, points: list[Point]) -> None:
    """Case and share of the roof beside each point, moved apart where the points are close."""
    middle = sum(point.intensity for point in points) / len(points)
    for left in (True, False):
        group = sorted(
            (point for point in points if (point.intensity < middle) == left),
            key=lambda point: point.after,
        )
        heights = spread([math.log10(point.after) for point in group], GAP)
        edge = [point.intensity for point in group]
        for point, height in zip(group, heights, strict=True):
            axes.annotate(
                f"{point.case} ({percent(100 * point.share, 1)})",
                (point.intensity, point.after),
                xytext=(min(edge) / 1.25 if left else max(edge) * 1.25, 10**height),
                ha="right" if left else "left",
                va="center",
                size=SMALL_POINTS,
                arrowprops={"arrowstyle": "-", "color": LIGHT, "linewidth": 0.8, "shrinkB": 4},
            )


def spread(heights: list[float], gap: float) -> list[float]:
    """Rising heights moved as little as needed to stand `gap` apart, around their mean."""
    placed: list[float] = []
    for height in heights:
        placed.append(max(height, placed[-1] + gap) if placed else height)
    if not placed:
        return placed
    shift = (sum(heights) - sum(placed)) / len(placed)
    return [height + shift for height in placed]


def _key(axes, points: list[Point]) -> None:
    axes.plot([], [], "o", color=ACCENT, markersize=7, label=f"{SHIPPED} (share of its roof)")
    axes.plot([], [], "o", color=GREY, markersize=6, label=FIRST)
    axes.legend(loc="lower left")


def title(points: list[Point]) -> str:
    best, worst = max(points, key=lambda p: p.share), min(points, key=lambda p: p.share)
    found = (
        f"The {SHIPPED} core reaches {percent(100 * worst.share, 1)} ({worst.case}) to"
        f" {percent(100 * best.share, 1)} ({best.case}) of the roof"
    )
    if best.share < 0.5:
        found += ": neither memory nor tensor cores are the limit"
    return found
