"""Trusted implementations on one case, in this process: checked, timed in turn, checked again."""

import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor

from cases import SEED, Case

from .check import (
    PASSED,
    Status,
    Verdict,
    check_result,
    check_unmodified,
    poison,
    poison_pool,
)
from .device import ceilings, why_untimed
from .emulation import AUTO, EmulatedFaultError, Emulation
from .floors import floor_ms
from .implementations import CORE, Implementation, get
from .problem import Problem, build_problem
from .rotation import flip_queries
from .timing import (
    Call,
    NotCapturableError,
    Plan,
    Protocol,
    Sample,
    capture,
    interleave,
    launch_untimed,
    make_timer,
)

NOT_CAPTURED = "no CUDA graph"


@dataclass(frozen=True)
class Entry:
    """What to measure: an implementation by name, its scope, a version of the ladder if asked."""

    implementation: str
    scope: str = CORE
    version: str | None = None


@dataclass(frozen=True)
class Outcome:
    """What came of one entry on one case under one protocol; times in milliseconds, raw.

    times_ms is empty where the case did not pass, and where nothing is timed (no GPU, a profiler).
    backend is the one that was asked for, "" where there is no choice. clock_mhz is the median SM
    clock that the times were taken at, None where it was not measured.
    """

    case: str
    implementation: str
    version: str
    scope: str
    protocol: str
    status: Status
    reason: str = ""
    times_ms: tuple[float, ...] = ()
    backend: str = ""
    clock_mhz: float | None = None

    @property
    def sample(self) -> Sample | None:
        return Sample(self.times_ms, self.clock_mhz) if self.times_ms else None

    @property
    def median_ms(self) -> float | None:
        return self.sample.median_ms if self.times_ms else None

    def to_json(self) -> dict:
        return {**asdict(self), "status": self.status.value, "times_ms": list(self.times_ms)}

    @classmethod
    def from_json(cls, data: dict) -> "Outcome":
        return cls(
            **{**data, "status": Status(data["status"]), "times_ms": tuple(data["times_ms"])}
        )


@dataclass
class _Candidate:
    """An entry on its way: its bound call and the first verdict that was not a pass."""

    entry: Entry
    implementation: Implementation
    verdict: Verdict = PASSED
    call: Call | None = None
    samples: dict[Protocol, Sample] = field(default_factory=dict)
    failures: dict[Protocol, Verdict] = field(default_factory=dict)


def compare(
    case: Case,
    entries: Sequence[Entry],
    plans: Sequence[Plan],
    device: torch.device,
    seed: int = SEED,
    backend: str = AUTO,
    thorough: bool | None = None,
    emulation: Emulation | None = None,
) -> list[Outcome]:
    """Checks every entry and times the right ones, interleaved, under each plan.

    `thorough` also checks a later call, and one after the timing on refilled inputs, so that a
    result kept from earlier calls is found; None means where there is a GPU. An entry that raises
    gets ERROR; the others go on. `emulation` is for the backend "emulator".
    """
    thorough = device.type == "cuda" if thorough is None else thorough
    problem = build_problem(case, device, seed, backend)
    candidates = [
        _Candidate(entry, get(entry.implementation, backend, entry.version, emulation))
        for entry in entries
    ]
    for candidate in candidates:
        _admit(candidate, problem, thorough)
    for plan in plans:
        _measure([c for c in candidates if c.verdict.passed], plan, problem)
    if thorough:
        _recheck([c for c in candidates if c.verdict.passed], problem)
    return [_outcome(candidate, case, plan) for candidate in candidates for plan in plans]


def _admit(candidate: _Candidate, problem: Problem, thorough: bool) -> None:
    """Binds the entry and checks its first call; if thorough also its third.

    The second call is where caches fill, the third the first that they serve.
    """
    missing = candidate.implementation.unavailable()
    if missing:
        candidate.verdict = Verdict(Status.ERROR, f"not available here: {missing}")
        return
    try:
        candidate.call = candidate.implementation.bind(problem, candidate.entry.scope)
        candidate.verdict = _checked_call(candidate.call, problem)
        if thorough and candidate.verdict.passed:
            poison(candidate.call())
            candidate.verdict = _checked_call(candidate.call, problem)
    except Exception as error:
        candidate.verdict = error_verdict(error)


def _checked_call(call: Call, problem: Problem) -> Verdict:
    inputs = _inputs(problem)
    clones = {name: tensor.clone() for name, tensor in inputs.items()}
    poison_pool(problem.case, problem.device)
    result = call()
    _synchronize(problem.device)
    verdict = check_result(problem.case, result, problem.expected_output, problem.expected_state)
    if verdict.passed:
        verdict = check_unmodified(inputs, clones)
    poison(result)
    return verdict


