"""The ladder's table, its rules and the entry that runs a row by name."""

import subprocess
import sys

import pytest
import torch

from cases import load_cases
from gdn_ladder import (
    VERSIONS,
    LadderShape,
    NotBuiltError,
    Version,
    available_versions,
    forward,
    get_version,
    kernels_of,
)
from gdn_ladder import launch as launch_module
from gdn_ladder.cached import CachedForward
from gdn_ladder.early import EarlyConfig
from gdn_ladder.families import CORE, FOUR_GROUP, Kernel, resolve
from gdn_ladder.four_group_variants import FourGroupConfig
from gdn_ladder.int8 import Int8Config
from gdn_ladder.prepared_fused import FusedConfig
from gdn_ladder.prepared_groups import GroupsConfig
from gdn_ladder.segments import Split, split_time
from gdn_prefill.split import CorePlan

SOURCE_ORDER = ["v1", "v2", "v2b", "v3", "v4", "v5", "v6", "v7", "v9", "v9.5", "v10", "v11"]
SOURCE_ORDER += ["v14", "v15", "v20", "v21", "scan", "w8a8"]
OURS = ["four_group", "resident", "prepared_groups", "prepared_fused", "prepared_wide"]
KERNELS = [version for version in VERSIONS if isinstance(version.family, Kernel)]
PUBLIC = {case.name: case for case in load_cases()}


def shape_of(case, multiprocessors=132):
    return LadderShape(case.B, case.T, case.Hq, case.Hv, case.initial_state, multiprocessors)


def test_the_table_holds_the_sources_versions_in_order_and_then_ours():
    assert [version.name for version in VERSIONS] == SOURCE_ORDER + OURS
    assert [version.name for version in VERSIONS if version.origin == "here"] == OURS


def test_expected_failures_are_the_sources():
    failing = {version.name for version in VERSIONS if version.expected == "fail"}
    assert failing == {"v4", "v9", "w8a8"}


@pytest.mark.parametrize("version", VERSIONS, ids=lambda version: version.name)
def test_a_row_is_complete(version):
    assert version.idea and version.lesson
    assert set(version.source_ms) <= set(PUBLIC)
    assert all(0 < ms < 100 for ms in version.source_ms.values())
    assert version.settings_text().count("=") == len(version.settings)


@pytest.mark.parametrize("case", PUBLIC.values(), ids=PUBLIC)
@pytest.mark.parametrize("version", KERNELS, ids=lambda version: version.name)
def test_every_kernel_has_a_config_for_every_public_case(version, case):
    config = version.family.configure(version.settings, shape_of(case))
    assert (config.heads_q, config.heads_v) == (case.Hq, case.Hv)
    assert config.use_initial_state == case.initial_state


def test_v5_takes_32_columns_only_where_whole_heads_fill_less_than_half_the_gpu():
    rule = get_version("v5").settings
    small, large = LadderShape(1, 64, 4, 65), LadderShape(1, 64, 4, 66)
    assert resolve(rule, small)["block_dv"] == 32
    assert resolve(rule, large)["block_dv"] == 128
    assert resolve(rule, shape_of(PUBLIC["wide_gva_state"], 14))["block_dv"] == 128


def test_v7_takes_64_columns_only_without_gva():
    rule = get_version("v7").settings
    assert resolve(rule, shape_of(PUBLIC["chain_equal"]))["block_dv"] == 64
    assert resolve(rule, shape_of(PUBLIC["long_low_gva"]))["block_dv"] == 128


@pytest.mark.parametrize(
    ("states", "sms", "tile"),
    [
        (8, 132, 32),  # few states: the narrowest tile, four CTAs each, all in one wave
        (33, 132, 32),  # 132 CTAs fill the device exactly
        (34, 132, 64),  # 136 CTAs of the narrow tile would need a second wave
        (64, 132, 64),
        (67, 132, 128),  # 67 wide CTAs in one wave, 134 of the middle tile in two
        (1, 1, 128),  # 2.65 us a chunk instead of two waves of 1.76 or four of 1.31
    ],
)
def test_four_group_takes_the_tile_that_is_through_first(states, sms, tile):
    rule = get_version("four_group").settings
    assert resolve(rule, LadderShape(1, 64, 1, states, False, sms))["block_dv"] == tile


def test_resident_is_the_shipped_core_and_never_split():
    for case in PUBLIC.values():
        ((kernel, config),) = kernels_of("resident", shape_of(case))
        assert kernel.name.startswith("resident") and config.use_initial_state == case.initial_state
    shape = shape_of(PUBLIC["long_low_gva"])
    assert CORE.plan({}, shape).segments > 1 == CORE.plan({"split": False}, shape).segments


def test_the_cached_kernel_is_the_four_group_one_and_unsplit(monkeypatch):
    seen = []
    monkeypatch.setattr(
        CachedForward, "kernel", lambda _, factory, config, configs: seen.append((factory, config))
    )
    core = CachedForward().core(CorePlan(64), 2, 8, True)
    ((factory, config),) = seen
    assert (list(core.launchers), core.plan.cut) == (["forward"], None)
    assert config == FOUR_GROUP.configure({"block_dv": 64}, LadderShape(1, 1, 2, 8, True))
    assert factory(config).attrs["global_symbol"] == "gdn_forward"


