"""Warp-level matrix instructions, and per-thread buffers seen under another dtype."""

import numpy as np
import pytest
import tilelang
import tilelang.language as T
import torch
from building import FP32, INT32, bf16, fp32, run

from tile_emulator import UnsupportedOperation

NO_THREAD_SYNC = {tilelang.PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True}
FP16 = "float16"


def half(*shape, seed=0):
    return torch.from_numpy(fp32(*shape, seed=seed)).half()


def product(sync=True, transposed_b=True):
    """One warp: C += A B of 16x16 and 16x8 blocks through ldmatrix and mma, stored element-wise."""

    @T.prim_func
    def kernel(
        a: T.Tensor((16, 16), FP16),
        b: T.Tensor((16, 16), FP16),
        c: T.Tensor((16, 8), FP32),
    ):
        with T.Kernel(1, threads=32) as _:
            lane = T.get_thread_binding()
            a_shared = T.alloc_shared((16, 16), FP16)
            b_shared = T.alloc_shared((16, 16), FP16)
            left, right = T.alloc_local((8,), FP16), T.alloc_local((8,), FP16)
            sums = T.alloc_local((4,), FP32)
            for i in T.serial(8):
                a_shared[lane // 2, lane % 2 * 8 + i] = a[lane // 2, lane % 2 * 8 + i]
                b_shared[lane // 2, lane % 2 * 8 + i] = b[lane // 2, lane % 2 * 8 + i]
            if sync:
                T.sync_warp()
            for i in T.serial(4):
                sums[i] = 1.0
            T.ptx_ldmatrix(
                T.bool(False),
                4,
                T.access_ptr(a_shared[lane % 16, lane // 16 * 8], "r", extent=8),
                T.access_ptr(left[0], "w", extent=8),
            )
            T.ptx_ldmatrix(
                T.bool(transposed_b),
                4,
                T.access_ptr(b_shared[lane % 16, lane // 16 * 8], "r", extent=8),
                T.access_ptr(right[0], "w", extent=8),
            )
            T.ptx_mma(
                "float32", "m16n8k16", "row", "col", "fp16", "fp16", "fp32",
                left.data, 0, right.data, 0, sums.data, 0, T.bool(False),
            )  # fmt: skip
            for i in T.serial(4):
                c[lane // 4 + i // 2 * 8, lane % 4 * 2 + i % 2] = sums[i]

    return kernel


def test_mma_of_blocks_loaded_by_ldmatrix():
    a, b, c = half(16, 16), half(16, 16, seed=1), np.zeros((16, 8), np.float32)
    assert run(product(), a, b, c, pass_configs=NO_THREAD_SYNC).ok
    np.testing.assert_allclose(c, 1 + a.double() @ b.double()[:, :8], rtol=1e-4, atol=1e-4)


def test_ldmatrix_without_transposition_takes_rows_as_columns():
    a, b, c = half(16, 16), half(16, 16, seed=1), np.zeros((16, 8), np.float32)
    assert run(product(transposed_b=False), a, b, c).ok
    halves = torch.cat([b.double()[:8, :8].T, b.double()[8:, :8].T])
    np.testing.assert_allclose(c, 1 + a.double() @ halves, rtol=1e-4, atol=1e-4)


def test_ldmatrix_of_rows_other_lanes_wrote_needs_a_warp_sync():
    a, b, c = half(16, 16), half(16, 16, seed=1), np.zeros((16, 8), np.float32)
    report = run(product(sync=False), a, b, c, pass_configs=NO_THREAD_SYNC)
    assert report.kinds == {"sync"} and {i.subject for i in report.issues} == {
        "a_shared",
        "b_shared",
    }


def test_stmatrix_stores_accumulator_words():
    @T.prim_func
    def kernel(x: T.Tensor((16, 16), "bfloat16"), y: T.Tensor((16, 16), "bfloat16")):
        with T.Kernel(1, threads=32) as _:
            lane = T.get_thread_binding()
            y_shared = T.alloc_shared((16, 16), "bfloat16")
            values = T.alloc_local((8,), "bfloat16")
            words = T.view(values, (4,), INT32)
            for i in T.serial(8):
                values[i] = x[lane // 4 + i // 2 % 2 * 8, lane % 4 * 2 + i % 2 + i // 4 * 8]
            T.call_extern(
                "handle",
                "tl::ptx_stmatrix_m8n8_x4",
                T.access_ptr(y_shared[lane % 16, lane // 16 * 8], "w", extent=8),
                words[0],
                words[1],
                words[2],
                words[3],
            )
            T.sync_warp()
            for i in T.serial(8):
                y[lane // 2, lane % 2 * 8 + i] = y_shared[lane // 2, lane % 2 * 8 + i]

    x, y = bf16(16, 16), torch.zeros(16, 16, dtype=torch.bfloat16)
    assert run(kernel, x, y, pass_configs=NO_THREAD_SYNC).ok
    assert torch.equal(x, y)


def test_views_share_the_bytes():
    @T.prim_func
    def kernel(
        x: T.Tensor((32, 2), FP16), words: T.Tensor((32,), INT32), y: T.Tensor((32, 2), FP16)
    ):
        with T.Kernel(1, threads=32) as _:
            tx = T.get_thread_binding()
            values = T.alloc_local((2,), FP16)
            bits = T.view(values, (1,), INT32)
            values[0] = x[tx, 0]
            values[1] = x[tx, 1]
            words[tx] = bits[0]
            bits[0] = bits[0] ^ (1 << 15)
            y[tx, 0] = values[0]
            y[tx, 1] = values[1]

    x, words, y = half(32, 2), np.zeros(32, np.int32), torch.zeros(32, 2, dtype=torch.float16)
    assert run(kernel, x, words, y).ok
    np.testing.assert_array_equal(words, x.numpy().view(np.int32)[:, 0])
    assert torch.equal(y, x * torch.tensor([-1, 1]))


def test_a_word_that_is_half_written_is_not_initialised():
    @T.prim_func
    def kernel(words: T.Tensor((32,), INT32)):
        with T.Kernel(1, threads=32) as _:
            tx = T.get_thread_binding()
            values = T.alloc_local((2,), FP16)
            bits = T.view(values, (1,), INT32)
            values[1] = 1.0
            words[tx] = bits[0]

    assert run(kernel, np.zeros(32, np.int32)).kinds == {"init"}


def test_a_matrix_instruction_of_half_a_warp_is_refused():
    @T.prim_func
    def kernel(y: T.Tensor((32,), FP32)):
        with T.Kernel(1, threads=32) as _:
            tx = T.get_thread_binding()
            left, right = T.alloc_local((8,), FP16), T.alloc_local((4,), FP16)
            sums = T.alloc_local((4,), FP32)
            if tx < 16:
                T.ptx_mma(
                    "float32", "m16n8k16", "row", "col", "fp16", "fp16", "fp32",
                    left.data, 0, right.data, 0, sums.data, 0, T.bool(False),
                )  # fmt: skip
            y[tx] = 0.0

    with pytest.raises(UnsupportedOperation, match="by a part of a warp"):
        run(kernel, np.zeros(32, np.float32))


@pytest.mark.parametrize("each_warp", [True, False])
def test_tma_store_by_each_warp_of_its_own_rows(each_warp):
    """A warp sync is enough where a warp stores what it wrote itself."""
    threads = 32 if each_warp else 64

    @T.prim_func
    def kernel(x: T.Tensor((64, 64), "bfloat16"), y: T.Tensor((64, 64), "bfloat16")):
        with T.Kernel(1, threads=64) as _:
            tx = T.get_thread_binding()
            rows_shared = T.alloc_shared((64, 64), "bfloat16")
            for i in T.serial(64):
                rows_shared[tx, i] = x[tx, i]
            T.fence_proxy_async()
            T.sync_warp()
            if each_warp:
                first = tx // 32 * 32
                T.tma_copy(
                    rows_shared[first : first + 32, :],
                    y[first : first + 32, :],
                    leader_scope_threads=threads,
                )
            else:
                T.tma_copy(rows_shared, y)
            T.tma_store_wait(0)

    x, y = bf16(64, 64), torch.zeros(64, 64, dtype=torch.bfloat16)
    report = run(kernel, x, y, pass_configs=NO_THREAD_SYNC)
    assert report.kinds == (set() if each_warp else {"sync"})
    assert torch.equal(x, y)
