"""Measures the operator beside the peers: the public shapes and packed batches, graph replay.

    python -m harness.bench_operator                  into results/<device>/operator.csv
    python -m harness.bench_operator --host           and what our calls cost the host
    python -m harness.bench_operator --case packed_mixed_state --implementation fla --budget 60

Every implementation has a process of its own. All draw a workload and solve it in float64 side by
side; one after the other is then bound, checked and captured. Then the device rests, and they are
timed in turn, a few replays each a round. One that crashes loses that workload, and after two
crashes the rest, one that gives no answer in time all the rest; the others go on. Workloads that
--budget has no time for are named and left out.
"""

import argparse
import csv
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cases import load_cases, load_packed

from .check import Status
from .child import Child, ChildError, LateError
from .device import pick_device, why_untimed
from .evaluate import Outcome
from .implementations import FULL, OURS, OURS_LAB, get
from .operator_child import LIMIT, Workload, to_json
from .options import seconds
from .progress import Progress, note
from .results import RESULTS, Recorder, Stamp, finish_metadata, write_table
from .score import geometric_mean
from .tables import fixed, render
from .timing import REST_S, Protocol, median_known, paired_ratio

NAME, HOST_NAME = "operator", "operator_host"
HOST_SCHEMA = "operator_host"
# A peer's other variants are measured when asked for.
IMPLEMENTATIONS = (OURS, OURS_LAB, "flash_qla", "fla", "flashinfer")
ROUNDS, REPLAYS = 20, 5
BUDGET_S, TIMEOUT_S = 200.0, 60.0
TURN_TIMEOUT_S = 30.0
STRIKES = 2
HEADER = ("WORKLOAD", "IMPLEMENTATION", "RESULT", "MEDIAN(ms)", "P20", "P80", "SM(MHz)")
HEADER += ("OVER OURS", "L2 OUTPUT", "L2 STATE")

Errors = dict[str, dict[str, list[float]]]  # workload -> implementation -> output, final states


@dataclass
class Contender:
    """An implementation with its process; strikes: how often that failed, up to STRIKES."""

    name: str
    cpu: bool
    version: str = "unknown"
    strikes: int = 0
    child: Child = field(init=False)

    def __post_init__(self) -> None:
        self.child = Child("harness.operator_child", self.cpu)

    def ask(self, timeout_s: float, **job: object) -> dict:
        self.child.send(job)
        return self.child.receive(timeout_s)


@dataclass
class Measured:
    """What came of one implementation on one workload; clocks_mhz: the SMs' in each turn."""

    contender: Contender
    status: Status = Status.PASS
    reason: str = ""
    relative_l2: list[float] = field(default_factory=list)
    times_ms: list[float] = field(default_factory=list)
    clocks_mhz: list[float | None] = field(default_factory=list)

    @property
    def ready(self) -> bool:
        return self.status is Status.PASS

    def fail(self, error: ChildError) -> None:
        late = isinstance(error, LateError)
        self.contender.strikes += STRIKES if late else 1
        self.status = Status.TIMEOUT if late else Status.ERROR
        self.reason = str(error)

    def outcome(self, workload: Workload, protocol: Protocol) -> Outcome:
        return Outcome(
            workload.name,
            self.contender.name,
            self.contender.version,
            FULL,
            protocol.value,
            self.status,
            self.reason,
            tuple(self.times_ms) if self.ready else (),
            clock_mhz=median_known(self.clocks_mhz) if self.ready else None,
        )

    def ask(self, **job: object) -> dict:
        """What its process answers in its turn; nothing where that failed."""
        try:
            return self.contender.ask(TURN_TIMEOUT_S, **job)
        except ChildError as error:
            self.fail(error)
            return {}


@dataclass(frozen=True)
class Effort:
    """How much is measured, and how long it may take."""

    protocol: Protocol = Protocol.GRAPH
    rounds: int = ROUNDS
    replays: int = REPLAYS
    timeout_s: float = TIMEOUT_S


def measure(workload: Workload, contenders: Sequence[Contender], effort: Effort) -> list[Measured]:
    """Draws a workload in all processes at once, makes each implementation ready by itself, as some
    tune themselves by the clock, then times those that are right in turn, from rest.
    """
    job = {"do": "draw", "workload": to_json(workload), "protocol": effort.protocol.value}
    found = []
    for contender in contenders:
        one = Measured(contender)
        found.append(one)
        if contender.strikes >= STRIKES:
            one.status, one.reason = Status.ERROR, "given up: it hung or crashed before"
            continue
        contender.child.send({**job, "implementation": contender.name, "cpu": contender.cpu})
    deadline = time.monotonic() + effort.timeout_s
    for one in found:
        if one.ready:
            _admit(one, deadline - time.monotonic())
    for one in found:
        if one.ready:
            one.contender.child.send({"do": "prepare"})
            _admit(one, effort.timeout_s)
    if any(one.ready and not one.contender.cpu for one in found):
        time.sleep(REST_S)
    for one in found:
        if one.ready:
            one.ask(do="warm")
    for number in range(effort.rounds):
        for one in _rotated([one for one in found if one.ready], number):
            turn = one.ask(do="time", replays=effort.replays)
            one.times_ms += turn.get("times_ms", [])
            one.clocks_mhz.append(turn.get("clock_mhz"))
    return found


