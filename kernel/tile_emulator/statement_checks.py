"""Checks before ordinary stores to tiles."""

from __future__ import annotations

import numpy as np

from .indexing import Where
from .memory import Tile
from .role import Role


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
        stamp = cta.detector.stamp("common") if common and len(cta.roles) > 1 else None
        cta.detector.write(role, tile, at.key, stamp=stamp, lanes=at.lanes, partner=partner)
    elif role.busy:
        cta.detector.fragment(role, tile, "write")
