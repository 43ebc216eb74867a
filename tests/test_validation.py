"""Every bad argument is refused by name, before anything runs."""

import numpy as np
import pytest
import torch

from gdn_prefill.validation import (
    MAX_STATES,
    MAX_TOKENS,
    ForwardShape,
    check_address,
    check_forward,
    check_gate,
    check_prepare,
    check_scale,
)

BF16, FP32 = torch.bfloat16, torch.float32
B, T, HQ, HV = 2, 65, 2, 6
MAPPED = ("q", "k", "v", "A", "initial_state")


def forward_arguments(**replacements):
    """Valid arguments of check_forward on the meta device, some of them replaced."""

    def meta(dtype, *shape):
        return torch.empty(shape, dtype=dtype, device="meta")

    arguments = {
        "q": meta(BF16, B, T, HQ, 128),
        "k": meta(BF16, B, T, HQ, 128),
        "v": meta(BF16, B, T, HV, 128),
        "g_cumsum": meta(FP32, B, T, HV),
        "beta": meta(FP32, B, T, HV),
        "A": meta(BF16, B, T, HV, 64),
        "initial_state": meta(FP32, B, HV, 128, 128),
    }
    return arguments | replacements


def prepare_arguments(**replacements):
    arguments = forward_arguments()
    picked = {"k": arguments["k"], "g": arguments["g_cumsum"], "beta": arguments["beta"]}
    return picked | replacements


def meta_like(tensor, *shape):
    return torch.empty(shape, dtype=tensor.dtype, device="meta")


CHECKS = [(check_forward, forward_arguments), (check_prepare, prepare_arguments)]
ARGUMENTS = [(check, make, name) for check, make in CHECKS for name in make()]
every_argument = pytest.mark.parametrize(("check", "make", "name"), ARGUMENTS)


def test_valid_arguments_give_their_sizes():
    shape = ForwardShape(B, T, HQ, HV)
    assert check_forward(**forward_arguments()) == shape
    assert check_forward(**forward_arguments(initial_state=None)) == shape
    assert check_prepare(**prepare_arguments()) == shape
    assert (shape.heads_q, shape.heads_v, shape.head_dim) == (HQ, HV, 128)
    assert shape.output == (B, T, HV, 128)
    assert shape.state == (B, HV, 128, 128)
    check_gate(prepare_arguments()["g"])


@every_argument
def test_no_tensor(check, make, name):
    absent = [] if name == "initial_state" else [None]
    for value in (*absent, 3.0, [[1.0]], np.zeros((2, 2), np.float32)):
        with pytest.raises(TypeError, match=rf"^{name} is a \w+; it must be a torch.Tensor"):
            check(**make(**{name: value}))


@every_argument
def test_wrong_dtype(check, make, name):
    good = make()[name]
    for dtype in {torch.float16, torch.float64, torch.int32, BF16, FP32} - {good.dtype}:
        message = rf"^{name} has dtype {dtype}; it must be {good.dtype}"
        with pytest.raises(TypeError, match=message):
            check(**make(**{name: good.to(dtype)}))


@every_argument
def test_wrong_rank(check, make, name):
    good = make()[name]
    for bad in (meta_like(good, *good.shape, 1), meta_like(good, *good.shape[:-1])):
        with pytest.raises(
            ValueError, match=rf"^{name} has shape \({', '.join(map(str, bad.shape))}"
        ):
            check(**make(**{name: bad}))


@every_argument
def test_wrong_size_in_every_dimension(check, make, name):
    good = make()[name]
    for dimension in range(good.dim()):
        if check is check_prepare and (name, dimension) == ("k", 2):
            continue  # nothing else there has query/key heads: see test_heads_must_divide
        for change in (-1, 1):
            sizes = list(good.shape)
            sizes[dimension] += change
            with pytest.raises(ValueError, match=r"it must be|must be a multiple"):
                check(**make(**{name: meta_like(good, *sizes)}))


@every_argument
def test_non_contiguous_is_refused_not_repaired(check, make, name):
    good = make()[name]
    dense_twin = meta_like(good, *good.shape[:-1], good.shape[-1] * 2)[..., ::2]
    transposed = good.transpose(0, 1).contiguous().transpose(0, 1)
    expanded = good[:, :1].expand(good.shape)
    for bad in (dense_twin, transposed, expanded):
        assert bad.shape == good.shape
        with pytest.raises(ValueError, match=rf"^{name} is not contiguous.*{name}\.contiguous\(\)"):
            check(**make(**{name: bad}))


