"""The early family of the ladder (v1, v2, v2b, v3, v5) as one kernel: seven tensor-core GEMMs a chunk.

A CTA owns the state slice S [128, block_dv] of one batch and one V head and walks the chunks of 64
tokens in order. U and W are formed explicitly, which is what this family has in common and what
the later families give up:

    U      = A (beta V)                          W = A (beta gamma K)
    V_new  = U - W S
    scores = scale tril(exp(g_i - g_j)) Q K^T
    O      = scale gamma (Q S) + scores V_new
    S      = gamma_last S + K^T (exp(g_last - g) V_new)

A holds beta and the gate ratio inside its inverse but not the right-hand diag(beta), so beta
multiplies the rows of V and of gamma K. Every operand is rounded to bf16 once, every accumulator
and the state are FP32, and only differences g_i - g_j <= 0 and g itself are exponentiated.

Roles. With element-wise loads every thread computes and loads, one after the other. With TMA loads
a producer warp group of its own fills two sets of buffers, each with its pair of barriers:
Q, K, g and beta stay until the chunk is done, V and A are free again once U and W are formed.

In the last chunk rows past T are loaded as zeros (g repeats the last valid gate, so that it is
also gamma_last), and only the valid rows of the output are written.
"""

from dataclasses import dataclass
from typing import Literal

import tilelang
import tilelang.language as T
from tvm import tirx

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
    """What a kernel of the early family is compiled for.

    heads_q, heads_v: heads of q/k and of v; heads_v is a multiple of heads_q.
    block_dv: state columns of one CTA (32, 64 or 128).
    loads: "elementwise" by the computing threads, or "tma" by a warp group of its own.
    qk_stages: buffers for Q, K, g and beta; more than one needs TMA loads to be of any use.
    use_initial_state: False starts from a zero state and never reads initial_state.
    """

    heads_q: int
    heads_v: int
    block_dv: int = 32
    loads: Literal["elementwise", "tma"] = "elementwise"
    qk_stages: int = 1
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
        if self.qk_stages not in (1, 2) or (self.qk_stages == 2 and self.loads != "tma"):
            raise ValueError(
                f"qk_stages = {self.qk_stages} with loads = {self.loads!r}: allowed is 1, or 2 with 'tma'"
            )

    @property
    def compute_threads(self) -> int:
        """One warp group holds up to 64 state columns in registers, two hold 128."""
        return 2 * WARP_GROUP if self.block_dv == HEAD_DIM else WARP_GROUP

    @property
    def producer_threads(self) -> int:
        return WARP_GROUP if self.loads == "tma" else 0

    @property
    def threads(self) -> int:
        return self.compute_threads + self.producer_threads


