"""Layout changes that both references share; no arithmetic of the operator lives here."""

import torch
from torch import Tensor


def heads_first(x: Tensor, heads: int) -> Tensor:
    """[B, T, H, ...] -> float64 [B, heads, T, ...]; head h of the result is head h // (heads/H)."""
    group = heads // x.shape[2]
    return x.to(torch.float64).transpose(1, 2).repeat_interleave(group, dim=1)


def start_state(initial_state: Tensor | None, k: Tensor, v: Tensor) -> Tensor:
    """The float64 state [B, Hv, dk, dv] that the recurrence starts from; zeros for None."""
    if initial_state is not None:
        return initial_state.to(torch.float64)
    shape = (v.shape[0], v.shape[2], k.shape[-1], v.shape[-1])
    return torch.zeros(shape, dtype=torch.float64, device=v.device)
