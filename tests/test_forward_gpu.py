"""The shipped forward on a Hopper GPU against float64, and the behaviour of its call layer."""

import dataclasses

import pytest
import torch

import gdn_prefill
from cases import Case, hidden_cases, load_cases, make_inputs
from gdn_prefill.runtime import RUNTIME
from reference.chunked import chunk_cumsum, gdn_chunked, solve_A

pytestmark = pytest.mark.gpu

RATIOS = (1, 2, 3, 4, 8)
LENGTHS = (1, 63, 64, 65, 127, 1025, 4097)
# Without decay no rounding is ever forgotten; see test_forward_kernel.py.
UNDECAYED_RELATIVE_L2 = 4e-3


@pytest.fixture(autouse=True)
def empty_caches():
    yield
    gdn_prefill.clear()


def small(**changes) -> Case:
    base = Case("small", 1, 300, 2, 4, True, "random_decay", 5e-3, 5e-3)
    return dataclasses.replace(base, **changes)


def arguments(inputs, g=None):
    """Arguments of gdn_prefill_forward, A and the gate sums made in float64."""
    g = inputs.g if g is None else g
    A = solve_A(inputs.k, g, inputs.beta).bfloat16()
    return [inputs.q, inputs.k, inputs.v, chunk_cumsum(g).float(), inputs.beta, A] + (
        [] if inputs.initial_state is None else [inputs.initial_state]
    )


def check(case, inputs, result, g=None):
    g = inputs.g if g is None else g
    expected = gdn_chunked(inputs.q, inputs.k, inputs.v, g, inputs.beta, inputs.initial_state)
    output, state = result
    assert output.dtype == torch.bfloat16 and state.dtype == torch.float32
    torch.testing.assert_close(output.double(), expected[0], rtol=case.rtol, atol=case.atol)
    if (g == 0).all():
        assert (state - expected[1]).norm() / expected[1].norm() < UNDECAYED_RELATIVE_L2
    else:
        torch.testing.assert_close(state.double(), expected[1], rtol=case.rtol, atol=case.atol)


def run_and_check(case, seed=42, g=None, **options):
    inputs = make_inputs(case, "cuda", seed)
    check(case, inputs, gdn_prefill.gdn_prefill_forward(*arguments(inputs, g), **options), g)


@pytest.mark.parametrize("case", load_cases(), ids=lambda case: case.name)
def test_public_cases(case):
    run_and_check(case)


@pytest.mark.parametrize("seed", range(40))
def test_hidden_draws(seed):
    for case in hidden_cases(seed):
        run_and_check(case, seed=1000 + seed)


@pytest.mark.parametrize("state", [False, True], ids=["zero", "state"])
@pytest.mark.parametrize("ratio", RATIOS)
def test_lengths_and_head_ratios(ratio, state):
    for tokens in LENGTHS:
        run_and_check(small(B=3, T=tokens, Hq=2, Hv=2 * ratio, initial_state=state))


@pytest.mark.parametrize("tile", [64, 128])
@pytest.mark.parametrize("state", [False, True], ids=["zero", "state"])
@pytest.mark.parametrize("split", [False, 2, 3, 6, True])
def test_every_tile_and_split(tile, split, state):
    run_and_check(small(B=2, T=333, initial_state=state), block_dv=tile, split=split)


def test_a_warm_split_allocates_nothing_but_its_outputs():
    call = arguments(make_inputs(small(T=1025), "cuda"))
    kept = []
    for reuse in (True, False):
        for _ in range(3):
            kept.append(gdn_prefill.gdn_prefill_forward(*call, split=4, reuse_outputs=reuse))
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        kept.append(gdn_prefill.gdn_prefill_forward(*call, split=4, reuse_outputs=reuse))
        made = torch.cuda.memory_stats()["allocation.all.allocated"] - before
        assert made == (0 if reuse else 2)


