"""The timeline as a picture: roles as rows, bars by kind, the critical path outlined."""

from __future__ import annotations

from pathlib import Path

from .timeline import KINDS, Timeline

COLOURS = {
    "load": "#56B4E9",
    "gemm": "#D55E00",
    "work": "#009E73",
    "copy": "#F0E442",
    "store": "#CC79A7",
    "wait": "#DDDDDD",
}
NAMES = {
    "load": "load",
    "gemm": "matrix product",
    "work": "element-wise",
    "copy": "copy",
    "store": "store",
    "wait": "wait",
}
ROW_INCHES, WIDTH_INCHES, DPI = 0.55, 14, 150


def plot_timeline(timeline: Timeline, path: str | Path, title: str, until: float | None = None):
    """Write a PNG (or whatever the suffix says).  until: units shown, from the start."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    end = min(until or timeline.end, timeline.end) or 1.0
    rows = {role: number for number, role in enumerate(timeline.roles)}
    figure = Figure(figsize=(WIDTH_INCHES, 1.9 + ROW_INCHES * len(rows)), dpi=DPI)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for event in timeline.events:
        if event.start > end or event.length <= 0:
            continue
        below = event.kind in ("gemm", "load")
        axes.broken_barh(
            [(event.start, min(event.end, end) - event.start)],
            (rows[event.role] + (0.02 if below else -0.38), 0.36),
            facecolor=COLOURS[event.kind],
            edgecolor="black" if event.critical else "none",
            linewidth=1.1 if event.critical else 0,
            zorder=3 if event.critical else 2,
        )
    axes.set_yticks(list(rows.values()), list(rows))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, end)
    axes.set_xlabel("abstract cost units")
    axes.grid(axis="x", color="#EEEEEE", zorder=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    shares = [f"{NAMES[k]} {x:.0%}" for k, x in timeline.critical_shares().items() if x >= 0.005]
    axes.set_title(f"{title}\nCTA {timeline.block}; critical path: {', '.join(shares)}", loc="left")
    legend = [Patch(facecolor=COLOURS[kind], label=NAMES[kind]) for kind in KINDS]
    legend.append(Patch(facecolor="white", edgecolor="black", label="critical path"))
    figure.tight_layout(rect=(0, 0.42 / figure.get_figheight(), 1, 1))
    figure.legend(handles=legend, ncols=len(legend), loc="lower left", frameon=False)
    figure.savefig(path)
