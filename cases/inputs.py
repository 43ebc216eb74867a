"""The lab's seeded inputs.

One generator a case, on the tensors' device, drawn as fp32 normals in the order q, k, v, g, beta,
initial_state. The CPU and a GPU draw different values from the same seed: record the device.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .definitions import HEAD_DIM, SEED, Case

GATE_DIVISOR = 16.0


@dataclass(frozen=True)
class Inputs:
    """What a full forward starts from.

    q, k [B, T, Hq, 128] bf16, unit length per head; v [B, T, Hv, 128] bf16;
    g [B, T, Hv] fp32, the raw log decay of each token (<= 0, not summed); beta [B, T, Hv] fp32 in
    (0, 1); initial_state [B, Hv, 128 (dk), 128 (dv)] fp32 or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial_state: Tensor | None


def make_inputs(case: Case, device: str | torch.device = "cpu", seed: int = SEED) -> Inputs:
    """Draws the inputs of `case` on `device`."""
    device = torch.device(device)
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32)

    q = F.normalize(normal(case.B, case.T, case.Hq, HEAD_DIM), dim=-1).to(torch.bfloat16)
    k = F.normalize(normal(case.B, case.T, case.Hq, HEAD_DIM), dim=-1).to(torch.bfloat16)
    v = normal(case.B, case.T, case.Hv, HEAD_DIM).to(torch.bfloat16)
    g = F.logsigmoid(normal(case.B, case.T, case.Hv)) / GATE_DIVISOR
    if case.gate == "mixed":
        g[:, ::2, :] = 0
    beta = torch.sigmoid(normal(case.B, case.T, case.Hv))
    state = normal(case.B, case.Hv, HEAD_DIM, HEAD_DIM) if case.initial_state else None
    return Inputs(q=q, k=k, v=v, g=g, beta=beta, initial_state=state)
