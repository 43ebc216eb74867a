"""Tile operations against numpy."""

import numpy as np
import pytest
import tilelang.cuda.language as TC
import tilelang.language as T
import torch
from building import BF16, FP32, bf16, fp32, run


def test_copy_between_all_spaces():
    @T.prim_func
    def kernel(x: T.Tensor((64, 32), BF16), y: T.Tensor((64, 32), BF16)):
        with T.Kernel(1, threads=128) as _:
            a_shared = T.alloc_shared((64, 32), BF16)
            b_shared = T.alloc_shared((64, 32), BF16)
            a_fragment = T.alloc_fragment((64, 32), FP32)
            T.copy(x, a_shared)
            T.copy(a_shared, a_fragment)
            T.copy(a_fragment, b_shared)
            T.copy(b_shared, y)

    x, y = bf16(64, 32), torch.zeros(64, 32, dtype=torch.bfloat16)
    assert run(kernel, x, y).ok
    assert torch.equal(x, y)


def test_copy_fills_with_zeros_and_drops_rows_past_the_edge():
    n = T.dynamic("n")

    @T.prim_func
    def kernel(x: T.Tensor((n, 32), FP32), y: T.Tensor((n, 32), FP32), z: T.Tensor((64, 32), FP32)):
        with T.Kernel(1, threads=128) as _:
            tile_shared = T.alloc_shared((64, 32), FP32)
            T.copy(x[0:64, 0:32], tile_shared)
            T.copy(tile_shared, y[0:64, 0:32])
            T.copy(tile_shared, z)

    x, y, z = fp32(40, 32), np.ones((40, 32), np.float32), np.ones((64, 32), np.float32)
    assert run(kernel, x, y, z).ok
    np.testing.assert_array_equal(x, y)
    np.testing.assert_array_equal(z[40:], 0)


def test_fill_and_clear():
    @T.prim_func
    def kernel(y: T.Tensor((16, 8), FP32)):
        with T.Kernel(1, threads=128) as _:
            tile = T.alloc_fragment((16, 8), FP32)
            T.clear(tile)
            T.fill(tile[0:8, 0:8], 2.5)
            T.copy(tile, y)

    y = np.ones((16, 8), np.float32)
    assert run(kernel, y).ok
    np.testing.assert_array_equal(y, np.repeat([2.5, 0], 8)[:, None] * np.ones(8))


@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
def test_gemm(transpose_a, transpose_b):
    a_shape = (32, 64) if transpose_a else (64, 32)
    b_shape = (16, 32) if transpose_b else (32, 16)

    @T.prim_func
    def kernel(a: T.Tensor(a_shape, BF16), b: T.Tensor(b_shape, BF16), c: T.Tensor((64, 16), FP32)):
        with T.Kernel(1, threads=128) as _:
            a_shared = T.alloc_shared(a_shape, BF16)
            b_shared = T.alloc_shared(b_shape, BF16)
            c_fragment = T.alloc_fragment((64, 16), FP32)
            T.copy(a, a_shared)
            T.copy(b, b_shared)
            T.gemm(
                a_shared,
                b_shared,
                c_fragment,
                transpose_A=transpose_a,
                transpose_B=transpose_b,
                clear_accum=True,
            )
            T.gemm(a_shared, b_shared, c_fragment, transpose_A=transpose_a, transpose_B=transpose_b)
            T.copy(c_fragment, c)

    a, b, c = bf16(*a_shape), bf16(*b_shape, seed=1), np.zeros((64, 16), np.float32)
    assert run(kernel, a, b, c).ok
    x, y = a.double().numpy(), b.double().numpy()
    np.testing.assert_allclose(
        c, 2 * (x.T if transpose_a else x) @ (y.T if transpose_b else y), atol=1e-4
    )


def test_gemm_of_int8_sums_in_int32():
    @T.prim_func
    def kernel(
        a: T.Tensor((64, 128), "int8"),
        b: T.Tensor((64, 128), "int8"),
        c: T.Tensor((64, 64), "int32"),
    ):
        with T.Kernel(1, threads=128) as _:
            a_shared = T.alloc_shared((64, 128), "int8")
            b_shared = T.alloc_shared((64, 128), "int8")
            c_fragment = T.alloc_fragment((64, 64), "int32")
            T.copy(a, a_shared)
            T.copy(b, b_shared)
            T.gemm(a_shared, b_shared, c_fragment, transpose_B=True, clear_accum=True)
            T.copy(c_fragment, c)

    a, b = (np.full((64, 128), value, np.int8) for value in (-128, 127))
    c = np.zeros((64, 64), np.int32)
    assert run(kernel, a, b, c).ok
    np.testing.assert_array_equal(c, -128 * 127 * 128)


