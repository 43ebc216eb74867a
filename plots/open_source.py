"""Figure 6: this package and the open-source implementations, core and full forward."""

from matplotlib.figure import Figure

from harness.implementations import CORE, FULL
from harness.results import Row

from .common import (
    ACCENT,
    DARK,
    GREY,
    INK,
    LIGHT,
    Sheet,
    case_rows,
    plain_log,
    provenance,
)
from .data import Recorded, Times, by_package, package

PROTOCOL = "oj"
OURS = "gdn-prefill"
SCOPES = {CORE: "core: gate sums and A given", FULL: "full: from the raw gate"}
# By order of appearance; shape and shade both tell them apart.
MARKS = (("s", INK), ("^", GREY), ("D", LIGHT), ("v", DARK))


def draw(recorded: Recorded) -> Figure:
    names = [case.name for case in recorded.cases]
    ours = {scope: recorded.ours(scope, PROTOCOL) for scope in SCOPES}
    peers = {scope: recorded.peers(scope, PROTOCOL) for scope in SCOPES}
    rows = [
        row
        for scope in SCOPES
        for times in (ours[scope], *peers[scope].values())
        for row in times.values()
    ]
    sheet = Sheet(
        1.28 + 0.34 * len(names),
        title(ours, peers),
        f"{provenance(recorded, PROTOCOL, rows)}; each package by its fastest variant",
    )
    panels = sheet.grid(columns=2, left=1.45, right=0.2, top=0.62, wspace=0.08)
    names_of_packages = dict.fromkeys(package(peer) for of in peers.values() for peer in of)
    marks = dict(zip(names_of_packages, MARKS, strict=False))
    releases = {name: _release(name, rows) for name in marks}
    medians = [row.median_ms for row in rows if row.median_ms]
    for place, (axes, (scope, label)) in enumerate(zip(panels, SCOPES.items(), strict=True)):
        axes.set_xscale("log")
        axes.set_xlim(min(medians) / 1.4, max(medians) * 1.4)
        plain_log(axes.xaxis)
        axes.grid()
        _points(axes, [row.median_ms for row in ours[scope].values()], OURS, "o", ACCENT)
        best = [by_package(peers[scope], name) for name in names]
        for name, mark in marks.items():
            _points(axes, [of_case.get(name) for of_case in best], releases[name], *mark)
        case_rows(axes, names, labels=place == 0)
        axes.set_title(label)
        axes.set_xlabel("ms, log scale")
    handles, labels = panels[1].get_legend_handles_labels()
    panels[0].legend(
        handles,
        labels,
        loc="lower left",
        bbox_to_anchor=(-0.01, 1.09),
        ncols=4,
        handletextpad=0.2,
    )
    return sheet.figure


def _release(name: str, rows: list[Row]) -> str:
    """The package with the versions of it that were measured."""
    versions = {row.version for row in rows if package(row.implementation) == name} - {"unknown"}
    return " ".join([name, ", ".join(sorted(versions))]).rstrip()


def _points(axes, medians: list[float | None], label: str, mark: str, colour: str) -> None:
    """Milliseconds, one a case; None where there is no time."""
    timed = [(median, row) for row, median in enumerate(medians) if median]
    if timed:
        ours = colour == ACCENT
        axes.plot(
            *zip(*timed, strict=True),
            mark,
            color=colour,
            markeredgecolor="white" if ours else DARK,
            markeredgewidth=0.8,
            markersize=10 if ours else 5.5,
            label=label,
            zorder=2 if ours else 3,
        )


def title(ours: dict[str, Times], peers: dict[str, dict[str, Times]]) -> str:
    """In how many cases this package is the fastest, scope by scope."""
    wins = {
        scope: sum(
            all(
                not times[case].median_ms or times[case].median_ms > row.median_ms
                for times in peers[scope].values()
            )
            for case, row in ours[scope].items()
        )
        for scope in SCOPES
    }
    total = len(ours[CORE])
    return (
        f"{OURS} is the fastest in {wins[CORE]} of {total} cases by the core,"
        f" {wins[FULL]} of {total} in full"
    )
