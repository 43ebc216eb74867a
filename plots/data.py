"""The recorded results that the figures read, or an error that names what is not recorded."""

import functools
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cases import Case, load_cases
from gdn_ladder.versions import BY_NAME, VERSIONS
from harness.implementations import CORE, FULL, LADDER, OURS, OWN
from harness.metrics import VERSIONS as PROFILED_VERSIONS
from harness.metrics import Metric, by_kernel, read_metrics
from harness.results import RESULTS, SHIPPED, Row, read_rows, version_of

DEVICE = "nvidia-h200"
LONG_CASES = ("long_low_gva", "batch_split_gva", "wide_gva_state", "deep_gva_state")
# Ideas that were tried and not kept; every other version is a step towards the shipped one.
REJECTED = ("v3", "v4", "v9", "v9.5", "v10", "v11", "v15", "v20", "v21", "scan", "w8a8")
# What must have been measured beside this package, by scope; further ones are drawn if they were.
PEERS: Mapping[str, tuple[str, ...]] = {
    CORE: ("flash_qla",),
    FULL: ("flash_qla", "fla", "flashinfer"),
}
# An implementation whose name goes on, such as flash_qla_nocp, is a variant of the same package.
PACKAGES = {"flash_qla": "FlashQLA", "flashinfer": "FlashInfer", "fla": "FLA"}

Times = Mapping[str, Row]  # by case


class MissingDataError(Exception):
    """A figure cannot be drawn; the message says what was not measured."""


@dataclass(frozen=True)
class Kernel:
    """The longest kernel of one call, as the profiler counted it; `of` kernels in that call."""

    name: str
    counters: Mapping[str, float]
    of: int


@dataclass(frozen=True)
class Recorded:
    """What is recorded for one device under `root`."""

    root: Path = RESULTS
    device: str = DEVICE

    @functools.cached_property
    def cases(self) -> tuple[Case, ...]:
        """The public cases, in their order."""
        return tuple(load_cases())

    def case(self, name: str) -> Case:
        return next(case for case in self.cases if case.name == name)

    @functools.cached_property
    def bench(self) -> list[Row]:
        """This package beside the peers."""
        return read_rows(self._path("bench", "python -m harness.bench"))

    @functools.cached_property
    def ladder(self) -> list[Row]:
        """The versions, with the shipped kernel among them, in interleaved runs."""
        command = "python -m harness.bench --no-peers --name ladder --version v1 ..."
        return read_rows(self._path("ladder", command))

    def _path(self, name: str, command: str) -> Path:
        path = self.root / self.device / f"{name}.csv"
        if not path.is_file():
            raise MissingDataError(f"{path} does not exist; `{command}` writes it")
        return path

    @functools.cached_property
    def versions(self) -> tuple[str, ...]:
        """The versions that must be right, in the ladder's order, the shipped one last."""
        passing = [row.name for row in VERSIONS if row.expected == "pass" and row.family]
        return (*passing, SHIPPED)

    @property
    def path_versions(self) -> tuple[str, ...]:
        """The versions that were kept, in order."""
        return tuple(version for version in self.versions if version not in REJECTED)

    def times(self, version: str, protocol: str) -> Times:
        """A version's core times on the public cases; a row without a time is a wrong result."""
        found = {
            row.case: row
            for row in self.ladder
            if (version_of(row), row.scope, row.protocol) == (version, CORE, protocol)
        }
        return self._complete(found, f"ladder.csv: {version} core {protocol}")

    def right_times(self, version: str, protocol: str) -> Times:
        """As times(), every one of them a PASS."""
        return _timed(self.times(version, protocol), f"ladder.csv: {version} core {protocol}")

    def failures(self) -> dict[str, Row | None]:
        """A recorded row of every version that is expected to fail; None where there is none."""
        rows = {row.version: row for row in self.ladder if row.implementation == LADDER}
        return {
            version.name: rows.get(version.name)
            for version in VERSIONS
            if version.expected == "fail"
        }

    def ours(self, scope: str, protocol: str) -> Times:
        """This package's times beside the peers'."""
        found = {
            row.case: row
            for row in self.bench
            if (row.implementation, row.scope, row.protocol) == (OURS, scope, protocol)
        }
        what = f"bench.csv: {OURS} {scope} {protocol}"
        return _timed(self._complete(found, what), what)

    def peers(self, scope: str, protocol: str) -> dict[str, Times]:
        """The peers' times; a row without one is a wrong result or a call that cannot be timed."""
        found: dict[str, dict[str, Row]] = {name: {} for name in PEERS[scope]}
        for row in self.bench:
            if row.implementation not in OWN and (row.scope, row.protocol) == (scope, protocol):
                found.setdefault(row.implementation, {})[row.case] = row
        return {
            name: self._complete(rows, f"bench.csv: {name} {scope} {protocol}")
            for name, rows in found.items()
        }

    def _complete(self, found: Mapping[str, Row], what: str) -> Times:
        absent = [case.name for case in self.cases if case.name not in found]
        if absent:
            raise MissingDataError(f"{what}: no row for {', '.join(absent)}")
        return {case.name: found[case.name] for case in self.cases}

    @functools.cached_property
    def metrics(self) -> list[Metric]:
        """The profiler's counters."""
        return read_metrics(self._path("metrics", "python -m harness.metrics"))

    def kernel(self, version: str, case: str, counters: Iterable[str]) -> Kernel:
        """The longest kernel of a version's call, which must have the `counters`."""
        kernels = {
            key: values
            for key, values in by_kernel(self.metrics).items()
            if key[:2] == (version, case)
        }
        if not kernels:
            raise MissingDataError(f"metrics.csv: nothing of {version} on {case}")
        key = max(kernels, key=lambda key: kernels[key].get("duration", math.inf))
        absent = [name for name in ("duration", *counters) if name not in kernels[key]]
        if absent:
            raise MissingDataError(f"metrics.csv: {version} on {case} has no {', '.join(absent)}")
        return Kernel(key[3], kernels[key], len(kernels))

    @property
    def profiled_versions(self) -> tuple[str, ...]:
        """The versions that must have been profiled, in the ladder's order."""
        order = [*BY_NAME, SHIPPED]
        return tuple(sorted(PROFILED_VERSIONS, key=order.index))

    @functools.cached_property
    def device_name(self) -> str:
        """The GPU as it names itself, else the slug."""
        for path in sorted((self.root / self.device).glob("*.json")):
            data = json.loads(path.read_text())
            if isinstance(data, dict) and data.get("clocks_before", {}).get("name"):
                return data["clocks_before"]["name"]
        return self.device


def _timed(times: Times, what: str) -> Times:
    untimed = [f"{row.case} ({row.correctness})" for row in times.values() if not row.median_ms]
    if untimed:
        raise MissingDataError(f"{what} has no time for {', '.join(untimed)}")
    return times


def package(implementation: str) -> str:
    """The package that an implementation belongs to, as its authors write it."""
    for prefix, name in PACKAGES.items():
        if implementation == prefix or implementation.startswith(f"{prefix}_"):
            return name
    return implementation


def by_package(peers: Mapping[str, Times], case: str) -> dict[str, float]:
    """The median (ms) of each package's fastest variant on a case, where one has a time."""
    found: dict[str, float] = {}
    for implementation, times in peers.items():
        median, name = times[case].median_ms, package(implementation)
        if median:
            found[name] = min(median, found.get(name, median))
    return found
