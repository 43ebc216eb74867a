"""The call layer of the Hopper kernels: argument checks paid once per layout, and four bounded caches.

* layouts: shapes, dtypes, device and options of a call -> its checked description and its compiled kernel
* kernels: the specialisation (heads, tile, states) -> the compiled kernel; batch and length are run-time arguments
* buffers: layout and stream -> output and final state, only for callers that ask to reuse outputs
* graphs:  layout, stream and addresses -> a CUDA Graph of the launch, captured on the second such call

A replay runs the whole kernel again on whatever the inputs hold now; no result is ever kept. Nothing here touches a GPU
at import.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from .caches import BoundedCache, CacheInfo
from .dispatch import select_block_dv
from .validation import ForwardShape, check_forward

TMA_ALIGNMENT = 16  # bytes; a tensor map's base address


class LayoutKey(NamedTuple):
    """What a call looks like from outside, the contents and addresses of its tensors left out."""

    shapes: tuple
    dtypes: tuple
    contiguous: tuple
    device: int
    scale: float | None
    block_dv: int | None


@dataclass(frozen=True, eq=False)
class Layout:
    """A checked call layout: the shape, the launcher of its specialisation and the arguments that never change."""

    shape: ForwardShape
    device: torch.device
    scale: float
    launch: Any
    absent_state: torch.Tensor


@dataclass(frozen=True, eq=False)
class OutputBuffers:
    output: torch.Tensor
    final_state: torch.Tensor

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.output, self.final_state))


@dataclass(eq=False)
class GraphEntry:
    """A launch seen once (graph is None) or captured; keeps its output buffers alive, never its inputs."""

    buffers: OutputBuffers
    graph: torch.cuda.CUDAGraph | None = None


@dataclass(frozen=True)
class RuntimeInfo:
    """Counters of the runtime's caches; compiles counts kernels built, buffer_bytes what reused outputs occupy."""

    layouts: CacheInfo
    kernels: CacheInfo
    buffers: CacheInfo
    graphs: CacheInfo
    compiles: int
    captures: int
    replays: int
    buffer_bytes: int


