"""Conditionals and nests of which only some threads, or some elements, take a side."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .errors import UnsupportedOperation
from .expressions import Closure
from .lanes import is_array, with_elements
from .role import Role
from .steps import NOTHING, Step


def element_branch(condition: Closure, then: Step, other: Step) -> Step:
    def run(role):
        p = condition(role)
        if not is_array(p):
            (then if p else other).run(role)
            return
        mask = np.broadcast_to(p, role.extents)
        if mask.all():
            then.run(role)
        elif not mask.any():
            other.run(role)
        else:
            with_elements(role, mask, then.run)
            if other is not NOTHING:
                with_elements(role, ~mask, other.run)

    return Step(run)


def thread_branch(condition: Closure, then: Step, other: Step, orders: bool) -> Step:
    """A conditional of thread-level code; where the threads differ both sides run in turn, each
    with its threads.
    """

    def sides(role):
        p = condition(role)
        if not is_array(p):
            yield (then if p else other), role.lanes
            return
        outer = role.lanes
        for mask, side in ((p, then), (~p, other)):
            if side is NOTHING or not mask.any():
                continue
            if mask.all():
                yield side, outer
            else:
                yield side, np.flatnonzero(mask) if outer is None else outer[mask]

    def enter(role, lanes):
        outer, role.lanes = role.lanes, lanes
        subset = lanes is not outer and (orders or role.deferred)
        return outer, role.enter_subset() if subset else None

    def leave(role, outer, saved):
        if saved is not None:
            role.leave_subset(saved, role.lanes)
        role.lanes = outer

    if not (then.blocking or other.blocking):

        def plain(role):
            for side, lanes in sides(role):
                outer, saved = enter(role, lanes)
                side.run(role)
                leave(role, outer, saved)

        return Step(plain)

    def generator(role):
        for side, lanes in sides(role):
            outer, saved = enter(role, lanes)
            if side.blocking:
                yield from side.run(role)
            else:
                side.run(role)
            leave(role, outer, saved)

    return Step(generator, True)


def run_owned(role: Role, run: Callable) -> None:
    """A nest that only some threads of the role reach: each works on the elements it owns."""
    positions = role.owner.positions(role)
    if positions is None:
        raise UnsupportedOperation(
            f"T.Parallel by {role.active_count} of the {role.width} threads of {role.name}, "
            "over tiles of unknown layout",
            where=role.where(),
        )
    mine = np.isin(positions, role.share.offset + role.lanes)
    if mine.all():
        run(role)
    elif mine.any():
        with_elements(role, mine, run)


def run_share(role: Role, run: Callable, row_axes: dict[int, int]) -> None:
    """A nest of a wide role that stores outside of registers: each warp group its own rows, or the
    first all where the layout is not known.
    """
    mine = role.owner.share(role, row_axes)
    if mine is None:
        if role.share.offset == 0:
            run(role)
    elif mine.any():
        with_elements(role, mine, run)
