"""The call layer on a machine without a GPU: launches, graphs and streams are stand-ins."""

import contextlib
import gc

import pytest
import torch

from cases import Case, make_inputs
from gdn_ladder.cached import CachedForward
from gdn_ladder.families import FOUR_GROUP
from gdn_prefill import api, prepare, preprocess, runtime
from gdn_prefill.core import SHIPPED, core_kernels
from gdn_prefill.dispatch import core_plan
from gdn_prefill.kernels import preprocess_fused, resident
from gdn_prefill.kernels.preprocess import PreprocessConfig
from gdn_prefill.runtime import Runtime
from gdn_prefill.torch_backend import forward_torch

CASE = Case("small", 1, 130, 1, 2, True, "mixed", 5e-3, 5e-3)
OPENED, SUMMARISED, SCANNED = 3.0, 7.0, 1.0


class Device:
    """What the runtime sees of CUDA: the stream, whether it captures, and the launches.

    launches: how many kernels have run. order: the launches of a split, by name.
    """

    def __init__(self):
        self.stream, self.capturing = 0, False
        self.launches, self.recording = 0, None
        self.order = []

    def compiled(self, prim_func, _):
        """The stand-in for a kernel, told by the name of its PrimFunc."""
        name = str(prim_func.attrs["global_symbol"])
        parts = {"gdn_summary": self.summary, "gdn_scan": self.scan}
        return parts.get(name, self.segments if "segment" in name else self.forward)

    def run(self, name, kernel):
        def launch():
            self.launches += 1
            kernel()

        self.order.append(name)
        if self.recording is None:
            launch()
        else:
            self.recording.append(launch)

    def forward(self, *tensors_and_scale):
        *tensors, scale = tensors_and_scale
        # A launch knows addresses and sizes, not the tensor objects.
        q, k, v, g, beta, A, initial_state, output, final_state = [x.detach() for x in tensors]

        def kernel():
            state = initial_state if initial_state.ndim == 4 else None
            results = forward_torch(q, k, v, g, beta, A, state, scale)
            output.copy_(results[0])
            final_state.copy_(results[1])

        self.run("forward", kernel)

    # Of a split: the first launch leaves OPENED at its segment's end, the summary SUMMARISED at
    # those of the middle ones, and a scan that finds these adds SCANNED to the latter. The last
    # launch is wrong where it finds anything else.
    def summary(self, *arguments):
        states = arguments[5].detach()
        self.run("summary", lambda: states[1:].fill_(SUMMARISED))

    def scan(self, states, *_):
        states = states.detach()

        def kernel():
            right = (states[0] == OPENED).all() and (states[1:] == SUMMARISED).all()
            states[1:].add_(SCANNED if right else float("nan"))

        self.run("scan", kernel)

    def segments(self, *arguments):
        *tensors, scale, length, begin, count, beside = arguments
        q, k, v, g, beta, A, initial_state, states, output, final_state = [
            x.detach() for x in tensors
        ]
        segments = len(states) + 1
        tokens = slice(begin * length * 64, (begin + count) * length * 64)

        def kernel():
            state = initial_state if initial_state.ndim == 4 else None
            results = forward_torch(q, k, v, g, beta, A, state, scale)
            output[:, tokens] = results[0][:, tokens]
            if begin + count == segments:
                final_state.copy_(results[1])
            if begin == 0:
                states[0] = OPENED
            elif not (
                (states[:begin] == OPENED).all() and (states[begin:] == SUMMARISED + SCANNED).all()
            ):
                output.fill_(float("nan"))

        # Only what comes right after a summary may run beside it.
        assert bool(beside) == (self.order[-1:] == ["summary"])
        self.run("rest" if begin else "first", kernel)


class Graph:
    """A CUDA Graph that replays the launches made while it recorded."""

    device: Device

    def __init__(self):
        self.launches = []

    def capture_begin(self, capture_error_mode):
        self.device.recording = []

    def capture_end(self):
        self.launches, self.device.recording = self.device.recording, None

    def replay(self):
        for launch in self.launches:
            launch()


