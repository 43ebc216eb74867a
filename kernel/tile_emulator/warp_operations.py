"""Warp-level matrix instructions on per-thread registers: mma, ldmatrix, stmatrix.

Register layouts are those of the PTX ISA for m16n8k16 and 8x8 matrices of 16-bit elements; lane l
of a warp holds, of an 8x8 matrix, row l // 4 and columns 2 (l % 4) and the next.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import numpy as np

from .dtypes import from_device, item_bytes, rounded, to_device
from .errors import UnsupportedOperation
from .expressions import touch_read
from .indexing import Where, clip
from .lanes import uniform
from .memory import Local
from .registry import OPERATIONS, operation
from .role import WARP, Role
from .steps import Step
from .stores import touch_write
from .tir import int_of, kind, op_name

LANE = np.arange(WARP)
PAIR = np.arange(2)
ROW = LANE // 4
COLUMNS = LANE[:, None] % 4 * 2 + PAIR  # [32, 2]
MMA_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}


def whole_warps(role: Role) -> int:
    """Number of active warps.  Raises UnsupportedOperation where a warp is not active as a
    whole."""
    threads = role.active
    if len(threads) % WARP or (threads.reshape(-1, WARP) % WARP != LANE).any():
        raise UnsupportedOperation(
            "a warp-level instruction by a part of a warp", where=role.where()
        )
    return len(threads) // WARP


def lanes_of(role: Role) -> np.ndarray:
    return role.positions if role.lanes is None else role.lanes


class Registers:
    """``count`` consecutive elements of a one-dimensional per-thread buffer."""

    def __init__(self, compiler, variable, offset, count: int):
        spec = compiler.scope.buffers.get(hash(variable))
        if spec is None or not spec.is_per_thread or len(spec.shape) != 1:
            raise UnsupportedOperation(f"registers {variable}: a one-dimensional local is needed")
        self.spec, self.count = spec, count
        self.offset = compiler.expression(offset)

    def place(self, role: Role) -> tuple[Local, slice]:
        first = int(uniform(role, self.offset(role), "a register offset"))
        clip(role, self.spec.name, [first, first + self.count - 1], self.spec.shape * 2)
        return role.buffers[self.spec.key], slice(first, first + self.count)

    def read(self, role: Role) -> np.ndarray:
        """[warps, 32, count]"""
        local, part = self.place(role)
        if local.ready is not None and not np.all(local.ready[..., part]):
            role.cta.issue(
                role, "init", f"reads {local.name}, which nothing has written", local.name
            )
        x = local.arr[lanes_of(role), part] if local.per_thread else local.arr[part]
        return np.broadcast_to(x, (role.active_count, self.count)).reshape(-1, WARP, self.count)

    def write(self, role: Role, x: np.ndarray) -> None:
        local, part = self.place(role)
        local.spread()
        lanes = lanes_of(role)
        local.arr[lanes, part] = rounded(x.reshape(len(lanes), self.count), local.dtype)
        if local.ready is not None:
            local.ready[lanes, part] = True


@operation("ptx_mma")
def mma(compiler, call) -> Step:
    """D = A B + D for m16n8k16, A by rows, B by columns, FP32 sums."""
    shape, a_layout, b_layout, a_type, b_type, c_type = (str(x.value) for x in call.args[:6])
    if (shape, a_layout, b_layout, c_type) != ("m16n8k16", "row", "col", "fp32"):
        raise UnsupportedOperation(f"ptx_mma {shape} {a_layout} {b_layout} {c_type}")
    a, b, c = (
        Registers(compiler, call.args[6 + 2 * k], call.args[7 + 2 * k], count)
        for k, count in enumerate((8, 4, 4))
    )
    for registers, name in ((a, a_type), (b, b_type), (c, c_type)):
        if registers.spec.dtype != MMA_DTYPES.get(name):
            raise UnsupportedOperation(f"ptx_mma {name} on {registers.spec.dtype} registers")
    halves = np.arange(8)
    a_row = ROW[:, None] + halves // 2 % 2 * 8
    a_column = LANE[:, None] % 4 * 2 + halves % 2 + halves // 4 * 8
    quarters = halves[:4]
    b_row = LANE[:, None] % 4 * 2 + quarters % 2 + quarters // 2 * 8
    c_row = ROW[:, None] + quarters // 2 * 8
    c_column = LANE[:, None] % 4 * 2 + quarters % 2

    def run(role: Role):
        warps = whole_warps(role)
        role.converge()
        left, right = np.zeros((warps, 16, 16), np.float32), np.zeros((warps, 16, 8), np.float32)
        left[:, a_row, a_column] = a.read(role)
        right[:, b_row, ROW[:, None]] = b.read(role)
        c.write(role, c.read(role) + (left @ right)[:, c_row, c_column])
        if role.cta.trace:
            role.cta.trace.thread_code(role)

    return Step(run)


def row_addresses(compiler, pointer) -> Callable:
    """Closure giving (tile, flat index of the first of eight elements per active thread)."""
    if not (kind(pointer) == "Call" and op_name(pointer) == "access_ptr"):
        raise UnsupportedOperation(f"address {pointer}")
    load = pointer.args[0]
    spec = compiler.expressions.spec_of(load.buffer)
    if not spec.is_shared or item_bytes(spec.dtype) != 2:
        raise UnsupportedOperation(f"matrix rows in {spec.name}: 16-bit shared memory is needed")
    indices = [compiler.expression(i) for i in load.indices]

    def addresses(role: Role):
        tile = role.buffers[spec.key]
        values = clip(role, spec.name, [f(role) for f in indices], tile.arr.shape)
        values = [np.broadcast_to(x, (role.active_count,)) for x in values]
        return tile, np.ravel_multi_index(values, tile.arr.shape)

    return addresses


def matrix_elements(role: Role, tile, starts: np.ndarray, matrices: int, transposed: bool) -> Where:
    """Elements [warps, 32, matrices, 2] that each lane holds of its warp's 8x8 matrices."""
    rows = starts.reshape(-1, WARP)[:, : matrices * 8].reshape(-1, matrices, 8)
    if transposed:
        row, column = COLUMNS, np.broadcast_to(ROW[:, None], (WARP, 2))
    else:
        row, column = np.broadcast_to(ROW[:, None], (WARP, 2)), COLUMNS
    flat = rows[:, :, row] + column  # [warps, matrices, 32, 2]
    flat = flat.transpose(0, 2, 1, 3)
    limit = prod(tile.arr.shape)
    (flat,) = clip(role, tile.name, [flat], (limit,))
    lanes = np.broadcast_to(lanes_of(role).reshape(-1, WARP, 1, 1), flat.shape)
    return Where(np.unravel_index(flat, tile.arr.shape), None, lanes)


