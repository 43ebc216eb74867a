"""The call layer of the Hopper kernels: argument checks paid once per layout, and four bounded
caches.

* layouts: shapes, dtypes, device and options of a call -> its checked description, its plan and
  its compiled kernels
* kernels: the specialisation (heads, tile, states) -> the compiled kernel; batch and length are
  run-time arguments
* buffers: layout and stream -> what a split over time needs between its launches and, only for
  callers that ask to reuse outputs, output and final state
* graphs:  stream, layout and addresses -> a CUDA Graph of the launches, captured on the second such
  call

A replay runs the whole core again on whatever the inputs hold now; no result is ever kept.
Nothing here touches a GPU at import.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .caches import BoundedCache, CacheInfo
from .core import SHIPPED, Core, core_kernels
from .dispatch import core_plan
from .lowering import lowering
from .split import CorePlan, Workspace
from .validation import (
    FORWARD_ARGUMENTS,
    ForwardShape,
    check_block_dv,
    check_forward,
    check_placement,
    check_scale,
)

INPUTS = len(FORWARD_ARGUMENTS) - 1  # the last, the initial state, may be absent


@dataclass(frozen=True, eq=False)
class Layout:
    """A checked call layout: the shape, what launches it and the arguments that never change."""

    shape: ForwardShape
    device: torch.device
    scale: float
    core: Core
    workspaces: Mapping[str, Workspace]
    absent_state: torch.Tensor


@dataclass(frozen=True, eq=False)
class Buffers:
    """Device memory of the package: (output, final state) or nothing, and temporaries by name."""

    outputs: tuple[torch.Tensor, ...]
    temporaries: Mapping[str, torch.Tensor]

    @property
    def output_bytes(self) -> int:
        return _bytes(self.outputs)

    @property
    def workspace_bytes(self) -> int:
        return _bytes(self.temporaries.values())


def _bytes(tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@dataclass(eq=False)
class GraphEntry:
    """A launch seen once (graph is None) or captured; keeps its buffers alive, never its inputs."""

    buffers: Buffers
    graph: torch.cuda.CUDAGraph | None = None

    def drop(self) -> None:
        self.graph = None


@dataclass(frozen=True, eq=False)
class _Recent:
    """The graph that served some tensor objects, and where they were."""

    entry: GraphEntry
    addresses: tuple[int, ...]
    alive: tuple[weakref.ref, ...]  # forget this when one of the tensors dies


@dataclass(frozen=True)
class RuntimeInfo:
    """Counters of the caches.

    compiles: kernels built; buffer_bytes: what reused outputs occupy; workspace_bytes: what splits
    over time keep between calls.
    """

    layouts: CacheInfo
    kernels: CacheInfo
    buffers: CacheInfo
    graphs: CacheInfo
    compiles: int
    captures: int
    replays: int
    buffer_bytes: int
    workspace_bytes: int


@dataclass(eq=False)
class Runtime:
    """One process's caches. Capacities bound the host memory and the reused device buffers.

    forward_kernel: which of core.FORWARD_KERNELS is launched.
    """

    forward_kernel: str = SHIPPED
    layout_capacity: int = 256
    kernel_capacity: int = 128
    buffer_capacity: int = 16
    graph_capacity: int = 64
    compiles: int = 0
    captures: int = 0
    replays: int = 0
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        self.layouts = BoundedCache(self.layout_capacity)
        self.kernels = BoundedCache(self.kernel_capacity)
        self.graphs = BoundedCache(self.graph_capacity, on_evict=GraphEntry.drop)
        self._recent: dict[tuple, _Recent] = {}
        self.buffers = BoundedCache(self.buffer_capacity, on_evict=self._drop_graphs_of)

    def forward(
        self, q, k, v, g_cumsum, beta, A, initial_state, scale, block_dv, split, reuse_outputs
    ):
        """Run the core on the current stream; gdn_prefill_forward describes the arguments."""
        tensors = _present(q, k, v, g_cumsum, beta, A, initial_state)
        device = q.get_device()
        try:
            look = appearance(tensors, scale, block_dv, split)
        except AttributeError:  # something that is no tensor: the check names it
            check_forward(*tensors)
            raise
        layout = self.layouts.get((device, look))
        if layout is None:
            layout = self._check_layout(tensors, scale, block_dv, split)
            self.layouts.put((device, look), layout)
        check_placement(FORWARD_ARGUMENTS, tensors)
        with torch.cuda.device(device):
            if not (reuse_outputs or layout.workspaces):
                return self._launch(layout, tensors, Buffers(_empty_outputs(layout), {}))
            if torch._C._cuda_isCurrentStreamCapturing():
                # Memory of the caller's graph: what is cached here may go while that graph lives.
                return self._launch(layout, tensors, _empty_buffers(layout))
            stream = torch._C._cuda_getCurrentRawStream(device)
            # A call with fresh outputs has temporaries of its own: a replay by another thread,
            # which takes no lock, may come between its launches.
            place = (device, stream, look, reuse_outputs)
            with self._lock:
                buffers = self.buffers.get(place)
                if buffers is None:
                    buffers = self.buffers.put(place, _empty_buffers(layout, reuse_outputs))
                if not reuse_outputs:
                    fresh = Buffers(_empty_outputs(layout), buffers.temporaries)
                    return self._launch(layout, tensors, fresh)
                key = (stream, look, addresses(tensors))
                entry = self.graphs.peek(key)  # replay() has looked before, and counted
                if entry is None:
                    self.graphs.put(key, GraphEntry(buffers))
                    return self._launch(layout, tensors, buffers)
                entry.graph = record(layout.device, lambda: self._launch(layout, tensors, buffers))
                self.captures += 1
                entry.graph.replay()
                self.replays += 1
                return buffers.outputs

    def replay(self, q, k, v, g_cumsum, beta, A, initial_state, scale, block_dv, split):
        """Replay the graph captured for exactly these arguments on this stream, or return None.

        The warm path of a call with reused outputs. Everything that was checked is in the graph's
        key; making the key takes longer than launching, so a graph that served these very tensor
        objects at these addresses is launched first and its key compared while it runs. Should a
        tensor have changed its shape in place meanwhile, that launch has written into the reused
        outputs only, and the call goes on as a new one.
        """
        stream = torch._C._cuda_getCurrentRawStream(q.get_device())
        if torch._C._cuda_isCurrentStreamCapturing():
            return None
        identity = (
            stream, id(q), id(k), id(v), id(g_cumsum), id(beta), id(A), id(initial_state),
            scale, block_dv, split,
        )  # fmt: skip
        tensors = _present(q, k, v, g_cumsum, beta, A, initial_state)
        try:
            places = addresses(tensors)
            guess = self._recent.get(identity)
            guessed = guess is not None and guess.addresses == places and guess.entry.graph
            if guessed:
                guess.entry.graph.replay()
            entry = self.graphs.get((stream, appearance(tensors, scale, block_dv, split), places))
        except AttributeError:  # something that is no tensor: forward's check names it
            return None
        if entry is None or entry.graph is None:
            return None
        if not guessed or guess.entry is not entry:
            entry.graph.replay()
            self._remember(identity, tensors, places, entry)
        self.replays += 1
        return entry.buffers.outputs

    def _remember(self, identity, tensors, places, entry) -> None:
        """Note which graph serves these tensor objects, for as long as all of them live."""
        recent = self._recent

        def forget(_, identity=identity) -> None:
            recent.pop(identity, None)

        with self._lock:
            while len(recent) >= self.graph_capacity:
                recent.pop(next(iter(recent)), None)
            recent[identity] = _Recent(
                entry, places, tuple([weakref.ref(tensor, forget) for tensor in tensors])
            )

    @staticmethod
    def _launch(layout, tensors, buffers) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, states = tensors[:INPUTS], tensors[INPUTS:]
        initial_state = states[0] if states else layout.absent_state
        layout.core(inputs, initial_state, *buffers.outputs, layout.scale, buffers.temporaries)
        return buffers.outputs

    def _check_layout(self, tensors, scale, block_dv, split) -> Layout:
        shape = check_forward(*tensors)
        check_block_dv(block_dv)
        factor = check_scale(scale)
        device = tensors[0].device
        plan = core_plan(
            shape.B, shape.T, shape.Hq, shape.Hv, sm_count(device), block_dv=block_dv, split=split
        )
        return Layout(
            shape,
            device,
            factor,
            self.core(plan, shape.Hq, shape.Hv, len(tensors) > INPUTS),
            plan.workspaces(shape.B, shape.Hv),
            torch.empty(1, dtype=torch.float32, device=device),
        )

    def core(self, plan: CorePlan, heads_q: int, heads_v: int, use_initial_state: bool) -> Core:
        """The plan with its kernels, compiled on first use."""
        kernels = core_kernels(plan, heads_q, heads_v, use_initial_state, self.forward_kernel)
        return Core(
            plan,
            {
                name: self.kernel(kernel.factory, kernel.config, kernel.pass_configs)
                for name, kernel in kernels.items()
            },
        )

    def kernel(self, factory, config, pass_configs) -> Any:
        """The launcher of factory(config), a PrimFunc; compiled on first use."""
        with self._lock:
            launch = self.kernels.get((factory, config))
            if launch is None:
                launch = compile_launcher(factory(config), pass_configs)
                self.compiles += 1
                self.kernels.put((factory, config), launch)
        return launch

    def _drop_graphs_of(self, buffers: Buffers) -> None:
        self.graphs.discard_if(lambda entry: entry.buffers is buffers)

    def clear(self) -> None:
        """Drop every kernel, buffer and graph, and zero the counters."""
        with self._lock:
            self._recent.clear()
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
            sum(buffers.output_bytes for buffers in self.buffers.values()),
            sum(buffers.workspace_bytes for buffers in self.buffers.values()),
        )


def _present(*tensors):
    """The arguments without the last, the initial state, where it is None."""
    return tensors[:-1] if tensors[-1] is None else tensors


def appearance(tensors, *options) -> tuple:
    """What a call looks like from outside, but for contents and addresses."""
    return (
        tuple([t.shape for t in tensors]),
        tuple([t.dtype for t in tensors]),
        tuple([t.is_contiguous() for t in tensors]),
        torch.is_grad_enabled() and any([t.requires_grad for t in tensors]),
        options,
    )


def addresses(tensors) -> tuple[int, ...]:
    """Device addresses; they tell devices apart too, as all of them share one address space."""
    return tuple([t.data_ptr() for t in tensors])


@functools.cache
def sm_count(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def _empty_outputs(layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    shape = layout.shape
    return (
        torch.empty(shape.output, dtype=torch.bfloat16, device=layout.device),
        torch.empty(shape.state, dtype=torch.float32, device=layout.device),
    )


def _empty_buffers(layout: Layout, with_outputs: bool = True) -> Buffers:
    temporaries = {
        name: torch.empty(item.shape, dtype=getattr(torch, item.dtype), device=layout.device)
        for name, item in layout.workspaces.items()
    }
    return Buffers(_empty_outputs(layout) if with_outputs else (), temporaries)


def record(device: torch.device | None, launch: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """The launches of a call as a graph; they do not run. device: None for the current one."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream(device)):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            launch()
        finally:
            graph.capture_end()
    return graph


def compile_launcher(prim_func, pass_configs):
    """Compile a PrimFunc for Hopper; returns what launches it on torch's current stream."""
    import tilelang

    with lowering(pass_configs) as configs:
        kernel = tilelang.compile(
            prim_func, target={"kind": "cuda", "arch": "sm_90a"}, pass_configs=configs
        )
    # The compiled entry itself: the adapter around it re-derives shapes on every call, 3.6 us more
    # on an H200 host. From the compile cache it is a loaded module, newly built it has to be
    # linked.
    executable = kernel.adapter.get_exportable_executable()
    if isinstance(executable, tilelang.tvm.runtime.Executable):
        executable = executable.jit()
    return executable.main


RUNTIME = Runtime()
