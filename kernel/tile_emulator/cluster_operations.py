"""Operations between the CTAs of a cluster: remote arrivals, cluster_sync, copies to a peer."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import numpy as np

from .cluster import BARRIER_SCOPE
from .cta import Cta
from .dtypes import item_bytes
from .errors import UnsupportedOperation
from .lanes import uniform, with_lanes
from .regions import RegionMaker, compile_region, fetch, place
from .registry import operation
from .role import Role
from .steps import Step
from .sync_operations import meet
from .tir import int_of
from .transactions import compile_barrier_place, compile_barriers, counted, load_stamp, send

BULK_BYTES = 16  # a bulk copy moves multiples of these


@operation("ptx_arrive_cluster_barrier")
def arrive_remote(compiler, call) -> Step:
    """Every active thread arrives at a barrier of the CTA that it names."""
    index, pick = compile_barrier_place(compiler, call.args[0])
    rank_of = compiler.expression(call.args[1])

    def run(role: Role):
        stamp = role.cta.detector.stamp(role.name, "remote arrivals")
        role.all[stamp.clock] = stamp.time
        released = role.released()
        for (i, rank), threads in counted(role, index(role), rank_of(role)):
            cta = role.cta.peer(role, rank)
            barrier = pick(role, i, cta)
            if role.cta.trace:
                role.cta.trace.arrived(role, barrier)
            barrier.arrive(role, threads, released)
            if cta is not role.cta:
                cta.visit(role, stamp, f"arrival at {barrier.name}", barrier.name)
        role.tick()
        yield

    return Step(run, True)


@operation("cluster_sync")
def cluster_sync(compiler, call) -> Step:
    """All threads of the cluster that have not ended meet."""
    around = tuple(compiler.branches)

    def run(role: Role):
        yield from meet(role, role.cta.cluster.meeting, not around)

    return Step(run, True)


def copy_cluster(compiler, call, notes: dict) -> Step:
    """A bulk copy to a peer's shared memory by the first thread of the role.

    It arrives at the peer's barrier with the bytes expected; they land later, and until then the
    source is read.  Its own proxy fence covers that thread's stores alone, so none is modelled;
    TileLang adds a sync before it, but no fence.
    """
    if notes.get("barrier") is None or notes.get("dst_block") is None:
        raise UnsupportedOperation("a copy in a cluster without dst_block and remote_barrier")
    source, target = compile_region(compiler, call.args[0]), compile_region(compiler, call.args[1])
    check_bulk(compiler, source, target)
    rank_of = compiler.expression(notes["dst_block"])
    barriers_of = compile_barriers(compiler, notes["barrier"])
    common = compiler.scope.depth == 0

    def issue(role: Role):
        a, b, cta = source(role), target(role), role.cta
        peer = cta.peer(role, uniform(role, rank_of(role)))
        b = b._replace(tile=peer.tiles[target.key])
        ((barrier, _),) = barriers_of(role, peer)
        stamp = load_stamp(role, barrier)
        x = fetch(role, a, is_async=True, stamp=stamp, lanes=role.lanes[0])
        barrier.expect(b.bytes)
        send(role, b, barrier, peer, stamp, lambda: place(role, b, x))
        cta.visit(role, stamp, f"copy from {a.tile.name}", a.tile.name)
        if cta.trace:
            cta.trace.arrived(role, barrier)
        barrier.arrive(role, 1, role.released())

    def run(role: Role):
        if (common and not role.leader) or role.share.offset:
            return
        if role.unsynced and role.cta.options.auto_sync:
            role.sync_role()
        with_lanes(role, np.arange(role.active_count) == 0, issue)
        role.tick()
        yield

    return Step(run, True)


def check_bulk(compiler, source: RegionMaker, target: RegionMaker) -> None:
    """Raises UnsupportedOperation for what does not become one bulk copy."""
    specs = [compiler.scope.buffers[maker.key] for maker in (source, target)]
    shapes = [maker.extents for maker in (source, target)]
    whole = all(
        spec.is_shared and is_contiguous(shape, spec.shape)
        for spec, shape in zip(specs, shapes, strict=True)
    )
    sizes = [prod(shape) * item_bytes(specs[0].dtype) for shape in shapes] if whole else [0, 1]
    same = specs[0].dtype == specs[1].dtype and sizes[0] == sizes[1]
    if not same or sizes[0] % BULK_BYTES:
        raise UnsupportedOperation(
            f"a copy in a cluster of {specs[0].name} to {specs[1].name} that is not one bulk copy"
        )


def is_contiguous(extent: tuple, shape: tuple[int, ...]) -> bool:
    """Do the elements of a region lie behind each other?"""
    if not all(isinstance(n, int) for n in extent):
        return False
    first = next((axis for axis, n in enumerate(extent) if n > 1), len(extent))
    return extent[first + 1 :] == shape[first + 1 :]


def compile_multicast(notes: dict) -> tuple[Callable, Callable]:
    """Of the annotations of a TMA load: expected(cta, size), the bytes that a CTA expects of a load
    of this size, and landings(role), the CTAs it lands in.

    With a cluster_mask the lowest rank of the mask loads for all of them.  On a cluster barrier
    TileLang lets rank 0 expect the bytes of all CTAs, and no other rank any.
    """
    mask = int_of(notes.get("cluster_mask", 0))
    on_cluster_barrier = str(notes["barrier"].buffer.scope()) == BARRIER_SCOPE
    ranks = [rank for rank in range(mask.bit_length()) if mask >> rank & 1]

    def expected(cta: Cta, size: int) -> int:
        if not on_cluster_barrier:
            return size
        return 0 if cta.rank else size * len(cta.cluster.ctas)

    def landings(role: Role) -> list[Cta]:
        if role.cta.rank not in ranks:
            return [role.cta]
        if role.cta.rank != ranks[0]:
            return []
        return [role.cta.peer(role, rank) for rank in ranks]

    return expected, landings
