"""Plans and the launch path, with the portable implementation or stand-ins for the two launches."""

import contextlib
import gc
import inspect
import weakref

import pytest
import torch
from test_operator import HQ, HV, D, cu, states, tokens

import gdn_prefill
from gdn_prefill import chunk_gated_delta_rule, operator_cuda, operator_forward, plans, preprocess
from gdn_prefill.caches import BoundedCache
from gdn_prefill.operator import declined, implementation
from gdn_prefill.operator_results import Results
from gdn_prefill.operator_torch import run_torch
from gdn_prefill.operator_validation import Operands, OperatorShape, Options

PREPARE = inspect.signature(preprocess.prepare_operator)


class StandIn:
    """The two launches on the CPU, and graphs that call again what they recorded.

    The first launch marks its tables, the second checks that it is given them and computes with the
    portable implementation from the operands that the first was given.
    """

    def __init__(self):
        self.launches = []
        self.captures = 0
        self.replays = 0

    def prepare(self, *operands, **named):
        PREPARE.bind(*operands, **named)
        self.launches.append("prepare")
        k, g, beta, A, gate, beta_out = operands
        cu_seqlens = named["cu_seqlens"]
        parameters = [named[name] for name in ("A_log", "dt_bias") if named[name] is not None]
        assert all(t.is_contiguous() for t in (g, beta, *parameters))
        assert preprocess.strides_allowed(k)
        assert all(t.dtype == torch.float32 for t in parameters)
        tables = (A, gate, beta_out, named["query_norm"], named["key_norm"], named["order"])
        assert (cu_seqlens is None) == (named["order"] is None)
        for table in tables:
            if table is not None:
                table.fill_(1)
        self.prepared = (k, g, beta, cu_seqlens, named)

    def forward(
        self, q, k, v, gate, beta, A, query_norm, key_norm, cu_seqlens, initial_state,
        initial_rows, output, final_state, final_rows, states, states_starts, workspace, *,
        scale, states_every, states_before, state_v_first, batch_invariant, allow_neg_eigval,
    ):  # fmt: skip
        self.launches.append("forward")
        self.read = [x.data_ptr() for x in (q, k, v)]
        self.strides = [x.stride() for x in (q, k, v)]
        B, T, Hv, _ = v.shape
        for table, shape in ((gate, (B, Hv, T)), (beta, (B, Hv, T)), (A, (B, T, Hv, 64))):
            assert table.shape == shape and (table == 1).all()
        prepared_k, g, raw_beta, prepared_cu, named = self.prepared
        assert prepared_k is k and prepared_cu is cu_seqlens
        norms = (query_norm, key_norm)
        assert [n is None for n in norms] == [named["q"] is None] * 2
        N = B if cu_seqlens is None else len(cu_seqlens) - 1
        options = Options(
            named["gate_mode"], query_norm is not None, named["beta_mode"] != "plain",
            named["beta_mode"] == "twice_sigmoid", scale, final_state is not None, state_v_first,
            output_h=states_before, checkpoint_every=0 if states_before else states_every,
            batch_invariant=batch_invariant,
        )  # fmt: skip
        # run_torch has one set of rows; read the initial rows here, let it write the final ones.
        if initial_state is not None and initial_rows is not None:
            initial_state = initial_state[initial_rows.clamp(min=0)].clone()
            initial_state[initial_rows < 0] = 0
        own = torch.zeros(N, Hv, D, D) if final_state is not None else None
        x = Operands(
            q, k, v, g, raw_beta, initial_state, cu_seqlens, named["A_log"], named["dt_bias"],
            checkpoint_cu_starts=states_starts, state_checkpoints=states,
        )  # fmt: skip
        shape = OperatorShape(B, T, q.shape[2], Hv, N, cu_seqlens is not None)
        run_torch(x, Results(output, own, states), options, shape)
        if final_state is not None:
            rows = range(N) if final_rows is None else final_rows.tolist()
            for n, row in enumerate(rows):
                if row >= 0:
                    final_state[row] = own[n]

    def record(self, device, launch):
        self.captures += 1

        class Graph:
            @staticmethod
            def replay():
                self.replays += 1
                launch()

        return Graph()


