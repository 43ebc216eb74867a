"""The two commands, the timeline and the mutation table, on a small pipeline."""

import csv
from collections import Counter

import numpy as np
import pytest
import tilelang.language as T
from building import BF16, FP32, bf16, run

from tile_emulator import Program
from tile_emulator.__main__ import main
from tile_emulator.mutate import main as mutate
from tile_emulator.timeline import BARRIER_UNITS, KINDS

THIS = "test_commands"
ROLES = {"consumer": (0, 128), "loader": (128, 160)}


def pipeline(columns=64):
    """y = x x^T per chunk: a loader warp and a consumer group over two slots."""
    chunks = T.dynamic("chunks")

    @T.prim_func
    def kernel(x: T.Tensor((chunks, 64, columns), BF16), y: T.Tensor((chunks, 64, 64), FP32)):
        with T.Kernel(1, threads=160) as _:
            slots = T.alloc_shared((2, 64, columns), BF16)
            filled = T.alloc_barrier([32] * 2)
            emptied = T.alloc_barrier([128] * 2)
            y_fragment = T.alloc_fragment((64, 64), FP32)
            tx = T.get_thread_binding()
            if tx < 128:
                for c in T.serial(chunks):
                    T.barrier_wait(filled[c % 2], c // 2 % 2)
                    T.gemm(
                        slots[c % 2, :, :],
                        slots[c % 2, :, :],
                        y_fragment,
                        transpose_B=True,
                        clear_accum=True,
                    )
                    T.barrier_arrive(emptied[c % 2])
                    T.copy(y_fragment, y[c, :, :])
            else:
                for c in T.serial(chunks):
                    T.barrier_wait(emptied[c % 2], (c // 2 + 1) % 2)
                    T.tma_copy(x[c, :, :], slots[c % 2, :, :], barrier=filled[c % 2])
                    T.barrier_arrive(filled[c % 2])

    return kernel


@T.prim_func
def careless(y: T.Tensor((64,), FP32)):
    with T.Kernel(1, threads=64) as _:
        for i in T.Parallel(64):
            y[i + 1] = 1.0


@T.prim_func
def unsupported(y: T.Tensor((64,), FP32)):
    with T.Kernel(1, threads=64) as _:
        for i in T.Parallel(64):
            y[i] = T.erf(1.0)


COMMAND = [f"{THIS}:pipeline", "--args", "columns=32", "--shape", "chunks=5"]


def test_command_prints_the_report_and_plots(tmp_path, capsys):
    picture = tmp_path / "timeline.png"
    assert main([*COMMAND, "--timeline", str(picture), "--schedule", "random:1"]) == 0
    assert "1 CTA, schedule random:1" in (out := capsys.readouterr().out) and "no issue" in out
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_command_runs_all_adversarial_schedules(capsys):
    assert main([*COMMAND, "--schedule", "adversarial"]) == 0
    out = capsys.readouterr().out
    assert "delay:consumer" in out and "hurry:loader" in out and out.count("no issue") == 6


def test_command_status_and_messages(capsys):
    assert main([f"{THIS}:careless"]) == 1
    assert "index 1..64 of axis 0 is outside 0..63" in capsys.readouterr().out
    assert main([f"{THIS}:unsupported"]) == 2
    assert "erf" in capsys.readouterr().err
    assert main([f"{THIS}:pipeline"]) == 2
    assert "--shape lacks chunks: a dimension of x is chunks" in capsys.readouterr().err
    assert main([f"{THIS}:nothing"]) == 2
    assert f"module {THIS} has no nothing" in capsys.readouterr().err


def outputs():
    return np.zeros((6, 64, 64), np.float32)


def timeline():
    program = Program(pipeline(), role_names=ROLES)
    return run(program, bf16(6, 64, 64), outputs(), timeline=True).timeline


def test_timeline_follows_the_dependences():
    line = timeline()
    assert line.roles == ("consumer", "loader")
    assert {event.kind for event in line.events} <= set(KINDS)
    products = [e for e in line.events if e.kind == "gemm"]
    loads = [e for e in line.events if e.kind == "load"]
    assert len(products) == len(loads) == 6
    for number in range(6):
        assert products[number].start >= loads[number].end
    for number in range(4):
        assert loads[number + 2].start >= products[number].end


def test_critical_path_is_a_chain_from_the_start_to_the_end():
    line = timeline()
    critical = [e for e in line.events if e.critical]
    assert min(e.start for e in critical) <= BARRIER_UNITS
    assert max(e.end for e in critical) == line.end
    assert sum(line.critical_shares().values()) == pytest.approx(1)
    for event in critical:
        if event.cause is not None:
            cause = line.events[event.cause]
            assert cause.critical and cause.start < event.start


def test_timeline_does_not_depend_on_the_schedule():
    x = bf16(6, 64, 64)
    ends = {
        run(pipeline(), x, outputs(), timeline=True, schedule=schedule).timeline.end
        for schedule in ("roundrobin", "random:1", "delay:tma", "priority:4")
    }
    assert len(ends) == 1


def test_every_mutant_of_the_pipeline_is_killed(tmp_path, capsys):
    out = tmp_path / "mutants.csv"
    assert mutate([*COMMAND, "--out", str(out)]) == 0
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert {row["verdict"] for row in rows} == {"killed"}
    assert Counter(row["mutation"] for row in rows) == {
        "drop": 4,
        "flip": 2,
        "early": 2,
        "count": 2,
    }
    drop = next(row for row in rows if row["mutant"].startswith("drop mbarrier_wait_parity filled"))
    assert drop["mutant"] == "drop mbarrier_wait_parity filled[c % 2] c // 2 % 2 #1 in consumer"
    assert "race" in drop["found"] and drop["line"].startswith("test_commands.py:")


def spare_fence(columns=64):
    """A fence that guards nothing: its mutant survives."""

    @T.prim_func
    def kernel(y: T.Tensor((64,), FP32)):
        with T.Kernel(1, threads=128) as _:
            T.fence_proxy_async()
            for i in T.Parallel(64):
                y[i] = 1.0

    return kernel


def test_a_survivor_needs_a_reason(tmp_path, capsys):
    out, reasons = tmp_path / "mutants.csv", tmp_path / "reasons.csv"
    command = [f"{THIS}:spare_fence", "--args", "columns=1", "--out", str(out)]
    assert mutate(command) == 1
    assert "survived without a reason: drop fence_proxy_async #1" in capsys.readouterr().out
    name = next(csv.DictReader(out.open()))["mutant"]
    reasons.write_text(f'mutant,reason\n"{name}",nothing is shared\ndrop other,gone\n')
    assert mutate([*command, "--justified", str(reasons)]) == 0
    assert "reason not needed: drop other" in capsys.readouterr().out
    assert next(csv.DictReader(out.open()))["reason"] == "nothing is shared"
    reasons.write_text(f'mutant,reason\n"{name}",\n')
    assert mutate([*command, "--justified", str(reasons)]) == 2
    assert "a row needs a mutant and a reason" in capsys.readouterr().err