def _admit(one: Measured, timeout_s: float) -> None:
    """Waits for the answer to what was sent, and goes by it."""
    try:
        answer = one.contender.child.receive(max(0.0, timeout_s))
    except ChildError as error:
        one.fail(error)
        return
    one.contender.version = answer.get("version", one.contender.version)
    one.status, one.reason = Status(answer["status"]), answer.get("reason", "")
    one.relative_l2 = answer.get("relative_l2", [])


def _rotated(items: list[Measured], by: int) -> list[Measured]:
    by %= max(len(items), 1)
    return items[by:] + items[:by]


def host_times(found: Sequence[Measured]) -> dict[str, float]:
    """What a call of ours costs the host, in microseconds; nothing where it was not right."""
    for one in found:
        if one.contender.name == OURS and one.ready:
            try:
                return one.contender.ask(TURN_TIMEOUT_S, do="host")["us"]
            except ChildError as error:
                one.contender.strikes += 1
                note(f"no host times: {error}")
    return {}


def run(
    workloads: Sequence[Workload],
    contenders: Sequence[Contender],
    effort: Effort,
    budget_s: float,
    record: Callable[[Workload, list[Measured]], None],
    host: Callable[[Workload, dict[str, float]], None] | None = None,
) -> list[Workload]:
    """Measures the workloads within the budget; returns those that there was no time for.

    record and host are told what came of each as it is done.
    """
    start, needed = time.monotonic(), 0.0
    progress = Progress("workload")
    left_out = []
    try:
        for workload in progress.over(workloads):
            begun = time.monotonic()
            if begun - start + needed > budget_s:
                left_out.append(workload)
                continue
            progress.say(workload.name)
            found = measure(workload, contenders, effort)
            record(workload, found)
            if host is not None:
                host(workload, host_times(found))
            if not any(one.status is Status.TIMEOUT for one in found):
                needed = time.monotonic() - begun
    finally:
        for contender in contenders:
            contender.child.close()
    return left_out


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 only if this package's operator is right everywhere; 2 for senseless arguments."""
    parser = _parser()
    options = parser.parse_args(argv)
    names = options.implementation or list(IMPLEMENTATIONS)
    try:
        workloads = select_workloads(options.case)
        for name in names:
            if FULL not in get(name).scopes:
                raise ValueError(f"implementation {name} has no full forward")
    except ValueError as error:
        parser.error(str(error))
    device = pick_device()
    untimed = why_untimed(device)
    if untimed:
        note(f"nothing can be benchmarked here: {untimed}")
        return 1
    effort = Effort(Protocol(options.protocol), options.rounds, options.replays, options.timeout)
    stamp = Stamp.now(device)
    log = Log(effort, Recorder(options.name, stamp, options.merge) if options.name else None)
    hosts: list[dict] = []

    def host(workload: Workload, us: dict[str, float]) -> None:
        if us:
            hosts.append({"case": workload.name} | {n: round(t, 2) for n, t in us.items()})
            if options.name:
                write_hosts(hosts, log.metadata, stamp.device, merge=options.merge)

    contenders = [Contender(name, device.type == "cpu") for name in dict.fromkeys(names)]
    left_out = run(
        workloads, contenders, effort, options.budget, log.add, host if options.host else None
    )
    if left_out:
        note(f"no time for {', '.join(workload.name for workload in left_out)}: raise --budget")
    print(log.report(), end="")
    for row in hosts:
        print("host us:", *(f"{name} {value}" for name, value in row.items()))
    return 0 if log.ours_right and not left_out else 1


