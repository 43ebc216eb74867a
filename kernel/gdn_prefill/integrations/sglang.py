"""The prefill half of an SGLang linear-attention kernel, for its GDN dispatcher.

SGLang builds one kernel object a phase (LinearAttnKernelBase) and calls its extend. This class has
that call and nothing else; subclass it together with SGLang's kernel for the other phases:

    class GdnPrefillGDNKernel(GdnPrefillExtend, TritonGDNKernel): ...
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..operator import chunk_gated_delta_rule


class GdnPrefillExtend:
    """extend over SGLang's state pool. per_chunk_states: return h where no checkpoints are asked
    for, as the radix cache's extra buffers need it.
    """

    def __init__(self, *args, per_chunk_states: bool = True, **named):
        super().__init__(*args, **named)
        self.per_chunk_states = per_chunk_states

    def extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        ssm_states: Tensor,
        cache_indices: Tensor,
        query_start_loc: Tensor,
        inplace_update: bool = True,
        state_checkpoint_cu_starts: Tensor | None = None,
        num_state_checkpoints: int | None = None,
        state_checkpoint_every_n_tokens: int | None = None,
        output: Tensor | None = None,
        **hints,
    ) -> tuple[Tensor, None, Tensor | None]:
        """One packed prefill: (output [1, T, Hv, 128], None, kept states [1, rows, Hv, V, K]).

        q, k, v: [1, T, heads, 128], not normalised; g: log decay, beta after its sigmoid, [1, T,
        Hv]. ssm_states: the pool [slots, Hv, V, K], updated in place unless inplace_update is
        False; cache_indices: [N] slots, -1 for padding; query_start_loc: [N + 1]. The states are
        checkpoints as FlashInfer lays them out, or those before every chunk. hints, such as
        chunk_indices, only spare other kernels a synchronisation and are not needed.
        """
        named = {}
        checkpoints = None
        if num_state_checkpoints:
            checkpoints = torch.empty(
                (num_state_checkpoints, *ssm_states.shape[1:]),
                dtype=ssm_states.dtype,
                device=ssm_states.device,
            )
            named = {
                "checkpoint_every_n_tokens": state_checkpoint_every_n_tokens,
                "state_checkpoints": checkpoints,
                "checkpoint_cu_starts": state_checkpoint_cu_starts,
            }
        elif self.per_chunk_states:
            named = {"output_h": True, "state_dtype": ssm_states.dtype}
        result = chunk_gated_delta_rule(
            q,
            k,
            v,
            g,
            beta,
            initial_state=ssm_states,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=query_start_loc,
            state_v_first=True,
            state_indices=cache_indices,
            output_state=ssm_states if inplace_update else None,
            output=output,
            **named,
        )
        if checkpoints is not None:
            return result[0], None, checkpoints.unsqueeze(0)
        return result[0], None, result[2] if self.per_chunk_states else None
