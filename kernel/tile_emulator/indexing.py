"""Buffer indices: slices where every index is a scalar or [scalar +] one variable of the parallel
nest, else index arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .lanes import in_nest, is_array, of_active
from .role import Role
from .tir import kind

if TYPE_CHECKING:
    from .expressions import Expressions


class Where(NamedTuple):
    """An evaluated index.

    key indexes the array.  axes: nest axis of each array axis that is left, when key holds slices
    (None: index arrays or a single element).  lanes: position in the role of the thread of each
    element, for thread-level code.
    """

    key: tuple
    axes: tuple[int, ...] | None = None
    lanes: np.ndarray | None = None


def clip(role: Role, name: str, arrays: list, shape) -> list:
    """Report indices outside the buffer and pull them inside."""
    out = []
    for axis, (x, n) in enumerate(zip(arrays, shape, strict=True)):
        low, high = (
            (int(x.min()), int(x.max()))
            if is_array(x) and x.size
            else (int(x), int(x))
            if not is_array(x)
            else (0, 0)
        )
        if low < 0 or high >= n:
            role.cta.issue(
                role,
                "bounds",
                f"{name}: index {low}..{high} of axis {axis} is outside 0..{n - 1}",
                name,
                axis,
            )
            x = np.clip(x, 0, n - 1)
            x = x if is_array(x) else int(x)
        out.append(x)
    return out


def split_linear(e, scope, compile_: Callable) -> tuple[int | None, list] | None:
    """e as (nest variable or None, [(sign, scalar closure)...]); None when e is not of that
    form."""
    if not scope.in_nest(e):
        return None, [(1, compile_(e))]
    if hash(e) in scope.parallel and scope.parallel[hash(e)] is not None:
        return hash(e), []
    if kind(e) == "Add":
        a, b = split_linear(e.a, scope, compile_), split_linear(e.b, scope, compile_)
        if a is not None and b is not None and (a[0] is None or b[0] is None):
            return (a[0] if a[0] is not None else b[0]), a[1] + b[1]
    if kind(e) == "Sub" and not scope.in_nest(e.b):
        a = split_linear(e.a, scope, compile_)
        if a is not None:
            return a[0], [*a[1], (-1, compile_(e.b))]
    return None


def fits(plan, shape) -> bool:
    """Is the index the nest's variables alone, inside the buffer whatever they are?"""
    return all(
        extent is not None and not offsets and extent <= n
        for (extent, offsets), n in zip(plan, shape, strict=True)
    )


def compile_nest_index(
    expressions: Expressions, name: str, indices, shape: tuple[int, ...]
) -> Callable[[Role, tuple], Where]:
    """Index closure inside a T.Parallel nest."""
    scope = expressions.scope
    parts = [split_linear(e, scope, expressions.compile) for e in indices]
    full = [expressions.compile(e) for e in indices]
    plan = None
    if all(part is not None for part in parts):
        axes = [scope.parallel[variable][0] for variable, _ in parts if variable is not None]
        if len(set(axes)) == len(axes):
            plan = [
                (scope.parallel[v][1] if v is not None else None, offsets) for v, offsets in parts
            ]
            axes = tuple(axes)

    def slices(role: Role, shape) -> tuple | None:
        key = []
        for (extent, offsets), n in zip(plan, shape):  # noqa: B905 (hot; equal by construction)
            low = 0
            for sign, f in offsets:
                low += sign * f(role)
            if is_array(low):
                return None
            if extent is None:
                if not 0 <= low < n:
                    return None
                key.append(int(low))
            else:
                low = int(low)
                if low < 0 or low + extent > n:
                    return None
                key.append(slice(low, low + extent))
        return tuple(key)

    def general(role: Role, shape) -> Where:
        if plan is not None and not role.masked:
            key = slices(role, shape)
            if key is not None:
                return Where(key, axes)
        arrays = clip(role, name, [np.asarray(f(role)) for f in full], shape)
        return Where(tuple(np.broadcast_arrays(*arrays)))

    if plan is not None and shape and fits(plan, shape):
        whole = Where(tuple(slice(0, extent) for extent, _ in plan), axes)
        return lambda role, shape: general(role, shape) if role.masked else whole

    return general


def compile_thread_index(
    expressions: Expressions, name: str, indices, shape: tuple[int, ...]
) -> Callable[[Role, tuple], Where]:
    """Index closure in thread-level code: scalars, or one index per active thread."""
    full = [expressions.compile(e) for e in indices]

    def index(role: Role, shape) -> Where:
        values = [f(role) for f in full]
        for x, n in zip(values, shape):  # noqa: B905
            if is_array(x) or not 0 <= x < n:
                break
        else:
            lanes = role.lanes
            one = None if lanes is None or len(lanes) != 1 else lanes[0]
            return Where(tuple(values), None, one)
        values = clip(role, name, values, shape)
        lanes = role.positions if role.lanes is None else role.lanes
        return Where(tuple(np.broadcast_to(x, lanes.shape) for x in values), None, lanes)

    return index


def variable(key: int, scope) -> Callable[[Role], object]:
    """Closure of a Var."""
    if key in scope.parallel or key not in scope.varying:
        return lambda role: role.variables[key]
    if scope.parallel:
        return lambda role: in_nest(role, of_active(role, role.variables[key]))
    return lambda role: of_active(role, role.variables[key])
