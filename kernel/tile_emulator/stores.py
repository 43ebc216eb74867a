"""Element-wise stores to tiles and per-thread buffers, and the checks before them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .dtypes import NARROW, rounded
from .expressions import Closure
from .indexing import Where
from .lanes import is_array
from .memory import BufferSpec, Local, Tile
from .role import Role


def local_store(
    spec: BufferSpec, base: tuple[int, ...], index: Callable, value: Closure, line: str
) -> Callable:
    """Store to a per-thread buffer; spec may be a view of an allocation of shape ``base``."""
    key, shape, dtype = spec.key, spec.shape, spec.dtype
    single = int(np.prod(shape)) == 1

    def run(role: Role):
        role.line = line
        local: Local = role.buffers[key]
        target = local.seen_as(spec) if spec.is_view else local
        x = rounded(value(role), dtype)
        at = index(role, shape).key
        per_thread = is_array(x) or any(is_array(i) for i in at)
        if role.lanes is None and single and not per_thread and target.per_thread:
            target.gather()
        if not target.per_thread and (per_thread or role.lanes is not None):
            target.spread()
        if target.per_thread:
            at = (role.positions if role.lanes is None else role.lanes, *at)
        target.arr[at] = x
        if target.ready is not None:
            target.ready[at] = True
        if spec.is_view:
            local.take_from(target, base)
        if role.cta.trace:
            role.cta.trace.thread_code(role)

    return run


def tile_store(
    spec: BufferSpec, index: Callable, value: Closure, line: str, common: bool
) -> Callable:
    key, dtype, narrow = spec.key, spec.dtype, spec.dtype in NARROW

    def run(role: Role):
        role.line = line
        x = value(role)
        tile: Tile = role.buffers[key]
        at = index(role, tile.arr.shape)
        thread_level = is_array(at.lanes)
        if not thread_level and not role.extents and role.leaves(tile, common):
            return
        if narrow:
            x = rounded(x, dtype)
        if at.axes is not None:
            x = from_nest(x, at.axes, role.extents)
        elif thread_level and is_array(x):
            check_collisions(role, tile, at, x)
        elif is_array(x) and not role.extents:
            x = one_value(role, tile, x)
        partner = ("nest", role.extents) if role.extents else None
        touch_write(role, tile, at, partner, common and not thread_level)
        tile.arr[at.key] = x
        tile.mark_ready(at.key)
        if role.cta.trace and not role.extents:
            role.cta.trace.thread_code(role)

    return run


def from_nest(x, axes: tuple[int, ...], extents: tuple[int, ...]):
    """A value over the nest as an array over the index's slices; where elements collide the last
    one stays.
    """
    if not is_array(x):
        return x
    rank = len(extents)
    if len(axes) < rank:
        x = np.broadcast_to(x, extents)[
            tuple(slice(None) if axis in axes else -1 for axis in range(rank))
        ]
        kept = sorted(axes)
        axes = tuple(kept.index(axis) for axis in axes)
    elif x.ndim < len(axes):
        x = np.broadcast_to(x, extents)
    return x if axes == tuple(range(len(axes))) else x.transpose(axes)


def one_value(role: Role, tile: Tile, x: np.ndarray):
    """Several threads store to one element: they must store the same value."""
    if not (x == x.flat[0]).all() and not np.isnan(x).all():
        role.cta.issue(
            role,
            "race",
            f"several threads store different values to one element of {tile.name}",
            tile.name,
        )
    return x.flat[-1]


def check_collisions(role: Role, tile: Tile, at: Where, x: np.ndarray) -> None:
    """Threads that store to the same element must store the same value."""
    if "race" not in role.cta.options.checks:
        return
    flat = np.ravel_multi_index(at.key, tile.arr.shape)
    unique, first = np.unique(flat, return_index=True)
    if len(unique) == len(flat):
        return
    same = x[first][np.searchsorted(unique, flat)]
    if not ((same == x) | (np.isnan(same) & np.isnan(x))).all():
        role.cta.issue(
            role,
            "race",
            f"several threads store different values to one element of {tile.name}",
            tile.name,
        )


def touch_write(role: Role, tile: Tile, at: Where, partner, common: bool = False) -> None:
    """Checks before an ordinary store to a tile."""
    cta = role.cta
    if tile.is_global:
        cta.detector.global_write(role, tile, at.key, cta.number)
    elif tile.scope.startswith("shared"):
        stamp = cta.common_stamp() if common and len(cta.roles) > 1 else None
        cta.detector.write(role, tile, at.key, stamp=stamp, lanes=at.lanes, partner=partner)
    elif role.busy:
        cta.detector.fragment(role, tile, "write")
