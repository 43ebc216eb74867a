"""The two float64 references check each other; neither shares arithmetic with the other."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import Case, make_inputs
from reference.chunked import CHUNK, chunk_cumsum, gdn_chunked, solve_A
from reference.recurrent import gdn_recurrent

EXACT = {"rtol": 1e-9, "atol": 1e-11}
TENSORS = ("q", "k", "v", "g", "beta", "initial_state")


def draw(seed, B=1, T=70, Hq=1, Hv=2, dk=16, dv=8, state=True):
    """Small inputs of the operator in float64; the head dimensions are not tied to 128."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return {
        "q": F.normalize(normal(B, T, Hq, dk), dim=-1),
        "k": F.normalize(normal(B, T, Hq, dk), dim=-1),
        "v": normal(B, T, Hv, dv),
        "g": F.logsigmoid(normal(B, T, Hv)) / 16,
        "beta": normal(B, T, Hv).sigmoid(),
        "initial_state": normal(B, Hv, dk, dv) if state else None,
    }


def strong(g):
    return torch.full_like(g, -20.0)


def no_decay(g):
    return torch.zeros_like(g)


def every_second_open(g):
    g = g.clone()
    g[:, ::2] = 0
    return g


def mixed_extremes(g):
    g = g.clone()
    g[:, ::3] = -20
    g[:, 1::3] = 0
    return g


GATES = [torch.clone, strong, no_decay, every_second_open, mixed_extremes]


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    B=st.integers(1, 3),
    T=st.one_of(st.sampled_from([1, 63, 64, 65, 127, 128, 129]), st.integers(1, 200)),
    Hq=st.integers(1, 2),
    group=st.integers(1, 3),
    state=st.booleans(),
    gate=st.sampled_from(GATES),
    collinear=st.booleans(),
    scale=st.sampled_from([None, 1.0, 0.3]),
)
def test_chunked_equals_recurrent(seed, B, T, Hq, group, state, gate, collinear, scale):
    inputs = draw(seed, B=B, T=T, Hq=Hq, Hv=Hq * group, state=state)
    inputs["g"] = gate(inputs["g"])
    if collinear:
        inputs["k"] = F.normalize(inputs["k"][:, :1] + 1e-3 * inputs["k"], dim=-1)
    output, final_state = gdn_chunked(**inputs, scale=scale)
    expected_output, expected_state = gdn_recurrent(**inputs, scale=scale)
    torch.testing.assert_close(output, expected_output, **EXACT)
    torch.testing.assert_close(final_state, expected_state, **EXACT)


def test_the_labs_inputs_at_full_head_size():
    case = Case("lab", B=2, T=129, Hq=2, Hv=4, initial_state=True, gate="mixed")
    inputs = make_inputs(case)
    arguments = [getattr(inputs, name) for name in TENSORS]
    for ours, theirs in zip(gdn_chunked(*arguments), gdn_recurrent(*arguments), strict=True):
        assert ours.dtype == theirs.dtype == torch.float64
        torch.testing.assert_close(ours, theirs, **EXACT)


def test_one_token_by_hand():
    q = k = torch.tensor([3.0, 4.0]).div(5).view(1, 1, 1, 2)
    v = torch.tensor([2.0]).view(1, 1, 1, 1)
    g, beta = torch.tensor([[[0.5]]]).log(), torch.tensor([[[0.25]]])
    state = torch.tensor([1.0, 2.0]).view(1, 1, 2, 1)
    # decayed state (0.5, 1), prediction 0.6*0.5 + 0.8*1 = 1.1, error 0.25*(2 - 1.1) = 0.225
    expected = torch.tensor([0.5 + 0.6 * 0.225, 1 + 0.8 * 0.225], dtype=torch.float64)
    for reference in (gdn_chunked, gdn_recurrent):
        output, final_state = reference(q, k, v, g, beta, state, scale=2.0)
        torch.testing.assert_close(final_state.flatten(), expected, rtol=1e-6, atol=0)
        assert output.item() == pytest.approx(2 * (1.1 + 0.225), rel=1e-6)


@pytest.mark.parametrize("reference", [gdn_chunked, gdn_recurrent])
def test_state_carries_across_a_split(reference):
    inputs = draw(5, T=150)
    whole, whole_state = reference(**inputs)
    state, parts = inputs["initial_state"], []
    for tokens in (slice(0, 64), slice(64, 100), slice(100, 150)):
        piece = {name: inputs[name][:, tokens] for name in TENSORS[:-1]}
        output, state = reference(**piece, initial_state=state)
        parts.append(output)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, **EXACT)
    torch.testing.assert_close(state, whole_state, **EXACT)


@pytest.mark.parametrize("reference", [gdn_chunked, gdn_recurrent])
def test_batch_and_heads_do_not_mix(reference):
    inputs = draw(6, B=2, Hq=2, Hv=4)
    output, state = reference(**inputs)
    for b in range(2):
        for h in range(4):
            alone = {
                name: x[b : b + 1, :, h // 2 : h // 2 + 1]
                if name in ("q", "k")
                else x[b : b + 1, h : h + 1]
                if name == "initial_state"
                else x[b : b + 1, :, h : h + 1]
                for name, x in inputs.items()
            }
            one_output, one_state = reference(**alone)
            torch.testing.assert_close(one_output[0, :, 0], output[b, :, h], **EXACT)
            torch.testing.assert_close(one_state[0, 0], state[b, h], **EXACT)


def test_inputs_are_left_alone():
    inputs = draw(7)
    copies = {name: x.clone() for name, x in inputs.items()}
    gdn_chunked(**inputs)
    gdn_recurrent(**inputs)
    assert all(torch.equal(inputs[name], copies[name]) for name in TENSORS)


def test_cumsum_restarts_every_chunk():
    g = draw(8, B=2, T=150, Hv=3)["g"].float()
    sums = chunk_cumsum(g)
    assert sums.dtype == torch.float64 and sums.is_contiguous()
    for t in range(150):
        start = t // CHUNK * CHUNK
        torch.testing.assert_close(sums[:, t], g[:, start : t + 1].double().sum(1))


@pytest.mark.parametrize("gate", GATES)
def test_A_inverts_its_definition(gate):
    inputs = draw(9, B=2, T=150, Hq=2, Hv=4)
    g, k, beta = gate(inputs["g"]), inputs["k"], inputs["beta"]
    A, sums = solve_A(k, g, beta), chunk_cumsum(g)
    assert A.shape == (2, 150, 4, CHUNK) and A.dtype == torch.float64 and A.is_contiguous()
    for start in range(0, 150, CHUNK):
        stop = min(start + CHUNK, 150)
        l = stop - start
        for b in range(2):
            for h in range(4):
                matrix = torch.eye(l, dtype=torch.float64)
                for i in range(l):
                    for j in range(i):
                        decay = (sums[b, start + i, h] - sums[b, start + j, h]).exp()
                        dot = k[b, start + i, h // 2] @ k[b, start + j, h // 2]
                        matrix[i, j] = beta[b, start + i, h] * decay * dot
                rows = A[b, start:stop, h]
                assert torch.count_nonzero(rows[:, l:]) == 0
                assert torch.count_nonzero(rows[:, :l].triu(1)) == 0
                identity = torch.eye(l, dtype=torch.float64)
                torch.testing.assert_close(rows[:, :l] @ matrix, identity, rtol=0, atol=1e-10)
