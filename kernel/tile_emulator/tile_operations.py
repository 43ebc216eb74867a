"""Tile operations: copies, TMA, fills, reductions, matrix products."""

from __future__ import annotations

import numpy as np

from .cluster_operations import compile_multicast, copy_cluster
from .dtypes import NARROW
from .errors import UnsupportedOperation
from .lanes import uniform
from .ownership import Accumulator, own_part
from .regions import compile_region, deposit, fetch, once_per_place, place
from .registry import operation
from .role import WARP_GROUP, Role
from .steps import Step
from .tir import int_of
from .transactions import compile_barriers, load_stamp, send


def annotations_of(call) -> dict:
    return {str(key): value for key, value in dict(call.annotations or {}).items()}


@operation("copy")
def copy(compiler, call) -> Step:
    """T.copy: synchronous.  Shared to global goes through the async proxy (TMA store and wait), all
    else does not.
    """
    notes = annotations_of(call)
    if "dst_block" in notes or "cluster_mask" in notes:
        return copy_cluster(compiler, call, notes)
    source, target = compile_region(compiler, call.args[0]), compile_region(compiler, call.args[1])
    by_tma = source.is_shared and target.is_global and not int_of(notes.get("disable_tma", 0))
    common = compiler.scope.depth == 0
    row_axes = compiler.row_axes
    if not (source.is_shared or source.is_global or target.is_shared or target.is_global):
        compiler.tiles.links.extend(((source.key, axis), (target.key, axis)) for axis in (0, 1))

    def run(role: Role):
        a, b = source(role), target(role)
        axis = row_axes.get(source.key) if role.is_part else None
        if axis is not None and (target.is_shared or target.is_global):
            part = own_part(role, a, b, axis)
            if part is None:
                return
            a, b = part
        elif role.leaves(b.tile, common):
            return
        if by_tma:
            role.before_async()
        x = fetch(role, a, is_async=by_tma, partner=id(b.tile))
        if role.cta.trace:
            role.cta.trace.copy(role, a, b)
        deposit(role, b, x, common, partner=id(a.tile))

    return Step(run)


@operation("transpose")
def transpose(compiler, call) -> Step:
    source, target = compile_region(compiler, call.args[0]), compile_region(compiler, call.args[1])
    common = compiler.scope.depth == 0

    def run(role: Role):
        b = target(role)
        if not role.leaves(b.tile, common):
            x = fetch(role, source(role))
            deposit(role, b, np.ascontiguousarray(x.squeeze().T), common)

    return Step(run)


@operation("tma_copy")
def tma_copy(compiler, call) -> Step:
    """A bulk copy by one elected thread.

    With a barrier a load: expects the bytes and lands later, without an arrival; with a mask of
    CTAs in each of them.  Without a barrier a store: reads its source until tma_store_wait.
    """
    source, target = compile_region(compiler, call.args[0]), compile_region(compiler, call.args[1])
    notes = annotations_of(call)
    common = compiler.scope.depth == 0
    leader_scope = (
        int_of(notes["leader_scope_threads"]) if "leader_scope_threads" in notes else None
    )
    each_group = leader_scope is not None and leader_scope <= WARP_GROUP
    if notes.get("barrier") is None:

        def issue(role: Role):
            a, b = source(role), target(role)
            if role.leaves(b.tile, common, each_group):
                return
            role.before_async()
            stamp = role.cta.detector.stamp(role.name, "store")
            issuer = role.positions[0] if role.lanes is None else role.lanes[0]
            x = fetch(role, a, is_async=True, stamp=stamp, lanes=issuer)
            role.stores.append((stamp.clock, stamp.time))
            if role.cta.trace:
                role.cta.trace.store(role, b)
            deposit(role, b, x)
    else:
        barriers_of = compile_barriers(compiler, notes["barrier"])
        expected, landings = compile_multicast(notes)

        def issue(role: Role):
            a, b = source(role), target(role)
            if role.leaves(b.tile, common, each_group):
                return
            x = place(role, b, fetch(role, a))
            role.before_async()
            ((own, _),) = barriers_of(role)
            own.expect(expected(role.cta, b.bytes))
            for cta in landings(role):
                ((barrier, _),) = barriers_of(role, cta)
                there = b._replace(tile=cta.tiles[target.key])
                send(role, there, barrier, cta, load_stamp(role, barrier), lambda: x)

    return Step(lambda role: once_per_place(role, (source, target), leader_scope, issue))


@operation("fill")
def fill(compiler, call) -> Step:
    target, value = compile_region(compiler, call.args[0]), compiler.expression(call.args[1])
    common = compiler.scope.depth == 0

    def run(role: Role):
        b = target(role)
        if not role.leaves(b.tile, common):
            x = np.full(b.extent, uniform(role, value(role)), b.tile.arr.dtype)
            deposit(role, b, x, common)
            if role.cta.trace:
                role.cta.trace.elementwise(role, b.extent)

    return Step(run)


REDUCTIONS = {
    "sum": np.add, "max": np.maximum, "min": np.minimum, "abssum": np.add, "absmax": np.maximum,
    "bitand": np.bitwise_and, "bitor": np.bitwise_or, "bitxor": np.bitwise_xor,
}  # fmt: skip


