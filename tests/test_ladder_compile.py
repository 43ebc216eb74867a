"""What the ladder's kernels become on sm_90a: lowered for every version, built for a few."""

import shutil

import pytest
import torch

from cases import load_cases, make_inputs
from gdn_ladder import VERSIONS, LadderShape, forward
from gdn_ladder.families import Kernel
from gdn_prefill import prepare
from gdn_prefill.toolchain import SHARED_MEMORY_LIMIT, generate, resources
from reference.chunked import gdn_chunked

KERNELS = [version for version in VERSIONS if isinstance(version.family, Kernel)]
# The most heads and an initial state: the most shared memory and registers.
WIDE = LadderShape(1, 8192, 16, 64, use_initial_state=True)
TWO_PER_MULTIPROCESSOR = {"v20", "v21"}
SPILLING = {"v21"}  # 64 registers a thread do not hold a state of 64 columns


def lowered(version, shape):
    config = version.family.configure(version.settings, shape)
    return generate(version.family.build(config), version.family.pass_configs)


@pytest.mark.parametrize("version", KERNELS, ids=lambda version: version.name)
def test_lowers_within_the_shared_memory_of_an_sm(version):
    generated = lowered(version, WIDE)
    (used,) = generated.dynamic_shared_bytes.values()
    ctas = 2 if version.name in TWO_PER_MULTIPROCESSOR else 1
    reserved = 1024  # by the system, for each CTA
    static = 4096  # gates and barriers; ptxas has the exact figure
    assert ctas * (used + static) <= SHARED_MEMORY_LIMIT + reserved - ctas * reserved
    source = generated.device_source
    copies = "cp.async.bulk" in source or "tma_load" in source
    assert copies == (version.name not in ("v1", "w8a8"))
    assert "wgmma" in source


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("name", ["v2", "v20", "v21"])
def test_spills_only_where_it_is_the_point(name):
    (version,) = (version for version in KERNELS if version.name == name)
    used = resources(lowered(version, WIDE), version.family.pass_configs, sass=False)
    assert (used.spill_store_bytes > 0) == (name in SPILLING)
    total = used.static_shared_bytes + used.dynamic_shared_bytes
    assert total <= SHARED_MEMORY_LIMIT
    if name in TWO_PER_MULTIPROCESSOR:
        assert 2 * used.threads * used.registers <= 65536
        assert 2 * (total + 1024) <= SHARED_MEMORY_LIMIT + 1024


@pytest.mark.gpu
@pytest.mark.parametrize("version", VERSIONS, ids=lambda version: version.name)
@pytest.mark.parametrize("name", ["short_tail_state", "parallel_equal", "parallel_gva"])
def test_on_the_gpu(version, name):
    (case,) = (case for case in load_cases() if case.name == name)
    if version.family is None or version.name == "v9":
        pytest.skip("not built" if version.family is None else "a race: any result is possible")
    inputs = make_inputs(case, device="cuda")
    g_cumsum, A = prepare(inputs.k, inputs.g, inputs.beta)
    result = forward(
        version.name, inputs.q, inputs.k, inputs.v, g_cumsum, inputs.beta, A, inputs.initial_state
    )
    expected = gdn_chunked(
        inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, inputs.initial_state
    )
    right = all(
        torch.allclose(got.double(), want, rtol=case.rtol, atol=case.atol)
        for got, want in zip(result, expected, strict=True)
    )
    assert right == (version.expected == "pass")