@pytest.fixture
def device(monkeypatch):
    device = Device()
    monkeypatch.setattr(Graph, "device", device, raising=False)
    monkeypatch.setattr(runtime, "compile_launcher", device.compiled)
    monkeypatch.setattr(runtime, "sm_count", lambda _: 132)
    for name, stand_in in {
        "device": lambda _: contextlib.nullcontext(),
        "stream": lambda _: contextlib.nullcontext(),
        "Stream": lambda _: None,
        "CUDAGraph": Graph,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    for name, stand_in in {
        "_cuda_getCurrentRawStream": lambda _: device.stream,
        "_cuda_isCurrentStreamCapturing": lambda: device.capturing,
    }.items():
        monkeypatch.setattr(torch._C, name, stand_in, raising=False)
    return device


def arguments(case=CASE, seed=42):
    inputs = make_inputs(case, seed=seed)
    g_cumsum, A = prepare(inputs.k, inputs.g, inputs.beta)
    return [inputs.q, inputs.k, inputs.v, g_cumsum, inputs.beta, A, inputs.initial_state]


def call(layer, tensors, reuse=True, scale=None, block_dv=None, split="auto"):
    """As gdn_prefill_forward calls the layer."""
    if reuse:
        replayed = layer.replay(*tensors, scale, block_dv, split)
        if replayed is not None:
            return replayed
    return layer.forward(*tensors, scale, block_dv, split, reuse)


def assert_right(result, tensors):
    expected = forward_torch(*tensors, 128**-0.5)
    assert torch.equal(result[0], expected[0]) and torch.equal(result[1], expected[1])


def test_the_second_call_captures_and_the_later_ones_replay(device):
    layer, tensors = Runtime(), arguments()
    seen = []
    for _ in range(4):
        result = call(layer, tensors)
        info = layer.info()
        seen.append((device.launches, info.captures, info.replays))
        assert_right(result, tensors)
        for buffer in result:
            buffer.fill_(float("nan"))
    assert seen == [(1, 0, 0), (2, 1, 1), (3, 1, 2), (4, 1, 3)]
    assert info.compiles == 1 and info.buffers.size == 1 and info.buffer_bytes > 0


def test_a_call_without_a_state_and_fresh_outputs(device):
    layer, tensors = Runtime(), [*arguments()[:6], None]
    results = [call(layer, tensors, reuse=False) for _ in range(2)]
    assert results[0][0].data_ptr() != results[1][0].data_ptr()
    assert_right(results[1], tensors)
    assert layer.info().graphs.size == layer.info().buffers.size == 0


def test_new_contents_are_computed_and_new_addresses_launched(device):
    layer, tensors = Runtime(), arguments()
    for _ in range(3):
        call(layer, tensors)
    for held, new in zip(tensors, arguments(seed=7), strict=True):
        held.copy_(new)
    assert_right(call(layer, tensors), tensors)
    assert layer.info().captures == 1
    other = [tensor.clone() for tensor in tensors]
    assert_right(call(layer, other), other)
    assert layer.info().graphs.size == 2


def test_a_tensor_reshaped_in_place_is_another_call(device):
    layer, tensors = Runtime(), arguments()
    for _ in range(4):
        call(layer, tensors)
    tensors[4].resize_(1, 64, 2)
    with pytest.raises(ValueError, match="beta has shape"):
        call(layer, tensors)
    for tensor in tensors[:6]:
        tensor.resize_(1, 64, *tensor.shape[2:])
    result = call(layer, tensors)
    assert result[0].shape[1] == 64
    assert_right(result, tensors)


def test_a_tensor_moved_in_place_is_not_read_where_it_was(device):
    layer, tensors = Runtime(), arguments()
    for _ in range(4):
        call(layer, tensors)
    launches = device.launches
    tensors[2].data = tensors[2].clone() * 2
    assert_right(call(layer, tensors), tensors)
    assert device.launches == launches + 1


def test_an_evicted_graph_is_kept_by_nobody(device):
    layer, kept = Runtime(graph_capacity=2), [arguments(seed=seed) for seed in range(3)]
    for tensors in kept[:2]:
        for _ in range(3):
            call(layer, tensors)
    call(layer, kept[2])
    assert layer.info().graphs.evictions == 1
    graphs = [recent.entry.graph for recent in layer._recent.values()]
    assert len(graphs) == 2 and graphs.count(None) == 1
    assert_right(call(layer, kept[0]), kept[0])


def test_calls_are_forgotten_with_their_tensors(device):
    layer, tensors = Runtime(), arguments()
    for _ in range(4):
        call(layer, tensors)
    assert len(layer._recent) == 1
    del tensors
    gc.collect()
    assert not layer._recent


def test_streams_and_options_have_entries_of_their_own(device):
    layer, tensors = Runtime(), arguments()
    first = [call(layer, tensors) for _ in range(3)][-1]
    device.stream = 7
    assert call(layer, tensors)[0].data_ptr() != first[0].data_ptr()
    device.stream = 0
    assert call(layer, tensors, block_dv=128)[0].data_ptr() != first[0].data_ptr()
    doubled = call(layer, tensors, scale=2 * 128**-0.5)[0]
    torch.testing.assert_close(doubled.float(), 2 * first[0].float())
    assert layer.info().compiles == 2


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("split", [False, 3])
def test_under_a_callers_capture_nothing_is_captured_or_replayed(device, reuse, split):
    """Nor is anything of the caches in the caller's graph, which may outlive their entries."""
    layer, tensors = Runtime(), arguments()
    for _ in range(3):
        call(layer, tensors, reuse, split=split)
    before = layer.info()
    cached = {
        x.data_ptr()
        for buffers in layer.buffers.values()
        for x in (*buffers.outputs, *buffers.temporaries.values())
    }
    seen = spy_on_arguments(layer)
    device.capturing = True
    assert_right(call(layer, tensors, reuse, split=split), tensors)
    after = layer.info()
    assert (after.captures, after.replays) == (before.captures, before.replays)
    assert after.buffers.size == before.buffers.size
    assert seen and not cached & {x.data_ptr() for x in seen if isinstance(x, torch.Tensor)}


def spy_on_arguments(layer) -> list:
    """What the launches of layouts that are known already are given from now on."""
    seen = []

    def spied(launch):
        return lambda *arguments: (seen.extend(arguments), launch(*arguments))

    for layout in layer.layouts.values():
        for name, launch in layout.core.launchers.items():
            layout.core.launchers[name] = spied(launch)
    return seen


@pytest.mark.parametrize(("split", "each", "kernels"), [(2, 2, 1), (3, 4, 3), (True, 4, 3)])
def test_a_split_is_captured_and_replayed_as_one(device, split, each, kernels):
    layer, tensors = Runtime(), arguments()
    seen = []
    for _ in range(4):
        result = call(layer, tensors, split=split)
        assert_right(result, tensors)
        seen.append((device.launches, layer.info().captures, layer.info().replays))
        result[0].fill_(float("nan"))
    assert seen == [(each, 0, 0), (2 * each, 1, 1), (3 * each, 1, 2), (4 * each, 1, 3)]
    info, plan = layer.info(), core_plan(1, 130, 1, 2, 132, split=split)
    assert info.compiles == kernels and info.workspace_bytes == plan.workspace_bytes(1, 2)
    assert info.buffer_bytes == result[0].nbytes + result[1].nbytes


@pytest.mark.parametrize(("split", "order"), [(2, "first rest"), (3, "summary first scan rest")])
def test_the_first_segment_follows_the_summary(device, split, order):
    call(Runtime(), arguments(), reuse=False, split=split)
    assert device.order == order.split()


def test_fresh_outputs_of_a_split_share_its_temporaries(device, monkeypatch):
    layer, tensors = Runtime(), arguments()
    kept = [call(layer, tensors, reuse=False, split=3)]
    plan = core_plan(1, 130, 1, 2, 132, split=3)
    assert layer.info().workspace_bytes == plan.workspace_bytes(1, 2)
    made, empty = [], torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: made.append(a) or empty(*a, **k))
    kept += [call(layer, tensors, reuse=False, split=3) for _ in range(2)]
    assert len(made) == 4  # two outputs a call
    assert len({result[0].data_ptr() for result in kept}) == 3
    for result in kept:
        assert_right(result, tensors)
    assert layer.info().buffers.size == 1 and layer.info().buffer_bytes == 0


