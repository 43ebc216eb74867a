"""New contents for the same buffers, at the price of one pass and with known results.

The operator is odd in every column: flipping the sign of column c of q and of k, with row c of the
state, changes no product q k^T and flips row c of the final state; flipping column d of v, with
column d of the state, flips column d of output and final state. Signs are exact in every dtype, so
one solved problem gives 2^(128 (Hq + Hv)) different ones whose results are known to the last bit.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from cases import HEAD_DIM, Case

from .problem import Prepared


@dataclass(frozen=True)
class Signs:
    """Random +-1 factors: keys [Hq, 128] for the columns of q and k, values [Hv, 128] for v's."""

    keys: Tensor
    values: Tensor

    @property
    def state(self) -> Tensor:
        """The factor [Hv, 128 (dk), 128 (dv)] of initial and final state."""
        rows = self.keys.repeat_interleave(self.values.shape[0] // self.keys.shape[0], dim=0)
        return rows.unsqueeze(-1) * self.values.unsqueeze(-2)


def draw_signs(case: Case, seed: int, device: torch.device) -> Signs:
    """The signs of `seed`; the same on every device."""
    generator = torch.Generator().manual_seed(seed)

    def signs(heads: int) -> Tensor:
        bits = torch.randint(0, 2, (heads, HEAD_DIM), generator=generator)
        return (2 * bits - 1).to(device, torch.float32)

    return Signs(keys=signs(case.Hq), values=signs(case.Hv))


def write_flipped(base: Prepared, signs: Signs, target: Prepared) -> None:
    """Writes `base` with its columns flipped into the tensors of `target`, in place."""
    keys, values = signs.keys.to(base.q.dtype), signs.values.to(base.v.dtype)
    torch.mul(base.q, keys, out=target.q)
    torch.mul(base.k, keys, out=target.k)
    torch.mul(base.v, values, out=target.v)
    target.g_cumsum.copy_(base.g_cumsum)
    target.beta.copy_(base.beta)
    target.A.copy_(base.A)
    if base.initial_state is not None:
        torch.mul(base.initial_state, signs.state, out=target.initial_state)


def empty_like(prepared: Prepared) -> Prepared:
    """Uninitialised tensors of the same layout, at other addresses."""
    return Prepared(
        *(None if tensor is None else torch.empty_like(tensor) for tensor in prepared.arguments())
    )


def flipped_expectations(output: Tensor, state: Tensor, signs: Signs) -> tuple[Tensor, Tensor]:
    """What flipped inputs must give, from what the base inputs give (float64 both)."""
    return output * signs.values, state * signs.state


def flip_queries(q: Tensor, heads_v: int, seed: int) -> Tensor:
    """Multiplies every query of q [B, T, Hq, 128] by a random sign, in place.

    Returns the factor [B, T, heads_v, 1] by which the output then changes; the final state does
    not, nor does anything that an implementation may have derived from the other inputs.
    """
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 2, (*q.shape[:3], 1), generator=generator)
    signs = (2 * bits - 1).to(q.device, torch.float32)
    q.mul_(signs.to(q.dtype))
    return signs.repeat_interleave(heads_v // q.shape[2], dim=2)
