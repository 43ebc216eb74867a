"""The operator token by token in float64: the definition that every other form must equal."""

import torch
from torch import Tensor

from .layout import heads_first, start_state


def gdn_recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """One step a token: decay the state, correct it along the key, read it with the query.

    q, k [B, T, Hq, dk]; v [B, T, Hv, dv]; g (log decay of each token), beta [B, T, Hv];
    initial_state [B, Hv, dk, dv] or None for zeros; scale defaults to 1/sqrt(dk).
    Returns output [B, T, Hv, dv] and final state [B, Hv, dk, dv], float64, on the inputs' device.
    """
    heads = v.shape[2]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    state = start_state(initial_state, k, v)
    q, k, v, g, beta = (heads_first(x, heads) for x in (q, k, v, g, beta))
    outputs = []
    for t in range(v.shape[2]):
        key = k[:, :, t].unsqueeze(-1)
        state = state * g[:, :, t, None, None].exp()
        predicted = (state * key).sum(dim=-2)
        error = beta[:, :, t, None] * (v[:, :, t] - predicted)
        state = state + key * error.unsqueeze(-2)
        outputs.append(scale * (state * q[:, :, t].unsqueeze(-1)).sum(dim=-2))
    return torch.stack(outputs, dim=1), state
