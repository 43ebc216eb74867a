"""mbarriers, named barriers, transaction bytes, and what the reports of their misuse say."""

import numpy as np
import pytest
import tilelang.language as T
import torch
from building import BF16, FP32, bf16, fp32, run

from tile_emulator import BarrierError, DeadlockError, emulate


def pipeline(
    *,
    full=32,
    empty=128,
    wait_full=True,
    wait_empty=True,
    arrive_full=True,
    arrive_empty=True,
    lead=1,
    chunks=6,
):
    """Producer warp and consumer group over a ring of two slots."""

    @T.prim_func
    def kernel(x: T.Tensor((chunks, 64, 64), BF16), y: T.Tensor((chunks, 64, 64), FP32)):
        with T.Kernel(1, threads=160) as _:
            slots = T.alloc_shared((2, 64, 64), BF16)
            filled = T.alloc_barrier([full] * 2)
            emptied = T.alloc_barrier([empty] * 2)
            tile_fragment = T.alloc_fragment((64, 64), FP32)
            tx = T.get_thread_binding()
            if tx < 128:
                for c in T.serial(chunks):
                    if wait_full:
                        T.barrier_wait(filled[c % 2], c // 2 % 2)
                    T.copy(slots[c % 2, :, :], tile_fragment)
                    if arrive_empty:
                        T.barrier_arrive(emptied[c % 2])
                    T.copy(tile_fragment, y[c, :, :])
            else:
                for c in T.serial(chunks):
                    if wait_empty:
                        T.barrier_wait(emptied[c % 2], (c // 2 + lead) % 2)
                    T.tma_copy(x[c, :, :], slots[c % 2, :, :], barrier=filled[c % 2])
                    if arrive_full:
                        T.barrier_arrive(filled[c % 2])

    return kernel


def data(chunks=6):
    return bf16(chunks, 64, 64), np.zeros((chunks, 64, 64), np.float32)


SCHEDULES = [
    "roundrobin",
    "random:1",
    "random:2",
    "priority:3",
    "delay:tma",
    "delay:0",
    "delay:1",
    "hurry:tx[128,160)",
]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ring_of_two_slots_is_right_under_every_schedule(schedule):
    x, y = data()
    assert run(pipeline(), x, y, schedule=schedule).ok
    np.testing.assert_array_equal(y, x.float().numpy())


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        ({"wait_full": False}, {"race", "init"}),
        ({"wait_empty": False}, {"race", "lap", "barrier"}),
        ({"lead": 0}, {"deadlock"}),
    ],
)
def test_broken_ring_is_reported_under_every_schedule(change, kinds, schedule):
    with pytest.raises(Exception) as caught:
        emulate(pipeline(**change), *data(), schedule=schedule)
    assert caught.value.report.kinds & kinds


def test_deadlock_names_roles_lines_barriers_parity_and_arrivals():
    with pytest.raises(DeadlockError) as caught:
        emulate(pipeline(full=64), *data())
    text = str(caught.value)
    assert "deadlock, 2 role(s) blocked" in text
    assert (
        "tx[0,128) at test_barriers.py:" in text and "c=0 waits for parity 0 of filled[0]" in text
    )
    assert "32/64 arrived: 32 of tx[128,160)" in text and "32 missing" in text
    assert "tx[128,160) at test_barriers.py:" in text
    assert caught.value.report.kinds == {"deadlock"}


def test_missing_arrivals_deadlock():
    for change in ({"arrive_full": False}, {"arrive_empty": False}):
        with pytest.raises(DeadlockError):
            emulate(pipeline(**change), *data())


def test_more_arrivals_than_the_count():
    report = None
    try:
        report = run(pipeline(empty=96), *data())
    except DeadlockError as error:
        report = error.report
    assert "barrier" in report.kinds
    issue = next(i for i in report.issues if i.kind == "barrier")
    assert "emptied[0] (count 96): 128 threads arrive where 96 are missing" in str(issue)


def test_transaction_bytes_hold_a_phase():
    """An arrival before the load's bytes are expected lets the phase end empty."""

    @T.prim_func
    def kernel(x: T.Tensor((64, 64), BF16), y: T.Tensor((64, 64), BF16), early: T.int32):
        with T.Kernel(1, threads=160) as _:
            tile_shared = T.alloc_shared((64, 64), BF16)
            filled = T.alloc_barrier(32)
            tx = T.get_thread_binding()
            if tx < 128:
                T.barrier_wait(filled, 0)
                T.copy(tile_shared, y)
            else:
                if early == 1:
                    T.barrier_arrive(filled)
                T.tma_copy(x, tile_shared, barrier=filled)
                if early == 0:
                    T.barrier_arrive(filled)

    x, y = bf16(64, 64), torch.zeros(64, 64, dtype=torch.bfloat16)
    assert run(kernel, x, y, 0).ok and torch.equal(x, y)
    assert "race" in run(kernel, x, y, 1, schedule="delay:tma").kinds


def test_expect_without_a_load():
    @T.prim_func
    def kernel(y: T.Tensor((1,), FP32)):
        with T.Kernel(1, threads=32) as _:
            filled = T.alloc_barrier(32)
            T.mbarrier_expect_tx(filled, 64)
            y[0] = 1.0

    with pytest.raises(BarrierError, match="bytes are expected that no load brings: filled"):
        emulate(kernel, np.zeros(1, np.float32))


def test_arrive_and_expect_in_one():
    @T.prim_func
    def kernel(x: T.Tensor((64, 64), BF16), y: T.Tensor((64, 64), BF16)):
        with T.Kernel(1, threads=64) as _:
            tile_shared = T.alloc_shared((64, 64), BF16)
            filled = T.alloc_barrier(1)
            tx = T.get_thread_binding()
            T.tma_copy(x, tile_shared, barrier=filled)
            if tx == 0:
                T.mbarrier_arrive_expect_tx(filled, 0)
            T.barrier_wait(filled, 0)
            T.copy(tile_shared, y)

    x, y = bf16(64, 64), torch.zeros(64, 64, dtype=torch.bfloat16)
    assert run(kernel, x, y).ok
    assert torch.equal(x, y)


@pytest.mark.parametrize("sync", [True, False])
def test_named_barrier_between_two_roles(sync):
    @T.prim_func
    def kernel(x: T.Tensor((64,), FP32), y: T.Tensor((64,), FP32)):
        with T.Kernel(1, threads=64) as _:
            tile_shared = T.alloc_shared((64,), FP32, scope="shared")
            tx = T.get_thread_binding()
            if tx < 32:
                for i in T.Parallel(64):
                    tile_shared[i] = x[i]
                if sync:
                    T.sync_threads(1, 64)
            else:
                if sync:
                    T.sync_threads(1, 64)
                for i in T.Parallel(64):
                    y[i] = tile_shared[i]

    x, y = fp32(64), np.zeros(64, np.float32)
    report = run(kernel, x, y)
    assert report.ok is sync
    if sync:
        np.testing.assert_array_equal(x, y)
    else:
        assert report.kinds <= {"race", "init"}


def test_named_barrier_that_one_side_only_arrives_at():
    @T.prim_func
    def kernel(x: T.Tensor((64,), FP32), y: T.Tensor((64,), FP32)):
        with T.Kernel(1, threads=64) as _:
            tile_shared = T.alloc_shared((64,), FP32, scope="shared")
            tx = T.get_thread_binding()
            if tx < 32:
                for i in T.Parallel(64):
                    tile_shared[i] = x[i]
                T.named_barrier_arrive(3, 64)
            else:
                T.sync_threads(3, 64)
                for i in T.Parallel(64):
                    y[i] = tile_shared[i]

    x, y = fp32(64), np.zeros(64, np.float32)
    assert run(kernel, x, y).ok
    np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("sync", [True, False])
def test_common_code_is_published_by_a_full_sync_only(sync):
    @T.prim_func
    def kernel(x: T.Tensor((64,), FP32), y: T.Tensor((64,), FP32)):
        with T.Kernel(1, threads=64) as _:
            tile_shared = T.alloc_shared((64,), FP32, scope="shared")
            tx = T.get_thread_binding()
            T.copy(x, tile_shared)
            if sync:
                T.sync_threads()
            if tx < 32:
                for i in T.Parallel(32):
                    y[i] = tile_shared[i]
            else:
                for i in T.Parallel(32):
                    y[32 + i] = tile_shared[32 + i]

    x, y = fp32(64), np.zeros(64, np.float32)
    assert run(kernel, x, y).ok  # TileLang's ThreadSync adds the sync
    np.testing.assert_array_equal(x, y)
    report = run(kernel, x, y, auto_sync=False)
    assert report.ok if sync else "race" in report.kinds or "init" in report.kinds


def test_barrier_of_each_warp_group_of_a_wide_role():
    """The index of a barrier may depend on the thread: each warp group arrives at its own."""

    @T.prim_func
    def kernel(x: T.Tensor((128, 64), FP32), y: T.Tensor((128, 64), FP32)):
        with T.Kernel(1, threads=288) as _:
            tile_shared = T.alloc_shared((128, 64), FP32)
            tile_fragment = T.alloc_fragment((128, 64), FP32)
            ready = T.alloc_barrier([4, 4])
            tx = T.get_thread_binding()
            if tx < 256:
                T.copy(x, tile_fragment)
                T.copy(tile_fragment, tile_shared)
                T.fence_proxy_async()
                T.sync_warp()
                if T.shuffle_elect(32):
                    T.barrier_arrive(ready[tx // 128])
            else:
                T.barrier_wait(ready[0], 0)
                T.barrier_wait(ready[1], 0)
                T.copy(tile_shared, y)

    x, y = fp32(128, 64), np.zeros((128, 64), np.float32)
    assert run(kernel, x, y).ok
    np.testing.assert_array_equal(x, y)


def test_waiter_that_can_be_lapped():
    """Nothing holds the first role back: two phases may pass before the second looks once."""

    @T.prim_func
    def kernel(y: T.Tensor((4,), FP32)):
        with T.Kernel(1, threads=64) as _:
            ticked = T.alloc_barrier(32)
            tx = T.get_thread_binding()
            if tx < 32:
                for _n in T.serial(4):
                    T.barrier_arrive(ticked)
            else:
                for n in T.serial(4):
                    T.barrier_wait(ticked, n % 2)
                    y[n] = 1.0

    report = run(kernel, np.zeros(4, np.float32), schedule="delay:0")
    assert report.kinds == {"lap"}  # this schedule happens to work
    assert "ticked[0]: phase 1 can complete before the wait of tx[32,64) at" in str(report)
    with pytest.raises(DeadlockError, match="waits for parity"):
        run(kernel, np.zeros(4, np.float32), schedule="delay:1")
