"""The operator on the portable path: what its options promise, and what it refuses."""

import inspect
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import gdn_prefill
from gdn_prefill import chunk_gated_delta_rule, operator_torch
from reference.chunked import gdn_chunked
from reference.operator import gated_delta_rule

HQ, HV, D = 2, 4, 128


def tokens(T, B=1, seed=0, heads=(HQ, HV), dtype=torch.bfloat16, strength=1.0):
    """(q, k, v, g, beta) with unit keys and queries."""
    draw = torch.Generator().manual_seed(seed)
    Hq, Hv = heads

    def randn(*shape):
        return torch.randn(B, T, *shape, generator=draw)

    q, k = (F.normalize(randn(Hq, D), dim=-1).to(dtype) for _ in range(2))
    return q, k, randn(Hv, D).to(dtype), F.logsigmoid(randn(Hv)) * strength, randn(Hv).sigmoid()


def states(rows, dtype=torch.float32, seed=1):
    return torch.randn(rows, HV, D, D, generator=torch.Generator().manual_seed(seed)).to(dtype)


def cu(*bounds, dtype=torch.int32):
    return torch.tensor(bounds, dtype=dtype)


def relative(actual, expected):
    return ((actual.double() - expected).norm() / expected.norm()).item()


def test_long_sequences_equal_the_chunked_reference():
    x = tokens(2100, B=2, heads=(1, 2), strength=0.06)
    output, state = chunk_gated_delta_rule(*x, output_final_state=True)
    expected = gdn_chunked(*x)
    assert relative(output, expected[0]) < 3e-3
    assert relative(state, expected[1]) < 1e-5


def test_options_of_the_two_definitions_agree():
    """The reference of the sweep against the one that the lab's checks use."""
    x = tokens(150)
    initial = states(1)
    expected = gdn_chunked(*x, initial_state=initial)
    actual = gated_delta_rule(*x, initial_states=list(initial))
    assert relative(actual.output, expected[0]) < 1e-12
    assert relative(actual.final_states[0], expected[1][0]) < 1e-12


