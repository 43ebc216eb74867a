"""A kernel nobody here wrote: FlashQLA's Hopper forward, unmodified, from the installed package.

Its module queries CUDA when imported, so the queries are patched and the one file is loaded alone.
Its A carries no decay: A = (I + strict_lower(beta_i <k_i, k_j>))^-1.
"""

import importlib.util
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from building import run

from tile_emulator import DeadlockError, Edit, Program

CHUNK, DIM = 64, 128
PACKAGE = importlib.util.find_spec("flash_qla")
pytestmark = pytest.mark.skipif(
    PACKAGE is None, reason="flash-qla is not installed (pip install flash-qla==0.1.3 --no-deps)"
)


@pytest.fixture(scope="module")
def factory():
    patch = pytest.MonkeyPatch()
    hopper = SimpleNamespace(multi_processor_count=132, major=9, minor=0)
    patch.setattr(torch.cuda, "get_device_properties", lambda *_: hopper)
    patch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    for name in ("flash_qla", "flash_qla.utils"):
        patch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["flash_qla.utils"].prepare_chunk_offsets = None
    path = PACKAGE.submodule_search_locations[0] + "/ops/gated_delta_rule/chunk/hopper/fused_fwd.py"
    spec = importlib.util.spec_from_file_location("fused_fwd", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    patch.undo()
    return module.tilelang_fused_chunk_gdr_fwd


def kernel_of(factory, heads, heads_q, *, block_dv=128, varlen=False, initial=True, v_first=False):
    return factory.get_tir(
        heads,
        heads_q,
        DIM,
        DIM,
        CHUNK,
        DIM**-0.5,
        accum_dtype="float32",
        qkva_dtype="bfloat16",
        g_dtype="float32",
        b_dtype="float32",
        h0_dtype="float32",
        ht_dtype="float32",
        h_dtype="bfloat16",
        o_dtype="bfloat16",
        seqlen_dtype="int32",
        use_initial_state=initial,
        store_final_state=True,
        store_h=False,
        store_o=True,
        is_varlen=varlen,
        is_cp=False,
        state_v_first=v_first,
        block_DV=block_dv,
    )


def problem(lengths, heads=2, heads_q=1, seed=0):
    """Inputs for packed sequences, and the float64 recurrence, token by token."""
    draw = np.random.default_rng(seed)
    total = sum(lengths)

    def unit():
        x = draw.standard_normal((1, total, heads_q, DIM))
        return torch.from_numpy(x / np.linalg.norm(x, axis=-1, keepdims=True)).to(torch.bfloat16)

    q, k = unit(), unit()
    v = torch.from_numpy(draw.standard_normal((1, total, heads, DIM)) * 0.5).to(torch.bfloat16)
    gate = -0.1 * draw.random((1, total, heads))
    beta = draw.random((1, total, heads)).astype(np.float32)
    state = 0.1 * draw.standard_normal((len(lengths), heads, DIM, DIM))
    g = np.zeros((1, total, heads), np.float32)
    A = np.zeros((1, total, heads, CHUNK))
    output = np.zeros((1, total, heads, DIM))
    final = state.copy()
    group = heads // heads_q
    rows_q, rows_k, rows_v = (x[0].double().numpy() for x in (q, k, v))
    first = 0
    for n, length in enumerate(lengths):
        for a in range(first, first + length, CHUNK):
            z = min(a + CHUNK, first + length)
            g[0, a:z] = np.cumsum(gate[0, a:z], axis=0)
            for h in range(heads):
                keys = rows_k[a:z, h // group]
                lower = np.tril(beta[0, a:z, h, None] * (keys @ keys.T), -1)
                A[0, a:z, h, : z - a] = np.linalg.inv(np.eye(z - a) + lower)
        for t in range(first, first + length):
            for h in range(heads):
                S, key = final[n, h], rows_k[t, h // group]
                S *= np.exp(gate[0, t, h])
                S += np.outer(key, beta[0, t, h] * (rows_v[t, h] - key @ S))
                output[0, t, h] = DIM**-0.5 * (rows_q[t, h // group] @ S)
        first += length
    tensors = {
        "q": q, "k": k, "v": v, "a": torch.from_numpy(A).to(torch.bfloat16), "g": g, "b": beta,
        "h0": state.astype(np.float32),
    }  # fmt: skip
    return tensors, output, final


def execute(program, tensors, lengths, *, varlen=False, v_first=False, **options):
    heads = tensors["v"].shape[2]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    chunks = np.concatenate([[0], np.cumsum([-(-n // CHUNK) for n in lengths])]).astype(np.int32)
    o = torch.full_like(tensors["v"], torch.nan)
    h = torch.zeros(1, 0, heads, DIM, DIM, dtype=torch.bfloat16)
    ht = np.full((len(lengths), heads, DIM, DIM), np.nan, np.float32)
    unused = np.zeros(len(lengths), np.int32)
    h0 = tensors["h0"].swapaxes(-1, -2).copy() if v_first else tensors["h0"]
    q, k, v, a, g, b = (tensors[name] for name in "qkvagb")
    report = run(program, q, k, v, a, g, b, h0, starts, chunks, unused, starts, o, h, ht, **options)
    return report, o.double().numpy(), ht.swapaxes(-1, -2) if v_first else ht


def assert_only_the_missing_fence(report):
    """No proxy fence lies between the O role's stores of its output and the store warp's TMA."""
    assert report.kinds == {"fence"}
    assert {issue.subject for issue in report.issues} == {"o_shared"}
    assert {issue.role for issue in report.issues} == {"tx[480,512)"}
    assert "after the write by tx[256,384) at fused_fwd.py:441" in str(report)


@pytest.mark.parametrize(
    ("lengths", "options", "schedule"),
    [
        ([200], {}, "roundrobin"),
        ([200], {}, "priority:1"),
        ([200], {"block_dv": 64}, "random:2"),
        ([200], {"v_first": True}, "delay:tma"),
        ([1, 64, 130], {"varlen": True}, "random:3"),
    ],
)
def test_against_the_recurrence_and_the_missing_fence(factory, lengths, options, schedule):
    tensors, output, final = problem(lengths)
    run_options = {name: options[name] for name in ("varlen", "v_first") if name in options}
    program = Program(kernel_of(factory, 2, 1, **options))
    assert len(program.roles) == 7
    report, o, ht = execute(program, tensors, lengths, schedule=schedule, **run_options)
    np.testing.assert_allclose(o, output, rtol=5e-3, atol=5e-3)
    np.testing.assert_allclose(ht, final, rtol=5e-3, atol=5e-3)
    assert report.written == {"o": 1.0, "ht": 1.0}
    if max(lengths) > CHUNK:
        assert_only_the_missing_fence(report)


def test_wrong_counts_are_reported(factory):
    """data_is_ready counted one loading warp short, and one too many."""
    tensors, *_ = problem([328])
    for count, kinds in ((64, {"barrier", "race"}), (128, {"deadlock"})):
        program = Program(
            kernel_of(factory, 2, 1), edit=Edit(counts={"data_is_ready": [count, count]})
        )
        try:
            report = execute(program, tensors, [328])[0]
        except DeadlockError as error:
            report = error.report
        assert report.kinds & kinds
