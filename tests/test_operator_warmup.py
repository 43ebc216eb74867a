"""The list of the operator's kernels and the command that compiles it."""

import subprocess
import sys

import pytest
import torch

import gdn_prefill
from gdn_prefill import toolchain
from gdn_prefill.variants import USAGES, Usage, operator_variants


def test_variants_are_bounded_and_unique():
    names = [item.name for item in operator_variants([(2, 8), (4, 4)], ("bfloat16", torch.float16))]
    assert len(set(names)) == len(names) <= 2 * 2 * len(USAGES) * 7
    assert {n for n in names if "hq2_hv8" in n} and {n for n in names if "hq4_hv4" in n}
    again = operator_variants([(2, 8), (2, 8)], ("bfloat16",), [Usage(), Usage()])
    assert len(again) == len(operator_variants([(2, 8)], ("bfloat16",), [Usage()]))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (([(3, 4)],), "3/4"),
        (([(1, 1)], ("float32",)), "float32"),
        (([(1, 1)], ("bfloat16",), [Usage(gate="exp")]), "gate"),
        (([(1, 1)], ("bfloat16",), [Usage(dt_bias=True)]), "dt_bias"),
    ],
)
def test_wrong_arguments(arguments, problem):
    with pytest.raises(ValueError, match=problem):
        operator_variants(*arguments)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("16/32",), "head_configs is '16/32'; it must be pairs"),
        ((None,), "head_configs is None; it must be pairs"),
        ((["16/32"],), "head_configs has '16/32'; it must be a pair of integers"),
        (((16, 32),), "head_configs has 16; it must be a pair"),
        (([("16", "32")],), r"head_configs has \('16', '32'\); it must be a pair"),
        (([(16, 32, 64)],), r"head_configs has \(16, 32, 64\); it must be a pair"),
        (([(1, 1)], "bfloat16"), "dtypes is 'bfloat16'; it must be a list of bfloat16 and float16"),
        (([(1, 1)], torch.float16), "dtypes is torch.float16; it must be a list"),
        (([(1, 1)], ["float16"], "l2norm"), "options is 'l2norm'; it must be Usage objects"),
        (([(1, 1)], ["float16"], ["l2norm"]), "options has 'l2norm'; it must be a .*Usage"),
        (([(1, 1)], ["float16"], Usage()), r"options is Usage\(.*; it must be Usage objects"),
    ],
)
def test_what_warmup_does_not_take_is_named(arguments, problem):
    with pytest.raises(TypeError, match=problem):
        gdn_prefill.warmup(*arguments)


def test_warmup_compiles_each_once(monkeypatch):
    compiled = []
    monkeypatch.setattr(
        toolchain, "compile_for_hopper", lambda function, configs: compiled.append(function)
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    usages = [Usage(), Usage(l2norm=True)]
    names = gdn_prefill.warmup([(1, 2)], options=usages)
    assert len(compiled) == len(names) == len(operator_variants([(1, 2)], options=usages))


def command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "gdn_prefill.warmup", *arguments], capture_output=True, text=True
    )


def test_command_lists():
    listed = command("--list", "--heads", "2/8", "--gate", "raw", "--dt-bias", "--l2norm")
    assert listed.returncode == 0, listed.stderr
    count, *names = listed.stdout.splitlines()
    assert count == f"{len(names)} kernels"
    assert any("raw" in name and "l2norm" in name for name in names)
    wrong = command("--list", "--heads", "3/8")
    assert wrong.returncode == 2 and "3/8" in wrong.stderr


@pytest.mark.parametrize("heads", ["16", "16/32/64"])
def test_heads_of_the_command_are_a_pair(heads):
    wrong = command("--list", "--heads", heads)
    message = f"argument --heads: '{heads}' must be Hq/Hv, such as 16/32"
    assert wrong.returncode == 2 and message in wrong.stderr


def test_command_compiles_for_real(tmp_path, monkeypatch):
    if toolchain.find_nvcc() is None:
        pytest.skip("nvcc is not installed")
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path))
    done = command("--heads", "1/1", "--final-state", "float32")
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.rglob("*.so")) or list(tmp_path.rglob("*.cu"))