def select_workloads(wanted: Sequence[str] = ()) -> list[Workload]:
    """The public cases and the packed batches, or some of them. Raises ValueError for a name."""
    known: dict[str, Workload] = {work.name: work for work in [*load_cases(), *load_packed()]}
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ValueError(f"no workload named {', '.join(unknown)}; there are: {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(wanted or known)]


@dataclass
class Log:
    """Collects what was measured, records it as it comes and reports it at the end."""

    effort: Effort
    recorder: Recorder | None = None
    outcomes: list[Outcome] = field(default_factory=list)
    errors: Errors = field(default_factory=dict)
    workloads: list[dict] = field(default_factory=list)

    def add(self, workload: Workload, found: list[Measured]) -> None:
        """What came of a workload; written at once."""
        outcomes = [one.outcome(workload, self.effort.protocol) for one in found]
        self.outcomes += outcomes
        self.errors[workload.name] = {
            one.contender.name: one.relative_l2 for one in found if one.relative_l2
        }
        self.workloads.append(to_json(workload))
        for outcome in outcomes:
            if outcome.reason:
                note(f"{workload.name}: {outcome.implementation}: {outcome.reason}")
        if self.recorder is not None:
            self.recorder.add(outcomes, **self._more)

    @property
    def _more(self) -> dict:
        return {
            "protocol": f"{self.effort.protocol}, {self.effort.rounds} rounds in turn of"
            f" {self.effort.replays} calls after {REST_S} s of rest, each implementation in a"
            " process of its own",
            "limit_relative_l2": LIMIT,
            "relative_l2": self.errors,
            "workloads": self.workloads,
        }

    @property
    def metadata(self) -> dict:
        return {} if self.recorder is None else self.recorder.metadata

    @property
    def ours_right(self) -> bool:
        ours = [o for o in self.outcomes if o.implementation == OURS]
        return all(outcome.status is Status.PASS for outcome in ours)

    def report(self) -> str:
        """A line a workload and implementation, then the geometric means over ours."""
        ours = {o.case: o.sample for o in self.outcomes if o.implementation == OURS}
        rows, ratios = [], {}
        for outcome in self.outcomes:
            sample, beside, ratio = outcome.sample, ours.get(outcome.case), None
            if sample and beside and outcome.implementation != OURS:
                ratio = paired_ratio(sample, beside)
                kind = "packed" if outcome.case.startswith("packed") else "public"
                ratios.setdefault((kind, outcome.implementation), []).append(ratio)
            errors = self.errors[outcome.case].get(outcome.implementation, [])
            rows.append(
                (
                    outcome.case,
                    f"{outcome.implementation} {outcome.version}",
                    outcome.status,
                    fixed(sample.median_ms if sample else None, 6),
                    fixed(sample.p20_ms if sample else None, 6),
                    fixed(sample.p80_ms if sample else None, 6),
                    fixed(sample.clock_mhz if sample else None, 0),
                    fixed(ratio, 3),
                    *(f"{error:.2e}" for error in errors or (math.nan, math.nan)),
                )
            )
        means = [
            (*key, len(values), fixed(geometric_mean(values), 3)) for key, values in ratios.items()
        ]
        text = render(HEADER, rows)
        if means:
            header = ("GEOMETRIC MEAN", "IMPLEMENTATION", "WORKLOADS", "OVER OURS")
            text += "\n" + render(header, means)
        return text


def write_hosts(
    rows: list[dict], metadata: dict, device: str, root: Path = RESULTS, merge: bool = False
) -> Path:
    """Writes results/<device>/operator_host.csv, medians in microseconds, and its metadata.

    merge: keep the rows of other workloads that are there.
    """
    path = root / device / f"{HOST_NAME}.csv"
    if merge and path.is_file():
        new = {row["case"] for row in rows}
        with path.open(newline="", encoding="utf-8") as handle:
            rows = [*(row for row in csv.DictReader(handle) if row["case"] not in new), *rows]
    about = finish_metadata(metadata, unit="us") | {"schema": HOST_SCHEMA}
    write_table(path, list(rows[0]), rows, about)
    return path


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m harness.bench_operator",
        description="Benchmarks the operator against the peers, dense and packed.",
    )
    parser.add_argument("--case", action="append", default=[], metavar="NAME")
    parser.add_argument(
        "--implementation",
        action="append",
        metavar="NAME",
        help=f"repeatable (default: {' '.join(IMPLEMENTATIONS)})",
    )
    parser.add_argument(
        "--protocol", choices=[p.value for p in Protocol], default=Protocol.GRAPH.value
    )
    parser.add_argument("--rounds", type=_count, default=ROUNDS, metavar="N")
    parser.add_argument("--replays", type=_count, default=REPLAYS, metavar="N", help="a round")
    parser.add_argument("--host", action="store_true", help="record what our calls cost the host")
    parser.add_argument(
        "--budget", type=seconds, default=BUDGET_S, metavar="SECONDS", help="for all of it"
    )
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=TIMEOUT_S,
        metavar="SECONDS",
        help="for drawing a workload, and for making one implementation ready, compiling included",
    )
    parser.add_argument(
        "--name", default=NAME, help="results/<device>/NAME.csv; empty: record nothing"
    )
    parser.add_argument(
        "--merge", action="store_true", help="keep the other rows that the file already holds"
    )
    return parser


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