def test_a_split_under_the_callers_capture_outlives_the_caches():
    case = small(T=1025)
    inputs = make_inputs(case, "cuda")
    call = arguments(inputs)
    gdn_prefill.gdn_prefill_forward(*call, split=4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = gdn_prefill.gdn_prefill_forward(*call, split=4)
    gdn_prefill.clear()
    torch.cuda.empty_cache()
    for tensor in result:
        tensor.fill_(float("nan"))
    graph.replay()
    check(case, inputs, result)


@pytest.mark.parametrize("gate", [0.0, -1.0, -20.0, -50.0])
@pytest.mark.parametrize("state", [False, True], ids=["zero", "state"])
def test_uniform_gates(gate, state):
    case = small(T=1025, initial_state=state)
    inputs = make_inputs(case, "cuda")
    run_and_check(case, g=torch.full_like(inputs.g, gate))


def test_gates_mixed_within_a_chunk_and_across_heads():
    case = small(T=1025)
    gate = torch.tensor([0.0, -0.05, -20.0, -50.0], device="cuda")
    inputs = make_inputs(case, "cuda")
    choice = torch.randint(0, 4, inputs.g.shape, device="cuda")
    run_and_check(case, g=gate[choice])


@pytest.mark.parametrize("name", ["parallel_gva", "chain_equal"])
def test_repeated_runs_are_bitwise_equal(name):
    case = next(case for case in load_cases() if case.name == name)
    call = arguments(make_inputs(case, "cuda"))
    first = gdn_prefill.gdn_prefill_forward(*call)
    for _ in range(1000):
        again = gdn_prefill.gdn_prefill_forward(*call)
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


@pytest.mark.parametrize("tile", [64, 128])
def test_states_past_a_16_bit_grid_and_31_bit_offsets(tile):
    """131,076 states: more than 65,535 blocks per state slice, state elements past 2^31."""
    case = small(B=32769, T=2, Hq=1, Hv=4)
    inputs = make_inputs(case, "cuda")
    call = arguments(inputs)
    output, state = gdn_prefill.gdn_prefill_forward(*call, block_dv=tile)
    for row in (0, 16384, 32768):
        alone = [t[row : row + 1].clone() for t in call]
        expected = gdn_prefill.gdn_prefill_forward(*alone, block_dv=tile)
        assert torch.equal(output[row : row + 1], expected[0])
        assert torch.equal(state[row : row + 1], expected[1])


def test_tokens_past_31_bit_offsets():
    """Two sequences whose values together pass 2^31 elements; the second alone gives the same."""
    case = small(B=2, T=140_001, Hq=16, Hv=64, initial_state=False)
    inputs = make_inputs(case, "cuda")
    g_cumsum, A = gdn_prefill.prepare(inputs.k, inputs.g, inputs.beta)
    call = [inputs.q, inputs.k, inputs.v, g_cumsum, inputs.beta, A]
    assert inputs.v.numel() > 2**31
    output, state = gdn_prefill.gdn_prefill_forward(*call, block_dv=128)
    alone = gdn_prefill.gdn_prefill_forward(*[t[1:] for t in call], block_dv=128)
    assert torch.equal(output[1:], alone[0]) and torch.equal(state[1:], alone[1])


def test_rows_of_a_tail_chunk_do_not_reach_a_neighbour():
    """Guard rows around the output stay as they were: only T rows of each sequence are written."""
    case = small(B=2, T=70)
    inputs = make_inputs(case, "cuda")
    call = arguments(inputs)
    output, _ = gdn_prefill.gdn_prefill_forward(*call)
    for row in range(2):
        alone, _ = gdn_prefill.gdn_prefill_forward(*[t[row : row + 1].clone() for t in call])
        assert torch.equal(output[row : row + 1], alone)


# ---- the call layer ----


def test_outputs_are_fresh_unless_reuse_is_asked_for():
    call = arguments(make_inputs(small(), "cuda"))
    first, second = (gdn_prefill.gdn_prefill_forward(*call) for _ in range(2))
    assert first[0].data_ptr() != second[0].data_ptr()
    assert first[1].data_ptr() != second[1].data_ptr()
    reused = [gdn_prefill.gdn_prefill_forward(*call, reuse_outputs=True) for _ in range(3)]
    assert len({output.data_ptr() for output, _ in reused}) == 1


def test_a_graph_is_captured_on_the_second_call_and_replayed_after():
    call = arguments(make_inputs(small(), "cuda"))
    counts = []
    for _ in range(4):
        gdn_prefill.gdn_prefill_forward(*call, reuse_outputs=True)
        info = gdn_prefill.cache_info()
        counts.append((info.captures, info.replays))
    assert counts == [(0, 0), (1, 1), (1, 2), (1, 3)]


def test_a_replay_computes_from_refilled_inputs():
    case = small()
    inputs = make_inputs(case, "cuda")
    call = arguments(inputs)
    for _ in range(3):
        gdn_prefill.gdn_prefill_forward(*call, reuse_outputs=True)
    other = make_inputs(case, "cuda", seed=7)
    for held, new in zip(call, arguments(other), strict=True):
        held.copy_(new)
    captures = gdn_prefill.cache_info().captures
    check(case, other, gdn_prefill.gdn_prefill_forward(*call, reuse_outputs=True))
    assert gdn_prefill.cache_info().captures == captures


def test_inputs_freed_and_allocated_again():
    case = small()
    for seed in range(6):
        inputs = make_inputs(case, "cuda", seed)
        call = arguments(inputs)
        for _ in range(3):
            result = gdn_prefill.gdn_prefill_forward(*call, reuse_outputs=True)
        check(case, inputs, result)
        del inputs, call
        if seed % 2:
            torch.cuda.empty_cache()


def test_a_view_of_another_length_at_the_same_address_is_another_call():
    long = make_inputs(small(T=300), "cuda")
    call = arguments(long)
    for _ in range(3):
        gdn_prefill.gdn_prefill_forward(*call, reuse_outputs=True)
    short = [t[:, :128] for t in call[:6]] + call[6:]
    result = gdn_prefill.gdn_prefill_forward(*short, reuse_outputs=True)
    assert result[0].shape[1] == 128
    fresh = gdn_prefill.gdn_prefill_forward(*short)
    assert torch.equal(result[0], fresh[0]) and torch.equal(result[1], fresh[1])


def test_a_tensor_reshaped_in_place_is_another_call():
    inputs = make_inputs(small(T=256), "cuda")
    call = arguments(inputs)
    for _ in range(4):
        gdn_prefill.gdn_prefill_forward(*call, reuse_outputs=True)
    call[4].resize_(1, 128, 4)
    with pytest.raises(ValueError, match="beta has shape"):
        gdn_prefill.gdn_prefill_forward(*call, reuse_outputs=True)
    for tensor in call[:6]:
        tensor.resize_(1, 128, *tensor.shape[2:])
    result = gdn_prefill.gdn_prefill_forward(*call, reuse_outputs=True)
    fresh = gdn_prefill.gdn_prefill_forward(*call)
    assert torch.equal(result[0], fresh[0]) and torch.equal(result[1], fresh[1])


def test_calls_are_forgotten_with_their_tensors():
    call = arguments(make_inputs(small(), "cuda"))
    for _ in range(4):
        gdn_prefill.gdn_prefill_forward(*call, reuse_outputs=True)
    assert len(RUNTIME._recent) == 1
    del call
    assert len(RUNTIME._recent) == 0


def test_streams_have_buffers_of_their_own():
    case = small()
    inputs = make_inputs(case, "cuda")
    call = arguments(inputs)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    results = []
    for _ in range(3):
        results = []
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(gdn_prefill.gdn_prefill_forward(*call, reuse_outputs=True))
    torch.cuda.synchronize()
    assert results[0][0].data_ptr() != results[1][0].data_ptr()
    for result in results:
        check(case, inputs, result)


@pytest.mark.parametrize("reuse", [False, True])
def test_under_the_callers_capture_the_launch_is_plain(reuse):
    case = small()
    inputs = make_inputs(case, "cuda")
    call = arguments(inputs)
    for _ in range(3):
        gdn_prefill.gdn_prefill_forward(*call, reuse_outputs=reuse)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = gdn_prefill.gdn_prefill_forward(*call, reuse_outputs=reuse)
    for tensor in result:
        tensor.fill_(float("nan"))
    graph.replay()
    check(case, inputs, result)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_each_device_runs_its_own():
    case = small()
    for device in ("cuda:0", "cuda:1", "cuda:0"):
        inputs = make_inputs(case, device)
        call = arguments(inputs)
        for _ in range(3):
            result = gdn_prefill.gdn_prefill_forward(*call, reuse_outputs=True)
        assert result[0].device == torch.device(device)
        check(case, inputs, result)
        check(case, inputs, gdn_prefill.gdn_prefill_forward(*call))


def test_a_warm_call_allocates_nothing_but_its_outputs():
    call = arguments(make_inputs(small(), "cuda"))
    kept = [gdn_prefill.gdn_prefill_forward(*call, reuse_outputs=True) for _ in range(3)]
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    gdn_prefill.gdn_prefill_forward(*call, reuse_outputs=True)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    kept.append(gdn_prefill.gdn_prefill_forward(*call))
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before + 2


def test_one_compilation_serves_every_length_and_batch():
    for batch, tokens in ((1, 64), (1, 65), (2, 640), (3, 1)):
        call = arguments(make_inputs(small(B=batch, T=tokens), "cuda"))
        gdn_prefill.gdn_prefill_forward(*call)
    assert gdn_prefill.cache_info().compiles == 1


def test_the_caches_stay_bounded():
    kept = []
    for tokens in range(1, RUNTIME.buffer_capacity + 8):
        call = arguments(make_inputs(small(T=tokens), "cuda"))
        kept.append(call)
        for _ in range(2):
            gdn_prefill.gdn_prefill_forward(*call, reuse_outputs=True)
    info = gdn_prefill.cache_info()
    assert info.buffers.size == info.buffers.capacity
    assert info.graphs.size <= info.graphs.capacity
    assert info.buffer_bytes > 0
    gdn_prefill.clear()
    assert gdn_prefill.cache_info().buffer_bytes == 0


def test_bad_input_is_refused_before_anything_is_launched():
    call = arguments(make_inputs(small(), "cuda"))
    gdn_prefill.gdn_prefill_forward(*call)
    storage = torch.empty(call[2].numel() + 1, dtype=torch.bfloat16, device="cuda")
    misaligned = storage[1:].view(call[2].shape)
    for index, bad, error in (
        (2, misaligned, "v starts at address"),
        (4, call[4].cpu(), "beta is on cpu"),
        (5, call[5].transpose(1, 2), "A"),
        (0, call[0].float(), "q has dtype"),
        (3, 1.0, "g_cumsum is a float"),
    ):
        wrong = list(call)
        wrong[index] = bad
        for reuse in (False, True):
            with pytest.raises((TypeError, ValueError), match=error):
                gdn_prefill.gdn_prefill_forward(*wrong, reuse_outputs=reuse)


def test_grad_is_refused_on_a_warm_call_too():
    call = arguments(make_inputs(small(), "cuda"))
    for _ in range(3):
        gdn_prefill.gdn_prefill_forward(*call, reuse_outputs=True)
    call[4].requires_grad_()
    for reuse in (False, True):
        with pytest.raises(ValueError, match="beta requires grad"):
            gdn_prefill.gdn_prefill_forward(*call, reuse_outputs=reuse)
        with torch.no_grad():
            gdn_prefill.gdn_prefill_forward(*call, reuse_outputs=reuse)


@pytest.mark.parametrize("ratio", RATIOS)
def test_prepare_matches_float64(ratio):
    case = small(B=3, T=1025, Hq=2, Hv=2 * ratio)
    inputs = make_inputs(case, "cuda")
    g_cumsum, A = gdn_prefill.prepare(inputs.k, inputs.g, inputs.beta)
    torch.testing.assert_close(g_cumsum.double(), chunk_cumsum(inputs.g), rtol=1e-5, atol=1e-6)
    expected = solve_A(inputs.k, inputs.g, inputs.beta)
    torch.testing.assert_close(A.double(), expected, rtol=5e-3, atol=1e-3)
    alone = gdn_prefill.solve_kkt(inputs.k, gdn_prefill.chunk_gate_cumsum(inputs.g), inputs.beta)
    torch.testing.assert_close(alone.double(), expected, rtol=5e-3, atol=5e-4)
    check(
        case,
        inputs,
        gdn_prefill.gdn_prefill_forward(
            inputs.q, inputs.k, inputs.v, g_cumsum, inputs.beta, A, inputs.initial_state
        ),
    )