@dataclass(eq=False)
class Runtime:
    """One process's caches. Capacities bound the host memory and the reused device buffers."""

    layout_capacity: int = 256
    kernel_capacity: int = 64
    buffer_capacity: int = 16
    graph_capacity: int = 64
    compiles: int = 0
    captures: int = 0
    replays: int = 0
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        self.layouts = BoundedCache(self.layout_capacity)
        self.kernels = BoundedCache(self.kernel_capacity)
        self.graphs = BoundedCache(self.graph_capacity)
        self.buffers = BoundedCache(self.buffer_capacity, on_evict=self._drop_graphs_of)

    def forward(self, q, k, v, g_cumsum, beta, A, initial_state, scale, block_dv, reuse_outputs):
        """Run the forward kernel on the current stream; see gdn_prefill.gdn_prefill_forward for the arguments."""
        tensors = (q, k, v, g_cumsum, beta, A) if initial_state is None else (q, k, v, g_cumsum, beta, A, initial_state)
        try:
            key = LayoutKey(
                tuple([t.shape for t in tensors]),
                tuple([t.dtype for t in tensors]),
                tuple([t.is_contiguous() for t in tensors]),
                q.get_device(),
                scale,
                block_dv,
            )
            addresses = tuple([t.data_ptr() for t in tensors])
            layout = self.layouts.get(key)
        except (AttributeError, TypeError):  # not tensors: the check below names the argument
            layout = None
        if layout is None:
            layout = self._check_layout(tensors, scale, block_dv)
            self.layouts.put(key, layout)
        device = key.device
        stream = torch._C._cuda_getCurrentRawStream(device)
        reuse_graph = reuse_outputs and not torch.cuda.is_current_stream_capturing()
        entry = self.graphs.get((key, stream, addresses)) if reuse_graph else None
        if entry is not None and entry.graph is not None:
            self.replays += 1
            entry.graph.replay()
            return entry.buffers.output, entry.buffers.final_state
        for name, tensor, address in zip(_NAMES, tensors, addresses, strict=False):
            if address % TMA_ALIGNMENT or tensor.get_device() != device:
                _refuse_placement(name, tensor, device)
        with torch.cuda.device(device):
            if not reuse_outputs:
                return self._launch(layout, tensors, _empty_outputs(layout))
            with self._lock:
                buffers = self.buffers.get((key, stream))
                if buffers is None:
                    buffers = self.buffers.put((key, stream), _empty_outputs(layout))
                if entry is None:
                    if reuse_graph:
                        self.graphs.put((key, stream, addresses), GraphEntry(buffers))
                    return self._launch(layout, tensors, buffers)
                entry.graph = self._capture(layout, tensors, buffers)
                self.replays += 1
                entry.graph.replay()
                return buffers.output, buffers.final_state

    def _capture(self, layout, tensors, buffers) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(torch.cuda.Stream(layout.device)):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self._launch(layout, tensors, buffers)
            finally:
                graph.capture_end()
        self.captures += 1
        return graph

    @staticmethod
    def _launch(layout, tensors, buffers) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = tensors if len(tensors) == len(_NAMES) else (*tensors, layout.absent_state)
        layout.launch(*inputs, buffers.output, buffers.final_state, layout.scale)
        return buffers.output, buffers.final_state

    def _check_layout(self, tensors, scale, block_dv) -> Layout:
        initial_state = tensors[6] if len(tensors) == len(_NAMES) else None
        shape = check_forward(*tensors[:6], initial_state)
        device = tensors[0].device
        with self._lock:
            config = self.forward_config(shape, initial_state is not None, block_dv)
            launch = self.kernel(config)
        return Layout(
            shape,
            device,
            shape.head_dim**-0.5 if scale is None else float(scale),
            launch,
            torch.empty(1, dtype=torch.float32, device=device),
        )

    @staticmethod
    def forward_config(shape: ForwardShape, use_initial_state: bool, block_dv: int | None):
        """The specialisation of the forward kernel that serves a shape."""
        from .kernels.forward import ForwardConfig

        tile = select_block_dv(shape.heads_v, shape.heads_q) if block_dv is None else block_dv
        return ForwardConfig(shape.heads_q, shape.heads_v, tile, use_initial_state)

    def kernel(self, config) -> Any:
        """The compiled launcher of a specialisation, built on first use."""
        launch = self.kernels.get(config)
        if launch is None:
            from .kernels import forward

            launch = compile_launcher(forward.forward_kernel(config), forward.PASS_CONFIGS)
            self.compiles += 1
            self.kernels.put(config, launch)
        return launch

    def _drop_graphs_of(self, buffers: OutputBuffers) -> None:
        self.graphs.discard_if(lambda entry: entry.buffers is buffers)

    def clear(self) -> None:
        """Drop every kernel, buffer and graph, and zero the counters."""
        with self._lock:
            for cache in (self.graphs, self.buffers, self.layouts, self.kernels):
                cache.clear()
            self.compiles = self.captures = self.replays = 0

    def info(self) -> RuntimeInfo:
        return RuntimeInfo(
            self.layouts.info(),
            self.kernels.info(),
            self.buffers.info(),
            self.graphs.info(),
            self.compiles,
            self.captures,
            self.replays,
            sum(buffers.bytes for buffers in self.buffers.values()),
        )


_NAMES = ("q", "k", "v", "g_cumsum", "beta", "A", "initial_state")


def _empty_outputs(layout: Layout) -> OutputBuffers:
    shape = layout.shape
    return OutputBuffers(
        torch.empty(shape.output, dtype=torch.bfloat16, device=layout.device),
        torch.empty(shape.state, dtype=torch.float32, device=layout.device),
    )


def _refuse_placement(name: str, tensor: torch.Tensor, device: int) -> None:
    if tensor.get_device() != device:
        raise ValueError(f"{name} is on {tensor.device}, q on cuda:{device}: all tensors must be on one device")
    raise ValueError(
        f"{name} starts at address {tensor.data_ptr():#x}, which must be a multiple of {TMA_ALIGNMENT} bytes"
    )


def compile_launcher(prim_func, pass_configs):
    """Compile a PrimFunc for Hopper and return the callable that launches it on torch's current stream."""
    import tilelang

    kernel = tilelang.compile(prim_func, target={"kind": "cuda", "arch": "sm_90a"}, pass_configs=pass_configs)
    # The compiled entry itself: the adapter around it re-derives shapes on every call, 3.6 us more on an H200 host.
    return kernel.adapter.get_exportable_executable().jit().main


RUNTIME = Runtime()
