"""Which thread, and which warp group, holds an element of a register tile.

Needed only where the threads of a role differ over one tile: a branch that some of its warps take,
a per-thread value inside T.Parallel, or warp groups of a wide role that wait for different
barriers. Known are the accumulators of WGMMA and what is copied from them element by element;
every other layout is TileLang's own business and not modelled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from .regions import Region, make_region
from .role import WARP, WARP_GROUP, Role

WARP_GROUP_ROWS = 64
FULL_ROW_POLICY = 1


@dataclass(frozen=True)
class Accumulator:
    """A WGMMA accumulator [rows, ...] with the GemmWarpPolicy it is computed under."""

    rows: int
    policy: int

    def known_for(self, width: int) -> bool:
        """One warp group and 64 rows, or 64 rows for each of several warp groups."""
        groups = width // WARP_GROUP
        if self.rows != groups * WARP_GROUP_ROWS or width % WARP_GROUP:
            return False
        return groups == 1 or self.policy == FULL_ROW_POLICY


def accumulator_thread(row, column):
    """Thread of its warp groups that holds an element of a WGMMA accumulator (PTX ISA, wgmma
    .m64nNk16 D fragment).
    """
    group, inside = row // WARP_GROUP_ROWS, row % WARP_GROUP_ROWS
    return group * WARP_GROUP + inside // 16 * WARP + inside % 8 * 4 + column % 8 // 2


@dataclass
class RegisterTiles:
    """What the compiler learns about two-dimensional register tiles.

    accumulators: buffer key -> Accumulator.  operands: keys of register A operands, whose rows are
    the accumulator's.  links: pairs of (key, axis) that run over the same elements in a nest or a
    copy.
    """

    accumulators: dict[int, Accumulator] = field(default_factory=dict)
    operands: set[int] = field(default_factory=set)
    links: list[tuple[tuple[int, int], tuple[int, int]]] = field(default_factory=list)

    def row_axes(self) -> dict[int, int]:
        """key -> axis that runs over the rows of an accumulator, followed through the links."""
        axes = {key: 0 for key in (*self.accumulators, *self.operands)}
        changed = True
        while changed:
            changed = False
            for a, b in self.links:
                for (key, axis), (other, other_axis) in ((a, b), (b, a)):
                    if axes.get(key) == axis and other not in axes:
                        axes[other] = other_axis
                        changed = True
        return axes


@dataclass(frozen=True)
class Touch:
    """A use of a two-dimensional register tile in a nest: its indices as closures."""

    key: int
    shape: tuple[int, int]
    indices: tuple[Callable, Callable]


@dataclass(frozen=True)
class NestOwner:
    """The register tiles a nest touches, and whether it stores outside of registers."""

    touches: tuple[Touch, ...]
    tiles: RegisterTiles
    stores_out: bool

    def positions(self, role: Role) -> np.ndarray | None:
        """Position, in the warp groups that share the tiles, of the thread of each element of the
        current nest; None when no layout is known.
        """
        for touch in self.touches:
            accumulator = self.tiles.accumulators.get(touch.key)
            if accumulator is not None and accumulator.known_for(role.share.width):
                row, column = (np.asarray(f(role)) for f in touch.indices)
                return np.broadcast_to(accumulator_thread(row, column), role.extents)
        return None

    def spread(self, role: Role, x: np.ndarray) -> np.ndarray | None:
        """A value per active thread as a value per element; None when no layout is known."""
        positions = self.positions(role)
        if positions is None:
            return None
        full = np.zeros(role.share.width, x.dtype)
        full[role.share.offset + (role.positions if role.lanes is None else role.lanes)] = x
        return full[positions]

    def share(self, role: Role, row_axes: Mapping[int, int]) -> np.ndarray | None:
        """Mask of the nest's elements that the role's own warp group holds."""
        for touch in self.touches:
            axis = row_axes.get(touch.key)
            if axis is not None:
                rows = np.asarray(touch.indices[axis](role))
                low, high = own_rows(role, touch.shape[axis])
                return np.broadcast_to((rows >= low) & (rows < high), role.extents)
        return None


def own_rows(role: Role, rows: int) -> tuple[int, int]:
    """The part of an accumulator's rows that the role's own warp group holds."""
    each = rows * role.width // role.share.width
    first = rows * role.share.offset // role.share.width
    return first, first + each


def own_part(role: Role, source: Region, target: Region, axis: int):
    """The role's own part of a copy from a register tile whose rows run along ``axis``; None when
    it has no part.
    """
    low, high = own_rows(role, source.tile.arr.shape[axis])
    low = max(low, source.start[axis])
    high = min(high, source.start[axis] + source.extent[axis])
    if low >= high:
        return None
    shift = low - source.start[axis]
    from_axes = [k for k, n in enumerate(source.extent) if n != 1]
    to_axes = [k for k, n in enumerate(target.extent) if n != 1]
    other = to_axes[from_axes.index(axis)]
    return (
        narrowed(role, source, axis, shift, high - low),
        narrowed(role, target, other, shift, high - low),
    )


def narrowed(role: Role, region: Region, axis: int, shift: int, extent: int) -> Region:
    start, size = list(region.start), list(region.extent)
    start[axis] += shift
    size[axis] = extent
    return make_region(role, region.tile, tuple(start), tuple(size))


def links_of(touches: Sequence[tuple[int, tuple[int | None, int | None]]]):
    """Links among uses given as (key, nest variable of each axis)."""
    found: dict[int, tuple[int, int]] = {}
    links = []
    for key, variables in touches:
        for axis, variable in enumerate(variables):
            if variable is None:
                continue
            known = found.setdefault(variable, (key, axis))
            if known != (key, axis):
                links.append((known, (key, axis)))
    return links
