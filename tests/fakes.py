"""Implementations, right and wrong, for the tests of the harness; none of them is a submission.

Reachable as "fakes:NAME" where this folder is on the path.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from harness.implementations import SCOPES


@dataclass(frozen=True)
class Fake:
    """`make` binds a problem to a call; `lacking` is the reason for not being available."""

    name: str
    make: Callable
    version: str = "0"
    scopes: tuple[str, ...] = SCOPES
    backend: str = "torch"
    lacking: str | None = None

    def unavailable(self):
        return self.lacking

    def bind(self, problem, scope):
        return self.make(problem)


def _outputs(problem):
    """What the reference says, in the dtypes that are asked for."""
    return problem.expected_output.to(torch.bfloat16), problem.expected_state.float()


def _right(problem):
    from gdn_prefill import gdn_prefill_forward

    inputs = problem.inputs
    return lambda: gdn_prefill_forward(
        inputs.q,
        inputs.k,
        inputs.v,
        problem.g_cumsum,
        inputs.beta,
        problem.A,
        inputs.initial_state,
    )


def _stale(problem):
    return lambda: _outputs(problem)


def _zeros(problem):
    output, state = _outputs(problem)
    return lambda: (torch.zeros_like(output), torch.zeros_like(state))


def _scribbling(problem):
    def call():
        problem.inputs.beta[0, 0, 0] += 1
        return _outputs(problem)

    return call


def _raising(problem):
    def call():
        raise RuntimeError("this one raises\nwith more lines")

    return call


def _crashing(problem):
    return lambda: os._exit(7)


def _hanging(problem):
    return lambda: time.sleep(3600)


RIGHT = Fake("right", _right)
STALE = Fake("stale", _stale)
ZEROS = Fake("zeros", _zeros)
SCRIBBLING = Fake("scribbling", _scribbling)
RAISING = Fake("raising", _raising)
CRASHING = Fake("crashing", _crashing)
HANGING = Fake("hanging", _hanging)
ABSENT = Fake("absent", _right, lacking="the package absent is not installed")
CORE_ONLY = Fake("core_only", _right, scopes=("core",))
NOT_ONE = "nothing"