def test_fla_names_come_first():
    names = list(inspect.signature(chunk_gated_delta_rule).parameters)
    assert names[:11] == [
        "q", "k", "v", "g", "beta", "scale", "initial_state", "output_final_state",
        "use_qk_l2norm_in_kernel", "cu_seqlens", "state_v_first",
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("in_place", [False, True])
def test_an_empty_sequence_leaves_its_state_bitwise(dtype, in_place):
    x = tokens(65)
    initial = states(3, dtype)
    initial[1, 0, 0, :4] = torch.tensor([float("nan"), -0.0, float("inf"), 65504.0]).to(dtype)
    pattern = torch.int32 if dtype == torch.float32 else torch.int16
    initial.view(pattern)[1, 0, 0, 0] |= 5  # a NaN with a payload
    before = initial[1].view(pattern).clone()
    buffer = initial if in_place else torch.empty_like(initial)
    chunk_gated_delta_rule(
        *x, initial_state=initial, output_state=buffer, cu_seqlens=cu(0, 40, 40, 65)
    )
    after = buffer[1].view(pattern)
    number = ~initial[1].isnan()
    assert torch.equal(after[number], before[number])
    if in_place:
        assert torch.equal(after, before)


def test_an_empty_sequence_without_a_state_gives_zeros():
    x = tokens(5)
    _, state = chunk_gated_delta_rule(*x, output_final_state=True, cu_seqlens=cu(0, 0, 5, 5))
    assert not state[[0, 2]].any() and state[1].any()


def test_skipped_slots():
    x = tokens(100)
    pool = states(5)
    before = pool.clone()
    bounds = cu(0, 40, 70, 100)
    slots = torch.tensor([3, -1, 0])
    output, state = chunk_gated_delta_rule(
        *x, initial_state=pool, output_state=pool, state_indices=slots, cu_seqlens=bounds
    )
    assert state is pool
    assert torch.equal(pool[[1, 2, 4]], before[[1, 2, 4]])
    fresh, _ = chunk_gated_delta_rule(*(t[:, 40:70] for t in x))
    torch.testing.assert_close(output[:, 40:70], fresh)
    gathered = torch.stack([before[3], torch.zeros_like(before[0]), before[0]])
    packed, finals = chunk_gated_delta_rule(
        *x, initial_state=gathered, output_final_state=True, cu_seqlens=bounds
    )
    assert torch.equal(packed, output)
    assert torch.equal(finals[[0, 2]], pool[[3, 0]])
    # Read from a pool, written per sequence: the skipped one has a final state all the same.
    _, own = chunk_gated_delta_rule(
        *x, initial_state=before, state_indices=slots, output_final_state=True, cu_seqlens=bounds
    )
    assert torch.equal(own, finals)


def test_a_neighbour_of_nan_stays_clean():
    x = tokens(200)
    bounds = cu(0, 70, 130, 200)
    clean, clean_state = chunk_gated_delta_rule(*x, output_final_state=True, cu_seqlens=bounds)
    for t in x:
        t[:, 70:130] = float("nan")
    output, state = chunk_gated_delta_rule(*x, output_final_state=True, cu_seqlens=bounds)
    assert output[:, 70:130].isnan().any()
    for rows in (slice(0, 70), slice(130, 200)):
        assert torch.equal(output[:, rows], clean[:, rows])
    assert torch.equal(state[[0, 2]], clean_state[[0, 2]])


def test_rows_past_the_last_sequence_are_not_written():
    x = tokens(100)
    output = torch.full((1, 100, HV, D), 7.0, dtype=torch.bfloat16)
    returned, _ = chunk_gated_delta_rule(*x, output=output, cu_seqlens=cu(0, 30, 66))
    assert returned is output
    assert (output[:, 66:] == 7).all() and not (output[:, :66] == 7).any()


def test_states_before_every_chunk():
    x = tokens(200, B=2)
    initial = states(2)
    _, final, h = chunk_gated_delta_rule(
        *x, initial_state=initial, output_final_state=True, output_h=True
    )
    assert h.shape == (2, 4, HV, D, D)
    assert torch.equal(h[:, 0], initial)
    for chunk in (1, 3):
        part = tuple(t[:, : 64 * chunk] for t in x)
        _, state = chunk_gated_delta_rule(*part, initial_state=initial, output_final_state=True)
        assert torch.equal(h[:, chunk], state)


def test_packed_states_lie_behind_each_other():
    x = tokens(300)
    bounds = (0, 64, 64, 194, 300)
    *_, h = chunk_gated_delta_rule(*x, output_h=True, cu_seqlens=cu(*bounds))
    row = 0
    for start, end in zip(bounds, bounds[1:], strict=False):
        part = tuple(t[:, start:end] for t in x)
        if start == end:
            continue
        *_, alone = chunk_gated_delta_rule(*part, output_h=True)
        torch.testing.assert_close(h[0, row : row + alone.shape[1]], alone[0])
        row += alone.shape[1]
    assert row <= h.shape[1]


def test_checkpoints_take_full_intervals_only():
    x = tokens(320)
    buffer = torch.full((6, HV, D, D), 7.0)
    chunk_gated_delta_rule(
        *x,
        cu_seqlens=cu(0, 128, 319, 320),
        checkpoint_every_n_tokens=128,
        state_checkpoints=buffer,
        checkpoint_cu_starts=cu(1, 2, 4, 6),
    )
    for row, start in ((1, 0), (2, 128)):
        part = tuple(t[:, start : start + 128] for t in x)
        _, state = chunk_gated_delta_rule(*part, output_final_state=True)
        torch.testing.assert_close(buffer[row], state[0])
    assert (buffer[[0, 3, 4, 5]] == 7).all()


def test_a_linear_decay_of_zero_forgets():
    q, k, v, g, beta = tokens(130)
    alpha = g.exp()
    alpha[:, 100] = 0
    _, state = chunk_gated_delta_rule(q, k, v, alpha, beta, gate="linear", output_final_state=True)
    late = tuple(t[:, 100:] for t in (q, k, v, alpha, beta))
    _, alone = chunk_gated_delta_rule(*late, gate="linear", output_final_state=True)
    assert relative(state, alone.double()) < 1e-4


@pytest.mark.parametrize("decay", [0.0, -20.0, -1e3, -1e38, float("-inf")])
def test_every_decay_is_finite(decay):
    q, k, v, g, beta = tokens(150)
    g[:, 1::2] = decay
    output, state = chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True)
    expected = gated_delta_rule(q, k, v, g, beta)
    assert relative(output, expected.output) < 3e-3
    assert relative(state[0], expected.final_states[0]) < 1e-5


