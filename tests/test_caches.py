"""The bounded cache: order of use, counters, eviction."""

import pytest

from gdn_prefill.caches import BoundedCache


def test_the_least_recently_used_entry_leaves_first():
    evicted = []
    cache = BoundedCache(2, on_evict=evicted.append)
    cache.put("a", 1)
    cache.put("b", 2)
    assert cache.get("a") == 1
    cache.put("c", 3)
    assert evicted == [2]
    assert cache.get("b") is None
    assert (cache.get("a"), cache.get("c")) == (1, 3)


def test_counters_tell_hits_misses_and_evictions():
    cache = BoundedCache(1)
    assert cache.get("a") is None
    cache.put("a", 1)
    cache.get("a")
    cache.put("b", 2)
    info = cache.info()
    assert (info.hits, info.misses, info.evictions, info.size, info.capacity) == (1, 1, 1, 1, 1)
    cache.clear()
    assert cache.info().hits == cache.info().misses == cache.info().size == 0


def test_discard_if_drops_what_matches_only():
    evicted = []
    cache = BoundedCache(4, on_evict=evicted.append)
    for number in range(4):
        cache.put(number, number)
    cache.discard_if(lambda value: value % 2)
    assert cache.values() == [0, 2]
    assert evicted == [1, 3]


def test_a_peek_neither_counts_nor_saves_from_eviction():
    cache = BoundedCache(2)
    cache.put("a", 1)
    cache.put("b", 2)
    assert cache.peek("a") == 1
    assert cache.peek("c") is None
    cache.put("c", 3)
    assert cache.peek("a") is None
    assert cache.info().hits == cache.info().misses == 0


def test_capacity_must_hold_something():
    with pytest.raises(ValueError, match="capacity=0"):
        BoundedCache(0)