@pytest.fixture
def standin(monkeypatch):
    it = StandIn()
    monkeypatch.setattr(preprocess, "prepare_operator", it.prepare)
    monkeypatch.setattr(operator_cuda, "launch_forward", it.forward)
    monkeypatch.setattr(operator_forward, "sm_count", lambda device: 132)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(plans, "implementation", lambda backend, device: operator_cuda.run_cuda)
    monkeypatch.setattr(plans, "record", it.record)
    monkeypatch.setattr(
        "gdn_prefill.operator.implementation", lambda backend, device: operator_cuda.run_cuda
    )
    return it


PACKED = cu(0, 40, 40, 130, 190)


def calls():
    """Operands and options that take every path of the launches, by name."""
    pool = states(7)
    slots = torch.tensor([5, 1, -1, 0])
    raw = {"use_gate_in_kernel": True, "A_log": torch.zeros(HV), "dt_bias": torch.ones(HV)}
    return {
        "dense": {"output_final_state": True, "use_qk_l2norm_in_kernel": True},
        "raw": raw | {"output_final_state": True},
        "bf16 parameters": raw | {"A_log": torch.zeros(HV, dtype=torch.bfloat16)},
        "beta": {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True, "scale": 0.2},
        "linear": {"gate": "linear", "batch_invariant": True},
        "h": {"output_h": True, "cu_seqlens": PACKED, "state_v_first": True},
        "dense h": {"output_h": True},
        "checkpoints": {
            "checkpoint_every_n_tokens": 64,
            "state_checkpoints": torch.zeros(2, HV, D, D),
        },
        "pool": {
            "cu_seqlens": PACKED,
            "state_indices": slots,
            "initial_state": pool,
            "output_state": pool,
        },
        "read pool": {
            "cu_seqlens": PACKED,
            "state_indices": slots,
            "initial_state": pool,
            "output_final_state": True,
        },
        "write pool": {"cu_seqlens": PACKED, "state_indices": slots, "output_state": pool},
    }


def copied(named):
    """The same options with tensors of their own; one that is used twice stays one."""
    copies = {id(t): t.clone() for t in named.values() if isinstance(t, torch.Tensor)}
    return {name: copies.get(id(t), t) for name, t in named.items()}


