"""Control flow, variables, dynamic shapes, several CTAs."""

import numpy as np
import pytest
import tilelang.language as T
import torch
from building import FP32, INT32, fp32, run


def test_serial_loop_with_a_run_time_trip_count_and_a_variable():
    n = T.dynamic("n")

    @T.prim_func
    def kernel(x: T.Tensor((n,), FP32), y: T.Tensor((1,), FP32)):
        with T.Kernel(1, threads=32) as _:
            total = T.alloc_var(FP32)
            total = 0.0
            for i in T.serial(n):
                total = total + x[i]
            y[0] = total

    x, y = fp32(37), np.zeros(1, np.float32)
    assert run(kernel, x, y).ok
    np.testing.assert_allclose(y[0], x.sum(), rtol=1e-5)


def test_while_and_uniform_branches():
    @T.prim_func
    def kernel(x: T.Tensor((1,), INT32), y: T.Tensor((1,), INT32)):
        with T.Kernel(1, threads=32) as _:
            value, steps = T.alloc_var(INT32), T.alloc_var(INT32)
            value = x[0]
            steps = 0
            while value != 1:
                if value % 2 == 0:  # noqa: SIM108
                    value = value // 2
                else:
                    value = 3 * value + 1
                steps = steps + 1
            y[0] = steps

    y = np.zeros(1, np.int32)
    assert run(kernel, np.array([27], np.int32), y).ok
    assert y[0] == 111


def test_conditional_stores_in_a_nest_touch_only_their_elements():
    @T.prim_func
    def kernel(x: T.Tensor((16, 16), FP32), y: T.Tensor((16, 16), FP32)):
        with T.Kernel(1, threads=128) as _:
            for i, j in T.Parallel(16, 16):
                twice = x[i, j] * 2.0
                if i > j:
                    y[i, j] = twice
                elif i == j:
                    y[i, j] = 1.0

    x, y = fp32(16, 16), np.full((16, 16), 7, np.float32)
    assert run(kernel, x, y).ok
    want = np.where(np.tri(16, k=-1) > 0, 2 * x, 7)
    np.fill_diagonal(want, 1)
    np.testing.assert_array_equal(y, want.astype(np.float32))


def test_grid_of_two_dimensions_and_symbolic_sizes():
    rows, columns = T.dynamic("rows"), T.dynamic("columns")

    @T.prim_func
    def kernel(y: T.Tensor((rows, columns), INT32)):
        with T.Kernel(columns, rows, threads=32) as (bx, by):
            y[by, bx] = by * 100 + bx

    y = torch.zeros(3, 5, dtype=torch.int32)
    report = run(kernel, y)
    assert report.ok and report.ctas == 15 and report.written == {"y": 1.0}
    assert torch.equal(
        y, torch.arange(3, dtype=torch.int32)[:, None] * 100 + torch.arange(5, dtype=torch.int32)
    )


def test_scalar_parameters():
    @T.prim_func
    def kernel(y: T.Tensor((4,), FP32), scale: T.float32, count: T.int32):
        with T.Kernel(1, threads=32) as _:
            for i in T.serial(count):
                y[i] = scale

    y = np.zeros(4, np.float32)
    assert run(kernel, y, 2.5, 3).ok
    np.testing.assert_array_equal(y, [2.5, 2.5, 2.5, 0])


@pytest.mark.parametrize("length", [1, 63, 64, 65, 200])
def test_packed_sequences(length):
    """A sequence that starts anywhere in a packed tensor, its last tile cut to its own rows."""
    total = T.dynamic("total")

    @T.prim_func
    def kernel(
        x: T.Tensor((total, 8), FP32), starts: T.Tensor((3,), INT32), y: T.Tensor((total, 8), FP32)
    ):
        with T.Kernel(2, threads=128) as sequence:
            first, last = T.alloc_var(INT32), T.alloc_var(INT32)
            first = starts[sequence]
            last = starts[sequence + 1]
            for block in T.serial(T.ceildiv(last - first, 64)):
                for i, j in T.Parallel(64, 8):
                    if first + block * 64 + i < last:
                        y[first + block * 64 + i, j] = x[first + block * 64 + i, j] + sequence

    x, starts = fp32(length + 50, 8), np.array([0, length, length + 50], np.int32)
    y = np.zeros_like(x)
    assert run(kernel, x, starts, y).ok
    np.testing.assert_array_equal(
        y, x + (np.arange(length + 50) >= length).astype(np.float32)[:, None]
    )
