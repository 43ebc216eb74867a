"""A prepared kernel over all 128 state columns of a head: two state groups, one that prepares.

See prepared.py for the equations, of which one is another here:

    X^T = (-exp(G) U'^T) A'^T + V^T A'^T

Roles of the 512 threads: two state warp groups of 64 columns each (the chain and the output, all of
it in registers), a prepare warp group (A' and P) and a service warp group of a producer warp (TMA
loads), a writer warp (TMA stores) and two gate warps.

Q, K, A, and what is made of them, are loaded and made once for both state groups, and while one of
them converts registers the other's products keep the tensor cores busy. An A'' would take 64
factors a thread off the chain, but shared memory reaches for two of them, not for one a stage, and
then the prepare group is not far enough ahead. U' and X share an accumulator: all that a WGMMA
writes stays allocated over the whole loop.
"""

from types import SimpleNamespace
from typing import ClassVar

import tilelang.cuda.language as TC
import tilelang.language as T
from tilelang.layout import Fragment, make_full_bank_swizzled_layout

from .prepared import (
    ACCUMULATOR_REGISTERS,
    BF16,
    CHUNK,
    FP32,
    FULL_ROW,
    GATE_WARPS,
    HEAD_DIM,
    PASS_CONFIGS,
    PREPARE_SYNC,
    STAGES,
    TILE,
    WARP,
    WARP_GROUP,
    WARPS_PER_GROUP,
    PreparedConfig,
    accumulator_register,
    accumulator_thread,
    arrive_warp,
    following,
    forward_prim_func,
    gate_scalars,
    gate_warps,
    input_tiles,
    set_registers,
    step,
)

__all__ = ["PASS_CONFIGS", "WideConfig", "wide_kernel"]

STATE_GROUPS = HEAD_DIM // TILE
DK_HALVES = (slice(0, TILE), slice(TILE, HEAD_DIM))
# Chunks that chunk_ready runs ahead of the tile that it says is free.
OUTPUT_LAG = 2


class WideConfig(PreparedConfig):
    block_dv: ClassVar[int] = HEAD_DIM
    registers: ClassVar[dict[str, int]] = {"state": 192, "prepare": 96, "service": 32}
    unrolled: ClassVar[bool] = False

    @property
    def threads(self) -> int:
        return (2 + STATE_GROUPS) * WARP_GROUP


def transposed_accumulator() -> Fragment:
    """Fragment of [64, 128]: (t, d) lies where an accumulator [128, 64] holds (d, t)."""

    def forward(t, d):
        return d // TILE * WARP_GROUP + accumulator_thread(d, t), accumulator_register(d, t)

    return Fragment((CHUNK, HEAD_DIM), forward_fn=forward)


# --- prepare group
@T.macro
def prepare_role(place, scale, tiles, barriers, registers):
    """A' and P of every chunk, ahead of the chain."""
    for chunk in T.serial(place.chunks):
        here = step(chunk)
        T.barrier_wait(barriers.inputs_ready[here.stage], here.filled)
        # Q K^T
        TC.wgmma_gemm(
            tiles.q[here.stage, :, :],
            tiles.k[here.stage, :, :],
            registers.scores,
            transpose_B=True,
            clear_accum=True,
        )
        T.copy(tiles.a[here.stage, :, :], registers.inverse)
        T.sync_threads(PREPARE_SYNC, WARP_GROUP)
        for i, j in T.Parallel(CHUNK, CHUNK):
            # A' = exp(r - G) A beta
            registers.gated[i, j] = (
                T.cast(registers.inverse[i, j], FP32)
                * tiles.row_factor[here.stage, i]
                * tiles.beta[here.stage, j]
            )
        T.copy(registers.gated, tiles.a[here.stage, :, :])
        registers.slow[0] = tiles.slow[here.stage]
        registers.growth[0] = tiles.growth[here.stage]
        TC.wait_wgmma(0)
        TC.warpgroup_fence_operand(registers.scores, num_regs=ACCUMULATOR_REGISTERS)
        if registers.slow[0] == 0:
            # P = exp(-r) tril(Q K^T)
            if registers.growth[0] != 1.0:
                for i, j in T.Parallel(CHUNK, CHUNK):
                    registers.scores[i, j] *= registers.growth[0]
            for i, j in T.Parallel(CHUNK, CHUNK):
                registers.scores[i, j] = T.if_then_else(i >= j, registers.scores[i, j], 0.0)
        else:
            # P = scale tril(exp(g_i - g_j)) * (Q K^T)
            for i, j in T.Parallel(CHUNK, CHUNK):
                registers.scores[i, j] = T.if_then_else(
                    i >= j,
                    registers.scores[i, j]
                    * (
                        scale
                        * T.exp2(tiles.score_gate[here.stage, i] - tiles.score_gate[here.stage, j])
                    ),
                    0.0,
                )
        T.copy(registers.scores, registers.scores_operand)
        T.copy(registers.scores_operand, tiles.scores[here.stage, :, :])
        T.fence_proxy_async()
        arrive_warp(barriers.chunk_ready, here.stage)


