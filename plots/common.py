"""The look of all figures: one accent colour on greys, the finding above, its provenance below."""

import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from matplotlib.transforms import Bbox

from harness.results import Row

from .data import SHIPPED, Recorded

# Blue and vermilion of the Okabe-Ito palette, which colour-blind readers tell apart.
ACCENT, SLOWER = "#0072B2", "#D55E00"
INK, DARK, GREY, LIGHT, FAINT = "#1A1A1A", "#5A5A5A", "#8F8F8F", "#C6C6C6", "#EAEAEA"
# Fast is the accent, slow the other end; white in the middle.
DIVERGING = LinearSegmentedColormap.from_list("faster_slower", [ACCENT, "#F7F7F7", SLOWER])

WIDTH_INCHES, DPI = 9.0, 200  # 900 pixels wide in the README at 100 to the inch
TITLE_POINTS, TEXT_POINTS, SMALL_POINTS = 13.0, 10.0, 9.0
_TITLE_COLUMNS, _SUBTITLE_COLUMNS = 80, 130
_SPACE = "\N{NO-BREAK SPACE}"
_LINE = 1.35  # line height over font size
PROTOCOLS = {
    "oj": "lab's protocol (host time inside)",
    "graph": "CUDA Graph replay (kernels only)",
}
STYLE = {
    "font.size": TEXT_POINTS,
    "font.family": "DejaVu Sans",
    "axes.edgecolor": GREY,
    "axes.labelcolor": DARK,
    "axes.labelsize": SMALL_POINTS,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": TEXT_POINTS,
    "axes.titlelocation": "left",
    "axes.axisbelow": True,
    "xtick.color": DARK,
    "ytick.color": DARK,
    "xtick.labelsize": SMALL_POINTS,
    "ytick.labelsize": SMALL_POINTS,
    "grid.color": FAINT,
    "legend.frameon": False,
    "legend.fontsize": SMALL_POINTS,
    "text.color": INK,
    "svg.hashsalt": "gdn-prefill",
}


class Sheet:
    """A figure with its two headers; grid() gives the axes below them."""

    def __init__(self, height: float, title: str, subtitle: str) -> None:
        """height: inches of what is below the headers, tick labels included."""
        titles = textwrap.wrap(title, _TITLE_COLUMNS, break_on_hyphens=False)
        subtitles = textwrap.wrap(subtitle, _SUBTITLE_COLUMNS)
        title_height = _LINE * TITLE_POINTS * len(titles) / 72
        header = 0.12 + title_height + _LINE * SMALL_POINTS * len(subtitles) / 72 + 0.12
        self.height = height + header
        self.figure = Figure(figsize=(WIDTH_INCHES, self.height), facecolor="white")
        FigureCanvasAgg(self.figure)
        self._top = 1 - header / self.height
        left = 0.12 / WIDTH_INCHES
        texts = (
            (0.12, titles, TITLE_POINTS, "bold", INK),
            (0.12 + title_height, subtitles, SMALL_POINTS, "normal", DARK),
        )
        for down, lines, size, weight, colour in texts:
            self.figure.text(
                left,
                1 - down / self.height,
                "\n".join(lines),
                size=size,
                weight=weight,
                color=colour,
                va="top",
                linespacing=1.2,
            )

    def grid(
        self,
        rows: int = 1,
        columns: int = 1,
        *,
        left: float,
        right: float = 0.2,
        top: float = 0.1,
        bottom: float = 0.55,
        wspace: float = 0.1,
        hspace: float = 0.2,
        width_ratios: Sequence[float] | None = None,
    ) -> list[Axes]:
        """rows x columns axes, row by row; left, right, top, bottom are margins in inches."""
        spec = self.figure.add_gridspec(
            rows,
            columns,
            left=left / WIDTH_INCHES,
            right=1 - right / WIDTH_INCHES,
            top=self._top - top / self.height,
            bottom=bottom / self.height,
            wspace=wspace,
            hspace=hspace,
            width_ratios=width_ratios,
        )
        return [self.figure.add_subplot(cell) for cell in spec]


def styled():
    """The context in which figures are made and saved."""
    return rc_context(STYLE)


def save(figure: Figure, name: str, folder: Path) -> list[Path]:
    """Writes <name>.png and <name>.svg, the same bytes for the same data."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.png", folder / f"{name}.svg"]
    title = title_of(figure)
    figure.savefig(paths[0], dpi=DPI, metadata={"Software": None, "Title": title})
    figure.savefig(paths[1], metadata={"Date": None, "Creator": None, "Title": title})
    return paths


def title_of(figure: Figure) -> str:
    """The finding, on one line; it is the files' title as well."""
    return " ".join(figure.texts[0].get_text().split())


