"""Launches that read what the one before wrote: they start early, and wait on the device."""

import re

import pytest

from gdn_prefill import toolchain
from gdn_prefill.core import core_kernels
from gdn_prefill.specialisations import THREE_SEGMENTS
from gdn_prefill.split import CorePlan
from gdn_prefill.variants import Usage, operator_variants

WAIT = "cudaGridDependencySynchronize();"
TRIGGER = "cudaTriggerProgrammaticLaunchCompletion();"
SIGNATURE = re.compile(r"__global__ void [^{;]*?\w+\(([^{;]*)\) \{")
# Tensors that no launch of a call writes: they are what they were before all of them.
CALLERS_OWN = {"cu_seqlens"}


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


def body_and_access(source: str) -> tuple[str, re.Pattern]:
    """The kernel's body, and what reads or writes global memory in it: its pointers, and TMA."""
    *_, signature = SIGNATURE.finditer(source)
    pointers = set(re.findall(r"\*\s*(?:__restrict__\s+)?(\w+)", signature[1])) - CALLERS_OWN
    names = "|".join(rf"\b{name}\b" for name in sorted(pointers))
    return source[signature.end() :], re.compile(f"tma_load|tma_store|{names}")


def waits_before_anything(source: str) -> bool:
    body, access = body_and_access(source)
    before, wait, after = body.partition(WAIT)
    assert access.search(body), "nothing is read at all: the pattern is wrong"
    return bool(wait) and not access.search(before)


@pytest.mark.parametrize("name", ["summary", "scan", "operator"])
def test_readers_wait_before_they_read(sources, name):
    assert waits_before_anything(sources[name])


@pytest.mark.parametrize("name", ["forward", "operator_forward"])
def test_a_segment_waits_before_it_reads_or_at_its_end(sources, name):
    """Beside the summary it waits for that to end after all its work: the scan waits for it."""
    body, access = body_and_access(sources[name])
    before, between, after = body.split(WAIT)
    assert "if (beside == 0)" in before and not access.search(before)
    assert "if (beside != 0)" in between[-80:] and not access.search(after)
    assert access.search(between)


def test_the_summary_lets_the_first_segment_start_when_it_has_waited(sources):
    body = sources["summary"][sources["summary"].rindex("__global__") :]
    assert body.index(WAIT) < body.index(TRIGGER)


@pytest.mark.parametrize("name", ["preprocess", "summary", "scan"])
def test_what_is_read_next_triggers(sources, name):
    assert TRIGGER in sources[name]


@pytest.mark.parametrize(
    ("body", "waits"),
    [
        (f"{WAIT} float x = gate[0];", True),
        (f"int n = cu_seqlens[1]; {WAIT} float x = gate[n];", True),
        (f"int n = order[0]; {WAIT} float x = gate[n];", False),
        (f"float x = *(float*)(gate + 1); {WAIT}", False),
        (f"tl::tma_load(k_desc, 0); {WAIT} float x = gate[0];", False),
        ("float x = gate[0];", False),
    ],
)
def test_the_comparison_can_fail(body, waits):
    parameters = "const int* order, float* __restrict__ gate, const int* cu_seqlens, int n"
    source = f"__global__ void f({parameters});\n__global__ void f({parameters}) {{ {body} }}"
    assert waits_before_anything(source) == waits
