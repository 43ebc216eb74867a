"""FLA (flash-linear-attention), its own Triton kernels. Full forward only; its layouts are ours."""

import importlib
import os
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

from . import common

if TYPE_CHECKING:
    from harness.problem import Problem

PACKAGE = "fla"
DISTRIBUTION = "fla-core"
RELEASE = "0.6.0"
# FLA hands its call over to FlashQLA where that is installed, unless this is 0. Read at every call.
HAND_OVER = "FLA_FLASH_QLA"


@dataclass(frozen=True)
class FLA:
    name: str = "fla"
    scopes: tuple[str, ...] = (common.FULL,)
    backend: str = "triton"

    @property
    def version(self) -> str:
        return common.release(DISTRIBUTION)

    def unavailable(self) -> str | None:
        return common.unavailable(PACKAGE, f"{DISTRIBUTION}=={RELEASE} triton", _operator)

    def bind(self, problem: "Problem", scope: str) -> common.Call:
        """Sets FLA_FLASH_QLA=0 for the process: this adapter stands for FLA's own kernels."""
        common.check_scope(self.name, scope, self.scopes)
        os.environ[HAND_OVER] = "0"
        inputs, operator = problem.inputs, _operator()

        def full():
            return operator.chunk_gated_delta_rule(
                inputs.q,
                inputs.k,
                inputs.v,
                inputs.g,
                inputs.beta,
                initial_state=inputs.initial_state,
                output_final_state=True,
                cu_seqlens=problem.cu_seqlens,
            )

        return full


def _operator() -> ModuleType:
    return importlib.import_module("fla.ops.gated_delta_rule")


IMPLEMENTATIONS = (FLA(),)
