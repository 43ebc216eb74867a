"""Values that differ between the threads of a role, and between the elements of a T.Parallel nest.

Outside a nest a value is a scalar or one number per active thread; inside, a scalar or an array
that broadcasts to the nest's extents.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .errors import UnsupportedOperation
from .role import Role


def is_array(x) -> bool:
    return isinstance(x, np.ndarray) and x.ndim > 0


def of_active(role: Role, x):
    """The active threads' part of a per-thread value kept at full width."""
    return x[role.lanes] if role.lanes is not None and is_array(x) else x


def uniform(role: Role, x, what: str = "value"):
    """The scalar that all active threads agree on.

    Raises UnsupportedOperation when they do not.
    """
    if not is_array(x):
        return x
    first = x.flat[0]
    if not (x == first).all() and not (np.isnan(first) and np.isnan(x).all()):
        raise UnsupportedOperation(
            f"{what} differs between the threads of {role.name}", where=role.where()
        )
    return first.item() if x.dtype.kind in "iub" else first


def in_nest(role: Role, x, what: str = "value"):
    """A per-thread value inside a T.Parallel nest: the scalar the threads agree on, or one value
    per element.

    Raises UnsupportedOperation when the threads differ and it is not known who owns which element.
    """
    if not is_array(x):
        return x
    first = x.flat[0]
    if (x == first).all():
        return first.item() if x.dtype.kind in "iub" else first
    spread = role.owner.spread(role, x) if role.owner is not None else None
    if spread is None:
        raise UnsupportedOperation(
            f"{what} differs between the threads of {role.name} inside T.Parallel, and the layout "
            "that says which thread owns which element is not known",
            where=role.where(),
        )
    return spread


def with_lanes(role: Role, mask: np.ndarray, f: Callable):
    """f(role) with only the threads of mask (over the active ones) active."""
    saved = role.lanes
    role.lanes = np.flatnonzero(mask) if saved is None else saved[mask]
    try:
        return f(role)
    finally:
        role.lanes = saved


def with_elements(role: Role, mask: np.ndarray, f: Callable):
    """f(role) with the nest's variables restricted to the elements of mask, as 1-D lists."""
    variables = role.variables
    saved = [(key, variables[key]) for key in role.nest]
    extents, masked, nest = role.extents, role.masked, list(role.nest)
    for key, x in saved:
        variables[key] = np.broadcast_to(x, extents)[mask]
    role.extents, role.masked = (int(np.count_nonzero(mask)),), True
    try:
        return f(role)
    finally:
        for key, x in saved:
            variables[key] = x
        role.extents, role.masked, role.nest = extents, masked, nest


def select(role: Role, condition, then: Callable, other: Callable, nested: bool):
    """Lazy choice: each side is evaluated only for the threads or elements that take it."""
    if not is_array(condition):
        return then(role) if condition else other(role)
    shape = role.extents if nested else (role.active_count,)
    mask = np.broadcast_to(condition, shape)
    if mask.all():
        return then(role)
    if not mask.any():
        return other(role)
    restrict = with_elements if nested else with_lanes
    a, b = restrict(role, mask, then), restrict(role, ~mask, other)
    out = np.empty(shape, np.result_type(a, b))
    out[mask], out[~mask] = a, b
    return out
