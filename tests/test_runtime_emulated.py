"""The call layer with the real kernels, each in the emulator: every plan gives the operator."""

import contextlib
from functools import partial

import pytest
import torch

pytest.importorskip("tilelang")

from cases import HEAD_DIM, Case, make_inputs  # noqa: E402
from gdn_ladder.cached import CachedForward  # noqa: E402
from gdn_prefill import prepare, runtime  # noqa: E402
from gdn_prefill.runtime import Runtime  # noqa: E402
from reference.chunked import gdn_chunked  # noqa: E402
from tile_emulator import emulate  # noqa: E402

TAILED = Case("tailed", 1, 140, 1, 1, True, "random_decay", 5e-3, 5e-3)


@pytest.fixture
def emulated(monkeypatch):
    def compiled(prim_func, pass_configs):
        return partial(emulate, prim_func, pass_configs=pass_configs, workers=1)

    monkeypatch.setattr(runtime, "compile_launcher", compiled)
    monkeypatch.setattr(runtime, "sm_count", lambda _: 132)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    for name, stand_in in {
        "_cuda_getCurrentRawStream": lambda _: 0,
        "_cuda_isCurrentStreamCapturing": lambda: False,
    }.items():
        monkeypatch.setattr(torch._C, name, stand_in, raising=False)


@pytest.mark.parametrize(
    ("runtime_type", "split", "compiles"),
    [(Runtime, False, 1), (Runtime, 2, 1), (Runtime, 3, 3), (CachedForward, False, 1)],
)
def test_every_plan_gives_the_operator(emulated, runtime_type, split, compiles):
    layer = runtime_type()
    inputs = make_inputs(TAILED)
    q, k, v, state = inputs.q, inputs.k, inputs.v, inputs.initial_state
    g_cumsum, A = prepare(k, inputs.g, inputs.beta)
    expected = gdn_chunked(q, k, v, inputs.g, inputs.beta, state)
    tensors = (q, k, v, g_cumsum, inputs.beta, A, state)
    results = layer.forward(*tensors, HEAD_DIM**-0.5, 64, split, False)
    for got, want in zip(results, expected, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=TAILED.rtol, atol=TAILED.atol)
    info = layer.info()
    assert info.compiles == compiles and (info.workspace_bytes > 0) == bool(split)
