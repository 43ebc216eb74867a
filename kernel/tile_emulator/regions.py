"""Tile regions: a rectangular part of a buffer, clipped at the edges of global tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np

from .dtypes import item_bytes, rounded
from .errors import UnsupportedOperation
from .expressions import check_ready
from .lanes import uniform, with_lanes
from .memory import Tile
from .role import Role
from .tir import int_of, kind, op_name


class Region(NamedTuple):
    """tile[start : start + extent] per axis.

    key: the part that lies inside the tile; inside: that part's place in the region.
    """

    tile: Tile
    start: tuple[int, ...]
    extent: tuple[int, ...]
    key: tuple[slice, ...]
    inside: tuple[slice, ...] | None

    @property
    def bytes(self) -> int:
        return prod(self.extent) * item_bytes(self.tile.dtype)

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        """Extents without leading ones."""
        return self.extent[-2:]


def make_region(role: Role, tile: Tile, start: tuple[int, ...], extent: tuple[int, ...]) -> Region:
    shape = tile.arr.shape
    for s, x, n in zip(start, extent, shape):  # noqa: B905
        if s < 0 or s + x > n:
            break
    else:
        key = tuple([slice(s, s + x) for s, x in zip(start, extent)])  # noqa: B905
        return Region(tile, start, extent, key, None)
    if not tile.is_global:
        role.cta.issue(
            role, "bounds", f"{tile.name}: region {start} + {extent} is outside {shape}", tile.name
        )
    low = [min(max(s, 0), n) for s, n in zip(start, shape, strict=True)]
    high = [max(min(s + x, n), a) for s, x, n, a in zip(start, extent, shape, low, strict=True)]
    key = tuple(slice(a, z) for a, z in zip(low, high, strict=True))
    inside = tuple(slice(a - s, z - s) for a, z, s in zip(low, high, start, strict=True))
    return Region(tile, start, extent, key, inside)


@dataclass(frozen=True)
class RegionMaker:
    """Compiled tl.region: call it with a role.  varying: closures of the starts that may differ
    between threads.
    """

    key: int
    starts: tuple[Callable, ...]
    extents: tuple[Callable | int, ...]
    varying: tuple[Callable, ...]
    is_global: bool
    is_shared: bool
    fixed: tuple[tuple[int, ...], tuple[int, ...], tuple[slice, ...]] | None = None

    def __call__(self, role: Role) -> Region:
        if self.fixed is not None:
            start, extent, key = self.fixed
            return Region(role.buffers[self.key], start, extent, key, None)
        start = tuple([int(uniform(role, f(role), "the start of a region")) for f in self.starts])
        extent = tuple([f if isinstance(f, int) else int(f(role)) for f in self.extents])
        return make_region(role, role.buffers[self.key], start, extent)


def compile_region(compiler, e) -> RegionMaker:
    """tl.region(load, mask, extents...) or a plain BufferLoad of one element."""
    if kind(e) == "BufferLoad":
        load, extents = e, []
    elif kind(e) == "Call" and op_name(e) == "region":
        load, extents = e.args[0], list(e.args[2:])
    else:
        raise UnsupportedOperation(f"tile operand {e}")
    spec = compiler.expressions.spec_of(load.buffer)
    if spec.is_per_thread:
        raise UnsupportedOperation(f"a tile operation on the per-thread {spec.name}")
    starts = [compiler.expression(i) for i in load.indices]
    varying = [f for f, i in zip(starts, load.indices, strict=True) if compiler.scope.may_vary(i)]
    sizes = [int_of(x) if kind(x) == "IntImm" else compiler.expression(x) for x in extents]
    sizes = [1] * (len(starts) - len(sizes)) + sizes
    fixed = None
    if (
        spec.shape
        and all(kind(i) == "IntImm" for i in load.indices)
        and all(isinstance(n, int) for n in sizes)
    ):
        low = tuple(int_of(i) for i in load.indices)
        if all(s >= 0 and s + x <= n for s, x, n in zip(low, sizes, spec.shape, strict=True)):
            fixed = (
                low,
                tuple(sizes),
                tuple(slice(s, s + x) for s, x in zip(low, sizes, strict=True)),
            )
    return RegionMaker(
        spec.key,
        tuple(starts),
        tuple(sizes),
        tuple(varying),
        spec.scope == "global",
        spec.is_shared,
        fixed,
    )


def fetch(
    role: Role, region: Region, is_async=False, stamp=None, lanes=None, partner=None
) -> np.ndarray:
    """The region's values [extent]; zero where it hangs over the edge of a global tensor.

    lanes: the one thread that reads, where it is one.
    """
    tile = region.tile
    if tile.tracked:
        role.cta.detector.read(role, tile, region.key, is_async, stamp, lanes, partner)
    elif not tile.is_global:
        if role.busy and not is_async:
            role.cta.detector.fragment(role, tile, "read")
        check_ready(role, tile, region.key)
    x = tile.arr[region.key]
    if region.inside is None:
        return x
    full = np.zeros(region.extent, x.dtype)
    full[region.inside] = x
    return full


def place(role: Role, region: Region, x: np.ndarray) -> np.ndarray:
    """Values for region.key, rounded to the tile's dtype."""
    if x.size != prod(region.extent):
        raise UnsupportedOperation(
            f"copy of {x.shape} to a region of {region.extent}", where=role.where()
        )
    if x.shape != region.extent:
        x = x.reshape(region.extent)
    return rounded(x if region.inside is None else x[region.inside], region.tile.dtype)


def deposit(role: Role, region: Region, x: np.ndarray, common=False, partner=None) -> None:
    """Ordinary stores of x [extent] to the region; the part over the edge of a global tensor is
    dropped.
    """
    tile, cta = region.tile, role.cta
    if tile.is_global:
        cta.detector.global_write(role, tile, region.key, cta.number)
    elif tile.scope.startswith("shared"):
        stamp = cta.common_stamp() if common and len(cta.roles) > 1 else None
        cta.detector.write(role, tile, region.key, stamp=stamp, partner=partner)
    elif role.busy:
        cta.detector.fragment(role, tile, "write")
    tile.arr[region.key] = place(role, region, x)
    tile.mark_ready(region.key)


def once_per_place(
    role: Role, makers: tuple[RegionMaker, ...], scope: int | None, run: Callable
) -> None:
    """run(role) once for every group of ``scope`` threads and every distinct place their regions
    start at.
    """
    varying = [f for maker in makers for f in maker.varying]
    if not varying and scope is None:
        run(role)
        return
    count = role.active_count
    columns = [np.broadcast_to(f(role), (count,)) for f in varying]
    if scope is not None:
        columns.append(role.active // scope)
    rows = np.stack(columns, axis=1)
    places = np.unique(rows, axis=0)
    if len(places) == 1:
        run(role)
        return
    for row in places:
        with_lanes(role, (rows == row).all(axis=1), run)
