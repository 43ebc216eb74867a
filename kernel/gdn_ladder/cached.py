"""The four-group kernel behind the package's call layer, for the version v14."""

from typing import Any

from torch import Tensor

from gdn_prefill.core import Core
from gdn_prefill.runtime import Runtime
from gdn_prefill.split import CorePlan


class CachedForward(Runtime):
    """The package's caches, filled with the four-group kernel; never split over time."""

    def core(self, plan: CorePlan, heads_q: int, heads_v: int, use_initial_state: bool) -> Core:
        from .families import FOUR_GROUP, LadderShape

        # Sizes are run-time arguments of this kernel.
        shape = LadderShape(1, 1, heads_q, heads_v, use_initial_state)
        config = FOUR_GROUP.configure({"block_dv": plan.block_dv}, shape)
        launch = self.kernel(FOUR_GROUP.build, config, FOUR_GROUP.pass_configs)
        return Core(plan, {"forward": launch})

    def call(self, tensors: tuple[Any, ...], block_dv: int) -> tuple[Tensor, Tensor]:
        """(output, final state) in reused buffers; tensors: as the package's entry takes them.

        block_dv: 64 or 128. From the second call at the same addresses on a CUDA Graph replay.
        """
        options = None, block_dv, False  # scale, tile, split over time
        replayed = self.replay(*tensors, *options)
        return self.forward(*tensors, *options, True) if replayed is None else replayed


CACHED = CachedForward()
