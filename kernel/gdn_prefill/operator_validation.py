"""Checks of the operator's options and tensors, from what the host knows.

Nothing here waits for the device: on a GPU the contents of cu_seqlens, state_indices and
checkpoint_cu_starts are the caller's promise, on the CPU they are checked too. Every refusal names
the argument, says what it was and what is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .validation import CHUNK, HEAD_DIM, MAX_STATES, MAX_TOKENS, check_address, check_scale

OPERAND_DTYPES = (torch.bfloat16, torch.float16)
GATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PARAMETER_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INDEX_DTYPES = (torch.int32, torch.int64)
GATES = ("log", "linear")
RAW_GATE = "raw"
# What the forward kernel describes by tensor maps or reads by wide loads.
ALIGNED = ("q", "k", "v", "initial_state", "output", "output_state", "state_checkpoints")


class Operands(NamedTuple):
    """The tensors of a call by the names of the public function; None where absent."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial_state: Tensor | None = None
    cu_seqlens: Tensor | None = None
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    state_indices: Tensor | None = None
    output: Tensor | None = None
    output_state: Tensor | None = None
    state_checkpoints: Tensor | None = None
    checkpoint_cu_starts: Tensor | None = None


@dataclass(frozen=True)
class Options:
    """What a call asks for beside its tensors.

    gate: "log", "linear" or "raw". scale: factor of the output. final_state: whether it is wanted.
    state_dtype: of the final state and of h where no buffer says it. checkpoint_every: tokens
    between checkpoints, 0 for none.
    """

    gate: str = "log"
    use_qk_l2norm: bool = False
    use_beta_sigmoid: bool = False
    allow_neg_eigval: bool = False
    scale: float = HEAD_DIM**-0.5
    final_state: bool = False
    state_v_first: bool = False
    state_dtype: torch.dtype = torch.float32
    output_h: bool = False
    checkpoint_every: int = 0
    batch_invariant: bool = False

    @property
    def states_every(self) -> int:
        """Tokens between the states that are kept: a chunk for h, 0 for none."""
        return CHUNK if self.output_h else self.checkpoint_every


@dataclass(frozen=True)
class OperatorShape:
    """Sizes of a checked call: B rows of T tokens that hold N sequences; N == B unless packed."""

    B: int
    T: int
    Hq: int
    Hv: int
    N: int
    packed: bool

    @property
    def output(self) -> tuple[int, ...]:
        return (self.B, self.T, self.Hv, HEAD_DIM)

    @property
    def final_state(self) -> tuple[int, ...]:
        """Shape of a final state that belongs to no pool; dk and dv are equal."""
        return (self.N, self.Hv, HEAD_DIM, HEAD_DIM)

    @property
    def h(self) -> tuple[int, ...]:
        """Shape of the per-chunk states; packed, what N sequences of T tokens need at most."""
        chunks = (self.T + (CHUNK - 1) * self.N) // CHUNK if self.packed else -(-self.T // CHUNK)
        return (self.B, chunks, self.Hv, HEAD_DIM, HEAD_DIM)


def check_options(
    *,
    scale: float | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    state_v_first: bool = False,
    gate: str = "log",
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    output_h: bool = False,
    checkpoint_every_n_tokens: int = 0,
    state_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
) -> Options:
    """The options under the public function's names, checked by themselves."""
    flags = {
        "output_final_state": output_final_state,
        "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
        "state_v_first": state_v_first,
        "use_gate_in_kernel": use_gate_in_kernel,
        "use_beta_sigmoid_in_kernel": use_beta_sigmoid_in_kernel,
        "allow_neg_eigval": allow_neg_eigval,
        "output_h": output_h,
        "batch_invariant": batch_invariant,
    }
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} is {value!r}; it must be True or False")
    if gate not in GATES:
        raise ValueError(f"gate={gate!r} is not one of {', '.join(map(repr, GATES))}")
    if use_gate_in_kernel and gate != "log":
        raise ValueError(
            f"gate={gate!r} with use_gate_in_kernel=True: a raw gate becomes a log decay, "
            "leave gate at 'log'"
        )
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise ValueError(
            "allow_neg_eigval=True needs use_beta_sigmoid_in_kernel=True: it doubles the sigmoid"
        )
    every = checkpoint_every_n_tokens
    if not isinstance(every, int) or isinstance(every, bool):
        raise TypeError(f"checkpoint_every_n_tokens is {every!r}; it must be an integer")
    if every < 0 or every % CHUNK:
        raise ValueError(
            f"checkpoint_every_n_tokens={every}; it must be 0 or a multiple of {CHUNK}"
        )
    if every and output_h:
        raise ValueError(
            f"output_h=True with checkpoint_every_n_tokens={every}: a call keeps one set of states"
        )
    if state_dtype is not None and state_dtype not in STATE_DTYPES:
        raise TypeError(f"state_dtype is {state_dtype!r}; it must be {_either(STATE_DTYPES)}")
    return Options(
        RAW_GATE if use_gate_in_kernel else gate,
        use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
        check_scale(scale),
        output_final_state,
        state_v_first,
        state_dtype or torch.float32,
        output_h,
        every,
        batch_invariant,
    )


