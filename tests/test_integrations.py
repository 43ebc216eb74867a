"""The adapters: FLA through its own dispatch, SGLang and vLLM by the shapes of their calls."""

import importlib
import importlib.util
import sys
import types
from pathlib import Path

import pytest
import torch
from test_operator import HQ, HV, D, cu, states, tokens

from gdn_prefill import chunk_gated_delta_rule

fla_installed = importlib.util.find_spec("fla") is not None
needs_fla = pytest.mark.skipif(not fla_installed, reason="fla-core is not installed")
triton_installed = importlib.util.find_spec("triton") is not None


def load_backends(monkeypatch):
    """fla.backends itself; FLA's other modules import Triton, so its utilities are stood in for
    where that is missing.
    """
    if triton_installed:
        return importlib.import_module("fla.backends")
    utilities = types.ModuleType("fla.utils")
    utilities.find_spec_cached = importlib.util.find_spec
    utilities.has_usable_nvcc = lambda: False
    package = types.ModuleType("fla")
    folder = Path(importlib.util.find_spec("fla").origin).parent
    package.__path__ = [str(folder)]
    monkeypatch.setitem(sys.modules, "fla", package)
    monkeypatch.setitem(sys.modules, "fla.utils", utilities)
    monkeypatch.delitem(sys.modules, "fla.backends", raising=False)
    return importlib.import_module("fla.backends")


@pytest.fixture
def adapter(monkeypatch):
    """(FLA's registry with this package's backend in it, the backend's class)."""
    backends = load_backends(monkeypatch)
    monkeypatch.delitem(sys.modules, "gdn_prefill.integrations.fla", raising=False)
    module = importlib.import_module("gdn_prefill.integrations.fla")
    registry = backends._get_operation_registry("gated_delta_rule")
    yield registry, module.GdnPrefillBackend
    registry._backends.pop("gdn_prefill", None)
    sys.modules.pop("gdn_prefill.integrations.fla", None)


@pytest.fixture
def entry(adapter):
    """FLA's entry point: its own where Triton lets it be imported, else its dispatch around a
    function of that name which only says that it was reached.
    """
    registry, backend = adapter
    if triton_installed:
        operations = importlib.import_module("fla.ops.gated_delta_rule")
        yield operations.chunk_gated_delta_rule
        return

    def chunk_gated_delta_rule(*operands, **named):
        return "fla"

    yield registry.dispatch(chunk_gated_delta_rule)


@needs_fla
def test_fla_asks_this_backend_before_flash_qla(adapter):
    registry, backend = adapter
    mine = registry._backends["gdn_prefill"]
    assert isinstance(mine, backend) and mine.is_available()
    if triton_installed:
        importlib.import_module("fla.ops.gated_delta_rule")
        others = [b for b in registry._get_sorted_backends() if b.is_available() and b is not mine]
        assert all(mine.priority < other.priority for other in others)
    assert mine.priority < 3


@needs_fla
def test_fla_switch(adapter, monkeypatch):
    mine = adapter[0]._backends["gdn_prefill"]
    assert mine.is_enabled()
    monkeypatch.setenv("FLA_GDN_PREFILL", "0")
    assert not mine.is_enabled()


@needs_fla
def test_a_call_through_fla(entry, adapter, monkeypatch):
    monkeypatch.setattr(adapter[1], "runs_on", "torch")
    x = tokens(90)
    initial, bounds = states(2), cu(0, 40, 90, dtype=torch.int64)
    named = {"initial_state": initial, "output_final_state": True, "cu_seqlens": bounds}
    expected = chunk_gated_delta_rule(*x, use_qk_l2norm_in_kernel=True, **named)
    actual = entry(
        *x, use_qk_l2norm_in_kernel=True, cu_seqlens_cpu=bounds, chunk_indices=None, **named
    )
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    # The raw gate's parameters are read only where FLA reads them.
    parameters = {"A_log": torch.zeros(HV), "dt_bias": torch.ones(HV)}
    plain = entry(*x, **parameters)[0]
    assert torch.equal(plain, chunk_gated_delta_rule(*x)[0])
    raw = entry(*x, use_gate_in_kernel=True, **parameters)[0]
    assert torch.equal(raw, chunk_gated_delta_rule(*x, use_gate_in_kernel=True, **parameters)[0])
    assert not torch.equal(raw, plain)
    # By position FLA's tenth argument is the sigmoid of beta, not cu_seqlens.
    sigmoid = entry(*x, None, None, False, False, True)[0]
    assert torch.equal(sigmoid, chunk_gated_delta_rule(*x, use_beta_sigmoid_in_kernel=True)[0])


