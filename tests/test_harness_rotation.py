"""Flipped columns: other inputs, whose results are known exactly."""

import pytest
import torch

from cases import Case, make_inputs
from harness.problem import Prepared, build_problem, expected_values
from harness.rotation import (
    draw_signs,
    empty_like,
    flip_queries,
    flipped_expectations,
    write_flipped,
)

CPU = torch.device("cpu")


def prepared(problem):
    inputs = problem.inputs
    return Prepared(
        inputs.q, inputs.k, inputs.v, problem.g_cumsum, inputs.beta, problem.A, inputs.initial_state
    )


@pytest.mark.parametrize("state", [False, True])
def test_flipped_inputs_give_flipped_results_to_the_last_bit(state):
    case = Case("c", 2, 70, 2, 6, state, "mixed")
    problem = build_problem(case, CPU, seed=7)
    base = prepared(problem)
    target, signs = empty_like(base), draw_signs(case, 11, CPU)
    write_flipped(base, signs, target)
    assert not torch.equal(base.q, target.q) and not torch.equal(base.v, target.v)
    flipped = make_inputs(case, CPU, seed=7)
    flipped = type(flipped)(
        target.q, target.k, target.v, flipped.g, target.beta, target.initial_state
    )
    expected = flipped_expectations(problem.expected_output, problem.expected_state, signs)
    for actual, wanted in zip(expected_values(flipped), expected, strict=True):
        assert torch.equal(actual, wanted)


def test_signs_depend_on_the_seed_alone():
    case = Case("c", 1, 5, 2, 4, False, "mixed")
    one, same, other = (draw_signs(case, seed, CPU) for seed in (1, 1, 2))
    assert torch.equal(one.keys, same.keys) and torch.equal(one.values, same.values)
    assert not torch.equal(one.values, other.values)
    assert set(one.state.unique().tolist()) == {-1.0, 1.0}
    assert one.state.shape == (4, 128, 128)


def test_the_arguments_come_in_the_labs_order():
    case = Case("c", 1, 5, 1, 1, False, "mixed")
    base = prepared(build_problem(case, CPU))
    assert list(base.tensors()) == ["q", "k", "v", "g_cumsum", "beta", "A"]
    assert base.arguments()[6] is None
    assert empty_like(base).initial_state is None


def test_flipped_queries_flip_their_outputs_and_nothing_else():
    case = Case("c", 2, 70, 2, 6, True, "mixed")
    problem = build_problem(case, CPU)
    before = problem.inputs.q.clone()
    factor = flip_queries(problem.inputs.q, case.Hv, seed=3)
    assert factor.shape == (2, 70, 6, 1)
    assert not torch.equal(problem.inputs.q, before)
    output, state = expected_values(problem.inputs)
    assert torch.equal(output, problem.expected_output * factor)
    assert torch.equal(state, problem.expected_state)
