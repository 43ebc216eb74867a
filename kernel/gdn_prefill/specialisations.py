"""Every kernel that the package ships, by name: what warm-up compiles and what CI inspects.

A specialisation fixes head counts, tile and states; batch and length are run-time arguments, so a
new B or T compiles only where it makes another tile, or splitting over time, the fastest.

    python -m gdn_prefill.specialisations              the shipped ones, by name
    python -m gdn_prefill.specialisations --cases      how many the public cases need, and which
    python -m gdn_prefill.specialisations --compile    compiles each for sm_90a, prints its cost
                                                       and fills the cache in TILELANG_CACHE_DIR
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from .core import core_kernels
from .dispatch import PRODUCTS, TILES, core_plan
from .split import CorePlan, SegmentPlan

# (q/k heads, V heads): the public cases', then Qwen3-Next's 16/32 and its tensor-parallel shards.
HEADS = (
    (2, 8),
    (4, 4),
    (16, 16),
    (4, 16),
    (16, 64),
    (8, 32),
    (16, 32),
    (8, 16),
    (4, 8),
    (2, 4),
)


# SMs of an H200 or H100 SXM; the plan that a call gets depends on it.
SM_COUNT = 132
# Any cut that needs a scan stands for all: lengths and numbers of segments are run-time arguments.
THREE_SEGMENTS = SegmentPlan(chunks=3, chunks_per_segment=1)


@dataclass(frozen=True)
class Specialisation:
    """One kernel to compile: its unique name, the factory of its PrimFunc and its pass configs."""

    name: str
    build: Callable[[], Any]
    pass_configs: dict = field(hash=False)


def plan_specialisations(
    plan: CorePlan, heads_q: int, heads_v: int, use_initial_state: bool
) -> tuple[Specialisation, ...]:
    """The kernels that a plan launches for these heads."""
    kernels = core_kernels(plan, heads_q, heads_v, use_initial_state)
    return tuple(
        Specialisation(
            kernel.name, partial(kernel.factory, kernel.config), dict(kernel.pass_configs)
        )
        for kernel in kernels.values()
    )


def forward_specialisation(
    heads_q: int, heads_v: int, block_dv: int, use_initial_state: bool
) -> Specialisation:
    """The unsplit forward kernel for these heads, this tile, with or without an initial state."""
    (kernel,) = plan_specialisations(CorePlan(block_dv), heads_q, heads_v, use_initial_state)
    return kernel


def core_specialisations(
    heads_q: int, heads_v: int, use_initial_state: bool, split: bool = True
) -> tuple[Specialisation, ...]:
    """All that a core call of these heads may launch, whatever its batch, length and options.

    That is the forward kernel of every tile and, with `split`, the summary, the scan and the
    forward kernel over segments of every tile.
    """
    plans = [CorePlan(tile) for tile in TILES]
    if split:
        plans += [CorePlan(tile, THREE_SEGMENTS, PRODUCTS) for tile in TILES]
    return tuple(
        _unique(
            item
            for plan in plans
            for item in plan_specialisations(plan, heads_q, heads_v, use_initial_state)
        )
    )


def preprocess_specialisations(heads_q: int, heads_v: int) -> tuple[Specialisation, ...]:
    """The kernels that make g_cumsum and A for these heads."""
    from .kernels import preprocess

    config = preprocess.PreprocessConfig(heads_q, heads_v)
    factories = {
        f"cumsum_hv{heads_v}": preprocess.cumsum_kernel,
        f"kkt_inverse_hq{heads_q}_hv{heads_v}": preprocess.kkt_inverse_kernel,
    }
    return tuple(
        Specialisation(name, partial(factory, config), dict(preprocess.PASS_CONFIGS))
        for name, factory in factories.items()
    )


def fused_specialisation(heads_q: int, heads_v: int) -> Specialisation:
    """The one kernel that makes both g_cumsum and A for these heads."""
    from .kernels import preprocess, preprocess_fused

    config = preprocess.PreprocessConfig(heads_q, heads_v)
    return Specialisation(
        f"preprocess_hq{heads_q}_hv{heads_v}",
        partial(preprocess_fused.fused_preprocess_kernel, config),
        dict(preprocess_fused.PASS_CONFIGS),
    )


def shipped_specialisations() -> list[Specialisation]:
    """All specialisations that are compiled ahead of time, in a fixed order, names unique."""
    return list(
        _unique(
            item
            for heads_q, heads_v in HEADS
            for item in (
                *(
                    kernel
                    for state in (False, True)
                    for kernel in core_specialisations(heads_q, heads_v, state)
                ),
                *preprocess_specialisations(heads_q, heads_v),
                fused_specialisation(heads_q, heads_v),
            )
        )
    )


def case_specialisations(cases: Iterable[Any], sm_count: int = SM_COUNT) -> list[Specialisation]:
    """Those that some cases need; a case has B, T, Hq, Hv and initial_state (bool)."""
    return list(
        _unique(
            item
            for case in cases
            for item in (
                *plan_specialisations(
                    core_plan(case.B, case.T, case.Hq, case.Hv, sm_count),
                    case.Hq,
                    case.Hv,
                    case.initial_state,
                ),
                fused_specialisation(case.Hq, case.Hv),
            )
        )
    )


def _unique(items: Iterable[Specialisation]) -> Iterator[Specialisation]:
    seen = set()
    for item in items:
        if item.name not in seen:
            seen.add(item.name)
            yield item


def compile_all(items: Iterable[Specialisation]) -> int:
    """Compile each into the cache and print its cost; the number of kernels with problems."""
    from .toolchain import compile_for_hopper, resources

    bad = 0
    for item in items:
        prim_func = item.build()
        compile_for_hopper(prim_func, item.pass_configs)
        cost = resources(prim_func, item.pass_configs)
        print(f"{item.name:<40} {cost.line()}", flush=True)
        for problem in cost.problems():
            print(f"{'':<40} PROBLEM {problem}", flush=True)
        bad += bool(cost.problems())
    return bad


def _sms(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of SMs, at least 1")
    return int(text)


def main(arguments: list[str] | None = None) -> int:
    """Entry point of the command; 1 when a compiled kernel has problems, 2 when it cannot run."""
    parser = argparse.ArgumentParser(
        prog="gdn_prefill.specialisations", description="The kernels the package ships."
    )
    parser.add_argument("--cases", action="store_true", help="only those of the public cases")
    parser.add_argument(
        "--sms",
        type=_sms,
        default=SM_COUNT,
        help="SMs of the device, for --cases (default %(default)s)",
    )
    parser.add_argument("--compile", action="store_true", help="compile each for sm_90a")
    options = parser.parse_args(arguments)
    if options.cases:
        try:
            from cases import load_cases
        except ImportError:
            print(
                "error: --cases needs the repository's cases package on sys.path", file=sys.stderr
            )
            return 2
        cases = load_cases()
        items = case_specialisations(cases, options.sms)
        print(f"{len(items)} specialisations serve {len(cases)} cases on {options.sms} SMs")
    else:
        items = shipped_specialisations()
        print(f"{len(items)} specialisations are shipped")
    if not options.compile:
        for item in items:
            print(item.name)
        return 0
    from .toolchain import ToolchainError

    try:
        return int(compile_all(items) > 0)
    except ToolchainError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
