"""The chunk-parallel scan's middle: the state before every segment from the segments' summaries.

    S_0 = initial state        S_{s+1} = M_s S_s + N_s

One CTA walks the segments of one batch and V head for 64 state columns. M and S are FP32; each is
taken as the sum of two bf16 numbers, and three of the four products are made, so that what is lost
is the rounding of FP32 and not of bf16.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import tilelang
import tilelang.language as T
from tvm import tirx

from gdn_prefill.kernels.naming import named

HEAD_DIM = 128
COLUMNS = 64
THREADS = 256  # two warp groups, 64 rows of the state each
BF16 = "bfloat16"
FP32 = "float32"

PASS_CONFIGS = {tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True}


@dataclass(frozen=True)
class ScanConfig:
    """heads_v: V heads. use_initial_state: False starts from zeros, never reading initial_state."""

    heads_v: int
    use_initial_state: bool = False

    def __post_init__(self) -> None:
        if self.heads_v < 1:
            raise ValueError(f"heads_v = {self.heads_v} must be positive")


@T.macro
def split(values, high, low):
    """values = high + low up to 2^-17 of it, both bf16."""
    for i, j in T.Parallel(values.shape[0], values.shape[1]):
        high[i, j] = values[i, j]
        low[i, j] = values[i, j] - T.cast(T.cast(values[i, j], BF16), FP32)


def scan_kernel(config: ScanConfig) -> tirx.PrimFunc:
    """Build the kernel for `config` as a TileLang PrimFunc.

    Its arguments: summaries [2 * B * (segments - 1), Hv, 128, 128] fp32, N of every segment but the
    last and then M of them; initial_state [B, Hv, 128, 128] fp32, of that shape even where it is
    not read; states [B * segments, Hv, 128, 128] fp32, written; segments, int32.
    """
    batch, heads_v = T.dynamic("batch"), config.heads_v
    summarised, states_held = T.dynamic("summarised"), T.dynamic("states_held")
    slices = HEAD_DIM // COLUMNS

    @T.prim_func
    def gdn_ladder_scan(
        summaries: T.Tensor((summarised, heads_v, HEAD_DIM, HEAD_DIM), FP32),
        initial_state: T.Tensor((batch, heads_v, HEAD_DIM, HEAD_DIM), FP32),
        states: T.Tensor((states_held, heads_v, HEAD_DIM, HEAD_DIM), FP32),
        segments: T.int32,
    ):
        with T.Kernel(slices * heads_v, batch, threads=THREADS) as (block, bb):
            head = block // slices
            columns = slice(block % slices * COLUMNS, block % slices * COLUMNS + COLUMNS)
            tiles = named(
                "_shared",
                m_high=T.alloc_shared((HEAD_DIM, HEAD_DIM), BF16),
                m_low=T.alloc_shared((HEAD_DIM, HEAD_DIM), BF16),
                state_high=T.alloc_shared((HEAD_DIM, COLUMNS), BF16),
                state_low=T.alloc_shared((HEAD_DIM, COLUMNS), BF16),
            )
            fragments = SimpleNamespace(
                m=T.alloc_fragment((HEAD_DIM, HEAD_DIM), FP32),
                state=T.alloc_fragment((HEAD_DIM, COLUMNS), FP32),
            )
            if config.use_initial_state:
                T.copy(initial_state[bb, head, 0:HEAD_DIM, columns], fragments.state)
            else:
                T.clear(fragments.state)
            T.copy(fragments.state, states[bb * segments, head, 0:HEAD_DIM, columns])
            for segment in T.serial(segments - 1):
                offset = bb * (segments - 1) + segment
                T.copy(
                    summaries[batch * (segments - 1) + offset, head, 0:HEAD_DIM, 0:HEAD_DIM],
                    fragments.m,
                )
                split(fragments.m, tiles.m_high, tiles.m_low)
                split(fragments.state, tiles.state_high, tiles.state_low)
                T.fence_proxy_async()

                # S = N + M S
                T.copy(summaries[offset, head, 0:HEAD_DIM, columns], fragments.state)
                T.gemm(tiles.m_high, tiles.state_high, fragments.state)
                T.gemm(tiles.m_high, tiles.state_low, fragments.state)
                T.gemm(tiles.m_low, tiles.state_high, fragments.state)
                T.copy(
                    fragments.state, states[bb * segments + segment + 1, head, 0:HEAD_DIM, columns]
                )

    return gdn_ladder_scan