def _measure(candidates: list[_Candidate], plan: Plan, problem: Problem) -> None:
    device = problem.device
    if device.type != "cuda":
        return
    calls: dict[str, Call] = {}
    by_name: dict[str, _Candidate] = {}
    for index, candidate in enumerate(candidates):
        name = f"{index}"
        try:
            calls[name] = _timed_call(candidate.call, plan.protocol, problem)
            by_name[name] = candidate
        except NotCapturableError as error:
            candidate.failures[plan.protocol] = Verdict(Status.ERROR, f"{NOT_CAPTURED}: {error}")
        except _WrongReplayError as error:
            candidate.failures[plan.protocol] = error.verdict
    if why_untimed(device):
        launch_untimed(calls, plan, device)
        return
    compiled = {name: _compiles(candidate) for name, candidate in by_name.items()}
    samples = interleave(calls, plan, make_timer(device, plan.protocol), device)
    for name, candidate in by_name.items():
        candidate.samples[plan.protocol] = samples[name]
        if _compiles(candidate) != compiled[name]:
            candidate.failures[plan.protocol] = Verdict(
                Status.SUSPECT, "it compiled kernels while it was timed"
            )


def _compiles(candidate: _Candidate) -> int | None:
    """How many kernels the implementation has compiled, where it keeps count."""
    count = getattr(candidate.implementation, "compiles", None)
    return count() if count else None


class _WrongReplayError(Exception):
    """A graph whose replay does not give what the call gave."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.reason)
        self.verdict = verdict


def _timed_call(call: Call, protocol: Protocol, problem: Problem) -> Call:
    if protocol is Protocol.OJ:
        return call
    replay = capture(call, problem.device)
    verdict = _checked_call(replay, problem)
    if not verdict.passed:
        raise _WrongReplayError(verdict)
    return replay


def _recheck(candidates: list[_Candidate], problem: Problem) -> None:
    """One more call of each after every query was flipped at random, in place."""
    if not candidates:
        return
    factor = flip_queries(problem.inputs.q, problem.case.Hv, torch.seed() % 2**31)
    output = problem.expected_output * factor
    for candidate in candidates:
        try:
            result = candidate.call()
            _synchronize(problem.device)
            verdict = check_result(problem.case, result, output, problem.expected_state)
        except Exception as error:
            verdict = error_verdict(error)
        if not verdict.passed:
            candidate.verdict = Verdict(verdict.status, f"inputs refilled: {verdict.reason}")


def _outcome(candidate: _Candidate, case: Case, plan: Plan) -> Outcome:
    verdict = candidate.verdict
    if verdict.passed:
        verdict = candidate.failures.get(plan.protocol, PASSED)
    sample = candidate.samples.get(plan.protocol) if verdict.passed else None
    if sample is not None:
        verdict = under_floor(case, candidate.entry.scope, plan.protocol, sample.median_ms)
    timed = sample is not None and verdict.passed
    return Outcome(
        case=case.name,
        implementation=candidate.implementation.name,
        version=candidate.implementation.version,
        scope=candidate.entry.scope,
        protocol=plan.protocol.value,
        status=verdict.status,
        reason=verdict.reason,
        times_ms=sample.times_ms if timed else (),
        backend=candidate.implementation.backend,
        clock_mhz=sample.clock_mhz if timed else None,
    )


def under_floor(case: Case, scope: str, protocol: Protocol, median_ms: float) -> Verdict:
    """SUSPECT for a time that the chip in use cannot reach, where its datasheet is known."""
    rates = ceilings(torch.device("cuda")) if torch.cuda.is_available() else None
    if rates is None:
        return PASSED
    floor = floor_ms(case, scope, protocol, rates)
    if median_ms >= floor:
        return PASSED
    return Verdict(
        Status.SUSPECT,
        f"{median_ms:.6f} ms is under the floor of {floor:.6f} ms ({scope}, {protocol})",
    )


def _inputs(problem: Problem) -> dict[str, Tensor]:
    inputs = problem.inputs
    named = {
        "q": inputs.q,
        "k": inputs.k,
        "v": inputs.v,
        "g": inputs.g,
        "g_cumsum": problem.g_cumsum,
        "beta": inputs.beta,
        "A": problem.A,
        "initial_state": inputs.initial_state,
    }
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def error_verdict(error: Exception) -> Verdict:
    """ERROR in the words of an exception, and where it was raised."""
    if isinstance(error, EmulatedFaultError):
        return Verdict(Status.ERROR, str(error))
    where = traceback.extract_tb(error.__traceback__)[-1]
    lines = str(error).strip().splitlines() or [""]
    return Verdict(
        Status.ERROR,
        f"{type(error).__name__}: {lines[0]} ({where.filename}:{where.lineno})",
    )
