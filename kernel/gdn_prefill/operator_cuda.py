"""The operator on Hopper: the preprocessing launch, then the forward launch.

Both grids come from shapes alone and nothing is copied to the host, so that a captured call may be
replayed with other contents of every tensor, cu_seqlens and state_indices included.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from .operator_forward import call_plan, forward_specialisations, inverse_layout, launch_forward
from .operator_results import Results
from .operator_validation import Operands, OperatorShape, Options
from .validation import CHUNK, HEAD_DIM

__all__ = ["forward_specialisations", "launch_forward", "run_cuda", "workspaces"]

NORMS = ("query_norm", "key_norm")
# Shape and dtype of every temporary of a call, by name.
Specification = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


def run_cuda(
    x: Operands,
    results: Results,
    options: Options,
    shape: OperatorShape,
    workspace: Mapping[str, Tensor] | None = None,
) -> None:
    """Fills the results of a checked call; without a workspace it comes from torch's allocator.

    q, k and v that are neither contiguous nor views the kernels can read, g and beta that are not
    contiguous and A_log and dt_bias that are not fp32 are copied first.
    """
    from .preprocess import prepare_operator

    with torch.cuda.device(x.q.device):
        x = readable(x)
        if workspace is None:
            specification = workspaces(shape, options, x.q.dtype, x.q.device)
            workspace = new_workspace(specification, x.q.device)
        A, gate, beta = (workspace[name] for name in ("A", "gate", "beta_out"))
        query_norm, key_norm = (workspace.get(name) for name in NORMS)
        prepare_operator(
            x.k,
            x.g,
            x.beta,
            A,
            gate,
            beta,
            q=x.q if options.use_qk_l2norm else None,
            query_norm=query_norm,
            key_norm=key_norm,
            gate_mode=options.gate,
            A_log=x.A_log,
            dt_bias=x.dt_bias,
            beta_mode=beta_mode(options),
            cu_seqlens=x.cu_seqlens,
            order=workspace.get("order"),
        )
        launch_forward(
            x.q,
            x.k,
            x.v,
            gate,
            beta,
            A,
            query_norm,
            key_norm,
            x.cu_seqlens,
            x.initial_state,
            x.state_indices if x.initial_state is not None else None,
            results.output,
            results.final_state,
            x.state_indices if x.output_state is not None else None,
            None if results.states is None else results.states.flatten(0, -4),
            states_starts(x, options, shape),
            workspace,
            scale=options.scale,
            states_every=options.states_every,
            states_before=options.output_h,
            state_v_first=options.state_v_first,
            batch_invariant=options.batch_invariant,
            allow_neg_eigval=options.allow_neg_eigval,
        )


def beta_mode(options: Options) -> str:
    """What the preprocessing does to beta."""
    if not options.use_beta_sigmoid:
        return "plain"
    return "twice_sigmoid" if options.allow_neg_eigval else "sigmoid"


def readable(x: Operands) -> Operands:
    """x with copies of what the kernels cannot read where it is; x itself in the usual case."""
    from .preprocess import strides_allowed

    copies = {
        name: tensor.contiguous()
        for name, tensor in (("g", x.g), ("beta", x.beta))
        if not tensor.is_contiguous()
    }
    for name, tensor in (("q", x.q), ("k", x.k), ("v", x.v)):
        if not strides_allowed(tensor):
            copies[name] = tensor.contiguous()
        elif tensor.shape[1] == 1:
            # Strides of a single token may be anything, but the kernels compute with them.
            step = tensor.shape[2] * HEAD_DIM
            usual = (step, step, HEAD_DIM, 1)
            if tensor.stride() != usual:
                copies[name] = tensor.as_strided(tensor.shape, usual)
    copies |= {
        name: tensor.to(torch.float32)
        for name, tensor in (("A_log", x.A_log), ("dt_bias", x.dt_bias))
        if tensor is not None and tensor.dtype != torch.float32
    }
    return x._replace(**copies) if copies else x


def workspaces(
    shape: OperatorShape, options: Options, dtype: torch.dtype, device: torch.device
) -> Specification:
    """The temporaries of a call on a device; all are written before they are read."""
    from .preprocess import operator_outputs

    plan = call_plan(
        shape.N,
        shape.B * shape.T,
        shape.Hq,
        shape.Hv,
        device,
        packed=shape.packed,
        batch_invariant=options.batch_invariant,
        keeps_states=bool(options.states_every),
        allow_neg_eigval=options.allow_neg_eigval,
    )
    found = operator_outputs(
        *(shape.B, shape.T, shape.Hq, shape.Hv, dtype, options.use_qk_l2norm),
        sequences=shape.N if shape.packed else None,
        inverse=inverse_layout(plan),
    )
    for name, item in plan.workspaces(shape.B, shape.Hv).items():
        found[name] = (item.shape, getattr(torch, item.dtype))
    return found


def new_workspace(specification: Specification, device: torch.device) -> dict[str, Tensor]:
    """Uninitialised temporaries."""
    return {
        name: torch.empty(shape, dtype=dtype, device=device)
        for name, (shape, dtype) in specification.items()
    }


def states_starts(x: Operands, options: Options, shape: OperatorShape) -> Tensor | None:
    """First row of each sequence's kept states, [N + 1], on the device."""
    if not options.states_every:
        return None
    if x.checkpoint_cu_starts is not None:
        return x.checkpoint_cu_starts
    if x.cu_seqlens is None:
        chunks = shape.T / options.states_every
        rows = math.ceil(chunks) if options.output_h else math.floor(chunks)
        return torch.arange(shape.N + 1, device=x.q.device) * rows
    starts = torch.zeros(shape.N + 1, dtype=torch.int64, device=x.q.device)
    torch.cumsum((x.cu_seqlens.diff() + (CHUNK - 1)) // CHUNK, 0, out=starts[1:])
    return starts
