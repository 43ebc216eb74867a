"""The portable backend against the float64 references, at the tolerance of the cases."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import gdn_prefill
from cases import Case, hidden_cases, load_cases, make_inputs
from gdn_prefill.torch_backend import cumsum_torch, forward_torch, solve_kkt_torch
from reference.chunked import chunk_cumsum, gdn_chunked, solve_A
from reference.recurrent import gdn_recurrent

SCALE = 128**-0.5
TOLERANCE = {"rtol": 5e-3, "atol": 5e-3, "check_dtype": False}
SMALL = [case for case in load_cases() if case.state_heads * case.T <= 2**15]
TWINS = [case for case in hidden_cases(42) if case.state_heads * case.T <= 2**14]


# One bf16 rounding of A and the fp32 error of differences of the gate sum.
A_TOLERANCE = {"rtol": 2**-8, "atol": 1e-4}


def run(inputs, scale=SCALE, A=None):
    g_cumsum = cumsum_torch(inputs.g)
    if A is None:
        A = solve_kkt_torch(inputs.k, g_cumsum, inputs.beta)
    return forward_torch(
        inputs.q, inputs.k, inputs.v, g_cumsum, inputs.beta, A, inputs.initial_state, scale
    )


def expected(inputs, reference=gdn_chunked, scale=None):
    return reference(
        inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, inputs.initial_state, scale
    )


@pytest.mark.parametrize("case", SMALL + TWINS, ids=lambda case: case.name)
def test_the_labs_cases(case):
    inputs = make_inputs(case)
    for ours, reference in zip(run(inputs), expected(inputs), strict=True):
        torch.testing.assert_close(
            ours, reference, rtol=case.rtol, atol=case.atol, check_dtype=False
        )


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32),
    B=st.integers(1, 3),
    T=st.one_of(st.sampled_from([1, 63, 64, 65, 127, 128]), st.integers(1, 200)),
    Hq=st.integers(1, 2),
    group=st.sampled_from([1, 2, 3]),
    state=st.booleans(),
    decay=st.sampled_from(["lab", "none", "strong", "extremes"]),
    collinear=st.booleans(),
    scale=st.sampled_from([None, 1.0]),
)
def test_any_shape_and_gate(seed, B, T, Hq, group, state, decay, collinear, scale):
    case = Case("drawn", B, T, Hq, Hq * group, state, "mixed")
    inputs = make_inputs(case, seed=seed)
    if decay == "none":
        inputs.g.zero_()
    elif decay == "strong":
        inputs.g.fill_(-20)
    elif decay == "extremes":
        inputs.g[:, 1::3] = -20
    if collinear:
        inputs.k.copy_(F.normalize(inputs.k[:, :1].float() + 0.05 * inputs.k.float(), dim=-1))
    A = None
    if collinear and decay == "none":
        # The rounding of a bf16 A adds up over keys that agree and are never forgotten, to 1 % of
        # the state: A is judged by itself, and the forward pass from the exact one.
        A = solve_A(inputs.k, inputs.g, inputs.beta)
        rounded = solve_kkt_torch(inputs.k, cumsum_torch(inputs.g), inputs.beta)
        torch.testing.assert_close(rounded.double(), A, **A_TOLERANCE)
        A = A.float()
    ours = run(inputs, SCALE if scale is None else scale, A)
    for mine, reference in zip(ours, expected(inputs, gdn_recurrent, scale), strict=True):
        torch.testing.assert_close(mine, reference, **TOLERANCE)


def test_types_shapes_and_freshness():
    inputs = make_inputs(Case("small", 2, 70, 2, 4, True, "random_decay"))
    copies = [x.clone() for x in vars(inputs).values()]
    output, state = run(inputs)
    assert (output.dtype, output.shape) == (torch.bfloat16, (2, 70, 4, 128))
    assert (state.dtype, state.shape) == (torch.float32, (2, 4, 128, 128))
    assert output.is_contiguous() and state.is_contiguous()
    assert all(torch.equal(a, b) for a, b in zip(vars(inputs).values(), copies, strict=True))
    assert state.data_ptr() != inputs.initial_state.data_ptr()


@pytest.mark.parametrize("T", [1, 64, 65, 150])
@pytest.mark.parametrize("strong", [False, True])
def test_preprocessing(T, strong):
    inputs = make_inputs(Case("small", 2, T, 2, 4, False, "mixed"))
    if strong:
        inputs.g[:, 1::2] = -20
    g_cumsum = cumsum_torch(inputs.g)
    A = solve_kkt_torch(inputs.k, g_cumsum, inputs.beta)
    assert (g_cumsum.dtype, A.dtype) == (torch.float32, torch.bfloat16)
    assert g_cumsum.is_contiguous() and A.is_contiguous()
    torch.testing.assert_close(g_cumsum, chunk_cumsum(inputs.g).float(), rtol=1e-5, atol=1e-6)
    exact = solve_A(inputs.k, inputs.g, inputs.beta)
    torch.testing.assert_close(A.double(), exact, **A_TOLERANCE)
    tail = T % 64
    if tail:
        assert torch.count_nonzero(A[:, T - tail :, :, tail:]) == 0


def test_unwritten_memory_is_never_read():
    inputs = make_inputs(Case("small", 1, 65, 1, 1, False, "random_decay"))
    g_cumsum = cumsum_torch(inputs.g)
    A = solve_kkt_torch(inputs.k, g_cumsum, inputs.beta)
    arguments = (inputs.q, inputs.k, inputs.v, g_cumsum, inputs.beta)
    clean = forward_torch(*arguments, A, None, SCALE)
    A[:, 64:, :, 1:] = float("nan")
    poisoned = forward_torch(*arguments, A, None, SCALE)
    assert all(torch.equal(a, b) for a, b in zip(clean, poisoned, strict=True))


@pytest.mark.gpu
def test_on_a_gpu():
    inputs = make_inputs(Case("small", 2, 130, 2, 4, True, "mixed"), device="cuda")
    for ours, reference in zip(run(inputs), expected(inputs), strict=True):
        assert ours.is_cuda
        torch.testing.assert_close(ours, reference, **TOLERANCE)


class Wrapped(torch.Tensor):
    """A tensor subclass."""


def small_call(**changes):
    case = Case("small", 1, 70, 1, 2, True, "mixed", 5e-3, 5e-3)
    inputs = make_inputs(case)
    g_cumsum, A = gdn_prefill.prepare(inputs.k, inputs.g, inputs.beta)
    call = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "g_cumsum": g_cumsum}
    call |= {"beta": inputs.beta, "A": A, "initial_state": inputs.initial_state}
    return call | changes


def test_autocast_around_the_call_changes_nothing():
    call = small_call()
    expected = gdn_prefill.gdn_prefill_forward(**call)
    A = gdn_prefill.solve_kkt(call["k"], call["g_cumsum"], call["beta"])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for got, want in zip(gdn_prefill.gdn_prefill_forward(**call), expected, strict=True):
            assert torch.equal(got, want)
        assert torch.equal(gdn_prefill.solve_kkt(call["k"], call["g_cumsum"], call["beta"]), A)


def test_results_are_plain_tensors_whatever_the_inputs_are():
    call = {name: tensor.as_subclass(Wrapped) for name, tensor in small_call().items()}
    results = [
        *gdn_prefill.gdn_prefill_forward(**call),
        *gdn_prefill.prepare(call["k"], call["g_cumsum"], call["beta"]),
        gdn_prefill.chunk_gate_cumsum(call["g_cumsum"]),
    ]
    assert {type(result) for result in results} == {torch.Tensor}


@pytest.mark.parametrize(
    ("option", "error", "message"),
    [
        ({"block_dv": 7}, ValueError, "block_dv is 7; it must be one of 64, 128"),
        ({"block_dv": "x"}, ValueError, "block_dv is 'x'"),
        ({"reuse_outputs": "no"}, TypeError, "reuse_outputs is 'no'"),
        ({"backend": "bogus"}, ValueError, "backend='bogus' is not one of"),
        ({"scale": 10**400}, ValueError, "finite in double precision"),
    ],
)
def test_options_are_refused_by_name(option, error, message):
    with pytest.raises(error, match=message):
        gdn_prefill.gdn_prefill_forward(**small_call(), **option)


def test_meta_tensors_are_refused():
    call = {name: tensor.to("meta") for name, tensor in small_call().items()}
    with pytest.raises(ValueError, match="meta device"):
        gdn_prefill.gdn_prefill_forward(**call)
