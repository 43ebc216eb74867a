"""Clusters of CTAs: copies to a peer, remote arrivals, cluster_sync, and what is found in them."""

import csv

import numpy as np
import pytest
import tilelang.cuda.language as TC
import tilelang.language as T
from building import FP32, INT32, fp32, run

from tile_emulator import (
    DeadlockError,
    KernelFault,
    Program,
    RaceError,
    UnsupportedOperation,
    emulate,
)
from tile_emulator.__main__ import main
from tile_emulator.mutate import main as mutate
from tile_emulator.scheduler import adversarial

PASS_CONFIGS = {"tl.disable_thread_storage_sync": True}
CHUNKS, SLOTS = 5, 2
SCHEDULES = ("roundrobin", "random:1", "random:2", "random:3", "priority:1", "priority:2")


def exchange(
    *,
    pairs=1,
    chunks=CHUNKS,
    slots=SLOTS,
    wait_free=True,
    arrive_free=True,
    fence=True,
    sync=True,
    meet=True,
    rank_offset=0,
):
    """A warp group sends tiles to the peer CTA, another one stores those that came from there."""

    @T.prim_func
    def kernel(
        x: T.Tensor((2 * pairs, chunks, 16, 64), FP32),
        y: T.Tensor((2 * pairs, chunks, 16, 64), FP32),
    ):
        with T.Kernel(2 * pairs, threads=256, cluster_dims=(2, 1, 1)) as bx:
            outgoing = T.alloc_shared((slots, 16, 64), FP32)
            incoming = T.alloc_shared((SLOTS, 16, 64), FP32)
            tile_fragment = T.alloc_fragment((16, 64), FP32)
            result_fragment = T.alloc_fragment((16, 64), FP32)
            filled = T.alloc_barrier([1] * SLOTS)
            freed = T.alloc_cluster_barrier([128] * SLOTS)
            tx = T.get_thread_binding()
            peer = 1 - TC.block_rank_in_cluster()
            if tx < 128:
                for c in T.serial(chunks):
                    T.copy(x[bx, c, :, :], tile_fragment)
                    if wait_free:
                        T.barrier_wait(freed[c % SLOTS], (c // SLOTS + 1) % 2)
                    T.copy(tile_fragment, outgoing[c % slots, :, :])
                    if fence:
                        T.fence_proxy_async()
                    if sync:
                        T.sync_threads(1, 128)
                    T.copy_cluster(
                        outgoing[c % slots, :, :],
                        incoming[c % SLOTS, :, :],
                        dst_block=peer + rank_offset,
                        remote_barrier=filled[c % SLOTS],
                    )
            else:
                for c in T.serial(chunks):
                    T.barrier_wait(filled[c % SLOTS], c // SLOTS % 2)
                    T.copy(incoming[c % SLOTS, :, :], result_fragment)
                    if arrive_free:
                        T.mbarrier_arrive(freed[c % SLOTS], peer)
                    T.copy(result_fragment, y[bx, c, :, :])
            if meet:
                TC.cluster_sync()

    return kernel


def tensors(pairs=1, chunks=CHUNKS):
    return fp32(2 * pairs, chunks, 16, 64), np.zeros((2 * pairs, chunks, 16, 64), np.float32)


def swapped(x):
    """The tiles of each pair of CTAs changed places."""
    return x.reshape(-1, 2, *x.shape[1:])[:, ::-1].reshape(x.shape)


PROGRAM = Program(exchange())


@pytest.mark.parametrize("schedule", (*SCHEDULES, *adversarial(PROGRAM.roles)))
@pytest.mark.parametrize("pass_configs", [{}, PASS_CONFIGS])
def test_exchange_is_right_under_every_schedule(schedule, pass_configs):
    x, y = tensors()
    report = run(PROGRAM, x, y, schedule=schedule, pass_configs=pass_configs)
    assert report.ok, report
    assert report.ctas == 2
    np.testing.assert_array_equal(y, swapped(x))


def test_roles_and_arrivals_of_all_ctas():
    assert PROGRAM.roles == ("tx[0,128)", "tx[128,256)", "tx[0,128)@1", "tx[128,256)@1")
    report = run(PROGRAM, *tensors())
    assert report.roles == report.timeline.roles == PROGRAM.roles
    assert report.arrivals["filled"] == {"tx[0,128)": 1, "tx[0,128)@1": 1}
    assert report.arrivals["freed"] == {"tx[128,256)": 128, "tx[128,256)@1": 128}
    assert {event.role for event in report.timeline.events} == set(PROGRAM.roles)


BROKEN = [
    ({"wait_free": False}, "race", "writes incoming"),
    ({"slots": 1}, "race", "writes outgoing"),
    ({"fence": False}, "fence", "outgoing"),
    ({"meet": False}, "exit", "arrival at freed"),
    ({"meet": False}, "exit", "copy from outgoing"),
]


@pytest.mark.parametrize("schedule", ("roundrobin", "random:4", "delay:tma", "hurry:tma"))
@pytest.mark.parametrize(("change", "kind", "text"), BROKEN)
def test_broken_exchange_is_reported_under_every_schedule(change, kind, text, schedule):
    with pytest.raises(KernelFault) as caught:
        emulate(exchange(**change), *tensors(), schedule=schedule)
    found = [str(issue) for issue in caught.value.report.issues if issue.kind == kind]
    assert any(text in issue for issue in found), caught.value.report


@pytest.mark.parametrize(("offset", "rank"), [(1, 2), (-1, -1)])
def test_copy_to_a_rank_outside_of_the_cluster(offset, rank):
    with pytest.raises(KernelFault) as caught:
        emulate(exchange(rank_offset=offset), *tensors())
    issue = next(i for i in caught.value.report.issues if i.kind == "bounds")
    assert f"CTA rank {rank} is outside of the cluster's 0..1" in str(issue)


def test_the_end_of_a_cta_names_what_may_come_after_it():
    report = run(exchange(meet=False), *tensors())
    assert report.kinds == {"exit"}
    assert (
        "CTA (1,): - at end: the CTA of rank 1 may end before the arrival at freed[0]@1 by "
        "tx[128,256) at test_clusters.py:" in str(report)
    )
    with pytest.raises(RaceError):
        emulate(exchange(meet=False), *tensors())


def test_copy_needs_a_sync_of_the_roles_threads():
    report = run(exchange(sync=False), *tensors(), pass_configs=PASS_CONFIGS)
    assert "sync" in report.kinds
    assert "async read of outgoing@1: no sync of this role's threads" in str(report)
    assert run(exchange(sync=False), *tensors()).ok  # TileLang's ThreadSync adds the sync


@pytest.mark.parametrize("schedule", ("roundrobin", "random:1", "hurry:tx[0,128)@1"))
def test_missing_remote_arrival_deadlocks_the_roles_of_both_ctas(schedule):
    with pytest.raises(DeadlockError) as caught:
        emulate(exchange(arrive_free=False), *tensors(), schedule=schedule)
    text = str(caught.value)
    assert "CTA (0,), (1,): deadlock, 4 role(s) blocked" in text
    assert "tx[0,128) at test_clusters.py:" in text and "tx[0,128)@1 at test_clusters.py:" in text
    assert "freed[0] (phase 0, 0/128 arrived: nothing" in text and "freed[0]@1 (" in text
    assert caught.value.report.ctas == 2


def test_peers_must_have_initialised_their_barriers():
    """A cluster barrier makes the CTAs of a cluster wait for each other at the start."""

    def kernel(meet, cluster_barrier):
        @T.prim_func
        def copies(y: T.Tensor((2, 64), FP32)):
            with T.Kernel(2, threads=128, cluster_dims=(2, 1, 1)) as bx:
                outgoing = T.alloc_shared((64,), FP32)
                incoming = T.alloc_shared((64,), FP32)
                filled = T.alloc_barrier(1)
                if cluster_barrier:
                    T.alloc_cluster_barrier(1)
                rank = TC.block_rank_in_cluster()
                T.fill(outgoing, rank + 1)
                T.fence_proxy_async()
                if meet:
                    TC.cluster_sync()
                T.copy_cluster(outgoing, incoming, dst_block=1 - rank, remote_barrier=filled[0])
                T.barrier_wait(filled, 0)
                T.copy(incoming, y[bx, :])
                TC.cluster_sync()

        return copies

    y = np.zeros((2, 64), np.float32)
    for meet, cluster_barrier in ((True, False), (False, True)):
        assert run(kernel(meet, cluster_barrier), y).ok
        assert (y[0] == 2).all() and (y[1] == 1).all()
    report = run(kernel(False, False), y)
    assert report.kinds == {"race"}
    assert "CTA rank 1 may not have initialised its barriers" in str(report)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("fence", [True, False])
@pytest.mark.parametrize("threads", [32, 64])
def test_ring_of_four_ctas_of_two_dimensions(threads, fence, schedule):
    """In code that all threads run one thread copies, whether they are one role or two."""

    @T.prim_func
    def kernel(y: T.Tensor((2, 4, 64), FP32)):
        with T.Kernel(2, 4, threads=threads, cluster_dims=(2, 2, 1)) as (bx, by):
            outgoing = T.alloc_shared((64,), FP32)
            incoming = T.alloc_shared((64,), FP32)
            filled = T.alloc_cluster_barrier(1)
            tx = T.get_thread_binding()
            rank = TC.block_rank_in_cluster()
            T.fill(outgoing, 10 * (by // 2) + rank)
            if fence:
                T.fence_proxy_async()
            T.copy_cluster(outgoing, incoming, dst_block=(rank + 1) % 4, remote_barrier=filled[0])
            if tx < 32:
                T.barrier_wait(filled[0], 0)
                for i in T.Parallel(64):
                    y[bx, by, i] = incoming[i]
            TC.cluster_sync()

    y = np.zeros((2, 4, 64), np.float32)
    program = Program(kernel)
    assert len(program.roles) == 4 * threads // 32
    report = run(program, y, schedule=schedule)
    assert report.kinds == (set() if fence else {"fence"}), report
    assert set(report.arrivals["filled"].values()) == {1}
    assert y[:, :, 0].tolist() == [[3, 1, 13, 11], [0, 2, 10, 12]]


@pytest.mark.parametrize(
    ("dims", "ranks"),
    [
        ((2, 1, 1), [[0, 0], [1, 1], [0, 0], [1, 1]]),
        ((1, 2, 1), [[0, 1], [0, 1], [0, 1], [0, 1]]),
        ((2, 2, 1), [[0, 2], [1, 3], [0, 2], [1, 3]]),
        ((4, 1, 1), [[0, 0], [1, 1], [2, 2], [3, 3]]),
        ((1, 1, 1), [[0, 0], [0, 0], [0, 0], [0, 0]]),
    ],
)
def test_rank_in_the_cluster(dims, ranks):
    @T.prim_func
    def kernel(y: T.Tensor((4, 2), INT32)):
        with T.Kernel(4, 2, threads=32, cluster_dims=dims) as (bx, by):
            y[bx, by] = TC.block_rank_in_cluster()

    y = np.full((4, 2), -1, np.int32)
    assert run(kernel, y).ok
    assert y.tolist() == ranks


def test_grid_that_is_not_made_of_clusters():
    @T.prim_func
    def kernel(y: T.Tensor((3,), INT32)):
        with T.Kernel(3, threads=32, cluster_dims=(2, 1, 1)) as bx:
            y[bx] = TC.block_rank_in_cluster()

    with pytest.raises(
        ValueError, match=r"a grid of \[3\] CTAs is not made of clusters \(2, 1, 1\)"
    ):
        run(kernel, np.zeros(3, np.int32))


def test_cluster_dims_without_cluster_operations_change_nothing():
    @T.prim_func
    def kernel(x: T.Tensor((3, 64), FP32), y: T.Tensor((3, 64), FP32)):
        with T.Kernel(3, threads=64, cluster_dims=(2, 1, 1)) as bx:
            tile_shared = T.alloc_shared((64,), FP32)
            T.copy(x[bx, :], tile_shared)
            T.copy(tile_shared, y[bx, :])

    x, y = fp32(3, 64), np.zeros((3, 64), np.float32)
    program = Program(kernel)
    assert program.roles == ("tx[0,64)",)
    report = run(program, x, y, blocks=lambda block: block == (1,))
    assert report.ok and report.ctas == 1
    assert run(program, x, y).ok
    np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("workers", [1, 2])
def test_chosen_ctas_bring_their_clusters(workers):
    x, y = tensors(pairs=4)
    seen = []
    report = run(
        exchange(pairs=4),
        x,
        y,
        blocks=lambda block: block in ((3,), (4,)),
        workers=workers,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert report.ok and report.ctas == 4
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    np.testing.assert_array_equal(y[2:6], swapped(x)[2:6])
    assert not y[:2].any() and not y[6:].any()


def test_command_runs_whole_clusters(capsys):
    assert main(["test_clusters:exchange", "--args", "pairs=2", "--ctas", "3"]) == 0
    assert "4 CTA, schedule roundrobin" in capsys.readouterr().out


def multicast(*, mask=3, free=True, allocate=T.alloc_barrier):
    """One CTA loads a tile for those of the mask."""

    @T.prim_func
    def kernel(x: T.Tensor((2, 3, 16, 64), FP32), y: T.Tensor((2, 3, 16, 64), FP32)):
        with T.Kernel(2, threads=160, cluster_dims=(2, 1, 1)) as bx:
            tile_shared = T.alloc_shared((16, 64), FP32)
            tile_fragment = T.alloc_fragment((16, 64), FP32)
            landed = allocate(32)
            freed = T.alloc_cluster_barrier(256)
            tx = T.get_thread_binding()
            if tx < 128:
                for c in T.serial(3):
                    T.barrier_wait(landed, c % 2)
                    T.copy(tile_shared, tile_fragment)
                    for rank in T.serial(2):
                        T.mbarrier_arrive(freed, rank)
                    T.copy(tile_fragment, y[bx, c, :, :])
            else:
                for c in T.serial(3):
                    if free:
                        T.barrier_wait(freed, (c + 1) % 2)
                    T.tma_copy(x[bx, c, :, :], tile_shared, barrier=landed, cluster_mask=mask)
                    T.barrier_arrive(landed)
            TC.cluster_sync()

    return kernel


@pytest.mark.parametrize("schedule", (*SCHEDULES, *adversarial(Program(multicast()).roles)))
@pytest.mark.parametrize(("mask", "source"), [(3, [0, 0]), (2, [0, 1]), (1, [0, 1])])
def test_multicast_lands_in_every_cta_of_the_mask(mask, source, schedule):
    x, y = fp32(2, 3, 16, 64), np.zeros((2, 3, 16, 64), np.float32)
    report = run(multicast(mask=mask), x, y, schedule=schedule)
    assert report.ok, report
    np.testing.assert_array_equal(y, x[source])


def test_multicast_into_a_tile_that_a_peer_still_reads():
    x, y = fp32(2, 3, 16, 64), np.zeros((2, 3, 16, 64), np.float32)
    with pytest.raises(KernelFault) as caught:
        emulate(multicast(free=False), x, y, schedule="hurry:tx[128,160)")
    assert any(
        i.kind == "race" and i.subject == "tile_shared@1" for i in caught.value.report.issues
    )


def test_load_on_a_cluster_barrier_leaves_the_bytes_to_rank_0():
    """What TileLang makes of it for two CTAs of one product does not work for two loads."""
    x, y = fp32(2, 3, 16, 64), np.zeros((2, 3, 16, 64), np.float32)
    with pytest.raises(DeadlockError, match="8192 bytes outstanding|4096 bytes outstanding"):
        emulate(multicast(mask=None, allocate=T.alloc_cluster_barrier), x, y)


def arrivals(rank):
    @T.prim_func
    def kernel(y: T.Tensor((2,), INT32)):
        with T.Kernel(2, threads=32, cluster_dims=(2, 1, 1)) as bx:
            met = T.alloc_cluster_barrier(32)
            tx = T.get_thread_binding()
            T.mbarrier_arrive(met, rank(tx, TC.block_rank_in_cluster()))
            T.barrier_wait(met, 0)
            y[bx] = 1

    return kernel


def test_remote_arrivals_of_single_threads():
    """Half of each warp arrives here, half at the peer."""
    y = np.zeros(2, np.int32)
    assert run(arrivals(lambda tx, rank: tx % 2), y).ok
    assert y.all()
    assert run(arrivals(lambda tx, rank: 1 - rank), y).ok
    with pytest.raises(DeadlockError) as caught:
        emulate(arrivals(lambda tx, rank: 1 + tx % 2), y)
    assert "bounds" in caught.value.report.kinds


@pytest.mark.parametrize("schedule", ("roundrobin", "delay:0", "delay:1"))
def test_cluster_sync_does_not_wait_for_threads_that_have_ended(schedule):
    @T.prim_func
    def kernel(y: T.Tensor((2,), INT32)):
        with T.Kernel(2, threads=32, cluster_dims=(2, 1, 1)) as bx:
            if TC.block_rank_in_cluster() == 0:
                TC.cluster_sync()
            y[bx] = 1

    y = np.zeros(2, np.int32)
    assert run(kernel, y, schedule=schedule).ok and y.all()


def cluster_copy(**options):
    @T.prim_func
    def kernel():
        with T.Kernel(2, threads=32, cluster_dims=(2, 1, 1)) as _:
            tile_shared = T.alloc_shared((16, 64), FP32)
            odd_shared = T.alloc_shared((16, 66), FP32)
            filled = T.alloc_cluster_barrier(1)
            if options.pop("odd", False):
                T.copy_cluster(
                    odd_shared[:, :64], tile_shared, dst_block=0, remote_barrier=filled[0]
                )
            else:
                T.copy_cluster(tile_shared, tile_shared, **options)

    return kernel


@pytest.mark.parametrize("options", [{"dst_block": 1}, {"cluster_mask": 3}, {"odd": True}])
def test_copies_that_are_not_modelled(options):
    with pytest.raises(UnsupportedOperation, match="a copy in a cluster"):
        Program(cluster_copy(**options))


def test_mutants(tmp_path):
    """The remote arrival, the sync and the counts are changed like all others."""
    out = tmp_path / "mutants.csv"
    arguments = ["test_clusters:exchange", "--out", str(out), "--ctas", "1"]
    assert mutate([*arguments, "--schedules", "roundrobin,random:1"]) == 0  # all are killed
    with out.open(newline="") as file:
        rows = {row["mutant"]: row for row in csv.DictReader(file)}
    assert sum(row["operation"] == "ptx_arrive_cluster_barrier" for row in rows.values()) == 2
    assert rows["drop cluster_sync #1 in tx[0,128) tx[128,256)"]["found"] == "exit"
    assert "count freed +128 (tx[128,256))" in rows and "count filled +1 (tx[0,128))" in rows
    assert not any("@" in row["roles"] for row in rows.values())
