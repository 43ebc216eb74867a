"""One case made concrete: seeded inputs, the prepared gate and inverse, the expected values."""

from dataclasses import dataclass

import torch
from torch import Tensor

from cases import SEED, Case, Inputs, make_inputs
from reference.chunked import gdn_chunked

from .emulation import preparing_backend


@dataclass(frozen=True)
class Problem:
    """What an implementation is bound to and checked against.

    inputs as in cases.Inputs; g_cumsum [B, T, Hv] fp32 and A [B, T, Hv, 64] bf16 were prepared
    outside every timed region; expected_output [B, T, Hv, 128] and expected_state
    [B, Hv, 128 (dk), 128 (dv)] are float64 and start from the raw gate.
    """

    case: Case
    inputs: Inputs
    g_cumsum: Tensor
    A: Tensor
    expected_output: Tensor
    expected_state: Tensor

    @property
    def device(self) -> torch.device:
        return self.inputs.q.device


@dataclass(frozen=True)
class Prepared:
    """The arguments of the lab's entry point, in its order."""

    q: Tensor
    k: Tensor
    v: Tensor
    g_cumsum: Tensor
    beta: Tensor
    A: Tensor
    initial_state: Tensor | None

    def arguments(self) -> tuple[Tensor | None, ...]:
        return (self.q, self.k, self.v, self.g_cumsum, self.beta, self.A, self.initial_state)

    def tensors(self) -> dict[str, Tensor]:
        """The arguments that are there, by name."""
        named = zip(self.__dataclass_fields__, self.arguments(), strict=True)
        return {name: tensor for name, tensor in named if tensor is not None}


def prepare_inputs(inputs: Inputs, backend: str = "auto") -> Prepared:
    """Runs the preprocessing of `backend`, which the lab does outside the timed region."""
    from gdn_prefill import prepare

    backend = preparing_backend(backend)
    g_cumsum, A = prepare(inputs.k, inputs.g, inputs.beta, backend=backend)
    return Prepared(
        q=inputs.q,
        k=inputs.k,
        v=inputs.v,
        g_cumsum=g_cumsum,
        beta=inputs.beta,
        A=A,
        initial_state=inputs.initial_state,
    )


def expected_values(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """The float64 output and final state of `inputs`."""
    return gdn_chunked(
        inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, initial_state=inputs.initial_state
    )


def build_problem(
    case: Case, device: str | torch.device = "cpu", seed: int = SEED, backend: str = "auto"
) -> Problem:
    """Draws, prepares and solves `case`; `backend` is that of the package's preprocessing."""
    inputs = make_inputs(case, device, seed)
    prepared = prepare_inputs(inputs, backend)
    output, state = expected_values(inputs)
    return Problem(
        case=case,
        inputs=inputs,
        g_cumsum=prepared.g_cumsum,
        A=prepared.A,
        expected_output=output,
        expected_state=state,
    )
