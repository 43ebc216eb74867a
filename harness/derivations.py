"""What documents derive from results/: times, counters, ratios and tables, as plain functions.

harness/derived.py evaluates a document's markers over the public methods of Derivations. Versions
are those of the ladder, or "shipped" for what the package runs; times are medians in milliseconds.
"""

import csv
import functools
import json
import lzma
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from cases import CHUNK, HEAD_DIM, Case, load_baselines, load_cases
from gdn_ladder import VERSIONS, LadderShape, get_version, kernels_of
from gdn_ladder.families import CORE as PACKAGE_CORE
from gdn_prefill.cost import PACKAGED

from .bench_operator import HOST_NAME, select_workloads
from .bench_operator import IMPLEMENTATIONS as COMPARED
from .bench_operator import NAME as OPERATOR
from .check import Status
from .device import H200
from .floors import hbm_floor_ms, tensor_floor_ms
from .implementations import CORE, FULL, LADDER, OURS, SCOPES
from .metrics import VERSIONS as PROFILED
from .metrics import by_kernel, read_metrics
from .results import RESULTS, SHIPPED, Row, read_rows, version_of
from .score import geometric_mean, recorded_sheet, standings_of_rows
from .selection import select_cases
from .timing import Protocol

DEVICE = "nvidia-h200"
SMS = 132
# bf16 multiply-adds of one SM a cycle, and its clock in GHz.
RATE, CLOCK = 2048, 1.98
GRAPH = Protocol.GRAPH.value
# Two shapes of benchmarks/resident_variants.py that differ in their chunks alone, by SMs in use.
SLOPES = {
    "few": (("slope_short", 64), ("slope_long", 256)),
    "full": (("full_short", 32), ("wide_gva_state", 128)),
}
# CTAs of the shapes that rounds/ profiled at block_dv 64, which have 4 heads.
PROFILED_CTAS = 8


class NotRecordedError(LookupError):
    """A measurement that can be asked for and has not been recorded yet."""


