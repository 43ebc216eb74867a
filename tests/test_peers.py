"""The adapters: what they call, how they convert, and that an absent peer is a sentence.

No peer runs without a Hopper GPU, so stand-ins take their places here: each has the peer's own
signature, reads its arguments in the peer's conventions and computes with the float64 reference.
"""

import ast
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from cases import Case, PackedCase, make_inputs
from harness.implementations import Implementation
from harness.problem import operator_problem
from reference.chunked import CHUNK, chunk_cumsum, gdn_chunked, solve_A
from reference.peers import common, fla, flash_qla, flashinfer

ALL = flash_qla.IMPLEMENTATIONS + fla.IMPLEMENTATIONS + flashinfer.IMPLEMENTATIONS
CASE = Case("small", B=2, T=70, Hq=2, Hv=4, initial_state=True, gate="mixed")
LONE = Case("lone", B=1, T=130, Hq=1, Hv=3, initial_state=False, gate="random_decay")
PACKED = PackedCase("packed", 1, 2, (70, 1, 130), initial_state=True, gate="mixed")
cases = pytest.mark.parametrize("case", [CASE, LONE], ids=lambda case: case.name)
full_cases = pytest.mark.parametrize("case", [CASE, LONE, PACKED], ids=lambda case: case.name)
implementations = pytest.mark.parametrize("peer", ALL, ids=lambda peer: peer.name)


def problem(case, device="cpu"):
    """Duck-typed harness Problem; building a real one would run the package's own backend."""
    inputs = make_inputs(case, device)
    arguments = (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, inputs.initial_state)
    output, state = gdn_chunked(*arguments)
    g_cumsum = chunk_cumsum(inputs.g).float()
    return SimpleNamespace(
        case=case,
        inputs=inputs,
        g_cumsum=g_cumsum,
        A=solve_A(inputs.k, inputs.g, inputs.beta).bfloat16(),
        expected_output=output,
        expected_state=state,
        lengths=(),
        cu_seqlens=None,
    )


def full_problem(case):
    return operator_problem(case) if case is PACKED else problem(case)


def rounded(output, state):
    return output.bfloat16(), state.float()


