"""What the ladder's kernels become on sm_90a: lowered for every version, built for a few."""

import shutil

import pytest
import torch

from cases import load_cases, make_inputs
from gdn_ladder import LadderShape, available_versions, forward, get_version, kernels_of
from gdn_prefill import prepare
from gdn_prefill.toolchain import SHARED_MEMORY_LIMIT, generate, resources
from reference.chunked import gdn_chunked

# The most heads and an initial state: the most shared memory and registers.
WIDE = LadderShape(1, 8192, 16, 64, use_initial_state=True)
# Every different launch of the ladder for that shape, by the first version that makes it.
LAUNCHES = {}
for version in available_versions():
    for number, launch in enumerate(kernels_of(version, WIDE)):
        LAUNCHES.setdefault(launch, f"{version}-{number}" if number else version)
TWO_PER_MULTIPROCESSOR = {"v20", "v21"}
SPILLING = {"v21"}  # 64 registers a thread do not hold a state of 64 columns
WITHOUT_TMA = {"v1", "w8a8", "scan-1"}
RESERVED_BY_THE_SYSTEM = 1024  # bytes of shared memory a CTA, on top of its own
SHARED_MEMORY_OF_AN_SM = SHARED_MEMORY_LIMIT + RESERVED_BY_THE_SYSTEM
REGISTERS_OF_AN_SM = 65536


def ctas_of(name):
    return 2 if name in TWO_PER_MULTIPROCESSOR else 1


def lowered(name):
    (launch,) = (launch for launch, called in LAUNCHES.items() if called == name)
    kernel, config = launch
    return generate(kernel.build(config), kernel.pass_configs), kernel.pass_configs


@pytest.mark.parametrize("name", LAUNCHES.values())
def test_lowers_to_tensor_cores_within_the_shared_memory_of_an_sm(name):
    generated, _ = lowered(name)
    (dynamic,) = generated.dynamic_shared_bytes.values()
    static = 4096  # at most, for gates and barriers; ptxas has the exact figure
    used = ctas_of(name) * (dynamic + static + RESERVED_BY_THE_SYSTEM)
    assert used <= SHARED_MEMORY_OF_AN_SM
    assert "wgmma" in generated.device_source
    assert ("tma_load" in generated.device_source) == (name not in WITHOUT_TMA)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("name", ["v2", "v20", "v21", "v15"])
def test_spills_only_where_it_is_the_point(name):
    used = resources(*lowered(name), sass=False)
    assert (used.spill_store_bytes > 0) == (name in SPILLING)
    ctas, shared = ctas_of(name), used.static_shared_bytes + used.dynamic_shared_bytes
    assert ctas * (shared + RESERVED_BY_THE_SYSTEM) <= SHARED_MEMORY_OF_AN_SM
    assert ctas * used.threads * used.registers <= REGISTERS_OF_AN_SM


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("name", ["prepared_groups", "prepared_fused", "prepared_wide"])
def test_a_prepared_kernel_fits_the_machine(name):
    """No spills, and ptxas has not serialised WGMMA (C7510 and following)."""
    cost = resources(*lowered(name), sass=False)
    assert cost.problems() == ()
    ((_, config),) = kernels_of(name, WIDE)
    assert cost.threads == config.threads
    assert [change.registers for change in cost.setmaxnreg] == list(config.registers.values())


@pytest.mark.gpu
@pytest.mark.parametrize("name", available_versions())
@pytest.mark.parametrize("case_name", ["short_tail_state", "parallel_equal", "parallel_gva"])
def test_on_the_gpu(name, case_name):
    if name == "v9":
        pytest.skip("a race: any result is possible")
    (case,) = (case for case in load_cases() if case.name == case_name)
    inputs = make_inputs(case, device="cuda")
    g_cumsum, A = prepare(inputs.k, inputs.g, inputs.beta)
    result = forward(
        name, inputs.q, inputs.k, inputs.v, g_cumsum, inputs.beta, A, inputs.initial_state
    )
    expected = gdn_chunked(
        inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, inputs.initial_state
    )
    right = all(
        torch.allclose(got.double(), want, rtol=case.rtol, atol=case.atol)
        for got, want in zip(result, expected, strict=True)
    )
    assert right == (get_version(name).expected == "pass")