def test_long_keys_under_strong_decay():
    q, k, v, g, beta = tokens(130)
    g = torch.full_like(g, -20.0)
    output, state = chunk_gated_delta_rule(q, 11 * k, v, g, beta, output_final_state=True)
    expected = gated_delta_rule(q, 11 * k, v, g, beta)
    assert relative(output, expected.output) < 3e-3
    assert relative(state[0], expected.final_states[0]) < 1e-5


def test_the_norm_of_tiny_and_zero_vectors():
    """The 1e-6 under the root is part of the definition: it decides what tiny keys count."""
    q, k, v, g, beta = tokens(70)
    q, k = q * 1e-3, k * 1e-3
    k[:, 5] = 0
    output, state = chunk_gated_delta_rule(
        q, k, v, g, beta, use_qk_l2norm_in_kernel=True, output_final_state=True
    )
    expected = gated_delta_rule(q, k, v, g, beta, use_qk_l2norm=True)
    assert relative(output, expected.output) < 3e-3
    assert relative(state[0], expected.final_states[0]) < 1e-5


def test_views_of_a_fused_projection():
    T, parts = 100, (HQ * D, HQ * D, HV * D)
    mixed = torch.randn(1, T, sum(parts)).to(torch.bfloat16)
    q, k, v = (t.unflatten(-1, (-1, D)) for t in mixed.split(parts, dim=-1))
    gates = torch.randn(1, T, 2 * HV)
    g, beta = -gates[..., :HV].abs(), gates[..., HV:].sigmoid()
    views = chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)[0]
    copies = (t.contiguous() for t in (q, k, v, g, beta))
    assert torch.equal(views, chunk_gated_delta_rule(*copies, use_qk_l2norm_in_kernel=True)[0])


def test_a_sequence_does_not_depend_on_its_batch():
    lengths = [70, 1, 200, 64]
    pieces = [tokens(n, seed=n) for n in lengths]
    alone = [
        chunk_gated_delta_rule(*x, output_final_state=True, batch_invariant=True) for x in pieces
    ]
    packed = tuple(torch.cat(parts, dim=1) for parts in zip(*pieces, strict=True))
    bounds = [0, 70, 71, 271, 335]
    output, state = chunk_gated_delta_rule(
        *packed, output_final_state=True, batch_invariant=True, cu_seqlens=cu(*bounds)
    )
    for n, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        assert torch.equal(output[:, start:end], alone[n][0])
        assert torch.equal(state[n : n + 1], alone[n][1])


def test_sequences_run_alone_where_batches_must_not_matter(monkeypatch):
    members = []
    run = operator_torch._run_sequences
    monkeypatch.setattr(
        operator_torch, "_run_sequences", lambda *x: members.append(x[0]) or run(*x)
    )
    for invariant in (False, True):
        chunk_gated_delta_rule(*tokens(9, B=3), batch_invariant=invariant)
    assert members == [[0, 1, 2], [0], [1], [2]]


@pytest.mark.parametrize("cut", [64, 128, 192])
def test_a_cut_at_a_chunk_changes_nothing(cut):
    x = tokens(230, B=2)
    whole, whole_state = chunk_gated_delta_rule(*x, output_final_state=True, batch_invariant=True)
    first, state = chunk_gated_delta_rule(
        *(t[:, :cut] for t in x), output_final_state=True, batch_invariant=True
    )
    second, state = chunk_gated_delta_rule(
        *(t[:, cut:] for t in x),
        initial_state=state,
        output_final_state=True,
        batch_invariant=True,
    )
    assert torch.equal(torch.cat((first, second), dim=1), whole)
    assert torch.equal(state, whole_state)


