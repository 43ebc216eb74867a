"""The summary of a split over time for the operator: split.py's roles over its operands.

Gates and beta are time-contiguous and rows of K may have norms n_k, as in resident_operator.py.
With norms

    w = -n_k exp(g_last - g) A (beta gamma n_k) K
    a =  n_k exp(g_last - g) A (beta or -Gamma beta gamma n_k)

where the factors on the left are those of rows, on the right those of columns of A: X then has the
norms that K lacks as it is stored.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import tilelang.language as T

from .parameters import vectors
from .resident_operator import SHORT, check_dtypes
from .split import (
    CHUNK,
    HEAD_DIM,
    LOG2_E,
    SUMMARY_THREADS,
    SummaryConfig,
    segment_place,
    summary_cta,
)


@dataclass(frozen=True)
class OperatorSummaryConfig(SummaryConfig):
    """What one compiled summary kernel of the operator is specialised on.

    dtype, l2norm: as in resident_operator.OperatorConfig.
    """

    dtype: str = "bfloat16"
    l2norm: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_dtypes(self)

    @property
    def name(self) -> str:
        """A readable name of the specialisation, unique among the shipped ones."""
        return (
            f"operator_summary_hq{self.heads_q}_hv{self.heads_v}_{SHORT[self.dtype]}"
            f"{'_pair' if self.residual else ''}{'_l2norm' if self.l2norm else ''}"
        )


@T.macro
def fetch_gates(config, place, chunk, token, inputs, gates):
    first = place.first + chunk * CHUNK
    gates.gate[0] = inputs.gate[place.batch, place.head, first + token] * LOG2_E
    gates.last[0] = inputs.gate[place.batch, place.head, first + CHUNK - 1] * LOG2_E
    gates.beta[0] = inputs.beta[place.batch, place.head, first + token]
    if config.l2norm:
        gates.key_norm[0] = inputs.key_norm[place.batch, place.head_q, first + token]


HOOKS = SimpleNamespace(fetch_gates=fetch_gates)


def operator_summary_kernel(config: OperatorSummaryConfig):
    """Build the operator's summary kernel as a TileLang PrimFunc.

    Arguments of the PrimFunc; what the configuration does not have is a one-element dummy:

        k [B, T, Hq, 128], v [B, T, Hv, 128], A [B, T, Hv, 64] of config.dtype
        gate, beta [B, Hv, T], key_norm [B, Hq, T] fp32
        states, transitions, residuals, decays, chunks_per_segment: as of split.summary_kernel
    """
    batch, tokens = T.dynamic("batch"), T.dynamic("tokens")
    boundaries, middle = T.dynamic("boundaries"), T.dynamic("middle")
    heads_q, heads_v = config.heads_q, config.heads_v
    transition_shape = (middle, batch, heads_v, HEAD_DIM, HEAD_DIM)
    bf16, fp32 = "bfloat16", "float32"

    @T.prim_func
    def gdn_operator_summary(
        k: vectors("key", batch, tokens, heads_q, config.dtype),
        v: vectors("value", batch, tokens, heads_v, config.dtype),
        A: T.Tensor((batch, tokens, heads_v, CHUNK), config.dtype),
        gate: T.Tensor((batch, heads_v, tokens), fp32),
        beta: T.Tensor((batch, heads_v, tokens), fp32),
        key_norm: T.Tensor((batch, heads_q, tokens) if config.l2norm else (1,), fp32),
        states: T.Tensor((boundaries, batch, heads_v, HEAD_DIM, HEAD_DIM), fp32),
        transitions: T.Tensor(transition_shape, bf16),
        residuals: T.Tensor(transition_shape if config.residual else (1,), bf16),
        decays: T.Tensor((middle, batch, heads_v), fp32),
        chunks_per_segment: T.int32,
    ):
        with T.Kernel(
            heads_v,
            batch,
            2 * (boundaries - 1),
            threads=SUMMARY_THREADS,
            cluster_dims=config.cluster,
        ) as (
            head,
            sequence,
            part,
        ):
            inputs = SimpleNamespace(
                k=k,
                v=v,
                a=A,
                gate=gate,
                beta=beta,
                key_norm=key_norm,
                states=states,
                transitions=transitions,
                residuals=residuals,
                decays=decays,
            )
            place = segment_place(config, head, sequence, part, chunks_per_segment)
            summary_cta(config, place, inputs, HOOKS)

    return gdn_operator_summary
