"""The figures, from made-up results: what is missing fails, titles follow, nothing overlaps."""

import re
import shutil
import statistics
from dataclasses import replace
from importlib import import_module

import pytest
from matplotlib.text import Text

from cases import load_cases
from gdn_ladder.versions import VERSIONS
from harness.floors import core_flops
from harness.implementations import CORE, FULL, LADDER, OURS
from harness.metrics import CASES as PROFILED_CASES
from harness.metrics import COUNTERS, SHIPPED, STALLS, Metric, write_metrics
from harness.metrics import VERSIONS as PROFILED
from harness.results import RESULTS, Row, write_results
from plots import cli
from plots.common import Sheet, overlaps, styled, title_of
from plots.data import DEVICE, MissingDataError, Recorded

STAMP = {"device": "nvidia-h200", "date": "2026-01-01T00:00:00+00:00", "revision": "0123456789ab"}
METADATA = {**STAMP, "clocks_before": {"name": "NVIDIA H200"}}
# Times over v7's, before each case adds its own share.
SPEED = {
    "v1": 7.5,
    "v2": 5.2,
    "v2b": 4.6,
    "v3": 4.75,
    "v5": 4.4,
    "v6": 1.06,
    "v7": 1.0,
    "v9.5": 1.5,
    "v10": 1.3,
    "v11": 1.25,
    "v14": 0.97,
    "v15": 1.01,
    "v20": 2.7,
    "v21": 2.6,
    "scan": 0.85,
    "four_group": 0.95,
    "resident": 0.85,
    SHIPPED: 0.6,
}
# The shipped kernel, by which its counters are told from those of an earlier release.
KERNEL = "gdn_forward_resident_kernel"
PEERS = {
    CORE: {"flash_qla": 1.3, "flash_qla_nocp": 1.6},
    FULL: {"flash_qla": 1.5, "flash_qla_nocp": 1.9, "fla": 3.2, "flashinfer": 1.7},
}


def row(implementation, version, scope, protocol, case, ms, status="PASS"):
    times = (ms, ms * 0.98, ms * 1.03) if status == "PASS" else (None, None, None)
    return Row(
        *STAMP.values(),
        implementation,
        version,
        scope,
        protocol,
        case,
        status,
        *times,
        100 if status == "PASS" else 0,
    )


def v7_ms(case):
    """Between 2 and 12 % of the tensor cores' rate."""
    return core_flops(case) / (20e9 + 1.7e9 * case.state_heads)


def wobble(*what):
    """A factor around 1 that depends on the names alone."""
    return 0.85 + 0.3 * (sum(map(ord, "".join(what))) % 97) / 97


def ladder_rows():
    rows = []
    for case in load_cases():
        for protocol, host in (("oj", 0.03), ("graph", 0.0)):
            for version in VERSIONS:
                if version.expected == "fail":
                    rows.append(row(LADDER, version.name, CORE, protocol, case.name, None, "WRONG"))
                    continue
                ms = v7_ms(case) * SPEED.get(version.name, 0.9)
                ms *= 1 if version.name == "v7" else wobble(case.name, version.name)
                rows.append(row(LADDER, version.name, CORE, protocol, case.name, ms + host))
            ms = v7_ms(case) * SPEED[SHIPPED] * wobble(case.name, SHIPPED) + 0.2 * host
            rows.append(row(OURS, "9.9.9", CORE, protocol, case.name, ms))
    return rows


def bench_rows():
    rows = []
    for case in load_cases():
        for protocol, host in (("oj", 0.06), ("graph", 0.0)):
            for scope, peers in PEERS.items():
                ours = v7_ms(case) * (0.6 if scope == CORE else 0.7)
                rows.append(row(OURS, "9.9.9", scope, protocol, case.name, ours + 0.2 * host))
                for peer, slower in peers.items():
                    ms = ours * slower * wobble(case.name, peer, scope) + host
                    rows.append(row(peer, "1.0", scope, protocol, case.name, ms))
    return rows


def counters(version, case):
    few = case == PROFILED_CASES[0]
    place = list(SPEED).index(version)
    values = {
        "duration": 5e5 * SPEED[version],
        "tensor_active": (6 + 2 * place) * (1 if few else 1.4),
        "issue_active": (15 + 2 * place) * (1 if few else 1.2),
        "occupancy": 12.5 if version == "v1" else 25.0,
    }
    for number, reason in enumerate(STALLS):
        values[f"stall_{reason}"] = 1.0 if reason == "selected" else 0.5 / (1 + number)
    values["stall_long_scoreboard"] = (5.4 if few else 3.8) - 0.1 * place
    values["stall_barrier"] = 0.9
    return {name: values.get(name, 1.0) for name in COUNTERS}


