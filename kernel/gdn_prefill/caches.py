"""A bounded least-recently-used cache that counts what happens to it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CacheInfo:
    """A cache's counters: lookups with and without success, entries dropped and held."""

    hits: int
    misses: int
    evictions: int
    size: int
    capacity: int


class BoundedCache:
    """Keeps the `capacity` most recently used values; on_evict gets each one that leaves."""

    def __init__(self, capacity: int, on_evict: Callable[[Any], None] | None = None):
        if capacity < 1:
            raise ValueError(f"capacity={capacity} must be at least 1")
        self.capacity = capacity
        self._entries: OrderedDict[Hashable, Any] = OrderedDict()
        self._on_evict = on_evict
        self._lock = threading.RLock()
        self._hits = self._misses = self._evictions = 0

    def get(self, key: Hashable) -> Any | None:
        """The value of key, or None; counted as a hit or a miss."""
        with self._lock:
            value = self._entries.get(key)
            if value is None:
                self._misses += 1
                return None
            self._hits += 1
            self._entries.move_to_end(key)
            return value

    def peek(self, key: Hashable) -> Any | None:
        """The value of key, or None; neither counted nor taken as a use."""
        return self._entries.get(key)

    def put(self, key: Hashable, value: Any) -> Any:
        """Store value under key, dropping the least recently used when full; returns value."""
        with self._lock:
            self._entries[key] = value
            self._entries.move_to_end(key)
            while len(self._entries) > self.capacity:
                self._evict(next(iter(self._entries)))
        return value

    def discard_if(self, predicate: Callable[[Any], bool]) -> None:
        """Drop every entry whose value satisfies predicate."""
        with self._lock:
            for key in [key for key, value in self._entries.items() if predicate(value)]:
                self._evict(key)

    def _evict(self, key: Hashable) -> None:
        value = self._entries.pop(key)
        self._evictions += 1
        if self._on_evict is not None:
            self._on_evict(value)

    def values(self) -> list[Any]:
        return list(self._entries.values())

    def clear(self) -> None:
        """Forget entries and counters."""
        self._entries.clear()
        self._hits = self._misses = self._evictions = 0

    def info(self) -> CacheInfo:
        return CacheInfo(
            self._hits, self._misses, self._evictions, len(self._entries), self.capacity
        )