class Derivations:
    """The recorded results of one device under `root`; every public method is a function."""

    def __init__(self, root: Path = RESULTS, device: str = DEVICE) -> None:
        self._folder, self._emulator = root / device, root / "emulator"
        self._device = device
        self._read: dict[str, list[Row]] = {}

    def functions(self) -> dict[str, object]:
        """What an expression may use."""
        own = {
            name: getattr(self, name)
            for name in vars(type(self))
            if not name.startswith("_") and name not in ("functions", "table")
        }
        return {**own, "min": min, "max": max, "abs": abs, "clock_ghz": CLOCK, "sms": SMS}

    # Times

    def ladder(self, version: str, case: str, protocol: str = GRAPH) -> float:
        """The core of a version, from the interleaved run of the ladder."""
        if version != SHIPPED:
            get_version(version)
        wanted = (version, self._cases[case].name, CORE, protocol)
        return _median(
            self._rows("ladder"),
            wanted,
            lambda row: (version_of(row), row.case, row.scope, row.protocol),
        )

    def bench(
        self, implementation: str, case: str, scope: str = CORE, protocol: str = GRAPH
    ) -> float:
        """This package or a peer, from the interleaved run against the peers."""
        return _median(
            self._rows("bench"),
            (implementation, self._cases[case].name, scope, protocol),
            lambda row: (row.implementation, row.case, row.scope, row.protocol),
        )

    def release(self, file: str) -> str:
        """The release of this package that a file's rows measured."""
        return next(row.version for row in self._rows(file) if row.implementation == OURS)

    def chunk_us(self, version: str, case: str) -> float:
        """Microseconds a chunk, launch, first load and last store included."""
        return 1e3 * self.ladder(version, case) / self._cases[case].chunks

    def source(self, version: str, case: str) -> float:
        """What the source reports for its slice of an H800."""
        return get_version(version).source_ms[case]

    def said(self, version: str, number: str) -> float:
        """A number of the ladder's table: in a version's lesson or reason, as the source has it."""
        row = get_version(version)
        text = f"{row.lesson} {row.reason}"
        if number not in re.findall(r"\d+(?:\.\d+)?(?:e-\d+)?", text):
            raise LookupError(f"{number} is not what the table says of {version}: {text}")
        return float(number)

    def baseline(self, case: str, which: str) -> float:
        return getattr(load_baselines(self._device)[case], f"{which}_ms")

    def over(self, version: str, other: str, case: str) -> float:
        """Time of a version over that of another."""
        return self.ladder(version, case) / self.ladder(other, case)

    def change(self, version: str, other: str, case: str) -> float:
        """By how much a version's time differs from another's, in percent; below 0 is faster."""
        return 100 * (self.over(version, other, case) - 1)

    def changes(self, version: str, other: str) -> list[float]:
        """change() for every public case, smallest first."""
        return sorted(self.change(version, other, case) for case in self._cases)

    def mean_over(self, version: str, other: str) -> float:
        """The geometric mean of over() on the public cases."""
        return geometric_mean([self.over(version, other, case) for case in self._cases])

    def saved_us(self, version: str, other: str, case: str) -> float:
        """What a call under the lab's protocol takes less than another version's."""
        oj = Protocol.OJ.value
        return 1e3 * (self.ladder(other, case, oj) - self.ladder(version, case, oj))

    def peer_ratio(self, peer: str, case: str, scope: str = CORE) -> float:
        """A peer's time over ours: above 1 where this package is faster."""
        return self.bench(peer, case, scope) / self.bench(OURS, case, scope)

    def mean_peer_ratio(self, peer: str, scope: str = CORE) -> float:
        return geometric_mean([self.peer_ratio(peer, case, scope) for case in self._cases])

    def core(self, implementation: str, case: str) -> float:
        """Of core.csv: this release's core beside FlashQLA's."""
        return _median(
            self._rows("core"),
            (implementation, self._cases[case].name),
            lambda row: (row.implementation, row.case),
        )

    def core_clock(self, case: str) -> float:
        """SM clock of our core's times in core.csv, MHz."""
        for row in self._rows("core"):
            if (row.implementation, row.case) == (OURS, case) and row.sm_mhz is not None:
                return row.sm_mhz
        raise NotRecordedError(f"core.csv has no clock of {case}")

    def core_ratio(self, peer: str, case: str) -> float:
        """A peer's core over ours: above 1 where this package is faster."""
        return self.core(peer, case) / self.core(OURS, case)

    def mean_core_ratio(self, peer: str) -> float:
        return geometric_mean([self.core_ratio(peer, case) for case in self._cases])

    def preprocessing(self, case: str) -> float:
        """What this package's full forward takes beyond its core."""
        return self.bench(OURS, case, FULL) - self.bench(OURS, case, CORE)

    def operator(self, implementation: str, workload: str) -> float:
        """The full forward on a public case or a packed batch, from the operator's own run."""
        if workload not in self._workloads:
            raise LookupError(f"no workload {workload}")
        return _median(
            self._rows(OPERATOR),
            (implementation, workload),
            lambda row: (row.implementation, row.case),
        )

    def operator_ratio(self, peer: str, workload: str) -> float:
        """A peer's full forward over ours: above 1 where this package is faster."""
        return self.operator(peer, workload) / self.operator(OURS, workload)

    def operator_host(self, what: str, workload: str) -> float:
        """Host time of a warm call in microseconds: "plan", "fresh" or "replay"."""
        if workload not in self._workloads:
            raise LookupError(f"no workload {workload}")
        return float(self._of_case(HOST_NAME, workload)[what])

    def host(self, case: str, column: str) -> float:
        """A column of host_overhead.csv, in microseconds."""
        return float(self._of_case("host_overhead", case)[column])

    def hosts(self, column: str) -> list[float]:
        return sorted(self.host(case, column) for case in self._cases)

    def slope(self, round_: int, variant: str = "dv64", occupancy: str = "few") -> float:
        """Microseconds a chunk of a variant in a round of rounds/, fixed costs left out.

        occupancy: "few" heads, from 4096 to 16384 tokens, or "full", from 2048 to 8192 on 64 heads.
        """
        (short, fewer), (long, more) = SLOPES[occupancy]
        times = self._round(round_)
        for shape in (short, long):
            if (variant, shape) not in times:
                raise NotRecordedError(f"round {round_} has no {variant} on {shape}")
        return (times[variant, long] - times[variant, short]) / (more - fewer)

    def split(self, round_: int, plan: str, part: str = "total") -> float:
        """Microseconds of a part of a split in a round of rounds/, as split_variants names both."""
        fields = ("case", "segments", "block_dv", "products")
        for row in self._table(f"rounds/split_round{round_}"):
            apart = ":apart" if row.get("paired") == "False" else ""
            if ":".join(row[field] for field in fields) + apart == plan:
                return float(row[f"{part}_us"])
        raise NotRecordedError(f"round {round_} of the split has no {plan}")

    def fitted(self, launch: str, part: str) -> float:
        """A constant of the packaged cost model, in microseconds: see gdn_prefill/cost.py."""
        return float(json.loads(PACKAGED.read_text())["launches"][launch][part])

    def sustained(self, case: str, column: str) -> float:
        """A column of sustained.csv: microseconds, or megahertz."""
        return float(self._of_case("sustained", case)[column])

    def wavefronts(self, round_: int, variant: str, chunks: int, operation: str = "") -> float:
        """Shared-memory wavefronts of a CTA in a chunk, one a cycle, as ncu counts them.

        chunks: of the profiled shape. operation: how the instructions counted begin, "" for all;
        TMA is not among them.
        """
        path = self._folder / "rounds" / f"resident_round{round_}_{variant}.source.csv.xz"
        if not path.is_file():
            raise NotRecordedError(f"round {round_} has no profile of {variant}")
        with lzma.open(path, "rt", encoding="utf-8", newline="") as handle:
            next(handle)  # the kernel's name
            total = sum(
                float(row["L1 Wavefronts Shared"])
                for row in csv.DictReader(handle)
                if _opcode(row["Source"]).startswith(operation)
            )
        return total / (PROFILED_CTAS * chunks)

    # Shapes and floors

    def chunks(self, case: str) -> int:
        return self._cases[case].chunks

    def states(self, case: str) -> int:
        return self._cases[case].state_heads

    def tile(self, version: str, case: str) -> int:
        """State columns of one CTA of a version's (first) kernel."""
        if version == SHIPPED:
            return self._plan(case).block_dv
        return kernels_of(version, self._shape(case))[0][1].block_dv

    def segments(self, case: str) -> int:
        """Segments that the package cuts each sequence into; 1 where it does not split."""
        return self._plan(case).segments

    def ctas(self, version: str, case: str) -> int:
        """CTAs of a version's (last) launch; of the ladder's, those that do not split time."""
        tiles = self.states(case) * HEAD_DIM // self.tile(version, case)
        # Of a split, the first segment runs before, beside the summary.
        return tiles * max(1, self.segments(case) - 1) if version == SHIPPED else tiles

    def tensor_us(self, tile: int, forms_w: bool = False) -> float:
        """Microseconds of tensor-core work in one chunk at a tile: six products, or v1's seven."""
        scores, values = CHUNK * CHUNK * HEAD_DIM, CHUNK * CHUNK * tile
        wide = CHUNK * HEAD_DIM * tile
        products = scores + 3 * wide + 2 * values + (scores if forms_w else 0)
        return products / RATE / CLOCK / 1e3

    def floor(self, case: str, what: str) -> float:
        """Milliseconds of the core at the datasheet's rates: "tensor" or "memory"."""
        floors = {"tensor": tensor_floor_ms, "memory": hbm_floor_ms}
        return floors[what](self._cases[case], CORE, H200)

    # Counters

    def counter(self, version: str, case: str, name: str) -> float:
        """A counter of ncu, of the longest kernel of a call."""
        return self._counted(version, case)[name]

    def stall(self, version: str, case: str, reason: str) -> float:
        """The share of a reason in all that warps waited for or issued, in percent."""
        counters = self._counted(version, case)
        total = sum(value for name, value in counters.items() if name.startswith("stall_"))
        return 100 * counters[f"stall_{reason}"] / total

    # Verdicts and provenance

    def score(self, what: str) -> float:
        """public_mean, hidden_mean, total, or a geometric mean of the recorded score sheet."""
        return getattr(self._sheet, what)

    def passes(self, version: str) -> int:
        """Public cases that a version passes on the GPU, under both protocols."""
        rows = [
            r for r in self._rows("ladder") if (r.implementation, r.version) == (LADDER, version)
        ]
        cases = {row.case for row in rows}
        wrong = {row.case for row in rows if row.correctness != Status.PASS.value}
        return len(cases - wrong)

    def wrong_cases(self, version: str) -> int:
        rows = [
            r for r in self._rows("ladder") if (r.implementation, r.version) == (LADDER, version)
        ]
        return len({row.case for row in rows if row.correctness == Status.WRONG.value})

    def emulated(self, version: str) -> str:
        """A version's status in the emulator."""
        return self._emulated(version)["correctness"]

    def emulated_error(self, version: str) -> float:
        """Its largest error there, where it was wrong."""
        reason = self._emulated(version)["reason"]
        return float(re.search(r"largest finite error ([\d.e-]+)", reason)[1])

    def emulated_races(self, version: str) -> int:
        return self._emulated(version)["reason"].count("[race]")

    def mutants(self, verdict: str | None = None) -> int:
        """Mutants of the forward kernel in the emulator, all or those of a verdict."""
        with (self._emulator / "mutants_forward.csv").open(newline="", encoding="utf-8") as handle:
            return sum(verdict in (None, row["verdict"]) for row in csv.DictReader(handle))

    def recorded(self, file: str, *keys: str) -> str:
        """A value of a file's metadata, such as recorded("ladder", "software", "torch")."""
        value = json.loads((self._folder / f"{file}.json").read_text())
        for key in keys:
            value = value[key]
        return str(value)

    def day(self, file: str) -> str:
        return self.recorded(file, "date")[:10]

    # Tables

    def table(self, name: str) -> str:
        """A Markdown table by its name. Raises KeyError for an unknown one."""
        return _TABLES[name](self)

    # Files

    def _shape(self, case: str) -> LadderShape:
        found = self._cases[case]
        return LadderShape(found.B, found.T, found.Hq, found.Hv, found.initial_state, SMS)

    def _plan(self, case: str):
        return PACKAGE_CORE.plan({}, self._shape(case))

    @functools.cached_property
    def _cases(self) -> dict[str, Case]:
        return {case.name: case for case in load_cases()}

    @functools.cached_property
    def _workloads(self) -> dict[str, object]:
        return {work.name: work for work in select_workloads()}

    def _rows(self, name: str) -> list[Row]:
        if name not in self._read:
            path = self._folder / f"{name}.csv"
            if not path.is_file():
                raise NotRecordedError(f"{path.name} is not recorded")
            self._read[name] = read_rows(path)
        return self._read[name]

    def _table(self, name: str) -> list[dict[str, str]]:
        """The rows of a CSV of another kind; none where it is not recorded."""
        path = self._folder / f"{name}.csv"
        if not path.is_file():
            return []
        with path.open(newline="", encoding="utf-8") as handle:
            return list(csv.DictReader(handle))

    def _of_case(self, name: str, case: str) -> dict[str, str]:
        """The row of a case or workload."""
        for row in self._table(name):
            if row["case"] == case:
                return row
        raise NotRecordedError(f"{name}.csv has no {case}")

    def _counted(self, version: str, case: str) -> dict[str, float]:
        if (version, case) not in self._counters:
            raise NotRecordedError(f"no counters of {version} on {case}")
        return self._counters[version, case]

    def _round(self, number: int) -> dict[tuple[str, str], float]:
        rows = self._table(f"rounds/resident_round{number}")
        return {(row["variant"], row["shape"]): float(row["median_us"]) for row in rows}

    @functools.cached_property
    def _counters(self) -> dict[tuple[str, str], dict[str, float]]:
        longest: dict[tuple[str, str], dict[str, float]] = {}
        for (version, case, _, _), counters in by_kernel(
            read_metrics(self._folder / "metrics.csv")
        ).items():
            known = longest.get((version, case), {}).get("duration", 0.0)
            if counters["duration"] > known:
                longest[version, case] = counters
        return longest

    @functools.cached_property
    def _sheet(self):
        rows = [row for name in ("bench", "score") for row in self._rows(name)]
        recorded = standings_of_rows(rows, OURS)
        seen = {key[0] for key in recorded.latest}
        hidden = [case for case in select_cases(hidden_seed=0) if case.name in seen]
        baselines = load_baselines(self._device)
        return recorded_sheet([*self._cases.values(), *hidden], recorded, baselines)

    def _emulated(self, version: str) -> dict[str, str]:
        rows = json.loads((self._emulator / "versions.json").read_text())["rows"]
        return next(row for row in rows if row["version"] == version)


