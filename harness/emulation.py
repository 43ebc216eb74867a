"""This package's kernels in the emulator: the very PrimFunc that a GPU would run, on CPU tensors.

What an H200 would be given is emulated: tile and splitting are planned for its 132 multiprocessors.
g_cumsum and A come from the torch backend. Nothing is timed.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from cases import Case

AUTO, CUDA, TORCH, EMULATOR = "auto", "cuda", "torch", "emulator"
ALL_CHECKS = "race,deadlock,bounds,init"
# Chunks of one head's state up to which "auto" emulates: 20 s on two cores, in the shipped kernel.
AUTO_LIMIT = 4096

Steps = Callable[[int, int], None]


class EmulatedFaultError(RuntimeError):
    """What the emulator found wrong with a kernel, in its own words."""


class NothingRunsError(ValueError):
    """Why no backend of this machine runs a version of the ladder on a case."""


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class Emulation:
    """How kernels are emulated.

    check: groups of findings to look for, joined by commas; None leaves the detector off, which
        saves about a third of the time: bounds and deadlocks show even so.
    workers: processes that the CTAs are spread over.
    steps: called as steps(done, total) after every CTA of a launch.
    """

    check: str | None = None
    workers: int = field(default_factory=available_cores)
    steps: Steps | None = None

    def __post_init__(self) -> None:
        if self.check is not None:
            from tile_emulator.report import parse_checks

            parse_checks(self.check)

    def execute(self, kernel: Any, config: Any) -> Callable[..., None]:
        """The launcher of gdn_ladder's Buildable `kernel` at `config`, as its forward() asks for.

        Calling it raises EmulatedFaultError for whatever the emulator reports.
        """
        from tile_emulator import EmulatorError, emulate

        prim_func = kernel.build(config)

        def launch(*arguments: object) -> None:
            try:
                emulate(
                    prim_func,
                    *arguments,
                    check=self.check,
                    pass_configs=kernel.pass_configs,
                    workers=self.workers,
                    progress=self.steps,
                )
            except EmulatorError as error:
                raise EmulatedFaultError(f"{type(error).__name__}: {error}") from error

        return launch

    def for_version(self, expected: str) -> "Emulation":
        """With the detector on for a version that is expected to fail: its race may stay hidden."""
        return self if self.check or expected == "pass" else replace(self, check=ALL_CHECKS)


def shipped_forward(problem: Any, emulation: Emulation) -> Callable[[Tensor, Tensor], tuple]:
    """From (g_cumsum, A) to what gdn_prefill_forward gives for `problem` on an H200.

    All launches of its plan are emulated, a split over time included.
    """
    from gdn_ladder import Inputs, LadderShape
    from gdn_ladder.families import CORE

    case, inputs = problem.case, problem.inputs
    shape = LadderShape(case.B, case.T, case.Hq, case.Hv, case.initial_state)
    call = CORE.bind({}, shape, emulation.execute)

    def forward(g_cumsum: Tensor, A: Tensor) -> tuple[Tensor, Tensor]:
        return call(
            Inputs(inputs.q, inputs.k, inputs.v, g_cumsum, inputs.beta, A, inputs.initial_state)
        )

    return forward


def preparing_backend(backend: str) -> str:
    """The backend that makes g_cumsum and A where the forward's is `backend`."""
    return TORCH if backend == EMULATOR else backend


def emulated_chunks(case: Case) -> int:
    """Chunks of one head's state that a case takes: what emulating it costs, whatever the tile."""
    return case.state_heads * case.chunks


def resolve_backend(
    requested: str, case: Case, device_type: str, version: str | None = None
) -> tuple[str, str]:
    """The backend that "auto" stands for on `case`, and a line that says what that means.

    On a GPU, and for any other backend, it stays as it is and there is nothing to say. Without a
    GPU small cases go to the emulator; for large ones the torch backend stands in. Raises
    NothingRunsError for a version of the ladder there: torch is no version of the kernel.
    """
    if requested not in (AUTO, EMULATOR) or device_type != "cpu":
        return requested, ""
    what = "the ladder's kernel" if version else "the H200's kernel"
    chunks = emulated_chunks(case)
    if requested == EMULATOR or chunks <= AUTO_LIMIT:
        return EMULATOR, f"{what} in the emulator, {chunks} chunks of a head's state"
    limit = f"{chunks} chunks of a head's state, 'auto' emulates up to {AUTO_LIMIT}"
    if version:
        raise NothingRunsError(
            f"{limit}, and torch cannot stand in for a version (--backend emulator takes any case)"
        )
    return TORCH, f"torch stands in for the kernel: {limit} (--backend emulator takes any)"
