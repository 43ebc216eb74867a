"""The operator and its preprocessing in plain torch, for machines without a Hopper GPU.

fp32 arithmetic on the inputs' device, outputs rounded once to their dtype. Vectorised over batch
and heads; the Python loop runs over chunks of 64 tokens, the last one as short as it is. The
arguments are taken as already checked (gdn_prefill.validation).

Every exponential is of a gate sum or of a difference g_i - g_j with i >= j, hence of a non-positive
number: nothing overflows however strong the decay, and 1/gamma is never formed.
"""

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

CHUNK = 64


def _plain(function: Callable) -> Callable:
    """Keeps the caller's surroundings out: no autocast, no graph recorded, no tensor subclass."""

    @functools.wraps(function)
    def call(*arguments):
        plain = [x.as_subclass(Tensor) if isinstance(x, Tensor) else x for x in arguments]
        with torch.no_grad(), torch.autocast(plain[0].device.type, enabled=False):
            return function(*plain)

    return call


@_plain
def cumsum_torch(g: Tensor) -> Tensor:
    """Log decay [B, T, Hv] fp32 -> its inclusive sum [B, T, Hv] fp32, restarting every chunk."""
    g_cumsum = torch.empty_like(g)
    for tokens in _chunks(g.shape[1]):
        g_cumsum[:, tokens] = g[:, tokens].cumsum(dim=1)
    return g_cumsum


@_plain
def solve_kkt_torch(k: Tensor, g_cumsum: Tensor, beta: Tensor) -> Tensor:
    """A = (I + strict_lower(beta_i exp(g_i - g_j) <k_i, k_j>))^-1 of every chunk, by rows.

    k [B, T, Hq, 128] bf16; g_cumsum, beta [B, T, Hv] fp32. Returns A [B, T, Hv, 64] bf16: lower
    triangular with a unit diagonal; in a tail chunk of l tokens the columns >= l are 0.
    """
    heads = beta.shape[2]
    A = torch.zeros((*beta.shape, CHUNK), dtype=torch.bfloat16, device=k.device)
    for tokens in _chunks(k.shape[1]):
        K, g, row_beta = (_heads_first(x[:, tokens], heads) for x in (k, g_cumsum, beta))
        # L = strict_lower(diag(beta) (exp(g_i - g_j) * K K^T))
        L = (row_beta.unsqueeze(-1) * _ratios(g) * (K @ K.mT)).tril(-1)
        identity = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device).expand_as(L)
        inverse = torch.linalg.solve_triangular(L, identity, upper=False, unitriangular=True)
        A[:, tokens, :, : L.shape[-1]] = inverse.transpose(1, 2)
    return A


@_plain
def forward_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g_cumsum: Tensor,
    beta: Tensor,
    A: Tensor,
    initial_state: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The forward pass; shapes and dtypes as in gdn_prefill.gdn_prefill_forward.

    Returns (output [B, T, Hv, 128] bf16, final_state [B, Hv, 128 (dk), 128 (dv)] fp32), both fresh.
    """
    B, T, heads, dv = v.shape
    output = torch.empty_like(v)
    if initial_state is None:
        S = torch.zeros((B, heads, k.shape[-1], dv), dtype=torch.float32, device=v.device)
    else:
        S = initial_state
    for tokens in _chunks(T):
        Q, K, V, g, row_beta, inverse = (
            _heads_first(x[:, tokens], heads) for x in (q, k, v, g_cumsum, beta, A)
        )
        gamma = g.exp().unsqueeze(-1)
        g_last = g[..., -1:]
        # U' = K S
        U = K @ S
        # W' = beta * (V - gamma * U')
        W = row_beta.unsqueeze(-1) * (V - gamma * U)
        # V_new = A W'
        V_new = inverse[..., : V.shape[-2]] @ W
        # P = tril(exp(g_i - g_j)) * Q K^T
        P = _ratios(g) * (Q @ K.mT)
        # O = scale * (gamma * (Q S) + P V_new)
        O = scale * (gamma * (Q @ S) + P @ V_new)
        output[:, tokens] = O.transpose(1, 2)
        # S_next = gamma_last * S + (exp(g_last - g) * K)^T V_new
        S = g_last.exp().unsqueeze(-1) * S + ((g_last - g).exp().unsqueeze(-1) * K).mT @ V_new
    return output, S


def _chunks(T: int) -> Iterator[slice]:
    """The token range of every chunk of a sequence of T tokens."""
    return (slice(start, min(start + CHUNK, T)) for start in range(0, T, CHUNK))


def _heads_first(x: Tensor, heads: int) -> Tensor:
    """[B, C, H, ...] -> fp32 [B, heads, C, ...]; V head h reads head h // (heads / H)."""
    return x.to(torch.float32).transpose(1, 2).repeat_interleave(heads // x.shape[2], dim=1)


def _ratios(g: Tensor) -> Tensor:
    """exp(g_i - g_j) where i >= j, 0 above the diagonal: [..., C] -> [..., C, C]."""
    difference = g.unsqueeze(-1) - g.unsqueeze(-2)
    upper = torch.ones(difference.shape[-2:], dtype=torch.bool, device=g.device).triu(1)
    return difference.masked_fill(upper, -torch.inf).exp()
