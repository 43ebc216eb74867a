"""Races, proxy fences, thread syncs, early use of asynchronous results, bounds, initialisation."""

import numpy as np
import pytest
import tilelang
import tilelang.cuda.language as TC
import tilelang.language as T
import torch
from building import BF16, FP32, bf16, fp32, run

from tile_emulator import BoundsError, InitError, RaceError, emulate

NO_THREAD_SYNC = {tilelang.PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True}


def exchange(*, fence=True, sync=True, arrive="all"):
    """One role writes shared memory, another multiplies it."""

    @T.prim_func
    def kernel(a: T.Tensor((64, 64), BF16), y: T.Tensor((64, 64), FP32)):
        with T.Kernel(1, threads=256) as _:
            tile_shared = T.alloc_shared((64, 64), BF16)
            a_fragment = T.alloc_fragment((64, 64), BF16)
            y_fragment = T.alloc_fragment((64, 64), FP32)
            ready = T.alloc_barrier(128 if arrive == "all" else 4)
            tx = T.get_thread_binding()
            if tx < 128:
                T.copy(a, a_fragment)
                T.copy(a_fragment, tile_shared)
                if fence:
                    T.fence_proxy_async()
                if arrive == "all":
                    T.barrier_arrive(ready)
                else:
                    if sync:
                        T.sync_warp()
                    if T.shuffle_elect(32):
                        T.barrier_arrive(ready)
            else:
                T.barrier_wait(ready, 0)
                T.gemm(tile_shared, tile_shared, y_fragment, transpose_B=True, clear_accum=True)
                T.copy(y_fragment, y)

    return kernel


def test_exchange_is_clean():
    assert run(exchange(), bf16(64, 64), np.zeros((64, 64), np.float32)).ok
    assert run(exchange(arrive="elected"), bf16(64, 64), np.zeros((64, 64), np.float32)).ok


def test_missing_fence_names_both_accesses():
    with pytest.raises(RaceError) as caught:
        emulate(exchange(fence=False), bf16(64, 64), np.zeros((64, 64), np.float32))
    (issue,) = caught.value.report.issues
    assert issue.kind == "fence" and issue.subject == "tile_shared"
    assert "tx[128,256) at test_detector.py:" in str(issue)
    missing = "async read of tile_shared without fence.proxy.async after the write by tx[0,128)"
    assert missing + " at test_detector.py:" in str(issue)


def test_elected_arrival_without_a_warp_sync_is_a_race():
    report = run(
        exchange(arrive="elected", sync=False), bf16(64, 64), np.zeros((64, 64), np.float32)
    )
    assert report.kinds == {"race"}


def own_product(*, fence, sync):
    """One role writes an operand and multiplies it itself."""

    @T.prim_func
    def kernel(a: T.Tensor((64, 64), BF16), y: T.Tensor((64, 64), FP32)):
        with T.Kernel(1, threads=128) as _:
            tile_shared = T.alloc_shared((64, 64), BF16)
            y_fragment = T.alloc_fragment((64, 64), FP32)
            for i, j in T.Parallel(64, 64):
                tile_shared[i, j] = a[i, j]
            if fence:
                T.fence_proxy_async()
            if sync:
                T.sync_threads(1, 128)
            T.gemm(tile_shared, tile_shared, y_fragment, transpose_B=True, clear_accum=True)
            T.copy(y_fragment, y)

    return kernel


@pytest.mark.parametrize("fence", [True, False])
@pytest.mark.parametrize("sync", [True, False])
def test_automatic_fences_and_syncs_and_their_switches(fence, sync):
    a, y = bf16(64, 64), np.zeros((64, 64), np.float32)
    kernel = own_product(fence=fence, sync=sync)
    assert run(kernel, a, y).ok
    assert ("fence" in run(kernel, a, y, auto_fence=False).kinds) is not fence
    assert ("sync" in run(kernel, a, y, pass_configs=NO_THREAD_SYNC).kinds) is not sync


def table(*, first=True, second=True):
    """Thread 63 writes a value that all of the role read, twice over."""

    @T.prim_func
    def kernel(x: T.Tensor((4, 64), FP32), y: T.Tensor((4, 64), FP32)):
        with T.Kernel(1, threads=64) as _:
            tx = T.get_thread_binding()
            last_shared = T.alloc_shared((1,), FP32, scope="shared")
            for c in T.serial(4):
                if first:
                    T.sync_threads(1, 64)
                if tx == 63:
                    last_shared[0] = x[c, tx]
                if second:
                    T.sync_threads(2, 64)
                y[c, tx] = last_shared[0] - x[c, tx]

    return kernel


