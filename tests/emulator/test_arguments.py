"""Wrong command lines: one line naming the argument, its value and what is allowed; status 2."""

import numpy as np
import pytest
import test_commands
import tilelang.language as T
from building import BF16, FP32, bf16

from tile_emulator import emulate
from tile_emulator.__main__ import main
from tile_emulator.mutate import main as mutate

KERNEL = "test_commands:pipeline"
SHAPE = ["--shape", "chunks=3"]
BAD_RANGES = {"consumer": 128}
HELD = 7


def whole_tiles():
    """One CTA for every 64 rows: none for fewer."""
    rows = T.dynamic("rows")

    @T.prim_func
    def kernel(y: T.Tensor((rows,), FP32)):
        with T.Kernel(rows // 64, threads=64) as block:
            for i in T.Parallel(64):
                y[block * 64 + i] = 1.0

    return kernel


@T.prim_func
def scaled(x: T.Tensor((64,), BF16), y: T.Tensor((64,), FP32), scale: T.float32):
    with T.Kernel(1, threads=64) as _:
        for i in T.Parallel(64):
            y[i] = x[i] * scale


def status(command, arguments):
    try:
        return command(arguments)
    except SystemExit as end:
        return end.code


REFUSED = {
    "no module": (["nope:x"], ["MODULE 'nope'", "No module named", "python path"]),
    "no factory": ([KERNEL + "s"], [repr(KERNEL + "s"), "has no pipelines"]),
    "no colon": (["test_commands"], ["'test_commands'", "MODULE:FACTORY is needed"]),
    "no module name": ([":x"], ["':x'", "MODULE:FACTORY is needed"]),
    "not a factory": (["test_arguments:HELD"], ["test_arguments:HELD", "not callable"]),
    "not a kernel": (["builtins:dict"], ["'builtins:dict' gives no PrimFunc"]),
    "args fail": ([KERNEL, "--args", "1/0"], ["--args '1/0'", "division by zero", "needed"]),
    "args syntax": ([KERNEL, "--args", "(("], ["--args '(('", "SyntaxError", "needed"]),
    "args refused": ([KERNEL, "--args", "rows=1"], ["--args 'rows=1'", "argument 'rows'"]),
    "schedule": (["--schedule", "bogus"], ["--schedule 'bogus'", "allowed are roundrobin"]),
    "role": (["--schedule", "delay:nope"], ["--schedule 'delay:nope'", "roles are", "tma"]),
    "digit": (["--schedule", "delay:²"], ["--schedule 'delay:²'", "roles are"]),
    "seedless": (["--schedule", "random:x"], ["--schedule 'random:x'", "a seed is needed"]),
    "check": (["--check", "x"], ["--check: 'x'", "race, deadlock, bounds, init"]),
    "no check": (["--check", ""], ["--check: ''", "race, deadlock, bounds, init"]),
    "no folder": (["--timeline", "/nonexistent/x.png"], ["--timeline", "'/nonexistent'"]),
    "no picture": (["--timeline", "x.txt"], ["--timeline", "'x.txt'", ".png"]),
    "no runs": (["--cost", "0"], ["--cost", "'0'", ">= 1"]),
    "until alone": (["--until", "5"], ["--until 5", "--timeline"]),
    "until": (["--until", "0"], ["--until", "'0'", "> 0"]),
    "no CTAs": (["--ctas", "0"], ["--ctas", "'0'", ">= 1"]),
    "no workers": (["--workers", "0"], ["--workers", "'0'", ">= 1"]),
    "part of a worker": (["--workers", "1.5"], ["--workers", "'1.5'", "whole number"]),
    "empty dimension": ([KERNEL, "--shape", "chunks=0"], ["--shape", "chunks='0'", ">= 1"]),
    "part of a chunk": ([KERNEL, "--shape", "chunks=1.5"], ["chunks='1.5'", "whole number"]),
    "twice": ([KERNEL, "--shape", "chunks=1,chunks=2"], ["'chunks=2'", "given twice"]),
    "no size": ([KERNEL, "--shape", "chunks"], ["'chunks'", "NAME=NUMBER is needed"]),
    "dimension": (
        [KERNEL, "--shape", "chunks=3,foo=3"],
        ["--shape foo", "no such symbolic dimension", "allowed are chunks"],
    ),
    "scalar": (["--scalars", "foo=3"], ["--scalars foo", "scalar parameter", "it has none"]),
    "scalar value": (["--scalars", "foo=x"], ["--scalars", "foo='x'", "a number is needed"]),
    "tensor": (
        ["test_arguments:scaled", "--scalars", "x=2"],
        ["--scalars x", "allowed are scale"],
    ),
    "too large": ([KERNEL, "--shape", f"chunks={1 << 50}"], ["--shape", str(1 << 50), "smaller"]),
    "empty grid": (
        ["test_arguments:whole_tiles", "--shape", "rows=63"],
        ["--shape rows=63", "grid is empty"],
    ),
    "seed": (["--seed", "-1"], ["--seed", "'-1'", ">= 0"]),
    "scale": (["--scale", "nan"], ["--scale", "'nan'", "> 0"]),
    "roles": (["--roles", "nope"], ["--roles nope", "a dict in test_commands"]),
    "configs": (["--pass-configs", "nope"], ["--pass-configs nope", "a dict in test_commands"]),
    "not roles": (["--roles", "THIS"], ["--roles THIS", "has a str THIS"]),
    "ranges": (
        ["test_arguments:scaled", "--roles", "BAD_RANGES"],
        ["--roles BAD_RANGES", "'consumer': 128", "(first, last + 1)"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name, capsys):
    arguments, parts = REFUSED[name]
    if arguments[0].startswith("--"):
        arguments = [KERNEL, *SHAPE, *arguments]
    assert status(main, arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1, err
    for part in parts:
        assert part in err


def test_the_same_lines_run_when_they_are_right(tmp_path, capsys):
    picture = str(tmp_path / "x.png")
    right = ["--schedule", "delay:consumer", "--check", "race,init", "--ctas", "1"]
    right += ["--workers", "1", "--timeline", picture, "--until", "50", "--roles", "ROLES"]
    assert main([KERNEL, *SHAPE, *right]) == 0
    assert main(["test_arguments:scaled", "--scalars", "scale=2"]) == 0
    assert main(["test_arguments:whole_tiles", "--shape", "rows=64"]) == 0
    assert capsys.readouterr().out.count("1 CTA, ") == 3


@pytest.mark.parametrize(
    ("extra", "parts"),
    [
        (["--schedules", "roundrobin,bogus"], ["--schedules 'bogus'", "allowed are roundrobin"]),
        (["--ctas", "0"], ["--ctas", "'0'", ">= 1"]),
        (["--justified", "/nonexistent.csv"], ["--justified", "'/nonexistent.csv'"]),
        (["--shape", "foo=3"], ["--shape foo", "symbolic dimension"]),
    ],
)
def test_mutation_command_refuses_too(extra, parts, tmp_path, capsys):
    out = tmp_path / "mutants.csv"
    assert status(mutate, [KERNEL, *SHAPE, "--out", str(out), *extra]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and all(part in err for part in parts), err
    assert not out.exists()


def test_emulate_refuses_to_run_nothing():
    x, y = bf16(3, 64, 64), np.zeros((3, 64, 64), np.float32)
    kernel = test_commands.pipeline()
    with pytest.raises(ValueError, match="workers=0: a whole number >= 1"):
        emulate(kernel, x, y, workers=0)
    with pytest.raises(ValueError, match="none of the launch's 1 CTAs would run"):
        emulate(kernel, x, y, blocks=lambda block: False)
