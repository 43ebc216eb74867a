"""The operator as torch.library custom ops, for torch.compile, torch.export and other tracers.

``gdn_prefill::chunk_gated_delta_rule``       returns fresh tensors
``gdn_prefill::chunk_gated_delta_rule_out``   writes to the buffers it is given, which it mutates

Both return (output, final_state, h), an empty tensor standing for what was not asked for or has a
buffer. The public function goes through them where it is traced; an eager call does without.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .operator import run
from .operator_results import Results, allocate
from .operator_validation import Operands, check_operands, check_options, refuse_grad

READ = {
    "q": "Tensor",
    "k": "Tensor",
    "v": "Tensor",
    "g": "Tensor",
    "beta": "Tensor",
    "initial_state": "Tensor?",
    "cu_seqlens": "Tensor?",
    "A_log": "Tensor?",
    "dt_bias": "Tensor?",
    "state_indices": "Tensor?",
}
BUFFERS = {
    "output": "Tensor(a!)?",
    "output_state": "Tensor(b!)?",
    "state_checkpoints": "Tensor(c!)?",
    "checkpoint_cu_starts": "Tensor?",
}
MUTATED = ("output", "output_state", "state_checkpoints")
SETTINGS = {
    "scale": "float?",
    "output_final_state": "bool",
    "use_qk_l2norm_in_kernel": "bool",
    "state_v_first": "bool",
    "gate": "str",
    "use_gate_in_kernel": "bool",
    "use_beta_sigmoid_in_kernel": "bool",
    "allow_neg_eigval": "bool",
    "output_h": "bool",
    "checkpoint_every_n_tokens": "int",
    "state_dtype": "ScalarType?",
    "batch_invariant": "bool",
}
BACKEND = {"backend": "str"}


def call(x: Operands, settings: dict[str, Any], backend: str) -> tuple[Tensor | None, ...]:
    """The public function's results through the ops; settings as those of check_options."""
    refuse_grad(x)
    read, buffers = x[: len(READ)], x[len(READ) :]
    arguments = (*settings.values(), backend)
    if any(buffer is not None for buffer in buffers):
        fresh = torch.ops.gdn_prefill.chunk_gated_delta_rule_out(*read, *buffers, *arguments)
    else:
        fresh = torch.ops.gdn_prefill.chunk_gated_delta_rule(*read, *arguments)
    output = fresh[0] if x.output is None else x.output
    final_state = x.output_state
    if final_state is None and settings["output_final_state"]:
        final_state = fresh[1]
    return (output, final_state, fresh[2]) if settings["output_h"] else (output, final_state)


def _unpack(names: tuple[str, ...], values: tuple) -> tuple[Operands, dict[str, Any], str]:
    arguments = dict(zip(names, values, strict=True))
    backend = arguments.pop("backend")
    settings = {name: arguments.pop(name) for name in SETTINGS}
    return Operands(**arguments), settings, backend


def _fresh(x: Operands, results: Results) -> tuple[Tensor, Tensor, Tensor]:
    """The results that are nobody's buffer."""
    buffers = (x.output, x.output_state, x.state_checkpoints)
    return tuple(
        x.q.new_empty(0) if result is None or buffer is not None else result
        for result, buffer in zip(results, buffers, strict=True)
    )


def _register(name: str, arguments: dict[str, str], mutated: tuple[str, ...]):
    names = tuple(arguments)
    schema = ", ".join(f"{kind} {argument}" for argument, kind in arguments.items())

    def compute(*values):
        x, settings, backend = _unpack(names, values)
        return _fresh(x, run(x, check_options(**settings), backend))

    def shapes(*values):
        x, settings, _ = _unpack(names, values)
        options = check_options(**settings)
        return _fresh(x, allocate(x, options, check_operands(x, options)))

    def refuse(ctx, inputs, output):
        raise ValueError(
            f"{name} has no backward, and an input requires grad; call under torch.no_grad()"
        )

    op = torch.library.custom_op(
        f"gdn_prefill::{name}",
        compute,
        mutates_args=mutated,
        schema=f"({schema}) -> (Tensor, Tensor, Tensor)",
    )
    op.register_fake(shapes)
    if not mutated:
        op.register_autograd(refuse, setup_context=refuse)
    return op


FRESH_OP = _register("chunk_gated_delta_rule", {**READ, **SETTINGS, **BACKEND}, ())
BUFFER_OP = _register(
    "chunk_gated_delta_rule_out", {**READ, **BUFFERS, **SETTINGS, **BACKEND}, MUTATED
)