def refuse_unsupported(unsupported: dict[str, Any]) -> None:
    """Raises for FLA's and FlashQLA's options that this operator does not have, if they ask for
    anything; those that only spare others a synchronisation are accepted and not needed.
    """
    for name, value in unsupported.items():
        if name in ("cu_seqlens_cpu", "chunk_indices", "chunk_offsets"):
            continue
        if name == "transpose_state_layout":
            raise TypeError("transpose_state_layout was renamed; pass state_v_first")
        if name == "chunk_size":
            if value not in (None, CHUNK):
                raise ValueError(f"chunk_size={value!r}; only {CHUNK} is supported")
        elif name == "head_first":
            if value:
                raise ValueError("head_first=True; inputs must be [B, T, H, ...]")
        elif name == "cp_context":
            if value is not None:
                raise ValueError("cp_context is given; context parallelism is not supported")
        else:
            raise TypeError(f"chunk_gated_delta_rule has no argument {name!r}")


def refuse_grad(x: Operands) -> None:
    """Raises where autograd would expect a backward of this call."""
    if not torch.is_grad_enabled():
        return
    for name, tensor in zip(Operands._fields, x, strict=True):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            raise ValueError(
                f"{name} requires grad, and there is no backward; call under torch.no_grad(), or "
                f"pass {name}.detach()"
            )


def check_operands(x: Operands, options: Options) -> OperatorShape:
    """Checks every tensor of a call and returns its sizes; see docs/api.md for what is allowed."""
    for name, tensor in zip(Operands._fields, x, strict=True):
        if tensor is not None:
            _check_plain(name, tensor)
        elif name in ("q", "k", "v", "g", "beta"):
            raise TypeError(f"{name} is None; it must be a torch.Tensor")
    refuse_grad(x)
    shape = _check_sequences(x)
    gates = (shape.B, shape.T, shape.Hv)
    _check("g", x.g, gates, "[B, T, Hv]", GATE_DTYPES)
    _check("beta", x.beta, gates, "[B, T, Hv]", GATE_DTYPES)
    _check_gate_parameters(x, options, shape)
    _check_states(x, options, shape)
    _check_kept_states(x, options, shape)
    if x.output is not None:
        _check("output", x.output, shape.output, "[B, T, Hv, 128]", (x.v.dtype,))
        _check_contiguous("output", x.output)
    _check_placement(x)
    return shape


def check_on_cpu(x: Operands, options: Options, shape: OperatorShape) -> None:
    """Checks the contents of the index tensors; only for tensors that the host holds."""
    bounds = [n * shape.T for n in range(shape.N + 1)]
    if x.cu_seqlens is not None:
        bounds = x.cu_seqlens.tolist()
        falling = any(a > b for a, b in zip(bounds, bounds[1:], strict=False))
        if bounds[0] != 0 or falling or bounds[-1] > shape.T:
            raise ValueError(
                f"cu_seqlens is {_short(bounds)}; it must start with 0, never fall and end at "
                f"T={shape.T} or before"
            )
    if x.state_indices is not None:
        _check_slots(x, x.state_indices.tolist())
    if x.checkpoint_cu_starts is not None:
        starts, rows = x.checkpoint_cu_starts.tolist(), x.state_checkpoints.shape[0]
        for n, start in enumerate(starts[:-1]):
            end = start + (bounds[n + 1] - bounds[n]) // options.checkpoint_every
            if not 0 <= start <= end <= min(starts[n + 1], rows):
                raise ValueError(
                    f"checkpoint_cu_starts is {_short(starts)}: sequence {n} needs rows {start} to "
                    f"{end} of state_checkpoints' {rows}, before those of the next"
                )