def test_calls_with_and_without_fresh_outputs_share_no_temporaries(device):
    """A replay takes no lock: it may come between the launches of a call on the same stream."""
    layer, tensors = Runtime(), arguments()
    for _ in range(3):
        call(layer, tensors, split=3)
    original = device.scan

    def interrupted(*arguments):
        assert layer.replay(*tensors, None, None, 3) is not None
        original(*arguments)

    layer.kernels.clear()
    layer.layouts.clear()
    device.scan = interrupted
    tensors_again = [tensor.clone() for tensor in tensors]
    assert_right(call(layer, tensors_again, reuse=False, split=3), tensors_again)


def test_splits_have_entries_of_their_own(device):
    layer, tensors = Runtime(), arguments()
    places = set()
    for split in ("auto", False, True, 2, 3):
        for _ in range(3):
            result = call(layer, tensors, split=split)
        places.add(result[0].data_ptr())
    assert len(places) == layer.info().graphs.size == 5


def test_the_shipped_kernel_is_named_once_and_another_can_be_served(device):
    tensors = arguments()
    for layer, factory in (
        (Runtime(), resident.resident_kernel),
        (CachedForward(), FOUR_GROUP.build),
    ):
        assert_right(call(layer, tensors, split=False, reuse=False), tensors)
        assert [built for built, _ in layer.kernels._entries] == [factory]
    (kernel,) = core_kernels(core_plan(1, 130, 1, 2, 132), 1, 2, True).values()
    assert SHIPPED == "resident" == kernel.name.split("_")[0]


