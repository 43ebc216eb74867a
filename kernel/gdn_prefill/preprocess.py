"""Launches of the preprocessing kernels on the current stream.

api.py checks the arguments of chunk_gate_cumsum and solve_kkt. prepare_operator is stage one of the
full operator, operator.py checks its arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .runtime import RUNTIME, appearance, sm_count
from .validation import CHUNK, check_placement, check_prepare

if TYPE_CHECKING:
    from .kernels.preprocess import OperatorPreprocessConfig

HEAD_DIM = 128
ALIGNMENT = 16  # bytes between rows that TMA and 16-byte accesses can reach


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


def prepare_operator(
    k: Tensor,
    g: Tensor,
    beta: Tensor,
    A: Tensor,
    gate: Tensor,
    beta_out: Tensor,
    *,
    q: Tensor | None = None,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    gate_mode: str = "log",
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    beta_mode: str = "plain",
    cu_seqlens: Tensor | None = None,
    order: Tensor | None = None,
) -> None:
    """Stage one of the operator: fills A, gate, beta_out, given q also query_norm and key_norm, and
    given cu_seqlens order.

    k, q [B, T, Hq, 128] bf16 or fp16, contiguous or as ``strides_allowed`` says; g, beta [B, T, Hv]
    fp32, bf16 or fp16; A_log, dt_bias [Hv] fp32, with gate_mode "raw"; cu_seqlens [N + 1] int32 or
    int64 on the device, then B is 1. A of k's dtype, [B, T, Hv, 64] or, as the forward kernel reads
    it, the records [R, Hv, 10, 256] of kernels/inverse_blocks.py; gate, beta_out [B, Hv, T] and the
    norms [B, Hq, T] fp32; order [N] int32, the sequences in the order in which the forward kernel
    begins them, longer ones first. All but k and q contiguous.

    gate_mode: g is "log", the logarithm of the decay, "linear", the decay, or "raw": the logarithm
    is -exp(A_log) softplus(g + dt_bias). beta_mode: "plain", "sigmoid", "twice_sigmoid".

    The arguments are taken as checked. Compiles on first use; otherwise one launch on the current
    stream of the current device, without an allocation and without looking at any contents: a graph
    may capture it and be replayed with other contents, cu_seqlens included. Rows from cu_seqlens's
    last entry on are left alone.
    """
    from .kernels.preprocess_fused import PASS_CONFIGS, grid, operator_preprocess_kernel

    config = operator_config(
        k,
        g,
        beta,
        q=q,
        gate_mode=gate_mode,
        dt_bias=dt_bias,
        beta_mode=beta_mode,
        cu_seqlens=cu_seqlens,
        inverse="rows" if A.shape[-1] == CHUNK else "blocks",
    )
    launch = RUNTIME.kernel(operator_preprocess_kernel, config, PASS_CONFIGS)
    sequences = None if cu_seqlens is None else cu_seqlens.shape[0] - 1
    ctas = grid(config, k.shape[0], k.shape[1], sm_count(k.device), sequences)
    # the kernel has a place for every option's tensors and does not look at those it lacks
    absent = gate.view(-1)[:1]
    q, query_norm, key_norm, A_log, dt_bias, cu_seqlens, order = (
        absent if tensor is None else tensor
        for tensor in (q, query_norm, key_norm, A_log, dt_bias, cu_seqlens, order)
    )
    results = (A, gate, beta_out, query_norm, key_norm, order)
    launch(q, k, g, beta, A_log, dt_bias, cu_seqlens, *results, ctas)


def operator_config(
    k: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    q: Tensor | None = None,
    gate_mode: str = "log",
    dt_bias: Tensor | None = None,
    beta_mode: str = "plain",
    cu_seqlens: Tensor | None = None,
    inverse: str = "rows",
) -> OperatorPreprocessConfig:
    """The specialisation that serves such a call of ``prepare_operator``.

    inverse: "rows" or "blocks", how A is laid out.
    """
    return _config(
        heads_q=k.shape[2],
        heads_v=g.shape[2],
        dtype=_name(k.dtype),
        gate=gate_mode,
        gate_dtype=_name(g.dtype),
        dt_bias=dt_bias is not None,
        beta=beta_mode,
        beta_dtype=_name(beta.dtype),
        l2norm=q is not None,
        cu_seqlens=None if cu_seqlens is None else _name(cu_seqlens.dtype),
        strided=not (k.is_contiguous() and (q is None or q.is_contiguous())),
        inverse=inverse,
    )


@functools.lru_cache(maxsize=256)
def _config(**fields) -> OperatorPreprocessConfig:
    """Made and checked once: eager calls come here every time."""
    from .kernels.preprocess import OperatorPreprocessConfig

    return OperatorPreprocessConfig(**fields)


def operator_outputs(
    B: int,
    T: int,
    Hq: int,
    Hv: int,
    dtype: torch.dtype = torch.bfloat16,
    l2norm: bool = False,
    sequences: int | None = None,
    inverse: str = "rows",
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of everything that ``prepare_operator`` writes, by its parameter's name.

    sequences: of a packed batch. inverse: "rows" or "blocks", how A is laid out.
    """
    from .kernels.inverse_blocks import ELEMENTS, STORED, record_count

    rows, blocks = (B, T, Hv, CHUNK), (record_count(B, T, sequences), Hv, STORED, ELEMENTS)
    outputs = {
        "A": (rows if inverse == "rows" else blocks, dtype),
        "gate": ((B, Hv, T), torch.float32),
        "beta_out": ((B, Hv, T), torch.float32),
    }
    if sequences is not None:
        outputs["order"] = ((sequences,), torch.int32)
    if l2norm:
        outputs |= {
            "query_norm": ((B, Hq, T), torch.float32),
            "key_norm": ((B, Hq, T), torch.float32),
        }
    return outputs


def strides_allowed(x: Tensor) -> bool:
    """Can ``prepare_operator`` read this q or k [B, T, Hq, 128] as it lies?

    Contiguous, or a view of a wider projection [B, T, W]: vectors and heads side by side, rows of
    the batch T tokens apart, and every token's data aligned to 16 bytes.
    """
    if x.data_ptr() % ALIGNMENT:
        return False
    if x.is_contiguous():
        return True
    B, T, heads, _ = x.shape
    row, token, head, element = x.stride()
    return (
        element == 1
        and head == HEAD_DIM
        and T > 1  # the stride of a single token may be anything
        and token >= heads * HEAD_DIM
        and token * x.element_size() % ALIGNMENT == 0
        and (row == T * token or B == 1)
    )


def _name(dtype: torch.dtype) -> str:
    """TileLang's name of a dtype."""
    return str(dtype).removeprefix("torch.")