def metric_rows():
    return [
        Metric(*STAMP.values(), version, case, 0, KERNEL, name, "", value)
        for version in PROFILED
        for case in PROFILED_CASES
        for name, value in counters(version, case).items()
    ]


def write(root, ladder=None, bench=None, metrics=None):
    write_results("ladder", ladder_rows() if ladder is None else ladder, METADATA, root=root)
    write_results("bench", bench_rows() if bench is None else bench, METADATA, root=root)
    write_metrics(metric_rows() if metrics is None else metrics, METADATA, root=root)
    return root


@pytest.fixture(scope="session")
def made_up(tmp_path_factory):
    return write(tmp_path_factory.mktemp("results"))


def draw(name, root):
    with styled():
        return import_module(f"plots.{name}").draw(Recorded(root))


def title(name, root):
    return title_of(draw(name, root))


def changed(rows, change, **where):
    """The rows, those that `where` describes with their times multiplied by `change`."""

    def fits(row):
        return all(
            getattr(row, name) in (wanted if isinstance(wanted, tuple) else (wanted,))
            for name, wanted in where.items()
        )

    return [
        replace(
            row,
            median_ms=row.median_ms * change,
            p20_ms=row.p20_ms * change,
            p80_ms=row.p80_ms * change,
        )
        if fits(row) and row.median_ms
        else row
        for row in rows
    ]


def recount(change):
    """The counters, each value through change(version, case, metric, value)."""
    return [
        replace(row, value=change(row.version, row.case, row.metric, row.value))
        for row in metric_rows()
    ]


