"""emulate(): arguments, reports, schedules, process pool, unsupported operations."""

import pickle

import numpy as np
import pytest
import tilelang.language as T
import torch
from building import BF16, FP32, bf16, fp32, run

from tile_emulator import Program, RaceError, UnsupportedOperation, adversarial, emulate
from tile_emulator.scheduler import Schedule

N = T.dynamic("N")


@T.prim_func
def double(x: T.Tensor((N, 8), FP32), y: T.Tensor((N, 8), BF16)):
    with T.Kernel(N, threads=32) as block:
        for j in T.Parallel(8):
            y[block, j] = x[block, j] * 2.0


def test_numpy_and_torch_tensors_are_written_in_place():
    import ml_dtypes

    x = fp32(5, 8)
    a, b = np.zeros((5, 8), ml_dtypes.bfloat16), torch.zeros(5, 8, dtype=torch.bfloat16)
    assert run(double, x, a).ok and run(double, torch.from_numpy(x), b).ok
    np.testing.assert_array_equal(a, (2 * x).astype(ml_dtypes.bfloat16))
    assert torch.equal(b, (2 * torch.from_numpy(x)).bfloat16())


def test_non_contiguous_output():
    x, y = fp32(5, 8), torch.zeros(8, 5, dtype=torch.bfloat16)
    assert run(double, x, y.T).ok
    assert torch.equal(y.T, (2 * torch.from_numpy(x)).bfloat16())


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((fp32(5, 8),), TypeError, "1 arguments; the kernel takes 2: x, y"),
        ((fp32(5, 8), [1]), TypeError, "y: list; a numpy array"),
        ((fp32(5, 8), fp32(5, 8)), TypeError, "y: dtype float32; the kernel takes bfloat16"),
        ((fp32(5, 7), bf16(5, 8)), ValueError, r"x: shape \(5, 7\); the kernel takes \(5, 8\)"),
        ((fp32(5, 8), bf16(4, 8)), ValueError, "y: N is 5 in another tensor, 4 here"),
        ((fp32(5, 8), bf16(40)), ValueError, r"y: shape \(40,\); the kernel takes 2 dimensions"),
    ],
)
def test_wrong_arguments(arguments, error, text):
    with pytest.raises(error, match=text):
        emulate(double, *arguments)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"check": "races"}, "check='races': allowed are race, deadlock, bounds, init"),
        ({"schedule": "fifo"}, "schedule='fifo': allowed are roundrobin"),
        ({"schedule": "random"}, "a seed is needed"),
        ({"schedule": "delay:v"}, r"no role 'v'; roles are tx\[0,32\), tma"),
    ],
)
def test_wrong_options(options, text):
    with pytest.raises(ValueError, match=text):
        emulate(double, fp32(5, 8), bf16(5, 8), **options)


def test_what_is_no_kernel():
    with pytest.raises(TypeError, match="prim_func=int: a TileLang PrimFunc"):
        emulate(3)


def test_blocks_and_progress():
    seen = []
    y = torch.zeros(5, 8, dtype=torch.bfloat16)
    report = run(
        double,
        fp32(5, 8),
        y,
        blocks=lambda block: block[0] in (1, 3),
        progress=lambda *a: seen.append(a),
    )
    assert report.ctas == 2 and seen == [(1, 2), (2, 2)] and report.written == {"y": 0.4}
    assert y.any(dim=1).tolist() == [False, True, False, True, False]


def test_process_pool_gives_the_same_tensors_and_one_report():
    x, one, two = fp32(12, 8), bf16(12, 8), bf16(12, 8)
    seen = []
    report = run(double, x, one, workers=2, progress=lambda *a: seen.append(a))
    run(double, x, two)
    assert (
        report.ctas == 12
        and report.written == {"y": 1.0}
        and sorted(seen) == [(i, 12) for i in range(1, 13)]
    )
    assert torch.equal(one, two)


