"""What the launches of the core cost: a model that is linear in its constants, and the constants.

A launch is described by its work (LaunchWork) and costs

    fixed + wave W + chunk W n + load (CTAs / SMs) n + traffic MB    microseconds

for W = ceil(CTAs / SMs) waves of CTAs, one an SM, that each walk n chunks (of the scan: segments).
An opening, the first segment's forward pass beside the summary, counts as one launch. The
constants are fitted to a sweep on a device by benchmarks/fit_dispatch.py and live in
cost_model.json beside this file, with where they come from. Nothing here touches a device.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from .split import CHUNK, HEAD_DIM, CorePlan

PACKAGED = Path(__file__).with_name("cost_model.json")
LAUNCHES = (
    "unsplit64",
    "unsplit128",
    "opening64",
    "opening128",
    "scan",
    "segment64",
    "segment128",
)

# Columns of a state that one CTA of the scan has: those of kernels/split.py.
SCAN_COLUMNS = 32

# Megabytes that a chunk of one head takes: a tensor of 128 columns, A and the two gates, and a
# segment's state in fp32.
ROWS_MB = CHUNK * HEAD_DIM * 2 / 1e6
GATES_MB = CHUNK * (CHUNK * 2 + 2 * 4) / 1e6
STATE_MB = HEAD_DIM * HEAD_DIM * 4 / 1e6


@dataclass(frozen=True)
class CoreCall:
    """The sizes that a plan is made for: what the host knows without asking the device.

    sequences: B, or N of packed sequences. tokens: T; of packed sequences, whose lengths the host
    does not know, their mean, total / N rounded down.
    """

    sequences: int
    tokens: int
    heads_q: int
    heads_v: int

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value < 1:
                raise ValueError(f"{field.name}={value} must be at least 1")
        if self.heads_v % self.heads_q:
            raise ValueError(f"heads_v={self.heads_v} must be a multiple of heads_q={self.heads_q}")

    @property
    def states(self) -> int:
        return self.sequences * self.heads_v

    @property
    def chunks(self) -> int:
        return -(-self.tokens // CHUNK)

    @property
    def shared(self) -> float:
        """q/k heads for each V head."""
        return self.heads_q / self.heads_v


@dataclass(frozen=True)
class LaunchWork:
    """One launch on a device of sm_count SMs: CTAs, chunks of each, megabytes it must move."""

    ctas: int
    chunks: int
    megabytes: float
    sm_count: int

    @property
    def features(self) -> tuple[float, float, float, float, float]:
        """What each constant of a LaunchCost is multiplied by."""
        waves = -(-self.ctas // self.sm_count)
        return (
            1.0,
            waves,
            waves * self.chunks,
            self.ctas / self.sm_count * self.chunks,
            self.megabytes,
        )


@dataclass(frozen=True)
class LaunchCost:
    """Microseconds of one kind of launch, none negative.

    fixed: of the launch; wave: of a wave's first loads and last stores; chunk: of a chunk on an
    idle device; load: what a chunk takes more when every SM works; traffic: of a megabyte.
    """

    fixed: float
    wave: float
    chunk: float
    load: float
    traffic: float

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) >= 0:
                raise ValueError(f"{field.name}={getattr(self, field.name)} must be at least 0")

    def time(self, work: LaunchWork) -> float:
        fixed, wave, chunk, load, traffic = work.features
        return (
            self.fixed * fixed
            + self.wave * wave
            + self.chunk * chunk
            + self.load * load
            + self.traffic * traffic
        )


CONSTANTS = tuple(field.name for field in fields(LaunchCost))


def launch_works(plan: CorePlan, call: CoreCall, sm_count: int) -> dict[str, LaunchWork]:
    """The launches of a plan, by their names in LAUNCHES."""
    tile, states = plan.block_dv, call.states
    keys, head = ROWS_MB * call.shared, 2 * ROWS_MB + GATES_MB
    forward_mb = states * call.chunks * (head + 2 * keys)
    cut = plan.cut
    if cut is None:
        ctas = states * (HEAD_DIM // tile)
        return {f"unsplit{tile}": LaunchWork(ctas, call.chunks, forward_mb, sm_count)}
    length = cut.chunks_per_segment
    first_mb = states * length * (head + 2 * keys)
    summarised = states * cut.scan_steps * length * (head - ROWS_MB + keys)
    opening = cut.opening_ctas(states, tile)
    works = {f"opening{tile}": LaunchWork(opening, length, first_mb + summarised, sm_count)}
    if cut.scan_steps:
        # A step reads a local state and writes a state in fp32, and reads a transition in bf16.
        moved = states * cut.scan_steps * 2.5 * STATE_MB
        scanning = states * (HEAD_DIM // SCAN_COLUMNS)
        works["scan"] = LaunchWork(scanning, cut.scan_steps, moved, sm_count)
    ctas = cut.forward_ctas(states, tile)
    works[f"segment{tile}"] = LaunchWork(ctas, length, forward_mb - first_mb, sm_count)
    return works


@dataclass(frozen=True)
class CostModel:
    """The constants of every launch, and where they come from."""

    launches: Mapping[str, LaunchCost]
    provenance: Mapping[str, Any]

    def __post_init__(self) -> None:
        if set(self.launches) != set(LAUNCHES):
            raise ValueError(f"launches are {sorted(self.launches)}, must be {sorted(LAUNCHES)}")

    def predict(self, plan: CorePlan, call: CoreCall, sm_count: int) -> float:
        """Microseconds of a call that runs as `plan` says."""
        works = launch_works(plan, call, sm_count)
        return sum(self.launches[name].time(work) for name, work in works.items())

    def to_json(self) -> str:
        launches = {
            name: {constant: getattr(cost, constant) for constant in CONSTANTS}
            for name, cost in self.launches.items()
        }
        return json.dumps({"provenance": self.provenance, "launches": launches}, indent=2) + "\n"


def load_model(path: Path = PACKAGED) -> CostModel:
    """The model of a file. Raises ValueError naming the file where it is none."""
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        launches = {name: LaunchCost(**values) for name, values in held["launches"].items()}
        return CostModel(launches, held["provenance"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no cost model: {type(error).__name__}: {error}") from None


@functools.cache
def packaged_model() -> CostModel:
    """The model that the package ships, read once."""
    return load_model()
