"""The barriers that a statement names, and bulk copies that complete their bytes on them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .barriers import Barrier
from .cta import Cta, Load
from .detector import Stamp
from .lanes import is_array
from .regions import Region
from .role import Role


def counted(role: Role, *values) -> list[tuple[tuple, int]]:
    """Distinct combinations of values, with the number of active threads that have them."""
    if not any(map(is_array, values)):
        return [(values, role.active_count)]
    columns = [np.broadcast_to(x, (role.active_count,)) for x in values]
    rows, counts = np.unique(np.stack(columns, axis=1), axis=0, return_counts=True)
    return [(tuple(row), n) for row, n in zip(rows.tolist(), counts.tolist(), strict=True)]


def compile_barrier_place(compiler, load) -> tuple[Callable, Callable]:
    """Of a BufferLoad bar[i]: the closure of i, and pick(role, i, cta) that gives that Barrier."""
    key, index = hash(load.buffer.data), compiler.expression(load.indices[0])

    def pick(role: Role, i, cta: Cta) -> Barrier:
        group, i = cta.barriers[key], int(i)
        if not 0 <= i < len(group):
            name = group[0].base
            text = f"{name}: barrier {i} is outside 0..{len(group) - 1}"
            role.cta.issue(role, "bounds", text, name)
            i = min(max(i, 0), len(group) - 1)
        return group[i]

    return index, pick


def compile_barriers(compiler, load) -> Callable:
    """Closure giving [(Barrier, number of active threads that name it)] of a BufferLoad bar[i], of
    the role's CTA or another one.

    Usually one; the index may depend on the thread, e.g. a barrier per warp group of a wide role.
    """
    index, pick = compile_barrier_place(compiler, load)

    def barriers(role: Role, cta: Cta | None = None):
        return [(pick(role, i, cta or role.cta), n) for (i,), n in counted(role, index(role))]

    return barriers


def load_stamp(role: Role, barrier: Barrier) -> Stamp:
    """Of a copy that will land on a barrier."""
    return role.cta.detector.stamp(role.name, barrier.name, barrier.next_load())


def send(
    role: Role, region: Region, barrier: Barrier, cta: Cta, stamp: Stamp, values: Callable
) -> None:
    """Put a copy in flight: values() to a region of a CTA, and its bytes on the barrier there."""
    role.cta.detector.write(role, region.tile, region.key, is_async=True, stamp=stamp)
    trace = role.cta.trace
    lands = trace.load(role, region) if trace else None

    def land():
        region.tile.arr[region.key] = values()
        if lands is not None:
            trace.landed(barrier, lands)
        barrier.complete_bytes(region.bytes, stamp.clock, stamp.time)

    role.cta.in_flight.append(land)
    if cta is role.cta:
        cta.loads.append(Load(*stamp, f"{region.tile.name} at {role.where()}"))
    else:
        cta.visit(role, stamp, f"copy to {region.tile.name}", region.tile.name)