@T.prim_func
def race_in_block_3(y: T.Tensor((8, 32), FP32)):
    with T.Kernel(8, threads=64) as block:
        tile_shared = T.alloc_shared((32,), FP32, scope="shared")
        ready = T.alloc_barrier(32)
        tx = T.get_thread_binding()
        if tx < 32:
            for i in T.Parallel(32):
                tile_shared[i] = 1.0
            T.barrier_arrive(ready)
        else:
            if block != 3:
                T.barrier_wait(ready, 0)
            for i in T.Parallel(32):
                y[block, i] = tile_shared[i]


def test_issue_in_a_worker_reaches_the_caller():
    with pytest.raises(RaceError) as caught:
        emulate(race_in_block_3, np.zeros((8, 32), np.float32), workers=2)
    assert {issue.cta for issue in caught.value.report.issues} == {(3,)}
    copy = pickle.loads(pickle.dumps(caught.value))
    assert str(copy) == str(caught.value) and copy.report.issues == caught.value.report.issues


def test_schedules_with_a_seed_repeat():
    def order(name):
        schedule = Schedule(name, ["a", "b", "c"])
        return [schedule.next_unit([0, 1, 2, 3]) for _ in range(40)]

    assert order("random:7") == order("random:7") != order("random:8")
    assert order("roundrobin")[:5] == [1, 2, 3, 0, 1]
    assert 1 not in order("delay:b") and set(order("hurry:tma")) == {3}
    assert Schedule("delay:b", ["a", "b"]).next_unit([1]) == 1


def test_adversarial_schedules_cover_every_role_and_the_engine():
    names = adversarial(Program(race_in_block_3).roles)
    assert names == (
        "delay:tx[0,32)", "delay:tx[32,64)", "delay:tma", "hurry:tx[0,32)", "hurry:tx[32,64)",
        "hurry:tma",
    )  # fmt: skip


def test_role_names():
    program = Program(race_in_block_3, role_names={"writer": (0, 32), "reader": (32, 64)})
    assert program.roles == ("writer", "reader")


def test_unsupported_operation_names_itself_and_its_line():
    @T.prim_func
    def kernel(y: T.Tensor((32,), FP32)):
        with T.Kernel(1, threads=32) as _:
            tx = T.get_thread_binding()
            T.atomic_add(y[tx], 1.0)

    with pytest.raises(
        UnsupportedOperation, match=r"test_api.py:\d+: operation .*atomic_add"
    ) as caught:
        emulate(kernel, np.zeros(32, np.float32))
    assert caught.value.where.startswith("test_api.py:")


def test_what_fails_inside_the_emulator_names_the_line_and_the_role():
    """A view of a tile in another shape would be indexed wrongly."""

    @T.prim_func
    def kernel(y: T.Tensor((64,), FP32)):
        with T.Kernel(1, threads=32) as _:
            tile_shared = T.alloc_shared((8, 8), FP32)
            flat = T.view(tile_shared, (64,), FP32)
            for i in T.Parallel(64):
                flat[i] = 1.0
            T.copy(flat, y)

    with pytest.raises(
        UnsupportedOperation, match=r"test_api.py:\d+: buffer .*: a view of tile_sh"
    ):
        emulate(kernel, np.zeros(64, np.float32))

    @T.prim_func
    def divides(y: T.Tensor((64,), "int32"), n: T.int32):
        with T.Kernel(1, threads=32) as _:
            for i in T.serial(64):
                y[i] = i // n

    with pytest.raises(UnsupportedOperation, match=r"tx\[0,32\) at .*cannot be executed: ZeroDiv"):
        emulate(divides, np.zeros(64, np.int32), 0)


def test_unsupported_expression_names_its_line():
    @T.prim_func
    def kernel(y: T.Tensor((32,), FP32)):
        with T.Kernel(1, threads=32) as _:
            for i in T.Parallel(32):
                y[i] = T.erf(1.0)

    with pytest.raises(UnsupportedOperation, match=r"test_api.py:\d+: .*erf"):
        emulate(kernel, np.zeros(32, np.float32))
