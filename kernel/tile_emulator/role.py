"""A role: the threads of a CTA that run the same code, as one thread of execution with vector
clocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .barriers import CLOCKS, Barrier

if TYPE_CHECKING:
    from .cta import Cta
    from .memory import Tile

WARP = 32
WARP_GROUP = 128


@dataclass(frozen=True)
class Share:
    """The threads that share a role's register tiles: all of its own, or, for a warp group of a
    wide role, ``width`` threads of which its own start at ``offset``.
    """

    width: int
    offset: int = 0


@dataclass
class Wait:
    """What a blocked role waits for: the completion of a phase of this parity, or of a given phase
    number.
    """

    barrier: Barrier
    parity: int | None = None
    phase: int | None = None

    @property
    def blocked(self) -> bool:
        if self.parity is not None:
            return self.barrier.blocks(self.parity)
        return self.barrier.phase == self.phase


class Role:
    """State of one role while its program runs.

    threads [width] are thread numbers; lanes is None while all of them are active, else positions
    in threads. extents is the iteration space of the T.Parallel nest being executed; masked says
    that the nest's variables are 1-D index lists (inside a conditional); owner
    (ownership.NestOwner) tells which thread holds which element. all / fenced [clocks]: accesses
    that happen before now, and the part that passed a fence.proxy.async. writes, reads, wgmma are
    the role's own clocks; warp_synced / role_synced their values that a warp sync, or a sync of the
    whole role, has published to the other threads of the role.
    """

    def __init__(
        self,
        cta: Cta | None,
        name: str,
        threads: np.ndarray,
        variables: dict,
        buffers: dict,
        share: Share | None = None,
    ):
        self.cta, self.name, self.threads = cta, name, threads
        self.width = len(threads)
        self.positions = np.arange(self.width)
        self.share = share or Share(self.width)
        self.is_part = self.share.width > self.width
        self.variables, self.buffers = variables, buffers
        self.lanes: np.ndarray | None = None
        self.extents: tuple[int, ...] = ()
        self.masked = False
        self.nest: list[int] = []
        self.owner = None
        self.loops: dict[str, int] = {}
        self.line = "?:0"
        self.wait: Wait | None = None
        self.leader = False
        clocks = CLOCKS if cta is None else cta.detector.width
        self.clocks = np.zeros((2, clocks), np.int32)
        self.all, self.fenced = self.clocks
        self.groups: list[tuple[int, int]] = []
        self.stores: list[tuple[int, int]] = []
        self.busy: dict[int, tuple[str, int]] = {}
        self.unfenced = False
        self.unsynced = False
        self.deferred: dict[bytes, tuple[np.ndarray, np.ndarray]] = {}
        if cta is not None:
            self.writes = cta.detector.clock(name, "writes")
            self.reads = cta.detector.clock(name, "reads")
            self.wgmma = cta.detector.clock(name, "wgmma")
            self.all[self.writes] = self.all[self.reads] = 1
            self.own = np.array([self.writes, self.reads, self.wgmma])
            self.warp_synced = np.zeros(3, np.int32)
            self.role_synced = np.zeros(3, np.int32)
            self.warps = np.unique(threads // WARP)

    def leaves(self, tile: Tile, common: bool, each_group: bool = False) -> bool:
        """Is a store to this tile another role's?  Of code that all threads run the first role
        does the shared and global stores, of a wide role's its first group (unless each_group).
        On the device every thread does a part, so the role owes a fence and a sync all the same.
        """
        shared = tile.scope.startswith("shared")
        if not (tile.is_global or shared):
            return False
        others = (common and not self.leader) or (self.share.offset > 0 and not each_group)
        if others and shared:
            self.unfenced = self.unsynced = True
        return others

    # ---- threads ----
    @property
    def active(self) -> np.ndarray:
        """Thread numbers of the active threads."""
        return self.threads if self.lanes is None else self.threads[self.lanes]

    @property
    def active_count(self) -> int:
        return self.width if self.lanes is None else len(self.lanes)

    def where(self) -> str:
        return self.line + "".join(f" {name}={i}" for name, i in self.loops.items())

    # ---- ordering ----
    def acquire(self, released: np.ndarray) -> None:
        """What a wait saw happens before now.  Of the role's own accesses that is what its threads
        have published to each other, if all of them waited.
        """
        np.maximum(self.clocks, released, out=self.clocks)
        if self.lanes is None:
            own = released[0, self.own]
            np.maximum(self.role_synced, own, out=self.role_synced)
            np.maximum(self.warp_synced, own, out=self.warp_synced)

    def knows(self, clock: int, time: int) -> bool:
        """Does an access happen before now, for some of the threads at least?"""
        gained = (known[0, clock] for _, known in self.deferred.values())
        return max(self.all[clock], *gained, 0) >= time

    def tick(self) -> None:
        """Later accesses are not covered by what has been published."""
        self.all[self.writes] += 1
        self.all[self.reads] += 1

    def converge(self) -> None:
        """A .sync instruction of every warp: earlier loads of its threads are done."""
        self.warp_synced[1] = self.all[self.reads]
        self.all[self.reads] += 1

    def sync_warp(self) -> None:
        self.warp_synced[:] = self.all[self.own]
        if len(self.warps) == 1:
            self.role_synced[:] = self.warp_synced
            self.unsynced = False
        self.merge_deferred(whole_role=len(self.warps) == 1)
        self.tick()

    def sync_role(self) -> None:
        self.warp_synced[:] = self.role_synced[:] = self.all[self.own]
        self.unsynced = False
        self.merge_deferred(whole_role=True)
        self.tick()

    def released(self) -> np.ndarray:
        """What an arrival of the active threads publishes, [2, clocks]."""
        if self.lanes is None:
            return self.clocks
        covers = len(np.unique(self.active // WARP)) == len(self.warps)
        known = self.warp_synced if covers else self.role_synced
        out = self.clocks.copy()
        out[:, self.own] = np.minimum(out[:, self.own], known)
        return out

    def arrive(self, barrier: Barrier) -> None:
        barrier.arrive(self, self.active_count, self.released())
        self.tick()

    def fence(self) -> None:
        self.fenced[:] = self.all
        self.tick()
        self.unfenced = False

    def before_async(self) -> None:
        """What TileLang inserts before an asynchronous operation: a sync of the role and a proxy
        fence.

        Both only after an ordinary shared store of this role, and only where the options say so.
        """
        if self.unsynced and self.cta.options.auto_sync:
            self.sync_role()
        if self.unfenced and self.cta.options.auto_fence:
            self.fence()

    # ---- a branch that only some threads take ----
    def enter_subset(self) -> np.ndarray:
        saved = self.clocks.copy()
        for lanes, gained in self.deferred.values():
            if np.isin(self.lanes, lanes).all():
                self.acquire(gained)
        return saved

    def leave_subset(self, saved: np.ndarray, lanes: np.ndarray) -> None:
        """What those threads acquired is theirs until the next sync."""
        gained = self.clocks.copy()
        saved[0, [self.writes, self.reads]] = gained[0, [self.writes, self.reads]]
        if (gained > saved).any():
            key = lanes.tobytes()
            if key in self.deferred:
                np.maximum(gained, self.deferred[key][1], out=gained)
            self.deferred[key] = (lanes, gained)
        self.clocks[:] = saved

    def merge_deferred(self, whole_role: bool) -> None:
        for key, (lanes, gained) in list(self.deferred.items()):
            if whole_role or len(np.unique(self.threads[lanes] // WARP)) == len(self.warps):
                self.acquire(gained)
                del self.deferred[key]

    # ---- asynchronous engines ----
    def wait_groups(self, left: int) -> None:
        """wgmma.wait_group: all but the last ``left`` groups are complete."""
        cut = max(len(self.groups) - left, 0)
        done, self.groups = self.groups[:cut], self.groups[cut:]
        self.converge()
        if done:
            last = done[-1][1]
            self.all[self.wgmma] = last
            self.warp_synced[2] = last
            self.busy = {key: use for key, use in self.busy.items() if use[1] > last}

    def wait_stores(self, left: int) -> None:
        cut = max(len(self.stores) - left, 0)
        done, self.stores = self.stores[:cut], self.stores[cut:]
        for clock, time in done:
            self.all[clock] = max(self.all[clock], time)
