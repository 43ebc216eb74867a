"""A small Gated DeltaNet layer in the style of Qwen3-Next: packed prefill, then decoding.

    python examples/gdn_layer.py            on the GPU where there is a Hopper one, else on the CPU

Three prompts of different lengths are prefilled in one call of the operator, which updates their
slots of a state pool in place; then every prompt goes on token by token from its slot. The same
tokens through a loop that decodes from the first one on must give the same outputs. Weights are
random: nothing is downloaded.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gdn_prefill

HEAD_DIM = 128
CONV_WIDTH = 4


@dataclass
class Cache:
    """What decoding needs of every sequence: the convolution's last inputs and the state."""

    conv: Tensor  # [slots, channels, CONV_WIDTH - 1]
    state: Tensor  # [slots, Hv, 128 (V), 128 (K)] fp32, written by the operator


class GatedDeltaNet(nn.Module):
    """Projections, a causal convolution, the operator with its raw gates, a gated norm."""

    def __init__(self, hidden: int = 256, heads_q: int = 2, heads_v: int = 4):
        super().__init__()
        self.heads_q, self.heads_v = heads_q, heads_v
        self.widths = [heads * HEAD_DIM for heads in (heads_q, heads_q, heads_v)]
        channels = sum(self.widths)
        self.in_qkv = nn.Linear(hidden, channels, bias=False)
        self.in_z = nn.Linear(hidden, heads_v * HEAD_DIM, bias=False)
        self.in_ba = nn.Linear(hidden, 2 * heads_v, bias=False)
        self.conv = nn.Parameter(torch.randn(channels, CONV_WIDTH) / CONV_WIDTH)
        self.A_log = nn.Parameter(torch.empty(heads_v).uniform_(1, 16).log())
        self.dt_bias = nn.Parameter(torch.randn(heads_v) - 4)
        self.norm = nn.Parameter(torch.ones(HEAD_DIM))
        self.out = nn.Linear(heads_v * HEAD_DIM, hidden, bias=False)

    def new_cache(self, slots: int) -> Cache:
        device = self.conv.device
        shape = (slots, self.heads_v, HEAD_DIM, HEAD_DIM)
        return Cache(
            torch.zeros(slots, self.conv.shape[0], CONV_WIDTH - 1, device=device),
            torch.zeros(shape, device=device),
        )

    def prefill(self, x: Tensor, lengths: list[int], slots: Tensor, cache: Cache) -> Tensor:
        """x: [1, T, hidden], prompts of these lengths one after the other; slots: [N]."""
        mixed = torch.cat(
            [
                self._convolve(part, slot, cache)
                for part, slot in zip(self.in_qkv(x)[0].split(lengths), slots, strict=True)
            ]
        ).unsqueeze(0)
        q, k, v = self._heads(mixed)
        b, a = self.in_ba(x).chunk(2, dim=-1)
        output, _ = gdn_prefill.chunk_gated_delta_rule(
            q,
            k,
            v,
            a.contiguous(),
            b.contiguous(),
            initial_state=cache.state,
            output_state=cache.state,
            state_indices=slots,
            state_v_first=True,
            cu_seqlens=F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(x.device),
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            use_beta_sigmoid_in_kernel=True,
        )
        return self._gated(output, x)

    def decode(self, x: Tensor, slots: Tensor, cache: Cache) -> Tensor:
        """The next token of every slot: x [N, 1, hidden] -> [N, 1, hidden]."""
        mixed = torch.stack(
            [
                self._convolve(token, slot, cache)
                for token, slot in zip(self.in_qkv(x), slots, strict=True)
            ]
        )
        q, k, v = (t[:, 0].float() for t in self._heads(mixed))
        q, k = (
            (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(
                self.heads_v // self.heads_q, dim=1
            )
            for t in (q, k)
        )
        b, a = self.in_ba(x)[:, 0].chunk(2, dim=-1)
        decay = (-self.A_log.exp() * F.softplus(a + self.dt_bias)).exp()
        S = decay[..., None, None] * cache.state[slots]
        error = b.sigmoid().unsqueeze(-1) * (v - torch.einsum("nhvk,nhk->nhv", S, k))
        S = S + error.unsqueeze(-1) * k.unsqueeze(-2)
        cache.state[slots] = S
        output = torch.einsum("nhvk,nhk->nhv", S, q) * HEAD_DIM**-0.5
        return self._gated(output.unsqueeze(1), x)

    def _convolve(self, part: Tensor, slot: Tensor, cache: Cache) -> Tensor:
        """Depthwise causal convolution of one sequence's next tokens, [tokens, channels]."""
        inputs = torch.cat((cache.conv[slot], part.T), dim=1)
        cache.conv[slot] = inputs[:, 1 - CONV_WIDTH :]
        filtered = F.conv1d(inputs.unsqueeze(0), self.conv.unsqueeze(1), groups=len(inputs))
        return F.silu(filtered[0].T)

    def _heads(self, mixed: Tensor) -> list[Tensor]:
        """q, k, v [N, T, heads, 128] in bf16, as the operator reads them."""
        parts = mixed.to(torch.bfloat16).split(self.widths, dim=-1)
        return [part.unflatten(-1, (-1, HEAD_DIM)) for part in parts]

    def _gated(self, output: Tensor, x: Tensor) -> Tensor:
        z = self.in_z(x).unflatten(-1, (-1, HEAD_DIM))
        normed = F.rms_norm(output.float(), (HEAD_DIM,), self.norm, eps=1e-6)
        return self.out((normed * F.silu(z)).flatten(-2))


@torch.no_grad()
def compare(lengths: list[int], new_tokens: int, device: str) -> tuple[float, float]:
    """Relative errors (outputs, states) of prefill and decoding against decoding alone."""
    torch.manual_seed(0)
    layer = GatedDeltaNet().to(device)
    prompts = [torch.randn(n + new_tokens, layer.in_z.in_features, device=device) for n in lengths]
    slots = torch.tensor([3, 0, 2], device=device)[: len(lengths)]

    cache = layer.new_cache(slots=4)
    packed = torch.cat([prompt[:n] for prompt, n in zip(prompts, lengths, strict=True)])
    prefilled = layer.prefill(packed.unsqueeze(0), lengths, slots, cache)[0].split(lengths)
    decoded = [
        layer.decode(
            torch.stack([p[n + i : n + i + 1] for p, n in zip(prompts, lengths, strict=True)]),
            slots,
            cache,
        )
        for i in range(new_tokens)
    ]
    actual = [torch.cat((first, *(step[i] for step in decoded)))
              for i, first in enumerate(prefilled)]  # fmt: skip

    expected_cache = layer.new_cache(slots=4)
    expected = [
        torch.cat([layer.decode(token.view(1, 1, -1), slot, expected_cache)[0] for token in prompt])
        for prompt, slot in zip(prompts, slots.view(-1, 1), strict=True)
    ]
    return (
        relative(torch.cat(actual), torch.cat(expected)),
        relative(cache.state[slots], expected_cache.state[slots]),
    )


def relative(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).norm() / expected.norm()).item()


def main() -> int:
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    device = "cuda" if hopper else "cpu"
    outputs, states = compare(lengths=[130, 1, 77], new_tokens=8, device=device)
    print(f"prefill then decoding against a token-by-token loop, on {device}:")
    print(f"  relative error of the outputs {outputs:.2e}, of the states {states:.2e}")
    return int(not (outputs < 1e-2 and states < 1e-2))


if __name__ == "__main__":
    sys.exit(main())
