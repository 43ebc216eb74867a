"""The operator in chunks of 64 tokens in float64: the expected values of every check.

Symbols of one chunk (C tokens) of one value head, S [dk, dv] being the state before it:

    g      inclusive sum of the log decay within the chunk, gamma = exp(g)
    A      = (I + strict_lower(beta_i exp(g_i - g_j) <k_i, k_j>))^-1
    V_new  = A (beta (V - gamma K S))
    O      = scale (gamma Q S + tril(exp(g_i - g_j) Q K^T) V_new)
    S_next = exp(g_last) S + (exp(g_last - g) K)^T V_new

Only exponentials of g_i - g_j with i >= j are taken: each is at most 1 for a log decay <= 0.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from .layout import heads_first, start_state

CHUNK = 64


def chunk_cumsum(g: Tensor) -> Tensor:
    """Log decay [B, T, Hv] -> its float64 inclusive sum [B, T, Hv], restarting every chunk."""
    sums = torch.empty(g.shape, dtype=torch.float64, device=g.device)
    for tokens in _chunks(g.shape[1]):
        sums[:, tokens] = g[:, tokens].to(torch.float64).cumsum(dim=1)
    return sums


def solve_A(k: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The inverse A, float64 [B, T, Hv, 64], from k [B, T, Hq, dk] and the raw g, beta [B, T, Hv].

    Row i of a chunk is row i of its 64x64 matrix; in a tail chunk of l tokens only l rows exist and
    their columns >= l are 0.
    """
    heads = g.shape[2]
    A = torch.zeros((*g.shape, CHUNK), dtype=torch.float64, device=g.device)
    for tokens in _chunks(g.shape[1]):
        K, gate, row_beta = (heads_first(x[:, tokens], heads) for x in (k, g, beta))
        inverse = _inverse(K, gate.cumsum(-1), row_beta)
        A[:, tokens, :, : inverse.shape[-1]] = inverse.transpose(1, 2)
    return A


def gdn_chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The forward pass from the raw gate.

    q, k [B, T, Hq, dk]; v [B, T, Hv, dv]; g (log decay of each token, <= 0), beta [B, T, Hv];
    initial_state [B, Hv, dk, dv] or None for zeros; scale defaults to 1/sqrt(dk).
    Returns output [B, T, Hv, dv] and final state [B, Hv, dk, dv], float64, on the inputs' device.
    Vectorised over batch and heads; the loop runs over chunks, the last one as short as it is.
    """
    heads = v.shape[2]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    S = start_state(initial_state, k, v)
    output = torch.empty(v.shape, dtype=torch.float64, device=v.device)
    for tokens in _chunks(v.shape[1]):
        Q, K, V, log_decay, row_beta = (
            heads_first(x[:, tokens], heads) for x in (q, k, v, g, beta)
        )
        g_sum = log_decay.cumsum(-1)
        g_last = g_sum[..., -1:]
        gamma = g_sum.exp().unsqueeze(-1)
        A = _inverse(K, g_sum, row_beta)
        V_new = A @ (row_beta.unsqueeze(-1) * (V - gamma * (K @ S)))
        scores = _ratios(g_sum) * (Q @ K.mT)
        O = scale * (gamma * (Q @ S) + scores @ V_new)
        S = g_last.exp().unsqueeze(-1) * S + ((g_last - g_sum).exp().unsqueeze(-1) * K).mT @ V_new
        output[:, tokens] = O.transpose(1, 2)
    return output, S


def _chunks(T: int) -> Iterator[slice]:
    """The token range of every chunk of a sequence of T tokens."""
    return (slice(start, min(start + CHUNK, T)) for start in range(0, T, CHUNK))


def _ratios(g: Tensor) -> Tensor:
    """exp(g_i - g_j) where i >= j, 0 above the diagonal: [..., C] -> [..., C, C]."""
    difference = g.unsqueeze(-1) - g.unsqueeze(-2)
    upper = torch.ones(difference.shape[-2:], dtype=torch.bool, device=g.device).triu(1)
    return difference.masked_fill(upper, -torch.inf).exp()


def _inverse(k: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """A of one chunk: k [..., C, dk], chunk sums g and beta [..., C] -> [..., C, C]."""
    lower = (beta.unsqueeze(-1) * _ratios(g) * (k @ k.mT)).tril(-1)
    identity = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
    # unitriangular: the diagonal of ones is implied, so `lower` alone stands for I + lower.
    return torch.linalg.solve_triangular(
        lower, identity.expand_as(lower), upper=False, unitriangular=True
    )
