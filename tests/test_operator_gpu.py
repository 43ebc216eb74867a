"""The operator's kernels on a Hopper GPU: what a host cannot show.

No synchronisation, no allocation, graphs with new lengths, the same bits whatever the batch, long
sequences, and neighbours left alone.
"""

import pytest
import torch
from test_operator import HQ, HV, D, cu, relative, states, tokens

import gdn_prefill
from gdn_prefill import chunk_gated_delta_rule
from reference.operator import gated_delta_rule

pytestmark = pytest.mark.gpu
TOLERANCE = 5e-3


def on_gpu(tensors):
    return tuple(t.cuda() for t in tensors)


def packed_call(T=700, dtype=torch.bfloat16):
    """(q, k, v, g, beta, bounds, pool, slots) of an engine's step."""
    x = on_gpu(tokens(T, dtype=dtype))
    bounds, slots = cu(0, 1, 1, 200, 264, 600).cuda(), torch.tensor([4, -1, 0, 6, 2]).cuda()
    return x, bounds, states(8).cuda(), slots


def engine_step(call, x, bounds, pool, slots, **named):
    return call(
        *x,
        initial_state=pool,
        output_state=pool,
        state_indices=slots,
        cu_seqlens=bounds,
        **named,
    )


@pytest.fixture
def no_synchronisation():
    """Any device-to-host copy or wait raises."""
    torch.cuda.synchronize()

    def strictly(function, *arguments, **named):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return function(*arguments, **named)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return strictly


def test_a_warm_call_never_waits_for_the_device(no_synchronisation):
    call = packed_call()
    options = {"use_qk_l2norm_in_kernel": True, "state_v_first": True}

    def in_place():
        engine_step(chunk_gated_delta_rule, *call, **options)

    def per_chunk_states():
        engine_step(chunk_gated_delta_rule, *call, output_h=True, **options)

    def raw_gate():
        chunk_gated_delta_rule(
            *call[0],
            cu_seqlens=call[1],
            use_gate_in_kernel=True,
            A_log=torch.zeros(HV, device="cuda"),
            output_final_state=True,
            **options,
        )

    for step in (in_place, per_chunk_states, raw_gate):
        step()
        no_synchronisation(step)


def test_the_test_for_waiting_can_fail(no_synchronisation):
    with pytest.raises(RuntimeError):
        no_synchronisation(lambda: torch.ones(3, device="cuda").tolist())


def test_a_warm_plan_waits_for_nothing_and_allocates_nothing(no_synchronisation):
    plan = gdn_prefill.plan(HQ, HV, 700, sequences=5, use_qk_l2norm_in_kernel=True)
    call = packed_call()
    for _ in range(3):
        engine_step(plan.run, *call)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(5):
        no_synchronisation(engine_step, plan.run, *call)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.parametrize("captured_by", ["plan", "caller"])
def test_a_graph_is_replayed_with_new_lengths(captured_by):
    x, bounds, pool, slots = packed_call()
    output = torch.empty_like(x[2])
    if captured_by == "plan":  # which nobody else keeps
        replay = gdn_prefill.plan(HQ, HV, 700, sequences=5).capture(
            *x, initial_state=pool, output_state=pool, state_indices=slots, cu_seqlens=bounds,
            output=output,
        ).replay  # fmt: skip
    else:
        engine_step(chunk_gated_delta_rule, x, bounds, pool, slots, output=output)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            engine_step(chunk_gated_delta_rule, x, bounds, pool, slots, output=output)
        replay = graph.replay
    for new in ((0, 64, 128, 192, 256, 320), (0, 0, 0, 0, 0, 0), (0, 700, 700, 700, 700, 700),
                (0, 3, 69, 69, 500, 699)):  # fmt: skip
        pool.copy_(states(8, seed=new[1]))
        slots.copy_(slots.flip(0))
        bounds.copy_(cu(*new))
        output.fill_(7)
        expected_pool = pool.clone()
        expected, _ = engine_step(chunk_gated_delta_rule, x, bounds, expected_pool, slots)
        replay()
        assert torch.equal(output[:, : new[-1]], expected[:, : new[-1]])
        assert (output[:, new[-1] :] == 7).all()
        assert torch.equal(pool, expected_pool)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_sequence_does_not_depend_on_its_batch(dtype):
    lengths = [70, 1, 1000, 64, 300]
    pieces = [on_gpu(tokens(n, seed=n, dtype=dtype)) for n in lengths]
    named = {"output_final_state": True, "batch_invariant": True, "use_qk_l2norm_in_kernel": True}
    bounds = [0, 70, 71, 1071, 1135, 1435]
    packed = tuple(torch.cat(parts, dim=1) for parts in zip(*pieces, strict=True))
    output, state = chunk_gated_delta_rule(*packed, cu_seqlens=cu(*bounds).cuda(), **named)
    for n, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        alone, alone_state = chunk_gated_delta_rule(*pieces[n], **named)
        assert torch.equal(output[:, start:end], alone)
        assert torch.equal(state[n : n + 1], alone_state)


