"""The floors against the project's table for the H200 (two significant digits there)."""

import pytest

from cases import load_cases
from harness.device import H200
from harness.floors import CORE, FULL, floor_ms, hbm_floor_ms, tensor_floor_ms
from harness.timing import Protocol

CASES = {case.name: case for case in load_cases()}
# case: core HBM, core tensor, full HBM, full tensor, in ms (4.8 TB/s, 1070 TFLOP/s).
TABLE = {
    "short_tail_state": (0.0015, 0.0012, 0.0012, 0.0013),
    "chain_equal": (0.0080, 0.0045, 0.0070, 0.0055),
    "parallel_equal": (0.0081, 0.0045, 0.0071, 0.0055),
    "parallel_gva": (0.0055, 0.0045, 0.0045, 0.0048),
    "long_low_gva": (0.043, 0.036, 0.035, 0.038),
    "batch_split_gva": (0.043, 0.036, 0.035, 0.038),
    "wide_gva_state": (0.087, 0.072, 0.071, 0.077),
    "deep_gva_state": (0.087, 0.072, 0.071, 0.077),
}


@pytest.mark.parametrize("name", TABLE)
def test_floors_are_those_of_the_table(name):
    case = CASES[name]
    core_hbm, core_tensor, full_hbm, full_tensor = TABLE[name]
    assert hbm_floor_ms(case, CORE, H200) == pytest.approx(core_hbm, rel=0.03)
    assert tensor_floor_ms(case, CORE, H200) == pytest.approx(core_tensor, rel=0.06)
    assert hbm_floor_ms(case, FULL, H200) == pytest.approx(full_hbm, rel=0.03)
    assert tensor_floor_ms(case, FULL, H200) == pytest.approx(full_tensor, rel=0.03)


@pytest.mark.parametrize("name", TABLE)
def test_memory_binds_with_cold_caches_only(name):
    case = CASES[name]
    for warm in (Protocol.OJ, Protocol.GRAPH):
        assert floor_ms(case, CORE, warm, H200) == tensor_floor_ms(case, CORE, H200)
    assert floor_ms(case, CORE, Protocol.COLD, H200) == hbm_floor_ms(case, CORE, H200)
