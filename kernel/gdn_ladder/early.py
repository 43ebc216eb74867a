"""The early family of the ladder (v1, v2, v2b, v3, v5): one kernel, seven GEMMs a chunk.

A CTA owns the state slice S [128, block_dv] of one batch and one V head and walks the chunks of 64
tokens in order. U and W are formed explicitly, which is what this family has in common and what
the later families give up:

    U      = A (beta V)                          W = A (beta gamma K)
    V_new  = U - W S
    scores = scale tril(exp(g_i - g_j)) Q K^T
    O      = scale gamma (Q S) + scores V_new
    S      = gamma_last S + K^T (exp(g_last - g) V_new)

v20 shares this kernel without the step that names the family: V_new = A (beta (V - gamma K S)), six
GEMMs in series, small enough for two CTAs a multiprocessor.

A holds beta and the gate ratio inside its inverse but not the right-hand diag(beta), so beta
multiplies the rows of V and of gamma K. Operands are rounded to bf16 once, accumulators and the
state are FP32, and only g itself and differences g_i - g_j <= 0 are exponentiated.

Roles. With element-wise loads the same threads load, then compute, then load again. With TMA loads
a producer warp group of its own fills two sets of buffers, each with its own pair of barriers:
Q, K, g and beta are held until the chunk is done, V and A only until U and W are formed.

Tails. Rows past T are zeros: written by the element-wise loads, filled in by TMA, whose tensor maps
keep batch and time apart. The gate of such a row repeats that of the last token, so the last row of
a chunk always holds gamma_last. Output rows past T are not stored.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Literal

import tilelang
import tilelang.language as T
from tvm import tirx

from gdn_prefill.kernels.naming import named

CHUNK = 64
HEAD_DIM = 128
WARP_GROUP = 128
LOG2_E = 1.4426950408889634
SCALE = HEAD_DIM**-0.5
BF16 = "bfloat16"
FP32 = "float32"

PASS_CONFIGS = {tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True}


@dataclass(frozen=True)
class EarlyConfig:
    """What a kernel of the early family is compiled for; batch and token count stay dynamic.

    heads_q, heads_v: heads of q/k and of v; heads_v is a multiple of heads_q.
    block_dv: state columns of one CTA (32, 64 or 128).
    loads: "elementwise" by the computing threads, or "tma" by a warp group of its own.
    qk_stages: buffers for Q, K, g and beta; two of them only with TMA loads.
    forms_w: False takes V_new = A (beta (V - gamma K S)) instead of U - W S (v20).
    registers: registers a thread of (computing, producer) groups; None: the compiler's choice.
    ctas_per_multiprocessor: what the compiler's register limit must leave room for.
    use_initial_state: False starts from a zero state and never reads initial_state.
    """

    heads_q: int
    heads_v: int
    block_dv: int = 32
    loads: Literal["elementwise", "tma"] = "elementwise"
    qk_stages: int = 1
    forms_w: bool = True
    registers: tuple[int, int] | None = None
    ctas_per_multiprocessor: int = 1
    use_initial_state: bool = False

    def __post_init__(self) -> None:
        if self.heads_q < 1 or self.heads_v < 1 or self.heads_v % self.heads_q:
            raise ValueError(
                f"heads_v = {self.heads_v} must be a positive multiple of heads_q = {self.heads_q}"
            )
        if self.block_dv not in (32, 64, 128):
            raise ValueError(f"block_dv = {self.block_dv}, allowed are 32, 64 and 128")
        if self.loads not in ("elementwise", "tma"):
            raise ValueError(f"loads = {self.loads!r}, allowed are 'elementwise' and 'tma'")
        if self.qk_stages not in ((1, 2) if self.has_producer else (1,)):
            raise ValueError(
                f"qk_stages = {self.qk_stages} with loads = {self.loads!r}, "
                "allowed are 1, and 2 with 'tma'"
            )

    @property
    def has_producer(self) -> bool:
        return self.loads == "tma"

    @property
    def compute_threads(self) -> int:
        """One warp group has the registers for 64 state columns, two have them for 128."""
        return 2 * WARP_GROUP if self.block_dv == HEAD_DIM else WARP_GROUP

    @property
    def threads(self) -> int:
        return self.compute_threads + (WARP_GROUP if self.has_producer else 0)


@T.macro
def load_tile(place, source, first, head, column, tile, stage):
    """Element-wise load of the chunk's rows of one head, zeros past T."""
    for i, j in T.Parallel(CHUNK, tile.shape[2]):
        if first + i < place.tokens:
            tile[stage, i, j] = source[place.batch, first + i, head, column + j]
        else:
            tile[stage, i, j] = 0