def check(call, made):
    output, state = call()
    assert (output.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(output, made.expected_output.bfloat16(), rtol=1e-2, atol=1e-5)
    torch.testing.assert_close(state, made.expected_state.float(), rtol=1e-4, atol=1e-5)


def signature(package, file, function):
    """The signature of a function of an installed package, read without importing it."""
    found = importlib.util.find_spec(package)
    if found is None:
        pytest.skip(f"{package} is not installed, so its signatures cannot be read")
    tree = ast.parse((Path(found.submodule_search_locations[0]) / file).read_text())
    definition = next(
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == function
    )
    definition.decorator_list, definition.returns, definition.body = [], None, [ast.Pass()]
    for argument in ast.walk(definition.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    scope = {}
    module = ast.fix_missing_locations(ast.Module([definition], []))
    exec(compile(module, file, "exec"), scope)
    return inspect.signature(scope[function])


def stand_in(real, compute):
    """A function with the signature `real` that gives `compute` its arguments by name."""

    def call(*args, **kwargs):
        bound = real.bind(*args, **kwargs)
        bound.apply_defaults()
        return compute(SimpleNamespace(**bound.arguments))

    return call


def install(monkeypatch, name, **attributes):
    """Puts a module of stand-ins, and empty packages above it, where imports find them first."""
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        path = ".".join(parts[:depth])
        if depth == len(parts) or path not in sys.modules:
            module = ModuleType(path)
            module.__path__ = []
            module.__spec__ = importlib.util.spec_from_loader(path, loader=None, is_package=True)
            monkeypatch.setitem(sys.modules, path, module)
    vars(sys.modules[name]).update(attributes)


@implementations
def test_protocol_and_absence(peer):
    assert isinstance(peer, Implementation)
    assert peer.version
    assert set(peer.scopes) <= {common.CORE, common.FULL}
    if common.no_hopper():
        assert "is not installed" in peer.unavailable() or "Hopper GPU" in peer.unavailable()


def test_names_are_distinct():
    names = [peer.name for peer in ALL]
    assert len(set(names)) == len(names)
    assert names[:2] == ["flash_qla", "flash_qla_nocp"]


@implementations
def test_unknown_scope_is_refused(peer):
    with pytest.raises(ValueError, match=f"scope is 'half', {peer.name} has"):
        peer.bind(problem(LONE), "half")


@pytest.mark.parametrize(("module", "package"), [(fla, "fla"), (flashinfer, "flashinfer")])
def test_core_is_refused_where_there_is_none(module, package):
    with pytest.raises(ValueError, match=f"scope is 'core', {package} has full"):
        module.IMPLEMENTATIONS[0].bind(problem(LONE), common.CORE)


def test_missing_package_is_named():
    reason = common.unavailable("no_such_peer", "no-such-peer==1.0", lambda: None)
    assert reason == "no_such_peer is not installed (pip install no-such-peer==1.0)"


def test_failing_import_is_a_reason(monkeypatch):
    def entry():
        raise RuntimeError("wrong driver")

    monkeypatch.setattr(common, "no_hopper", lambda: None)
    reason = common.unavailable("cases", "cases", entry)
    assert reason == "cases cannot be imported: RuntimeError: wrong driver"
    assert common.unavailable("cases", "cases", lambda: None) is None


def test_other_gpus_are_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Abacus 100")
    assert common.no_hopper() == "needs a Hopper GPU (sm_90): Abacus 100 is sm_80"


# FlashQLA


def flash_qla_signature(function):
    files = {
        "chunk_gated_delta_rule": "__init__.py",
        "build_cp_context": "cp/context.py",
        "cp_preprocess_fwd": "cp/preprocess.py",
        "kkt_solve": "hopper/kkt_solve.py",
        "fused_gdr_fwd": "hopper/fused_fwd.py",
    }
    file = f"ops/gated_delta_rule/chunk/{files[function]}"
    return signature(flash_qla.PACKAGE, file, function)


def raw_gate(g_cumsum):
    """Undoes the within-chunk sum."""
    g = g_cumsum.double()
    previous = torch.cat([torch.zeros_like(g[:, :1]), g[:, :-1]], dim=1)
    previous[:, ::CHUNK] = 0
    return g - previous


def undecayed(k, beta):
    """FlashQLA's A, which carries no decay."""
    return solve_A(k, torch.zeros_like(beta), beta).to(k.dtype)


def fused_gdr_fwd(a):
    assert torch.equal(a.a, undecayed(a.k, a.b))
    assert a.output_final_state and not a.output_h and not a.state_v_first
    output, state = gdn_chunked(a.q, a.k, a.v, raw_gate(a.g), a.b, a.initial_state, a.scale)
    return output.bfloat16(), None, state.float()


@cases
@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("peer", flash_qla.IMPLEMENTATIONS, ids=lambda peer: peer.name)
def test_flash_qla_core(monkeypatch, peer, case, splits):
    considered = peer.auto_cp and case.B == 1
    segments, seq_map, made = object(), object(), problem(case)
    started = []

    def context(a):
        assert a.enable_intra == considered and not a.is_train and not a.enable_inter
        assert a.num_v_heads == case.Hv and a.chunk_size == CHUNK
        if considered:
            assert a.cu_seqlens.tolist() == [0, case.T]
        else:
            assert a.cu_seqlens is None
        return SimpleNamespace(
            is_intra=considered and splits,
            cu_seqlens=a.cu_seqlens,
            intra_cp_cu_seqlens=segments if splits else None,
            seq_map_c2r=seq_map if considered and splits else None,
        )

    def preprocess(a):
        assert a.g is made.g_cumsum and a.beta is made.inputs.beta
        assert torch.equal(a.a, undecayed(a.k, a.beta))
        started.append(a.initial_state)
        return a.initial_state, None

    def fused(a):
        assert a.raw_cu_seqlens is None if not considered else a.raw_cu_seqlens is not None
        if considered and splits:
            assert a.cu_seqlens is segments and a.cp_seq_map is seq_map
        else:
            assert a.cu_seqlens is a.raw_cu_seqlens and a.cp_seq_map is None
        return fused_gdr_fwd(a)

    install(
        monkeypatch,
        "flash_qla.ops.gated_delta_rule.chunk",
        CHUNK_SIZE=CHUNK,
        build_cp_context=stand_in(flash_qla_signature("build_cp_context"), context),
        cp_preprocess_fwd=stand_in(flash_qla_signature("cp_preprocess_fwd"), preprocess),
        kkt_solve=stand_in(flash_qla_signature("kkt_solve"), lambda a: undecayed(a.k, a.b)),
        fused_gdr_fwd=stand_in(flash_qla_signature("fused_gdr_fwd"), fused),
    )
    call = peer.bind(made, common.CORE)
    assert not started, "the split belongs to the timed call"
    check(call, made)
    assert started[0] is made.inputs.initial_state


def full_forward(a):
    """The convention that FlashQLA and FLA share with this project."""
    assert a.output_final_state and not a.use_qk_l2norm_in_kernel and not a.state_v_first
    if a.cu_seqlens is None:
        return rounded(*gdn_chunked(a.q, a.k, a.v, a.g, a.beta, a.initial_state, a.scale))
    rows = (x[0] for x in (a.q, a.k, a.v, a.g.double().exp(), a.beta))
    state = None if a.initial_state is None else a.initial_state.mT.contiguous()
    scale = a.q.shape[-1] ** -0.5 if a.scale is None else a.scale
    output, state = packed_forward(*rows, a.cu_seqlens, scale, state)
    return output.unsqueeze(0), state.mT


@full_cases
@pytest.mark.parametrize("peer", flash_qla.IMPLEMENTATIONS, ids=lambda peer: peer.name)
def test_flash_qla_full(monkeypatch, peer, case):
    def compute(a):
        assert a.auto_cp is peer.auto_cp
        return full_forward(a)

    made = full_problem(case)
    entry = stand_in(flash_qla_signature("chunk_gated_delta_rule"), compute)
    install(monkeypatch, "flash_qla.ops.gated_delta_rule.chunk", chunk_gated_delta_rule=entry)
    check(peer.bind(made, common.FULL), made)


# FLA


@full_cases
def test_fla_full(monkeypatch, case):
    monkeypatch.setenv(fla.HAND_OVER, "1")
    real = signature(fla.PACKAGE, "ops/gated_delta_rule/chunk.py", "chunk_gated_delta_rule")
    install(
        monkeypatch,
        "fla.ops.gated_delta_rule",
        chunk_gated_delta_rule=stand_in(real, full_forward),
    )
    made = full_problem(case)
    call = fla.IMPLEMENTATIONS[0].bind(made, common.FULL)
    assert fla.os.environ[fla.HAND_OVER] == "0", "else FLA would run FlashQLA"
    check(call, made)


# FlashInfer 0.7.2.post1: signatures as published; its wheel is too large to have at hand in tests.

KERNELS = "flashinfer.gdn_kernels.delta_rule_dsl"


def public_signature(
    q,
    k,
    v,
    g=None,
    beta=None,
    scale=None,
    initial_state=None,
    output_final_state=False,
    cu_seqlens=None,
    use_qk_l2norm_in_kernel=False,
    output=None,
    output_state=None,
    state_checkpoints=None,
    checkpoint_cu_starts=None,
    checkpoint_every_n_tokens=0,
    use_cp="auto",
    state_indices=None,
    _cp_chunk_len=None,
    backend="auto",
    max_seqlen=None,
):
    pass


def one_kernel_signature(
    o,
    state,
    q,
    k,
    v,
    init_state,
    alpha,
    beta,
    cu_seqlens,
    scale,
    state_checkpoints=None,
    checkpoint_cu_starts=None,
    checkpoint_every_n_tokens=0,
    state_indices=None,
):
    pass


def split_signature(
    o,
    state,
    q,
    k,
    v,
    alpha,
    beta,
    cu_seqlens,
    scale,
    *,
    initial_state=None,
    state_indices=None,
    state_checkpoints=None,
    checkpoint_cu_starts=None,
    checkpoint_every_n_tokens=0,
    max_seqlen=None,
    cp_chunk_len=None,
    cp_chunk_len_granularity=512,
):
    pass


def packed_forward(q, k, v, alpha, beta, cu_seqlens, scale, initial_state):
    """FlashInfer's conventions: packed sequences, linear gate, state [N, H, dv, dk]."""
    assert all(x.dim() == 3 and x.is_contiguous() for x in (q, k, v))
    assert cu_seqlens.dtype == torch.int64
    outputs, states = [], []
    bounds = cu_seqlens.tolist()
    for n, (start, stop) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        tensors = (x[start:stop].unsqueeze(0) for x in (q, k, v, alpha.double().log(), beta))
        state = None
        if initial_state is not None:
            assert initial_state.is_contiguous()
            state = initial_state[n : n + 1].mT
        output, state = gdn_chunked(*tensors, state, scale)
        outputs.append(output[0])
        states.append(state[0].mT)
    return rounded(torch.cat(outputs), torch.stack(states).contiguous())


def install_flashinfer(monkeypatch, calls, public):
    def note(name, a, initial_state):
        calls.append(name)
        result = packed_forward(
            a.q, a.k, a.v, a.alpha, a.beta, a.cu_seqlens, a.scale, initial_state
        )
        a.o.copy_(result[0])
        a.state.copy_(result[1])

    install(monkeypatch, "flashinfer")
    install(
        monkeypatch,
        KERNELS,
        chunk_gated_delta_rule_sm90=stand_in(
            inspect.signature(one_kernel_signature), lambda a: note("one", a, a.init_state)
        ),
        cp_delta_rule_dsl_sm90=stand_in(
            inspect.signature(split_signature), lambda a: note("split", a, a.initial_state)
        ),
    )
    if public:

        def entry(a):
            calls.append(a.use_cp)
            assert a.output_final_state and a.max_seqlen == max(a.cu_seqlens.diff()).item()
            return packed_forward(
                a.q, a.k, a.v, a.g, a.beta, a.cu_seqlens, a.scale, a.initial_state
            )

        install(
            monkeypatch,
            "flashinfer.gdn_prefill",
            chunk_gated_delta_rule=stand_in(inspect.signature(public_signature), entry),
        )


@full_cases
@pytest.mark.parametrize("peer", flashinfer.IMPLEMENTATIONS, ids=lambda peer: peer.name)
def test_flashinfer_public(monkeypatch, peer, case):
    calls, made = [], full_problem(case)
    install_flashinfer(monkeypatch, calls, public=True)
    check(peer.bind(made, common.FULL), made)
    assert calls == [peer.split]


@cases
@pytest.mark.parametrize("crowded", [False, True])
@pytest.mark.parametrize("peer", flashinfer.IMPLEMENTATIONS, ids=lambda peer: peer.name)
def test_flashinfer_kernels_alone(monkeypatch, peer, crowded, case):
    def should_use_cp_host(num_parallel_work, num_sms, device_name, device_capability=None):
        assert (num_parallel_work, num_sms) == (case.B * case.Hv, 132)
        assert (device_name, device_capability) == ("Abacus", (9, 0))
        return not crowded

    calls, made = [], problem(case)
    install_flashinfer(monkeypatch, calls, public=False)
    install(monkeypatch, f"{KERNELS}.varlen_helper", should_use_cp_host=should_use_cp_host)
    install(
        monkeypatch,
        "flashinfer.utils",
        get_device_sm_count=lambda device: 132,
        get_device_name=lambda device: "Abacus",
        get_compute_capability=lambda device: (9, 0),
    )
    check(peer.bind(made, common.FULL), made)
    split = (not crowded) if peer.split == "auto" else peer.split
    assert calls == ["split" if split else "one"]


@pytest.mark.parametrize(
    "init, files, released, expected",
    [
        ('__version__ = "1.2"', {}, "unknown", "1.2"),
        ('__version__ = "0.0.0+unknown"', {}, "1.3", "1.3"),
        ("", {"_build_meta.py": '__version__ = "1.4"'}, "unknown", "1.4"),
        ("", {"VERSION": "1.5\n"}, "unknown", "1.5"),
        ("", {"version.txt": "1.6"}, "unknown", "1.6"),
        ("raise RuntimeError('no GPU')", {"VERSION": "1.7"}, "unknown", "1.7"),
        ("", {}, "unknown", "unknown"),
    ],
)
def test_flashinfer_version_is_found(monkeypatch, tmp_path, init, files, released, expected):
    folder = tmp_path / "flashinfer"
    folder.mkdir()
    for name, text in {"__init__.py": init, **files}.items():
        (folder / name).write_text(text)
    for name in [name for name in sys.modules if name.partition(".")[0] == "flashinfer"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(common, "release", lambda _: released)
    assert flashinfer.IMPLEMENTATIONS[0].version == expected
    for name in [name for name in sys.modules if name.partition(".")[0] == "flashinfer"]:
        del sys.modules[name]


def test_flashinfer_with_kernels_that_did_not_load(monkeypatch):
    install(monkeypatch, "flashinfer")
    install(monkeypatch, KERNELS, chunk_gated_delta_rule_sm90=None, cp_delta_rule_dsl_sm90=None)
    monkeypatch.setattr(common, "no_hopper", lambda: None)
    reason = flashinfer.IMPLEMENTATIONS[0].unavailable()
    assert "chunk_gated_delta_rule_sm90 did not load" in reason


@pytest.mark.gpu
@cases
@pytest.mark.parametrize(
    ("peer", "scope"),
    [pytest.param(peer, scope, id=f"{peer.name}-{scope}") for peer in ALL for scope in peer.scopes],
)
def test_on_a_gpu(peer, scope, case):
    reason = peer.unavailable()
    if reason:
        pytest.skip(reason)
    made = problem(case, "cuda")
    expected = (made.expected_output, made.expected_state)
    for ours, reference in zip(peer.bind(made, scope)(), expected, strict=True):
        error = (ours.double() - reference).norm() / reference.norm()
        assert error < 1e-2
