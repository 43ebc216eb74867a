"""Figure 7: long_low_gva against wide_gva_state, few heads against many, by the counters."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .common import (
    ACCENT,
    DARK,
    GREY,
    LIGHT,
    SMALL_POINTS,
    Sheet,
    case_rows,
    percent,
    profiled,
    version_name,
)
from .data import Kernel, Recorded

FEW, MANY = "long_low_gva", "wide_gva_state"
COUNTERS = {
    "occupancy": "occupancy of busy SMs, %",
    "stall_long_scoreboard": "long scoreboard,\nwarp cycles per issue",
    "tensor_active": "tensor pipe active\nin busy SMs, %",
}


def draw(recorded: Recorded) -> Figure:
    versions = recorded.profiled_versions
    kernels = {
        (version, case): recorded.kernel(version, case, COUNTERS)
        for version in versions
        for case in (FEW, MANY)
    }
    sheet = Sheet(
        1.6 + 0.36 * len(versions),
        title(kernels, versions[-1]),
        profiled(recorded, any(kernel.of > 1 for kernel in kernels.values())),
    )
    panels = sheet.grid(
        columns=len(COUNTERS), left=0.85, right=0.3, top=0.8, wspace=0.14, bottom=0.35
    )
    for place, (axes, (counter, label)) in enumerate(zip(panels, COUNTERS.items(), strict=True)):
        _panel(
            axes, [tuple(kernels[v, c].counters[counter] for c in (FEW, MANY)) for v in versions]
        )
        case_rows(axes, list(versions), labels=place == 0)
        axes.set_title(label)
    panels[0].legend(loc="lower left", bbox_to_anchor=(-0.03, 1.16), ncols=2, handletextpad=0.2)
    return sheet.figure


def _panel(axes: Axes, pairs: list[tuple[float, float]]) -> None:
    axes.set_xlim(0, 1.25 * max(max(pair) for pair in pairs))
    axes.grid(axis="x")
    for row, (few, many) in enumerate(pairs):
        axes.plot([few, many], [row, row], color=LIGHT, linewidth=2.5, zorder=2)
        label = row == 0
        axes.plot(few, row, "o", color=ACCENT, markersize=7, zorder=3, label=FEW if label else None)
        axes.plot(many, row, "o", color=GREY, markersize=7, zorder=3, label=MANY if label else None)
        low, high = sorted([(few, ACCENT), (many, DARK)])
        for (value, colour), away in ((low, -1), (high, 1)):
            axes.annotate(
                f"{value:.1f}",
                (value, row),
                xytext=(7 * away, 0),
                textcoords="offset points",
                ha="left" if away > 0 else "right",
                va="center",
                size=SMALL_POINTS,
                color=colour,
            )


def title(kernels: dict[tuple[str, str], Kernel], version: str) -> str:
    few, many = (kernels[version, case].counters for case in (FEW, MANY))
    return (
        f"{FEW} against {MANY} in {version_name(version)}: tensor pipe"
        f" {percent(few['tensor_active'])} against {percent(many['tensor_active'])} active, long"
        f" scoreboard {few['stall_long_scoreboard']:.1f} against"
        f" {many['stall_long_scoreboard']:.1f} warp cycles an issue"
    )