@pytest.mark.parametrize("name", calls())
def test_the_launches_get_what_they_need(standin, name):
    x, named = tokens(190), calls()[name]
    if named.get("gate") == "linear":
        x = (*x[:3], x[3].exp(), x[4])
    ours, theirs = copied(named), copied(named)
    actual = chunk_gated_delta_rule(*x, backend="cuda", **ours)
    assert standin.launches == ["prepare", "forward"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gdn_prefill.operator.implementation", lambda backend, device: run_torch)
        expected = chunk_gated_delta_rule(*x, **theirs)
    rows = slice(0, 4) if "output_h" in named else slice(None)
    for a, b in zip(actual, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            a, b = (t[0, rows] if t.dim() == 5 else t for t in (a, b))
            torch.testing.assert_close(a, b)
    for key in ("output_state", "state_checkpoints"):
        if key in ours:
            torch.testing.assert_close(ours[key], theirs[key])


def test_views_of_a_projection_are_read_where_they_are(standin):
    q, k, v, g, beta = tokens(100)
    wide = torch.cat((q, k, v), dim=2)
    q, k, v = wide.split((HQ, HQ, HV), dim=2)
    output, _ = chunk_gated_delta_rule(q, k, v, g, beta, backend="cuda")
    assert standin.read == [x.data_ptr() for x in (q, k, v)]
    assert torch.equal(output, chunk_gated_delta_rule(*tokens(100), backend="cuda")[0])
    plan = gdn_prefill.plan(HQ, HV, 100)
    assert torch.equal(plan.run(q, k, v, g, beta)[0], output)


def test_other_views_are_copied_before_the_launches(standin):
    q, k, v, g, beta = tokens(100)
    k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    output, _ = chunk_gated_delta_rule(q, k, v, g, beta, backend="cuda")
    assert [a == x.data_ptr() for a, x in zip(standin.read, (q, k, v), strict=True)] == [1, 0, 0]
    assert torch.equal(output, chunk_gated_delta_rule(*tokens(100), backend="cuda")[0])


def test_a_single_token_of_a_longer_row_has_usual_strides_at_the_launches(standin):
    q, k, v, g, beta = (x[:, :1] for x in tokens(100))
    output, _ = chunk_gated_delta_rule(q, k, v, g, beta, backend="cuda")
    assert output.shape == v.shape
    assert standin.strides[:3] == [(h * 128, h * 128, 128, 1) for h in (HQ, HQ, HV)]


def test_a_plan_checks_once_captures_once_and_replays(standin):
    plan = gdn_prefill.plan(HQ, HV, 190, sequences=4, output_final_state=True)
    x = tokens(190)
    bounds = PACKED.clone()
    run = [plan.run(*x, cu_seqlens=bounds) for _ in range(4)]
    assert (standin.captures, standin.replays) == (1, 3)
    assert all(a is b for other in run for a, b in zip(other, run[0], strict=True))
    # New contents of the same tensors, the lengths included, are computed anew.
    bounds.copy_(cu(0, 10, 100, 101, 150))
    x[2].neg_()
    output, state = plan.run(*x, cu_seqlens=bounds)
    expected = chunk_gated_delta_rule(
        *x, output_final_state=True, cu_seqlens=bounds, backend="cuda"
    )
    assert torch.equal(output[:, :150], expected[0][:, :150])
    assert torch.equal(state, expected[1])
    assert standin.captures == 1


def test_a_plan_allocates_nothing_when_warm(standin, monkeypatch):
    plan = gdn_prefill.plan(HQ, HV, 70, use_qk_l2norm_in_kernel=True, output_final_state=True)
    x = tokens(70)
    plan.run(*x)

    def refuse(*sizes, **named):
        raise AssertionError("allocated")

    seen = {id(t) for t in plan.workspace.values()}
    monkeypatch.setattr(operator_cuda, "new_workspace", refuse)
    monkeypatch.setattr(plans, "new_workspace", refuse)
    output, state = plan.run(*x)
    assert plan.run(*x)[0] is output
    assert {id(t) for t in plan.workspace.values()} == seen


def test_a_plan_serves_other_addresses_and_buffers(standin):
    plan = gdn_prefill.plan(HQ, HV, 70, output_final_state=True)
    kept = tokens(70), tokens(70, seed=2)
    for x in (*kept, *kept, *kept):
        first = plan.run(*x)
        assert torch.equal(first[0], chunk_gated_delta_rule(*x, backend="cuda")[0])
    assert standin.captures == 2
    output = torch.empty_like(first[0])
    final = states(1)
    given = plan.run(*tokens(70, seed=3), output=output, output_state=final)
    assert given[0] is output and given[1] is final
    assert torch.equal(output, chunk_gated_delta_rule(*tokens(70, seed=3), backend="cuda")[0])


def test_capture_keeps_its_operands(standin):
    plan = gdn_prefill.plan(HQ, HV, 70)
    captured = plan.capture(*tokens(70))
    captured.operands.v.mul_(2)
    output, _ = captured.replay()
    assert torch.equal(output, chunk_gated_delta_rule(*captured.operands[:5], backend="cuda")[0])


def test_a_recording_keeps_its_plan(standin, monkeypatch):
    """A graph keeps nothing: the workspace that its launches write to is the plan's."""
    monkeypatch.setattr(plans, "record", lambda device, launch: None)
    plan = gdn_prefill.plan(HQ, HV, 70, use_qk_l2norm_in_kernel=True, output_final_state=True)
    captured = plan.capture(*tokens(70))
    memory = (*plan.workspace.values(), *captured.returned)
    alive = [weakref.ref(thing) for thing in (plan, *memory)]
    standin.prepared = None
    del plan, memory
    gc.collect()
    assert all(reference() is not None for reference in alive)
    del captured
    gc.collect()
    assert all(reference() is None for reference in alive)


def test_a_callers_graph_has_nothing_of_the_kept_plans(standin, monkeypatch):
    """It may outlive their places in the cache, and with those their memory."""
    kept = BoundedCache(1)
    monkeypatch.setattr(plans, "_REUSED", kept)
    x, named = tokens(70), {"output_final_state": True, "backend": "cuda", "reuse_outputs": True}
    for _ in range(3):
        expected = chunk_gated_delta_rule(*x, **named)
    (plan,) = kept.values()
    owned = {t.data_ptr() for t in (*plan.workspace.values(), *expected)}
    seen = []

    def spied(*arguments, **options):
        seen.extend(t.data_ptr() for t in arguments if isinstance(t, torch.Tensor))
        standin.forward(*arguments, **options)

    monkeypatch.setattr(operator_cuda, "launch_forward", spied)
    monkeypatch.setattr(plans, "is_capturing", lambda device: True)
    before = (standin.captures, standin.replays, len(standin.launches))
    actual = chunk_gated_delta_rule(*x, **named)
    assert seen and not owned & set(seen)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    # A layout that is not known yet makes no plan in that graph's memory.
    chunk_gated_delta_rule(*tokens(71), **named)
    assert kept.values() == [plan]
    after = (standin.captures, standin.replays, len(standin.launches))
    assert after == (*before[:2], before[2] + 4)


def test_what_an_evicted_plan_returned_stays(standin, monkeypatch):
    monkeypatch.setattr(plans, "_REUSED", BoundedCache(1))
    named = {"output_final_state": True, "backend": "cuda", "reuse_outputs": True}
    x = tokens(70)
    for _ in range(3):
        held = chunk_gated_delta_rule(*x, **named)
    copies = [t.clone() for t in held]
    chunk_gated_delta_rule(*tokens(71), **named)
    x[2].neg_()
    for _ in range(3):
        again = chunk_gated_delta_rule(*x, **named)
    assert all(torch.equal(a, b) for a, b in zip(held, copies, strict=True))
    assert torch.equal(again[0], chunk_gated_delta_rule(*x, backend="cuda")[0])


def test_workspace_is_what_is_allowed(standin):
    tokens_, heads_q, heads_v = 4096, 2, 8
    plan = gdn_prefill.plan(heads_q, heads_v, tokens_, use_qk_l2norm_in_kernel=True)
    per_token = plan.bytes_per_token
    assert per_token["A"] == heads_v * 64 * 2
    assert per_token["gate"] == per_token["beta_out"] == heads_v * 4
    assert per_token["query_norm"] == per_token["key_norm"] == heads_q * 4
    assert plan.workspace_bytes == tokens_ * sum(per_token.values())
    text = str(plan)
    assert str(plan.workspace_bytes) in text and all(name in text for name in per_token)


def test_the_wide_tile_reads_less_of_A(standin):
    """Ten of sixteen blocks: 80 bytes a token and V head where a chunk of a sequence is full."""
    tokens_, heads_q, heads_v = 8192, 16, 64
    plan = gdn_prefill.plan(heads_q, heads_v, tokens_, sequences=8)
    assert plan.workspace["A"].shape == (tokens_ // 64 + 8, heads_v, 10, 256)
    assert plan.bytes_per_token["A"] == pytest.approx(heads_v * 80 * (1 + 8 / 128))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda x: tokens(71), "T=71"),
        (lambda x: tokens(70, heads=(1, 4)), "Hq=1"),
        (lambda x: tokens(70, dtype=torch.float16), "float16"),
        (lambda x: (*x[:3], x[3].mT.contiguous().mT, x[4]), "g with dtype .* copied"),
        (lambda x: (None, *x[1:]), "q is None"),
        (lambda x: ([1], *x[1:]), "q is a list"),
    ],
)
def test_a_plan_refuses_other_calls(standin, change, problem):
    plan = gdn_prefill.plan(HQ, HV, 70)
    with pytest.raises((TypeError, ValueError), match=problem):
        plan.run(*change(tokens(70)))
    assert not standin.launches


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"heads_q": 3}, "multiple"),
        ({"tokens": 0}, "tokens"),
        ({"batch": 2, "sequences": 3}, "batch"),
        ({"dtype": torch.float32}, "dtype"),
        ({"gate": "exp"}, "gate"),
        ({"sequences": True}, "sequences"),
        ({"backend": "cuda"}, "backend"),
        ({"foo": 1}, "plan has no option 'foo'; beside its sizes it takes scale, output_final_s"),
        ({"cu_seqlens": PACKED}, "plan has no option 'cu_seqlens'"),
        ({"device": "gpu"}, "device is 'gpu'; it must be a torch.device or a name such as"),
        ({"device": 1.5}, "device is 1.5; it must be a torch.device"),
    ],
)
def test_a_plan_is_checked_when_it_is_made(arguments, problem):
    named = {"heads_q": HQ, "heads_v": HV, "tokens": 70, "device": "cpu"} | arguments
    with pytest.raises((TypeError, ValueError), match=problem):
        gdn_prefill.plan(**named)