@pytest.mark.parametrize("split", [1, 0, -2, "never", 2.5, None])
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_the_entry_refuses_a_split_that_cannot_be(split, backend):
    with pytest.raises((TypeError, ValueError), match=f"split is {split!r}"):
        api.gdn_prefill_forward(*arguments(), split=split, backend=backend)


def test_the_portable_implementation_ignores_a_split():
    tensors = arguments()
    assert_right(api.gdn_prefill_forward(*tensors, split=3), tensors)


def test_evicted_buffers_take_their_graphs_along(device):
    layer = Runtime(buffer_capacity=2)
    kept = []
    for tokens in (64, 65, 66):
        tensors = arguments(Case("small", 1, tokens, 1, 2, True, "mixed", 5e-3, 5e-3))
        kept.append(tensors)
        for _ in range(3):
            call(layer, tensors)
    info = layer.info()
    assert info.buffers.size == 2 and info.graphs.size == 2
    assert_right(call(layer, kept[0]), kept[0])
    layer.clear()
    assert layer.info().buffer_bytes == 0 and not layer._recent


@pytest.mark.parametrize("reuse", [False, True])
def test_bad_arguments_are_refused_warm_or_not(device, reuse):
    layer, tensors = Runtime(), arguments()
    for warm in (False, True):
        if warm:
            for _ in range(3):
                call(layer, tensors, reuse)
        launches = device.launches
        for index, bad, message in (
            (3, 1.0, "g_cumsum is a float"),
            (0, tensors[0].float(), "q has dtype"),
            (5, tensors[5].transpose(1, 2), "A is not contiguous"),
            (4, tensors[4].clone().requires_grad_(), "beta requires grad"),
        ):
            wrong = list(tensors)
            wrong[index] = bad
            with pytest.raises((TypeError, ValueError), match=message):
                call(layer, wrong, reuse)
        for tile in (7, 32):
            with pytest.raises(ValueError, match=f"block_dv is {tile}; it must be one of 64, 128"):
                call(layer, tensors, reuse, block_dv=tile)
        with pytest.raises(ValueError, match="split is 4, but tokens=130 is 3 chunk"):
            call(layer, tensors, reuse, split=4)
        assert device.launches == launches


def test_preparing_checks_once_a_layout_and_launches_every_time(device, monkeypatch):
    layer, launched = Runtime(), []
    monkeypatch.setattr(preprocess, "RUNTIME", layer)
    monkeypatch.setattr(preprocess, "sm_count", lambda _: 132)
    monkeypatch.setattr(runtime, "compile_launcher", lambda *_: lambda *call: launched.append(call))
    inputs = make_inputs(CASE)
    for _ in range(3):
        g_cumsum, A = preprocess.prepare(inputs.k, inputs.g, inputs.beta)
    assert (g_cumsum.shape, A.shape, A.dtype) == (inputs.g.shape, (1, 130, 2, 64), torch.bfloat16)
    assert len(launched) == 3 and launched[-1][3] is g_cumsum and launched[-1][4] is A
    assert len({call[4].data_ptr() for call in launched}) == 3
    assert launched[-1][5] == preprocess_fused.grid(PreprocessConfig(1, 2), 1, 130, 132)
    info = layer.info()
    assert (info.compiles, info.layouts.misses, info.layouts.hits) == (1, 1, 2)
    preprocess.prepare(*(x[:, :64].clone() for x in (inputs.k, inputs.g, inputs.beta)))
    assert layer.info().compiles == 1 and layer.info().layouts.size == 2
    for bad, message in (
        ((inputs.k.float(), inputs.g, inputs.beta), "k has dtype"),
        ((inputs.k, inputs.g, inputs.beta[:, :64]), "beta"),
        ((inputs.k, 1.0, inputs.beta), "g is a float"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            preprocess.prepare(*bad)
    assert len(launched) == 4