def test_the_scan_splits_while_multiprocessors_are_idle():
    assert split_time(shape_of(PUBLIC["chain_equal"])) == Split(16, 8)
    assert split_time(shape_of(PUBLIC["long_low_gva"])) == Split(9, 57)
    assert split_time(shape_of(PUBLIC["long_low_gva"], 14)).segments == 1  # the source's slice
    assert split_time(LadderShape(1, 63, 1, 1)) == Split(1, 1)


@pytest.mark.parametrize("tokens", [1, 64, 65, 640, 1025, 32768])
@pytest.mark.parametrize("heads", [1, 4, 32, 200])
def test_segments_cover_every_chunk_and_none_is_empty(tokens, heads):
    split = split_time(LadderShape(1, tokens, heads, heads))
    chunks = -(-tokens // 64)
    assert (split.segments - 1) * split.chunks < chunks <= split.segments * split.chunks


def test_kernels_of_names_what_is_launched():
    shape = shape_of(PUBLIC["long_low_gva"])
    assert [kernel.name for kernel, _ in kernels_of("v1", shape)] == ["early"]
    assert [kernel.name for kernel, _ in kernels_of("scan", shape)] == [
        "variant",
        "scan",
        "variant",
    ]
    assert kernels_of("v14", shape) == []


def test_a_reason_goes_with_an_expected_failure_only():
    with pytest.raises(ValueError, match="reason"):
        Version("x", "an idea", "a lesson", expected="fail")
    with pytest.raises(ValueError, match="reason"):
        Version("x", "an idea", "a lesson", reason="because")


@pytest.mark.parametrize(
    "config", [EarlyConfig, FourGroupConfig, Int8Config, GroupsConfig, FusedConfig]
)
@pytest.mark.parametrize("heads", [(0, 4), (3, 4), (4, 2), (2, 0)])
def test_configs_refuse_heads_that_do_not_divide(config, heads):
    with pytest.raises(ValueError, match="heads_v"):
        config(*heads)


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        (EarlyConfig, "block_dv", 48),
        (EarlyConfig, "loads", "cp_async"),
        (EarlyConfig, "qk_stages", 2),
        (FourGroupConfig, "block_dv", 256),
        (FourGroupConfig, "stages", 0),
        (FourGroupConfig, "k_stages", 1),
        (FourGroupConfig, "output", "tma"),
        (FourGroupConfig, "gates", "rowwise"),
        (Int8Config, "block_dv", 128),
    ],
)
def test_configs_name_the_field_they_refuse(config, field, value):
    with pytest.raises(ValueError, match=rf"{field} = .*{value}"):
        config(4, 4, **{field: value})


def test_many_gates_need_whole_boxes():
    with pytest.raises(ValueError, match="heads_v = 6"):
        FourGroupConfig(2, 6, gates="box")
    assert FourGroupConfig(16, 64, gates="box").gate_heads == 32
    assert FourGroupConfig(2, 8, gates="rows").gate_heads == 8


def small_inputs(tokens=64):
    def bf16(*shape):
        return torch.zeros(shape, dtype=torch.bfloat16)

    return {
        "q": bf16(1, tokens, 1, 128),
        "k": bf16(1, tokens, 1, 128),
        "v": bf16(1, tokens, 1, 128),
        "g_cumsum": torch.zeros(1, tokens, 1),
        "beta": torch.zeros(1, tokens, 1),
        "A": bf16(1, tokens, 1, 64),
    }


def never(kernel, config):
    """An execute for calls that must fail before any kernel runs."""

    def launch(*arguments):
        raise AssertionError("launched")

    return launch


def test_an_unknown_version_is_refused_by_name():
    with pytest.raises(ValueError, match="'v8' does not exist, allowed are v1, v2"):
        forward("v8", **small_inputs(), execute=never)


def test_a_version_without_a_kernel_says_so(monkeypatch):
    row = Version("v99", "an idea", "a lesson")
    monkeypatch.setattr(launch_module, "BY_NAME", {"v99": row})
    with pytest.raises(NotBuiltError, match="'v99' is not built yet, available are v1"):
        forward("v99", **small_inputs(), execute=never)


def test_available_versions_have_a_family():
    assert set(available_versions()) == {row.name for row in VERSIONS if row.family is not None}
    assert {"v1", "v2", "v2b", "v3", "v5"} <= set(available_versions())


@pytest.mark.parametrize("version", ["v1", "v9.5", "v6", "w8a8"])
def test_wrong_tensors_are_refused_before_any_launch(version):
    inputs = small_inputs()
    with pytest.raises(TypeError, match="beta"):
        forward(version, **{**inputs, "beta": inputs["beta"].double()}, execute=never)
    with pytest.raises(ValueError, match="A"):
        forward(version, **{**inputs, "A": inputs["A"][:, :32]}, execute=never)
    with pytest.raises((TypeError, ValueError), match="q"):
        forward(version, **{**inputs, "q": None}, execute=never)


def test_tensors_on_the_cpu_need_an_execute():
    with pytest.raises(ValueError, match="q is on cpu"):
        forward("v1", **small_inputs())


def test_the_table_is_read_without_tilelang():
    code = (
        "import sys; sys.path.insert(0, 'kernel'); import gdn_ladder;"
        "gdn_ladder.available_versions(); print('tilelang' in sys.modules)"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert printed.stdout.strip() == "False", printed.stderr