def test_surroundings_do_not_matter():
    x = tokens(100)
    expected = chunk_gated_delta_rule(*x, output_final_state=True)
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        actual = chunk_gated_delta_rule(*x, output_final_state=True)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert not any(t.requires_grad for t in actual)


def test_reused_outputs_are_the_same_memory():
    x = tokens(70)
    expected = chunk_gated_delta_rule(*x, output_final_state=True)
    first = chunk_gated_delta_rule(*x, output_final_state=True, reuse_outputs=True)
    assert all(torch.equal(a, b) for a, b in zip(first, expected, strict=True))
    x[2].mul_(2)
    second = chunk_gated_delta_rule(*x, output_final_state=True, reuse_outputs=True)
    assert [t.data_ptr() for t in first] == [t.data_ptr() for t in second]
    assert torch.equal(second[0], chunk_gated_delta_rule(*x)[0])


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("chunk_size", 32, ValueError),
        ("head_first", True, ValueError),
        ("cp_context", object(), ValueError),
        ("transpose_state_layout", True, TypeError),
        ("use_cp", True, TypeError),
        ("gate", "exp", ValueError),
        ("output_final_state", 1, TypeError),
        ("allow_neg_eigval", True, ValueError),
        ("use_gate_in_kernel", True, ValueError),
        ("A_log", torch.zeros(HV), ValueError),
        ("checkpoint_every_n_tokens", 96, ValueError),
        ("checkpoint_every_n_tokens", 64, ValueError),
        ("checkpoint_every_n_tokens", True, TypeError),
        ("state_checkpoints", torch.zeros(4, HV, D, D), ValueError),
        ("state_dtype", torch.float64, TypeError),
        ("scale", "1", TypeError),
        ("scale", float("nan"), ValueError),
        ("backend", "triton", ValueError),
        ("backend", "cuda", ValueError),
        ("reuse_outputs", 1, TypeError),
        ("cu_seqlens", [0, 70], TypeError),
        ("cu_seqlens", False, TypeError),
        ("cu_seqlens", torch.tensor([0.0, 70.0]), TypeError),
        ("cu_seqlens", torch.tensor([0]), ValueError),
        ("cu_seqlens", torch.tensor([0, 71]), ValueError),
        ("cu_seqlens", torch.tensor([1, 70]), ValueError),
        ("cu_seqlens", torch.tensor([0, 40, 30]), ValueError),
        ("initial_state", torch.zeros(2, HV, D, D), ValueError),
        ("initial_state", torch.zeros(1, HQ, D, D), ValueError),
        ("initial_state", torch.zeros(1, HV, D, D, dtype=torch.float64), TypeError),
        ("initial_state", torch.zeros(1, HV, D, 2 * D)[..., ::2], ValueError),
        ("state_indices", torch.tensor([0]), ValueError),
        ("output", torch.zeros(1, 70, HV, D), TypeError),
        ("output", torch.zeros(1, 70, HQ, D, dtype=torch.bfloat16), ValueError),
        ("output_state", torch.zeros(1, HV, D, 64), ValueError),
    ],
)
def test_refusals_name_the_argument(name, value, error):
    with pytest.raises(error, match=name):
        chunk_gated_delta_rule(*tokens(70), **{name: value})


@pytest.mark.parametrize(
    ("position", "change", "error"),
    [
        (0, lambda t: t.float(), TypeError),
        (1, lambda t: t.to(torch.float16), TypeError),
        (1, lambda t: t[:, :, :1], ValueError),
        (2, lambda t: t[:, :, :3], ValueError),
        (2, lambda t: t[..., :64], ValueError),
        (3, lambda t: t.double(), TypeError),
        (3, lambda t: t[..., :2], ValueError),
        (4, lambda t: t[:, :50], ValueError),
        (4, lambda t: None, TypeError),
        (0, lambda t: t.to("meta"), ValueError),
        (2, lambda t: t.clone().requires_grad_(), ValueError),
    ],
)
def test_tensors_are_refused_by_name(position, change, error):
    x = list(tokens(70))
    x[position] = change(x[position])
    with pytest.raises(error, match=r"^(q|k|v|g|beta|Hv)\b"):
        chunk_gated_delta_rule(*x)