@operation("ptx_ldmatrix")
def load_matrices(compiler, call) -> Step:
    transposed, matrices = bool(int_of(call.args[0])), int_of(call.args[1])
    source = row_addresses(compiler, call.args[2])
    pointer = call.args[3]
    if not (kind(pointer) == "Call" and op_name(pointer) == "access_ptr"):
        raise UnsupportedOperation(f"address {pointer}")
    load = pointer.args[0]
    target = Registers(compiler, load.buffer.data, load.indices[0], 2 * matrices)

    def run(role: Role):
        whole_warps(role)
        role.converge()
        tile, starts = source(role)
        at = matrix_elements(role, tile, starts, matrices, transposed)
        touch_read(role, tile, at, None)
        words = to_device(tile.arr[at.key], tile.dtype)
        target.write(role, from_device(words, tile.dtype, target.spec.dtype))
        if role.cta.trace:
            role.cta.trace.thread_code(role)

    return Step(run)


@operation("tl::ptx_stmatrix_m8n8_x4")
def store_matrices(compiler, call) -> Step:
    """Rows of four 8x8 matrices, the lanes' registers as 32-bit words of two elements."""
    target = row_addresses(compiler, call.args[1])
    words = [compiler.expression(x) for x in call.args[2:6]]

    def run(role: Role):
        warps = whole_warps(role)
        role.converge()
        tile, starts = target(role)
        at = matrix_elements(role, tile, starts, 4, False)
        count = role.active_count
        values = [np.broadcast_to(f(role), (count,)).astype(np.int32) for f in words]
        halves = np.stack(values, axis=-1).view(np.uint16).reshape(warps, WARP, 4, 2)
        touch_write(role, tile, at, None)
        tile.arr[at.key] = from_device(halves, "uint16", tile.dtype)
        tile.mark_ready(at.key)
        if role.cta.trace:
            role.cta.trace.thread_code(role)

    return Step(run)


@operation("call_extern")
def call_extern(compiler, call) -> Step:
    """An external function called as a statement, by its name."""
    name = str(call.args[0].value)
    if name not in OPERATIONS:
        raise UnsupportedOperation(f"call of the external function {name}")
    return OPERATIONS[name](compiler, call)