@every_argument
def test_an_argument_that_requires_grad_is_refused_while_grad_is_recorded(check, make, name):
    arguments = make()
    arguments[name].requires_grad_()
    with pytest.raises(ValueError, match=rf"^{name} requires grad"):
        check(**arguments)
    with torch.no_grad():
        check(**arguments)


@every_argument
def test_other_layout_is_refused(check, make, name):
    good = torch.ones(make()[name].shape, dtype=make()[name].dtype)
    with pytest.raises(ValueError, match=rf"^{name} has layout torch.sparse_coo"):
        check(**make(**{name: good.to_sparse()}))


@every_argument
def test_other_device_is_named(check, make, name):
    good = make()[name]
    with pytest.raises(ValueError, match="all tensors must be on one device"):
        check(**make(**{name: torch.empty(good.shape, dtype=good.dtype, device="cpu")}))


@pytest.mark.parametrize("sizes", [(0, T, HQ, HV), (B, 0, HQ, HV), (B, T, 0, HV), (B, T, HQ, 0)])
def test_empty_dimensions_are_refused(sizes):
    b, t, hq, hv = sizes
    good = forward_arguments()
    arguments = {
        "q": meta_like(good["q"], b, t, hq, 128),
        "k": meta_like(good["q"], b, t, hq, 128),
        "v": meta_like(good["v"], b, t, hv, 128),
        "g_cumsum": meta_like(good["beta"], b, t, hv),
        "beta": meta_like(good["beta"], b, t, hv),
        "A": meta_like(good["A"], b, t, hv, 64),
    }
    with pytest.raises(ValueError, match="must be at least 1"):
        check_forward(**arguments)
    gate = arguments["beta"]
    with pytest.raises(ValueError, match="must be at least 1"):
        check_prepare(arguments["k"], gate, gate)
    if hq:
        with pytest.raises(ValueError, match="must be at least 1"):
            check_gate(gate)


@pytest.mark.parametrize(("hq", "hv"), [(2, 3), (4, 2), (3, 7)])
def test_heads_must_divide(hq, hv):
    good = forward_arguments()
    q, v = meta_like(good["q"], B, T, hq, 128), meta_like(good["v"], B, T, hv, 128)
    with pytest.raises(ValueError, match=f"Hv={hv} value heads with Hq={hq}"):
        check_forward(**forward_arguments(q=q, k=q, v=v))
    gate = meta_like(good["beta"], B, T, hv)
    with pytest.raises(ValueError, match=f"Hv={hv} value heads with Hq={hq}"):
        check_prepare(q, gate, gate)


def test_element_counts_past_32_bits_are_fine():
    gate = torch.empty((1, 2**26, 64), dtype=FP32, device="meta")
    k = torch.empty((1, 2**26, 64, 128), dtype=BF16, device="meta")
    assert k.numel() > 2**38
    assert check_prepare(k, gate, gate).T == 2**26


@pytest.mark.parametrize("bad", [(1, MAX_TOKENS + 1, 1), (MAX_STATES + 1, 1, 1), (2**20, 1, 2**10)])
def test_sizes_past_the_kernels_indices_are_refused(bad):
    gate = torch.empty(bad, dtype=FP32, device="meta")
    with pytest.raises(ValueError, match="are supported"):
        check_gate(gate)


def test_messages_carry_value_and_rule():
    good = forward_arguments()
    v = meta_like(good["v"], B, T + 1, HV, 128)
    with pytest.raises(ValueError) as error:
        check_forward(**forward_arguments(v=v))
    assert str(error.value) == "v has shape (2, 66, 6, 128); it must be [2, 65, Hv, 128]"


def test_scale():
    assert check_scale(None) == 128**-0.5
    assert check_scale(2) == 2.0 and isinstance(check_scale(np.float32(0.5)), float)
    for bad in ("1", True, torch.ones(1), 1j):
        with pytest.raises(TypeError, match="^scale is a"):
            check_scale(bad)
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="must be finite"):
            check_scale(bad)


def test_address():
    check_address("q", 0x7F0000000010)
    with pytest.raises(ValueError, match="^q starts at address 0x7f0000000008; .*multiple of 16"):
        check_address("q", 0x7F0000000008)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MAPPED)
def test_misaligned_tensor_on_a_gpu(name):
    arguments = {key: torch.zeros_like(x, device="cuda") for key, x in forward_arguments().items()}
    check_forward(**arguments)
    good = arguments[name]
    storage = torch.zeros(good.numel() + 1, dtype=good.dtype, device="cuda")
    arguments[name] = storage[1:].view(good.shape)
    with pytest.raises(ValueError, match=f"^{name} starts at address"):
        check_forward(**arguments)