@pytest.mark.parametrize("drop", [None, "first", "second"])
def test_threads_of_one_role(drop):
    kernel = table(**({drop: False} if drop else {}))
    x, y = fp32(4, 64), np.zeros((4, 64), np.float32)
    report = run(kernel, x, y, pass_configs=NO_THREAD_SYNC)
    np.testing.assert_array_equal(y, x[:, 63:] - x)
    assert report.kinds == ({"sync"} if drop else set())
    if drop == "second":
        assert "read of last_shared: no sync of this role's threads after the write" in str(report)


def test_warp_sync_is_enough_inside_a_warp_only():
    def kernel_for(distance):
        @T.prim_func
        def kernel(x: T.Tensor((64,), FP32), y: T.Tensor((64,), FP32)):
            with T.Kernel(1, threads=64) as _:
                tx = T.get_thread_binding()
                row_shared = T.alloc_shared((64,), FP32, scope="shared")
                row_shared[tx] = x[tx]
                T.sync_warp()
                y[tx] = row_shared[tx ^ distance]

        return kernel

    x, y = fp32(64), np.zeros(64, np.float32)
    assert run(kernel_for(1), x, y, pass_configs=NO_THREAD_SYNC).ok
    assert run(kernel_for(32), x, y, pass_configs=NO_THREAD_SYNC).kinds == {"sync"}
    np.testing.assert_array_equal(y, x[np.arange(64) ^ 32])


