"""Thread-level code inside a role: per-thread values, locals, shuffles, elected lanes."""

import numpy as np
import pytest
import tilelang.language as T
from building import FP32, INT32, fp32, run

from tile_emulator import UnsupportedOperation


def test_indices_and_values_from_the_thread_number():
    @T.prim_func
    def kernel(x: T.Tensor((128,), FP32), y: T.Tensor((128,), FP32)):
        with T.Kernel(1, threads=128) as _:
            tx = T.get_thread_binding()
            local = T.alloc_local((2,), FP32)
            local[0] = x[tx]
            local[1] = x[127 - tx]
            y[tx] = local[0] - local[1] * tx

    x, y = fp32(128), np.zeros(128, np.float32)
    assert run(kernel, x, y).ok
    np.testing.assert_array_equal(y, x - x[::-1] * np.arange(128, dtype=np.float32))


def test_branches_on_the_thread_number():
    @T.prim_func
    def kernel(y: T.Tensor((64,), INT32)):
        with T.Kernel(1, threads=64) as _:
            tx = T.get_thread_binding()
            value = T.alloc_local((1,), INT32)
            value[0] = 0
            if tx % 3 == 0:
                value[0] = tx
            elif tx > 40:  # noqa: SIM102
                if tx % 2 == 0:
                    value[0] = -tx
            y[tx] = value[0]

    y = np.zeros(64, np.int32)
    assert run(kernel, y).ok
    t = np.arange(64)
    np.testing.assert_array_equal(
        y, np.where(t % 3 == 0, t, np.where((t > 40) & (t % 2 == 0), -t, 0))
    )


def test_per_thread_array_indexed_per_thread():
    @T.prim_func
    def kernel(y: T.Tensor((32,), INT32)):
        with T.Kernel(1, threads=32) as _:
            tx = T.get_thread_binding()
            values = T.alloc_local((4,), INT32)
            for i in T.serial(4):
                values[i] = i * 10
            values[tx % 4] = tx
            y[tx] = values[tx % 4] + values[(tx + 1) % 4]

    y = np.zeros(32, np.int32)
    assert run(kernel, y).ok
    t = np.arange(32)
    np.testing.assert_array_equal(y, t + (t + 1) % 4 * 10)


@pytest.mark.parametrize(
    ("name", "argument", "source"),
    [
        ("shfl_up", 3, lambda lane: np.where(lane >= 3, lane - 3, lane)),
        ("shfl_down", 5, lambda lane: np.where(lane + 5 < 32, lane + 5, lane)),
        ("shfl_xor", 9, lambda lane: lane ^ 9),
        ("shfl_sync", 7, lambda lane: np.full_like(lane, 7)),
    ],
)
def test_shuffles(name, argument, source):
    shuffle = getattr(T, name)

    @T.prim_func
    def kernel(x: T.Tensor((64,), FP32), y: T.Tensor((64,), FP32)):
        with T.Kernel(1, threads=64) as _:
            tx = T.get_thread_binding()
            value = T.alloc_local((1,), FP32)
            value[0] = x[tx]
            y[tx] = shuffle(value[0], argument)

    x, y = fp32(64), np.zeros(64, np.float32)
    assert run(kernel, x, y).ok
    lane = np.arange(32)
    np.testing.assert_array_equal(y, np.concatenate([x[:32][source(lane)], x[32:][source(lane)]]))


def test_warp_scan_with_shuffles():
    @T.prim_func
    def kernel(x: T.Tensor((32,), FP32), y: T.Tensor((32,), FP32)):
        with T.Kernel(1, threads=32) as _:
            tx = T.get_thread_binding()
            total, other = T.alloc_local((1,), FP32), T.alloc_local((1,), FP32)
            total[0] = x[tx]
            for s in T.unroll(5):
                other[0] = T.shfl_up(total[0], 1 << s)
                if tx >= (1 << s):
                    total[0] = total[0] + other[0]
            y[tx] = total[0]

    x, y = fp32(32), np.zeros(32, np.float32)
    assert run(kernel, x, y).ok
    np.testing.assert_allclose(y, np.cumsum(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("extent", "elected"), [(32, [0, 32, 64, 96]), (128, [0]), (0, [0])])
def test_elected_lanes(extent, elected):
    @T.prim_func
    def kernel(y: T.Tensor((128,), INT32)):
        with T.Kernel(1, threads=128) as _:
            tx = T.get_thread_binding()
            if T.shuffle_elect(extent):
                y[tx] = 1

    y = np.zeros(128, np.int32)
    assert run(kernel, y).ok
    assert np.flatnonzero(y).tolist() == elected


def test_divergent_loop_bound_is_refused():
    @T.prim_func
    def kernel(y: T.Tensor((32,), INT32)):
        with T.Kernel(1, threads=32) as _:
            tx = T.get_thread_binding()
            for i in T.serial(tx):
                y[i] = i

    with pytest.raises(UnsupportedOperation, match="trip count of loop i differs.*tx\\[0,32\\)"):
        run(kernel, np.zeros(32, np.int32))


def test_warps_write_their_own_rows_of_an_accumulator():
    """A nest in a branch that one warp takes works on the elements that warp owns: 16 of 64
    rows."""

    @T.prim_func
    def kernel(a: T.Tensor((64, 16), "bfloat16"), y: T.Tensor((64, 64), FP32)):
        with T.Kernel(1, threads=128) as _:
            tx = T.get_thread_binding()
            a_shared = T.alloc_shared((64, 16), "bfloat16")
            c_fragment = T.alloc_fragment((64, 64), FP32)
            T.copy(a, a_shared)
            T.gemm(a_shared, a_shared, c_fragment, transpose_B=True, clear_accum=True)
            warp = tx // 32
            if warp == 2:
                for i, j in T.Parallel(64, 16):
                    c_fragment[i, 16 + j] = 5.0
            for i, j in T.Parallel(64, 64):
                c_fragment[i, j] = c_fragment[i, j] + warp
            T.copy(c_fragment, y)

    import ml_dtypes

    a, y = fp32(64, 16).astype(ml_dtypes.bfloat16), np.zeros((64, 64), np.float32)
    assert run(kernel, a, y).ok
    want = a.astype(np.float64) @ a.astype(np.float64).T
    want[32:48, 16:32] = 5
    np.testing.assert_allclose(y, want + np.arange(64)[:, None] // 16, atol=1e-4)


def test_unknown_layouts_are_refused():
    @T.prim_func
    def kernel(y: T.Tensor((64, 64), FP32)):
        with T.Kernel(1, threads=128) as _:
            tx = T.get_thread_binding()
            tile = T.alloc_fragment((64, 64), FP32)
            for i, j in T.Parallel(64, 64):
                tile[i, j] = tx
            T.copy(tile, y)

    with pytest.raises(UnsupportedOperation, match="which thread owns|thread owns which|layout"):
        run(kernel, np.zeros((64, 64), np.float32))
