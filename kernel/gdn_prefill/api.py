"""The public functions: the lab's forward entry and its preprocessing."""

from __future__ import annotations

import torch

from .dispatch import BACKENDS, check_split, choose_backend
from .runtime import RUNTIME, RuntimeInfo
from .torch_backend import cumsum_torch, forward_torch, solve_kkt_torch
from .validation import check_block_dv, check_forward, check_gate, check_prepare, check_scale


def gdn_prefill_forward(
    q,
    k,
    v,
    g_cumsum,
    beta,
    A,
    initial_state=None,
    *,
    scale=None,
    block_dv=None,
    split="auto",
    reuse_outputs=False,
    backend="auto",
):
    """Gated DeltaNet chunked prefill from a ready-made A: one CTA per state slice, or per slice and
    segment of the sequence, walks the chunks of 64 tokens.

    Args:
        q, k: [B, T, Hq, 128] bf16, L2-normalised per head by the caller.
        v: [B, T, Hv, 128] bf16; Hv must be a multiple of Hq, V head h reads q/k head h // (Hv /
            Hq).
        g_cumsum: [B, T, Hv] fp32, natural-log decay (finite, at most 0) summed inclusively within
            each chunk of 64 tokens.
        beta: [B, T, Hv] fp32.
        A: [B, T, Hv, 64] bf16, (I + strict_lower(beta_i exp(g_i - g_j) <k_i, k_j>))^-1 of every
            chunk, by rows.
        initial_state: [B, Hv, 128 (dk), 128 (dv)] fp32, or None for zeros.
        scale: factor of the output, 1/sqrt(128) by default.
        block_dv: state columns per CTA, 64 or 128; by default core_plan's choice. Ignored by
            "torch".
        split: cut each sequence into segments that run side by side, exactly: "auto" where that is
            faster (core_plan), True, False, or the number of segments (of whole chunks and equal
            length; fewer where they do not come out even). Ignored by "torch".
        reuse_outputs: write into buffers owned by the package instead of fresh ones. The returned
            tensors are then valid until the next call of the same layout on the same stream that
            reuses outputs; from the second such call with the same input addresses on, the launch
            is a CUDA Graph replay (the whole kernel runs every time).
        backend: "auto" (the Hopper kernels where they can run, else torch), "cuda" or "torch".

    Returns:
        (output [B, T, Hv, 128] bf16, final_state [B, Hv, 128, 128] fp32), fresh unless
        reuse_outputs.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape, device, layout or
            alignment, by name, before anything is launched.
    """
    if backend not in BACKENDS or reuse_outputs not in (True, False):
        _refuse_options(backend, reuse_outputs)
    if split != "auto":
        check_split(split)
    if reuse_outputs and backend != "torch" and getattr(q, "is_cuda", False):
        replayed = RUNTIME.replay(q, k, v, g_cumsum, beta, A, initial_state, scale, block_dv, split)
        if replayed is not None:
            return replayed
    if _backend(backend, q) == "cuda":
        return RUNTIME.forward(
            q, k, v, g_cumsum, beta, A, initial_state, scale, block_dv, split, reuse_outputs
        )
    check_forward(q, k, v, g_cumsum, beta, A, initial_state)
    check_block_dv(block_dv)
    return forward_torch(q, k, v, g_cumsum, beta, A, initial_state, check_scale(scale))


def chunk_gate_cumsum(g, *, backend="auto"):
    """Within-chunk inclusive cumulative sum of the log decay.

    g: [B, T, Hv] fp32, natural-log decay of every token, at most 0. Returns g_cumsum [B, T, Hv]
    fp32; the sum restarts every 64 tokens. Raises TypeError or ValueError for a wrong argument, by
    name.
    """
    check_gate(g)
    if _backend(backend, g) == "torch":
        return cumsum_torch(g)
    from . import preprocess

    return preprocess.chunk_gate_cumsum(g)


def solve_kkt(k, g_cumsum, beta, *, backend="auto"):
    """A of every chunk and V head from sums made before: see prepare, which makes both in one go.

    k: [B, T, Hq, 128] bf16; g_cumsum, beta: [B, T, Hv] fp32. Returns A [B, T, Hv, 64] bf16. Raises
    TypeError or ValueError for a wrong argument, by name.
    """
    check_prepare(k, g_cumsum, beta, gate_name="g_cumsum")
    if _backend(backend, k) == "torch":
        return solve_kkt_torch(k, g_cumsum, beta)
    from . import preprocess

    return preprocess.solve_kkt(k, g_cumsum, beta)


def prepare(k, g, beta, *, backend="auto"):
    """What the forward entry needs beside q, k, v and beta: the cumulative gate and the inverse A.

    k: [B, T, Hq, 128] bf16; g: [B, T, Hv] fp32, natural-log decay of every token;
    beta: [B, T, Hv] fp32.
    Returns (g_cumsum [B, T, Hv] fp32, A [B, T, Hv, 64] bf16), see gdn_prefill_forward. In a tail
    chunk of l tokens the columns of A from l on are 0. Raises TypeError or ValueError for a wrong
    argument, by name.
    """
    if _backend(backend, k) == "torch":
        check_prepare(k, g, beta)
        g_cumsum = cumsum_torch(g)
        return g_cumsum, solve_kkt_torch(k, g_cumsum, beta)
    from . import preprocess

    return preprocess.prepare(k, g, beta)


def cache_info() -> RuntimeInfo:
    """Counters of the runtime's caches, and the bytes that reused outputs and splits occupy."""
    return RUNTIME.info()


def clear() -> None:
    """Drop every cached kernel, buffer and graph, those of the operator's reused outputs too."""
    from .plans import drop_reused

    RUNTIME.clear()
    drop_reused()


def _refuse_options(backend, reuse_outputs) -> None:
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is not one of {', '.join(map(repr, BACKENDS))}")
    raise TypeError(f"reuse_outputs is {reuse_outputs!r}; it must be True or False")


def _backend(requested: str, tensor) -> str:
    if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
        return choose_backend(requested, "cuda", _capability(tensor.get_device()))
    return choose_backend(requested, getattr(getattr(tensor, "device", None), "type", "cpu"), None)


_CAPABILITIES: dict[int, tuple[int, int]] = {}


def _capability(device: int) -> tuple[int, int]:
    if device not in _CAPABILITIES:
        _CAPABILITIES[device] = torch.cuda.get_device_capability(device)
    return _CAPABILITIES[device]
