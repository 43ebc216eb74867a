"""The sweep behind the cost model, the fit, and what the shipped constants choose on the record."""

import ast
import contextlib
import gc
import importlib.util
import json
import random
import sys
import weakref
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gdn_prefill.cost import (
    LAUNCHES,
    CoreCall,
    CostModel,
    LaunchCost,
    launch_works,
    packaged_model,
)
from gdn_prefill.dispatch import candidates
from gdn_prefill.split import CorePlan, SegmentPlan

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
SMS = 132


def load(name):
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


before = list(sys.path)
sweep, fit = load("dispatch_sweep"), load("fit_dispatch")
sys.path[:] = before


# --- the record


@pytest.fixture(scope="module")
def record():
    if not fit.SWEEP.is_file():
        pytest.skip(f"{fit.SWEEP.relative_to(fit.ROOT)} is not recorded yet")
    return fit.read_sweep(fit.SWEEP)


def test_the_shipped_constants_were_fitted_to_the_record(record):
    assert packaged_model().provenance["sha256"] == fit.digest(fit.SWEEP)


def test_the_record_covers_the_grid(record):
    points = {call for call, _ in fit.by_point(record)}
    assert len(points) >= 120 and points == set(sweep.grid())


def test_the_choice_is_near_the_best_and_no_split_loses(record):
    choices = fit.assess(record, packaged_model())
    bad = [choice for choice in choices if fit.violates(choice)]
    assert not bad, "\n".join(
        f"{c.call} {c.plan} {c.us} us, best {c.best} {c.best_us}" for c in bad
    )


# --- the grid


