"""Exact splitting of a sequence over time, in four launches, two of them side by side.

Over a segment of chunks the map of the state is affine, S_out = M S_in + N, whatever the gates. The
launches are

    summary   per head and segment but the first and the last: N, the state that the segment makes
              from zero, and the transition M = gamma_segment I + D, kept as D
    first     beside it, the forward kernel over the first segment, which leaves the state at its
              end; waits for the summary's end before its own
    scan      per head: S <- gamma_segment S + D S + N from segment to segment
    rest      the forward kernel over the other segments, from those states

D obeys the recurrence of N. With Gamma the decay from the segment's start to the chunk,

    V_new = A (beta (V - gamma K N))    N <- gamma_last N + (exp(g_last - g) K)^T V_new

makes N from V, and the same two lines make D where -Gamma gamma K stands in place of V. So one
kernel computes both, and a transition costs what a local state costs. Nothing is cut off and
nothing is inverted: every exponential is of a sum of log decays, none of which is positive.

In the summary kernel the chain of a chunk is two products. A warp group beside it prepares

    w = -exp(g_last - g) A (beta gamma) K       [C, dk] bf16
    a =  exp(g_last - g) A (beta or -Gamma beta gamma)    [C, C] bf16, for V or for K as the values

so that, transposed, with the state in registers as in the resident kernel,

    X^T = V^T a^T + S^T w^T                     state groups, X the decayed V_new
    S^T = gamma_last S^T + X^T K                state groups

States between segments are stored transposed, [dv, dk]. Only the last segment may end in a tail
chunk, and only the forward kernel runs it.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

import tilelang
import tilelang.cuda.language as TC
import tilelang.language as T
from tilelang.layout import make_full_bank_swizzled_layout

from .resident_common import (
    ACCUMULATOR_REGISTERS,
    CHUNK,
    FULL_ROW,
    GATE_WARPS,
    HEAD_DIM,
    LOG2_E,
    REGISTERS_PER_BLOCK,
    TILE,
    WARP,
    WARP_GROUP,
    WARPS_PER_GROUP,
    arrive_warp,
    gate_scalars,
    rolled,
    take_gates,
)

DK_HALVES = (0, 1)  # the state is two accumulators of 64 dk columns: one converts, one is summed

# The roles order their shared memory themselves. Every index is within its tensor as it is written.
PASS_CONFIGS = {
    tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True,
    tilelang.PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True,
    tilelang.PassConfigKey.TL_DISABLE_SAFE_MEMORY_ACCESS: True,
}

# --- summary kernel
STATE_GROUPS = HEAD_DIM // TILE
STATE_WARPS = STATE_GROUPS * WARPS_PER_GROUP
PREPARE_START = STATE_GROUPS * WARP_GROUP
PRODUCER_START = PREPARE_START + WARP_GROUP
GATE_START = PRODUCER_START + (WARPS_PER_GROUP - GATE_WARPS) * WARP
SUMMARY_THREADS = PRODUCER_START + WARP_GROUP


@dataclass(frozen=True)
class SummaryConfig:
    """What one compiled summary kernel is specialised on; the rest are run-time arguments.

    stages: chunks of input in flight. registers: per thread of (state, preparing, service) groups.
    residual: also write what bf16 loses of D, for scans that use it.
    """

    heads_q: int
    heads_v: int
    residual: bool = True
    stages: int = 3
    registers: tuple[int, int, int] = (168, 136, 40)

    dtype: ClassVar[str] = "bfloat16"
    l2norm: ClassVar[bool] = False
    # N and D of a segment on one TPC: see TileConfig.cluster
    cluster: ClassVar[tuple[int, int, int] | None] = (1, 1, 2)

    def __post_init__(self) -> None:
        check_heads(self.heads_q, self.heads_v)
        if self.stages < 2:
            raise ValueError(f"stages={self.stages} must be at least 2")
        state, prepare, service = self.registers
        asked = STATE_GROUPS * state + prepare + service
        pool = REGISTERS_PER_BLOCK // WARP_GROUP
        if asked > pool or any(count % 8 for count in self.registers):
            raise ValueError(
                f"registers={self.registers} must be multiples of 8; {STATE_GROUPS} state groups "
                f"and two others ask for {asked} of {pool}"
            )

    @property
    def name(self) -> str:
        """A readable name of the specialisation, unique among the shipped ones."""
        precision = "pair" if self.residual else "single"
        return f"summary_hq{self.heads_q}_hv{self.heads_v}_{precision}"


def check_heads(heads_q: int, heads_v: int) -> None:
    if heads_q < 1 or heads_v % heads_q:
        raise ValueError(f"heads_v={heads_v} must be a multiple of heads_q={heads_q}")


@T.macro
def multiply_values(stage, tiles, registers):
    """X^T = V^T a^T, left in flight."""
    TC.wgmma_gemm(
        tiles.values[stage, :, :],
        tiles.a[stage, :, :],
        registers.x,
        transpose_A=True,
        transpose_B=True,
        policy=FULL_ROW,
        clear_accum=True,
    )


@T.macro
def multiply_state(half, stage, tiles, registers):
    """X^T += S^T w^T for one dk half, from the state as bf16, left in flight."""
    T.copy(registers.state[half], registers.state_operand[half])
    TC.wgmma_gemm(
        registers.state_operand[half],
        tiles.w[stage, :, half * TILE : (half + 1) * TILE],
        registers.x,
        transpose_B=True,
        policy=FULL_ROW,
    )


@T.macro
def finish_values(stage, tiles, registers):
    """Decay the state in the shadow of X^T, then wait for it."""
    # S^T = gamma_last S^T
    for half in DK_HALVES:
        for i, j in T.Parallel(HEAD_DIM, TILE):
            registers.state[half][i, j] *= tiles.keep[stage]
    TC.wait_wgmma(0)
    TC.warpgroup_fence_operand(registers.x, num_regs=ACCUMULATOR_REGISTERS)


@T.macro
def absorb_values(stage, tiles, registers):
    """S^T += X^T K, left in flight: one WGMMA group a dk half."""
    T.copy(registers.x, registers.x_operand)
    for half in DK_HALVES:
        TC.wgmma_gemm(
            registers.x_operand,
            tiles.k[stage, :, half * TILE : (half + 1) * TILE],
            registers.state[half],
            policy=FULL_ROW,
        )


@T.macro
def summary_state_role(config, place, inputs, tiles, barriers, registers):
    """The serial chain, in registers; the products of two chunks overlap."""
    for half in DK_HALVES:
        T.clear(registers.state[half])

    T.barrier_wait(barriers.prepared[0], 0)
    multiply_values(0, tiles, registers)
    for half in DK_HALVES:
        multiply_state(half, 0, tiles, registers)
    finish_values(0, tiles, registers)
    for chunk in T.serial(place.chunks - 1):
        stage = chunk % config.stages
        coming = (chunk + 1) % config.stages
        absorb_values(stage, tiles, registers)
        T.barrier_wait(barriers.prepared[coming], (chunk + 1) // config.stages % 2)
        multiply_values(coming, tiles, registers)
        for half in DK_HALVES:
            # The two newest WGMMA groups are later than this half of the state.
            TC.wait_wgmma(2)
            TC.warpgroup_fence_operand(registers.state[half], num_regs=ACCUMULATOR_REGISTERS)
            multiply_state(half, coming, tiles, registers)
        arrive_warp(barriers.inputs_free, stage)
        finish_values(coming, tiles, registers)
    absorb_values((place.chunks - 1) % config.stages, tiles, registers)
    TC.wait_wgmma(0)
    for half in DK_HALVES:
        TC.warpgroup_fence_operand(registers.state[half], num_regs=ACCUMULATOR_REGISTERS)

    if place.is_transition:
        for half in DK_HALVES:
            for i, j in T.Parallel(HEAD_DIM, TILE):
                inputs.transitions[
                    place.segment - 1, place.batch, place.head, i, half * TILE + j
                ] = T.cast(registers.state[half][i, j], "bfloat16")
            if config.residual:
                for i, j in T.Parallel(HEAD_DIM, TILE):
                    inputs.residuals[
                        place.segment - 1, place.batch, place.head, i, half * TILE + j
                    ] = T.cast(
                        registers.state[half][i, j]
                        - T.cast(T.cast(registers.state[half][i, j], "bfloat16"), "float32"),
                        "bfloat16",
                    )
    else:
        for half in DK_HALVES:
            for i, j in T.Parallel(HEAD_DIM, TILE):
                inputs.states[place.segment, place.batch, place.head, i, half * TILE + j] = (
                    registers.state[half][i, j]
                )


@T.macro
def prepare_role(config, place, tiles, barriers, registers):
    """Makes w and a of a chunk from A, its gates and K, ahead of the chain."""
    for chunk in rolled(place.chunks):
        stage = chunk % config.stages
        T.barrier_wait(barriers.inputs_ready[stage], (chunk // config.stages) % 2)
        T.copy(tiles.a[stage, :, :], registers.a)
        for i, j in T.Parallel(CHUNK, CHUNK):
            registers.decayed[i, j] = T.cast(registers.a[i, j], "float32") * tiles.decay[stage, i]

        # w = (-exp(g_last - g) A beta gamma) K
        for i, j in T.Parallel(CHUNK, CHUNK):
            registers.key_weights[i, j] = T.cast(
                registers.decayed[i, j] * tiles.key_factor[stage, j], config.dtype
            )
        for half in DK_HALVES:
            TC.wgmma_gemm(
                registers.key_weights,
                tiles.k[stage, :, half * TILE : (half + 1) * TILE],
                registers.w[half],
                policy=FULL_ROW,
                clear_accum=True,
            )

        # a = exp(g_last - g) A beta, or exp(g_last - g) A (-Gamma beta gamma)
        for i, j in T.Parallel(CHUNK, CHUNK):
            registers.a[i, j] = T.cast(
                registers.decayed[i, j] * tiles.value_factor[stage, j], config.dtype
            )
        T.copy(registers.a, tiles.a[stage, :, :])

        TC.wait_wgmma(0)
        for half in DK_HALVES:
            TC.warpgroup_fence_operand(registers.w[half], num_regs=ACCUMULATOR_REGISTERS)
            T.copy(registers.w[half], tiles.w[stage, :, half * TILE : (half + 1) * TILE])
        T.fence_proxy_async()
        arrive_warp(barriers.prepared, stage)


@T.macro
def summary_producer_warp(config, place, inputs, tiles, barriers):
    for chunk in rolled(place.chunks):
        stage = chunk % config.stages
        first = place.first + chunk * CHUNK
        T.barrier_wait(barriers.inputs_free[stage], (chunk // config.stages + 1) % 2)
        T.tma_copy(
            inputs.k[place.batch, first : first + CHUNK, place.head_q, 0:HEAD_DIM],
            tiles.k[stage, :, :],
            barrier=barriers.inputs_landed[stage],
        )
        T.tma_copy(
            inputs.a[place.batch, first : first + CHUNK, place.head, 0:CHUNK],
            tiles.a[stage, :, :],
            barrier=barriers.inputs_landed[stage],
        )
        if place.is_transition:
            T.tma_copy(
                inputs.k[place.batch, first : first + CHUNK, place.head_q, 0:HEAD_DIM],
                tiles.values[stage, :, :],
                barrier=barriers.inputs_landed[stage],
            )
        else:
            T.tma_copy(
                inputs.v[place.batch, first : first + CHUNK, place.head, 0:HEAD_DIM],
                tiles.values[stage, :, :],
                barrier=barriers.inputs_landed[stage],
            )
        T.barrier_arrive(barriers.inputs_landed[stage])


@T.macro
def summary_gate_warps(config, place, token, inputs, hooks, tiles, barriers, gates):
    """One thread a token: the factors of the rows and columns of A, and Gamma along the way."""
    gates.decayed[0] = 1.0
    hooks.fetch_gates(config, place, 0, token, inputs, gates.coming)
    for chunk in rolled(place.chunks):
        stage = chunk % config.stages
        take_gates(gates)
        coming = T.min(chunk + 1, place.chunks - 1)
        hooks.fetch_gates(config, place, coming, token, inputs, gates.coming)
        gates.key_factor[0] = -gates.beta[0] * T.exp2(gates.gate[0])
        gates.value_factor[0] = gates.beta[0]
        if place.is_transition:
            gates.value_factor[0] = gates.decayed[0] * gates.key_factor[0]
        gates.row_factor[0] = T.exp2(gates.last[0] - gates.gate[0])
        if config.l2norm:
            # Of K as it is stored: once where it multiplies the state, once where it adds to it.
            gates.key_factor[0] = gates.key_factor[0] * gates.key_norm[0]
            gates.row_factor[0] = gates.row_factor[0] * gates.key_norm[0]
            if place.is_transition:
                gates.value_factor[0] = gates.value_factor[0] * gates.key_norm[0]
        gates.keep[0] = T.exp2(gates.last[0])
        gates.decayed[0] = gates.decayed[0] * gates.keep[0]
        T.barrier_wait(barriers.inputs_free[stage], (chunk // config.stages + 1) % 2)
        tiles.key_factor[stage, token] = gates.key_factor[0]
        tiles.value_factor[stage, token] = gates.value_factor[0]
        tiles.decay[stage, token] = gates.row_factor[0]
        if token == 0:
            tiles.keep[stage] = gates.keep[0]
        T.barrier_wait(barriers.inputs_landed[stage], (chunk // config.stages) % 2)
        arrive_warp(barriers.inputs_ready, stage)
    if place.is_transition and token == 0:
        inputs.decays[place.segment - 1, place.batch, place.head] = gates.decayed[0]


@T.macro
def summary_cta(config, place, inputs, hooks):
    """Everything one CTA does: its memory, its barriers, its roles."""
    TC.pdl_sync()
    TC.pdl_trigger()  # now: the launch that runs beside this one reads what this one does
    stages = config.stages
    operand, fp32 = config.dtype, "float32"
    tiles = SimpleNamespace(
        k=T.alloc_shared((stages, CHUNK, HEAD_DIM), operand),
        values=T.alloc_shared((stages, CHUNK, HEAD_DIM), operand),  # V, or K of a transition
        a=T.alloc_shared((stages, CHUNK, CHUNK), operand),
        w=T.alloc_shared((stages, CHUNK, HEAD_DIM), operand),
        key_factor=T.alloc_shared((stages, CHUNK), fp32, scope="shared"),
        value_factor=T.alloc_shared((stages, CHUNK), fp32, scope="shared"),
        decay=T.alloc_shared((stages, CHUNK), fp32, scope="shared"),  # exp(g_last - g)
        keep=T.alloc_shared((stages,), fp32, scope="shared"),  # gamma_last
    )
    barriers = SimpleNamespace(
        inputs_landed=T.alloc_barrier([WARP] * stages),  # by the producer warp and its TMA
        inputs_ready=T.alloc_barrier([GATE_WARPS] * stages),  # landed, and factors written
        prepared=T.alloc_barrier([WARPS_PER_GROUP] * stages),  # by the preparing group
        inputs_free=T.alloc_barrier([STATE_WARPS] * stages),  # by the state groups
    )
    chain = SimpleNamespace(
        state=[T.alloc_fragment((HEAD_DIM, TILE), fp32) for _ in DK_HALVES],
        state_operand=[T.alloc_fragment((HEAD_DIM, TILE), operand) for _ in DK_HALVES],
        x=T.alloc_fragment((HEAD_DIM, CHUNK), fp32),
        x_operand=T.alloc_fragment((HEAD_DIM, CHUNK), operand),
    )
    beside = SimpleNamespace(
        a=T.alloc_fragment((CHUNK, CHUNK), operand),
        decayed=T.alloc_fragment((CHUNK, CHUNK), fp32),
        key_weights=T.alloc_fragment((CHUNK, CHUNK), operand),
        w=[T.alloc_fragment((CHUNK, TILE), fp32) for _ in DK_HALVES],
    )
    gates = gate_scalars(
        ("gate", "last", "beta", *("key_norm",) * config.l2norm),
        ("key_factor", "value_factor", "row_factor", "keep", "decayed"),
    )
    thread = T.get_thread_binding()

    if thread < PREPARE_START:
        T.set_max_nreg(config.registers[0], 1)
        summary_state_role(config, place, inputs, tiles, barriers, chain)
    elif thread < PRODUCER_START:
        T.set_max_nreg(config.registers[1], 1)
        prepare_role(config, place, tiles, barriers, beside)
    else:
        T.set_max_nreg(config.registers[2], 0)
        if thread < PRODUCER_START + WARP:
            summary_producer_warp(config, place, inputs, tiles, barriers)
        elif thread >= GATE_START:
            summary_gate_warps(
                config, place, thread - GATE_START, inputs, hooks, tiles, barriers, gates
            )


@T.macro
def fetch_gates(config, place, chunk, token, inputs, gates):
    first = place.first + chunk * CHUNK
    gates.gate[0] = inputs.g[place.batch, first + token, place.head] * LOG2_E
    gates.last[0] = inputs.g[place.batch, first + CHUNK - 1, place.head] * LOG2_E
    gates.beta[0] = inputs.beta[place.batch, first + token, place.head]


HOOKS = SimpleNamespace(fetch_gates=fetch_gates)


def segment_place(config, head, sequence, part, chunks_per_segment) -> SimpleNamespace:
    """Which part of which segment a summary CTA makes: N and D of all but the first and last."""
    segment = part // 2 + 1
    return SimpleNamespace(
        batch=sequence,
        head=head,
        head_q=head // (config.heads_v // config.heads_q),
        segment=segment,
        is_transition=part % 2 == 1,
        first=segment * chunks_per_segment * CHUNK,
        chunks=chunks_per_segment,
    )


def summary_kernel(config: SummaryConfig):
    """Build the summary kernel as a TileLang PrimFunc.

    Arguments of the PrimFunc, with B, T, segments >= 3 and middle = segments - 2 dynamic:
    k [B, T, Hq, 128] bf16, v [B, T, Hv, 128] bf16, A [B, T, Hv, 64] bf16, g_cumsum, beta [B, T,
    Hv] fp32, states [segments - 1, B, Hv, 128 (dv), 128 (dk)] fp32, transitions and residuals
    [middle, B, Hv, 128 (dk), 128 (dk)] bf16 (residuals: a one-element dummy unless
    config.residual), decays [middle, B, Hv] fp32, chunks_per_segment int32.

    Every segment but the last must be chunks_per_segment full chunks. Of segment s, 0 < s <
    segments - 1, states[s] becomes N, transitions[s - 1] (+ residuals[s - 1]) D^T and decays[s - 1]
    gamma_segment.
    """
    batch, tokens = T.dynamic("batch"), T.dynamic("tokens")
    boundaries, middle = T.dynamic("boundaries"), T.dynamic("middle")
    heads_q, heads_v = config.heads_q, config.heads_v
    state_shape = (batch, heads_v, HEAD_DIM, HEAD_DIM)
    transition_shape = (middle, *state_shape)
    bf16, fp32 = "bfloat16", "float32"

    @T.prim_func
    def gdn_summary(
        k: T.Tensor((batch, tokens, heads_q, HEAD_DIM), bf16),
        v: T.Tensor((batch, tokens, heads_v, HEAD_DIM), bf16),
        A: T.Tensor((batch, tokens, heads_v, CHUNK), bf16),
        g_cumsum: T.Tensor((batch, tokens, heads_v), fp32),
        beta: T.Tensor((batch, tokens, heads_v), fp32),
        states: T.Tensor((boundaries, *state_shape), fp32),
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
                g=g_cumsum,
                beta=beta,
                states=states,
                transitions=transitions,
                residuals=residuals,
                decays=decays,
            )
            place = segment_place(config, head, sequence, part, chunks_per_segment)
            summary_cta(config, place, inputs, HOOKS)

    return gdn_summary


# --- scan kernel
SCAN_COLUMNS = 32  # of the state, a CTA; every step is a load of D whole
SCAN_PRODUCER_START = HEAD_DIM // TILE * WARP_GROUP
SCAN_WARPS = SCAN_PRODUCER_START // WARP
SCAN_THREADS = SCAN_PRODUCER_START + WARP
SCAN_SYNC = 1  # named barrier of the scanning groups; 0 is the whole block's
SCAN_REGISTERS = TILE * SCAN_COLUMNS // WARP_GROUP  # of a thread's part of the state


@dataclass(frozen=True)
class ScanConfig:
    """What one compiled scan kernel is specialised on; batch and segments are run-time arguments.

    products: bf16 products that make D S. 1 = D S; 2 = D (S + S'); 3 = D (S + S') + D' S, where
    S' and D' are what bf16 loses of S and D. stages: steps of input in flight, None = as many as
    fit.
    """

    heads_v: int
    products: int = 3
    stages: int | None = None

    def __post_init__(self) -> None:
        if self.heads_v < 1:
            raise ValueError(f"heads_v={self.heads_v} must be at least 1")
        if self.products not in (1, 2, 3):
            raise ValueError(f"products={self.products} must be 1, 2 or 3")
        if self.stages is None:
            object.__setattr__(self, "stages", 2 if self.residual else 4)
        if self.stages < 2:
            raise ValueError(f"stages={self.stages} must be at least 2")

    @property
    def residual(self) -> bool:
        """Is what bf16 loses of D an input?"""
        return self.products == 3

    @property
    def name(self) -> str:
        """A readable name of the specialisation, unique among the shipped ones."""
        return f"scan_hv{self.heads_v}_products{self.products}"


@T.macro
def publish_scanned(config, step, tiles, registers):
    """S as operands in shared memory, for both groups; those of the step before last are free."""
    slot = step % 2
    T.copy(registers.state, tiles.state[slot, :, :])
    if config.products > 1:
        for i, j in T.Parallel(HEAD_DIM, SCAN_COLUMNS):
            tiles.lost[slot, i, j] = T.cast(
                registers.state[i, j]
                - T.cast(T.cast(registers.state[i, j], "bfloat16"), "float32"),
                "bfloat16",
            )
    T.fence_proxy_async()
    T.sync_threads(SCAN_SYNC, SCAN_PRODUCER_START)


@T.macro
def multiply_transition(matrix, stage, state, slot, registers):
    """S += D S"""
    TC.wgmma_gemm(
        matrix[stage, :, :],
        state[slot, :, :],
        registers.state,
        transpose_A=True,
        policy=FULL_ROW,
    )


@T.macro
def scan_role(config, place, inputs, tiles, barriers, registers):
    """S = gamma_segment S + N + D S, segment after segment; two groups, 64 rows of S [dk, dv]."""
    for i, j in T.Parallel(HEAD_DIM, SCAN_COLUMNS):
        registers.state[i, j] = inputs.states[0, place.batch, place.head, place.dv + j, i]
    lane = T.get_thread_binding() % WARP
    for step in rolled(place.steps):
        stage = step % config.stages
        if step % WARP == 0:
            # Of the next 32 steps, a lane each: one at a time would be waited for at every step.
            registers.decays[0] = inputs.decays[
                T.min(step + lane, place.steps - 1), place.batch, place.head
            ]
        publish_scanned(config, step, tiles, registers)
        registers.decay[0] = T.shfl_sync(registers.decays[0], step % WARP)
        T.barrier_wait(barriers.inputs_landed[stage], (step // config.stages) % 2)
        for i, j in T.Parallel(HEAD_DIM, SCAN_COLUMNS):
            registers.state[i, j] = (
                registers.state[i, j] * registers.decay[0] + tiles.local[stage, j, i]
            )
        multiply_transition(tiles.transition, stage, tiles.state, step % 2, registers)
        if config.products > 1:
            multiply_transition(tiles.transition, stage, tiles.lost, step % 2, registers)
        if config.residual:
            multiply_transition(tiles.residual, stage, tiles.state, step % 2, registers)
        TC.wait_wgmma(0)
        TC.warpgroup_fence_operand(registers.state, num_regs=SCAN_REGISTERS)
        arrive_warp(barriers.inputs_free, stage)
        for i, j in T.Parallel(HEAD_DIM, SCAN_COLUMNS):
            inputs.states[step + 1, place.batch, place.head, place.dv + j, i] = registers.state[
                i, j
            ]


@T.macro
def scan_producer_warp(config, place, inputs, tiles, barriers):
    for step in T.serial(place.steps):
        stage = step % config.stages
        T.barrier_wait(barriers.inputs_free[stage], (step // config.stages + 1) % 2)
        T.tma_copy(
            inputs.states[
                step + 1, place.batch, place.head, place.dv : place.dv + SCAN_COLUMNS, 0:HEAD_DIM
            ],
            tiles.local[stage, :, :],
            barrier=barriers.inputs_landed[stage],
        )
        T.tma_copy(
            inputs.transitions[step, place.batch, place.head, 0:HEAD_DIM, 0:HEAD_DIM],
            tiles.transition[stage, :, :],
            barrier=barriers.inputs_landed[stage],
        )
        if config.residual:
            T.tma_copy(
                inputs.residuals[step, place.batch, place.head, 0:HEAD_DIM, 0:HEAD_DIM],
                tiles.residual[stage, :, :],
                barrier=barriers.inputs_landed[stage],
            )
        T.barrier_arrive(barriers.inputs_landed[stage])


def scan_kernel(config: ScanConfig):
    """Build the scan kernel as a TileLang PrimFunc.

    Arguments of the PrimFunc, as the summary kernel leaves them: states [segments - 1, B, Hv, 128,
    128] fp32, transitions, residuals [middle, B, Hv, 128, 128] bf16 (residuals: a one-element
    dummy unless config.residual), decays [middle, B, Hv] fp32. On return states[s] is the state at
    the end of segment s. With two segments there is nothing to scan and nothing to launch.
    """
    batch = T.dynamic("batch")
    boundaries, middle = T.dynamic("boundaries"), T.dynamic("middle")
    heads_v, stages = config.heads_v, config.stages
    transition_shape = (middle, batch, heads_v, HEAD_DIM, HEAD_DIM)
    bf16, fp32 = "bfloat16", "float32"

    @T.prim_func
    def gdn_scan(
        states: T.Tensor((boundaries, batch, heads_v, HEAD_DIM, HEAD_DIM), fp32),
        transitions: T.Tensor(transition_shape, bf16),
        residuals: T.Tensor(transition_shape if config.residual else (1,), bf16),
        decays: T.Tensor((middle, batch, heads_v), fp32),
    ):
        with T.Kernel(HEAD_DIM // SCAN_COLUMNS, heads_v, batch, threads=SCAN_THREADS) as (
            tile,
            head,
            sequence,
        ):
            TC.pdl_trigger()
            TC.pdl_sync()
            inputs = SimpleNamespace(
                states=states, transitions=transitions, residuals=residuals, decays=decays
            )
            place = SimpleNamespace(
                batch=sequence, head=head, dv=tile * SCAN_COLUMNS, steps=boundaries - 1
            )
            tiles = SimpleNamespace(
                local=T.alloc_shared((stages, SCAN_COLUMNS, HEAD_DIM), fp32),
                transition=T.alloc_shared((stages, HEAD_DIM, HEAD_DIM), bf16),
                residual=T.alloc_shared((stages, HEAD_DIM, HEAD_DIM), bf16)
                if config.residual
                else None,
                state=T.alloc_shared((2, HEAD_DIM, SCAN_COLUMNS), bf16),
                # what bf16 loses of the state
                lost=T.alloc_shared((2, HEAD_DIM, SCAN_COLUMNS), bf16)
                if config.products > 1
                else None,
            )
            barriers = SimpleNamespace(
                inputs_landed=T.alloc_barrier([WARP] * stages),  # by the producer warp and its TMA
                inputs_free=T.alloc_barrier([SCAN_WARPS] * stages),  # by the scanning groups
            )
            registers = SimpleNamespace(
                state=T.alloc_fragment((HEAD_DIM, SCAN_COLUMNS), fp32),
                decays=T.alloc_local((1,), fp32),
                decay=T.alloc_local((1,), fp32),
            )
            T.annotate_layout({tiles.local: make_full_bank_swizzled_layout(tiles.local)})
            thread = T.get_thread_binding()

            if thread < SCAN_PRODUCER_START:
                scan_role(config, place, inputs, tiles, barriers, registers)
            else:
                scan_producer_warp(config, place, inputs, tiles, barriers)

    return gdn_scan
