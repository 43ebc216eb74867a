"""The package's operator bound to a problem: by a plan with its own buffers, or as it comes."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .problem import Problem

if TYPE_CHECKING:
    from gdn_prefill.plans import Plan

    from .implementations import Call


def operands(problem: Problem) -> dict[str, Tensor | None]:
    """The operator's tensors by name; cu_seqlens as int32, where sequences are packed."""
    inputs, bounds = problem.inputs, problem.cu_seqlens
    return {
        "q": inputs.q,
        "k": inputs.k,
        "v": inputs.v,
        "g": inputs.g,
        "beta": inputs.beta,
        "initial_state": inputs.initial_state,
        "cu_seqlens": None if bounds is None else bounds.to(torch.int32),
    }


def plan_of(problem: Problem, backend: str) -> "Plan":
    """A plan for calls like the problem's that returns the final states."""
    from gdn_prefill import plan

    inputs = problem.inputs
    B, T, Hq, _ = inputs.q.shape
    return plan(
        Hq,
        inputs.v.shape[2],
        T,
        batch=B,
        sequences=len(problem.lengths) or None,
        dtype=inputs.q.dtype,
        device=inputs.q.device,
        backend=backend,
        output_final_state=True,
    )


def planned(problem: Problem, backend: str) -> "Call":
    """Plan.run: nothing allocated, a CUDA Graph replay from the third call on."""
    plan, tensors = plan_of(problem, backend), operands(problem)
    return lambda: plan.run(**tensors)


def fresh(problem: Problem, backend: str) -> "Call":
    """chunk_gated_delta_rule as it is by default: fresh results, everything checked, no graph."""
    from gdn_prefill import chunk_gated_delta_rule

    tensors = operands(problem)
    return lambda: chunk_gated_delta_rule(**tensors, output_final_state=True, backend=backend)