def test_threads_that_store_different_values_to_one_element():
    @T.prim_func
    def kernel(y: T.Tensor((4,), "int32")):
        with T.Kernel(1, threads=32) as _:
            tx = T.get_thread_binding()
            y[tx // 8] = tx

    report = run(kernel, np.zeros(4, np.int32))
    assert report.kinds == {"race"} and "several threads store different values" in str(report)


def products(*, wait=True, final=True):
    @T.prim_func
    def kernel(a: T.Tensor((64, 64), BF16), y: T.Tensor((64, 64), FP32)):
        with T.Kernel(1, threads=128) as _:
            tile_shared = T.alloc_shared((64, 64), BF16)
            c_fragment = T.alloc_fragment((64, 64), FP32)
            d_fragment = T.alloc_fragment((64, 64), FP32)
            T.copy(a, tile_shared)
            TC.wgmma_gemm(tile_shared, tile_shared, c_fragment, transpose_B=True, clear_accum=True)
            TC.wgmma_gemm(tile_shared, tile_shared, d_fragment, clear_accum=True)
            if wait:
                TC.wait_wgmma(1)
            T.copy(c_fragment, y)
            if final:
                TC.wait_wgmma(0)

    return kernel


def test_wgmma_results_need_their_wait():
    a, y = bf16(64, 64), np.zeros((64, 64), np.float32)
    assert run(products(), a, y).ok
    report = run(products(wait=False), a, y)
    assert report.kinds == {
        "wgmma"
    } and "reads c_fragment while a wgmma on it is outstanding" in str(report)
    assert "ends with 1 outstanding wgmma" in str(run(products(final=False), a, y))


@pytest.mark.parametrize("wait", [True, False])
def test_operand_overwritten_before_the_wgmma_is_done(wait):
    @T.prim_func
    def kernel(a: T.Tensor((64, 64), BF16), y: T.Tensor((64, 64), FP32)):
        with T.Kernel(1, threads=128) as _:
            tile_shared = T.alloc_shared((64, 64), BF16)
            c_fragment = T.alloc_fragment((64, 64), FP32)
            T.copy(a, tile_shared)
            TC.wgmma_gemm(tile_shared, tile_shared, c_fragment, clear_accum=True)
            if wait:
                TC.wait_wgmma(0)
            T.clear(tile_shared)
            TC.wait_wgmma(0)
            T.copy(c_fragment, y)

    assert run(kernel, bf16(64, 64), np.zeros((64, 64), np.float32)).kinds == (
        set() if wait else {"race"}
    )


@pytest.mark.parametrize("wait", [True, False])
def test_source_of_a_tma_store_overwritten(wait):
    @T.prim_func
    def kernel(y: T.Tensor((64, 64), BF16)):
        with T.Kernel(1, threads=128) as _:
            tile_shared = T.alloc_shared((64, 64), BF16)
            T.fill(tile_shared, 1.0)
            T.tma_copy(tile_shared, y)
            if wait:
                T.tma_store_wait(0)
            T.fill(tile_shared, 2.0)

    y = torch.zeros(64, 64, dtype=torch.bfloat16)
    kinds = run(kernel, y).kinds
    assert kinds == (set() if wait else {"race", "async"})


def test_load_that_nobody_waits_for():
    @T.prim_func
    def kernel(x: T.Tensor((64, 64), BF16), y: T.Tensor((1,), FP32)):
        with T.Kernel(1, threads=128) as _:
            tile_shared = T.alloc_shared((64, 64), BF16)
            loaded = T.alloc_barrier(128)
            T.tma_copy(x, tile_shared, barrier=loaded)
            T.barrier_arrive(loaded)
            y[0] = 1.0

    report = run(kernel, bf16(64, 64), np.zeros(1, np.float32))
    assert "nobody waits for the TMA load of tile_shared at test_detector.py:" in str(report)


def test_two_ctas_write_the_same_rows():
    @T.prim_func
    def kernel(y: T.Tensor((96,), FP32)):
        with T.Kernel(2, threads=64) as block:
            for i in T.Parallel(64):
                y[block * 32 + i] = 1.0

    report = run(kernel, np.zeros(96, np.float32))
    assert report.kinds == {
        "overlap"
    } and "writes elements of y that CTA number 0 has written" in str(report)


@pytest.mark.parametrize(("shift", "low", "high"), [(1, 1, 64), (-1, -1, 62)])
def test_index_outside_a_tensor(shift, low, high):
    @T.prim_func
    def kernel(x: T.Tensor((64,), FP32), y: T.Tensor((64,), FP32)):
        with T.Kernel(1, threads=64) as _:
            for i in T.Parallel(64):
                y[i + shift] = x[i]

    with pytest.raises(BoundsError, match=f"y: index {low}..{high} of axis 0 is outside 0..63"):
        emulate(kernel, fp32(64), np.zeros(64, np.float32))
    with pytest.raises(BoundsError):
        emulate(kernel, fp32(64), np.zeros(64, np.float32), check=None)


def test_thread_index_and_region_outside_a_buffer():
    @T.prim_func
    def by_thread(y: T.Tensor((16,), FP32)):
        with T.Kernel(1, threads=32) as _:
            tx = T.get_thread_binding()
            y[tx] = 1.0

    assert "y: index 0..31 of axis 0 is outside 0..15" in str(
        run(by_thread, np.zeros(16, np.float32))
    )

    @T.prim_func
    def by_region(x: T.Tensor((64, 64), FP32), row: T.int32):
        with T.Kernel(1, threads=128) as _:
            tile_shared = T.alloc_shared((64, 64), FP32)
            tile_fragment = T.alloc_fragment((32, 64), FP32)
            T.copy(x, tile_shared)
            T.copy(tile_shared[row : row + 32, 0:64], tile_fragment)

    assert run(by_region, fp32(64, 64), 32).ok
    assert "tile_shared: region (40, 0) + (32, 64) is outside (64, 64)" in str(
        run(by_region, fp32(64, 64), 40)
    )


@pytest.mark.parametrize("space", ["shared", "fragment", "local"])
def test_read_of_what_nothing_has_written(space):
    @T.prim_func
    def kernel(y: T.Tensor((64,), FP32)):
        with T.Kernel(1, threads=64) as _:
            tx = T.get_thread_binding()
            if space == "local":
                value_local = T.alloc_local((2,), FP32)
                value_local[0] = 1.0
                y[tx] = value_local[1]
            else:
                tile = (
                    T.alloc_shared((64,), FP32)
                    if space == "shared"
                    else T.alloc_fragment((64,), FP32)
                )
                for i in T.Parallel(32):
                    tile[i] = 1.0
                T.copy(tile, y)

    with pytest.raises(InitError, match="which nothing has written"):
        emulate(kernel, np.zeros(64, np.float32))
    assert run(kernel, np.zeros(64, np.float32), check="race").ok


def test_accumulation_into_what_nothing_has_written():
    @T.prim_func
    def kernel(a: T.Tensor((64, 64), BF16), y: T.Tensor((64, 64), FP32)):
        with T.Kernel(1, threads=128) as _:
            tile_shared = T.alloc_shared((64, 64), BF16)
            c_fragment = T.alloc_fragment((64, 64), FP32)
            T.copy(a, tile_shared)
            T.gemm(tile_shared, tile_shared, c_fragment)
            T.copy(c_fragment, y)

    report = run(kernel, bf16(64, 64), np.zeros((64, 64), np.float32))
    assert "accumulates into c_fragment, which nothing has written" in str(report)


def test_elected_wait_orders_only_its_own_thread():
    """One lane waits for a load; the others may read only after a warp sync."""

    def kernel_for(sync):
        @T.prim_func
        def kernel(x: T.Tensor((64, 64), BF16), y: T.Tensor((64, 64), BF16)):
            with T.Kernel(1, threads=32) as _:
                tile_shared = T.alloc_shared((64, 64), BF16)
                loaded = T.alloc_barrier(32)
                T.tma_copy(x, tile_shared, barrier=loaded)
                T.barrier_arrive(loaded)
                if T.shuffle_elect(32):
                    T.barrier_wait(loaded, 0)
                if sync:
                    T.sync_warp()
                for i, j in T.Parallel(64, 64):
                    y[i, j] = tile_shared[i, j]

        return kernel

    x, y = bf16(64, 64), torch.zeros(64, 64, dtype=torch.bfloat16)
    assert run(kernel_for(True), x, y).ok and torch.equal(x, y)
    assert "race" in run(kernel_for(False), x, y).kinds