def _check_sequences(x: Operands) -> OperatorShape:
    for name, tensor in (("q", x.q), ("k", x.k), ("v", x.v)):
        if tensor.dim() != 4 or tensor.shape[-1] != HEAD_DIM:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; it must be [B, T, heads, {HEAD_DIM}]"
            )
    B, T, Hq, _ = x.q.shape
    Hv = x.v.shape[2]
    for size, value in (("B", B), ("T", T), ("Hq", Hq), ("Hv", Hv)):
        if value < 1:
            raise ValueError(f"q is {tuple(x.q.shape)}, v {tuple(x.v.shape)}: {size} must be >= 1")
    _check("q", x.q, (B, T, Hq, HEAD_DIM), "[B, T, Hq, 128]", OPERAND_DTYPES)
    _check("k", x.k, (B, T, Hq, HEAD_DIM), "the shape of q", (x.q.dtype,))
    _check("v", x.v, (B, T, Hv, HEAD_DIM), "[B, T, Hv, 128]", (x.q.dtype,))
    if Hv % Hq:
        raise ValueError(f"Hv={Hv} value heads with Hq={Hq}: Hv must be a multiple of Hq")
    N = B
    if x.cu_seqlens is not None:
        if x.cu_seqlens.dim() != 1 or x.cu_seqlens.shape[0] < 2:
            raise ValueError(
                f"cu_seqlens has shape {tuple(x.cu_seqlens.shape)}; it must be [N + 1] with N >= 1"
            )
        if B != 1:
            raise ValueError(f"cu_seqlens with B={B}; packed sequences lie in one row, B=1")
        N = x.cu_seqlens.shape[0] - 1
        _check("cu_seqlens", x.cu_seqlens, (N + 1,), "[N + 1]", INDEX_DTYPES)
        _check_contiguous("cu_seqlens", x.cu_seqlens)
    if B * T > MAX_TOKENS:
        raise ValueError(f"B*T={B * T} tokens; at most {MAX_TOKENS} are supported")
    if N * Hv > MAX_STATES:
        raise ValueError(f"N*Hv={N * Hv} states; at most {MAX_STATES} are supported")
    return OperatorShape(B, T, Hq, Hv, N, x.cu_seqlens is not None)


def _check_gate_parameters(x: Operands, options: Options, shape: OperatorShape) -> None:
    raw = options.gate == RAW_GATE
    if raw and x.A_log is None:
        raise ValueError("A_log is None; use_gate_in_kernel=True needs it")
    for name, tensor in (("A_log", x.A_log), ("dt_bias", x.dt_bias)):
        if tensor is None:
            continue
        if not raw:
            raise ValueError(f"{name} is given, and only use_gate_in_kernel=True reads it")
        _check(name, tensor, (shape.Hv,), "[Hv]", PARAMETER_DTYPES)
        _check_contiguous(name, tensor)


def _check_states(x: Operands, options: Options, shape: OperatorShape) -> None:
    pooled = x.state_indices is not None
    if pooled:
        _check("state_indices", x.state_indices, (shape.N,), "[N]", INDEX_DTYPES)
        _check_contiguous("state_indices", x.state_indices)
        if x.initial_state is None and x.output_state is None:
            raise ValueError(
                "state_indices without initial_state or output_state: there is no pool to index"
            )
    for name, tensor in (("initial_state", x.initial_state), ("output_state", x.output_state)):
        if tensor is None:
            continue
        rows = tensor.shape[0] if pooled and tensor.dim() == 4 else shape.N
        layout = "V, K" if options.state_v_first else "K, V"
        _check(
            name,
            tensor,
            (rows, *shape.final_state[1:]),
            f"[{'slots' if pooled else 'N'}, Hv, {layout}]",
            STATE_DTYPES,
        )
        _check_rows(name, tensor)


