"""Grades a submission file: the file runs in a child process, the verdict is made here.

The child shares an interpreter with the submission and is not believed. This process draws the
seeds, solves the references, says before each call what its inputs are and after it whether its
outputs are kept, checks the raw outputs itself, and holds its own clock against the reported times.

Around the lab's protocol (the same calls, the same event pairs):
* every call finds new contents in the same buffers (another input set, other signs), its earlier
  outputs and the free memory poisoned; the outputs of calls picked afterwards are checked
* some calls, not counted, find the contents of the call before: a result kept by content is fast
* one call finds its inputs at other addresses
* the device must be idle when a call's time ends, and no thread may go on working
* an SM clock that the child reports must fit what this process saw of the call
"""

import math
import os
import random
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from cases import SEED, Case, make_inputs

from .channel import Channel, ClosedError, ForgedError, LateError, Message
from .check import PASSED, Expected, Status, Verdict, check_values, expected_layout
from .child import ROOT, child_environment, describe_exit
from .device import max_sm_mhz, why_untimed
from .evaluate import Outcome, under_floor
from .implementations import CORE
from .problem import expected_values
from .relay import Relay
from .rotation import draw_signs, flipped_expectations
from .timing import SPIN_CYCLES, Plan, Protocol, median_known, percentile, rest
from .worker import TIMEOUT_S

SUBMISSION = "submission"
SETS = 3
NULL_CALLS = 20
# Calls, beside the counted ones, that find the contents of the call before: written again, or left.
REPEATS = 8
AUDIT_BYTES = 1 << 30
FEWEST_AUDITS = 6
# Without a GPU nothing is reported, so the calls stop when enough of them were seen.
CPU_BUDGET_S = 60.0
CPU_FEWEST = 4
# With fewer counted calls than this, repeated ones are not held against them: chance would decide.
FEWEST_COMPARED = 4
CPU_MOST_AUDITS = 16
# A clock above this share of the device's fastest is none of its clocks: events are not exact.
CLOCK_EXCESS = 1.05
# Percentiles between which times are compared, so that a disturbed call decides nothing.
FEW, MOST = 30, 70


@dataclass(frozen=True)
class Slack:
    """What honest times may differ by, in milliseconds and as a share of the call."""

    clock_ms: float
    clock_share: float
    drain_ms: float
    drain_share: float
    repeat_ms: float
    repeat_share: float
    busy_share: float


GPU_SLACK = Slack(
    clock_ms=0.1,
    clock_share=0.5,
    drain_ms=0.02,
    drain_share=0.1,
    repeat_ms=0.02,
    repeat_share=0.6,
    busy_share=0.1,
)
# A shared two-core machine preempts for milliseconds.
CPU_SLACK = Slack(
    clock_ms=5.0,
    clock_share=0.5,
    drain_ms=5.0,
    drain_share=0.5,
    repeat_ms=1.0,
    repeat_share=0.4,
    busy_share=0.1,
)


@dataclass(frozen=True)
class _Contents:
    """Which input set and which signs the buffers hold, and which buffers."""

    set: int
    seed: int
    where: str = "usual"


@dataclass(frozen=True)
class _Call:
    """One call as reported by the child and as clocked here (seen_ms).

    clock_mhz: of the SMs before the call, None where the protocol does not take it.
    """

    ms: float
    drain_ms: float
    seen_ms: float
    threads: int
    clock_mhz: float | None = None


@dataclass(frozen=True)
class _Inspection:
    """What the child found when asked: replaced names, extra threads' work, the stream."""

    changed: tuple[str, ...]
    busy_ms: float
    stream_unchanged: bool

    @classmethod
    def parse(cls, fields: dict) -> "_Inspection":
        try:
            return cls(
                changed=tuple(str(name) for name in fields["changed"]),
                busy_ms=float(fields["busy_ms"]),
                stream_unchanged=fields["stream_unchanged"] is True,
            )
        except (KeyError, TypeError, ValueError):
            raise ForgedError(f"an inspection without its findings: {fields}") from None


@dataclass
class _Record:
    """The calls of a trial by what their inputs were."""

    null: list[_Call] = field(default_factory=list)
    fresh: list[_Call] = field(default_factory=list)
    rewritten: list[_Call] = field(default_factory=list)
    untouched: list[_Call] = field(default_factory=list)


