"""The process that holds one implementation of the operator for harness.bench_operator.

It answers, one at a time: "draw" (a workload's inputs and expected results), "prepare" (bind it,
check it, capture it), "warm" (untimed calls), "time" (some replays) and "host" (what this package's
calls cost the host).
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from cases import Case, PackedCase

from .check import Status, Verdict, check_kinds, check_unmodified, poison, relative_l2
from .child import conversation
from .device import pick_device
from .evaluate import error_verdict
from .implementations import AUTO, FULL, Implementation, get
from .operator_calls import fresh, operands, plan_of, planned
from .problem import Problem, operator_problem
from .timing import Call, Plan, Protocol, Timer, capture, interleave, make_timer

# Both of output and final states, against float64.
LIMIT = 5e-3
WARM_CALLS = 3
HOST_WARM_CALLS, HOST_CALLS = 10, 200

Workload = Case | PackedCase


def to_json(workload: Workload) -> dict:
    """What from_json() takes, through JSON."""
    return {"packed": isinstance(workload, PackedCase), **asdict(workload)}


def from_json(data: dict) -> Workload:
    fields = dict(data)
    if not fields.pop("packed"):
        return Case(**fields)
    return PackedCase(**{**fields, "lengths": tuple(fields["lengths"])})


@dataclass
class Drawn:
    """A workload with its expected results, not yet bound."""

    implementation: Implementation
    protocol: Protocol
    problem: Problem


@dataclass
class Prepared:
    """A workload that is ready to be timed."""

    problem: Problem
    call: Call
    timer: Timer
    protocol: Protocol


def draw(job: dict) -> tuple[dict, Drawn | None]:
    """The answer to a "draw", and what was drawn if the implementation can run here."""
    implementation = get(job["implementation"])
    about = {"version": implementation.version}
    missing = implementation.unavailable()
    if missing:
        return {**about, **_failure(Verdict(Status.ERROR, f"not available here: {missing}"))}, None
    device = torch.device("cpu") if job["cpu"] else pick_device()
    problem = operator_problem(from_json(job["workload"]), device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()  # other processes want to solve the same
    passed = {**about, "status": Status.PASS.value}
    return passed, Drawn(implementation, Protocol(job["protocol"]), problem)


def prepare(drawn: Drawn) -> tuple[dict, Prepared | None]:
    """The answer to a "prepare", and what was prepared if all is right."""
    problem, protocol = drawn.problem, drawn.protocol
    device = problem.device
    try:
        call = drawn.implementation.bind(problem, FULL)
        errors, verdict = checked(call, problem)
        if verdict.passed:
            call()
            if device.type == "cuda" and protocol is not Protocol.OJ:
                call = capture(call, device)
            errors, verdict = checked(call, problem)
    except Exception as error:
        return _failure(error_verdict(error)), None
    if not verdict.passed:
        return {"relative_l2": errors, **_failure(verdict)}, None
    prepared = Prepared(problem, call, make_timer(device, protocol), protocol)
    prepared.timer.synchronize()
    return {"status": Status.PASS.value, "relative_l2": errors}, prepared


def checked(call: Call, problem: Problem) -> tuple[list[float], Verdict]:
    """The relative L2 errors of output and final states of a call, and whether they are right."""
    inputs = {name: x for name, x in vars(problem.inputs).items() if x is not None}
    clones = {name: tensor.clone() for name, tensor in inputs.items()}
    result = call()
    expected = problem.expected_output, problem.expected_state
    verdict = check_kinds(result, expected[0].device)
    if not verdict.passed:
        return [], verdict
    for name, tensor, like in zip(("output", "final state"), result, expected, strict=True):
        if tensor.shape != like.shape:
            shapes = f"{tuple(tensor.shape)}, must be {tuple(like.shape)}"
            return [], Verdict(Status.WRONG_SHAPE, f"{name} is {shapes}")
    errors = [relative_l2(*pair) for pair in zip(result, expected, strict=True)]
    poison(result)
    if not all(error <= LIMIT for error in errors):  # NaN is wrong
        text = " and ".join(f"{error:.3g}" for error in errors)
        return errors, Verdict(
            Status.WRONG, f"relative L2 of output and final states {text}, allowed {LIMIT}"
        )
    return errors, check_unmodified(inputs, clones)


def _failure(verdict: Verdict) -> dict:
    return {"status": verdict.status.value, "reason": verdict.reason}


def warm(prepared: Prepared) -> dict:
    """Some untimed calls."""
    for _ in range(WARM_CALLS):
        prepared.call()
    prepared.timer.synchronize()
    return {}


def take(prepared: Prepared, replays: int) -> dict:
    """Times some calls in a row, after an untimed one; the rest was before the first turn."""
    plan = Plan(prepared.protocol, 1, replays, rest_s=0)
    device = prepared.problem.device
    sample = interleave({"": prepared.call}, plan, prepared.timer, device)[""]
    return {"times_ms": sample.times_ms, "clock_mhz": sample.clock_mhz}


def host(prepared: Prepared) -> dict:
    """Medians in microseconds of how long a warm call keeps the host, the device being idle.

    plan: Plan.run with owned buffers; fresh: chunk_gated_delta_rule by default; replay: a bare
    replay of the plan's captured call, where there is a GPU.
    """
    problem = prepared.problem
    calls: dict[str, Callable[[], object]] = {
        "plan": planned(problem, AUTO),
        "fresh": fresh(problem, AUTO),
    }
    if problem.device.type == "cuda":
        captured = plan_of(problem, AUTO).capture(**operands(problem))
        calls["replay"] = captured.replay
    return {"us": {name: _host_us(call, prepared.timer) for name, call in calls.items()}}


def _host_us(call: Callable[[], object], timer: Timer) -> float:
    times = []
    for number in range(HOST_WARM_CALLS + HOST_CALLS):
        timer.synchronize()
        start = time.perf_counter_ns()
        call()
        if number >= HOST_WARM_CALLS:
            times.append((time.perf_counter_ns() - start) / 1e3)
    timer.synchronize()
    return statistics.median(times)


def main() -> None:
    """Answers until standard input ends."""
    jobs, say = conversation()
    drawn = prepared = None
    for job in jobs:
        if job["do"] == "draw":
            drawn = prepared = None  # the memory of the one before goes first
            answer, drawn = draw(job)
        elif job["do"] == "prepare":
            answer, prepared = prepare(drawn)
        elif job["do"] == "warm":
            answer = warm(prepared)
        elif job["do"] == "time":
            answer = take(prepared, job["replays"])
        else:
            answer = host(prepared)
        say(answer)


if __name__ == "__main__":
    main()
