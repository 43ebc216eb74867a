"""The operator's two launches in the emulator, through the calls that a user makes, on the CPU."""

import contextlib

import pytest
import torch
from test_operator_sweep import BF16, FP16, FP32, INT32, INT64, Data, Variant, check

pytest.importorskip("tilelang")

from gdn_prefill import operator, operator_cuda, preprocess, runtime
from gdn_prefill.runtime import Runtime
from tile_emulator import Program, emulate

PLAIN = Variant(
    heads=(1, 2),
    dtype=BF16,
    packed=None,
    gate="log",
    gate_dtype=FP32,
    beta="plain",
    beta_dtype=FP32,
    l2norm=False,
    initial=None,
    slots=None,
    final="fresh",
    final_dtype=FP32,
    v_first=False,
    kept=None,
    kept_dtype=FP32,
    batch_invariant=False,
)
DATA = Data(
    lengths=(200,),
    surplus=0,
    strength=1.0,
    garbage=1.0,
    every=64,
    scale=None,
    padded_rows=False,
    output_given=False,
    seed=1,
)


@pytest.fixture
def emulated(monkeypatch):
    """run_cuda runs on the CPU, its kernels in the emulator; any finding raises."""

    def compiled(prim_func, pass_configs):
        program = Program(prim_func)

        def launch(*arguments):
            report = emulate(program, *arguments, pass_configs=pass_configs)
            assert report.ok, str(report)

        return launch

    monkeypatch.setattr(runtime, "compile_launcher", compiled)
    layer = Runtime()
    for module in (operator_cuda, preprocess):
        monkeypatch.setattr(module, "RUNTIME", layer)
        monkeypatch.setattr(module, "sm_count", lambda _: 132)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(operator, "implementation", lambda *_: operator_cuda.run_cuda)
    return layer


def test_plain(emulated):
    check(PLAIN, DATA, "cpu", "auto")
