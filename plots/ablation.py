"""Figure 4: what block_dv and double-buffered Q and K do to the early kernel (v2, v2b, v3)."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .common import ACCENT, GREY, INK, SMALL_POINTS, Sheet, case_rows, factor, provenance, signed
from .data import Recorded

PROTOCOL = "graph"
STEPS = (
    ("v2", "v2b", "block_dv 32 in place of 128: v2b over v2"),
    ("v2b", "v3", "Q and K double-buffered: v3 over v2b"),
)


def draw(recorded: Recorded) -> Figure:
    measured = {v: recorded.right_times(v, PROTOCOL) for v in ("v2", "v2b", "v3")}
    names = [case.name for case in recorded.cases]
    ratios = [
        [measured[after][name].median_ms / measured[before][name].median_ms for name in names]
        for before, after, _ in STEPS
    ]
    rows = [row for times in measured.values() for row in times.values()]
    sheet = Sheet(
        1.0 + 0.3 * len(names),
        title(names, *ratios),
        f"core · {provenance(recorded, PROTOCOL, rows)}; blue: faster",
    )
    panels = sheet.grid(columns=2, left=1.45, right=0.35, top=0.35, wspace=0.12)
    for place, (axes, of_step, (_, _, label)) in enumerate(zip(panels, ratios, STEPS, strict=True)):
        ratio_bars(axes, of_step)
        case_rows(axes, names, labels=place == 0)
        axes.set_title(label)
        axes.set_xlabel("time over the time before")
    return sheet.figure


def ratio_bars(axes: Axes, ratios: list[float]) -> None:
    """Bars from 0 with the line at 1, each with its number behind it."""
    axes.set_xlim(0, 1.18 * max(*ratios, 1.0))
    axes.axvline(1, color=INK, linewidth=1)
    for row, ratio in enumerate(ratios):
        axes.barh(row, ratio, height=0.66, color=ACCENT if ratio < 1 else GREY)
        axes.annotate(
            factor(ratio),
            (max(ratio, 1.0), row),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            size=SMALL_POINTS,
        )


def title(names: list[str], tile: list[float], buffering: list[float]) -> str:
    best = min(zip(tile, names, strict=True))
    worst = max(zip(tile, names, strict=True))
    helped = sum(ratio < 1 for ratio in tile)
    change = [100 * (ratio - 1) for ratio in buffering]
    return (
        f"block_dv 32 is faster in {helped} of {len(names)} cases ({factor(best[0])} the time on"
        f" {best[1]}, {factor(worst[0])} on {worst[1]}); double buffering changes the time by"
        f" {signed(min(change), '.0f')} to {signed(max(change), '.0f')}\N{NO-BREAK SPACE}%"
    )
