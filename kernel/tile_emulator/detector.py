"""Happens-before detector of a CTA, or of the CTAs of a cluster.

Every role owns three components of the vector clocks (its stores, its loads, its wgmma pipe), every
TMA load of a barrier phase and every queue of TMA stores one more.  A shared element remembers the
access that wrote it last and the last access of every clock that read it; a new access must come
after those in the role's clocks.  Accesses through the async proxy to ordinarily written data must
come after them in ``fenced``, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from .errors import UnsupportedOperation
from .memory import Tile
from .role import WARP, Role


class Access(NamedTuple):
    """One executed access, stamped by clock and time.

    partner: what it was exchanged with (a register tile, a nest's extents), if the layout may be
    the same.
    """

    clock: int
    time: int
    is_async: bool
    verb: str
    role: str
    line: str
    loops: tuple
    partner: object = None

    def __str__(self) -> str:
        proxy = " (async proxy)" if self.is_async else ""
        loops = "".join(f" {name}={i}" for name, i in self.loops)
        return f"{self.verb} by {self.role} at {self.line}{loops}{proxy}"


class Stamp(NamedTuple):
    """Clock and time of an asynchronous engine's operation."""

    clock: int
    time: int


def distinct(x: np.ndarray) -> tuple[int, ...] | list[int]:
    """Distinct values of an int array (mostly one)."""
    if x.size < 2:
        return x.reshape(-1).tolist()
    first = x.item(0)
    return (first,) if np.count_nonzero(x != first) == 0 else np.unique(x).tolist()


class Detector:
    """Accesses of one CTA, or of a cluster's.  races / init switch the two groups of checks off.

    width: how many clocks there can be.
    """

    def __init__(self, issue: Callable, races: bool, init: bool, auto_sync: bool, width: int):
        self.issue, self.races, self.init, self.auto_sync = issue, races, init, auto_sync
        self.width = width
        self.clocks: dict[tuple, int] = {}
        self.now: dict[int, int] = {}
        self.log: list[Access | None] = [None]

    @property
    def on(self) -> bool:
        return self.races or self.init

    def clock(self, *key) -> int:
        """Component number of a role's or an engine's clock."""
        number = self.clocks.setdefault(key, len(self.clocks))
        if number >= self.width:
            raise UnsupportedOperation(f"more than {self.width} concurrent engines")
        return number

    def stamp(self, *key) -> Stamp:
        """Next tick of an asynchronous engine."""
        clock = self.clock(*key)
        self.now[clock] = time = self.now.get(clock, 0) + 1
        return Stamp(clock, time)

    def record(self, role: Role, stamp: Stamp, is_async: bool, verb: str, partner=None) -> int:
        loops = tuple(role.loops.items())
        self.log.append(
            Access(stamp[0], stamp[1], is_async, verb, role.name, role.line, loops, partner)
        )
        return len(self.log) - 1

    # ---- shared memory ----
    def read(
        self,
        role: Role,
        tile: Tile,
        index,
        is_async=False,
        stamp: Stamp | None = None,
        lanes=None,
        partner=None,
    ):
        """A read of tile[index]; lanes: the reading thread per element, where known."""
        if not self.on:
            return
        self.check_after_writes(role, tile, index, is_async, "read", lanes, partner)
        if not self.races:
            return
        if stamp is None:
            stamp = Stamp(role.reads, int(role.all[role.reads]))
        last = tile.last_read.get(stamp.clock)
        if last is None:
            last = tile.last_read[stamp.clock] = np.zeros(tile.arr.shape, np.int32)
        last[index] = self.record(role, stamp, is_async, "read", partner)
        if not is_async:
            tile.reader_lane = self.note_lanes(tile, tile.reader_lane, index, lanes)

    def write(
        self,
        role: Role,
        tile: Tile,
        index,
        is_async=False,
        stamp: Stamp | None = None,
        lanes=None,
        partner=None,
    ):
        """A write of tile[index]; to be called before the data change."""
        if not is_async:
            role.unfenced = role.unsynced = True
        if not self.on:
            return
        self.check_after_writes(role, tile, index, is_async, "write", lanes, partner)
        if self.races:
            self.check_after_reads(role, tile, index, is_async, lanes, partner)
        if stamp is None:
            stamp = Stamp(role.writes, int(role.all[role.writes]))
        tile.last_write[index] = self.record(role, stamp, is_async, "write", partner)
        tile.writer_lane = self.note_lanes(tile, tile.writer_lane, index, lanes)

    @staticmethod
    def note_lanes(tile: Tile, known: np.ndarray | None, index, lanes) -> np.ndarray | None:
        """Remember the thread per element; -1 for tile operations, made only once a thread-level
        access was seen.
        """
        if known is None:
            if lanes is None:
                return None
            known = np.full(tile.arr.shape, -1, np.int16)
        known[index] = -1 if lanes is None else lanes
        return known

    def check_after_writes(
        self, role: Role, tile: Tile, index, is_async: bool, verb: str, lanes, partner
    ) -> None:
        for number in distinct(tile.last_write[index]):
            if number == 0:
                if verb == "read" and self.init:
                    self.issue(
                        role, "init", f"reads {tile.name}, which nothing has written", tile.name
                    )
                continue
            if not self.races:
                continue
            last = self.log[number]
            if role.all[last.clock] < last.time:
                self.issue(
                    role,
                    "race",
                    f"{verb}s {tile.name}, not ordered after the {last}",
                    tile.name,
                    last.line,
                )
            elif last.clock == role.writes and not self.auto_sync:
                self.check_in_role(role, tile, index, number, last, is_async, verb, lanes, partner)
            if (
                is_async
                and not last.is_async
                and role.fenced[last.clock] < last.time <= role.all[last.clock]
            ):
                self.issue(
                    role,
                    "fence",
                    f"async {verb} of {tile.name} without fence.proxy.async after the {last}",
                    tile.name,
                )

    def check_after_reads(
        self, role: Role, tile: Tile, index, is_async: bool, lanes, partner
    ) -> None:
        for clock, readers in tile.last_read.items():
            own = clock == role.reads
            if own and self.auto_sync:
                continue
            if not own and role.all[clock] >= self.now.get(clock, 1 << 30):
                continue
            for number in distinct(readers[index]):
                if number == 0:
                    continue
                last = self.log[number]
                if role.all[clock] < last.time:
                    self.issue(
                        role,
                        "race",
                        f"writes {tile.name}, not ordered after the {last}",
                        tile.name,
                        last.line,
                    )
                elif own:
                    self.check_in_role(
                        role, tile, index, number, last, is_async, "write", lanes, partner
                    )

    def check_in_role(
        self, role, tile, index, number, last: Access, is_async, verb, lanes, partner
    ) -> None:
        """Two threads of one role: a sync of the role (or of the warp that holds both) must lie
        between.
        """
        column = 0 if last.verb == "write" else 1
        if role.role_synced[column] >= last.time:
            return
        if lanes is None and not is_async and last.partner is not None and last.partner == partner:
            return
        record = tile.writer_lane if column == 0 else tile.reader_lane
        if lanes is not None and record is not None:
            ids = np.asarray(
                (tile.last_write if column == 0 else tile.last_read[role.reads])[index]
            )
            here = ids == number
            other = np.asarray(record[index])[here]
            mine = np.broadcast_to(lanes, ids.shape)[here]
            if (other == mine).all():
                return
            warps = role.threads // WARP
            same_warp = (other >= 0).all() and (warps[other] == warps[mine]).all()
            if same_warp and role.warp_synced[column] >= last.time:
                return
        what = f"async {verb}" if is_async else verb
        self.issue(
            role,
            "sync",
            f"{what} of {tile.name}: no sync of this role's threads after the {last}",
            tile.name,
            last.line,
        )

    # ---- registers and global memory ----
    def fragment(self, role: Role, tile: Tile, verb: str) -> None:
        """A register tile used by ordinary code while an asynchronous wgmma still owns it."""
        use = role.busy.get(id(tile))
        if use and self.races and (use[0] == "write" or verb == "write"):
            self.issue(
                role,
                "wgmma",
                f"{verb}s {tile.name} while a wgmma on it is outstanding (wait_wgmma missing)",
                tile.name,
            )

    def global_write(self, role: Role, tile: Tile, index, cta_number: int) -> None:
        """No element of an output may be written by two CTAs."""
        if tile.owner is None or not self.races:
            return
        for other in distinct(tile.owner[index]):
            if other and other != cta_number + 1:
                self.issue(
                    role,
                    "overlap",
                    f"writes elements of {tile.name} that CTA number {other - 1} has written",
                    tile.name,
                )
        tile.owner[index] = cta_number + 1
