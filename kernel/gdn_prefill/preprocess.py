"""Launches of the preprocessing kernels on the current stream.

api.py checks the arguments of chunk_gate_cumsum and solve_kkt.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .runtime import RUNTIME, appearance, sm_count
from .validation import CHUNK, check_placement, check_prepare


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


class PrepareLayout(NamedTuple):
    """A checked layout of prepare's arguments: the compiled kernel and the CTAs to launch."""

    launch: Callable
    ctas: int


def prepare(k: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Both of the above from the raw gate g in one launch: (g_cumsum, A), fresh.

    Checks its arguments itself, once for every layout.
    """
    tensors, device = (k, g, beta), k.get_device()
    try:
        key = ("prepare", device, appearance(tensors, None, None))
    except AttributeError:  # something that is no tensor: the check names it
        check_prepare(*tensors)
        raise
    layout = RUNTIME.layouts.get(key) or RUNTIME.layouts.put(key, _prepare_layout(*tensors))
    check_placement(("k", "g", "beta"), tensors)
    with torch.cuda.device(device):
        g_cumsum = torch.empty_like(g)
        A = torch.empty((*g.shape, CHUNK), dtype=torch.bfloat16, device=k.device)
        layout.launch(k, g, beta, g_cumsum, A, layout.ctas)
    return g_cumsum, A


def _prepare_layout(k: Tensor, g: Tensor, beta: Tensor) -> PrepareLayout:
    from .kernels.preprocess import PreprocessConfig
    from .kernels.preprocess_fused import PASS_CONFIGS, fused_preprocess_kernel, grid

    shape = check_prepare(k, g, beta)
    config = PreprocessConfig(shape.Hq, shape.Hv)
    return PrepareLayout(
        RUNTIME.kernel(fused_preprocess_kernel, config, PASS_CONFIGS),
        grid(config, shape.B, shape.T, sm_count(k.device)),
    )