@pytest.mark.parametrize("name", cli.FIGURES)
def test_every_figure_is_drawn_without_texts_over_each_other(name, made_up, tmp_path):
    assert cli.main([name, "--results", str(made_up), "--out", str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.png", f"{name}.svg"}
    figure = draw(name, made_up)
    assert overlaps(figure) == []
    subtitle = " ".join(figure.texts[1].get_text().split())
    for part in ("NVIDIA H200", "n = 1", STAMP["revision"]):
        assert part in subtitle


def test_texts_over_each_other_are_found():
    sheet = Sheet(2.0, "title", "subtitle")
    axes, other = sheet.grid(columns=2, left=1.0)
    other.set_yticks([])
    axes.text(0.5, 0.5, "one")
    axes.text(0.5, 0.52, "two")
    axes.text(0.9, 0.9, "three of them")
    axes.text(-0.9, 0.1, "four")
    assert overlaps(sheet.figure) == [
        "'one' over 'two'",
        "'three of them' runs into another panel",
        "'four' leaves the figure",
    ]


def test_the_same_data_give_the_same_bytes(made_up, tmp_path):
    for folder in ("a", "b"):
        assert (
            cli.main(["rejected", "--results", str(made_up), "--out", str(tmp_path / folder)]) == 0
        )
    for suffix in ("png", "svg"):
        first, second = (tmp_path / folder / f"rejected.{suffix}" for folder in ("a", "b"))
        assert first.read_bytes() == second.read_bytes()


def test_the_finding_is_the_files_title(made_up, tmp_path):
    assert cli.main(["waterfall", "--results", str(made_up), "--out", str(tmp_path)]) == 0
    assert written_title(tmp_path / "waterfall.svg") == title("waterfall", made_up)


def written_title(path):
    return re.search(r"<dc:title>(.*?)</dc:title>", path.read_text(), re.DOTALL)[1].strip()


NEEDS = {
    "ladder": ("core_time", "heat_map", "ablation", "rejected", "waterfall", "roofline"),
    "bench": ("open_source", "speedup"),
    "metrics": ("stall_decomposition", "two_cases", "tensor_activity"),
}


@pytest.mark.parametrize("file", NEEDS)
def test_a_missing_file_fails_its_figures_by_name_and_draws_the_others(
    file, made_up, tmp_path, capsys
):
    root = tmp_path / "results"
    shutil.copytree(made_up, root)
    (root / "nvidia-h200" / f"{file}.csv").unlink()
    out = tmp_path / "figures"
    assert cli.main(["--results", str(root), "--out", str(out)]) == 1
    said = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in said] == [
        name for name in cli.FIGURES if name in NEEDS[file]
    ]
    assert all(f"{file}.csv does not exist; `python -m harness." in line for line in said)
    assert {path.stem for path in out.iterdir()} == set(cli.FIGURES) - set(NEEDS[file])


@pytest.mark.parametrize("name", ["ablation", "core_time", "heat_map"])
def test_a_missing_row_is_named(name, tmp_path):
    protocol = import_module(f"plots.{name}").PROTOCOL
    rows = [
        row
        for row in ladder_rows()
        if (row.version, row.protocol, row.case) != ("v2b", protocol, "chain_equal")
    ]
    with pytest.raises(MissingDataError, match=f"v2b core {protocol}: no row for chain_equal"):
        draw(name, write(tmp_path, ladder=rows))


def test_a_missing_shipped_kernel_peer_or_counter_is_named(tmp_path):
    ladder = [row for row in ladder_rows() if row.implementation != OURS]
    bench = [row for row in bench_rows() if row.implementation != "flashinfer"]
    metrics = [
        row for row in metric_rows() if (row.version, row.metric) != ("v20", "tensor_active")
    ]
    root = write(tmp_path, ladder, bench, metrics)
    for name, message in {
        "waterfall": "shipped core oj: no row for short_tail_state",
        "open_source": "flashinfer full oj: no row for short_tail_state",
        "speedup": "flashinfer full oj: no row for short_tail_state",
        "two_cases": "v20 on long_low_gva has no tensor_active",
    }.items():
        with pytest.raises(MissingDataError, match=message):
            draw(name, root)


def test_a_wrong_result_is_shown_where_it_can_be_and_missing_where_its_time_is_needed(tmp_path):
    rows = [
        replace(row, correctness="WRONG", median_ms=None, p20_ms=None, p80_ms=None, repetitions=0)
        if (row.version, row.case) == ("v15", "long_low_gva")
        else row
        for row in ladder_rows()
    ]
    root = write(tmp_path, ladder=rows)
    for name in ("heat_map", "core_time"):
        assert "wrong" in {text.get_text() for text in draw(name, root).findobj(Text)}
    with pytest.raises(MissingDataError, match=r"v15 core graph has no time for long_low_gva \(WR"):
        draw("rejected", root)


def test_an_unknown_figure_is_refused(capsys):
    with pytest.raises(SystemExit):
        cli.main(["pie"])
    assert "no figure 'pie', there are stall_decomposition" in capsys.readouterr().err


def test_core_time_says_how_much_faster(tmp_path):
    rows = changed(ladder_rows(), 1 / 3, implementation=OURS)
    before = re.search(r"([\d.]+)x", title("core_time", write(tmp_path / "a")))[1]
    after = re.search(r"([\d.]+)x", title("core_time", write(tmp_path / "b", ladder=rows)))[1]
    assert float(after) == pytest.approx(3 * float(before), rel=0.05)


def test_heat_map_names_the_fastest_version(made_up, tmp_path):
    assert title("heat_map", made_up).startswith("Fastest in 8 of 8 cases: the shipped kernel;")
    rows = changed(ladder_rows(), 0.1, version="v15", case=("chain_equal", "parallel_equal"))
    found = title("heat_map", write(tmp_path, ladder=rows))
    assert found.startswith("Fastest in 6 of 8 cases: the shipped kernel;")


def test_ablation_counts_the_cases_that_gain(made_up, tmp_path):
    assert title("ablation", made_up).startswith("block_dv 32 is faster in 8 of 8 cases")
    rows = changed(ladder_rows(), 2.0, version=("v2b", "v3"), case="wide_gva_state")
    rows = changed(rows, 1.25, version="v3", case="chain_equal")
    found = title("ablation", write(tmp_path, ladder=rows))
    assert found.startswith("block_dv 32 is faster in 7 of 8 cases")
    assert "the time on parallel_equal, 1.77x on wide_gva_state)" in found
    assert found.endswith("by +3 to +29 %")


def test_rejected_ideas_that_win_are_named(made_up, tmp_path):
    won = "scan takes 0.83x and v15 0.96x the time, the 5 other rejected ideas 1.22x to 2.63x"
    assert title("rejected", made_up) == f"Against v7, by geometric means: {won}"
    rows = changed(ladder_rows(), 2.0, version=("scan", "v15"))
    found = title("rejected", write(tmp_path, ladder=rows))
    lost = "the 7 rejected ideas take 1.22x to 2.63x the time"
    assert found == f"Against v7, by geometric means: {lost}"


def test_open_source_counts_wins_by_scope(made_up, tmp_path):
    assert "fastest in 8 of 8 cases by the core, 8 of 8 in full" in title("open_source", made_up)
    rows = changed(bench_rows(), 0.1, implementation="fla", case=("chain_equal", "parallel_gva"))
    rows = changed(rows, 0.1, implementation="flash_qla_nocp", scope=CORE, case="chain_equal")
    found = title("open_source", write(tmp_path, bench=rows))
    assert "fastest in 7 of 8 cases by the core, 6 of 8 in full" in found


def fastest_peer_over_ours(scope):
    ratios = []
    for case in load_cases():
        times = {
            row.implementation: row.median_ms
            for row in bench_rows()
            if (row.case, row.scope, row.protocol) == (case.name, scope, "oj")
        }
        ours = times.pop(OURS)
        ratios.append(min(times.values()) / ours)
    return statistics.geometric_mean(ratios)


def test_speedup_is_the_geometric_mean_like_for_like(tmp_path):
    core, full = fastest_peer_over_ours(CORE), fastest_peer_over_ours(FULL)
    found = title("speedup", write(tmp_path / "a"))
    assert f"Core against core {core:.2f}x, full against full {full:.2f}x" in found
    rows = changed(bench_rows(), 0.5, implementation=OURS, scope=FULL)
    found = title("speedup", write(tmp_path / "b", bench=rows))
    assert f"Core against core {core:.2f}x, full against full {2 * full:.2f}x" in found


def test_waterfall_names_the_largest_step_and_the_distance_to_the_floor(made_up, tmp_path):
    assert title("waterfall", made_up).endswith("the largest step is v6 (4.34 ms)")
    rows = changed(ladder_rows(), 10.0, version="v1")
    found = title("waterfall", write(tmp_path, ladder=rows))
    assert "long_low_gva: 96.9 ms in v1" in found and "the largest step is v2 " in found


def test_roofline_gives_the_share_of_the_roof(made_up, tmp_path):
    assert "5.5 % (long_low_gva) to 21.1 % (wide_gva_state)" in title("roofline", made_up)
    rows = changed(ladder_rows(), 0.25, implementation=OURS, case="wide_gva_state")
    found = title("roofline", write(tmp_path, ladder=rows))
    assert found.endswith("84.5 % (wide_gva_state) of the roof")


def test_stalls_name_the_reason_that_dominates(made_up, tmp_path):
    assert "long scoreboard is the largest stall, 64 % of the warp cycles in v1" in title(
        "stall_decomposition", made_up
    )

    def change(version, case, metric, value):
        return 40.0 if (version, metric) == (SHIPPED, "stall_gmma") else value

    found = title("stall_decomposition", write(tmp_path, metrics=recount(change)))
    assert "was long scoreboard (64 %) in v1 and is warp group of a matrix product (8" in found


def test_profiler_figures_follow_the_counters(tmp_path):
    def change(version, case, metric, value):
        return 77.0 if (version, case, metric) == at else value

    at = (SHIPPED, "wide_gva_state", "tensor_active")
    found = title("two_cases", write(tmp_path / "a", metrics=recount(change)))
    assert "tensor pipe 40 % against 77 % active" in found
    at = ("v1", "long_low_gva", "issue_active")
    found = title("tensor_activity", write(tmp_path / "b", metrics=recount(change)))
    assert "active 6 % in v1, 40 % in the shipped kernel" in found
    assert "its issue slots are used 77 % and 49 %" in found
    at = ("v7", "long_low_gva", "tensor_active")
    found = title("tensor_activity", write(tmp_path / "c", metrics=recount(change)))
    assert "active 6 % in v1, 77 % in v7, 40 % in the shipped kernel" in found


def test_the_longest_kernel_of_a_call_stands_for_it(tmp_path):
    rows = metric_rows()
    short = [
        replace(row, launch=1, kernel="gdn_scan_kernel", value=1.0)
        for row in rows
        if row.version == SHIPPED
    ]
    root = write(tmp_path, metrics=short + rows)
    assert Recorded(root).kernel(SHIPPED, "long_low_gva", []).name == KERNEL
    figure = draw("two_cases", root)
    assert "the longest kernel of a call" in " ".join(figure.texts[1].get_text().split())


recorded = pytest.mark.skipif(
    not all((RESULTS / DEVICE / f"{name}.csv").is_file() for name in NEEDS),
    reason=f"results/{DEVICE} holds no ladder, bench and metrics yet",
)


@recorded
@pytest.mark.parametrize("name", cli.FIGURES)
def test_the_committed_figures_show_the_committed_results(name):
    try:
        figure = draw(name, RESULTS)
    except MissingDataError as error:
        pytest.skip(f"to be recorded: {error}")
    assert overlaps(figure) == []
    assert written_title(cli.FOLDER / f"{name}.svg") == title_of(figure), "run `make plots`"
