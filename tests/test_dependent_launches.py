"""Launches that read what the one before wrote: they start early, and wait on the device."""

import pytest

from gdn_prefill import toolchain
from gdn_prefill.core import core_kernels
from gdn_prefill.specialisations import THREE_SEGMENTS
from gdn_prefill.split import CorePlan
from gdn_prefill.variants import Usage, operator_variants

WAIT = "cudaGridDependencySynchronize();"
TRIGGER = "cudaTriggerProgrammaticLaunchCompletion();"
# What reads or writes global memory in the generated source of these kernels.
ACCESSES = ("tma_load", "tma_store", "= g_cumsum[", "= gate[", "states[", "initial_state[", "k[")
ACCESSES += ("order[",)


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    """Generated source by what the kernel is: "preprocess", "summary", "scan", "forward" (over
    segments), and of the operator "operator" (packed) and "operator_forward" (over segments).
    """
    plan = CorePlan(64, THREE_SEGMENTS, 1)
    made = {
        name: toolchain.generate(kernel.factory(kernel.config), kernel.pass_configs)
        for name, kernel in core_kernels(plan, 2, 4, use_initial_state=True).items()
    }
    for item in operator_variants([(2, 4)], ("bfloat16",), (Usage(cu_seqlens="int32"),)):
        if "dv128" not in item.name:
            name = "preprocess" if "preprocess" in item.name else "operator"
            made[name] = toolchain.generate(item.build(), item.pass_configs)
    for item in operator_variants([(2, 4)], ("bfloat16",), (Usage(),)):
        if item.name.endswith("_segmented") and "dv128" not in item.name:
            made["operator_forward"] = toolchain.generate(item.build(), item.pass_configs)
    return {name: generated.device_source for name, generated in made.items()}


def waits_before_anything(source: str) -> bool:
    body = source[source.rindex("__global__") :]
    first = min((body.find(access) for access in ACCESSES if access in body), default=len(body))
    return WAIT in body and body.index(WAIT) < first


@pytest.mark.parametrize("name", ["summary", "scan", "operator"])
def test_readers_wait_before_they_read(sources, name):
    assert waits_before_anything(sources[name])


@pytest.mark.parametrize("name", ["forward", "operator_forward"])
def test_a_segment_waits_before_it_reads_or_at_its_end(sources, name):
    """Beside the summary it waits for that to end after all its work: the scan waits for it."""
    body = sources[name][sources[name].rindex("__global__") :]
    before, between, after = body.split(WAIT)
    assert "if (beside == 0)" in before and not any(access in before for access in ACCESSES)
    assert "if (beside != 0)" in between[-80:] and not any(access in after for access in ACCESSES)


def test_the_summary_lets_the_first_segment_start_when_it_has_waited(sources):
    body = sources["summary"][sources["summary"].rindex("__global__") :]
    assert body.index(WAIT) < body.index(TRIGGER)


@pytest.mark.parametrize("name", ["preprocess", "summary", "scan"])
def test_what_is_read_next_triggers(sources, name):
    assert TRIGGER in sources[name]


def test_the_comparison_can_fail():
    source = f"__global__ void f() {{ float x = gate[0]; {WAIT} }}"
    assert not waits_before_anything(source)
    assert not waits_before_anything("__global__ void f() {}")