def _median(
    rows: Iterable[Row], wanted: tuple[str, ...], described: Callable[[Row], tuple]
) -> float:
    """The median of the one row so described; NotRecordedError without one, LookupError untimed."""
    for row in rows:
        if described(row) == wanted:
            if row.median_ms is None:
                raise LookupError(f"{row.implementation} {row.version} is {row.correctness}")
            return row.median_ms
    raise NotRecordedError(f"nothing recorded of {' '.join(wanted)}")


def _markdown(header: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    lines = [list(header), *(list(row) for row in rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def _ms(value: Callable[[], float]) -> str:
    try:
        return f"{value():.4f}"
    except LookupError:
        return ""


def _or_pending(value: Callable[[], float], decimals: int) -> str:
    """The value, or what stands where it is not recorded yet."""
    try:
        return f"{value():.{decimals}f}"
    except NotRecordedError:
        return f"n.{'n' * decimals}"


def _opcode(instruction: str) -> str:
    """Of a line of SASS, its predicate left out."""
    return re.sub(r"^@!?\w+\s+", "", instruction.strip())


def _times(derive: Derivations) -> str:
    """Every version on every public case."""
    names = [version.name for version in VERSIONS]
    rows = []
    for name in [*names, SHIPPED]:
        times = [_ms(lambda n=name, c=case: derive.ladder(n, c)) for case in derive._cases]
        if any(times):
            rows.append((f"**{name}**" if name == SHIPPED else name, *times))
    return _markdown(("ms", *derive._cases), rows)


def _shapes(derive: Derivations) -> str:
    """What a GPU of 132 SMs sees of the public cases."""
    rows = []
    for name, case in derive._cases.items():
        ctas = [case.state_heads * HEAD_DIM // tile for tile in (128, 64, 32)]
        floors = [f"{derive.floor(name, what):.4f}" for what in ("tensor", "memory")]
        plan = derive.tile(SHIPPED, name), derive.segments(name), derive.ctas(SHIPPED, name)
        rows.append((name, case.state_heads, case.chunks, *ctas, *plan, *floors))
    header = ("case", "states", "chunks", "CTAs at 128", "at 64", "at 32")
    shipped = ("shipped: tile", "segments", "CTAs")
    return _markdown((*header, *shipped, "tensor floor, ms", "memory floor, ms"), rows)


def _chunks(derive: Derivations) -> str:
    """Microseconds a chunk on long_low_gva and wide_gva_state, beside the tensor cores' share."""
    rows = []
    for name in ("v1", "v2", "v2b", "v3", "v6", "v7", "v15", "v20", "four_group", "resident"):
        cells = []
        for case in ("long_low_gva", "wide_gva_state"):
            tile = derive.tile(name, case)
            forms_w = name in ("v1", "v2", "v2b", "v3")
            time = _or_pending(lambda n=name, c=case: derive.chunk_us(n, c), 2)
            cells += [tile, derive.ctas(name, case), time]
            cells.append(f"{derive.tensor_us(tile, forms_w):.2f}")
        rows.append((name, *cells))
    columns = ("tile", "CTAs", "us a chunk", "tensor us")
    header = [f"{case}: {column}" for case in ("long", "wide") for column in columns]
    return _markdown(("version", *header), rows)


COUNTERS = {
    "duration": ("us", 1e-3, 1),
    "tensor_active": ("tensor pipe %", 1, 1),
    "issue_active": ("issue %", 1, 1),
    "occupancy": ("occupancy %", 1, 1),
    "dram_throughput": ("DRAM %", 1, 1),
    "blocks": ("CTAs", 1, 0),
    "registers_per_thread": ("registers", 1, 0),
    "shared_memory_per_block": ("shared KB", 1 / 1024, 0),
}
STALLS = ("long_scoreboard", "barrier", "short_scoreboard", "wait")


def _counters(derive: Derivations) -> str:
    """What ncu counted, by version and case."""
    rows = []
    for case in ("long_low_gva", "wide_gva_state"):
        for version in PROFILED:
            if (version, case) not in derive._counters:
                continue
            values = [
                f"{derive.counter(version, case, name) * factor:.{digits}f}"
                for name, (_, factor, digits) in COUNTERS.items()
            ]
            stalls = [f"{derive.stall(version, case, reason):.1f}" for reason in STALLS]
            rows.append((case, version, *values, *stalls))
    header = [label for label, *_ in COUNTERS.values()]
    return _markdown(
        ("case", "version", *header, *(f"{reason.replace('_', ' ')} %" for reason in STALLS)), rows
    )


def _peers(derive: Derivations) -> str:
    """The peers' times over ours, kernels alone: above 1 where this package is faster."""
    names = {
        CORE: ("flash_qla_nocp", "flash_qla"),
        FULL: ("flash_qla", "flashinfer_one_kernel", "flashinfer_split", "fla"),
    }
    columns = [(scope, name) for scope in SCOPES for name in names[scope]]
    rows = [
        (case, *(f"{derive.peer_ratio(name, case, scope):.2f}" for scope, name in columns))
        for case in derive._cases
    ]
    means = (f"**{derive.mean_peer_ratio(name, scope):.2f}**" for scope, name in columns)
    rows.append(("geometric mean", *means))
    return _markdown(("over ours", *(f"{scope}: {name}" for scope, name in columns)), rows)


def _operator(derive: Derivations) -> str:
    """The operator beside the peers, in milliseconds; empty where one was not right or not run."""

    def cell(name: str, workload: str) -> str:
        try:
            return _or_pending(lambda: derive.operator(name, workload), 4)
        except LookupError:
            return ""

    rows = [(work, *(cell(name, work) for name in COMPARED)) for work in derive._workloads]
    return _markdown(("ms", *COMPARED), rows)


def _core(derive: Derivations) -> str:
    """The core of this release and FlashQLA's on the public cases, kernels alone."""
    names = {"ours": OURS, "FlashQLA": "flash_qla", "FlashQLA, no split": "flash_qla_nocp"}
    rows = [
        (
            case,
            *(_or_pending(lambda c=case, n=n: derive.core(n, c), 4) for n in names.values()),
            _or_pending(lambda c=case: derive.core_clock(c), 0),
        )
        for case in derive._cases
    ]
    return _markdown(("core, ms", *names, "SM clock, MHz"), rows)


def _scores(derive: Derivations) -> str:
    """The recorded score sheet."""
    rows = [
        (
            line.case,
            line.status.value,
            f"{line.median_ms:.4f}",
            f"{line.t100_ms:.4f}",
            f"{line.score:.2f}",
            "" if line.core_over_core is None else f"{line.core_over_core:.2f}",
            "" if line.full_over_full is None else f"{line.full_over_full:.2f}",
        )
        for line in derive._sheet.lines
    ]
    header = ("case", "result", "ms", "t100 ms", "points", "core over core", "full over full")
    return _markdown(header, rows)


_TABLES: dict[str, Callable[[Derivations], str]] = {
    "times": _times,
    "shapes": _shapes,
    "chunks": _chunks,
    "counters": _counters,
    "peers": _peers,
    "operator": _operator,
    "core": _core,
    "scores": _scores,
}