@pytest.mark.parametrize(
    ("gpus", "device", "problem"),
    [
        (0, "cuda", "device is cuda; torch sees 0 GPUs here, it must be cpu$"),
        (0, "cuda:1", "device is cuda:1; torch sees 0 GPUs here, it must be cpu$"),
        (2, "cuda:2", "device is cuda:2; torch sees 2 GPUs here, it must be cpu or cuda:0 or cuda"),
    ],
)
def test_a_plan_needs_a_gpu_that_is_there(monkeypatch, gpus, device, problem):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(ValueError, match=problem):
        gdn_prefill.plan(HQ, HV, 70, device=device)


def test_a_plan_on_the_current_gpu_knows_which(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert gdn_prefill.plan(HQ, HV, 70, device="cuda", backend="torch").device.index == 1
    assert gdn_prefill.plan(HQ, HV, 70, device="cuda:0", backend="torch").device.index == 0


def test_a_plan_on_the_cpu():
    plan = gdn_prefill.plan(HQ, HV, 190, sequences=4, output_final_state=True, device="cpu")
    x = tokens(190)
    bounds = PACKED.clone()
    for _ in range(3):
        output, state = plan.run(*x, cu_seqlens=bounds)
    expected = chunk_gated_delta_rule(*x, output_final_state=True, cu_seqlens=bounds)
    assert torch.equal(output, expected[0]) and torch.equal(state, expected[1])
    assert plan.workspace_bytes == 0
    bounds[-1] = 191
    with pytest.raises(ValueError, match="cu_seqlens"):
        plan.run(*x, cu_seqlens=bounds)
    with pytest.raises(ValueError, match="captured"):
        plan.capture(*x, cu_seqlens=PACKED)


@pytest.mark.parametrize(
    ("capability", "chosen"), [((9, 0), operator_cuda.run_cuda), ((8, 0), run_torch)]
)
def test_auto_takes_the_kernels_on_hopper(monkeypatch, capability, chosen):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert implementation("auto", torch.device("cuda")) is chosen
    assert implementation("torch", torch.device("cuda")) is run_torch


@pytest.mark.parametrize("name", calls())
def test_what_passes_the_checks_is_not_declined(standin, name):
    call = dict(zip(("q", "k", "v", "g", "beta"), tokens(190), strict=True)) | calls()[name]
    assert declined(backend="cuda", **call) is None
    assert "beta has shape" in declined(backend="cuda", **call | {"beta": torch.zeros(1)})


def test_clear_forgets_reused_outputs():
    chunk_gated_delta_rule(*tokens(65), reuse_outputs=True)
    assert plans._REUSED.info().size
    gdn_prefill.clear()
    assert not plans._REUSED.info().size