# --- state groups
@T.macro
def load_state(config, place, inputs, registers):
    if config.use_initial_state:
        for i, j in T.Parallel(HEAD_DIM, HEAD_DIM):
            registers.state[i, j] = inputs.initial_state[place.batch, place.head, j, i]
    else:
        T.clear(registers.state)


@T.macro
def store_state(place, inputs, registers):
    """The state after the last chunk, with the decay that is still to be applied."""
    for i, j in T.Parallel(HEAD_DIM, HEAD_DIM):
        inputs.final_state[place.batch, place.head, j, i] = (
            registers.state[i, j] * registers.owed[0]
        )


@T.macro
def take_chunk(here, tiles, barriers, registers):
    T.barrier_wait(barriers.chunk_ready[here.stage], here.filled)
    registers.coming_slow[0] = tiles.slow[here.stage]
    registers.keep[0] = tiles.keep[here.stage]


@T.macro
def multiply_state(here, tiles, registers):
    """U'^T = S^T K^T and O^T = S^T Q^T, from the state as bf16, left in flight."""
    for half, columns in enumerate(DK_HALVES):
        for i, j in T.Parallel(HEAD_DIM, TILE):
            registers.state_operand[half][i, j] = registers.state[i, half * TILE + j]
        TC.wgmma_gemm(
            registers.state_operand[half],
            tiles.k[here.stage, :, columns],
            registers.x,
            transpose_B=True,
            policy=FULL_ROW,
            clear_accum=half == 0,
        )
    for half, columns in enumerate(DK_HALVES):
        TC.wgmma_gemm(
            registers.state_operand[half],
            tiles.q[here.stage, :, columns],
            registers.output,
            transpose_B=True,
            policy=FULL_ROW,
            clear_accum=half == 0,
        )


@T.macro
def solve_values(here, tiles, registers):
    """From U'^T and S^T Q^T in flight to the finished X."""
    registers.slow[0] = registers.coming_slow[0]
    T.copy(tiles.minus_gamma[here.stage, :], registers.gate)
    TC.wait_wgmma(len(DK_HALVES))  # the products with Q are in flight
    TC.warpgroup_fence_operand(registers.x, num_regs=ACCUMULATOR_REGISTERS)
    # -exp(G) U'^T
    for i, j in T.Parallel(HEAD_DIM, CHUNK):
        registers.x_operand[i, j] = T.cast(registers.x[i, j] * registers.gate[j], BF16)
    TC.wait_wgmma(0)
    TC.warpgroup_fence_operand(registers.output, num_regs=ACCUMULATOR_REGISTERS)
    # S^T = keep S^T
    if registers.keep[0] != 1.0:
        for i, j in T.Parallel(HEAD_DIM, HEAD_DIM):
            registers.state[i, j] *= registers.keep[0]
    # X^T = (-exp(G) U'^T) A'^T + V^T A'^T
    TC.wgmma_gemm(
        registers.x_operand,
        tiles.a[here.stage, :, :],
        registers.x,
        transpose_B=True,
        policy=FULL_ROW,
        clear_accum=True,
    )
    TC.wgmma_gemm(
        tiles.v[here.stage, :, :],
        tiles.a[here.stage, :, :],
        registers.x,
        transpose_A=True,
        transpose_B=True,
        policy=FULL_ROW,
    )
    # O^T = scale exp(G) O^T of a slow chunk, before the scores' part
    if registers.slow[0] != 0:
        for i, j in T.Parallel(HEAD_DIM, CHUNK):
            registers.output[i, j] *= tiles.state_gate[here.stage, j]
    TC.wait_wgmma(0)
    TC.warpgroup_fence_operand(registers.x, num_regs=ACCUMULATOR_REGISTERS)
    T.copy(registers.x, registers.x_operand)


