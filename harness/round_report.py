"""What a round of optimisation found, and its report in Markdown."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cases import Case

from .check import Status
from .device import ceilings, pick_device, throttled
from .evaluate import Outcome
from .floors import floor_ms
from .implementations import CORE
from .results import SHIPPED
from .score import geometric_mean
from .tables import fixed
from .timing import Protocol, Sample, paired_ratio

GATES = ("edge", "public", "hidden", "race")
# Less than this is not called a gain or a loss.
NOISE = 0.02
SHOWN_COUNTERS = {
    "duration": ("duration, us", 1e-3),
    "tensor_active": ("tensor pipe active, %", 1),
    "issue_active": ("issue slots used, %", 1),
    "occupancy": ("occupancy, %", 1),
    "dram_throughput": ("DRAM throughput, %", 1),
    "l2_throughput": ("L2 throughput, %", 1),
    "registers_per_thread": ("registers a thread", 1),
    "shared_memory_per_block": ("shared memory a block, KB", 1 / 1024),
    "blocks": ("blocks", 1),
}
SHOWN_STALLS = 4


@dataclass(frozen=True)
class Gate:
    """One check of the changed kernel; status None: not run here, the reason says why."""

    gate: str
    case: str
    status: Status | None
    reason: str = ""


def failed(gates: Sequence[Gate]) -> list[Gate]:
    """Those that ran and did not pass."""
    return [gate for gate in gates if gate.status not in (None, Status.PASS)]


@dataclass(frozen=True)
class Timing:
    """Baseline and change on one case, timed in turn."""

    case: Case
    baseline: Outcome
    change: Outcome

    @property
    def ratio(self) -> float | None:
        """Time of the change over the baseline's, paired; below 1 is faster."""
        if self.baseline.sample is None or self.change.sample is None:
            return None
        return paired_ratio(self.change.sample, self.baseline.sample)


@dataclass(frozen=True)
class Round:
    """Everything the report says.

    counters: (version, case) -> recorded name -> value; command: what would take them.
    """

    baseline: str
    change: str
    prediction: str
    metadata: Mapping[str, object]
    gates: Sequence[Gate]
    timings: Sequence[Timing]
    counters: Mapping[tuple[str, str], Mapping[str, float]]
    notes: Sequence[str] = ()
    command: str = ""

    @property
    def passed(self) -> bool:
        return not failed(self.gates)

    @property
    def ratio(self) -> float | None:
        """Geometric mean over the cases, None unless all of them were timed."""
        ratios = [timing.ratio for timing in self.timings]
        return None if None in ratios else geometric_mean(ratios)

    @property
    def outcome(self) -> str:
        """The verdict in a sentence; the numbers decide, not the prediction."""
        if not self.passed:
            wrong = len(failed(self.gates))
            return f"Rejected: {wrong} of {len(self.gates)} gates failed. Nothing was measured."
        if self.ratio is None:
            return "Undecided: the gates that ran passed, and no time was taken."
        change = f"{abs(1 - self.ratio):.1%}"
        if self.ratio < 1 - NOISE:
            return f"Faster by {change} in the geometric mean: worth a place above its baseline."
        if self.ratio > 1 + NOISE:
            return f"Slower by {change} in the geometric mean: it stays in the ladder as a loser."
        return f"Within {NOISE:.0%} of its baseline ({self.ratio - 1:+.1%}): no gain to keep."


def render(done: Round) -> str:
    """The report."""
    parts = [
        f"# {done.change} against {done.baseline}",
        _about(done.change),
        f"**Prediction.** {done.prediction}",
        f"**Outcome.** {done.outcome}",
        "## Gates",
        _gates(done.gates),
        "## Kernel time",
        _times(done),
        "## Counters",
        _counters(done),
        "## How",
        _environment(done.metadata),
    ]
    if done.notes:
        parts += ["## Left open", "\n".join(f"* {text}" for text in done.notes)]
    return "\n\n".join(parts) + "\n"


def _about(version: str) -> str:
    if version == SHIPPED or ":" in version:
        return f"`{version}`"
    from gdn_ladder import get_version

    row = get_version(version)
    settings = row.settings_text()
    return f"{row.idea}" + (f" (`{settings}`)" if settings else "")


