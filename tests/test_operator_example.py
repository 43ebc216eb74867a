"""examples/gdn_layer.py as a user runs it."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "gdn_layer.py"


@pytest.fixture
def example():
    spec = importlib.util.spec_from_file_location("gdn_layer", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["gdn_layer"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["gdn_layer"]


def test_prefill_and_decoding_agree(example):
    outputs, states = example.compare([70, 1, 64], new_tokens=3, device="cpu")
    assert outputs < 5e-3 and states < 5e-3


def test_the_comparison_can_fail(example, monkeypatch):
    prefill = example.GatedDeltaNet.prefill

    def forgetful(self, x, lengths, slots, cache):
        output = prefill(self, x, lengths, slots, cache)
        cache.state.zero_()
        return output

    monkeypatch.setattr(example.GatedDeltaNet, "prefill", forgetful)
    outputs, states = example.compare([70], new_tokens=3, device="cpu")
    assert outputs > 5e-2 and states > 5e-2


def test_command():
    done = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "relative error of the outputs" in done.stdout


@pytest.mark.gpu
def test_on_the_gpu(example):
    torch.backends.cuda.matmul.allow_tf32 = False
    outputs, states = example.compare([130, 1, 77], new_tokens=3, device="cuda")
    assert outputs < 5e-3 and states < 5e-3
