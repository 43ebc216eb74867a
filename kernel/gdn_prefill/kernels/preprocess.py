"""Preprocessing of a chunk of C = 64 tokens: the sums of its gate and the inverse A.

    g = inclusive cumulative sum of the log decay, restarted at every chunk
    A = (I + M)^-1,   M_ij = beta_i exp(g_i - g_j) <k_i, k_j> for i > j, else 0

``cumsum_kernel``       one CTA a chunk and a tile of heads: loads along the heads are coalesced.
``kkt_inverse_kernel``  one CTA a chunk and a q/k head: K K^T once (bf16 WGMMA, fp32 accumulators),
                        then for each of its V heads the inverse in fp32:
    diagonal 16x16 blocks T_p      by forward substitution, a column a thread
    pairs of them, 32x32           X = -T_1 (M_10 T_0)
    the two pairs, 64x64           the same with 32x32 blocks

The gates enter as exp(min(g_i - g_j, 0)) only, which never overflows whatever k is. Rows past T
carry beta = 0, hence rows of the identity, and are not stored: columns past T are 0 by themselves.
"""

from dataclasses import dataclass, fields

import tilelang
import tilelang.language as T

CHUNK = 64
HEAD_DIM = 128
THREADS = 128
LOG2_E = 1.4426950408889634

# exp(-128) is 0 in fp32. A gate that forgets everything (below FORGETS, -inf included) is summed as
# FORGOTTEN, so that the differences of later sums stay finite.
FORGETS = -1.0e4
FORGOTTEN = -128.0

DIAGONAL = 16  # rows of a block inverted by substitution
HALF = 2 * DIAGONAL
PAIRS = CHUNK // HALF
BLOCKS = CHUNK // DIAGONAL
PADDING = (
    4  # fp32 elements appended to a row of shared memory: 16 bytes keep vector accesses aligned
)

SEGMENTS = 8  # a column of 64 gates is summed in this many pieces at a time
SEGMENT = CHUNK // SEGMENTS
MIN_HEAD_TILE = THREADS // SEGMENTS
MAX_HEAD_TILE = 64

FLOATS = ("float32", "bfloat16", "float16")
ALLOWED = {
    "dtype": ("bfloat16", "float16"),
    "gate": ("log", "linear", "raw"),
    "gate_dtype": FLOATS,
    "beta": ("plain", "sigmoid", "twice_sigmoid"),
    "beta_dtype": FLOATS,
    "cu_seqlens": (None, "int32", "int64"),
    "layout": ("time", "token"),
    "inverse": ("rows", "blocks"),
}

# All threads of a CTA do the same here, so TileLang's automatic synchronisation is wanted.
PASS_CONFIGS = {tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True}


@dataclass(frozen=True)
class PreprocessConfig:
    """What a preprocessing kernel is specialised on; batch and length are run-time arguments."""

    heads_q: int
    heads_v: int

    def __post_init__(self) -> None:
        if self.heads_q < 1 or self.heads_v < 1 or self.heads_v % self.heads_q:
            raise ValueError(
                f"heads_v={self.heads_v} must be a positive multiple of heads_q={self.heads_q}"
            )

    @property
    def group(self) -> int:
        """V heads of one q/k head."""
        return self.heads_v // self.heads_q

    @property
    def head_tile(self) -> int:
        """Heads whose gates one CTA of the cumsum kernel reads together."""
        tile = MIN_HEAD_TILE
        while tile < min(self.heads_v, MAX_HEAD_TILE):
            tile *= 2
        return tile


@dataclass(frozen=True)
class OperatorPreprocessConfig(PreprocessConfig):
    """The preprocessing of the full operator: what its one kernel is specialised on.

    gate        what g holds: "log" the natural logarithm of the decay; "linear" the decay, 0 to 1;
                "raw" the decay's logarithm is -exp(A_log) softplus(g + dt_bias)
    dt_bias     with "raw": is there a dt_bias
    beta        "plain" as given, "sigmoid", "twice_sigmoid" (from 0 to 2)
    l2norm      keys enter as k key_norm, and the norms 1 / sqrt(sum x^2 + 1e-6) of q and k are
                written
    cu_seqlens  its dtype: the sequences lie one after another in a batch of one; None: every row of
                the batch is a sequence
    strided     q and k may be views with a token stride of their own
    layout      "time": gate, beta and norms are written [B, H, T]; "token": [B, T, H]
    inverse     "rows": A is written [B, T, Hv, 64]; "blocks": as inverse_blocks.py says
    dtype, gate_dtype, beta_dtype   of q, k and A, of g, of beta
    """

    dtype: str = "bfloat16"
    gate: str = "log"
    gate_dtype: str = "float32"
    dt_bias: bool = False
    beta: str = "plain"
    beta_dtype: str = "float32"
    l2norm: bool = False
    cu_seqlens: str | None = None
    strided: bool = False
    layout: str = "time"
    inverse: str = "rows"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, allowed in ALLOWED.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r}: allowed are {allowed}")
        if self.dt_bias and self.gate != "raw":
            raise ValueError(f"dt_bias=True with gate={self.gate!r}: only a raw gate has a bias")

    @property
    def packed(self) -> bool:
        """Are the sequences packed into one row?"""
        return self.cu_seqlens is not None

    @property
    def name(self) -> str:
        """Unique among configurations, for lists and reports."""
        parts = [f"operator_preprocess_hq{self.heads_q}_hv{self.heads_v}"]
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in ("heads_q", "heads_v") and value != field.default:
                parts.append(field.name if value is True else f"{field.name}_{value}")
        return "_".join(parts)