class _Failure(Exception):
    """Ends a trial with a verdict."""

    def __init__(self, status: Status, reason: str) -> None:
        super().__init__(reason)
        self.verdict = Verdict(status, reason)


def judge(
    path: str | Path,
    case: Case,
    plan: Plan,
    device: torch.device,
    backend: str = "auto",
    timeout_s: float = TIMEOUT_S,
    progress: Callable[[str], None] = lambda _: None,
) -> Outcome:
    """Grades the submission at `path` on `case`; always returns, whatever the file does.

    Times are given for a PASS on a GPU only. Raises FileNotFoundError if there is no such file.
    """
    path = Path(path).resolve()
    if not path.is_file():
        raise FileNotFoundError(f"submission {path} does not exist")
    record = _Record()
    trial = _Trial(path, case, plan, device, backend, timeout_s, record, progress)
    try:
        trial.run()
        verdict = PASSED
    except _Failure as failure:
        verdict = failure.verdict
    except LateError:
        verdict = Verdict(Status.TIMEOUT, f"not done within {timeout_s:g} s")
    except ForgedError as error:
        verdict = Verdict(Status.SUSPECT, f"it spoke to the judge itself: {error}")
    except ClosedError:
        verdict = Verdict(Status.ERROR, trial.obituary())
    finally:
        trial.close()
    timed = verdict.passed and not why_untimed(device)
    return Outcome(
        case=case.name,
        implementation=path.stem,
        version=SUBMISSION,
        scope=CORE,
        protocol=plan.protocol.value,
        status=verdict.status,
        reason=verdict.reason,
        times_ms=tuple(call.ms for call in record.fresh) if timed else (),
        clock_mhz=_clock(record.fresh) if timed else None,
    )


