"""The tensors that a call of the operator fills: the caller's buffers, or fresh ones."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .operator_validation import Operands, OperatorShape, Options


class Results(NamedTuple):
    """output, the final state where it is wanted, and `states`: h or the checkpoints."""

    output: Tensor
    final_state: Tensor | None
    states: Tensor | None

    def returned(self, options: Options) -> tuple[Tensor | None, ...]:
        """What the public function returns."""
        pair = (self.output, self.final_state)
        return (*pair, self.states) if options.output_h else pair


def allocate(x: Operands, options: Options, shape: OperatorShape) -> Results:
    """The caller's buffers, uninitialised fresh tensors for what else is wanted."""
    device = x.q.device
    output, final_state, states = x.output, x.output_state, x.state_checkpoints
    if output is None:
        output = torch.empty(shape.output, dtype=x.v.dtype, device=device)
    if final_state is None and options.final_state:
        final_state = torch.empty(shape.final_state, dtype=options.state_dtype, device=device)
    if options.output_h:
        states = torch.empty(shape.h, dtype=options.state_dtype, device=device)
    return Results(output, final_state, states)