def _check_kept_states(x: Operands, options: Options, shape: OperatorShape) -> None:
    buffer, starts = x.state_checkpoints, x.checkpoint_cu_starts
    if not options.checkpoint_every:
        for name, tensor in (("state_checkpoints", buffer), ("checkpoint_cu_starts", starts)):
            if tensor is not None:
                raise ValueError(f"{name} is given, and checkpoint_every_n_tokens is 0")
        return
    if buffer is None:
        raise ValueError(
            "state_checkpoints is None; checkpoint_every_n_tokens needs the buffer to fill"
        )
    rows = buffer.shape[0] if buffer.dim() == 4 else 0
    _check(
        "state_checkpoints",
        buffer,
        (rows, *shape.final_state[1:]),
        "[rows, Hv, ...] as the final state's",
        STATE_DTYPES,
    )
    _check_contiguous("state_checkpoints", buffer)
    if starts is not None:
        _check("checkpoint_cu_starts", starts, (shape.N + 1,), "[N + 1]", INDEX_DTYPES)
        _check_contiguous("checkpoint_cu_starts", starts)
    elif shape.packed:
        raise ValueError(
            "checkpoint_cu_starts is None; packed sequences need the row of each one's first state"
        )
    elif rows < shape.B * (shape.T // options.checkpoint_every):
        raise ValueError(
            f"state_checkpoints has {rows} rows; {shape.B} sequences of {shape.T} tokens need "
            f"{shape.B * (shape.T // options.checkpoint_every)}"
        )


def _check_placement(x: Operands) -> None:
    device = x.q.device
    for name, tensor in zip(Operands._fields, x, strict=True):
        if tensor is None:
            continue
        if tensor.device != device:
            raise ValueError(
                f"{name} is on {tensor.device}, q on {device}; all tensors must be on one device"
            )
        if not _has_no_address(tensor) and tensor.is_cuda and name in ALIGNED:
            check_address(name, tensor.data_ptr())
    check_memory(x, x.output, x.output_state, x.state_checkpoints)


def check_memory(
    x: Operands, output: Tensor | None, output_state: Tensor | None, states: Tensor | None
) -> None:
    """Refuses results in memory that is read meanwhile, or in each other's."""
    reads = {"q": x.q, "k": x.k, "v": x.v, "initial_state": x.initial_state}
    writes = {"output": output, "output_state": output_state, "state_checkpoints": states}
    writes = {name: t for name, t in writes.items() if t is not None and not _has_no_address(t)}
    for name, tensor in writes.items():
        for other, read in reads.items():
            if read is None or _has_no_address(read) or not _overlap(tensor, read):
                continue
            # A state may be updated in place: every sequence reads its own before it writes.
            if (name, other) != ("output_state", "initial_state"):
                raise ValueError(f"{name} is the memory of {other}, which is read meanwhile")
            if (tensor.data_ptr(), tensor.dtype, tensor.stride()) != (
                read.data_ptr(),
                read.dtype,
                read.stride(),
            ):
                raise ValueError(
                    "output_state is the memory of initial_state with another start, dtype or "
                    "strides; to update in place pass the same tensor"
                )
        for other, written in writes.items():
            if written is not tensor and _overlap(tensor, written):
                raise ValueError(f"{name} is the memory of {other}, which is written meanwhile")


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors share memory. Of two with gaps, such as rows of one pool, only those
    that start at the same address are known to.
    """
    if one.data_ptr() == other.data_ptr():
        return one.numel() > 0 and other.numel() > 0
    if not (one.is_contiguous() or other.is_contiguous()):
        return False
    (begin, end), (start, stop) = _span(one), _span(other)
    return begin < stop and start < end


def _span(tensor: Tensor) -> tuple[int, int]:
    """Addresses of a tensor's first byte and of the one past its last."""
    begin = tensor.data_ptr()
    if not tensor.numel():
        return begin, begin
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    return begin, begin + (last + 1) * tensor.element_size()


def _check_slots(x: Operands, slots: list[int]) -> None:
    pools = [pool for pool in (x.initial_state, x.output_state) if pool is not None]
    rows = min(pool.shape[0] for pool in pools)
    used = [slot for slot in slots if slot >= 0]
    if any(not -1 <= slot < rows for slot in slots):
        raise ValueError(
            f"state_indices is {_short(slots)}; it must be slots of 0 to {rows - 1}, or -1"
        )
    if x.output_state is not None and len(set(used)) < len(used):
        raise ValueError(f"state_indices is {_short(slots)}; a slot is written by two sequences")


def _has_no_address(tensor: Tensor) -> bool:
    """Fake and meta tensors have no memory to look at."""
    return tensor.device.type == "meta" or type(tensor) not in (Tensor, torch.nn.Parameter)


def _check_plain(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}; it must be a torch.Tensor")
    if value.layout != torch.strided:
        raise ValueError(f"{name} has layout {value.layout}; it must be dense (torch.strided)")


def _check(
    name: str,
    tensor: Tensor,
    expected: tuple[int, ...],
    meaning: str,
    dtypes: Sequence[torch.dtype],
) -> None:
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} has dtype {tensor.dtype}; it must be {_either(dtypes)}")
    if tuple(tensor.shape) != expected:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}; it must be {expected}, {meaning}"
        )


def _check_contiguous(name: str, tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        raise ValueError(
            f"{name} is not contiguous: shape {tuple(tensor.shape)}, strides {tensor.stride()}"
        )


def _check_rows(name: str, tensor: Tensor) -> None:
    """A state or pool: each row contiguous, rows apart by any multiple of 16 bytes."""
    row = math.prod(tensor.shape[1:])
    apart = tensor.stride(0) if tensor.shape[0] > 1 else row
    aligned = apart * tensor.element_size() % 16 == 0
    if tensor.shape[0] and not (tensor[0].is_contiguous() and apart >= row and aligned):
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}, strides {tensor.stride()}; every row must be "
            f"contiguous, rows {row} or more elements apart, by multiples of 16 bytes"
        )


def _either(choices: Sequence[object]) -> str:
    return " or ".join(map(str, choices))


def _short(values: list[int], shown: int = 8) -> str:
    return str(values) if len(values) <= shown else f"{values[:shown]} (of {len(values)})"
