"""Which threads of a CTA make a role: the partition by branches on the thread number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .errors import UnsupportedOperation
from .expressions import Closure
from .lanes import is_array
from .role import WARP, WARP_GROUP, Role, Share

if TYPE_CHECKING:
    from .statements import Compiler

UNKNOWN = (KeyError, AttributeError, TypeError, UnsupportedOperation)  # more than the thread number


@dataclass(frozen=True, eq=False)
class Branch:
    """A conditional on the thread number, inside (conditional, side taken) others."""

    condition: Closure
    around: tuple[tuple[Branch, bool], ...]

    def mask(self, probe: Role) -> np.ndarray | None:
        """Its truth per thread, or None where it depends on more than the thread number."""
        try:
            p = self.condition(probe)
        except UNKNOWN:
            return None
        return p if is_array(p) and len(p) == probe.width else None


def find_roles(compiler: Compiler) -> list[tuple[np.ndarray, Share]]:
    """Threads grouped by the conditions on the thread number whose bodies block or hold tile
    operations.

    A condition that cuts through a warp, or through the threads of a matrix product, makes no
    roles: its body runs with a part of the role's threads. A role of several warp groups of which
    each waits for barriers of its own is a role for each of them, with a share of the tiles.
    """
    probe = make_probe(compiler)
    product_threads = {around: reached(around, probe) for around in compiler.products}
    columns = []
    for branch in compiler.splits:
        mask = branch.mask(probe)
        if mask is None:
            continue
        taken = mask & reached(branch.around, probe)
        cut = [
            threads
            for threads in product_threads.values()
            if 0 < np.sum(taken & threads) < np.sum(threads)
        ]
        if not cuts_warp(taken) and not cut:
            columns.append(taken)
    groups: dict[tuple, list[int]] = {}
    for thread in range(compiler.threads):
        groups.setdefault(tuple(bool(mask[thread]) for mask in columns), []).append(thread)
    roles = []
    for threads in map(np.array, groups.values()):
        width = len(threads)
        waits = any(reached(around, probe)[threads].all() for around in compiler.wide_waits)
        parts = width // WARP_GROUP if waits and width % WARP_GROUP == 0 else 1
        for number, part in enumerate(np.split(threads, parts)):
            roles.append((part, Share(width, number * (width // parts))))
    for around in compiler.reach:
        compiler.reach[around] = int(np.sum(reached(around, probe)))
    compiler.row_axes.update(compiler.tiles.row_axes())
    return roles


def make_probe(compiler: Compiler) -> Role:
    """All threads of the CTA, with what can be computed from the thread number alone."""
    probe = Role(None, "probe", np.arange(compiler.threads), {}, {})
    for key, value in compiler.bound:
        try:
            probe.variables[key] = value(probe)
        except UNKNOWN:
            continue
    return probe


def roles_at(
    compiler: Compiler, around: tuple, names: Sequence[str], groups: Sequence[np.ndarray]
) -> list[str]:
    """Names of the roles with a thread that gets to a place inside these conditionals."""
    threads = reached(around, make_probe(compiler))
    return [name for name, group in zip(names, groups, strict=True) if threads[group].any()]


def reached(around: tuple[tuple[Branch, bool], ...], probe: Role) -> np.ndarray:
    """Threads that get to a place inside these conditionals (all, where that is not known)."""
    threads = np.ones(probe.width, bool)
    for branch, taken in around:
        mask = branch.mask(probe)
        if mask is not None:
            threads &= mask if taken else ~mask
    return threads


def cuts_warp(mask: np.ndarray) -> bool:
    """Does the boundary of these threads run through a warp?"""
    starts = np.arange(0, len(mask), WARP)
    return bool(
        (np.logical_and.reduceat(mask, starts) != np.logical_or.reduceat(mask, starts)).any()
    )
