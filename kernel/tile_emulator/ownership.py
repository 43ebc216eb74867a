"""Which thread holds an element of a matrix product's accumulator.

Needed only where threads of one role differ inside a T.Parallel nest over it: a branch that some of
its warps take, or a per-thread value. Every other layout is TileLang's own business and not
modelled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .role import WARP, Role

WARP_GROUP_ROWS = 64
WARP_GROUP = 128
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


@dataclass(frozen=True)
class NestOwner:
    """The accumulators a nest touches, with the indices it uses: [(buffer key, row closure, column
    closure)].
    """

    touched: tuple[tuple[int, Callable, Callable], ...]
    accumulators: dict[int, Accumulator]

    def positions(self, role: Role) -> np.ndarray | None:
        """Position in the role of the thread of each element of the current nest; None when no
        layout is known.
        """
        for key, row, column in self.touched:
            accumulator = self.accumulators.get(key)
            if accumulator is not None and accumulator.known_for(role.width):
                threads = accumulator_thread(np.asarray(row(role)), np.asarray(column(role)))
                return np.broadcast_to(threads, role.extents)
        return None

    def spread(self, role: Role, x: np.ndarray) -> np.ndarray | None:
        """A value per active thread as a value per element; None when no layout is known."""
        positions = self.positions(role)
        if positions is None:
            return None
        full = np.zeros(role.width, x.dtype)
        full[role.positions if role.lanes is None else role.lanes] = x
        return full[positions]
