"""The operator in plain torch on any device: the portable path, and a readable specification.

fp32 arithmetic, results rounded once to their dtype. The loop runs over chunks of C = 64 tokens,
each step over all sequences that are so long; a tail is filled up with tokens of beta 0, zero key
and no decay, which change nothing. For one chunk of one V head, g being the inclusive sum of its
log decays and gamma = exp(g):

    W'      = beta (V - gamma K S)
    V_new   = (I + strict_lower(beta_i exp(g_i - g_j) <k_i, k_j>))^-1 W'
    O       = scale (gamma Q S + tril(exp(g_i - g_j) <q_i, k_j>) V_new)
    S_next  = exp(g_last) S + (exp(g_last - g) K)^T V_new

Every exponential is of a non-positive number. The arguments are taken as checked
(operator_validation), the results as allocated.

On a GPU this path reads cu_seqlens and state_indices on the host; the Hopper kernels do not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .operator_results import Results
from .operator_validation import RAW_GATE, Operands, OperatorShape, Options
from .validation import CHUNK

NORM_EPSILON = 1e-6
# exp(-128) is 0 in fp32; a stronger decay is cut here, so that differences of sums stay exact.
FORGOTTEN = -128.0


@dataclass(frozen=True)
class Sequences:
    """Where every sequence is: first[n] and last[n] of the flattened tokens, its initial and its
    final row (None: zeros, nothing written) and its first row of the kept states.
    """

    first: list[int]
    last: list[int]
    initial_row: list[int | None]
    final_row: list[int | None]
    states_row: list[int]

    def length(self, n: int) -> int:
        return self.last[n] - self.first[n]


@torch.no_grad()
def run_torch(x: Operands, results: Results, options: Options, shape: OperatorShape) -> None:
    """Fills the results of a checked call."""
    x, results = (type(group)(*map(_plain, group)) for group in (x, results))
    with torch.autocast(x.q.device.type, enabled=False):
        sequences = locate(x, options, shape)
        if options.batch_invariant:
            # One sequence at a time: no product's shape, hence no rounding, depends on the others.
            for n in range(shape.N):
                _run_sequences([n], sequences, x, results, options)
        else:
            _run_sequences(list(range(shape.N)), sequences, x, results, options)


def locate(x: Operands, options: Options, shape: OperatorShape) -> Sequences:
    """Reads the index tensors."""
    if x.cu_seqlens is None:
        bounds = [n * shape.T for n in range(shape.N + 1)]
    else:
        bounds = x.cu_seqlens.tolist()
    slots = list(range(shape.N)) if x.state_indices is None else x.state_indices.tolist()
    slots = [slot if slot >= 0 else None for slot in slots]
    rows: list[int | None] = list(range(shape.N))
    lengths = [end - start for start, end in zip(bounds, bounds[1:], strict=False)]
    if x.checkpoint_cu_starts is not None:
        states_row = x.checkpoint_cu_starts.tolist()
    else:
        every = options.states_every or 1
        kept = [-(-n // every) if options.output_h else n // every for n in lengths]
        states_row = [sum(kept[:n]) for n in range(shape.N)]
    return Sequences(
        bounds[:-1],
        bounds[1:],
        [None] * shape.N if x.initial_state is None else slots,
        rows if x.output_state is None else slots,
        states_row,
    )


def _run_sequences(
    members: list[int], sequences: Sequences, x: Operands, results: Results, options: Options
) -> None:
    """Everything for some sequences, chunk by chunk."""
    states = {n: _load_state(x, sequences.initial_row[n], options) for n in members}
    chunk = 0
    while active := [n for n in members if sequences.length(n) > chunk * CHUNK]:
        S = torch.stack([states[n] for n in active])
        if options.output_h:
            _keep_states(
                results.states, S, [sequences.states_row[n] + chunk for n in active], options
            )
        O, S = _run_chunk(_gather(active, sequences, chunk, x, options), S, options.scale)
        for i, n in enumerate(active):
            states[n] = S[i]
            start = sequences.first[n] + chunk * CHUNK
            end = min(start + CHUNK, sequences.last[n])
            _rows(results.output)[start:end] = O[i, :, : end - start].transpose(0, 1)
        chunk += 1
        if options.checkpoint_every and chunk * CHUNK % options.checkpoint_every == 0:
            done = [i for i, n in enumerate(active) if sequences.length(n) >= chunk * CHUNK]
            row = chunk * CHUNK // options.checkpoint_every - 1
            _keep_states(
                results.states,
                S[done],
                [sequences.states_row[active[i]] + row for i in done],
                options,
            )
    if results.final_state is not None:
        for n in members:
            _store_state(n, states[n], sequences, x, results.final_state, options)


class Chunk(NamedTuple):
    """fp32 operands of one chunk of some sequences, V heads expanded: [sequences, Hv, 64, ...]."""

    Q: Tensor
    K: Tensor
    V: Tensor
    log_decay: Tensor
    beta: Tensor


def _gather(
    active: list[int], sequences: Sequences, chunk: int, x: Operands, options: Options
) -> Chunk:
    device = x.q.device
    first = torch.tensor([sequences.first[n] + chunk * CHUNK for n in active], device=device)
    last = torch.tensor([sequences.last[n] for n in active], device=device)
    tokens = first.unsqueeze(1) + torch.arange(CHUNK, device=device)
    valid = tokens < last.unsqueeze(1)
    tokens = torch.minimum(tokens, last.unsqueeze(1) - 1)
    heads = x.v.shape[2]

    def take(tensor: Tensor) -> Tensor:
        """fp32 [sequences, heads, 64, ...], 0 past the end of a sequence."""
        taken = _rows(tensor)[tokens].to(torch.float32)
        taken.masked_fill_(~valid.view(*valid.shape, *(1,) * (taken.dim() - 2)), 0)
        return taken.transpose(1, 2)

    def vectors(tensor: Tensor) -> Tensor:
        return take(tensor).repeat_interleave(heads // tensor.shape[2], dim=1)

    def per_token(tensor: Tensor) -> Tensor:
        return tensor.masked_fill(~valid.unsqueeze(1), 0)

    Q, K, V = vectors(x.q), vectors(x.k), vectors(x.v)
    if options.use_qk_l2norm:
        Q, K = (t * (t.square().sum(-1, keepdim=True) + NORM_EPSILON).rsqrt() for t in (Q, K))
    log_decay = per_token(_log_decay(take(x.g), x, options)).contiguous()
    beta = take(x.beta)
    if options.use_beta_sigmoid:
        beta = per_token(beta.sigmoid() * (2 if options.allow_neg_eigval else 1))
    return Chunk(Q, K, V, log_decay, beta.contiguous())


def _log_decay(gate: Tensor, x: Operands, options: Options) -> Tensor:
    """gate [..., Hv, C] as it was passed -> its natural-log decay."""
    if options.gate == "linear":
        gate = gate.log()
    elif options.gate == RAW_GATE:
        if x.dt_bias is not None:
            gate = gate + x.dt_bias.to(torch.float32).unsqueeze(-1)
        gate = -x.A_log.to(torch.float32).exp().unsqueeze(-1) * F.softplus(gate)
    return gate.clamp(min=FORGOTTEN)


def _run_chunk(chunk: Chunk, S: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """(O [..., C, dv], next S [..., dk, dv]) of one chunk from S [..., dk, dv]."""
    Q, K, V, log_decay, beta = chunk
    g = log_decay.cumsum(-1)
    gamma = g.exp().unsqueeze(-1)
    g_last = g[..., -1:]
    beta = beta.unsqueeze(-1)
    ratios = _ratios(g)
    W = beta * (V - gamma * (K @ S))
    lower = (beta * ratios * (K @ K.mT)).tril(-1)
    V_new = torch.linalg.solve_triangular(lower, W, upper=False, unitriangular=True)
    O = scale * (gamma * (Q @ S) + (ratios * (Q @ K.mT)) @ V_new)
    decayed_K = (g_last - g).exp().unsqueeze(-1) * K
    return O, g_last.exp().unsqueeze(-1) * S + decayed_K.mT @ V_new


def _ratios(g: Tensor) -> Tensor:
    """exp(g_i - g_j) where i >= j, 0 above the diagonal: [..., C] -> [..., C, C]."""
    difference = g.unsqueeze(-1) - g.unsqueeze(-2)
    upper = torch.ones(difference.shape[-2:], dtype=torch.bool, device=g.device).triu(1)
    return difference.masked_fill(upper, -torch.inf).exp()


def _load_state(x: Operands, row: int | None, options: Options) -> Tensor:
    """fp32 [Hv, dk, dv]."""
    if row is None:
        heads, dk, dv = x.v.shape[2], x.k.shape[3], x.v.shape[3]
        return torch.zeros((heads, dk, dv), dtype=torch.float32, device=x.v.device)
    state = x.initial_state[row].to(torch.float32)
    return state.mT if options.state_v_first else state


def _store_state(
    n: int, S: Tensor, sequences: Sequences, x: Operands, final_state: Tensor, options: Options
) -> None:
    row = sequences.final_row[n]
    in_place = x.initial_state is not None and final_state.data_ptr() == x.initial_state.data_ptr()
    if row is None or (in_place and not sequences.length(n)):
        return
    final_state[row] = S.mT if options.state_v_first else S


def _keep_states(states: Tensor, S: Tensor, rows: list[int], options: Options) -> None:
    if rows:
        kept = S.mT if options.state_v_first else S
        states.flatten(0, -4)[rows] = kept.to(states.dtype)


def _rows(tensor: Tensor) -> Tensor:
    """[B, T, ...] -> [B * T, ...]"""
    return tensor.flatten(0, 1)


def _plain(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.as_subclass(Tensor)
