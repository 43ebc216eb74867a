"""The four-group kernel, which release 0.1 shipped: one CTA owns one slice of one head's state and
walks its chunks in order.

Per chunk of C = 64 tokens (gamma = exp(g), g the within-chunk cumulative log decay, S the state
before the chunk):

    U'     = K S                                       V group
    W'     = beta * (V - gamma * U')                   V group, in place of V
    V_new  = A W'                                      V group
    P      = scale * tril(exp(g_i - g_j)) * (Q K^T)    O group
    O      = scale * gamma * (Q S) + P V_new           O group
    S_next = gamma_last * S + K^T (exp(g_last - g) * V_new)    state group

Roles of the 512 threads: three consumer warp groups (state, V, O) and a producer warp group whose
warps load Q and K, load V and beta, load A and the gate, and store the output of the chunk before.
The serial chain of a chunk is S -> bf16 in shared memory -> K S -> A W' -> decayed V_new -> K^T
(.), two barrier rounds; the O group stands beside it.

A tail chunk needs no code of its own: the tensor maps keep batch and time apart, so rows past T are
filled with zeros by the loads and dropped by the store, and the gate of such a row repeats that of
the last token, which makes gamma[C - 1] the decay of the whole chunk at every length.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import tilelang
import tilelang.language as T
from tilelang.layout import make_swizzled_layout

from gdn_prefill.kernels.naming import named

CHUNK = 64
HEAD_DIM = 128

WARP = 32
WARP_GROUP = 4 * WARP
CONSUMER_GROUPS = 3  # state, V, O
LOADING_WARPS = 3  # Q/K, V/beta, A/gate
CONSUMERS = CONSUMER_GROUPS * WARP_GROUP
LOADERS = LOADING_WARPS * WARP
THREADS = CONSUMERS + WARP_GROUP

STATE_START, V_START, O_START = (group * WARP_GROUP for group in range(CONSUMER_GROUPS))
QK_START, V_BETA_START, A_GATE_START, STORE_START = (CONSUMERS + warp * WARP for warp in range(4))

# Thread ranges by role, for reports about the kernel.
ROLES = {
    "state": (STATE_START, V_START),
    "V": (V_START, O_START),
    "O": (O_START, QK_START),
    "load_qk": (QK_START, V_BETA_START),
    "load_v_beta": (V_BETA_START, A_GATE_START),
    "load_a_gate": (A_GATE_START, STORE_START),
    "store": (STORE_START, THREADS),
}
V_GROUP_SYNC, O_GROUP_SYNC = 1, 2  # named barriers inside a warp group; 0 is the whole block's

LOG2_E = 1.4426950408889634
REGISTERS_PER_BLOCK = 65536

# The roles order their shared memory themselves; the automatic syncs would add a dozen to every
# chunk.
PASS_CONFIGS = {
    tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True,
    tilelang.PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True,
}


@dataclass(frozen=True)
class ForwardConfig:
    """What one compiled forward kernel is specialised on; batch and length are run-time arguments.

    registers: registers per thread of (state, V, O, producer) after setmaxnreg.
    """

    heads_q: int
    heads_v: int
    block_dv: int = HEAD_DIM
    use_initial_state: bool = False
    store_final_state: bool = True
    stages: int = 2
    registers: tuple[int, int, int, int] = (168, 160, 152, 32)

    def __post_init__(self) -> None:
        if self.heads_q < 1 or self.heads_v % self.heads_q:
            raise ValueError(f"heads_v={self.heads_v} must be a multiple of heads_q={self.heads_q}")
        if self.block_dv not in (32, 64, 128):
            raise ValueError(f"block_dv={self.block_dv} must be 32, 64 or 128")
        if self.stages < 2:
            raise ValueError(f"stages={self.stages} must be at least 2")
        pool = REGISTERS_PER_BLOCK // WARP_GROUP
        if sum(self.registers) > pool or any(count % 8 for count in self.registers):
            raise ValueError(
                f"registers={self.registers} must be multiples of 8 that sum to at most {pool}"
            )

    @property
    def name(self) -> str:
        """A readable name of the specialisation, unique among the shipped ones."""
        start = "init" if self.use_initial_state else "zero"
        end = "final" if self.store_final_state else "drop"
        return f"forward_hq{self.heads_q}_hv{self.heads_v}_dv{self.block_dv}_{start}_{end}"


@T.macro
def state_role(config, place, inputs, tiles, barriers):
    """Owns the fp32 state: publishes it as bf16, decays it, adds K^T (decayed V_new)."""
    dv = config.block_dv
    state_fragment = T.alloc_fragment((HEAD_DIM, dv), "float32")
    if config.use_initial_state:
        T.copy(
            inputs.initial_state[place.batch, place.head, 0:HEAD_DIM, place.dv : place.dv + dv],
            state_fragment,
        )
    else:
        T.clear(state_fragment)
    for chunk in T.serial(place.chunks):
        stage = chunk % config.stages
        T.barrier_wait(barriers.state_consumed, (chunk + 1) % 2)
        T.copy(state_fragment, tiles.state)
        T.fence_proxy_async()
        T.barrier_arrive(barriers.state_ready)

        # S = gamma_last S
        T.barrier_wait(barriers.inputs_ready[stage], (chunk // config.stages) % 2)
        for i, j in T.Parallel(HEAD_DIM, dv):
            state_fragment[i, j] *= tiles.gamma[stage, CHUNK - 1]

        # S += K^T (exp(g_last - g) V_new)
        T.barrier_wait(barriers.decayed_ready, chunk % 2)
        T.gemm(tiles.k[stage, :, :], tiles.decayed, state_fragment, transpose_A=True)
        T.barrier_arrive(barriers.inputs_free[stage])
    if config.store_final_state:
        T.copy(
            state_fragment,
            inputs.final_state[place.batch, place.head, 0:HEAD_DIM, place.dv : place.dv + dv],
        )


@T.macro
def v_role(config, place, tiles, barriers):
    """Turns V into V_new with the old state, and into its decayed copy for the state update."""
    dv = config.block_dv
    u_fragment = T.alloc_fragment((CHUNK, dv), "float32")
    v_new_fragment = T.alloc_fragment((CHUNK, dv), "float32")
    for chunk in T.serial(place.chunks):
        stage = chunk % config.stages
        T.barrier_wait(barriers.inputs_ready[stage], (chunk // config.stages) % 2)
        T.barrier_wait(barriers.state_ready, chunk % 2)

        # U' = K S
        T.gemm(tiles.k[stage, :, :], tiles.state, u_fragment, clear_accum=True)
        T.barrier_arrive(barriers.state_consumed)

        # W' = beta (V - gamma U')
        for i, j in T.Parallel(CHUNK, dv):
            u_fragment[i, j] = tiles.beta[stage, i] * (
                tiles.v[stage, i, j] - tiles.gamma[stage, i] * u_fragment[i, j]
            )
        for i, j in T.Parallel(CHUNK, dv):
            tiles.v[stage, i, j] = u_fragment[i, j]
        T.fence_proxy_async()
        T.sync_threads(V_GROUP_SYNC, WARP_GROUP)

        # V_new = A W'
        T.gemm(tiles.a[stage, :, :], tiles.v[stage, :, :], v_new_fragment, clear_accum=True)

        # The state group's K^T (.) of the chunk before is over: it came before this chunk's
        # state_ready.
        for i, j in T.Parallel(CHUNK, dv):
            tiles.decayed[i, j] = v_new_fragment[i, j] * tiles.decay[stage, i]
        T.fence_proxy_async()
        T.barrier_arrive(barriers.decayed_ready)

        T.barrier_wait(barriers.v_new_consumed, (chunk + 1) % 2)
        T.copy(v_new_fragment, tiles.v_new)
        T.fence_proxy_async()
        T.barrier_arrive(barriers.v_new_ready)
        T.barrier_arrive(barriers.inputs_free[stage])


@T.macro
def o_role(config, place, scale, tiles, barriers):
    """Makes the gated scores ahead of the chain, then the output from the old state and V_new."""
    dv = config.block_dv
    score_fragment = T.alloc_fragment((CHUNK, CHUNK), "float32")
    o_fragment = T.alloc_fragment((CHUNK, dv), "float32")
    for chunk in T.serial(place.chunks):
        stage = chunk % config.stages
        T.barrier_wait(barriers.inputs_ready[stage], (chunk // config.stages) % 2)

        # P = scale tril(exp(g_i - g_j)) (Q K^T)
        T.gemm(
            tiles.q[stage, :, :],
            tiles.k[stage, :, :],
            score_fragment,
            transpose_B=True,
            clear_accum=True,
        )
        for i, j in T.Parallel(CHUNK, CHUNK):
            score_fragment[i, j] = T.if_then_else(
                i >= j,
                score_fragment[i, j]
                * (scale * T.exp2(tiles.gate[stage, i] - tiles.gate[stage, j])),
                0.0,
            )
        T.copy(score_fragment, tiles.scores)
        T.fence_proxy_async()
        T.sync_threads(O_GROUP_SYNC, WARP_GROUP)

        # O = scale gamma (Q S)
        T.barrier_wait(barriers.state_ready, chunk % 2)
        T.gemm(tiles.q[stage, :, :], tiles.state, o_fragment, clear_accum=True)
        T.barrier_arrive(barriers.state_consumed)
        for i, j in T.Parallel(CHUNK, dv):
            o_fragment[i, j] *= scale * tiles.gamma[stage, i]
        T.barrier_arrive(barriers.inputs_free[stage])

        # O += P V_new
        T.barrier_wait(barriers.v_new_ready, chunk % 2)
        T.gemm(tiles.scores, tiles.v_new, o_fragment)
        T.barrier_arrive(barriers.v_new_consumed)

        T.barrier_wait(barriers.output_stored, (chunk + 1) % 2)
        T.copy(o_fragment, tiles.output)
        T.fence_proxy_async()
        T.barrier_arrive(barriers.output_ready)


@T.macro
def load_qk_warp(config, place, inputs, tiles, barriers):
    for chunk in T.serial(place.chunks):
        stage = chunk % config.stages
        first = chunk * CHUNK
        T.barrier_wait(barriers.inputs_free[stage], (chunk // config.stages + 1) % 2)
        T.tma_copy(
            inputs.k[place.batch, first : first + CHUNK, place.head_q, 0:HEAD_DIM],
            tiles.k[stage, :, :],
            barrier=barriers.inputs_ready[stage],
        )
        T.tma_copy(
            inputs.q[place.batch, first : first + CHUNK, place.head_q, 0:HEAD_DIM],
            tiles.q[stage, :, :],
            barrier=barriers.inputs_ready[stage],
        )
        T.barrier_arrive(barriers.inputs_ready[stage])


@T.macro
def load_v_beta_warp(config, place, inputs, tiles, barriers):
    dv = config.block_dv
    beta_fragment = T.alloc_fragment((CHUNK,), "float32")
    for chunk in T.serial(place.chunks):
        stage = chunk % config.stages
        first = chunk * CHUNK
        for i in T.Parallel(CHUNK):
            beta_fragment[i] = inputs.beta[
                place.batch, T.min(first + i, place.tokens - 1), place.head
            ]
        T.barrier_wait(barriers.inputs_free[stage], (chunk // config.stages + 1) % 2)
        T.tma_copy(
            inputs.v[place.batch, first : first + CHUNK, place.head, place.dv : place.dv + dv],
            tiles.v[stage, :, :],
            barrier=barriers.inputs_ready[stage],
        )
        for i in T.Parallel(CHUNK):
            tiles.beta[stage, i] = beta_fragment[i]
        T.barrier_arrive(barriers.inputs_ready[stage])


@T.macro
def load_a_gate_warp(config, place, inputs, tiles, barriers):
    """Loads A and the gate; turns the gate into the factors that the consumers multiply with."""
    gate_fragment = T.alloc_fragment((CHUNK,), "float32")
    gate_last = T.alloc_local((1,), "float32")
    for chunk in T.serial(place.chunks):
        stage = chunk % config.stages
        first = chunk * CHUNK
        last = T.min(first + CHUNK, place.tokens) - 1
        for i in T.Parallel(CHUNK):
            gate_fragment[i] = inputs.g[place.batch, T.min(first + i, last), place.head] * LOG2_E
        gate_last[0] = inputs.g[place.batch, last, place.head] * LOG2_E
        T.barrier_wait(barriers.inputs_free[stage], (chunk // config.stages + 1) % 2)
        T.tma_copy(
            inputs.a[place.batch, first : first + CHUNK, place.head, 0:CHUNK],
            tiles.a[stage, :, :],
            barrier=barriers.inputs_ready[stage],
        )
        for i in T.Parallel(CHUNK):
            tiles.gate[stage, i] = gate_fragment[i]
            tiles.gamma[stage, i] = T.exp2(gate_fragment[i])
            tiles.decay[stage, i] = T.exp2(gate_last[0] - gate_fragment[i])
        T.barrier_arrive(barriers.inputs_ready[stage])


@T.macro
def store_warp(config, place, inputs, tiles, barriers):
    dv = config.block_dv
    for chunk in T.serial(place.chunks):
        first = chunk * CHUNK
        T.barrier_wait(barriers.output_ready, chunk % 2)
        T.copy(
            tiles.output,
            inputs.output[place.batch, first : first + CHUNK, place.head, place.dv : place.dv + dv],
        )
        T.barrier_arrive(barriers.output_stored)


def forward_kernel(config: ForwardConfig):
    """Build the forward kernel as a TileLang PrimFunc.

    Arguments of the PrimFunc: q, k [B, T, Hq, 128] bf16, v [B, T, Hv, 128] bf16, g_cumsum, beta [B,
    T, Hv] fp32, A [B, T, Hv, 64] bf16, initial_state [B, Hv, 128, 128] fp32 (a one-element dummy
    unless config.use_initial_state), output [B, T, Hv, 128] bf16, final_state [B, Hv, 128, 128]
    fp32 (a one-element dummy unless config.store_final_state), scale fp32. B and T are dynamic.
    """
    batch, tokens = T.dynamic("batch"), T.dynamic("tokens")
    heads_q, heads_v, dv = config.heads_q, config.heads_v, config.block_dv
    slices = HEAD_DIM // dv
    state_shape = (batch, heads_v, HEAD_DIM, HEAD_DIM)
    bf16, fp32 = "bfloat16", "float32"

    @T.prim_func
    def gdn_forward(
        q: T.Tensor((batch, tokens, heads_q, HEAD_DIM), bf16),
        k: T.Tensor((batch, tokens, heads_q, HEAD_DIM), bf16),
        v: T.Tensor((batch, tokens, heads_v, HEAD_DIM), bf16),
        g_cumsum: T.Tensor((batch, tokens, heads_v), fp32),
        beta: T.Tensor((batch, tokens, heads_v), fp32),
        A: T.Tensor((batch, tokens, heads_v, CHUNK), bf16),
        initial_state: T.Tensor(state_shape if config.use_initial_state else (1,), fp32),
        output: T.Tensor((batch, tokens, heads_v, HEAD_DIM), bf16),
        final_state: T.Tensor(state_shape if config.store_final_state else (1,), fp32),
        scale: T.float32,
    ):
        with T.Kernel(slices * heads_v * batch, threads=THREADS) as (block,):
            inputs = SimpleNamespace(
                q=q,
                k=k,
                v=v,
                g=g_cumsum,
                beta=beta,
                a=A,
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
                q=T.alloc_shared((config.stages, CHUNK, HEAD_DIM), bf16),
                k=T.alloc_shared((config.stages, CHUNK, HEAD_DIM), bf16),
                v=T.alloc_shared((config.stages, CHUNK, dv), bf16),
                a=T.alloc_shared((config.stages, CHUNK, CHUNK), bf16),
                beta=T.alloc_shared((config.stages, CHUNK), fp32, scope="shared"),
                gate=T.alloc_shared((config.stages, CHUNK), fp32, scope="shared"),  # log2 of gamma
                gamma=T.alloc_shared((config.stages, CHUNK), fp32, scope="shared"),
                decay=T.alloc_shared(
                    (config.stages, CHUNK), fp32, scope="shared"
                ),  # exp(g_last - g)
                state=T.alloc_shared((HEAD_DIM, dv), bf16),
                v_new=T.alloc_shared((CHUNK, dv), bf16),
                decayed=T.alloc_shared((CHUNK, dv), bf16),
                scores=T.alloc_shared((CHUNK, CHUNK), bf16),
                output=T.alloc_shared((CHUNK, dv), bf16),
            )
            barriers = named(
                inputs_ready=T.alloc_barrier([LOADERS] * config.stages),
                inputs_free=T.alloc_barrier([CONSUMERS] * config.stages),
                state_ready=T.alloc_barrier(WARP_GROUP),  # by the state group
                state_consumed=T.alloc_barrier(2 * WARP_GROUP),  # by the V and O groups
                decayed_ready=T.alloc_barrier(WARP_GROUP),  # by the V group
                v_new_ready=T.alloc_barrier(WARP_GROUP),  # by the V group
                v_new_consumed=T.alloc_barrier(WARP_GROUP),  # by the O group
                output_ready=T.alloc_barrier(WARP_GROUP),  # by the O group
                output_stored=T.alloc_barrier(WARP),  # by the store warp
            )
            T.annotate_layout({tiles.output: make_swizzled_layout(tiles.output)})
            thread = T.get_thread_binding()

            if thread < V_START:
                T.set_max_nreg(config.registers[0], 1)
                state_role(config, place, inputs, tiles, barriers)
            elif thread < O_START:
                T.set_max_nreg(config.registers[1], 1)
                v_role(config, place, tiles, barriers)
            elif thread < QK_START:
                T.set_max_nreg(config.registers[2], 1)
                o_role(config, place, scale, tiles, barriers)
            else:
                T.set_max_nreg(config.registers[3], 0)
                if thread < V_BETA_START:
                    load_qk_warp(config, place, inputs, tiles, barriers)
                elif thread < A_GATE_START:
                    load_v_beta_warp(config, place, inputs, tiles, barriers)
                elif thread < STORE_START:
                    load_a_gate_warp(config, place, inputs, tiles, barriers)
                else:
                    store_warp(config, place, inputs, tiles, barriers)

    return gdn_forward