def early_kernel(config: EarlyConfig) -> tirx.PrimFunc:
    """The PrimFunc (q, k, v, g_cumsum, beta, a, initial_state, output, final_state) for `config`.

    Batch and token count are dynamic. initial_state must have the state's shape even where
    `config.use_initial_state` is False (it is not read then).
    """
    heads_q, heads_v, block_dv = config.heads_q, config.heads_v, config.block_dv
    group = heads_v // heads_q
    tiles = HEAD_DIM // block_dv
    stages = config.qk_stages
    tma = config.loads == "tma"
    compute_threads = config.compute_threads
    producer_threads = config.producer_threads

    batch = T.dynamic("batch")
    tokens = T.dynamic("tokens")

    @T.macro
    def load_tile(source, bb, start, head, column, tile_shared, stage):
        for i, j in T.Parallel(CHUNK, tile_shared.shape[2]):
            if start + i < tokens:
                tile_shared[stage, i, j] = source[bb, start + i, head, column + j]
            else:
                tile_shared[stage, i, j] = 0

    @T.macro
    def load_gates(g_cumsum, beta, bb, start, head, g_shared, beta_shared, stage):
        for i in T.Parallel(CHUNK):
            g_shared[stage, i] = g_cumsum[bb, T.min(start + i, tokens - 1), head]
        for i in T.Parallel(CHUNK):
            if start + i < tokens:
                beta_shared[stage, i] = beta[bb, start + i, head]
            else:
                beta_shared[stage, i] = 0

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
        with T.Kernel(tiles * batch * heads_v, threads=config.threads) as block:
            dv_start = block % tiles * block_dv
            head = block // tiles % heads_v
            bb = block // (tiles * heads_v)
            head_qk = head // group
            chunks = T.ceildiv(tokens, CHUNK)

            q_shared = T.alloc_shared((stages, CHUNK, HEAD_DIM), BF16)
            k_shared = T.alloc_shared((stages, CHUNK, HEAD_DIM), BF16)
            v_shared = T.alloc_shared((1, CHUNK, block_dv), BF16)
            a_shared = T.alloc_shared((1, CHUNK, CHUNK), BF16)
            g_shared = T.alloc_shared((stages, CHUNK), FP32, scope="shared")
            beta_shared = T.alloc_shared((stages, CHUNK), FP32, scope="shared")

            gamma_shared = T.alloc_shared((CHUNK,), FP32, scope="shared")
            decay_to_last_shared = T.alloc_shared((CHUNK,), FP32, scope="shared")
            scaled_k_shared = T.alloc_shared((CHUNK, HEAD_DIM), BF16)
            w_shared = T.alloc_shared((CHUNK, HEAD_DIM), BF16)
            state_shared = T.alloc_shared((HEAD_DIM, block_dv), BF16)
            scores_shared = T.alloc_shared((CHUNK, CHUNK), BF16)
            v_new_shared = T.alloc_shared((CHUNK, block_dv), BF16)
            decayed_v_shared = T.alloc_shared((CHUNK, block_dv), BF16)

            state_fragment = T.alloc_fragment((HEAD_DIM, block_dv), FP32)
            w_fragment = T.alloc_fragment((CHUNK, HEAD_DIM), FP32)
            v_new_fragment = T.alloc_fragment((CHUNK, block_dv), FP32)
            scores_fragment = T.alloc_fragment((CHUNK, CHUNK), FP32)
            output_fragment = T.alloc_fragment((CHUNK, block_dv), FP32)

            if tma:
                qk_ready = T.alloc_barrier([producer_threads] * stages)
                qk_free = T.alloc_barrier([compute_threads] * stages)
                va_ready = T.alloc_barrier([producer_threads])
                va_free = T.alloc_barrier([compute_threads])

            thread = T.get_thread_binding()

            if thread < compute_threads:
                if config.use_initial_state:
                    T.copy(
                        initial_state[bb, head, 0:HEAD_DIM, dv_start : dv_start + block_dv],
                        state_fragment,
                    )
                else:
                    T.clear(state_fragment)

                for chunk in T.serial(chunks):
                    start = chunk * CHUNK
                    stage = chunk % stages
                    if tma:
                        T.barrier_wait(qk_ready[stage], chunk // stages % 2)
                    else:
                        load_tile(q, bb, start, head_qk, 0, q_shared, stage)
                        load_tile(k, bb, start, head_qk, 0, k_shared, stage)
                        load_tile(v, bb, start, head, dv_start, v_shared, 0)
                        load_tile(a, bb, start, head, 0, a_shared, 0)
                        load_gates(g_cumsum, beta, bb, start, head, g_shared, beta_shared, stage)

                    for i in T.Parallel(CHUNK):
                        gamma_shared[i] = T.exp2(g_shared[stage, i] * LOG2_E)
                    for i in T.Parallel(CHUNK):
                        decay_to_last_shared[i] = T.exp2(
                            (g_shared[stage, CHUNK - 1] - g_shared[stage, i]) * LOG2_E
                        )
                    T.copy(state_fragment, state_shared)

                    # -(beta gamma K), so that W comes out negated and V_new is a plain sum
                    for i, j in T.Parallel(CHUNK, HEAD_DIM):
                        scaled_k_shared[i, j] = (
                            -beta_shared[stage, i] * gamma_shared[i] * k_shared[stage, i, j]
                        )
                    if tma:
                        T.barrier_wait(va_ready[0], chunk % 2)
                    # beta V, in place
                    for i, j in T.Parallel(CHUNK, block_dv):
                        v_shared[0, i, j] = beta_shared[stage, i] * v_shared[0, i, j]
                    T.fence_proxy_async()

                    # -W = A (-beta gamma K)
                    T.gemm(a_shared[0, :, :], scaled_k_shared, w_fragment, clear_accum=True)
                    # U = A (beta V)
                    T.gemm(a_shared[0, :, :], v_shared[0, :, :], v_new_fragment, clear_accum=True)
                    if tma:
                        T.barrier_arrive(va_free[0])
                    T.copy(w_fragment, w_shared)
                    T.fence_proxy_async()
                    # V_new = U + (-W) S
                    T.gemm(w_shared, state_shared, v_new_fragment, clear_accum=False)
                    T.copy(v_new_fragment, v_new_shared)

                    # Q K^T
                    T.gemm(
                        q_shared[stage, :, :],
                        k_shared[stage, :, :],
                        scores_fragment,
                        transpose_B=True,
                        clear_accum=True,
                    )
                    # scores = scale tril(exp(g_i - g_j)) Q K^T
                    for i, j in T.Parallel(CHUNK, CHUNK):
                        scores_fragment[i, j] = T.if_then_else(
                            i >= j,
                            scores_fragment[i, j]
                            * SCALE
                            * T.exp2((g_shared[stage, i] - g_shared[stage, j]) * LOG2_E),
                            0,
                        )
                    T.copy(scores_fragment, scores_shared)
                    T.fence_proxy_async()

                    # Q S
                    T.gemm(
                        q_shared[stage, :, :], state_shared, output_fragment, clear_accum=True
                    )
                    # O = scale gamma (Q S) + scores V_new
                    for i, j in T.Parallel(CHUNK, block_dv):
                        output_fragment[i, j] *= SCALE * gamma_shared[i]
                    T.gemm(scores_shared, v_new_shared, output_fragment, clear_accum=False)
                    for i, j in T.Parallel(CHUNK, block_dv):
                        if start + i < tokens:
                            output[bb, start + i, head, dv_start + j] = output_fragment[i, j]

                    # S = gamma_last S + K^T (exp(g_last - g) V_new)
                    for i, j in T.Parallel(CHUNK, block_dv):
                        decayed_v_shared[i, j] = v_new_fragment[i, j] * decay_to_last_shared[i]
                    T.fence_proxy_async()
                    for i, j in T.Parallel(HEAD_DIM, block_dv):
                        state_fragment[i, j] *= gamma_shared[CHUNK - 1]
                    T.gemm(
                        k_shared[stage, :, :],
                        decayed_v_shared,
                        state_fragment,
                        transpose_A=True,
                        clear_accum=False,
                    )
                    if tma:
                        T.barrier_arrive(qk_free[stage])

                T.copy(
                    state_fragment,
                    final_state[bb, head, 0:HEAD_DIM, dv_start : dv_start + block_dv],
                )
            else:
                if tma:
                    for chunk in T.serial(chunks):
                        start = chunk * CHUNK
                        stop = start + CHUNK
                        stage = chunk % stages
                        T.barrier_wait(qk_free[stage], (chunk // stages + 1) % 2)
                        if stop <= tokens:
                            T.tma_copy(
                                q[bb, start:stop, head_qk, 0:HEAD_DIM],
                                q_shared[stage, :, :],
                                barrier=qk_ready[stage],
                            )
                            T.tma_copy(
                                k[bb, start:stop, head_qk, 0:HEAD_DIM],
                                k_shared[stage, :, :],
                                barrier=qk_ready[stage],
                            )
                        else:
                            load_tile(q, bb, start, head_qk, 0, q_shared, stage)
                            load_tile(k, bb, start, head_qk, 0, k_shared, stage)
                            T.fence_proxy_async()
                        load_gates(g_cumsum, beta, bb, start, head, g_shared, beta_shared, stage)
                        T.barrier_arrive(qk_ready[stage])

                        T.barrier_wait(va_free[0], (chunk + 1) % 2)
                        if stop <= tokens:
                            T.tma_copy(
                                v[bb, start:stop, head, dv_start : dv_start + block_dv],
                                v_shared[0, :, :],
                                barrier=va_ready[0],
                            )
                            T.tma_copy(
                                a[bb, start:stop, head, 0:CHUNK],
                                a_shared[0, :, :],
                                barrier=va_ready[0],
                            )
                        else:
                            load_tile(v, bb, start, head, dv_start, v_shared, 0)
                            load_tile(a, bb, start, head, 0, a_shared, 0)
                            T.fence_proxy_async()
                        T.barrier_arrive(va_ready[0])

    return gdn_early
