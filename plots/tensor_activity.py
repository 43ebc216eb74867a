"""Figure 8: tensor-core activity and issue efficiency over the versions."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .common import ACCENT, DARK, GREY, SMALL_POINTS, Sheet, percent, profiled, version_name
from .data import Kernel, Recorded

CASES = {"long_low_gva": ACCENT, "wide_gva_state": GREY}
COUNTERS = {
    "tensor_active": "tensor pipe active, % of a busy SM's cycles",
    "issue_active": "issue slots used, % of a busy SM's cycles",
}
BAR = 0.38


def draw(recorded: Recorded) -> Figure:
    versions = recorded.profiled_versions
    kernels = {
        (version, case): recorded.kernel(version, case, [*COUNTERS, "blocks"])
        for version in versions
        for case in CASES
    }
    sheet = Sheet(
        6.2,
        title(kernels, versions),
        profiled(recorded, any(kernel.of > 1 for kernel in kernels.values())),
    )
    panels = sheet.grid(rows=2, left=0.5, right=0.15, top=0.6, bottom=0.75, hspace=0.55)
    for axes, (counter, label) in zip(panels, COUNTERS.items(), strict=True):
        _panel(axes, versions, kernels, counter)
        axes.set_title(label)
        axes.set_xlabel(f"below: CTAs on {' and '.join(CASES)}")
    panels[0].legend(loc="lower left", bbox_to_anchor=(-0.02, 1.1), ncols=2, handlelength=1.0)
    return sheet.figure


def _panel(axes: Axes, versions, kernels: dict[tuple[str, str], Kernel], counter: str) -> None:
    highest = max(kernel.counters[counter] for kernel in kernels.values())
    axes.set_ylim(0, 1.12 * highest)
    axes.grid(axis="y")
    for side, (case, colour) in zip((-0.5, 0.5), CASES.items(), strict=True):
        for place, version in enumerate(versions):
            value = kernels[version, case].counters[counter]
            label = case if place == 0 else None
            axes.bar(place + side * BAR, value, width=BAR, color=colour, label=label)
            axes.annotate(
                f"{value:.0f}" if value >= 10 else f"{value:.1f}",
                (place + side * BAR, value),
                xytext=(0, 2),
                textcoords="offset points",
                ha="center",
                size=SMALL_POINTS,
                color=colour if colour == ACCENT else DARK,
            )
    blocks = [[kernels[version, case].counters["blocks"] for case in CASES] for version in versions]
    labels = [
        "\n".join([version, *map("{:.0f}".format, of_version)])
        for version, of_version in zip(versions, blocks, strict=True)
    ]
    axes.set_xticks(range(len(versions)), labels)
    axes.tick_params(axis="x", length=0)


def title(kernels: dict[tuple[str, str], Kernel], versions: tuple[str, ...]) -> str:
    case = next(iter(CASES))
    active, issuing = (
        {version: kernels[version, case].counters[counter] for version in versions}
        for counter in COUNTERS
    )
    first, last, best = versions[0], versions[-1], max(versions, key=active.get)
    peak = f"{percent(active[best])} in {best}, " if best not in (first, last) else ""
    return (
        f"{case}: a busy SM's tensor pipe is active {percent(active[first])} in {first}, {peak}"
        f"{percent(active[last])} in {version_name(last)}; its issue slots are used"
        f" {percent(issuing[first])} and {percent(issuing[last])}"
    )
