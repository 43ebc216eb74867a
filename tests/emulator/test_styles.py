"""Kernels in the styles of TileLang's warp-specialised examples."""

import numpy as np
import pytest
import tilelang.language as T
import torch
from building import BF16, FP32, bf16, run

from tile_emulator import Program, adversarial

SIZE, TILE, DEPTH = 256, 128, 64
SCHEDULES = ["roundrobin", "random:1", "priority:2"]


def signature():
    a, b = bf16(SIZE, SIZE), bf16(SIZE, SIZE, seed=1)
    c = np.full((SIZE, SIZE), np.nan, np.float32)
    return a, b, c, a.double().numpy() @ b.double().numpy()


def assert_right_under_all_schedules(kernel):
    program = Program(kernel)
    for schedule in (*SCHEDULES, *adversarial(program.roles)):
        a, b, c, want = signature()
        report = run(program, a, b, c, schedule=schedule)
        assert report.ok, str(report)
        np.testing.assert_allclose(c, want, atol=1e-3)


@pytest.mark.parametrize("loader", [0, 1])
def test_partitions_inside_a_pipelined_loop(loader):
    """T.ws branches alternate inside one loop that all threads run."""

    @T.prim_func
    def kernel(
        A: T.Tensor((SIZE, SIZE), BF16),
        B: T.Tensor((SIZE, SIZE), BF16),
        C: T.Tensor((SIZE, SIZE), FP32),
    ):
        with T.Kernel(SIZE // TILE, SIZE // TILE, threads=256) as (bx, by):
            a_shared = T.alloc_shared((TILE, DEPTH), BF16)
            b_shared = T.alloc_shared((DEPTH, TILE), BF16)
            c_fragment = T.alloc_fragment((TILE, TILE), FP32)
            loaded = T.alloc_barrier(128)
            done = T.alloc_barrier(128)
            with T.ws(1 - loader):
                T.clear(c_fragment)
            for k in T.Pipelined(SIZE // DEPTH, num_stages=2):
                with T.ws(loader):
                    T.barrier_wait(done, (k + 1) % 2)
                    T.copy(A[by * TILE, k * DEPTH], a_shared)
                    T.copy(B[k * DEPTH, bx * TILE], b_shared)
                    T.fence_proxy_async()
                    T.barrier_arrive(loaded)
                with T.ws(1 - loader):
                    T.barrier_wait(loaded, k % 2)
                    T.gemm(a_shared, b_shared, c_fragment)
                    T.barrier_arrive(done)
            with T.ws(1 - loader):
                T.copy(c_fragment, C[by * TILE, bx * TILE])

    assert_right_under_all_schedules(kernel)


def test_all_threads_load_and_each_group_multiplies_its_half():
    """Only the automatic syncs order the loads and the products."""

    @T.prim_func
    def kernel(
        A: T.Tensor((SIZE, SIZE), BF16),
        B: T.Tensor((SIZE, SIZE), BF16),
        C: T.Tensor((SIZE, SIZE), FP32),
    ):
        with T.Kernel(SIZE // TILE, SIZE // TILE, threads=256) as (bx, by):
            a_shared = T.alloc_shared((2, TILE // 2, DEPTH), BF16)
            b_shared = T.alloc_shared((DEPTH, TILE), BF16)
            c_fragment = T.alloc_fragment((TILE // 2, TILE), FP32)
            T.clear(c_fragment)
            for k in T.serial(SIZE // DEPTH):
                for half in T.unroll(2):
                    first = by * TILE + half * (TILE // 2)
                    T.copy(
                        A[first : first + TILE // 2, k * DEPTH : (k + 1) * DEPTH],
                        a_shared[half, :, :],
                    )
                T.copy(B[k * DEPTH, bx * TILE], b_shared)
                with T.ws(0):
                    T.gemm(a_shared[0, :, :], b_shared, c_fragment)
                with T.ws(1):
                    T.gemm(a_shared[1, :, :], b_shared, c_fragment)
            with T.ws(0):
                T.copy(c_fragment, C[by * TILE, bx * TILE])
            with T.ws(1):
                T.copy(c_fragment, C[by * TILE + TILE // 2, bx * TILE])

    assert_right_under_all_schedules(kernel)
    a, b, c, _ = signature()
    assert "race" in run(kernel, a, b, c, auto_sync=False, schedule="random:1").kinds


def test_wide_role_whose_groups_wait_for_barriers_of_their_own():
    """One slot a group, taken in turn: the groups must not wait for each other."""

    @T.prim_func
    def kernel(
        A: T.Tensor((4, TILE, DEPTH), BF16),
        B: T.Tensor((DEPTH, DEPTH), BF16),
        C: T.Tensor((4, TILE, DEPTH), BF16),
    ):
        with T.Kernel(1, threads=288) as _:
            b_shared = T.alloc_shared((DEPTH, DEPTH), BF16)
            out_shared = T.alloc_shared((TILE, DEPTH), BF16)
            a_fragment = T.alloc_fragment((TILE, DEPTH), BF16)
            c_fragment = T.alloc_fragment((TILE, DEPTH), FP32)
            out_fragment = T.alloc_fragment((TILE, DEPTH), BF16)
            loaded = T.alloc_barrier(32)
            written = T.alloc_barrier([4, 4])
            stored = T.alloc_barrier([32, 32])
            tx = T.get_thread_binding()
            if tx < 256:
                group = tx // 128
                T.barrier_wait(loaded, 0)
                for n in T.serial(4):
                    for i, j in T.Parallel(TILE, DEPTH):
                        a_fragment[i, j] = A[n, i, j]
                    T.gemm(
                        a_fragment,
                        b_shared,
                        c_fragment,
                        policy=T.GemmWarpPolicy.FullRow,
                        clear_accum=True,
                    )
                    for i, j in T.Parallel(TILE, DEPTH):
                        out_fragment[i, j] = c_fragment[i, j] * 2.0
                    T.barrier_wait(stored[group], (n + 1) % 2)
                    T.copy(out_fragment, out_shared)
                    T.fence_proxy_async()
                    T.sync_warp()
                    if T.shuffle_elect(32):
                        T.barrier_arrive(written[group])
            else:
                T.tma_copy(B, b_shared, barrier=loaded)
                T.barrier_arrive(loaded)
                for n in T.serial(4):
                    for half in T.serial(2):
                        T.barrier_wait(written[half], n % 2)
                        T.copy(
                            out_shared[half * 64 : half * 64 + 64, :],
                            C[n, half * 64 : half * 64 + 64, :],
                        )
                        T.barrier_arrive(stored[half])

    program = Program(kernel)
    assert program.roles == ("tx[0,128)", "tx[128,256)", "tx[256,288)")
    a, b = bf16(4, TILE, DEPTH), bf16(DEPTH, DEPTH, seed=1)
    for schedule in (*SCHEDULES, *adversarial(program.roles)):
        c = torch.full((4, TILE, DEPTH), torch.nan, dtype=torch.bfloat16)
        report = run(program, a, b, c, schedule=schedule)
        assert report.ok, str(report)
        torch.testing.assert_close(c.double(), 2 * a.double() @ b.double(), rtol=1e-2, atol=1e-2)


def test_pipelined_loop_of_one_role():
    """T.Pipelined runs as a plain loop; the syncs are TileLang's."""

    @T.prim_func
    def kernel(
        A: T.Tensor((SIZE, SIZE), BF16),
        B: T.Tensor((SIZE, SIZE), BF16),
        C: T.Tensor((SIZE, SIZE), FP32),
    ):
        with T.Kernel(SIZE // TILE, SIZE // TILE, threads=128) as (bx, by):
            a_shared = T.alloc_shared((TILE, DEPTH), BF16)
            b_shared = T.alloc_shared((DEPTH, TILE), BF16)
            c_fragment = T.alloc_fragment((TILE, TILE), FP32)
            T.clear(c_fragment)
            for k in T.Pipelined(SIZE // DEPTH, num_stages=3):
                T.copy(A[by * TILE, k * DEPTH], a_shared)
                T.copy(B[k * DEPTH, bx * TILE], b_shared)
                T.gemm(a_shared, b_shared, c_fragment)
            T.copy(c_fragment, C[by * TILE, bx * TILE])

    assert_right_under_all_schedules(kernel)


def test_nests_with_several_statements_need_no_sync_inside():
    """All threads store to and read one shared buffer, in one nest and in the next."""

    @T.prim_func
    def kernel(x: T.Tensor((64,), FP32), y: T.Tensor((64,), FP32)):
        with T.Kernel(1, threads=128) as _:
            row_shared = T.alloc_shared((64,), FP32)
            for _n in T.serial(2):
                for i in T.Parallel(64):
                    row_shared[i] = x[i]
                    row_shared[i] = row_shared[i] * 2.0
                for i in T.Parallel(64):
                    y[i] = row_shared[63 - i]

    x, y = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
    assert run(kernel, x, y).ok
    np.testing.assert_array_equal(y, 2 * x[::-1])