@T.macro
def absorb_values(here, tiles, registers):
    """What X adds to output and state, left in flight."""
    # O^T += X^T P^T
    TC.wgmma_gemm(
        registers.x_operand,
        tiles.scores[here.stage, :, :],
        registers.output,
        transpose_B=True,
        policy=FULL_ROW,
    )
    if registers.slow[0] != 0:
        TC.wait_wgmma(0)
        # X^T = exp(g_last - g) X^T
        for i, j in T.Parallel(HEAD_DIM, CHUNK):
            registers.x[i, j] *= tiles.value_gate[here.stage, j]
        T.copy(registers.x, registers.x_operand)
    # S^T += X^T K
    TC.wgmma_gemm(
        registers.x_operand,
        tiles.k[here.stage, :, :],
        registers.state,
        policy=FULL_ROW,
    )


@T.macro
def finish_output(here, tiles, registers):
    """The finished O as bf16, beside the state's update."""
    T.copy(tiles.output_gate[here.stage, :], registers.gate)
    TC.wait_wgmma(1)  # the update is in flight
    TC.warpgroup_fence_operand(registers.output, num_regs=ACCUMULATOR_REGISTERS)
    for i, j in T.Parallel(HEAD_DIM, CHUNK):
        registers.output_operand[j, i] = T.cast(registers.output[i, j] * registers.gate[j], BF16)


@T.macro
def finish_state(registers):
    TC.wait_wgmma(0)
    TC.warpgroup_fence_operand(registers.state, num_regs=2 * ACCUMULATOR_REGISTERS)


@T.macro
def hand_over_output(tiles, barriers, registers):
    """O [tokens, columns] to the writer warp."""
    T.copy(registers.output_operand, tiles.output)
    T.fence_proxy_async()
    arrive_warp(barriers.output_ready, 0)


@T.macro
def state_role(config, place, inputs, tiles, barriers, registers):
    """The serial chain: S -> U' -> X -> S, and the output, all of it in registers."""
    first, last = step(0), step(place.chunks - 1)
    load_state(config, place, inputs, registers)
    take_chunk(first, tiles, barriers, registers)
    multiply_state(first, tiles, registers)
    solve_values(first, tiles, registers)

    for chunk in T.serial(place.chunks - 1):
        here = step(chunk)
        coming = following(here)
        absorb_values(here, tiles, registers)
        finish_output(here, tiles, registers)
        take_chunk(coming, tiles, barriers, registers)
        # That the coming chunk is ready means too that the tile is free.
        hand_over_output(tiles, barriers, registers)
        finish_state(registers)
        multiply_state(coming, tiles, registers)
        arrive_warp(barriers.inputs_free, here.stage)
        solve_values(coming, tiles, registers)

    absorb_values(last, tiles, registers)
    finish_output(last, tiles, registers)
    T.barrier_wait(barriers.output_stored[0], place.chunks % 2)
    hand_over_output(tiles, barriers, registers)
    registers.owed[0] = tiles.pending[last.stage]
    finish_state(registers)
    store_state(place, inputs, registers)


# --- service group
@T.macro
def producer_warp(place, inputs, tiles, barriers):
    for chunk in T.serial(place.chunks):
        here = step(chunk)
        first = chunk * CHUNK
        tokens = slice(first, first + CHUNK)
        T.barrier_wait(barriers.inputs_free[here.stage], here.freed)
        T.tma_copy(
            inputs.k[place.batch, tokens, place.head_q, 0:HEAD_DIM],
            tiles.k[here.stage, :, :],
            barrier=barriers.inputs_landed[here.stage],
        )
        T.tma_copy(
            inputs.q[place.batch, tokens, place.head_q, 0:HEAD_DIM],
            tiles.q[here.stage, :, :],
            barrier=barriers.inputs_landed[here.stage],
        )
        T.tma_copy(
            inputs.a[place.batch, tokens, place.head, 0:CHUNK],
            tiles.a[here.stage, :, :],
            barrier=barriers.inputs_landed[here.stage],
        )
        T.tma_copy(
            inputs.v[place.batch, tokens, place.head, 0:HEAD_DIM],
            tiles.v[here.stage, :, :],
            barrier=barriers.inputs_landed[here.stage],
        )
        T.barrier_arrive(barriers.inputs_landed[here.stage])


