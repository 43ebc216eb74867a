"""Run-time storage of buffers: tiles (global, shared, fragment) and per-thread locals."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .dtypes import from_device, item_bytes, storage


@dataclass(frozen=True)
class BufferSpec:
    """An allocation of the kernel, or a view of its bytes under another dtype and shape.

    key is the hash of its data Var; scope is TileLang's scope string.
    """

    key: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    scope: str
    is_view: bool = False

    @property
    def is_shared(self) -> bool:
        return self.scope.startswith("shared")

    @property
    def is_per_thread(self) -> bool:
        return self.scope in ("local", "local.var")


class Tile:
    """A buffer with one value per element: global, shared or register tile of a role.

    last_write [shape] int32 holds the id of the access that wrote each element (0: nobody),
    last_read the same per clock; writer_lane the thread inside the role.  They exist for shared
    tiles under the detector only. ready is True once every element has been written, else a bool
    mask (fragments under the init check).
    """

    __slots__ = (
        "name", "arr", "dtype", "scope", "last_write", "last_read", "writer_lane", "reader_lane",
        "ready", "owner",
        "tracked", "is_global",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        arr: np.ndarray,
        dtype: str,
        scope: str,
        tracked: bool = False,
        init: bool = False,
    ):
        self.name, self.arr, self.dtype, self.scope = name, arr, dtype, scope
        self.tracked = tracked
        self.is_global = scope == "global"
        self.last_write = np.zeros(arr.shape, np.int32) if tracked else None
        self.last_read: dict[int, np.ndarray] = {}
        self.writer_lane: np.ndarray | None = None
        self.reader_lane: np.ndarray | None = None
        self.ready: bool | np.ndarray = np.zeros(arr.shape, bool) if init else True
        self.owner: np.ndarray | None = None

    @staticmethod
    def allocate(spec: BufferSpec, tracked: bool, init: bool) -> Tile:
        dtype = storage(spec.dtype)
        poison = np.nan if dtype.kind == "f" else 0
        return Tile(
            spec.name, np.full(spec.shape, poison, dtype), spec.dtype, spec.scope, tracked, init
        )

    def mark_ready(self, index) -> None:
        if self.ready is not True:
            self.ready[index] = True
            if self.ready.all():
                self.ready = True


class Local:
    """A per-thread buffer of a role of ``width`` threads.

    While every thread holds the same values the array has the buffer's shape; the first store that
    differs between threads turns it into [width, *shape].
    """

    __slots__ = ("name", "arr", "dtype", "width", "per_thread", "ready")

    def __init__(self, spec: BufferSpec, width: int, init: bool):
        dtype = storage(spec.dtype)
        self.name, self.dtype, self.width = spec.name, spec.dtype, width
        self.arr = np.full(spec.shape, np.nan if dtype.kind == "f" else 0, dtype)
        self.per_thread = False
        self.ready = np.zeros(spec.shape, bool) if init else None

    def seen_as(self, spec: BufferSpec) -> Local:
        """A copy whose elements are this buffer's bytes under another dtype and shape."""
        other = Local(spec, self.width, False)
        other.per_thread = self.per_thread
        lead = self.arr.shape[: self.per_thread]
        flat = self.arr.reshape(*lead, -1)
        other.arr = from_device(flat, self.dtype, spec.dtype).reshape(*lead, *spec.shape)
        if self.ready is not None:
            ready = regroup(self.ready.reshape(*lead, -1), self.dtype, spec.dtype)
            other.ready = ready.reshape(*lead, *spec.shape)
        return other

    def take_from(self, other: Local, shape: tuple[int, ...]) -> None:
        """The bytes of such a copy back into this buffer of the given shape."""
        lead = other.arr.shape[: other.per_thread]
        self.per_thread = other.per_thread
        flat = other.arr.reshape(*lead, -1)
        self.arr = from_device(flat, other.dtype, self.dtype).reshape(*lead, *shape)
        if other.ready is not None:
            ready = regroup(other.ready.reshape(*lead, -1), other.dtype, self.dtype)
            self.ready = ready.reshape(*lead, *shape)

    def spread(self) -> None:
        """Give every thread its own copy."""
        if not self.per_thread:
            self.arr = np.repeat(self.arr[None], self.width, axis=0)
            if self.ready is not None:
                self.ready = np.repeat(self.ready[None], self.width, axis=0)
            self.per_thread = True

    def gather(self) -> None:
        """Back to one shared copy (after every thread stored one value into a one-element
        buffer)."""
        self.arr, self.per_thread = self.arr[0].copy(), False
        if self.ready is not None:
            self.ready = self.ready[0].copy()


def regroup(ready: np.ndarray, dtype: str, target: str) -> np.ndarray:
    """Which elements of another dtype over the same bytes are wholly written."""
    each = np.repeat(ready, item_bytes(dtype), axis=-1)
    return each.reshape(*ready.shape[:-1], -1, item_bytes(target)).all(axis=-1)
