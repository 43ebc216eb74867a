"""Argument checks, done before anything is launched or allocated.

Every refusal names the argument, says what it was and what is allowed: TypeError for something that
is no tensor or has another dtype, ValueError for shape, device, layout, address and size. Nothing
is converted or copied: a non-contiguous input is refused, not repaired.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

HEAD_DIM = 128
CHUNK = 64
BLOCK_DV = (64, 128)
TMA_ALIGNMENT = 16  # bytes; a tensor map's base address
FORWARD_ARGUMENTS = ("q", "k", "v", "g_cumsum", "beta", "A", "initial_state")
# Read by TMA or wide loads; the gate and beta are read element by element.
ALIGNED = frozenset(("q", "k", "v", "A", "initial_state"))
INT32_MAX = 2**31 - 1
# Token indices are 32-bit and the last chunk's may run past T.
MAX_TOKENS = INT32_MAX - CHUNK
# A grid's x extent is 32-bit and the narrowest tile of any kernel, 32 columns, makes four CTAs of a
# state.
MAX_STATES = INT32_MAX // (HEAD_DIM // 32)


@dataclass(frozen=True)
class ForwardShape:
    """Sizes of a checked call: B sequences of T tokens, Hq query/key heads, Hv value heads."""

    B: int
    T: int
    Hq: int
    Hv: int

    @property
    def heads_q(self) -> int:
        return self.Hq

    @property
    def heads_v(self) -> int:
        return self.Hv

    @property
    def head_dim(self) -> int:
        return HEAD_DIM

    @property
    def output(self) -> tuple[int, int, int, int]:
        """Shape of the output."""
        return (self.B, self.T, self.Hv, HEAD_DIM)

    @property
    def state(self) -> tuple[int, int, int, int]:
        """Shape of the initial and of the final state."""
        return (self.B, self.Hv, HEAD_DIM, HEAD_DIM)


def check_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g_cumsum: Tensor,
    beta: Tensor,
    A: Tensor,
    initial_state: Tensor | None = None,
) -> ForwardShape:
    """Checks the arguments of the forward function and returns their sizes.

    q, k [B, T, Hq, 128], v [B, T, Hv, 128], A [B, T, Hv, 64] bf16; g_cumsum, beta [B, T, Hv] and
    initial_state [B, Hv, 128, 128] fp32 (None: no state). All contiguous, on one device, T >= 1,
    Hv a multiple of Hq; those that a tensor map describes start at a multiple of 16 bytes.
    """
    bf16, fp32 = torch.bfloat16, torch.float32
    _check_tensor("q", q, bf16)
    B, T, Hq = _sizes("q", q, ("B", "T", "Hq", HEAD_DIM))
    _check_tensor("k", k, bf16)
    _check_shape("k", k, (B, T, Hq, HEAD_DIM), "the shape of q")
    _check_tensor("v", v, bf16)
    (Hv,) = _sizes("v", v, (B, T, "Hv", HEAD_DIM))
    shape = _checked_shape(B, T, Hq, Hv)
    _check_tensor("g_cumsum", g_cumsum, fp32)
    _check_shape("g_cumsum", g_cumsum, (B, T, Hv), "[B, T, Hv]")
    _check_tensor("beta", beta, fp32)
    _check_shape("beta", beta, (B, T, Hv), "[B, T, Hv]")
    _check_tensor("A", A, bf16)
    _check_shape("A", A, (B, T, Hv, CHUNK), f"[B, T, Hv, {CHUNK}]")
    tensors = [q, k, v, g_cumsum, beta, A]
    if initial_state is not None:
        _check_tensor("initial_state", initial_state, fp32)
        _check_shape("initial_state", initial_state, shape.state, "[B, Hv, dk, dv]")
        tensors.append(initial_state)
    check_placement(FORWARD_ARGUMENTS, tensors)
    return shape


def check_prepare(k: Tensor, g: Tensor, beta: Tensor, gate_name: str = "g") -> ForwardShape:
    """Checks the arguments of the preprocessing and returns their sizes.

    k [B, T, Hq, 128] bf16; g (log decay, raw or summed), beta [B, T, Hv] fp32; the rest as in
    check_forward. gate_name: what the caller calls its gate.
    """
    _check_tensor("k", k, torch.bfloat16)
    B, T, Hq = _sizes("k", k, ("B", "T", "Hq", HEAD_DIM))
    _check_tensor(gate_name, g, torch.float32)
    (Hv,) = _sizes(gate_name, g, (B, T, "Hv"))
    shape = _checked_shape(B, T, Hq, Hv)
    _check_tensor("beta", beta, torch.float32)
    _check_shape("beta", beta, (B, T, Hv), f"the shape of {gate_name}")
    check_placement(("k", gate_name, "beta"), (k, g, beta))
    return shape


def check_gate(g: Tensor) -> None:
    """Checks the argument of the gate cumsum alone: g [B, T, Hv] fp32, contiguous, T >= 1."""
    _check_tensor("g", g, torch.float32)
    B, T, Hv = _sizes("g", g, ("B", "T", "Hv"))
    _checked_shape(B, T, Hv, Hv)


def check_scale(scale: float | None) -> float:
    """The factor of the output: 1/sqrt(128) for None, otherwise any finite number."""
    if scale is None:
        return HEAD_DIM**-0.5
    if not isinstance(scale, Real) or isinstance(scale, bool):
        raise TypeError(f"scale is a {type(scale).__name__}; it must be a number or None")
    try:
        factor = float(scale)
    except OverflowError:
        factor = math.inf
    if not math.isfinite(factor):
        raise ValueError(f"scale is {scale}; it must be finite in double precision")
    return factor


def check_block_dv(block_dv: int | None) -> None:
    """The state columns of one CTA: one of BLOCK_DV, or None for the package's choice."""
    if block_dv is not None and (type(block_dv) is not int or block_dv not in BLOCK_DV):
        raise ValueError(
            f"block_dv is {block_dv!r}; it must be one of {', '.join(map(str, BLOCK_DV))}, or None"
        )


