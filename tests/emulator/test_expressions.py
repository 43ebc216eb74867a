"""Expressions: arithmetic, rounding, lazy selection, integer semantics, functions."""

import ml_dtypes
import numpy as np
import pytest
import tilelang.language as T
import torch
from building import BF16, FP32, INT32, fp32, run


def elementwise(formula, n=64, dtype=FP32, out=FP32):
    """Kernel that stores formula(x[i], i) for every i."""

    @T.prim_func
    def kernel(x: T.Tensor((n,), dtype), y: T.Tensor((n,), out)):
        with T.Kernel(1, threads=128) as _:
            for i in T.Parallel(n):
                y[i] = formula(x[i], i)

    return kernel


def apply(formula, x, dtype=FP32, out=FP32):
    y = np.zeros(len(x), out)
    assert run(elementwise(formula, len(x), dtype, out), x, y).ok
    return y


@pytest.mark.parametrize(
    "name",
    [
        "exp",
        "exp2",
        "log",
        "log2",
        "sqrt",
        "rsqrt",
        "tanh",
        "sigmoid",
        "floor",
        "ceil",
        "sin",
        "cos",
    ],
)
def test_functions(name):
    x = np.abs(fp32(64)) + 0.1
    reference = {
        "rsqrt": lambda a: 1 / np.sqrt(a),
        "sigmoid": lambda a: 1 / (1 + np.exp(-a)),
    }.get(name, getattr(np, name, None))
    result = apply(lambda a, i: getattr(T, name)(a), x)
    np.testing.assert_allclose(result, reference(x.astype(np.float64)), rtol=1e-5)


def test_arithmetic_is_fp32():
    x = fp32(64)
    np.testing.assert_array_equal(
        apply(lambda a, i: (a * 3.0 - 1.5) / 7.0, x),
        (x * np.float32(3) - np.float32(1.5)) / np.float32(7),
    )


def test_abs_min_max():
    x = fp32(64)
    np.testing.assert_array_equal(
        apply(lambda a, i: T.max(T.min(T.abs(a), 1.0), 0.25), x), np.clip(np.abs(x), 0.25, 1)
    )


def test_cast_rounds_to_bf16():
    x = fp32(64)
    result = apply(lambda a, i: T.cast(T.cast(a, BF16), FP32), x)
    np.testing.assert_array_equal(result, x.astype(ml_dtypes.bfloat16).astype(np.float32))


def test_bf16_arithmetic_rounds_after_each_operation():
    x = torch.randn(64).bfloat16()
    y = torch.zeros(64, dtype=torch.bfloat16)
    assert run(elementwise(lambda a, i: a * a + a, 64, BF16, BF16), x, y).ok
    assert torch.equal(y, x * x + x)


def test_store_rounds_to_fp16():
    x = fp32(64)
    y = np.zeros(64, np.float16)
    assert run(elementwise(lambda a, i: a, 64, FP32, "float16"), x, y).ok
    np.testing.assert_array_equal(y, x.astype(np.float16))


def test_integer_division_and_remainder():
    x = np.arange(-32, 32, dtype=np.int32)
    np.testing.assert_array_equal(apply(lambda a, i: a // 5, x, INT32, INT32), x // 5)
    np.testing.assert_array_equal(apply(lambda a, i: a % 5, x, INT32, INT32), x % 5)
    np.testing.assert_array_equal(
        apply(lambda a, i: T.truncdiv(a, 5), x, INT32, INT32), np.trunc(x / 5).astype(np.int32)
    )


def test_bits():
    x = np.arange(64, dtype=np.int32)
    np.testing.assert_array_equal(
        apply(lambda a, i: ((a << 2) | 1) ^ (a & 3), x, INT32, INT32), ((x << 2) | 1) ^ (x & 3)
    )
    np.testing.assert_array_equal(apply(lambda a, i: a >> 1, x, INT32, INT32), x >> 1)


def test_comparisons_and_logic():
    x = fp32(64)
    i = np.arange(64)
    result = apply(
        lambda a, j: T.if_then_else(T.And(a > 0, T.Or(j < 8, T.Not(j % 2 == 0))), 1.0, 0.0), x
    )
    np.testing.assert_array_equal(result, ((x > 0) & ((i < 8) | (i % 2 == 1))).astype(np.float32))


def test_if_then_else_never_evaluates_the_other_side():
    """x[i + 32] of the last half would be out of bounds."""

    @T.prim_func
    def kernel(x: T.Tensor((64,), FP32), y: T.Tensor((64,), FP32)):
        with T.Kernel(1, threads=128) as _:
            for i in T.Parallel(64):
                y[i] = T.if_then_else(i < 32, x[i + 32], 0.0)

    x, y = fp32(64), np.zeros(64, np.float32)
    assert run(kernel, x, y).ok
    np.testing.assert_array_equal(y, np.where(np.arange(64) < 32, np.roll(x, -32), 0))


def test_infinity():
    result = apply(lambda a, i: T.max(a, -T.infinity(FP32)), fp32(64))
    assert np.isfinite(result).all()


def test_fancy_transposed_and_broadcast_indices():
    @T.prim_func
    def kernel(
        x: T.Tensor((8, 16), FP32),
        v: T.Tensor((16,), FP32),
        y: T.Tensor((16, 8), FP32),
        z: T.Tensor((64,), FP32),
    ):
        with T.Kernel(1, threads=128) as _:
            for i, j in T.Parallel(8, 16):
                y[j, i] = x[i, j] * v[j] + v[i + 2]
            for i in T.Parallel(64):
                z[i] = x[i // 16, i % 16 // 2]

    x, v = fp32(8, 16), fp32(16, seed=1)
    y, z = np.zeros((16, 8), np.float32), np.zeros(64, np.float32)
    assert run(kernel, x, v, y, z).ok
    np.testing.assert_array_equal(y, (x * v + v[2:10, None]).T)
    i = np.arange(64)
    np.testing.assert_array_equal(z, x[i // 16, i % 16 // 2])
