"""One case made concrete: seeded inputs, the prepared gate and inverse, the expected values."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from cases import SEED, Case, Inputs, PackedCase, make_inputs, make_packed_inputs
from reference.chunked import gdn_chunked

from .emulation import preparing_backend


@dataclass(frozen=True)
class Problem:
    """What an implementation is bound to and checked against.

    inputs as in cases.Inputs; g_cumsum [B, T, Hv] fp32 and A [B, T, Hv, 64] bf16 were prepared
    outside every timed region; expected_output [B, T, Hv, 128] and expected_state
    [B, Hv, 128 (dk), 128 (dv)] are float64 and start from the raw gate. Of a packed batch B is 1,
    lengths are those of its N sequences, cu_seqlens [N + 1] int64 their bounds, and states are
    [N, Hv, 128, 128].
    """

    case: Case
    inputs: Inputs
    g_cumsum: Tensor
    A: Tensor
    expected_output: Tensor
    expected_state: Tensor
    lengths: tuple[int, ...] = ()
    cu_seqlens: Tensor | None = None

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


def operator_problem(
    case: Case | PackedCase, device: str | torch.device = "cpu", seed: int = SEED
) -> Problem:
    """A problem for the full scope alone: drawn and solved, without g_cumsum and A (empty)."""
    absent = torch.empty(0)
    if isinstance(case, Case):
        inputs = make_inputs(case, device, seed)
        return Problem(case, inputs, absent, absent, *expected_values(inputs))
    inputs = make_packed_inputs(case, device, seed)
    bounds = torch.tensor(case.bounds, dtype=torch.int64, device=inputs.q.device)
    expected = packed_values(inputs, case.bounds)
    return Problem(case.row, inputs, absent, absent, *expected, case.lengths, bounds)


def packed_values(inputs: Inputs, bounds: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The float64 output and final states, sequence by sequence."""
    outputs, states = [], []
    for n, (start, end) in enumerate(pairwise(bounds)):
        rows = (x[:, start:end] for x in (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta))
        state = None if inputs.initial_state is None else inputs.initial_state[n : n + 1]
        output, final_state = gdn_chunked(*rows, initial_state=state)
        outputs.append(output)
        states.append(final_state)
    return torch.cat(outputs, dim=1), torch.cat(states)
