"""The operator: Gated DeltaNet prefill from what a model has, dense or packed, with serving
options.

Stage 1 makes the decay sums, beta, the norms and the inverse A in one launch, stage 2 walks the
chunks. docs/api.md describes every option.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .dispatch import choose_backend
from .operator_results import Results, allocate
from .operator_torch import run_torch
from .operator_validation import (
    Operands,
    OperatorShape,
    Options,
    check_on_cpu,
    check_operands,
    check_options,
    refuse_unsupported,
)


def chunk_gated_delta_rule(
    q,
    k,
    v,
    g,
    beta,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    cu_seqlens=None,
    state_v_first=False,
    *,
    gate="log",
    use_gate_in_kernel=False,
    A_log=None,
    dt_bias=None,
    use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False,
    state_indices=None,
    output_h=False,
    checkpoint_every_n_tokens=0,
    state_checkpoints=None,
    checkpoint_cu_starts=None,
    output=None,
    output_state=None,
    state_dtype=None,
    batch_invariant=False,
    backend="auto",
    reuse_outputs=False,
    **unsupported,
):
    """Gated DeltaNet forward of all sequences; FLA's names and meanings, more options by keyword.

    With alpha_t = exp(g_t), for every V head (its q/k head is h // (Hv / Hq)) and token t:

        S = alpha_t S;  S = S + beta_t k_t (v_t - S^T k_t)^T;  o_t = scale S^T q_t

    Args:
        q, k: [B, T, Hq, 128] bf16 or fp16.
        v: [B, T, Hv, 128] of the same dtype; Hv a multiple of Hq.
        g: [B, T, Hv] fp32, bf16 or fp16: log decay at most 0; with gate="linear" the decay itself,
            0 to 1; with use_gate_in_kernel raw, the log decay then being
            -exp(A_log) softplus(g + dt_bias).
        beta: [B, T, Hv] fp32, bf16 or fp16; with use_beta_sigmoid_in_kernel its logit, and with
            allow_neg_eigval twice the sigmoid is used.
        scale: factor of the output, 1/sqrt(128) by default.
        initial_state: [N, Hv, K, V] fp32, bf16 or fp16, or None for zeros; [N, Hv, V, K] with
            state_v_first, as all states are then. N is B, or the number of packed sequences.
        output_final_state: return the final states, fp32 unless state_dtype says otherwise.
        use_qk_l2norm_in_kernel: divide q and k by sqrt(sum of squares + 1e-6).
        cu_seqlens: [N + 1] int32 or int64 on the tensors' device: sequence n is the tokens
            cu_seqlens[n] to cu_seqlens[n + 1] of the one row, B = 1. Empty sequences are allowed.
            Output rows past cu_seqlens[-1] are not written.
        state_indices: [N] int32 or int64: initial_state (and output_state) are pools, sequence n's
            state is row state_indices[n]; -1 starts from zeros and writes nothing to a pool.
        output_h: return the state before every chunk of 64 tokens too: [B, ceil(T / 64), ...], or
            packed one sequence's chunks after the other's.
        checkpoint_every_n_tokens: a multiple of 64: state_checkpoints [rows, ...] (fp32, bf16 or
            fp16) gets sequence n's state after i of these in row checkpoint_cu_starts[n] + i - 1.
            checkpoint_cu_starts: [N + 1] int32 or int64, needed where sequences are packed.
        output, output_state: buffers to write to; output_state may be initial_state itself, and is
            a pool if there are state_indices. An empty sequence's state is copied unchanged.
        batch_invariant: fix the algorithm, so that a sequence's result depends on itself alone.
        backend: "auto" (the Hopper kernels where they can run, else torch), "cuda" or "torch".
        reuse_outputs: return tensors owned by the package, valid until the next such call of the
            same layout and stream; from the second with the same addresses on, a CUDA Graph replay.
            In a graph that the caller records the results are fresh.

    Returns:
        (output [B, T, Hv, 128] of q's dtype, final state or None), and h after them if asked for.

    Raises:
        TypeError, ValueError: a wrong argument, by name, before anything is launched.
    """
    refuse_unsupported(unsupported)
    x = Operands(
        q,
        k,
        v,
        g,
        beta,
        initial_state,
        cu_seqlens,
        A_log,
        dt_bias,
        state_indices,
        output,
        output_state,
        state_checkpoints,
        checkpoint_cu_starts,
    )
    settings = {
        "scale": scale,
        "output_final_state": output_final_state,
        "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
        "state_v_first": state_v_first,
        "gate": gate,
        "use_gate_in_kernel": use_gate_in_kernel,
        "use_beta_sigmoid_in_kernel": use_beta_sigmoid_in_kernel,
        "allow_neg_eigval": allow_neg_eigval,
        "output_h": output_h,
        "checkpoint_every_n_tokens": checkpoint_every_n_tokens,
        "state_dtype": state_dtype,
        "batch_invariant": batch_invariant,
    }
    if _is_traced(q):
        from .custom_op import call

        if reuse_outputs:
            raise ValueError("reuse_outputs=True cannot be traced; pass output and output_state")
        return call(x, settings, backend)
    options = check_options(**settings)
    if not isinstance(reuse_outputs, bool):
        raise TypeError(f"reuse_outputs is {reuse_outputs!r}; it must be True or False")
    if reuse_outputs:
        from .plans import run_reusing

        return run_reusing(x, options, backend)
    return run(x, options, backend).returned(options)


def declined(*, backend: str = "auto", **arguments) -> str | None:
    """Why chunk_gated_delta_rule would refuse these arguments, given by name; None if it runs.

    Looks at what the host knows, launches nothing.
    """
    operands = {name: arguments.pop(name, None) for name in Operands._fields}
    settings = {
        name: arguments.pop(name) for name in check_options.__kwdefaults__ if name in arguments
    }
    try:
        refuse_unsupported(arguments)
        x, options = Operands(**operands), check_options(**settings)
        check_operands(x, options)
        implementation(backend, x.q.device)
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def run(x: Operands, options: Options, backend: str) -> Results:
    """Checks the tensors, allocates what is missing and runs the chosen implementation."""
    shape = check(x, options)
    execute = implementation(backend, x.q.device)
    results = allocate(x, options, shape)
    execute(x, results, options, shape)
    return results


def check(x: Operands, options: Options) -> OperatorShape:
    """Checks the tensors, and on the CPU their contents too, where these are indices."""
    shape = check_operands(x, options)
    if x.q.device.type == "cpu":
        check_on_cpu(x, options, shape)
    return shape


def implementation(backend: str, device: torch.device) -> Callable[..., None]:
    """What runs on this device: called with operands, results, options and shape."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if choose_backend(backend, device.type, capability) == "torch":
        return run_torch
    from .operator_cuda import run_cuda

    return run_cuda


def _is_traced(q) -> bool:
    """Whether the call belongs into somebody's graph: under compile, export or a fake mode."""
    if torch.compiler.is_compiling():
        return True
    return isinstance(q, Tensor) and type(q) not in (Tensor, torch.nn.Parameter)