def test_wgmma_of_a_register_operand_in_flight():
    @T.prim_func
    def kernel(
        a: T.Tensor((64, 64), BF16), b: T.Tensor((64, 64), BF16), c: T.Tensor((64, 64), FP32)
    ):
        with T.Kernel(1, threads=128) as _:
            b_shared = T.alloc_shared((64, 64), BF16)
            a_fragment = T.alloc_fragment((64, 64), BF16)
            c_fragment = T.alloc_fragment((64, 64), FP32)
            d_fragment = T.alloc_fragment((64, 64), FP32)
            T.copy(a, a_fragment)
            T.copy(b, b_shared)
            TC.wgmma_gemm(a_fragment, b_shared, c_fragment, clear_accum=True)
            TC.wgmma_gemm(a_fragment, b_shared, d_fragment, transpose_B=True, clear_accum=True)
            TC.wait_wgmma(1)
            TC.warpgroup_fence_operand(c_fragment, num_regs=32)
            for i, j in T.Parallel(64, 64):
                c_fragment[i, j] *= 2.0
            TC.wait_wgmma(0)
            for i, j in T.Parallel(64, 64):
                c[i, j] = c_fragment[i, j] + d_fragment[i, j]

    a, b, c = bf16(64, 64), bf16(64, 64, seed=1), np.zeros((64, 64), np.float32)
    assert run(kernel, a, b, c).ok
    x, y = a.double().numpy(), b.double().numpy()
    np.testing.assert_allclose(c, 2 * x @ y + x @ y.T, atol=1e-4)


@pytest.mark.parametrize("kind", ["sum", "max", "min", "abssum", "absmax"])
@pytest.mark.parametrize("dim", [0, 1])
def test_reduce(kind, dim):
    out = 32 if dim == 0 else 16
    options = {} if kind == "abssum" else {"clear": kind != "sum"}

    @T.prim_func
    def kernel(x: T.Tensor((16, 32), FP32), y: T.Tensor((out,), FP32)):
        with T.Kernel(1, threads=128) as _:
            x_fragment = T.alloc_fragment((16, 32), FP32)
            y_fragment = T.alloc_fragment((out,), FP32)
            T.copy(x, x_fragment)
            T.fill(y_fragment, 0.5)
            getattr(T, "reduce_" + kind)(x_fragment, y_fragment, dim=dim, **options)
            T.copy(y_fragment, y)

    x, y = fp32(16, 32), np.zeros(out, np.float32)
    assert run(kernel, x, y).ok
    z = np.abs(x) if kind.startswith("abs") else x
    want = getattr(np, kind.removeprefix("abs"))(z, axis=dim) + (0.5 if kind == "sum" else 0)
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reverse", [False, True])
def test_cumsum(reverse):
    @T.prim_func
    def kernel(x: T.Tensor((64, 8), FP32), y: T.Tensor((64, 8), FP32)):
        with T.Kernel(1, threads=128) as _:
            x_shared = T.alloc_shared((64, 8), FP32)
            T.copy(x, x_shared)
            T.cumsum(x_shared, dim=0, reverse=reverse)
            T.copy(x_shared, y)

    x, y = fp32(64, 8), np.zeros((64, 8), np.float32)
    assert run(kernel, x, y).ok
    want = np.cumsum(x[::-1], 0)[::-1] if reverse else np.cumsum(x, 0)
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-5)


def test_transpose():
    @T.prim_func
    def kernel(x: T.Tensor((16, 32), FP32), y: T.Tensor((32, 16), FP32)):
        with T.Kernel(1, threads=128) as _:
            x_shared = T.alloc_shared((16, 32), FP32)
            y_shared = T.alloc_shared((32, 16), FP32)
            T.copy(x, x_shared)
            T.transpose(x_shared, y_shared)
            T.copy(y_shared, y)

    x, y = fp32(16, 32), np.zeros((32, 16), np.float32)
    assert run(kernel, x, y).ok
    np.testing.assert_array_equal(y, x.T)


def test_tma_load_fills_zeros_and_tma_store_drops_rows():
    n = T.dynamic("n")

    @T.prim_func
    def kernel(x: T.Tensor((n, 64), BF16), y: T.Tensor((n, 64), BF16), z: T.Tensor((64, 64), BF16)):
        with T.Kernel(1, threads=128) as _:
            tile_shared = T.alloc_shared((64, 64), BF16)
            loaded = T.alloc_barrier(128)
            T.tma_copy(x[0:64, 0:64], tile_shared, barrier=loaded)
            T.barrier_arrive(loaded)
            T.barrier_wait(loaded, 0)
            T.tma_copy(tile_shared, y[0:64, 0:64])
            T.tma_store_wait(0)
            T.copy(tile_shared, z)

    x, y = bf16(40, 64), torch.ones(40, 64, dtype=torch.bfloat16)
    z = torch.ones(64, 64, dtype=torch.bfloat16)
    assert run(kernel, x, y, z).ok
    assert torch.equal(x, y) and torch.equal(z[:40], x) and not z[40:].any()
