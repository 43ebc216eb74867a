"""FlashQLA (TileLang), with and without its splitting over time.

Its layouts are ours: raw log gate, state [B, Hv, dk, dv]. Its A carries no decay, which its kernel
applies afterwards, so the core scope computes that A with FlashQLA's own solver, outside the timed
region, and takes the gate sum from the problem.

FlashQLA asks CUDA for the architecture when imported, hence the lazy imports.
"""

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from . import common

if TYPE_CHECKING:
    from harness.problem import Problem

PACKAGE = "flash_qla"
DISTRIBUTION = "flash-qla"
RELEASE = "0.1.3"


@dataclass(frozen=True)
class FlashQLA:
    """auto_cp: let FlashQLA decide whether to split a lone sequence over time (its default)."""

    name: str = "flash_qla"
    auto_cp: bool = True
    scopes: tuple[str, ...] = (common.CORE, common.FULL)
    backend: str = "tilelang"

    @property
    def version(self) -> str:
        return common.release(DISTRIBUTION)

    def unavailable(self) -> str | None:
        return common.unavailable(PACKAGE, f"{DISTRIBUTION}=={RELEASE}", _kernels)

    def bind(self, problem: "Problem", scope: str) -> common.Call:
        common.check_scope(self.name, scope, self.scopes)
        return self._core(problem) if scope == common.CORE else self._full(problem)

    def _full(self, problem: "Problem") -> common.Call:
        inputs, kernels = problem.inputs, _kernels()

        def full():
            return kernels.chunk_gated_delta_rule(
                inputs.q,
                inputs.k,
                inputs.v,
                inputs.g,
                inputs.beta,
                initial_state=inputs.initial_state,
                output_final_state=True,
                cu_seqlens=problem.cu_seqlens,
                auto_cp=self.auto_cp,
            )

        return full

    def _core(self, problem: "Problem") -> common.Call:
        """Its forward pass after the gate sum and A: the split, if any, and the fused kernel."""
        inputs, kernels = problem.inputs, _kernels()
        B, T, Hv, _ = inputs.v.shape
        split = self.auto_cp and B == 1
        # As in its own forward: a split is considered for one sequence only, given as packed.
        packed = torch.tensor([0, T], dtype=torch.int32, device=inputs.q.device) if split else None
        context = kernels.build_cp_context(
            packed, enable_intra=split, num_v_heads=Hv, chunk_size=kernels.CHUNK_SIZE
        )
        A = kernels.kkt_solve(
            k=inputs.k,
            b=inputs.beta,
            chunk_size=kernels.CHUNK_SIZE,
            cu_seqlens=context.cu_seqlens,
        )
        segments = context.intra_cp_cu_seqlens if context.is_intra else context.cu_seqlens

        def core():
            start, _ = kernels.cp_preprocess_fwd(
                context,
                k=inputs.k,
                v=inputs.v,
                a=A,
                g=problem.g_cumsum,
                beta=inputs.beta,
                initial_state=inputs.initial_state,
                state_v_first=False,
                enable_fwd_cp_cache=False,
            )
            output, _, final_state = kernels.fused_gdr_fwd(
                q=inputs.q,
                k=inputs.k,
                v=inputs.v,
                a=A,
                g=problem.g_cumsum,
                b=inputs.beta,
                initial_state=start,
                cu_seqlens=segments,
                cp_seq_map=context.seq_map_c2r,
                raw_cu_seqlens=context.cu_seqlens,
            )
            return output, final_state

        return core


def _kernels() -> ModuleType:
    return importlib.import_module("flash_qla.ops.gated_delta_rule.chunk")


IMPLEMENTATIONS = (FlashQLA(), FlashQLA(name="flash_qla_nocp", auto_cp=False))