@T.macro
def load_gates(place, inputs, first, tiles, stage):
    """g, repeating the last token's past T, and beta, zero past T."""
    for i in T.Parallel(CHUNK):
        tiles.g[stage, i] = inputs.g[place.batch, T.min(first + i, place.tokens - 1), place.head]
    for i in T.Parallel(CHUNK):
        if first + i < place.tokens:
            tiles.beta[stage, i] = inputs.beta[place.batch, first + i, place.head]
        else:
            tiles.beta[stage, i] = 0


@T.macro
def produce(config, place, inputs, tiles, barriers):
    """The producer warp group: Q, K, g and beta, then V and A, as their buffers come free."""
    for chunk in T.serial(place.chunks):
        first = chunk * CHUNK
        rows = slice(first, first + CHUNK)
        stage = chunk % config.qk_stages
        T.barrier_wait(barriers.qk_free[stage], (chunk // config.qk_stages + 1) % 2)
        T.tma_copy(
            inputs.q[place.batch, rows, place.head_q, 0:HEAD_DIM],
            tiles.q[stage, :, :],
            barrier=barriers.qk_ready[stage],
        )
        T.tma_copy(
            inputs.k[place.batch, rows, place.head_q, 0:HEAD_DIM],
            tiles.k[stage, :, :],
            barrier=barriers.qk_ready[stage],
        )
        load_gates(place, inputs, first, tiles, stage)
        T.barrier_arrive(barriers.qk_ready[stage])

        T.barrier_wait(barriers.va_free[0], (chunk + 1) % 2)
        T.tma_copy(
            inputs.v[place.batch, rows, place.head, place.dv : place.dv + config.block_dv],
            tiles.v[0, :, :],
            barrier=barriers.va_ready[0],
        )
        T.tma_copy(
            inputs.a[place.batch, rows, place.head, 0:CHUNK],
            tiles.a[0, :, :],
            barrier=barriers.va_ready[0],
        )
        T.barrier_arrive(barriers.va_ready[0])


@T.macro
def form_u_and_w(config, tiles, barriers, chunk, v_new_fragment):
    """V_new = U - W S, from three GEMMs."""
    stage = chunk % config.qk_stages
    w_fragment = T.alloc_fragment((CHUNK, HEAD_DIM), FP32)
    # -(beta gamma K): W comes out negated, so that V_new is a sum in one accumulator
    for i, j in T.Parallel(CHUNK, HEAD_DIM):
        tiles.scaled_k[i, j] = -tiles.beta[stage, i] * tiles.gamma[i] * tiles.k[stage, i, j]
    if config.has_producer:
        T.barrier_wait(barriers.va_ready[0], chunk % 2)
    # beta V, in place of V
    for i, j in T.Parallel(CHUNK, config.block_dv):
        tiles.v[0, i, j] = tiles.beta[stage, i] * tiles.v[0, i, j]
    T.fence_proxy_async()

    # -W = A (-(beta gamma K))
    T.gemm(tiles.a[0, :, :], tiles.scaled_k, w_fragment, clear_accum=True)
    # U = A (beta V)
    T.gemm(tiles.a[0, :, :], tiles.v[0, :, :], v_new_fragment, clear_accum=True)
    if config.has_producer:
        T.barrier_arrive(barriers.va_free[0])
    T.copy(w_fragment, tiles.w)
    T.fence_proxy_async()
    # V_new = U + (-W) S
    T.gemm(tiles.w, tiles.state, v_new_fragment)


@T.macro
def correct_v(config, tiles, barriers, chunk, v_new_fragment):
    """V_new = A W', from two GEMMs."""
    stage = chunk % config.qk_stages
    T.fence_proxy_async()
    # U' = K S
    T.gemm(tiles.k[stage, :, :], tiles.state, v_new_fragment, clear_accum=True)
    if config.has_producer:
        T.barrier_wait(barriers.va_ready[0], chunk % 2)
    # W' = beta (V - gamma U'), in place of V
    for i, j in T.Parallel(CHUNK, config.block_dv):
        v_new_fragment[i, j] = tiles.beta[stage, i] * (
            tiles.v[0, i, j] - tiles.gamma[i] * v_new_fragment[i, j]
        )
    T.copy(v_new_fragment, tiles.v[0, :, :])
    T.fence_proxy_async()
    # V_new = A W'
    T.gemm(tiles.a[0, :, :], tiles.v[0, :, :], v_new_fragment, clear_accum=True)
    if config.has_producer:
        T.barrier_arrive(barriers.va_free[0])


@T.macro
def compute(config, place, inputs, tiles, barriers):
    """The computing threads: every GEMM of a chunk, one after the other."""
    dv = config.block_dv
    state_columns = slice(place.dv, place.dv + dv)
    state_fragment = T.alloc_fragment((HEAD_DIM, dv), FP32)
    v_new_fragment = T.alloc_fragment((CHUNK, dv), FP32)
    scores_fragment = T.alloc_fragment((CHUNK, CHUNK), FP32)
    output_fragment = T.alloc_fragment((CHUNK, dv), FP32)

    if config.use_initial_state:
        T.copy(
            inputs.initial_state[place.batch, place.head, 0:HEAD_DIM, state_columns], state_fragment
        )
    else:
        T.clear(state_fragment)

    for chunk in T.serial(place.chunks):
        first = chunk * CHUNK
        stage = chunk % config.qk_stages
        if config.has_producer:
            T.barrier_wait(barriers.qk_ready[stage], chunk // config.qk_stages % 2)
        else:
            load_tile(place, inputs.q, first, place.head_q, 0, tiles.q, stage)
            load_tile(place, inputs.k, first, place.head_q, 0, tiles.k, stage)
            load_tile(place, inputs.v, first, place.head, place.dv, tiles.v, 0)
            load_tile(place, inputs.a, first, place.head, 0, tiles.a, 0)
            load_gates(place, inputs, first, tiles, stage)

        for i in T.Parallel(CHUNK):
            tiles.gamma[i] = T.exp2(tiles.g[stage, i] * LOG2_E)
        for i in T.Parallel(CHUNK):
            tiles.decay[i] = T.exp2((tiles.g[stage, CHUNK - 1] - tiles.g[stage, i]) * LOG2_E)
        T.copy(state_fragment, tiles.state)

        if config.forms_w:
            form_u_and_w(config, tiles, barriers, chunk, v_new_fragment)
        else:
            correct_v(config, tiles, barriers, chunk, v_new_fragment)
        T.copy(v_new_fragment, tiles.v_new)

        # Q K^T
        T.gemm(
            tiles.q[stage, :, :],
            tiles.k[stage, :, :],
            scores_fragment,
            transpose_B=True,
            clear_accum=True,
        )
        # scores = scale tril(exp(g_i - g_j)) Q K^T
        for i, j in T.Parallel(CHUNK, CHUNK):
            scores_fragment[i, j] = T.if_then_else(
                i >= j,
                scores_fragment[i, j]
                * (SCALE * T.exp2((tiles.g[stage, i] - tiles.g[stage, j]) * LOG2_E)),
                0,
            )
        T.copy(scores_fragment, tiles.scores)
        T.fence_proxy_async()

        # Q S
        T.gemm(tiles.q[stage, :, :], tiles.state, output_fragment, clear_accum=True)
        # O = scale gamma (Q S) + scores V_new
        for i, j in T.Parallel(CHUNK, dv):
            output_fragment[i, j] *= SCALE * tiles.gamma[i]
        T.gemm(tiles.scores, tiles.v_new, output_fragment)
        for i, j in T.Parallel(CHUNK, dv):
            if first + i < place.tokens:
                inputs.output[place.batch, first + i, place.head, place.dv + j] = output_fragment[
                    i, j
                ]

        # S = gamma_last S + K^T (exp(g_last - g) V_new)
        for i, j in T.Parallel(CHUNK, dv):
            tiles.decayed[i, j] = v_new_fragment[i, j] * tiles.decay[i]
        T.fence_proxy_async()
        for i, j in T.Parallel(HEAD_DIM, dv):
            state_fragment[i, j] *= tiles.gamma[CHUNK - 1]
        T.gemm(tiles.k[stage, :, :], tiles.decayed, state_fragment, transpose_A=True)
        if config.has_producer:
            T.barrier_arrive(barriers.qk_free[stage])

    T.copy(state_fragment, inputs.final_state[place.batch, place.head, 0:HEAD_DIM, state_columns])


def early_kernel(config: EarlyConfig) -> tirx.PrimFunc:
    """Build the kernel for `config` as a TileLang PrimFunc.

    Its arguments: q, k [B, T, Hq, 128] bf16, v [B, T, Hv, 128] bf16, g_cumsum and beta [B, T, Hv]
    fp32, a [B, T, Hv, 64] bf16, initial_state [B, Hv, 128, 128] fp32 (of that shape even where it
    is not read), output [B, T, Hv, 128] bf16, final_state [B, Hv, 128, 128] fp32. B and T are
    dynamic.
    """
    batch, tokens = T.dynamic("batch"), T.dynamic("tokens")
    heads_q, heads_v, dv, stages = (
        config.heads_q,
        config.heads_v,
        config.block_dv,
        config.qk_stages,
    )
    slices = HEAD_DIM // dv

    @T.prim_func
    def gdn_early(
        q: T.Tensor((batch, tokens, heads_q, HEAD_DIM), BF16),
        k: T.Tensor((batch, tokens, heads_q, HEAD_DIM), BF16),
        v: T.Tensor((batch, tokens, heads_v, HEAD_DIM), BF16),
        g_cumsum: T.Tensor((batch, tokens, heads_v), FP32),
        beta: T.Tensor((batch, tokens, heads_v), FP32),
        a: T.Tensor((batch, tokens, heads_v, CHUNK), BF16),
        initial_state: T.Tensor((batch, heads_v, HEAD_DIM, HEAD_DIM), FP32),
        output: T.Tensor((batch, tokens, heads_v, HEAD_DIM), BF16),
        final_state: T.Tensor((batch, heads_v, HEAD_DIM, HEAD_DIM), FP32),
    ):
        with T.Kernel(slices * heads_v * batch, threads=config.threads) as block:
            if config.ctas_per_multiprocessor > 1:
                T.annotate_min_blocks_per_sm(config.ctas_per_multiprocessor)
            inputs = SimpleNamespace(
                q=q,
                k=k,
                v=v,
                g=g_cumsum,
                beta=beta,
                a=a,
                initial_state=initial_state,
                output=output,
                final_state=final_state,
            )
            place = SimpleNamespace(
                batch=block // (slices * heads_v),
                head=block // slices % heads_v,
                head_q=block // slices % heads_v // (heads_v // heads_q),
                dv=block % slices * dv,
                tokens=tokens,
                chunks=T.ceildiv(tokens, CHUNK),
            )
            tiles = named(
                "_shared",
                q=T.alloc_shared((stages, CHUNK, HEAD_DIM), BF16),
                k=T.alloc_shared((stages, CHUNK, HEAD_DIM), BF16),
                v=T.alloc_shared((1, CHUNK, dv), BF16),
                a=T.alloc_shared((1, CHUNK, CHUNK), BF16),
                g=T.alloc_shared((stages, CHUNK), FP32, scope="shared"),
                beta=T.alloc_shared((stages, CHUNK), FP32, scope="shared"),
                gamma=T.alloc_shared((CHUNK,), FP32, scope="shared"),
                decay=T.alloc_shared((CHUNK,), FP32, scope="shared"),  # exp(g_last - g)
                scaled_k=T.alloc_shared((CHUNK, HEAD_DIM), BF16) if config.forms_w else None,
                w=T.alloc_shared((CHUNK, HEAD_DIM), BF16) if config.forms_w else None,
                state=T.alloc_shared((HEAD_DIM, dv), BF16),
                scores=T.alloc_shared((CHUNK, CHUNK), BF16),
                v_new=T.alloc_shared((CHUNK, dv), BF16),
                decayed=T.alloc_shared((CHUNK, dv), BF16),
            )
            if config.has_producer:
                barriers = named(
                    qk_ready=T.alloc_barrier([WARP_GROUP] * stages),
                    qk_free=T.alloc_barrier([config.compute_threads] * stages),
                    va_ready=T.alloc_barrier([WARP_GROUP]),
                    va_free=T.alloc_barrier([config.compute_threads]),
                )
                if T.get_thread_binding() < config.compute_threads:
                    if config.registers is not None:
                        T.set_max_nreg(config.registers[0], 1)
                    compute(config, place, inputs, tiles, barriers)
                else:
                    if config.registers is not None:
                        T.set_max_nreg(config.registers[1], 0)
                    produce(config, place, inputs, tiles, barriers)
            else:
                compute(config, place, inputs, tiles, None)

    return gdn_early