class _Trial:
    """The child of one submission on one case, and the questions put to it."""

    def __init__(
        self,
        path: Path,
        case: Case,
        plan: Plan,
        device: torch.device,
        backend: str,
        timeout_s: float,
        record: _Record,
        progress: Callable[[str], None],
    ) -> None:
        self._case, self._plan, self._device = case, plan, device
        self._record, self._progress = record, progress
        self._random = random.SystemRandom()
        self._deadline = time.monotonic() + timeout_s
        self._contents = _Contents(0, 0)
        self._kept: dict[str, _Contents] = {}
        self._layouts = expected_layout(case)
        self._payload = sum(_bytes(layout) for layout in self._layouts)
        self._seeds = [SEED, *(self._random.getrandbits(31) for _ in range(SETS - 1))]
        nonce = secrets.token_hex(16)
        child_reads, write_fd = os.pipe()
        read_fd, child_writes = os.pipe()
        self._descriptors = (read_fd, write_fd)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "harness.judge_child", str(child_reads), str(child_writes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=(child_reads, child_writes),
            cwd=ROOT,
            env=child_environment(device.type == "cpu"),
            start_new_session=True,
        )
        os.close(child_reads)
        os.close(child_writes)
        self._relay = Relay(self._process.stderr, f"{SUBMISSION}: ")
        self._channel = Channel(read_fd, write_fd, nonce)
        self._process.stdin.write(f"{nonce}\n".encode())
        self._process.stdin.close()
        self._job = {
            "case": asdict(case),
            "device": str(device),
            "submission": str(path),
            "protocol": plan.protocol.value,
            "seeds": self._seeds,
            "backend": backend,
        }

    def close(self) -> None:
        """Ends the child and all it started."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._relay.close()
        for descriptor in self._descriptors:
            os.close(descriptor)

    def obituary(self) -> str:
        """How the child ended, in words."""
        try:
            return describe_exit(self._process.wait(timeout=10))
        except subprocess.TimeoutExpired:
            return "it closed its pipe to the judge"

    def run(self) -> None:
        """Raises a _Failure that holds the verdict, or a ChannelError; returning means PASS."""
        self._channel.send("job", **self._job)
        self._progress("references")
        self._expected = [
            expected_values(make_inputs(self._case, self._device, seed)) for seed in self._seeds
        ]
        self._answer("prepared")
        for _ in range(NULL_CALLS):
            self._refresh()
            self._record.null.append(self._go())
        self._progress("first call")
        self._ask("load", "loaded")
        self._audited_call()
        if self._plan.protocol is not Protocol.OJ and self._device.type == "cuda":
            self._ask("capture", "captured")
            self._audited_call()
        self._progress("warm-up")
        rest(self._device, self._plan.rest_s)
        for _ in range(self._plan.warmup - 1):
            self._refresh()
            self._go()
        self._progress("timed calls")
        self._timed_calls()
        self._audited_call(where="moved")
        self._progress("checking outputs")
        inspection = _Inspection.parse(self._ask("inspect", "inspected").fields)
        for tag in list(self._kept):
            self._check(tag)
        self._suspect(inspection)
        self._ask("end", "ended")

    def _timed_calls(self) -> None:
        schedule = ["fresh"] * self._plan.repetitions
        schedule += ["rewritten"] * REPEATS + ["untouched"] * REPEATS
        self._random.shuffle(schedule)
        audited = set(self._random.sample(range(len(schedule)), self._audits(len(schedule))))
        started = time.monotonic()
        self._ask("range", "ranged")
        for index, kind in enumerate(schedule):
            if self._enough(index, started):
                break
            if kind == "fresh":
                self._refresh()
            else:
                self._refresh(self._contents, write=kind == "rewritten")
            getattr(self._record, kind).append(self._go())
            if index in audited:
                self._keep(f"{kind} {index}")

    def _audits(self, calls: int) -> int:
        """How many calls' outputs are kept: as many as memory allows."""
        most = calls if self._device.type == "cuda" else CPU_MOST_AUDITS
        return min(calls, most, max(FEWEST_AUDITS, AUDIT_BYTES // self._payload))

    def _enough(self, index: int, started: float) -> bool:
        if self._device.type == "cuda" or time.monotonic() - started < CPU_BUDGET_S:
            return False
        seen = self._record
        return all(len(s) >= CPU_FEWEST for s in (seen.fresh, seen.rewritten, seen.untouched))

    def _audited_call(self, where: str = "usual") -> None:
        """A call whose outputs are checked at once."""
        self._refresh(where=where)
        self._go()
        tag = f"{where} call"
        self._keep(tag)
        self._check(tag)

    def _refresh(
        self, contents: _Contents | None = None, write: bool = True, where: str = "usual"
    ) -> None:
        if contents is None:
            contents = _Contents(self._random.randrange(SETS), self._random.getrandbits(31), where)
        self._contents = contents
        self._ask("refresh", "ready", **asdict(contents), write=write)

    def _go(self) -> _Call:
        start = time.perf_counter_ns()
        done = self._ask("go", "done", replay=self._contents.where == "usual").fields
        seen_ms = (time.perf_counter_ns() - start) / 1e6
        try:
            return _Call(
                ms=float(done["ms"]),
                drain_ms=float(done["drain_ms"]),
                seen_ms=seen_ms,
                threads=int(done["threads"]),
                clock_mhz=None if done["clock_mhz"] is None else float(done["clock_mhz"]),
            )
        except (KeyError, TypeError, ValueError):
            raise ForgedError(f"a report without its times: {done}") from None

    def _keep(self, tag: str) -> None:
        self._ask("keep", "kept", tag=tag)
        self._kept[tag] = self._contents

    def _check(self, tag: str) -> None:
        """Fetches kept outputs and checks them against the reference."""
        contents = self._kept.pop(tag)
        payload = self._ask("send", "outputs", limit=self._payload, tag=tag).payload
        if len(payload) != self._payload:
            raise ForgedError(f"outputs of {len(payload)} bytes, must be {self._payload}")
        signs = draw_signs(self._case, contents.seed, self._device)
        expected = flipped_expectations(*self._expected[contents.set], signs)
        offset = 0
        for layout, values in zip(self._layouts, expected, strict=True):
            size = _bytes(layout)
            raw = torch.frombuffer(bytearray(payload[offset : offset + size]), dtype=layout.dtype)
            actual = raw.reshape(layout.shape).to(self._device)
            verdict = check_values(layout.name, actual, values, self._case.rtol, self._case.atol)
            if not verdict.passed:
                seed = self._seeds[contents.set]
                raise _Failure(verdict.status, f"{verdict.reason}; {tag}, inputs of seed {seed}")
            offset += size

    def _suspect(self, inspection: "_Inspection") -> None:
        """Raises SUSPECT for what right outputs do not excuse."""
        record, slack = self._record, GPU_SLACK if self._device.type == "cuda" else CPU_SLACK
        reasons = []
        if inspection.changed:
            reasons.append(f"it replaced {', '.join(inspection.changed)}")
        if not inspection.stream_unchanged:
            reasons.append("it left another CUDA stream current")
        calls = record.fresh + record.rewritten + record.untouched
        started = max(call.threads for call in calls)
        if started:
            reasons.append(f"a call left {started} thread(s) of its own running")
        total = sum(call.seen_ms for call in calls)
        if inspection.busy_ms > slack.busy_share * total:
            reasons.append(
                f"its threads worked {inspection.busy_ms:.1f} ms beside {total:.1f} ms of calls"
            )
        if not why_untimed(self._device) or self._device.type != "cuda":
            reasons += self._doubtful_times(slack)
        if reasons:
            raise _Failure(Status.SUSPECT, "; ".join(reasons))

    def _doubtful_times(self, slack: Slack) -> list[str]:
        """What most calls agree on: a busy machine disturbs some of them, not most."""
        record, reasons = self._record, []
        typical = percentile([call.ms for call in record.fresh], 50)
        quick = percentile([call.ms for call in record.fresh], FEW)
        beyond = _least(call.seen_ms - call.ms for call in record.fresh)
        beyond -= percentile([call.seen_ms for call in record.null], 50)
        if beyond > slack.clock_ms + slack.clock_share * typical:
            reasons.append(
                f"it reports {typical:.4f} ms a call, the judge's clock saw {beyond:.4f} ms more"
            )
        drain = _least(call.drain_ms for call in record.fresh)
        drain -= percentile([call.drain_ms for call in record.null], 50)
        if drain > slack.drain_ms + slack.drain_share * typical:
            reasons.append(f"the device worked on for {drain:.4f} ms after a call's time ended")
        for kind, calls in (("rewritten", record.rewritten), ("untouched", record.untouched)):
            if len(record.fresh) < FEWEST_COMPARED:
                break
            again = percentile([call.ms for call in calls], MOST)
            if quick - again > slack.repeat_ms and again < slack.repeat_share * quick:
                reasons.append(
                    f"a call on the same contents ({kind}) takes {again:.4f} ms or less, on new"
                    f" ones {quick:.4f} ms or more"
                )
        reasons += _doubtful_clock(record.fresh)
        floor = under_floor(self._case, CORE, self._plan.protocol, typical)
        if not floor.passed and self._device.type == "cuda":
            reasons.append(floor.reason)
        return reasons

    def _ask(self, kind: str, answer: str, limit: int = 0, **fields: object) -> Message:
        self._channel.send(kind, **fields)
        return self._answer(answer, limit)

    def _answer(self, kind: str, limit: int = 0) -> Message:
        message = self._channel.receive(self._deadline - time.monotonic(), limit)
        if message.kind == "failed":
            raise _Failure(Status.ERROR, str(message.fields.get("reason")))
        if message.kind == "refused":
            raise _refusal(message.fields)
        if message.kind != kind:
            raise ForgedError(f"a message {message.kind!r} where {kind!r} was due")
        return message


def _refusal(fields: dict) -> Exception:
    try:
        return _Failure(Status(fields["status"]), str(fields["reason"]))
    except (KeyError, ValueError):
        return ForgedError(f"a refusal without its reason: {fields}")


def _bytes(layout: Expected) -> int:
    return layout.dtype.itemsize * torch.Size(layout.shape).numel()


def _clock(calls: Iterable[_Call]) -> float | None:
    """The median SM clock of the calls."""
    return median_known(call.clock_mhz for call in calls)


def _doubtful_clock(calls: Sequence[_Call]) -> list[str]:
    """What does not fit a reported SM clock: the device, or the time that its spin takes in a call.

    The spin before a call is beyond its time and within what was clocked here.
    """
    calls = [call for call in calls if call.clock_mhz is not None]
    if not calls:
        return []
    if not all(0 < call.clock_mhz < math.inf for call in calls):
        return ["it reports an SM clock that is none"]
    clock, fastest = _clock(calls), max_sm_mhz()
    if fastest is not None and clock > CLOCK_EXCESS * fastest:
        return [f"it reports an SM clock of {clock:.0f} MHz, the fastest is {fastest:.0f}"]
    room = _least(call.seen_ms - call.ms - SPIN_CYCLES / call.clock_mhz / 1e3 for call in calls)
    if room < 0:
        return [f"it reports an SM clock of {clock:.0f} MHz, the judge's clock left no time for it"]
    return []


def _least(values: Iterable[float]) -> float:
    """What most of the values reach."""
    return percentile(list(values), FEW)
