"""The operator inside other people's graphs: custom ops, torch.compile and torch.export."""

import pytest
import torch
from test_operator import HV, D, cu, states, tokens
from torch.library import opcheck

from gdn_prefill import chunk_gated_delta_rule
from gdn_prefill.custom_op import BUFFER_OP, FRESH_OP

# scale to batch_invariant, then the backend: the order of the ops' schema.
PLAIN = (None, True, False, False, "log", False, False, False, False, 0, None, False, "torch")


def operands(**named):
    q, k, v, g, beta = tokens(90)
    rest = ("initial_state", "cu_seqlens", "A_log", "dt_bias", "state_indices")
    return (q, k, v, g, beta, *(named.get(name) for name in rest))


def test_opcheck_of_the_fresh_op():
    opcheck(FRESH_OP, operands() + PLAIN)
    packed = operands(initial_state=states(4), cu_seqlens=cu(0, 0, 70, 90),
                      state_indices=torch.tensor([3, -1, 0]))  # fmt: skip
    opcheck(FRESH_OP, packed + PLAIN)
    raw = (0.1, False, True, True, "log", True, True, True, True, 0, torch.bfloat16, True, "torch")
    opcheck(FRESH_OP, operands(A_log=torch.zeros(HV), dt_bias=torch.ones(HV)) + raw)


def test_opcheck_of_the_op_with_buffers():
    output = torch.empty(1, 90, HV, D, dtype=torch.bfloat16)
    checkpoints = torch.empty(1, HV, D, D)
    every = (*PLAIN[:9], 64, *PLAIN[10:])
    opcheck(BUFFER_OP, operands() + (output, states(1), checkpoints, None) + every)
    opcheck(BUFFER_OP, operands() + (None, states(1), None, None) + PLAIN)


def fresh(q, k, v, g, beta, initial_state, cu_seqlens):
    return chunk_gated_delta_rule(
        q, k, v, g, beta, None, initial_state, True, True, cu_seqlens, output_h=True
    )


def in_place(q, k, v, g, beta, pool, cu_seqlens):
    output = torch.empty_like(v)
    chunk_gated_delta_rule(
        q, k, v, g, beta,
        initial_state=pool,
        output=output,
        output_state=pool,
        state_indices=torch.tensor([3, -1, 0]),
        cu_seqlens=cu_seqlens,
    )  # fmt: skip
    return output.float() + 1


def same(actual, expected):
    return all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_without_a_break(backend):
    arguments = (*tokens(90), states(3), cu(0, 0, 70, 90))
    compiled = torch.compile(fresh, backend=backend, fullgraph=True)
    # Of h only the rows that sequences own are defined.
    actual, expected = compiled(*arguments), fresh(*arguments)
    assert same(actual[:2], expected[:2])
    assert torch.equal(actual[2][0, :3], expected[2][0, :3])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_update_of_a_pool(backend):
    pools = [states(4), states(4)]
    x, bounds = tokens(90), cu(0, 10, 70, 90)
    expected = in_place(*x, pools[0], bounds)
    actual = torch.compile(in_place, backend=backend, fullgraph=True)(*x, pools[1], bounds)
    assert torch.equal(actual, expected)
    assert torch.equal(pools[0], pools[1])
    assert not torch.equal(pools[0], states(4))


def test_one_compilation_serves_all_lengths():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda *x: chunk_gated_delta_rule(*x)[0], backend=counter, dynamic=True, fullgraph=True
    )
    for T in (90, 130, 65):
        x = tokens(T)
        assert torch.equal(compiled(*x), chunk_gated_delta_rule(*x)[0])
    assert counter.frame_count == 1


class Layer(torch.nn.Module):
    def forward(self, q, k, v, g, beta, initial_state, cu_seqlens):
        return fresh(q, k, v, g, beta, initial_state, cu_seqlens)[:2]


@pytest.mark.parametrize("strict", [False, True])
def test_exported_with_a_dynamic_length(strict):
    arguments = (*tokens(90), states(3), cu(0, 0, 70, 90))
    length = {1: torch.export.Dim("T", min=2, max=4096)}
    exported = torch.export.export(
        Layer(), arguments, dynamic_shapes=(length,) * 5 + (None, None), strict=strict
    )
    assert "gdn_prefill.chunk_gated_delta_rule" in str(exported.graph)
    other = (*tokens(70, seed=5), states(3), cu(0, 20, 70, 70))
    assert same(exported.module()(*other), Layer()(*other))


def test_fake_tensors_have_the_right_shapes():
    with torch._subclasses.FakeTensorMode() as mode:
        x = [mode.from_tensor(t) for t in tokens(90)]
        output, state, h = chunk_gated_delta_rule(
            *x, output_final_state=True, output_h=True, state_dtype=torch.float16
        )
    assert (output.shape, output.dtype) == ((1, 90, HV, D), torch.bfloat16)
    assert (state.shape, state.dtype) == ((1, HV, D, D), torch.float16)
    assert h.shape == (1, 2, HV, D, D)
    with torch._subclasses.FakeTensorMode() as mode, pytest.raises(ValueError, match="beta"):
        q, k, v, g, beta = (mode.from_tensor(t) for t in tokens(90))
        chunk_gated_delta_rule(q, k, v, g, beta[:, :80])


def test_grad_is_refused_at_once():
    q, *rest = tokens(70)
    q.requires_grad_()
    with pytest.raises(ValueError, match="q requires grad"):
        torch.compile(lambda *x: chunk_gated_delta_rule(*x)[0], backend="eager")(q, *rest)
    arguments = (q, *rest, *(None,) * 5, *PLAIN)
    with pytest.raises(ValueError, match="has no backward"):
        torch.ops.gdn_prefill.chunk_gated_delta_rule(*arguments)
    with torch.no_grad():
        torch.ops.gdn_prefill.chunk_gated_delta_rule(*arguments)


def test_reused_outputs_cannot_be_traced():
    call = torch.compile(
        lambda *x: chunk_gated_delta_rule(*x, reuse_outputs=True)[0], backend="eager"
    )
    with pytest.raises(ValueError, match="reuse_outputs"):
        call(*tokens(10))
