"""Speed-up over the open-source implementations, core against core and full against full."""

from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from harness.implementations import CORE, FULL
from harness.score import geometric_mean

from .common import (
    ACCENT,
    DARK,
    GREY,
    INK,
    SMALL_POINTS,
    Sheet,
    case_rows,
    factor,
    provenance,
)
from .data import MissingDataError, Recorded, by_package

PROTOCOL = "oj"
KERNELS_ONLY = "graph"
SCOPES = {CORE: "core against core", FULL: "full against full"}
MEAN = "geometric mean"


@dataclass(frozen=True)
class Ratio:
    """The fastest peer's time over ours; `alone` the same with kernels only, where it is timed."""

    package: str
    value: float
    alone: float | None


def draw(recorded: Recorded) -> Figure:
    names = [case.name for case in recorded.cases]
    ratios = {scope: _ratios(recorded, scope, names) for scope in SCOPES}
    rows = [
        row
        for scope in SCOPES
        for times in (recorded.ours(scope, PROTOCOL), *recorded.peers(scope, PROTOCOL).values())
        for row in times.values()
    ]
    sheet = Sheet(
        1.25 + 0.34 * (len(names) + 1),
        title(ratios),
        f"{provenance(recorded, PROTOCOL, rows)}; bar: fastest peer's time over ours,"
        " diamond: the same by replayed CUDA Graphs (kernels only)",
    )
    panels = sheet.grid(columns=2, left=1.45, right=0.25, top=0.35, wspace=0.06)
    for place, (axes, (scope, label)) in enumerate(zip(panels, SCOPES.items(), strict=True)):
        _panel(axes, ratios[scope])
        case_rows(axes, [*names, MEAN], labels=place == 0)
        axes.set_title(label)
        axes.set_xlabel("speed-up")
    panels[0].get_yticklabels()[-1].set_weight("bold")
    return sheet.figure


def _ratios(recorded: Recorded, scope: str, names: list[str]) -> list[Ratio]:
    """Case by case."""
    ours = {p: recorded.ours(scope, p) for p in (PROTOCOL, KERNELS_ONLY)}
    peers = {p: recorded.peers(scope, p) for p in (PROTOCOL, KERNELS_ONLY)}
    found = []
    for name in names:
        called, replayed = (by_package(peers[p], name) for p in (PROTOCOL, KERNELS_ONLY))
        if not called:
            raise MissingDataError(f"bench.csv: no peer has a {scope} {PROTOCOL} time for {name}")
        best = min(called, key=called.get)
        alone = min(replayed.values(), default=None)
        found.append(
            Ratio(
                best,
                called[best] / ours[PROTOCOL][name].median_ms,
                alone and alone / ours[KERNELS_ONLY][name].median_ms,
            )
        )
    return found


def mean(ratios: list[Ratio]) -> Ratio:
    """The geometric means over the cases."""
    alone = [ratio.alone for ratio in ratios if ratio.alone]
    return Ratio(
        "",
        geometric_mean([ratio.value for ratio in ratios]),
        geometric_mean(alone) if len(alone) == len(ratios) else None,
    )


def _panel(axes: Axes, ratios: list[Ratio]) -> None:
    ends = [max(ratio.value, ratio.alone or 0, 1.0) for ratio in ratios]
    axes.set_xlim(0, 1.5 * max(ends))
    axes.axvline(1, color=INK, linewidth=1, zorder=3)
    for row, ratio in enumerate(ratios):
        _bar(axes, row, ratio, GREY)
    _bar(axes, len(ratios), mean(ratios), ACCENT)


def _bar(axes: Axes, row: int, ratio: Ratio, colour: str) -> None:
    axes.barh(row, ratio.value, height=0.62, color=colour)
    if ratio.alone:
        axes.plot(ratio.alone, row, "D", color=DARK, markersize=4.5, markeredgecolor="white")
    axes.annotate(
        f"{factor(ratio.value)} {ratio.package}",
        (max(ratio.value, ratio.alone or 0, 1.0), row),
        xytext=(6, 0),
        textcoords="offset points",
        va="center",
        size=SMALL_POINTS,
        color=INK if ratio.package else colour,
        weight="normal" if ratio.package else "bold",
    )


def title(ratios: dict[str, list[Ratio]]) -> str:
    return (
        f"Core against core {factor(mean(ratios[CORE]).value)}, full against full"
        f" {factor(mean(ratios[FULL]).value)} as fast as the fastest open-source implementation of"
        " each case (geometric means)"
    )
