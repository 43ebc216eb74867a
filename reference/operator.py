"""The operator with all its options, token by token in float64: what every test compares with.

Written from the definition alone and sharing nothing with the package. One step of one sequence and
all V heads, S [Hv, dk, dv]:

    S = alpha_t S;   S = S + beta_t k_t (v_t - S^T k_t)^T;   o_t = scale S^T q_t
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

NORM_EPSILON = 1e-6


@dataclass(frozen=True)
class Expected:
    """float64 results, a list entry a sequence.

    output: [B, T, Hv, dv], rows that belong to no sequence 0. final_states: [Hv, dk, dv].
    states: after every token count in `kept`, {tokens: [Hv, dk, dv]}, 0 meaning before the first.
    """

    output: Tensor
    final_states: list[Tensor]
    states: list[dict[int, Tensor]]


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_states: list[Tensor | None] | None = None,
    cu_seqlens: list[int] | None = None,
    use_qk_l2norm: bool = False,
    gate: str = "log",
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid: bool = False,
    allow_neg_eigval: bool = False,
    keep_every: int = 0,
) -> Expected:
    """The recurrence over every sequence.

    q, k [B, T, Hq, dk], v [B, T, Hv, dv], g, beta [B, T, Hv]; gate: "log", "linear" or "raw" (with
    A_log and maybe dt_bias [Hv]). initial_states: [Hv, dk, dv] or None for each sequence.
    cu_seqlens: bounds of the sequences among the flattened tokens; rows of the batch without.
    keep_every: tokens between the states that are returned, 0 for none.
    """
    B, T, heads, dv = v.shape
    group = heads // q.shape[2]
    q, k, v, g, beta = (x.flatten(0, 1).to(torch.float64) for x in (q, k, v, g, beta))
    if use_qk_l2norm:
        q, k = (x / (x.pow(2).sum(-1, keepdim=True) + NORM_EPSILON).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(group, dim=1) for x in (q, k))
    alpha = _decay(g, gate, A_log, dt_bias)
    if use_beta_sigmoid:
        beta = torch.sigmoid(beta) * (2.0 if allow_neg_eigval else 1.0)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    bounds = [n * T for n in range(B + 1)] if cu_seqlens is None else cu_seqlens
    output = torch.zeros_like(v)
    final_states, states = [], []
    for n, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        S = initial_states[n] if initial_states else None
        if S is None:
            S = v.new_zeros(heads, k.shape[-1], dv)
        S = S.to(torch.float64)
        kept = {0: S}
        for t in range(start, end):
            S = alpha[t, :, None, None] * S
            error = beta[t, :, None] * (v[t] - torch.einsum("hkv,hk->hv", S, k[t]))
            S = S + k[t].unsqueeze(-1) * error.unsqueeze(-2)
            output[t] = scale * torch.einsum("hkv,hk->hv", S, q[t])
            if keep_every and (t + 1 - start) % keep_every == 0:
                kept[t + 1 - start] = S
        final_states.append(S)
        states.append(kept if keep_every else {})
    return Expected(output.view(B, T, heads, dv), final_states, states)


def _decay(g: Tensor, gate: str, A_log: Tensor | None, dt_bias: Tensor | None) -> Tensor:
    """The factor alpha of every token and V head."""
    if gate == "linear":
        return g
    if gate == "raw":
        bias = 0.0 if dt_bias is None else dt_bias.to(torch.float64)
        g = -A_log.to(torch.float64).exp() * F.softplus(g + bias)
    return g.exp()