def test_the_grid_spans_heads_lengths_and_batches():
    points = sweep.grid()
    assert len(points) == len(set(points)) >= 120
    assert {call.heads_v for call in points} >= {4, 8, 32, 64}
    assert {call.heads_v // call.heads_q for call in points} >= {1, 4}
    lengths = {call.tokens for call in points}
    assert min(lengths) == 256 and max(lengths) == 65536 and any(T % 64 for T in lengths)
    assert {call.sequences for call in points} >= {1, 2, 4, 8, 16}
    assert all(call.states * call.tokens <= sweep.MOST_TOKENS for call in points)


def test_every_point_has_unsplit_plans_and_small_ones_splits():
    for call in sweep.grid():
        plans = candidates(call, SMS)
        assert plans[:2] == [CorePlan(64), CorePlan(128)]
        assert (len(plans) > 2) == (3 * call.states <= SMS)


# --- operands


def test_operands_are_finite_and_no_state_grows():
    from gdn_prefill.torch_backend import forward_torch

    tensors = sweep.Tensors.make(CoreCall(2, 1100, 1, 2), device="cpu")
    _, k, _, gate, _, A = tensors.inputs
    assert torch.allclose(k.float().norm(dim=-1), torch.ones(()), atol=1e-2)
    assert (gate < 0).all() and (gate[:, 64] == gate[:, 0]).all()
    chunk = A[0, 1088:, 1].float()
    assert (chunk.diagonal() == 1).all() and chunk[:12, :12].triu(1).abs().max() == 0
    assert chunk[:, 12:].abs().max() == 0 and chunk.tril(-1).abs().max() > 0
    output, state = forward_torch(*tensors.inputs, None, 1.0)
    assert output.isfinite().all() and state.abs().max() < 10


def test_the_difference_sees_what_is_wrong_or_missing():
    tensors = sweep.Tensors.make(CoreCall(1, 64, 1, 1), device="cpu")
    for tensor in tensors.outputs:
        tensor.fill_(1.0)
    tensors.keep()
    assert tensors.difference() == 0
    tensors.final_state.mul_(1.5)
    assert tensors.difference() == pytest.approx(0.5)
    tensors.output[0, 0, 0, 0] = float("nan")
    assert not tensors.difference() <= sweep.AGREEMENT


def test_every_plan_of_a_point_is_checked_and_timed(monkeypatch):
    """On the real kernels, in the emulator; one of the plans is broken on purpose."""
    pytest.importorskip("tilelang")
    from gdn_prefill import runtime
    from gdn_prefill.kernels import resident
    from tile_emulator import emulate

    def compiled(prim_func, pass_configs):
        return partial(emulate, prim_func, pass_configs=pass_configs, workers=1)

    layer = runtime.Runtime()
    monkeypatch.setattr(runtime, "RUNTIME", layer)
    monkeypatch.setattr(runtime, "compile_launcher", compiled)
    monkeypatch.setattr(sweep, "captured", lambda run: run)
    monkeypatch.setattr(sweep, "WARMUP", 0)
    call = CoreCall(1, 150, 1, 1)
    plans = candidates(call, SMS)
    assert [(plan.block_dv, plan.segments) for plan in plans] == [
        (64, 1),
        (128, 1),
        (64, 3),
        (128, 3),
    ]
    wide = (resident.resident_kernel, resident.ResidentConfig(1, 1, 128, segmented=True))
    layer.kernels.put(wide, lambda *arguments: [tensor.zero_() for tensor in arguments[8:10]])
    rows, failures = sweep.measure(call, SMS, 1, torch.device("cpu"))
    assert [(row["block_dv"], row["segments"]) for row in rows] == [(64, 1), (128, 1), (64, 3)]
    (failure,) = failures
    assert str(plans[3]) in failure and "away from the first plan" in failure
    assert all(set(row) == set(sweep.FIELDS) for row in rows)
    assert rows[0]["difference"] == 0 < rows[2]["difference"] < sweep.AGREEMENT
    assert rows[0]["workspace_bytes"] == 0 < rows[2]["workspace_bytes"]
    assert all(row["p20_us"] <= row["median_us"] <= row["p80_us"] for row in rows)


def test_a_replay_keeps_the_temporaries(monkeypatch):
    class Graph:
        def capture_begin(self, capture_error_mode):
            pass

        capture_end = replay = lambda self: None

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    temporaries = torch.zeros(3)
    alive = weakref.ref(temporaries)
    replay = sweep.captured(lambda temporaries=temporaries: temporaries.add_(1))
    del temporaries
    gc.collect()
    assert alive().tolist() == [1, 1, 1]
    assert replay() is None


def test_the_digest_covers_all_that_the_kernels_are_made_of():
    for name in sweep.SOURCES:
        source = (sweep.ROOT / "kernel" / "gdn_prefill" / "kernels" / f"{name}.py").read_text()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and node.level == 1:
                made_of = {node.module or alias.name for alias in node.names}
                assert made_of <= set(sweep.SOURCES), name


# --- the supervised worker

WORKER = """
import json, sys, time
numbers = sys.argv[sys.argv.index("--worker") + 1 : sys.argv.index("--rounds")]
for number in map(int, numbers):
    print("@" + json.dumps({"event": "start", "point": number}), flush=True)
    if number == %(hangs)s:
        time.sleep(60)
    if number == %(dies)s:
        sys.exit(3)
    rows = json.loads(%(rows)r)[str(number)]
    print("a line", "of its own")
    failures = ["dv 64: far away"] if number == %(fails)s else []
    event = {"event": "done", "point": number, "rows": rows, "failures": failures}
    print("@" + json.dumps(event), flush=True)
"""


def rows_of(number, us=10.0):
    call = sweep.grid()[number]
    sizes = (call.sequences, call.tokens, call.heads_q, call.heads_v, SMS)
    row = dict.fromkeys(sweep.FIELDS, 0) | dict(zip(sweep.FIELDS, sizes, strict=False))
    row |= {"median_us": us, "kernels": sweep.kernels_hash(), "chunks_per_segment": None}
    return [
        row | {"block_dv": plan.block_dv, "segments": plan.segments}
        for plan in (CorePlan(64), CorePlan(128))
    ]


@pytest.fixture
def worker(tmp_path):
    def make(numbers, hangs=-1, dies=-1, fails=-1):
        rows = json.dumps({number: rows_of(number) for number in numbers})
        path = tmp_path / "worker.py"
        path.write_text(WORKER % {"hangs": hangs, "dies": dies, "fails": fails, "rows": rows})
        return path

    return make


def points_in(path):
    return {sweep.key(row) for row in sweep.recorded(path, sweep.kernels_hash())}


def test_a_worker_that_hangs_or_dies_costs_its_point_alone(tmp_path, worker, capsys):
    path, numbers = tmp_path / "out.csv", [9, 3, 5, 7]
    script = worker(numbers, hangs=3, dies=5, fails=7)
    bad = sweep.sweep(path, numbers, 1, 60, 2.0, script)
    calls = sweep.grid()
    assert len(bad) == 3
    for reason, number, text in zip(
        bad, (3, 5, 7), ("nothing for 2 s", "exit status 3", "far away"), strict=True
    ):
        assert str(calls[number]) in reason and text in reason
    assert points_in(path) == {sweep.astuple(calls[number]) for number in (7, 9)}
    written = [sweep.key(row) for row in sweep.recorded(path, sweep.kernels_hash())]
    assert written == sorted(written, key=[sweep.astuple(call) for call in calls].index)
    assert "a line of its own" in capsys.readouterr().out


def test_a_sweep_goes_on_where_it_ended_unless_the_kernels_changed(tmp_path, worker, monkeypatch):
    path = tmp_path / "out.csv"
    assert sweep.sweep(path, [1, 2], 1, 60, 10.0, worker([1, 2])) == []
    # A worker that would hang at a point that is known shows that it is not asked for again.
    script = worker([1, 2, 3], hangs=1)
    assert sweep.sweep(path, [1, 2, 3], 1, 60, 2.0, script) == []
    assert len(points_in(path)) == 3
    monkeypatch.setattr(sweep, "kernels_hash", lambda: "others")
    assert points_in(path) == set()


def test_no_time_means_no_worker(tmp_path, worker):
    assert sweep.sweep(tmp_path / "out.csv", [1], 1, 0, 10.0, worker([1])) == []
    assert not (tmp_path / "out.csv").exists()


def test_a_worker_that_never_starts_ends_the_sweep(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text("raise SystemExit(5)")
    (bad,) = sweep.sweep(tmp_path / "out.csv", [1, 2], 1, 60, 10.0, script)
    assert "before its first point: exit status 5" in bad


def test_commands_without_a_gpu(capsys):
    assert sweep.main(["--list", "--heads", "4/4"]) == 0
    out = capsys.readouterr().out
    assert "heads_q=4, heads_v=4" in out and "heads_v=8" not in out
    if not torch.cuda.is_available():
        assert sweep.main([]) == 2


# --- the fit


@given(st.integers(0, 10**6), st.integers(1, 6))
def test_least_squares_without_negative_constants(seed, size):
    draw = np.random.default_rng(seed)
    A = draw.random((4 * size, size))
    b = A @ np.maximum(draw.normal(size=size), 0) + 0.1 * draw.normal(size=4 * size)
    x = fit.nonnegative_least_squares(A, b)
    slope = A.T @ (A @ x - b)
    # Optimal: no constant can be changed for the better without becoming negative.
    assert (x >= 0).all() and (slope >= -1e-6).all() and np.abs(slope * x).max() < 1e-6


CHUNK_US = {
    "unsplit64": 1.1,
    "unsplit128": 1.8,
    "opening64": 1.5,
    "opening128": 1.9,
    "scan": 1.9,
    "segment64": 1.15,
    "segment128": 1.9,
}


def machine(plan, call, noise):
    """Microseconds on a device that is not built as the model is: memory is a floor, a busier
    device is slower than in proportion, and launches overlap a little."""
    total = 0.0
    works = launch_works(plan, call, SMS)
    for name, work in works.items():
        time, left = 2.0, work.ctas
        while left > 0:
            busy = min(left, SMS) / SMS
            time += 2.5 + work.chunks * CHUNK_US[name] * (1 + 0.18 * busy**2)
            left -= SMS
        total += max(time, 3 + work.megabytes / (4.0 if work.megabytes > 50 else 8.0))
    return (total - 0.8 * (len(works) - 1)) * (1 + noise.gauss(0, 0.005))


@pytest.fixture(scope="module")
def simulated():
    noise = random.Random(1)
    return [
        fit.Measured(call, SMS, plan, machine(plan, call, noise))
        for call in sweep.grid()
        if (call.heads_q, call.heads_v) in ((4, 4), (2, 8), (4, 16), (8, 32), (16, 64))
        for plan in candidates(call, SMS)
    ]


def test_a_model_fitted_to_a_device_chooses_well_there(simulated):
    model = fit.fit(simulated, {"device": "simulated"})
    choices = fit.assess(simulated, model)
    assert {choice.plan.kind for choice in choices} == {"split", "unsplit"}
    assert not [choice for choice in choices if fit.violates(choice)]
    assert np.quantile(np.abs(fit.relative_errors(simulated, model)), 0.95) < 0.1
    *lines, summary = fit.report(simulated, model)
    assert len(lines) == len(choices) and "SLOWER" not in "".join(lines)
    assert f"{len(choices)} points" in summary and "0 slower than unsplit" in summary


def test_a_model_of_another_device_is_found_out(simulated):
    free = LaunchCost(0.0, 0.0, 0.0, 0.0, 0.0)
    slow = LaunchCost(5.0, 0.0, 2.0, 0.0, 0.0)
    unsplit = {"unsplit64": slow, "unsplit128": slow}
    eager = CostModel(dict.fromkeys(LAUNCHES, free) | unsplit, {})
    choices = fit.assess(simulated, eager)
    assert any(choice.slower_than_unsplit for choice in choices)
    assert any(fit.violates(choice) for choice in choices)
    assert any("SLOWER THAN UNSPLIT" in line for line in fit.report(simulated, eager))


def test_a_loss_is_measured_against_the_best():
    call, plan = CoreCall(1, 640, 1, 1), CorePlan(64, SegmentPlan(10, 5), 1)
    choice = fit.Choice(call, plan, 110.0, CorePlan(64), 100.0, 100.0)
    assert choice.loss == pytest.approx(0.1) and choice.slower_than_unsplit
    assert fit.violates(choice)
    unsplit = fit.Choice(call, CorePlan(128), 105.0, CorePlan(64), 100.0, 100.0)
    assert not unsplit.slower_than_unsplit and not fit.violates(unsplit)


def test_a_choice_that_was_not_measured_is_named(simulated):
    model = fit.solve(
        np.stack([fit.features(row) / row.us for row in simulated]), np.ones(len(simulated)), {}
    )
    unsplit = [row for row in simulated if row.plan.kind == "unsplit"]
    with pytest.raises(ValueError, match="was chosen but not measured"):
        fit.assess(unsplit, model)


def test_the_command_fits_writes_and_judges(simulated, tmp_path, monkeypatch, capsys):
    path, model_path = tmp_path / "sweep.csv", tmp_path / "model.json"
    rows = []
    for row in simulated:
        call, plan = row.call, row.plan
        sizes = (call.sequences, call.tokens, call.heads_q, call.heads_v, SMS)
        rows.append(
            dict.fromkeys(sweep.FIELDS)
            | dict(zip(sweep.FIELDS, sizes, strict=False))
            | {
                "block_dv": plan.block_dv,
                "segments": plan.segments,
                "chunks_per_segment": plan.chunks_per_segment,
                "products": plan.products,
                "median_us": row.us,
            }
        )
    sweep.write(path, rows)
    path.with_suffix(".json").write_text('{"device": "simulated", "revision": "abc"}')
    read = fit.read_sweep(path)
    assert sorted(read, key=str) == sorted(simulated, key=str)
    monkeypatch.setattr(fit, "PACKAGED", model_path)
    monkeypatch.setattr(fit, "EMPHASES", 1)
    assert fit.main(["--sweep", str(path), "--write", "--brief"]) == 0
    held = json.loads(model_path.read_text())["provenance"]
    assert (held["device"], held["revision"]) == ("simulated", "abc")
    assert held["sha256"] == fit.digest(path) and held["rows"] == len(simulated)
    assert "0 slower than unsplit" in capsys.readouterr().out


COLUMNS = ",".join(fit.COLUMNS)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file"),
        ("", "is no sweep: no column sequences; a sweep has sequences, tokens"),
        ("case,median_us\nchain_equal,3\n", "is no sweep: no column sequences; a sweep"),
        (f"{COLUMNS}\n", "is no sweep: no row in it"),
        (f"{COLUMNS}\n1,64,1,1,132,64,,,soon\n", "line 2: median_us is 'soon', must be a number"),
        (f"{COLUMNS}\n1,64,1,1,132,64,,,nan\n", "line 2: median_us is 'nan', must be a number"),
        (f"{COLUMNS}\n1,64,1,1,0,64,,,3\n", "line 2: sms is '0', must be a number above 0"),
        (f"{COLUMNS}\n1,64,1\n", "line 2: heads_v is None, must be a number above 0"),
        (f"{COLUMNS}\n1,64,1,1,132,65,,,3\n", "line 2: block_dv"),
        (f"{COLUMNS}\n1,64,2,3,132,64,,,3\n", "line 2: heads_v=3 must be a multiple of heads_q=2"),
        (b"\x89PNG", "is no sweep: not UTF-8 text"),
    ],
)
def test_what_is_no_sweep_is_refused(content, message, tmp_path, capsys):
    path = tmp_path / "other.csv"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(SystemExit) as exit_:
        fit.main(["--sweep", str(path)])
    said = capsys.readouterr().err
    assert exit_.value.code == 2 and f"argument --sweep: {path} " in said and message in said
