"""What the shipped kernels cost on sm_90a, by name, and a representative few through nvcc.

All of them: python -m gdn_prefill.specialisations --compile
"""

import re
from dataclasses import replace

import pytest

pytest.importorskip("tilelang")

from cases import load_cases  # noqa: E402
from gdn_prefill import specialisations, toolchain, variants  # noqa: E402
from gdn_prefill.kernels import preprocess_fused  # noqa: E402
from gdn_prefill.kernels.preprocess import PreprocessConfig  # noqa: E402
from gdn_prefill.split import CorePlan, SegmentPlan  # noqa: E402

needs_nvcc = pytest.mark.skipif(
    toolchain.unavailable() is not None, reason=f"nvcc: {toolchain.unavailable()}"
)

PACKED = variants.Usage(l2norm=True, cu_seqlens="int32", initial_state="float32")
# Every tile of the forward kernel, with and without an initial state, the launches of a split, and
# each preprocessing kernel with its largest and an odd number of heads.
REPRESENTATIVE = {
    "split": lambda: specialisations.plan_specialisations(
        CorePlan(64, SegmentPlan(4, 1), 1), 4, 4, False
    ),
    "forward_dv64": lambda: specialisations.forward_specialisation(16, 64, 64, True),
    "forward_dv128": lambda: specialisations.forward_specialisation(8, 32, 128, True),
    "operator_dv128": lambda: tuple(
        item
        for item in variants.operator_variants([(16, 64)], options=[PACKED])
        if "dv64" not in item.name
    ),
    "preprocess_wide": lambda: specialisations.preprocess_specialisations(16, 64),
    "preprocess_odd": lambda: specialisations.preprocess_specialisations(2, 6),
}


def costs(item) -> list[toolchain.Resources]:
    items = item if isinstance(item, tuple) else (item,)
    return [toolchain.resources(each.build(), each.pass_configs) for each in items]


@needs_nvcc
@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_no_spills_no_warnings_within_budget(name):
    for cost in costs(REPRESENTATIVE[name]()):
        assert cost.problems() == (), cost.line()
        assert cost.shared_bytes <= toolchain.SHARED_MEMORY_LIMIT
        assert cost.registers * cost.threads <= toolchain.REGISTER_FILE
        if cost.sass is not None:
            assert cost.sass["LDL"] == cost.sass["STL"] == 0, cost.line()


@needs_nvcc
def test_matrix_products_run_on_the_tensor_cores():
    (forward,) = costs(REPRESENTATIVE["forward_dv128"]())
    if forward.sass is None:
        pytest.skip("no nvdisasm here")
    # in steps of 16: K S, K^T (.), Q K^T and Q S take 8, A W' and P V_new 4
    assert forward.sass["HGMMA"] >= 4 * 8 + 2 * 4


def test_offsets_are_64_bit():
    """Token offsets are not formed in 32 bits: B T Hv 64 passes 2^31 well within memory."""
    items = (
        *specialisations.preprocess_specialisations(16, 64),
        specialisations.fused_specialisation(16, 64),
    )
    for item in items:
        source = toolchain.generate(item.build(), item.pass_configs).device_source
        accesses = re.findall(r"\b(?:g|beta|g_cumsum|A)(?:\[| \+ )[^;]*;", source)
        assert accesses
        assert all(") * ((int64_t)tokens)" in access for access in accesses)


@needs_nvcc
@pytest.mark.parametrize("heads", [(16, 64), (4, 4), (2, 6), (3, 3)])
def test_fused_preprocessing_leaves_room_for_its_blocks_per_sm(heads):
    (cost,) = costs(specialisations.fused_specialisation(*heads))
    reserved = 1024  # bytes of shared memory that the system keeps of each block
    blocks = preprocess_fused.blocks_per_sm(PreprocessConfig(*heads))
    assert cost.problems() == (), cost.line()
    assert blocks * (cost.shared_bytes + reserved) <= toolchain.SHARED_MEMORY_LIMIT + reserved
    assert blocks * cost.threads * cost.registers <= toolchain.REGISTER_FILE


def test_public_cases_are_served_by_shipped_kernels():
    shipped = {item.name for item in specialisations.shipped_specialisations()}
    needed = [item.name for item in specialisations.case_specialisations(load_cases())]
    assert len(needed) == len(set(needed))
    assert set(needed) <= shipped


def test_any_length_and_batch_of_shipped_heads_is_shipped():
    shipped = {item.name for item in specialisations.shipped_specialisations()}
    case = load_cases()[0]
    for heads_q, heads_v in specialisations.HEADS:
        cases = [
            replace(case, B=B, T=T, Hq=heads_q, Hv=heads_v, initial_state=state)
            for B in (1, 2, 3, 8, 33, 200)
            for T in (1, 1000, 8192, 100_000)
            for state in (False, True)
        ]
        assert {item.name for item in specialisations.case_specialisations(cases)} <= shipped


@pytest.mark.parametrize("state", [False, True])
def test_what_a_head_configuration_can_launch(state):
    """Per tile a forward kernel and one over segments; one summary and one scan for both.

    Those two know of no initial state.
    """
    items = specialisations.core_specialisations(2, 8, state)
    names = [item.name for item in items]
    assert len(names) == len(set(names)) == 6
    assert sum("segment" in name for name in names) == 2
    assert sum(name.startswith("summary_hq2_hv8") for name in names) == 1
    assert sum(name.startswith("scan_hv8") for name in names) == 1
    assert sum("init" in name for name in names) == (4 if state else 0)
    unsplit = specialisations.core_specialisations(2, 8, state, split=False)
    assert [item.name for item in unsplit] == names[:2]


def test_a_plan_of_two_segments_needs_neither_summary_nor_scan():
    kernels = specialisations.plan_specialisations(CorePlan(64, SegmentPlan(4, 2), 1), 2, 8, False)
    assert [item.name.split("_")[0] for item in kernels] == ["segment"]


def test_command_prints_the_number_of_the_cases(capsys):
    assert specialisations.main(["--cases"]) == 0
    lines = capsys.readouterr().out.splitlines()
    count = f"{len(lines) - 1} specialisations serve {len(load_cases())} cases on 132 SMs"
    assert lines[0] == count


@pytest.mark.parametrize("sms", ["0", "-1", "1.5", "many"])
def test_a_device_has_at_least_one_sm(sms, capsys):
    with pytest.raises(SystemExit) as exit_:
        specialisations.main(["--cases", "--sms", sms])
    assert exit_.value.code == 2
    message = f"argument --sms: '{sms}' must be a number of SMs, at least 1"
    assert message in capsys.readouterr().err


def test_command_reports_problems(monkeypatch, capsys):
    """A kernel that spills makes the command fail and says which."""
    spilling = toolchain.Resources("k", 128, 255, 8, 8, 0, 0, (), (), None)
    monkeypatch.setattr(toolchain, "compile_for_hopper", lambda *_: None)
    monkeypatch.setattr(toolchain, "resources", lambda *_: spilling)
    item = specialisations.Specialisation("spilling_kernel", lambda: None, {})
    monkeypatch.setattr(specialisations, "shipped_specialisations", lambda: [item])
    assert specialisations.main(["--compile"]) == 1
    out = capsys.readouterr().out
    assert "spilling_kernel" in out and "PROBLEM spills 8 B" in out
