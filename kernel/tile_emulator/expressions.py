"""Expressions compiled to closures ``f(role) -> value`` (see lanes.py for what a value is)."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from .dtypes import NARROW, is_float, rounded
from .errors import UnsupportedOperation
from .indexing import Where, compile_nest_index, compile_thread_index, variable
from .lanes import in_nest, is_array, select, uniform
from .memory import BufferSpec, Local, Tile
from .role import WARP, Role
from .scope import Scope
from .tir import int_of, kind, op_name

Closure = Callable[[Role], object]


def truncated_div(a, b):
    """C division: exact for floats, toward zero for integers."""
    if np.result_type(a).kind == "f" or np.result_type(b).kind == "f":
        return a / b
    if is_array(a) or is_array(b):
        return np.trunc(np.asarray(a) / b).astype(np.int64)
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


def truncated_mod(a, b):
    return a - b * truncated_div(a, b)


def smaller(a, b):
    return np.minimum(a, b) if is_array(a) or is_array(b) else (a if a <= b or a != a else b)


def larger(a, b):
    return np.maximum(a, b) if is_array(a) or is_array(b) else (a if a >= b or a != a else b)


BINARY = {
    "Add": operator.add, "Sub": operator.sub, "Mul": operator.mul, "Div": truncated_div, "Mod":
    truncated_mod,
    "FloorDiv": operator.floordiv, "FloorMod": operator.mod, "Min": smaller, "Max": larger,
    "EQ": operator.eq, "NE": operator.ne, "LT": operator.lt, "LE": operator.le, "GT": operator.gt,
    "GE": operator.ge,
}  # fmt: skip
ONE = np.float32(1)
FUNCTIONS = {
    "exp": np.exp, "exp2": np.exp2, "exp10": lambda x: np.power(np.float32(10), x), "log": np.log,
    "log2": np.log2,
    "log10": np.log10, "log1p": np.log1p, "sqrt": np.sqrt, "rsqrt": lambda x: ONE / np.sqrt(x),
    "tanh": np.tanh,
    "sin": np.sin, "cos": np.cos, "fabs": np.abs, "abs": np.abs, "floor": np.floor, "ceil": np.ceil,
    "trunc": np.trunc,
    "round": np.rint, "nearbyint": np.rint, "sigmoid": lambda x: ONE / (ONE + np.exp(-x)), "pow":
    np.power,
    "fma": lambda a, b, c: a * b + c, "isnan": np.isnan, "isinf": np.isinf, "isfinite": np.isfinite,
    "bitwise_and": operator.and_, "bitwise_or": operator.or_, "bitwise_xor": operator.xor,
    "bitwise_not": operator.invert, "shift_left": operator.lshift, "shift_right": operator.rshift,
    "__expf": np.exp, "__exp2f": np.exp2, "__logf": np.log, "__log2f": np.log2,
}  # fmt: skip


class Expressions:
    """Compiles expressions in a scope; one per kernel."""

    def __init__(self, scope: Scope):
        self.scope = scope

    def compile(self, e) -> Closure:
        """Closure of an expression.  Raises UnsupportedOperation naming what is not modelled."""
        method = getattr(self, "compile_" + kind(e), None)
        if kind(e) in BINARY:
            f = self.compile_binary(e)
        elif method is None:
            raise UnsupportedOperation(f"expression {kind(e)}: {e}")
        else:
            f = method(e)
        dtype = str(e.dtype) if hasattr(e, "dtype") else ""
        if dtype in NARROW and (kind(e) in BINARY or kind(e) == "Call"):
            return lambda role: rounded(f(role), dtype)
        return f

    # ---- leaves ----
    def compile_IntImm(self, e) -> Closure:
        value = bool(e.value) if str(e.dtype) == "bool" else int(e.value)
        return lambda role: value

    def compile_FloatImm(self, e) -> Closure:
        value = (
            np.float64(e.value)
            if str(e.dtype) == "float64"
            else rounded(np.float32(e.value), str(e.dtype))
        )
        return lambda role: value

    def compile_StringImm(self, e) -> Closure:
        value = str(e.value)
        return lambda role: value

    def compile_Var(self, e) -> Closure:
        return variable(hash(e), self.scope)

    compile_SizeVar = compile_Var

    # ---- operators ----
    def compile_binary(self, e) -> Closure:
        f = BINARY[kind(e)]
        if kind(e.b) == "IntImm":
            a, constant = self.compile(e.a), int(e.b.value)
            return lambda role: f(a(role), constant)
        a, b = self.compile(e.a), self.compile(e.b)
        return lambda role: f(a(role), b(role))

    def logical(self, e, stop_at: bool) -> Closure:
        a, b = self.compile(e.a), self.compile(e.b)
        f = np.logical_or if stop_at else np.logical_and

        def lazy(role):
            x = a(role)
            if not is_array(x):
                return x if bool(x) == stop_at else b(role)
            return f(x, b(role))

        return lazy

    def compile_And(self, e) -> Closure:
        return self.logical(e, False)

    def compile_Or(self, e) -> Closure:
        return self.logical(e, True)

    def compile_Not(self, e) -> Closure:
        a = self.compile(e.a)

        def negate(role):
            x = a(role)
            return np.logical_not(x) if is_array(x) else not x

        return negate

    def compile_Select(self, e) -> Closure:
        return self.choice(e.condition, e.true_value, e.false_value)

    def choice(self, condition, then, other) -> Closure:
        p, a, b = self.compile(condition), self.compile(then), self.compile(other)
        nested = bool(self.scope.parallel)
        return lambda role: select(role, p(role), a, b, nested)

    def compile_Cast(self, e) -> Closure:
        f, dtype, source = self.compile(e.value), str(e.dtype), str(e.value.dtype)
        if dtype == source or (dtype == "float32" and source in NARROW):
            return f
        return lambda role: rounded(f(role), dtype)

    # ---- calls ----
    def compile_Call(self, e) -> Closure:
        name = op_name(e) if hasattr(e.op, "name") else str(e.op)
        if name == "if_then_else":
            return self.choice(*e.args)
        if name in ("call_extern", "call_pure_extern"):
            name = str(e.args[0].value)
            if name not in FUNCTIONS:
                raise UnsupportedOperation(f"call of the external function {name}")
            args = [self.compile(x) for x in e.args[1:]]
        elif name in FUNCTIONS:
            args = [self.compile(x) for x in e.args]
        elif hasattr(self, "call_" + name):
            return getattr(self, "call_" + name)(e)
        else:
            raise UnsupportedOperation(f"operation {e.op.name} in an expression: {e}")
        f = FUNCTIONS[name]
        return lambda role: f(*(x(role) for x in args))

    def thread_value(self, f: Closure) -> Closure:
        """A per-thread value; inside a nest that of the thread that owns the element."""
        return (lambda role: in_nest(role, f(role))) if self.scope.parallel else f

    def call_launch_thread_idx(self, e) -> Closure:
        if int_of(e.args[0]):
            return lambda role: 0
        return self.thread_value(lambda role: role.active)

    def call_get_warp_idx_sync(self, e) -> Closure:
        return self.thread_value(lambda role: role.active // WARP)

    def call_get_lane_idx(self, e) -> Closure:
        return self.thread_value(lambda role: role.active % WARP)

    def call_tl_shuffle_elect(self, e) -> Closure:
        extent = int_of(e.args[0])

        def elect(role):
            if role.cta is not None:
                role.converge()
            return role.active == 0 if extent == 0 else role.active % extent == 0

        return self.thread_value(elect)

    def call_block_rank_in_cluster(self, e) -> Closure:
        return lambda role: role.cta.rank

    def call_infinity(self, e) -> Closure:
        return lambda role: np.float32(np.inf)

    def shuffle(self, e, source: Callable) -> Closure:
        """Warp shuffle (mask, value, argument, width): source(lane, argument, width) is the lane
        read from.
        """
        value, argument, width = (self.compile(x) for x in e.args[1:4])

        def run(role):
            threads = role.active
            position = np.full(int(role.threads.max()) + WARP, -1)
            position[threads] = np.arange(len(threads))
            lane = threads % WARP
            wanted = source(
                lane,
                np.broadcast_to(argument(role), threads.shape),
                int(uniform(role, width(role))),
            )
            at = position[threads - lane + wanted]
            if (at < 0).any():
                raise UnsupportedOperation(
                    "shuffle from a thread that is not active", where=role.where()
                )
            if role.cta is not None:
                role.converge()
            return np.broadcast_to(value(role), threads.shape)[at]

        return self.thread_value(run)

    def call_shfl_sync(self, e) -> Closure:
        return self.shuffle(e, lambda lane, source, width: lane // width * width + source % width)

    def call_shfl_up_sync(self, e) -> Closure:
        return self.shuffle(
            e, lambda lane, delta, width: np.where(lane % width >= delta, lane - delta, lane)
        )

    def call_shfl_down_sync(self, e) -> Closure:
        return self.shuffle(
            e, lambda lane, delta, width: np.where(lane % width + delta < width, lane + delta, lane)
        )

    def call_shfl_xor_sync(self, e) -> Closure:
        return self.shuffle(
            e,
            lambda lane, mask, width: np.where(
                (lane ^ mask) // width == lane // width, lane ^ mask, lane
            ),
        )

    # ---- buffers ----
    def spec_of(self, buffer) -> BufferSpec:
        """The buffer that a name stands for: its allocation, or a per-thread view of one.

        Raises UnsupportedOperation for a view of a tile with another dtype or shape.
        """
        spec = self.scope.buffers.get(hash(buffer.data))
        if spec is None:
            raise UnsupportedOperation(f"buffer {buffer.name}: its allocation was not seen")
        if spec.scope == "global":
            return spec
        shape = tuple(int_of(n) for n in buffer.shape)
        if (str(buffer.dtype), shape) == (spec.dtype, spec.shape):
            return spec
        if not spec.is_per_thread:
            raise UnsupportedOperation(
                f"buffer {buffer.name}: a view of {spec.name} with another dtype or shape"
            )
        return replace(spec, dtype=str(buffer.dtype), shape=shape, is_view=True)

    def index(self, buffer, indices) -> Callable[[Role, tuple], Where]:
        make = compile_nest_index if self.scope.parallel else compile_thread_index
        return make(self, str(buffer.name), indices, self.spec_of(buffer).shape)

    def compile_BufferLoad(self, e) -> Closure:
        spec = self.spec_of(e.buffer)
        index = self.index(e.buffer, e.indices)
        if spec.is_per_thread:
            return self.local_load(spec, index)
        return self.tile_load(spec, index)

    def tile_load(self, spec: BufferSpec, index: Callable) -> Closure:
        key, integer = spec.key, not is_float(spec.dtype)

        def load(role):
            tile = role.buffers[key]
            at = index(role, tile.arr.shape)
            touch_read(role, tile, at, ("nest", role.extents) if role.extents else None)
            x = tile.arr[at.key]
            if at.axes:
                return to_nest(x, at.axes, len(role.extents))
            return x.item() if integer and isinstance(x, np.generic) else x

        return load

    def local_load(self, spec: BufferSpec, index: Callable) -> Closure:
        key, integer, nested = spec.key, not is_float(spec.dtype), bool(self.scope.parallel)
        shape = spec.shape

        def load(role):
            local: Local = role.buffers[key]
            if spec.is_view:
                local = local.seen_as(spec)
            at = index(role, shape)
            where = at.key
            if local.per_thread:
                if at.axes:
                    raise_layout_question(role, local)
                lanes = role.positions if role.lanes is None else role.lanes
                where = (lanes, *where)
            x = local.arr[where]
            if local.ready is not None and not np.all(local.ready[where]):
                role.cta.issue(
                    role, "init", f"reads {local.name}, which nothing has written", local.name
                )
            if at.axes:
                return to_nest(x, at.axes, len(role.extents))
            if nested and local.per_thread:
                x = in_nest(role, x, local.name)
            return x.item() if integer and isinstance(x, np.generic) else x

        return load


def raise_layout_question(role: Role, local: Local) -> None:
    raise UnsupportedOperation(
        f"{local.name}: a per-thread array indexed by a T.Parallel variable "
        "(the layout decides who owns an element)",
        where=role.where(),
    )


def to_nest(x: np.ndarray, axes: tuple[int, ...], rank: int) -> np.ndarray:
    """Array whose axes are nest axes ``axes`` -> view that broadcasts over the whole nest."""
    order = sorted(range(len(axes)), key=axes.__getitem__)
    if order != list(range(len(axes))):
        x = x.transpose(order)
    if len(axes) == rank:
        return x
    return x[tuple(slice(None) if axis in axes else None for axis in range(rank))]


def touch_read(role: Role, tile: Tile, at: Where, partner) -> None:
    """Checks before an ordinary read of a tile."""
    if tile.tracked:
        role.cta.detector.read(role, tile, at.key, lanes=at.lanes, partner=partner)
    elif not tile.is_global:
        if role.busy:
            role.cta.detector.fragment(role, tile, "read")
        check_ready(role, tile, at.key)


def check_ready(role: Role, tile: Tile, key) -> None:
    if tile.ready is not True and not np.all(tile.ready[key]):
        role.cta.issue(role, "init", f"reads {tile.name}, which nothing has written", tile.name)