def cumsum_kernel(config: PreprocessConfig):
    """PrimFunc(g, g_cumsum): the chunk sums of the raw log decay, both [B, T, Hv] fp32."""
    batch, tokens = T.dynamic("batch"), T.dynamic("tokens")
    heads, tile = config.heads_v, config.head_tile
    tiles = -(-heads // tile)
    shape = (batch, tokens, heads)

    @T.prim_func
    def gdn_chunk_cumsum(g: T.Tensor(shape, "float32"), g_cumsum: T.Tensor(shape, "float32")):
        with T.Kernel(batch * T.ceildiv(tokens, CHUNK) * tiles, threads=THREADS) as (block,):
            head = block % tiles * tile
            # variables: TileLang repeats a run-time division at every use of its result
            row, first = T.alloc_var("int32"), T.alloc_var("int32")
            row = T.truncdiv(block // tiles, T.ceildiv(tokens, CHUNK))
            first = (block // tiles - row * T.ceildiv(tokens, CHUNK)) * CHUNK
            sums_shared = T.alloc_shared((CHUNK, tile), "float32")
            totals_shared = T.alloc_shared((SEGMENTS, tile), "float32")
            running_fragment = T.alloc_fragment((SEGMENTS, tile), "float32")

            for i, h in T.Parallel(CHUNK, tile):
                if first + i < tokens and head + h < heads:
                    sums_shared[i, h] = T.if_then_else(
                        g[row, first + i, head + h] < FORGETS,
                        FORGOTTEN,
                        g[row, first + i, head + h],
                    )
                else:
                    sums_shared[i, h] = 0.0

            T.clear(running_fragment)
            for i in T.serial(SEGMENT):
                for s, h in T.Parallel(SEGMENTS, tile):
                    running_fragment[s, h] += sums_shared[s * SEGMENT + i, h]
                    sums_shared[s * SEGMENT + i, h] = running_fragment[s, h]
            T.copy(running_fragment, totals_shared)
            T.clear(running_fragment)
            for before in T.serial(SEGMENTS):
                for s, h in T.Parallel(SEGMENTS, tile):
                    if before < s:
                        running_fragment[s, h] += totals_shared[before, h]
            T.copy(running_fragment, totals_shared)

            for i, h in T.Parallel(CHUNK, tile):
                if first + i < tokens and head + h < heads:
                    g_cumsum[row, first + i, head + h] = (
                        sums_shared[i, h] + totals_shared[i // SEGMENT, h]
                    )

    return gdn_chunk_cumsum


def kkt_inverse_kernel(config: PreprocessConfig):
    """PrimFunc(k, g_cumsum, beta, A): the inverse of every chunk and V head.

    k [B, T, Hq, 128] bf16; g_cumsum, beta [B, T, Hv] fp32; A [B, T, Hv, 64] bf16, written.
    """
    batch, tokens = T.dynamic("batch"), T.dynamic("tokens")
    heads_q, heads_v, group = config.heads_q, config.heads_v, config.group

    @T.prim_func
    def gdn_kkt_inverse(
        k: T.Tensor((batch, tokens, heads_q, HEAD_DIM), "bfloat16"),
        g_cumsum: T.Tensor((batch, tokens, heads_v), "float32"),
        beta: T.Tensor((batch, tokens, heads_v), "float32"),
        A: T.Tensor((batch, tokens, heads_v, CHUNK), "bfloat16"),
    ):
        with T.Kernel(batch * T.ceildiv(tokens, CHUNK) * heads_q, threads=THREADS) as (block,):
            head_q = block % heads_q
            # variables: TileLang repeats a run-time division at every use of its result
            row, first = T.alloc_var("int32"), T.alloc_var("int32")
            row = T.truncdiv(block // heads_q, T.ceildiv(tokens, CHUNK))
            first = (block // heads_q - row * T.ceildiv(tokens, CHUNK)) * CHUNK

            k_shared = T.alloc_shared((CHUNK, HEAD_DIM), "bfloat16")
            gate_shared = T.alloc_shared((CHUNK,), "float32")
            beta_shared = T.alloc_shared((CHUNK,), "float32")
            m_shared = T.alloc_shared((CHUNK, CHUNK + PADDING), "float32")
            inverse_shared = T.alloc_shared((CHUNK, CHUNK + PADDING), "float32")
            product_shared = T.alloc_shared((HALF, HALF + PADDING), "float32")
            gram_fragment = T.alloc_fragment((CHUNK, CHUNK), "float32")
            row_fragment = T.alloc_fragment((BLOCKS, DIAGONAL), "float32")
            pair_fragment = T.alloc_fragment((PAIRS, DIAGONAL, DIAGONAL), "float32")
            half_fragment = T.alloc_fragment((HALF, HALF), "float32")
            k_loaded = T.alloc_barrier(THREADS)

            T.tma_copy(k[row, first : first + CHUNK, head_q, :], k_shared, barrier=k_loaded)
            T.barrier_arrive(k_loaded)
            for i, j in T.Parallel(CHUNK, CHUNK):
                inverse_shared[i, j] = 0.0
            T.barrier_wait(k_loaded, 0)
            # K K^T
            T.gemm(k_shared, k_shared, gram_fragment, transpose_B=True, clear_accum=True)

            for member in T.serial(group):
                head = head_q * group + member
                for i in T.Parallel(CHUNK):
                    if first + i < tokens:
                        gate_shared[i] = g_cumsum[row, first + i, head] * LOG2_E
                        beta_shared[i] = beta[row, first + i, head]
                    else:
                        gate_shared[i] = 0.0
                        beta_shared[i] = 0.0
                # M = beta_i exp(g_i - g_j) <k_i, k_j>; what is not below the diagonal is never read
                for i, j in T.Parallel(CHUNK, CHUNK):
                    m_shared[i, j] = (
                        gram_fragment[i, j]
                        * beta_shared[i]
                        * T.exp2(T.min(gate_shared[i] - gate_shared[j], 0.0))
                    )

                # T_p = (I + M_pp)^-1, row after row: T_p[i] = e_i - sum_j<i M_pp[i, j] T_p[j]
                for i in T.unroll(DIAGONAL):
                    for p, c in T.Parallel(BLOCKS, DIAGONAL):
                        row_fragment[p, c] = T.if_then_else(c == i, 1.0, 0.0)
                    for j in T.unroll(i):
                        for p, c in T.Parallel(BLOCKS, DIAGONAL):
                            row_fragment[p, c] -= (
                                m_shared[p * DIAGONAL + i, p * DIAGONAL + j]
                                * inverse_shared[p * DIAGONAL + j, p * DIAGONAL + c]
                            )
                    for p, c in T.Parallel(BLOCKS, DIAGONAL):
                        inverse_shared[p * DIAGONAL + i, p * DIAGONAL + c] = row_fragment[p, c]

                # X = -T_1 (M_10 T_0) in both 32x32 blocks
                T.clear(pair_fragment)
                for j in T.unroll(DIAGONAL):
                    for p, i, c in T.Parallel(PAIRS, DIAGONAL, DIAGONAL):
                        pair_fragment[p, i, c] += (
                            m_shared[p * HALF + DIAGONAL + i, p * HALF + j]
                            * inverse_shared[p * HALF + j, p * HALF + c]
                        )
                for p, i, c in T.Parallel(PAIRS, DIAGONAL, DIAGONAL):
                    product_shared[p * DIAGONAL + i, c] = pair_fragment[p, i, c]
                T.clear(pair_fragment)
                for j in T.unroll(DIAGONAL):
                    for p, i, c in T.Parallel(PAIRS, DIAGONAL, DIAGONAL):
                        pair_fragment[p, i, c] -= (
                            inverse_shared[p * HALF + DIAGONAL + i, p * HALF + DIAGONAL + j]
                            * product_shared[p * DIAGONAL + j, c]
                        )
                for p, i, c in T.Parallel(PAIRS, DIAGONAL, DIAGONAL):
                    inverse_shared[p * HALF + DIAGONAL + i, p * HALF + c] = pair_fragment[p, i, c]

                # X = -T_1 (M_10 T_0) with 32x32 blocks
                T.clear(half_fragment)
                for j in T.serial(HALF):
                    for i, c in T.Parallel(HALF, HALF):
                        half_fragment[i, c] += m_shared[HALF + i, j] * inverse_shared[j, c]
                for i, c in T.Parallel(HALF, HALF):
                    product_shared[i, c] = half_fragment[i, c]
                T.clear(half_fragment)
                for j in T.serial(HALF):
                    for i, c in T.Parallel(HALF, HALF):
                        half_fragment[i, c] -= (
                            inverse_shared[HALF + i, HALF + j] * product_shared[j, c]
                        )
                for i, c in T.Parallel(HALF, HALF):
                    inverse_shared[HALF + i, c] = half_fragment[i, c]

                for i, j in T.Parallel(CHUNK, CHUNK):
                    if first + i < tokens:
                        A[row, first + i, head, j] = inverse_shared[i, j]

    return gdn_kkt_inverse