@pytest.mark.parametrize("strength", [0.06, 5.0])
@pytest.mark.parametrize("T", [230, 4096])
def test_a_cut_at_a_chunk_changes_nothing(strength, T):
    x = on_gpu(tokens(T, B=2, strength=strength))
    named = {"output_final_state": True, "batch_invariant": True}
    whole, whole_state = chunk_gated_delta_rule(*x, **named)
    for cut in (64, T // 128 * 64):
        first, state = chunk_gated_delta_rule(*(t[:, :cut].contiguous() for t in x), **named)
        second, state = chunk_gated_delta_rule(
            *(t[:, cut:].contiguous() for t in x), initial_state=state, **named
        )
        assert torch.equal(torch.cat((first, second), dim=1), whole)
        assert torch.equal(state, whole_state)


def test_many_runs_give_the_same_bits():
    x, bounds, pool, slots = packed_call()
    named = {"cu_seqlens": bounds, "output_final_state": True, "output_h": True}
    expected = [t.clone() for t in chunk_gated_delta_rule(*x, **named)]
    for _ in range(200):
        actual = chunk_gated_delta_rule(*x, **named)
        assert torch.equal(actual[0][:, :600], expected[0][:, :600])
        assert torch.equal(actual[1], expected[1])


def test_the_order_of_the_sequences_is_there_when_it_is_read():
    """Few CTAs preprocess, and more than there are SMs follow, which may start before those end."""
    x = on_gpu(tokens(320, heads=(4, 64)))
    plan = gdn_prefill.plan(4, 64, 320, sequences=5, output_final_state=True)
    for last in (64, 128, 192, 256):
        bounds = cu(0, 1, 2, 3, 320 - last, 320).cuda()
        expected = chunk_gated_delta_rule(
            *x, cu_seqlens=bounds, output_final_state=True, backend="torch"
        )
        for _ in range(10):
            plan.workspace["order"].zero_()
            output = torch.full_like(x[2], float("nan"))
            found = plan.run(*x, cu_seqlens=bounds, output=output)
            for a, b in zip(found, expected, strict=True):
                # Both are rounded to bf16; a wrong order leaves NaN, or another sequence.
                assert relative(a, b.double()) < 2 * TOLERANCE


def test_a_neighbour_of_nan_stays_clean():
    x = on_gpu(tokens(200))
    bounds = cu(0, 70, 130, 200).cuda()
    named = {"output_final_state": True, "cu_seqlens": bounds, "use_qk_l2norm_in_kernel": True}
    clean, clean_state = chunk_gated_delta_rule(*x, **named)
    for t in x:
        t[:, 70:130] = float("nan")
    output, state = chunk_gated_delta_rule(*x, **named)
    for rows in (slice(0, 70), slice(130, 200)):
        assert torch.equal(output[:, rows], clean[:, rows])
    assert torch.equal(state[[0, 2]], clean_state[[0, 2]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_empty_sequence_leaves_its_state_bitwise(dtype):
    pool = states(3, dtype).cuda()
    pattern = torch.int32 if dtype == torch.float32 else torch.int16
    pool[1, 0, 0, 0] = float("nan")
    pool.view(pattern)[1, 0, 0, 0] |= 5
    before = pool[1].view(pattern).clone()
    x = on_gpu(tokens(65))
    chunk_gated_delta_rule(
        *x, initial_state=pool, output_state=pool, cu_seqlens=cu(0, 40, 40, 65).cuda()
    )
    assert torch.equal(pool[1].view(pattern), before)


@pytest.mark.parametrize("decay", [0.0, -20.0, -1e3, -1e38, float("-inf")])
def test_every_decay_is_finite(decay):
    q, k, v, g, beta = tokens(150)
    g[:, 1::2] = decay
    x = (q, k, v, g, beta)
    output, state = chunk_gated_delta_rule(*on_gpu(x), output_final_state=True)
    expected = gated_delta_rule(*x)
    assert relative(output.cpu(), expected.output) < TOLERANCE
    assert relative(state[0].cpu(), expected.final_states[0]) < TOLERANCE


def test_long_keys_under_strong_decay():
    q, k, v, g, beta = tokens(130)
    x = (q, 11 * k, v, torch.full_like(g, -20.0), beta)
    output, state = chunk_gated_delta_rule(*on_gpu(x), output_final_state=True)
    expected = gated_delta_rule(*x)
    assert relative(output.cpu(), expected.output) < TOLERANCE
    assert relative(state[0].cpu(), expected.final_states[0]) < TOLERANCE


def test_the_norm_of_tiny_and_zero_vectors():
    q, k, v, g, beta = tokens(70)
    q, k = q * 1e-3, k * 1e-3
    k[:, 5] = 0
    named = {"use_qk_l2norm_in_kernel": True, "output_final_state": True}
    expected = gated_delta_rule(q, k, v, g, beta, use_qk_l2norm=True)
    output, state = chunk_gated_delta_rule(*on_gpu((q, k, v, g, beta)), **named)
    assert relative(output.cpu(), expected.output) < TOLERANCE
    assert relative(state[0].cpu(), expected.final_states[0]) < TOLERANCE


def test_long_packed_sequences_against_the_portable_path():
    """The time-contiguous tables' offsets in a packed row of many thousand tokens."""
    bounds = cu(0, 2048, 2049, 2049, 6500, 9000)
    x = tokens(9000, heads=(2, 8), strength=0.06)
    named = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    expected = chunk_gated_delta_rule(*x, cu_seqlens=bounds, **named)
    actual = chunk_gated_delta_rule(*on_gpu(x), cu_seqlens=bounds.cuda(), **named)
    for a, b in zip(actual, expected, strict=True):
        assert relative(a.cpu(), b.double()) < TOLERANCE


def test_a_million_tokens():
    T, Hq, Hv = 2**20, 2, 8
    draw = torch.Generator("cuda").manual_seed(0)

    def randn(*shape):
        return torch.randn(1, T, *shape, generator=draw, device="cuda", dtype=torch.bfloat16)

    q, k, v = randn(Hq, D), randn(Hq, D), randn(Hv, D)
    g, beta = -0.06 * randn(Hv).abs(), randn(Hv).sigmoid()
    named = {"output_final_state": True, "use_qk_l2norm_in_kernel": True, "batch_invariant": True}
    torch.cuda.reset_peak_memory_stats()
    output, state = chunk_gated_delta_rule(q, k, v, g, beta, **named)
    assert torch.cuda.max_memory_allocated() < 70e9
    tail = tuple(t[:, -65536:] for t in (q, k, v, g, beta))
    # 65536 tokens of this decay forget all that was before them.
    late, late_state = chunk_gated_delta_rule(*(t.contiguous() for t in tail), **named)
    assert relative(state, late_state.double()) < 1e-5
    assert relative(output[:, -1000:], late[:, -1000:].double()) < 1e-3
    assert output.isfinite().all()


def test_compiled_calls_run_the_kernels():
    x = on_gpu(tokens(300))
    compiled = torch.compile(
        lambda *x: chunk_gated_delta_rule(*x, output_final_state=True), fullgraph=True
    )
    expected = chunk_gated_delta_rule(*x, output_final_state=True)
    assert all(torch.equal(a, b) for a, b in zip(compiled(*x), expected, strict=True))