def provenance(recorded: Recorded, protocol: str, rows: Iterable[Row]) -> str:
    """The subtitle of measured times: GPU, protocol, n, revision."""
    timed = [row for row in rows if row.median_ms]
    counts = sorted({row.repetitions for row in timed})
    n = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return (
        f"{recorded.device_name} · {PROTOCOLS[protocol]}, median of n = {n}"
        f" · revision {revisions(row.revision for row in timed)}"
    )


def profiled(recorded: Recorded, many: bool) -> str:
    """The subtitle of counters."""
    longest = ", the longest kernel of a call" if many else ""
    found = revisions(metric.revision for metric in recorded.metrics)
    return (
        f"{recorded.device_name} · Nsight Compute, clocks untouched, caches flushed,"
        f" n = 1 launch a version and case{longest} · revision {found}"
    )


def revisions(found: Iterable[str]) -> str:
    """Every revision that took part; the results' own files tell which row is whose."""
    return ", ".join(sorted(set(found)))


def version_name(version: str) -> str:
    """A version in a sentence."""
    return "the shipped kernel" if version == SHIPPED else version


def milliseconds(value: float) -> str:
    """Three digits: "8.50 ms", "67.1 µs"."""
    number, unit = (value * 1e3, "µs") if value < 0.1 else (value, "ms")
    return f"{f'{number:#.3g}'.rstrip('.')}{_SPACE}{unit}"


def percent(value: float, digits: int = 0) -> str:
    """ "64 %", "5.5 %"."""
    return f"{value:.{digits}f}{_SPACE}%"


def signed(value: float, form: str) -> str:
    """With its sign, in the format `form`; the minus as long as the plus."""
    return f"{value:+{form}}".replace("-", "\N{MINUS SIGN}")


def factor(ratio: float) -> str:
    """A factor: "12x", "1.43x"."""
    return f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.0f}x"


def span(ratios: Iterable[float]) -> str:
    """The least and the greatest factor, one where they read the same."""
    ratios = list(ratios)
    ends = dict.fromkeys((factor(min(ratios)), factor(max(ratios))))
    return " to ".join(ends)


def case_rows(axes: Axes, names: Sequence[str], labels: bool = True) -> None:
    """Names down the left side, first on top."""
    axes.set_yticks(range(len(names)), names if labels else [""] * len(names))
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)


def plain_log(axis) -> None:
    """Ticks of a log axis at 1, 2 and 5 of every decade, as plain numbers."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def overlaps(figure: Figure) -> list[str]:
    """Texts that lie over each other, in another panel or beyond the figure's edge, in words."""
    renderer = figure.canvas.get_renderer()
    figure.draw(renderer)
    undrawn = {label for axes in figure.axes for label in _labels_out_of_view(axes)}
    shown = [
        (text, text.get_window_extent(renderer))
        for text in figure.findobj(Text)
        if text.get_visible() and text.get_text().strip() and text not in undrawn
    ]
    found = []
    for place, (text, box) in enumerate(shown):
        name = repr(text.get_text())
        if not _within(box, figure.bbox):
            found.append(f"{name} leaves the figure")
        panels = [axes for axes in figure.axes if text.axes not in (None, axes)]
        if any(_meet(box, axes.bbox) for axes in panels):
            found.append(f"{name} runs into another panel")
        found += [
            f"{name} over {other.get_text()!r}"
            for other, its_box in shown[place + 1 :]
            if _meet(box, its_box)
        ]
    return found


def _within(box: Bbox, outer: Bbox) -> bool:
    return (
        box.x0 > outer.x0 - 1
        and box.y0 > outer.y0 - 1
        and box.x1 < outer.x1 + 1
        and box.y1 < outer.y1 + 1
    )


def _meet(box: Bbox, other: Bbox) -> bool:
    """Whether they share more than a pixel either way."""
    across = min(box.x1, other.x1) - max(box.x0, other.x0)
    down = min(box.y1, other.y1) - max(box.y0, other.y0)
    return across > 1 and down > 1


def _labels_out_of_view(axes: Axes) -> Iterable[Text]:
    """Labels of ticks beyond the ends of their axis, which are never drawn."""
    for axis in (axes.xaxis, axes.yaxis):
        low, high = sorted(axis.get_view_interval())
        for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
            if not low <= tick.get_loc() <= high:
                yield from (tick.label1, tick.label2)