@needs_fla
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"chunk_size": 32}, "chunk_size"),
        ({"cp_context": object()}, "cp_context"),
        ({"transpose_state_layout": True}, "state_v_first"),
        ({"lower_bound": -5.0}, "lower_bound"),
        ({"initial_state": torch.zeros(1, HV, D, D, dtype=torch.float64)}, "initial_state"),
        ({"use_gate_in_kernel": True}, "A_log"),
        ({"q": torch.zeros(1, 90, HQ, D)}, "q has dtype"),
        ({"v": torch.zeros(1, 90, HV, 64, dtype=torch.bfloat16)}, "128"),
        ({"k": torch.zeros(1, 90, HQ, D, dtype=torch.bfloat16, requires_grad=True)}, "grad"),
    ],
)
def test_fla_is_declined_with_a_reason(adapter, monkeypatch, change, reason):
    registry, backend = adapter
    monkeypatch.setattr(backend, "runs_on", "torch")
    call = dict(zip(("q", "k", "v", "g", "beta"), tokens(90), strict=True)) | change
    accepted, why = registry._backends["gdn_prefill"].verify("chunk_gated_delta_rule", **call)
    assert not accepted and reason in why
    accepted, why = registry._backends["gdn_prefill"].verify("chunk_gated_delta_rule", *tokens(90))
    assert accepted, why


@needs_fla
def test_fla_keeps_what_is_not_on_a_hopper_gpu(adapter, entry):
    accepted, why = (
        adapter[0]._backends["gdn_prefill"].verify("chunk_gated_delta_rule", *tokens(90))
    )
    assert not accepted and "Hopper" in why
    if not triton_installed:
        assert entry(*tokens(90)) == "fla"


def serving_call():
    """(q, k, v, g, beta, pool [slots, Hv, V, K], slots, bounds) as an engine has them."""
    x = tokens(200)
    q, k = (3 * t for t in x[:2])
    return (
        q,
        k,
        *x[2:],
        states(5),
        torch.tensor([4, -1, 0], dtype=torch.int32),
        cu(0, 64, 70, 200),
    )


def test_sglang_extend_updates_the_pool():
    from gdn_prefill.integrations.sglang import GdnPrefillExtend

    q, k, v, g, beta, pool, slots, bounds = serving_call()
    expected = chunk_gated_delta_rule(
        q, k, v, g, beta,
        initial_state=torch.stack([pool[4], torch.zeros_like(pool[0]), pool[0]]),
        output_final_state=True, use_qk_l2norm_in_kernel=True, cu_seqlens=bounds,
        state_v_first=True, output_h=True,
    )  # fmt: skip
    before = pool.clone()
    output, last, h = GdnPrefillExtend().extend(
        q, k, v, g, beta, ssm_states=pool, cache_indices=slots, query_start_loc=bounds,
        state_checkpoint_cu_starts=None, num_state_checkpoints=None,
        state_checkpoint_every_n_tokens=None, chunk_indices=None,
    )  # fmt: skip
    assert last is None and torch.equal(output, expected[0])
    assert torch.equal(pool[[4, 0]], expected[1][[0, 2]])
    assert torch.equal(pool[[1, 2, 3]], before[[1, 2, 3]])
    assert torch.equal(h[0, :5], expected[2][0, :5])


def test_sglang_checkpoints_and_scoring():
    from gdn_prefill.integrations.sglang import GdnPrefillExtend

    class Base:
        def __init__(self, name):
            self.name = name

    class Kernel(GdnPrefillExtend, Base):
        pass

    q, k, v, g, beta, pool, slots, bounds = serving_call()
    before = pool.clone()
    kernel = Kernel("triton", per_chunk_states=False)
    assert kernel.name == "triton"
    named = {"ssm_states": pool, "cache_indices": slots, "query_start_loc": bounds}
    _, _, nothing = kernel.extend(q, k, v, g, beta, inplace_update=False, **named)
    assert nothing is None and torch.equal(pool, before)
    _, _, kept = kernel.extend(
        q, k, v, g, beta, state_checkpoint_cu_starts=cu(0, 1, 1, 3), num_state_checkpoints=3,
        state_checkpoint_every_n_tokens=64, **named,
    )  # fmt: skip
    assert kept.shape == (1, 3, HV, D, D)
    # The first sequence is one chunk: its checkpoint is its final state.
    assert torch.equal(kept[0, 0], pool[4])


def test_vllm_forward_writes_to_the_layers_output():
    from gdn_prefill.integrations.vllm import forward

    q, k, v, g, beta, pool, _, bounds = serving_call()
    expected = chunk_gated_delta_rule(
        q, k, v, g, beta, initial_state=pool[:3], output_final_state=True,
        use_qk_l2norm_in_kernel=True, cu_seqlens=bounds, state_v_first=True,
    )  # fmt: skip
    core_attn_out = torch.full((230, HV, D), 7.0, dtype=torch.bfloat16)
    output, final_state = forward(
        q=q, k=k, v=v, g=g, beta=beta, initial_state=pool[:3], output_final_state=True,
        cu_seqlens=bounds, chunk_indices=None, chunk_offsets=None, core_attn_out=core_attn_out,
    )  # fmt: skip
    assert torch.equal(output, expected[0]) and torch.equal(final_state, expected[1])
    assert torch.equal(core_attn_out[:200].unsqueeze(0), expected[0])
    assert (core_attn_out[200:] == 7).all()
    assert forward(q, k, v, g, beta, None, False, bounds)[1] is None
