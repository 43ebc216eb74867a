"""Launches of the preprocessing kernels on the current stream. Arguments are checked by api.py."""

import torch
from torch import Tensor

from .runtime import RUNTIME, sm_count
from .validation import CHUNK


def chunk_gate_cumsum(g: Tensor) -> Tensor:
    """g [B, T, Hv] fp32 -> g_cumsum [B, T, Hv] fp32, fresh."""
    from .kernels.preprocess import PASS_CONFIGS, PreprocessConfig, cumsum_kernel

    heads = g.shape[2]
    launch = RUNTIME.kernel(cumsum_kernel, PreprocessConfig(heads, heads), PASS_CONFIGS)
    with torch.cuda.device(g.device):
        g_cumsum = torch.empty_like(g)
        launch(g, g_cumsum)
    return g_cumsum


def solve_kkt(k: Tensor, g_cumsum: Tensor, beta: Tensor) -> Tensor:
    """k [B, T, Hq, 128] bf16, g_cumsum and beta [B, T, Hv] fp32 -> A [B, T, Hv, 64] bf16, fresh."""
    from .kernels.preprocess import PASS_CONFIGS, PreprocessConfig, kkt_inverse_kernel

    config = PreprocessConfig(k.shape[2], beta.shape[2])
    launch = RUNTIME.kernel(kkt_inverse_kernel, config, PASS_CONFIGS)
    with torch.cuda.device(k.device):
        A = torch.empty((*beta.shape, CHUNK), dtype=torch.bfloat16, device=k.device)
        launch(k, g_cumsum, beta, A)
    return A


def prepare(k: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Both of the above from the raw gate g in one launch: (g_cumsum, A), fresh."""
    from .kernels.preprocess import PreprocessConfig
    from .kernels.preprocess_fused import PASS_CONFIGS, fused_preprocess_kernel, grid

    batch, tokens, heads_v = g.shape
    config = PreprocessConfig(k.shape[2], heads_v)
    launch = RUNTIME.kernel(fused_preprocess_kernel, config, PASS_CONFIGS)
    with torch.cuda.device(k.device):
        g_cumsum = torch.empty_like(g)
        A = torch.empty((*g.shape, CHUNK), dtype=torch.bfloat16, device=k.device)
        launch(k, g, beta, g_cumsum, A, grid(config, batch, tokens, sm_count(k.device)))
    return g_cumsum, A
