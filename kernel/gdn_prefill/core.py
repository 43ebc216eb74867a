"""The kernels behind a CorePlan, and a plan bound to what launches them.

The one place that says which forward kernel is shipped. TileLang is imported when a kernel is
described, not before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from .split import CorePlan, SplitLaunchers, split_forward

SHIPPED = "resident"


class CoreKernel(NamedTuple):
    """One kernel to compile: the PrimFunc is factory(config)."""

    name: str
    factory: Callable[[Any], Any]
    config: Any
    pass_configs: Mapping


def _resident(heads_q: int, heads_v: int, block_dv: int, initial: bool, cut: bool) -> CoreKernel:
    from .kernels import resident

    config = resident.ResidentConfig(heads_q, heads_v, block_dv, initial, segmented=cut)
    return CoreKernel(config.name, resident.resident_kernel, config, resident.PASS_CONFIGS)


# Forward kernels by name: from (heads_q, heads_v, block_dv, has an initial state, runs over
# segments) to the kernel.
FORWARD_KERNELS: Mapping[str, Callable[..., CoreKernel]] = {
    "resident": _resident,
}


def core_kernels(
    plan: CorePlan,
    heads_q: int,
    heads_v: int,
    use_initial_state: bool,
    forward: str = SHIPPED,
) -> dict[str, CoreKernel]:
    """The kernels of a plan: "summary" and "scan" of a split (neither with two segments), and
    "forward", one of FORWARD_KERNELS. Raises ValueError for a plan that the forward kernel cannot
    run.
    """
    kernels = {}
    if plan.cut is not None and plan.cut.scan_steps:
        from .kernels import split

        summary = split.SummaryConfig(heads_q, heads_v, residual=plan.products == 3)
        scan = split.ScanConfig(heads_v, plan.products)
        kernels = {
            "summary": CoreKernel(summary.name, split.summary_kernel, summary, split.PASS_CONFIGS),
            "scan": CoreKernel(scan.name, split.scan_kernel, scan, split.PASS_CONFIGS),
        }
    kernels["forward"] = FORWARD_KERNELS[forward](
        heads_q, heads_v, plan.block_dv, use_initial_state, plan.cut is not None
    )
    return kernels


@dataclass(frozen=True, eq=False)
class Core:
    """A plan with a launcher for each of its core_kernels()."""

    plan: CorePlan
    launchers: Mapping[str, Callable[..., Any]]

    def __call__(
        self,
        inputs: tuple,
        initial_state: Any,
        output: Any,
        final_state: Any,
        scale: float,
        temporaries: Mapping[str, Any],
    ) -> None:
        """Launch everything on the current stream; nothing is allocated, all can be captured.

        inputs: q, k, v, g_cumsum, beta, A. initial_state: the tensor, or a one-element dummy of
        kernels built without it. temporaries: tensors of plan.workspaces(); what they hold is
        neither read nor kept.
        """
        forward = self.launchers["forward"]
        if self.plan.cut is None:
            forward(*inputs, initial_state, output, final_state, scale)
            return
        split_forward(
            SplitLaunchers(self.launchers.get("summary"), self.launchers.get("scan"), forward),
            self.plan.cut,
            temporaries,
            inputs,
            initial_state,
            output,
            final_state,
            scale,
        )
