"""The verdict on one call: every status that outputs can earn, and the reasons given."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import Case
from harness.check import (
    Status,
    check_result,
    check_unmodified,
    check_values,
    expected_layout,
    poison,
)

CASE = Case("c", 1, 3, 1, 2, False, "random_decay")
OUTPUT = torch.linspace(-2, 2, 3 * 2 * 128, dtype=torch.float64).reshape(1, 3, 2, 128)
STATE = torch.linspace(-3, 3, 2 * 128 * 128, dtype=torch.float64).reshape(1, 2, 128, 128)


def right():
    return OUTPUT.to(torch.bfloat16), STATE.to(torch.float32)


def verdict(result):
    return check_result(CASE, result, OUTPUT, STATE)


def test_right_outputs_pass():
    assert verdict(right()).passed
    assert verdict(list(right())).passed


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 100.0])
def test_one_bad_element_is_enough(index, value):
    result = right()
    result[index].view(-1)[7] = value
    found = verdict(result)
    assert found.status is Status.WRONG
    assert found.reason.startswith(("output: 1 of", "final_state: 1 of")[index])


def test_reason_tells_where_and_how_much():
    output, state = right()
    output[0, 2, 1, 5] += 1
    assert "first at (0, 2, 1, 5), largest finite error 1" in verdict((output, state)).reason


def test_wrong_dtype_before_wrong_shape():
    output, state = right()
    assert verdict((output.float(), state)).status is Status.WRONG_DTYPE
    assert verdict((output, state.bfloat16())).status is Status.WRONG_DTYPE
    assert verdict((output[:, :2], state)).status is Status.WRONG_SHAPE
    assert verdict((output, state.mT[..., :1])).status is Status.WRONG_SHAPE
    assert verdict((output.float()[:, :2], state)).status is Status.WRONG_DTYPE


class Fancy(torch.Tensor):
    """Any subclass at all."""


def test_a_subclass_is_suspect_and_a_parameter_too():
    output, state = right()
    assert verdict((output.as_subclass(Fancy), state)).status is Status.SUSPECT
    assert verdict((output, torch.nn.Parameter(state))).status is Status.SUSPECT


@pytest.mark.parametrize("result", [None, 3, right()[0], (right()[0],), (1, 2), "ab"])
def test_what_is_not_a_pair_of_tensors_is_an_error(result):
    assert verdict(result).status is Status.ERROR


def test_another_device_is_an_error():
    output, state = right()
    found = verdict((output.to("meta"), state))
    assert (found.status, "meta" in found.reason) == (Status.ERROR, True)


def test_a_reference_with_nan_is_the_judges_error():
    broken = OUTPUT.clone()
    broken[0, 0, 0, 0] = float("nan")
    with pytest.raises(ValueError, match="the expected output holds NaN"):
        check_result(CASE, right(), broken, STATE)


@given(st.floats(-1e3, 1e3), st.floats(-10, 10))
def test_values_agree_with_assert_close(expected, error):
    actual = torch.tensor([expected + error], dtype=torch.float32)
    reference = torch.tensor([expected], dtype=torch.float64)
    try:
        torch.testing.assert_close(actual.double(), reference, rtol=5e-3, atol=5e-3)
        close = True
    except AssertionError:
        close = False
    assert check_values("x", actual, reference, 5e-3, 5e-3).passed is close


def test_layouts_follow_the_case():
    output, state = expected_layout(Case("c", 2, 65, 2, 6, True, "mixed"))
    assert (output.shape, output.dtype) == ((2, 65, 6, 128), torch.bfloat16)
    assert (state.shape, state.dtype) == ((2, 6, 128, 128), torch.float32)


def test_modified_inputs_are_named_bit_by_bit():
    inputs = {"q": torch.ones(4), "v": torch.tensor([0.0, float("nan")])}
    clones = {name: tensor.clone() for name, tensor in inputs.items()}
    assert check_unmodified(inputs, clones).passed
    inputs["v"][0] = -0.0
    found = check_unmodified(inputs, clones)
    reason = "v was changed by the call: 1 of 2 elements, first at (0,): -0, was 0"
    assert (found.status, found.reason) == (Status.INPUT_MODIFIED, reason)


def test_the_first_difference_is_shown():
    numbers = torch.arange(24, dtype=torch.float32).view(2, 3, 4)
    changed = numbers.clone()
    changed[1, 2, 1:] = 0.1
    found = check_unmodified({"g": changed}, {"g": numbers})
    assert found.reason.endswith(": 3 of 24 elements, first at (1, 2, 1): 0.100000001, was 21")
    # A state of which each head is a view of its own.
    found = check_unmodified({"g": changed.mT}, {"g": numbers.mT})
    assert found.reason.endswith(": 3 of 24 elements, first at (1, 1, 2): 0.100000001, was 21")
    nan = torch.tensor([0x7FC0, 0x7FC1, -1], dtype=torch.int16).view(torch.bfloat16)
    found = check_unmodified({"k": nan[1:2]}, {"k": nan[2:]})
    assert found.reason.endswith("1 of 1 elements, first at (0,): nan (0x7fc1), was nan (0xffff)")
    found = check_unmodified({"n": torch.tensor([3, 4])}, {"n": torch.tensor([3, 5])})
    assert found.reason.endswith("first at (1,): 4, was 5")


def test_poison_reaches_tensors_and_survives_anything_else():
    output, state = right()
    poison((output, state))
    assert output.isnan().all() and state.isnan().all()
    for other in (None, 3, (1, 2), (torch.ones(2, dtype=torch.int64), output)):
        poison(other)
