"""vLLM's ChunkGatedDeltaRule call on the operator.

A function with the arguments of ChunkGatedDeltaRule.forward_cuda but for self; install it as that
method, or return it from an out-of-tree replacement of the custom op "chunk_gated_delta_rule".
"""

from __future__ import annotations

from torch import Tensor

from ..operator import chunk_gated_delta_rule


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    chunk_offsets: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    core_attn_out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """One packed prefill: (output [1, T, Hv, 128], final state [N, Hv, V, K] fp32 or None).

    q, k, v: [1, T, heads, 128]; g: log decay, beta after its sigmoid, [1, T, Hv]; initial_state:
    [N, Hv, V, K]; cu_seqlens: [N + 1]. core_attn_out: contiguous, with room for the output, which
    is written to its beginning. chunk_indices and chunk_offsets are not needed.
    """
    output = None
    if core_attn_out is not None:
        output = core_attn_out.view(-1)[: v.numel()].view(v.shape)
    return chunk_gated_delta_rule(
        q,
        k,
        v,
        g,
        beta,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
        state_v_first=True,
        output=output,
    )