def check_address(name: str, address: int) -> None:
    """Refuses a start address (bytes) that a tensor map cannot have."""
    if address % TMA_ALIGNMENT:
        raise ValueError(
            f"{name} starts at address {address:#x}; it must be a multiple of {TMA_ALIGNMENT} bytes"
        )


def check_placement(names: Sequence[str], tensors: Sequence[Tensor]) -> None:
    """One device for all; on a GPU, addresses aligned where they must be.

    What is left to check of a layout that is known already. names may go on past the tensors.
    """
    device = tensors[0].device
    for name, tensor in zip(names, tensors, strict=False):
        if tensor.device != device:
            raise ValueError(
                f"{name} is on {tensor.device}, {names[0]} on {device}; "
                "all tensors must be on one device"
            )
        if name in ALIGNED and tensor.is_cuda:
            check_address(name, tensor.data_ptr())


def _check_tensor(name: str, value: object, dtype: torch.dtype) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}; it must be a torch.Tensor")
    if value.dtype != dtype:
        raise TypeError(f"{name} has dtype {value.dtype}; it must be {dtype}")
    if value.layout != torch.strided:
        raise ValueError(f"{name} has layout {value.layout}; it must be dense (torch.strided)")
    if value.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name} requires grad, and there is no backward; call under torch.no_grad(), or pass "
            f"{name}.detach()"
        )
    if not value.is_contiguous():
        raise ValueError(
            f"{name} is not contiguous: shape {tuple(value.shape)}, strides {value.stride()}; "
            f"it must be, pass {name}.contiguous()"
        )


def _sizes(name: str, tensor: Tensor, pattern: Sequence[str | int]) -> list[int]:
    """The sizes of the named dimensions of `pattern`; its integers must match exactly."""
    shape = tuple(tensor.shape)
    wanted = ", ".join(map(str, pattern))
    if len(shape) != len(pattern) or any(
        isinstance(want, int) and have != want for have, want in zip(shape, pattern, strict=True)
    ):
        raise ValueError(f"{name} has shape {shape}; it must be [{wanted}]")
    sizes = {want: have for have, want in zip(shape, pattern, strict=True) if isinstance(want, str)}
    for dimension, size in sizes.items():
        if size < 1:
            raise ValueError(
                f"{name} has shape {shape}, so {dimension}={size}; every size of [{wanted}] "
                "must be at least 1"
            )
    return list(sizes.values())


def _check_shape(name: str, tensor: Tensor, expected: tuple[int, ...], meaning: str) -> None:
    if tuple(tensor.shape) != expected:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}; it must be {expected}, {meaning}"
        )


def _checked_shape(B: int, T: int, Hq: int, Hv: int) -> ForwardShape:
    if Hv % Hq:
        raise ValueError(f"Hv={Hv} value heads with Hq={Hq}: Hv must be a multiple of Hq")
    if T > MAX_TOKENS:
        raise ValueError(f"T={T} tokens; at most {MAX_TOKENS} are supported")
    if B * Hv > MAX_STATES:
        raise ValueError(f"B*Hv={B * Hv} states; at most {MAX_STATES} are supported")
    return ForwardShape(B, T, Hq, Hv)