@pytest.mark.parametrize(
    ("slots", "problem"),
    [([0, 5], "slots of 0 to 4"), ([0, -2], "or -1"), ([2, 2], "two sequences")],
)
def test_slots_are_checked_on_the_host(slots, problem):
    pool = states(5)
    with pytest.raises(ValueError, match=problem):
        chunk_gated_delta_rule(
            *tokens(9, B=2), initial_state=pool, output_state=pool,
            state_indices=torch.tensor(slots),
        )  # fmt: skip


def test_checkpoint_rows_are_checked_on_the_host():
    with pytest.raises(ValueError, match="checkpoint_cu_starts"):
        chunk_gated_delta_rule(
            *tokens(200),
            cu_seqlens=cu(0, 130, 200),
            checkpoint_every_n_tokens=64,
            state_checkpoints=torch.empty(4, HV, D, D),
            checkpoint_cu_starts=cu(0, 1, 3),
        )


def test_outputs_may_not_be_inputs():
    q, k, v, g, beta = tokens(70, heads=(4, 4))
    with pytest.raises(ValueError, match="output is the memory of v"):
        chunk_gated_delta_rule(q, k, v, g, beta, output=v)
    pool = states(1, torch.bfloat16)
    with pytest.raises(ValueError, match="another start, dtype"):
        chunk_gated_delta_rule(
            q, k, v, g, beta, initial_state=pool, output_state=pool.view(torch.float16)
        )


def test_grad_is_refused_and_no_grad_allowed():
    x = tokens(10)
    A_log = torch.nn.Parameter(torch.zeros(HV))
    with pytest.raises(ValueError, match="A_log requires grad"):
        chunk_gated_delta_rule(*x, use_gate_in_kernel=True, A_log=A_log)
    with torch.no_grad():
        chunk_gated_delta_rule(*x, use_gate_in_kernel=True, A_log=A_log)


def test_harmless_options_of_fla_are_accepted():
    x = tokens(70)
    expected = chunk_gated_delta_rule(*x)[0]
    actual = chunk_gated_delta_rule(
        *x, cu_seqlens_cpu=None, chunk_indices=torch.zeros(2, 2), chunk_size=64, head_first=False
    )[0]
    assert torch.equal(actual, expected)


def test_every_argument_is_documented():
    page = (Path(__file__).resolve().parents[1] / "docs" / "api.md").read_text()
    for name in inspect.signature(chunk_gated_delta_rule).parameters:
        if name != "unsupported":
            assert f"`{name}`" in page, name
            assert name in chunk_gated_delta_rule.__doc__


def test_lazy_export():
    assert gdn_prefill.chunk_gated_delta_rule is chunk_gated_delta_rule
    assert callable(gdn_prefill.plan)


def test_memory_that_is_shared_in_part_is_refused():
    q, k, v, g, beta = tokens(65)
    room = torch.zeros(v.numel() + 128, dtype=v.dtype)
    shifted, output = room[:-128].view_as(v), room[128:].view_as(v)
    with pytest.raises(ValueError, match="output is the memory of v"):
        chunk_gated_delta_rule(q, k, shifted, g, beta, output=output)
    pool = torch.zeros(3, v.shape[2], 128, 128)
    with pytest.raises(ValueError, match="output_state is the memory of initial_state with"):
        chunk_gated_delta_rule(
            *(q, k, v, g, beta),
            initial_state=pool[:1].expand(1, -1, -1, -1),
            output_state=pool.view(-1)[1:].as_strided(pool[:1].shape, pool.stride()),
            output_final_state=True,
        )
    # Rows of one pool that lie between each other's are not shared.
    layers = torch.zeros(1, 2, v.shape[2], 128, 128)
    chunk_gated_delta_rule(
        *(q, k, v, g, beta),
        initial_state=layers[:, 0],
        output_state=layers[:, 1],
        output_final_state=True,
    )


def test_a_plans_own_output_is_no_input():
    q, k, v, g, beta = tokens(65)
    plan = gdn_prefill.plan(q.shape[2], v.shape[2], 65, device="cpu")
    output, _ = plan.run(q, k, v, g, beta)
    with pytest.raises(ValueError, match="output is the memory of v"):
        plan.run(q, k, output, g, beta)
