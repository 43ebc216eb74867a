"""A backend for FLA's dispatch: ``import gdn_prefill.integrations.fla`` registers it.

From then on fla.ops.gated_delta_rule.chunk_gated_delta_rule, and with it every FLA or transformers
model that calls it, runs on the operator wherever it can: on a Hopper GPU, without a backward, with
heads of 128. Everything else is declined with a reason, which FLA logs once, and goes on to FLA's
next choice. FLA_GDN_PREFILL=0 switches it off. Written against fla-core 0.6.0.
"""

from __future__ import annotations

from typing import Any

from fla.backends import BaseBackend, register

from ..operator import chunk_gated_delta_rule, declined

# What a caller may pass along whatever it is: FLA reads them for a raw gate only.
RAW_GATE_PARAMETERS = ("A_log", "dt_bias")


@register("gated_delta_rule")
class GdnPrefillBackend(BaseBackend):
    """FLA's protocol around chunk_gated_delta_rule; FlashQLA's priority there is 3."""

    backend_type = "gdn_prefill"
    package_name = "gdn_prefill"
    env_var = "FLA_GDN_PREFILL"
    default_enable = True
    priority = 2
    # The portable path would lose to FLA's own kernels.
    runs_on = "cuda"

    def chunk_gated_delta_rule_verifier(self, *operands, **named) -> tuple[bool, str | None]:
        """(True, None), or (False, the reason) for a call that the operator does not support."""
        reason = declined(backend=self.runs_on, **_translated(*operands, **named))
        return reason is None, reason

    def chunk_gated_delta_rule(self, *operands, **named):
        """FLA's chunk_gated_delta_rule of a verified call: (output, final state or None)."""
        return chunk_gated_delta_rule(backend=self.runs_on, **_translated(*operands, **named))


def _translated(
    q,
    k,
    v,
    g,
    beta,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False,
    state_v_first=False,
    cu_seqlens=None,
    cu_seqlens_cpu=None,
    chunk_indices=None,
    cp_context=None,
    **others,
) -> dict[str, Any]:
    """FLA's arguments, in the order that it allows by position, as the operator's by name."""
    if not others.get("use_gate_in_kernel", False):
        others = {name: x for name, x in others.items() if name not in RAW_GATE_PARAMETERS}
    return {
        "q": q,
        "k": k,
        "v": v,
        "g": g,
        "beta": beta,
        "scale": scale,
        "initial_state": initial_state,
        "output_final_state": bool(output_final_state),
        "use_qk_l2norm_in_kernel": bool(use_qk_l2norm_in_kernel),
        "use_beta_sigmoid_in_kernel": bool(use_beta_sigmoid_in_kernel),
        "allow_neg_eigval": bool(allow_neg_eigval),
        "state_v_first": bool(state_v_first),
        "cu_seqlens": cu_seqlens,
        "cp_context": cp_context,
        **others,
    }