@T.macro
def writer_warp(place, inputs, tiles, barriers):
    """TMA stores; they drop rows past the end."""
    for chunk in tuple(range(OUTPUT_LAG)):
        arrive_warp(barriers.chunk_ready, chunk)
    for chunk in T.serial(place.chunks):
        T.barrier_wait(barriers.output_ready[0], chunk % 2)
        T.copy(
            tiles.output,
            inputs.output[
                place.batch, chunk * CHUNK : chunk * CHUNK + CHUNK, place.head, 0:HEAD_DIM
            ],
        )
        # In this order: who was told that a chunk is ready may not take output_stored for older.
        arrive_warp(barriers.output_stored, 0)
        arrive_warp(barriers.chunk_ready, (chunk + OUTPUT_LAG) % STAGES)


@T.macro
def wide_cta(config, place, scale, inputs):
    """Everything one CTA does: its memory, its barriers, its roles."""
    tiles = SimpleNamespace(
        **input_tiles(HEAD_DIM),
        scores=T.alloc_shared((STAGES, CHUNK, CHUNK), BF16),
        output=T.alloc_shared((CHUNK, HEAD_DIM), BF16),
    )
    barriers = SimpleNamespace(
        inputs_landed=T.alloc_barrier([WARP] * STAGES),  # by the producer warp and its TMA loads
        inputs_ready=T.alloc_barrier(
            [GATE_WARPS] * STAGES
        ),  # by the gate warps: landed, and the factors written
        chunk_ready=T.alloc_barrier(
            [WARPS_PER_GROUP + 1] * STAGES
        ),  # by the prepare group, and by the writer warp: the output tile is free
        inputs_free=T.alloc_barrier(
            [STATE_GROUPS * WARPS_PER_GROUP] * STAGES
        ),  # by the state groups
        output_ready=T.alloc_barrier([STATE_GROUPS * WARPS_PER_GROUP]),  # by the state groups
        output_stored=T.alloc_barrier([1]),  # by the writer warp
    )
    ahead = SimpleNamespace(
        scores=T.alloc_fragment((CHUNK, CHUNK), FP32),
        scores_operand=T.alloc_fragment((CHUNK, CHUNK), BF16),
        inverse=T.alloc_fragment((CHUNK, CHUNK), BF16),
        gated=T.alloc_fragment((CHUNK, CHUNK), BF16),
        slow=T.alloc_local((1,), "int32"),
        growth=T.alloc_local((1,), FP32),
    )
    chain = SimpleNamespace(
        state=T.alloc_fragment((HEAD_DIM, HEAD_DIM), FP32),
        state_operand=[T.alloc_fragment((HEAD_DIM, TILE), BF16) for _ in DK_HALVES],
        x=T.alloc_fragment((HEAD_DIM, CHUNK), FP32),
        x_operand=T.alloc_fragment((HEAD_DIM, CHUNK), BF16),
        output=T.alloc_fragment((HEAD_DIM, CHUNK), FP32),
        gate=T.alloc_fragment((CHUNK,), FP32),
        output_operand=T.alloc_fragment((CHUNK, HEAD_DIM), BF16),
        keep=T.alloc_local((1,), FP32),
        owed=T.alloc_local((1,), FP32),
        slow=T.alloc_local((1,), "int32"),
        coming_slow=T.alloc_local((1,), "int32"),
    )
    gates = gate_scalars()
    T.annotate_layout(
        {
            chain.output_operand: transposed_accumulator(),
            tiles.output: make_full_bank_swizzled_layout(tiles.output),
        }
    )

    thread = T.get_thread_binding()
    state = STATE_GROUPS * WARP_GROUP
    service = config.threads - WARP_GROUP
    if thread < state:
        set_registers(config, "state")
        state_role(config, place, inputs, tiles, barriers, chain)
    elif thread < service:
        set_registers(config, "prepare")
        prepare_role(place, scale, tiles, barriers, ahead)
    else:
        set_registers(config, "service")
        if thread < service + WARP:
            producer_warp(place, inputs, tiles, barriers)
        elif thread < service + 2 * WARP:
            writer_warp(place, inputs, tiles, barriers)
        else:
            gate_warps(place, thread - service - 2 * WARP, scale, inputs, tiles, barriers, gates)


def wide_kernel(config: WideConfig):
    """Build the kernel as a TileLang PrimFunc; its arguments are prepared.forward_prim_func's."""
    return forward_prim_func(config, "gdn_prepared_wide", wide_cta)
