"""A plan for serving: shapes and options fixed once, all temporaries owned, graphs by themselves.

    plan = gdn_prefill.plan(16, 64, tokens=8192, sequences=32, output_final_state=True)
    output, final_state = plan.run(q, k, v, g, beta, cu_seqlens=cu_seqlens, initial_state=state)
    captured = plan.capture(q, k, v, g, beta, cu_seqlens=cu_seqlens, initial_state=state)
    output, final_state = captured.replay()

A warm call allocates nothing and copies nothing to the host. A plan serves one stream at a time.
A graph holds the addresses of what its launches use and keeps none of it alive: whoever holds a
graph of a plan's launches has to hold the plan.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .caches import BoundedCache
from .operator import check, implementation, run
from .operator_cuda import Specification, new_workspace, readable, run_cuda, workspaces
from .operator_results import Results
from .operator_validation import (
    Operands,
    OperatorShape,
    Options,
    check_memory,
    check_on_cpu,
    check_options,
)
from .runtime import record

# Calls of other addresses or layouts that a plan remembers with their graphs; plans that
# reuse_outputs keeps.
CALL_CAPACITY = 32
PLAN_CAPACITY = 16


@dataclass(eq=False)
class _Call:
    """A checked call at some addresses: what it fills and returns, its graph from the second on."""

    results: Results
    returned: tuple[Tensor | None, ...]
    graph: torch.cuda.CUDAGraph | None = None


@dataclass(frozen=True, eq=False)
class Captured:
    """A call recorded as a CUDA Graph. Keeps its operands and its plan alive, as every replay reads
    the operands' memory and writes to the plan's workspace.
    """

    graph: torch.cuda.CUDAGraph
    plan: Plan
    operands: Operands
    returned: tuple[Tensor | None, ...]

    def replay(self) -> tuple[Tensor | None, ...]:
        """Run the call again on what its operands hold now; returns what `Plan.run` returned."""
        self.graph.replay()
        return self.returned


class Plan:
    """Made by `gdn_prefill.plan`; owns the temporaries, and the outputs that no caller gives.

    Recorded in a graph of the caller's own, `run` still works in the plan's memory, which is free
    for others as soon as the plan is gone: keep the plan as long as that graph may be replayed.
    What `capture` returns does so by itself.
    """

    def __init__(
        self,
        shape: OperatorShape,
        options: Options,
        dtype: torch.dtype,
        device: torch.device,
        backend: str = "auto",
    ):
        self.shape, self.options, self.dtype, self.device = shape, options, dtype, device
        self._execute = implementation(backend, device)
        self.on_gpu = self._execute is run_cuda
        self.specification: Specification = (
            workspaces(shape, options, dtype, device) if self.on_gpu else {}
        )
        self.workspace = new_workspace(self.specification, device)
        self._owned: dict[str, Tensor] = {}
        self._calls = BoundedCache(CALL_CAPACITY)

    def run(
        self,
        q,
        k,
        v,
        g,
        beta,
        *,
        initial_state=None,
        cu_seqlens=None,
        A_log=None,
        dt_bias=None,
        state_indices=None,
        output=None,
        output_state=None,
        state_checkpoints=None,
        checkpoint_cu_starts=None,
    ) -> tuple[Tensor | None, ...]:
        """chunk_gated_delta_rule with the plan's shapes and options, into buffers it owns where
        none are given: those results are valid until the next call.

        Tensors of the same layout and addresses are checked once; their second call is captured
        and from then on the call is a graph replay, which computes everything again. Raises
        TypeError or ValueError for a wrong argument, or one that would have to be copied first.
        """
        x = Operands(
            q,
            k,
            v,
            g,
            beta,
            initial_state,
            cu_seqlens,
            A_log,
            dt_bias,
            state_indices,
            output,
            output_state,
            state_checkpoints,
            checkpoint_cu_starts,
        )
        return self.run_operands(x)

    def run_operands(self, x: Operands) -> tuple[Tensor | None, ...]:
        """`run` with the tensors in one tuple."""
        try:
            key = _identity(x)
        except AttributeError:  # something that is no tensor: the check names it
            check(x, self.options)
            raise
        call = self._calls.get(key)
        if call is not None and self.on_gpu and not is_capturing(self.device):
            if call.graph is None:
                call.graph = record(self.device, lambda: self._launch(x, call))
            call.graph.replay()
            return call.returned
        if call is None:
            call = self._calls.put(key, self._admit(x))
        elif self.device.type == "cpu":
            check_on_cpu(x, self.options, self.shape)
        self._launch(x, call)
        return call.returned

    def capture(self, *operands, **named) -> Captured:
        """Make the call once, with the arguments of `run`, and record it as a graph to replay.

        A state that is updated in place has therefore been updated once already.
        """
        if not self.on_gpu:
            raise ValueError(f"only a plan on a Hopper GPU can be captured, not on {self.device}")
        x = Operands(*operands, **named)
        self.run_operands(x)
        call = self._calls.peek(_identity(x))
        graph = record(self.device, lambda: self._launch(x, call))
        return Captured(graph, self, x, call.returned)

    @property
    def workspace_bytes(self) -> int:
        """Device memory of the temporaries."""
        return sum(t.numel() * t.element_size() for t in self.workspace.values())

    @property
    def bytes_per_token(self) -> dict[str, float]:
        """Workspace bytes per token of every temporary, by name."""
        tokens = self.shape.B * self.shape.T
        return {name: t.numel() * t.element_size() / tokens for name, t in self.workspace.items()}

    def __str__(self) -> str:
        s = self.shape
        sequences = f"{s.N} packed sequences, " if s.packed else ""
        parts = "".join(
            f"\n  {name:<12} {size:10.1f}" for name, size in self.bytes_per_token.items()
        )
        return (
            f"plan of [{s.B}, {s.T}] tokens, {sequences}{s.Hq}/{s.Hv} heads on {self.device}: "
            f"{self.workspace_bytes} bytes of workspace, {sum(self.bytes_per_token.values()):.1f} "
            f"a token{parts}"
        )

    def _admit(self, x: Operands) -> _Call:
        shape = check(x, self.options)
        if shape != self.shape:
            raise ValueError(f"the tensors are of {shape}; the plan is for {self.shape}")
        if (x.q.dtype, x.q.device) != (self.dtype, self.device):
            raise ValueError(
                f"q is {x.q.dtype} on {x.q.device}; the plan is for {self.dtype} on {self.device}"
            )
        for name, tensor, read in zip(Operands._fields, x, readable(x), strict=True):
            if tensor is not read:
                raise ValueError(
                    f"{name} with dtype {tensor.dtype} and strides {tensor.stride()} would have to "
                    "be copied, and a plan does not copy; pass it contiguous, A_log and dt_bias "
                    "as torch.float32"
                )
        results = self._results(x)
        check_memory(x, results.output, results.final_state, results.states)
        return _Call(results, results.returned(self.options))

    def _results(self, x: Operands) -> Results:
        output, final_state, states = x.output, x.output_state, x.state_checkpoints
        if output is None:
            output = self._own("output", self.shape.output, self.dtype)
        if final_state is None and self.options.final_state:
            final_state = self._own("final_state", self.shape.final_state, self.options.state_dtype)
        if self.options.output_h:
            states = self._own("h", self.shape.h, self.options.state_dtype)
        return Results(output, final_state, states)

    def _own(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if name not in self._owned:
            self._owned[name] = torch.empty(shape, dtype=dtype, device=self.device)
        return self._owned[name]

    def _launch(self, x: Operands, call: _Call) -> None:
        if self.on_gpu:
            run_cuda(x, call.results, self.options, self.shape, self.workspace)
        else:
            self._execute(x, call.results, self.options, self.shape)


def plan(
    heads_q: int,
    heads_v: int,
    tokens: int,
    *,
    batch: int = 1,
    sequences: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    backend: str = "auto",
    **settings,
) -> Plan:
    """A plan for calls of these sizes.

    heads_q, heads_v: Hq and Hv. tokens: T, of the packed row all sequences together, with any
    cu_seqlens up to it. batch: B. sequences: N of packed calls; None for dense ones. dtype: of q, k
    and v, bf16 or fp16. device: the current GPU where there is one, else the CPU. settings: options
    of chunk_gated_delta_rule that are no tensors, by their names there. Raises TypeError or
    ValueError for a wrong argument.
    """
    for name, value in (
        ("heads_q", heads_q),
        ("heads_v", heads_v),
        ("tokens", tokens),
        ("batch", batch),
        ("sequences", 1 if sequences is None else sequences),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} is {value!r}; it must be an integer of at least 1")
    if heads_v % heads_q:
        raise ValueError(f"heads_v={heads_v} must be a multiple of heads_q={heads_q}")
    if sequences is not None and batch != 1:
        raise ValueError(f"batch={batch} with sequences={sequences}; packed sequences have batch 1")
    if dtype not in (torch.bfloat16, torch.float16):
        raise TypeError(f"dtype is {dtype!r}; it must be torch.bfloat16 or torch.float16")
    unknown = [name for name in settings if name not in check_options.__kwdefaults__]
    if unknown:
        raise TypeError(
            f"plan has no option {unknown[0]!r}; beside its sizes it takes "
            f"{', '.join(check_options.__kwdefaults__)}"
        )
    options = check_options(**settings)
    device = _placed(device)
    packed = sequences is not None
    shape = OperatorShape(batch, tokens, heads_q, heads_v, sequences or batch, packed)
    return Plan(shape, options, dtype, device, backend)


def _placed(device: torch.device | str | None) -> torch.device:
    """The device of a plan, a GPU with its index. Raises TypeError or ValueError for no device."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
    except (TypeError, RuntimeError):
        refusal = ValueError if isinstance(device, str) else TypeError
        raise refusal(
            f"device is {device!r}; it must be a torch.device or a name such as 'cuda:0' or 'cpu'"
        ) from None
    if found.type != "cuda":
        return found
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (found.index or 0) >= count:
        allowed = " or ".join(["cpu", *(f"cuda:{index}" for index in range(count))])
        raise ValueError(f"device is {found}; torch sees {count} GPUs here, it must be {allowed}")
    return found if found.index is not None else torch.device("cuda", torch.cuda.current_device())