@operation("reduce")
def reduce(compiler, call) -> Step:
    source, target = compile_region(compiler, call.args[0]), compile_region(compiler, call.args[1])
    name, axis, clear = (
        str(call.args[2].value),
        int_of(call.args[3]),
        compiler.expression(call.args[4]),
    )
    if name not in REDUCTIONS:
        raise UnsupportedOperation(f"reduction {name}")
    combine, common = REDUCTIONS[name], compiler.scope.depth == 0

    def run(role: Role):
        b = target(role)
        if role.leaves(b.tile, common):
            return
        x = fetch(role, source(role))
        y = combine.reduce(np.abs(x) if name.startswith("abs") else x, axis=axis).reshape(b.extent)
        deposit(role, b, y if clear(role) else combine(fetch(role, b), y), common)
        if role.cta.trace:
            role.cta.trace.elementwise(role, x.shape)

    return Step(run)


@operation("cumsum")
def cumsum(compiler, call) -> Step:
    source, target = compile_region(compiler, call.args[0]), compile_region(compiler, call.args[1])
    axis, backward = int_of(call.args[2]), compiler.expression(call.args[3])
    common = compiler.scope.depth == 0

    def run(role: Role):
        b = target(role)
        if role.leaves(b.tile, common):
            return
        x = fetch(role, source(role))
        if backward(role):
            y = np.flip(np.cumsum(np.flip(x, axis), axis, dtype=x.dtype), axis)
        else:
            y = np.cumsum(x, axis, dtype=x.dtype)
        deposit(role, b, y, common)
        if role.cta.trace:
            role.cta.trace.elementwise(role, x.shape)

    return Step(run)


def gemm_step(compiler, call, waits: bool) -> Step:
    """C (+)= op(A) op(B): FP32 accumulation of the operands' values.

    By a multiple of 128 threads and 64 rows it is a WGMMA: operands are read through the async
    proxy until the group is waited for, C and a register A belong to it that long.
    """
    left, right, out = (compile_region(compiler, call.args[k]) for k in range(3))
    transpose_a, transpose_b, clear = (compiler.expression(call.args[k]) for k in (3, 4, 9))
    rows, columns, depth = (int_of(call.args[k]) for k in (5, 6, 7))
    if int_of(call.args[10]) if hasattr(call.args[10], "value") else True:
        raise UnsupportedOperation(f"{call.op.name} with an mbarrier")

    compiler.products.append(tuple(compiler.branches))
    policy = int_of(call.args[8]) if hasattr(call.args[8], "value") else -1
    compiler.tiles.accumulators[out.key] = Accumulator(rows, policy)
    if not left.is_shared and not int_of(call.args[3]):
        compiler.tiles.operands.add(left.key)

    def run(role: Role):
        a, b, c = left(role), right(role), out(role)
        cta = role.cta
        is_wgmma = rows % 64 == 0 and role.active_count % WARP_GROUP == 0
        if not is_wgmma and not waits:
            raise UnsupportedOperation(
                f"wgmma_gemm of {rows} rows by {role.active_count} threads of {role.name}",
                where=role.where(),
            )
        stamp = None
        if is_wgmma:
            role.before_async()
            role.converge()
            stamp = cta.detector.stamp(role.name, "wgmma")
        x = fetch(role, a, is_async=is_wgmma, stamp=stamp).reshape(a.matrix_shape)
        y = fetch(role, b, is_async=is_wgmma, stamp=stamp).reshape(b.matrix_shape)
        x = x.T if transpose_a(role) else x
        y = y.T if transpose_b(role) else y
        fresh = bool(clear(role))
        if c.tile.tracked:
            raise UnsupportedOperation(f"{call.op.name} into shared memory", where=role.where())
        if not waits:
            if not a.tile.tracked and not a.tile.is_global:
                if role.busy.get(id(a.tile), ("",))[0] == "write":
                    cta.detector.fragment(role, a.tile, "read")
                role.busy[id(a.tile)] = ("read", stamp.time)
            role.busy[id(c.tile)] = ("write", stamp.time)
        elif role.busy:
            cta.detector.fragment(role, c.tile, "write")
        accumulate(role, c, x, y, fresh)
        if is_wgmma:
            role.groups.append((stamp.clock, stamp.time))
        if cta.trace:
            macs = rows * columns * depth * role.width // role.share.width
            cta.trace.gemm(role, macs, is_wgmma, c.tile.name)
        if is_wgmma and waits:
            role.wait_groups(0)
            if cta.trace:
                cta.trace.wait_groups(role, 0)

    return Step(run)


def multiply(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """x @ y in fp32; of integers in int32, through float64, which is exact for 8-bit operands."""
    if x.dtype.kind in "iu":
        return (x.astype(np.float64) @ y.astype(np.float64)).astype(np.int64).astype(np.int32)
    return x @ y


def accumulate(role: Role, region, x: np.ndarray, y: np.ndarray, fresh: bool) -> None:
    tile = region.tile
    product = multiply(x, y).reshape(region.extent)
    if not fresh:
        if tile.ready is not True and not np.all(tile.ready[region.key]):
            role.cta.issue(
                role, "init", f"accumulates into {tile.name}, which nothing has written", tile.name
            )
        product += tile.arr[region.key]
    tile.arr[region.key] = place(role, region, product) if tile.dtype in NARROW else product
    tile.mark_ready(region.key)


@operation("gemm")
def gemm(compiler, call) -> Step:
    return gemm_step(compiler, call, waits=True)


@operation("wgmma_gemm")
def wgmma_gemm(compiler, call) -> Step:
    return gemm_step(compiler, call, waits=False)