def _gates(gates: Sequence[Gate]) -> str:
    lines = []
    for name in GATES:
        own = [gate for gate in gates if gate.gate == name]
        ran = [gate for gate in own if gate.status is not None]
        if own:
            passed = sum(gate.status is Status.PASS for gate in ran)
            lines.append((name, f"{passed} of {len(ran)} pass", f"{len(own) - len(ran)} not run"))
    text = _table(("gate", "result", ""), lines)
    idle = [gate for gate in gates if gate.status is None]
    for gate in failed(gates):
        text += f"\n\n* {gate.case}: {gate.status}: {gate.reason.splitlines()[0]}"
    if idle:
        text += "\n\nNot run: " + "; ".join(f"{gate.case} ({gate.reason})" for gate in idle) + "."
    return text


def _times(done: Round) -> str:
    if not done.passed:
        return "Not measured: a gate failed."
    if all(timing.ratio is None for timing in done.timings):
        reasons = {
            outcome.reason
            for timing in done.timings
            for outcome in (timing.baseline, timing.change)
            if outcome.reason
        }
        why = "; ".join(sorted(reasons)) or str(done.metadata["untimed"])
        return f"Not measured: {why}."
    rows = []
    for timing in done.timings:
        before, after = timing.baseline.sample, timing.change.sample
        rows.append(
            (
                timing.case.name,
                fixed(before.median_ms if before else None, 6) or timing.baseline.status,
                _spread(before),
                fixed(after.median_ms if after else None, 6) or timing.change.status,
                _spread(after),
                fixed(timing.ratio, 3),
                _share(timing),
            )
        )
    header = ("case", done.baseline, "p20 to p80", done.change, "p20 to p80", "ratio", "floor")
    text = _table(header, rows)
    if done.ratio is not None:
        text += f"\n\nGeometric mean of the paired ratios: {done.ratio:.3f}."
    slow = _slow_clocks(done)
    if slow:
        text += "\n\n" + "\n".join(slow)
    return text + (
        "\n\nMilliseconds of one launch, CUDA Graph replay, the two in turn, from rest; ratio:"
        " change over baseline, paired round by round; floor: the share of the change's time that"
        " the datasheet's tensor rate needs."
    )


def _slow_clocks(done: Round) -> list[str]:
    """A line for every time that was not taken at the fastest clock."""
    lines = []
    for timing in done.timings:
        for name, side in ((done.baseline, timing.baseline), (done.change, timing.change)):
            said = throttled(side.clock_mhz)
            if said:
                lines.append(f"* {timing.case.name}, {name}: {said}")
    return lines


def _spread(sample: Sample | None) -> str:
    return f"{sample.p20_ms:.6f} to {sample.p80_ms:.6f}" if sample else ""


def _share(timing: Timing) -> str | None:
    rates = ceilings(pick_device())
    if rates is None or timing.change.sample is None:
        return None
    floor = floor_ms(timing.case, CORE, Protocol.GRAPH, rates)
    return f"{floor / timing.change.sample.median_ms:.1%}"


def _counters(done: Round) -> str:
    if not done.counters:
        return f"Not taken. Where there are ncu and a GPU: `{done.command}`"
    blocks = []
    for case in dict.fromkeys(case for _, case in done.counters):
        sides = [done.counters.get((name, case), {}) for name in (done.baseline, done.change)]
        stalls = {name for side in sides for name in side if name.startswith("stall_")}
        stalls -= {"stall_selected", "stall_not_selected"}
        worst = sorted(stalls, key=lambda name: -max(side.get(name, 0.0) for side in sides))
        shown = {
            **SHOWN_COUNTERS,
            **{name: (name.replace("_", " ", 1), 1) for name in worst[:SHOWN_STALLS]},
        }
        rows = [
            (label, *(f"{side[name] * factor:.4g}" if name in side else "" for side in sides))
            for name, (label, factor) in shown.items()
        ]
        blocks.append(_table((case, done.baseline, done.change), rows))
    return "\n\n".join(blocks) + (
        "\n\nThe longest kernel of a call; stalls in warps waiting for each instruction issued."
        " ncu flushes the caches before each pass: its durations are not those above."
    )


def _environment(metadata: Mapping[str, object]) -> str:
    software = ", ".join(f"{name} {value}" for name, value in metadata["software"].items() if value)
    clocks = metadata.get("clocks_after") or {}
    shown = ", ".join(f"{name} {value}" for name, value in clocks.items())
    lines = [
        f"* device {metadata['device']}, {metadata['date']}, revision {metadata['revision']}",
        f"* `{metadata['command']}`",
        f"* {software}",
    ]
    return "\n".join(lines + ([f"* after the run: {shown}"] if shown else []))


def _table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    def line(cells: Sequence[object]) -> str:
        return "| " + " | ".join("" if cell is None else str(cell) for cell in cells) + " |"

    return "\n".join([line(header), line(["---"] * len(header)), *map(line, rows)])