_REUSED = BoundedCache(PLAN_CAPACITY)


def drop_reused() -> None:
    """Forget the plans of calls into reused outputs, with their buffers and graphs."""
    _REUSED.clear()


def run_reusing(x: Operands, options: Options, backend: str) -> tuple[Tensor | None, ...]:
    """A call into reused outputs: through a plan of its layout, stream and options.

    While the caller records a graph it is a call with fresh results instead, in that graph's
    memory: the plans kept here come and go, and the graph may outlive them.
    """
    try:
        key = (
            options,
            backend,
            x.q.device,
            x.q.dtype,
            x.q.shape,
            x.v.shape,
            None if x.cu_seqlens is None else x.cu_seqlens.shape,
            torch.cuda.current_stream(x.q.device) if x.q.is_cuda else None,
        )
    except AttributeError:  # something that is no tensor: the check names it
        check(x, options)
        raise
    if is_capturing(x.q.device):
        return run(x, options, backend).returned(options)
    reused = _REUSED.get(key)
    if reused is None:
        shape = check(x, options)
        reused = _REUSED.put(key, Plan(shape, options, x.q.dtype, x.q.device, backend))
    return reused.run_operands(x)


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream is recording a graph of the caller's."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _identity(x: Operands) -> tuple:
    """All that a call's checks and its graph depend on."""
    return (
        torch.is_grad_enabled() and any([t is not None and t.requires_grad for t in x]),
        tuple([None if t is None else (t.data_ptr(), t.shape, t.dtype, t.stride()) for t in x]),
    )
