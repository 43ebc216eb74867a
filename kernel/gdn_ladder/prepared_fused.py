"""A prepared kernel in four groups: the state group makes the output too.

See prepared.py for the equations. Roles of the 512 threads: a prepare warp group (A' and A''), a
state warp group (the chain and the output, all of it in registers), a scores warp group (P) and a
service warp group of a producer warp (TMA loads), a writer warp (stores) and two gate warps.

Nothing of the chain is published: S^T K^T, S^T Q^T, X^T P^T and X^T K all take their left operand
from the state group's registers, which spares shared memory the state and X. The price is that one
group executes every product of a chunk but Q K^T, in order. Its loop is not unrolled by stages, as
ptxas then makes the descriptors of WGMMA in ordinary registers and moves each over.
"""

from types import SimpleNamespace
from typing import ClassVar

import tilelang.cuda.language as TC
import tilelang.language as T
from tilelang.layout import make_full_bank_swizzled_layout

from .prepared import (
    ACCUMULATOR_REGISTERS,
    BF16,
    CHUNK,
    DK_HALVES,
    FP32,
    FULL_ROW,
    GATE_WARPS,
    HEAD_DIM,
    PASS_CONFIGS,
    STAGES,
    TILE,
    WARP,
    WARP_GROUP,
    WARPS_PER_GROUP,
    PreparedConfig,
    arrive_warp,
    finish_values,
    following,
    forward_prim_func,
    gate_scalars,
    gate_scores,
    gate_slow_output,
    gate_warps,
    input_tiles,
    multiply_queries_keys,
    multiply_values,
    prepare_fragments,
    prepare_role,
    producer_warp,
    round_output,
    score_fragments,
    set_registers,
    step,
    transposed_accumulator,
)

__all__ = ["PASS_CONFIGS", "FusedConfig", "fused_kernel"]

VECTOR = 8  # bf16 elements of a 16-byte access
ROW_PIECES = TILE // VECTOR
STATE_REGISTERS = len(DK_HALVES) * ACCUMULATOR_REGISTERS
# Chunks that chunk_ready runs ahead of the tile that it says is free.
OUTPUT_LAG = 2


class FusedConfig(PreparedConfig):
    registers: ClassVar[dict[str, int]] = {
        "prepare": 104,
        "state": 232,
        "scores": 104,
        "service": 72,
    }
    unrolled: ClassVar[bool] = False


# --- state group
@T.macro
def load_state(config, place, inputs, registers):
    if config.use_initial_state:
        for i, j in T.Parallel(*registers.state.shape):
            registers.state[i, j] = inputs.initial_state[place.batch, place.head, j, place.dv + i]
    else:
        T.clear(registers.state)


@T.macro
def store_state(place, inputs, registers):
    """The state after the last chunk, with the decay that is still to be applied."""
    for i, j in T.Parallel(*registers.state.shape):
        inputs.final_state[place.batch, place.head, j, place.dv + i] = (
            registers.state[i, j] * registers.owed[0]
        )


@T.macro
def take_chunk(here, tiles, barriers, registers):
    T.barrier_wait(barriers.chunk_ready[here.stage], here.filled)
    registers.coming_slow[0] = tiles.slow[here.stage]
    registers.keep[0] = tiles.keep[here.stage]


@T.macro
def multiply_keys(here, tiles, registers):
    """U'^T = S^T K^T, from the state as bf16, left in flight."""
    for half, columns in enumerate(DK_HALVES):
        for i, j in T.Parallel(*registers.state_operand[half].shape):
            registers.state_operand[half][i, j] = registers.state[i, half * TILE + j]
        TC.wgmma_gemm(
            registers.state_operand[half],
            tiles.k[here.stage, :, columns],
            registers.u,
            transpose_B=True,
            policy=FULL_ROW,
            clear_accum=half == 0,
        )


@T.macro
def multiply_queries(here, tiles, registers):
    """O^T = S^T Q^T, left in flight."""
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
def decay_state(registers):
    """S^T = keep S^T, where keep is not 1."""
    if registers.keep[0] != 1.0:
        for i, j in T.Parallel(*registers.state.shape):
            registers.state[i, j] *= registers.keep[0]


@T.macro
def solve_values(here, tiles, registers):
    """From U'^T in flight to the finished S^T Q^T and X."""
    registers.slow[0] = registers.coming_slow[0]
    multiply_queries(here, tiles, registers)
    multiply_values(here, tiles, registers, True)
    decay_state(registers)
    TC.wait_wgmma(3)  # the two products with Q and the one with A' are in flight
    finish_values(here, tiles, registers)
    TC.warpgroup_fence_operand(registers.output, num_regs=ACCUMULATOR_REGISTERS)
    T.copy(registers.x, registers.x_operand)
    gate_slow_output(here, tiles, registers)


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
        for i, j in T.Parallel(*registers.x.shape):
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
    round_output(registers)


@T.macro
def finish_state(registers):
    TC.wait_wgmma(0)
    TC.warpgroup_fence_operand(registers.state, num_regs=STATE_REGISTERS)


@T.macro
def hand_over_output(tiles, barriers, registers):
    """O [tokens, columns] to the writer warp."""
    T.copy(registers.output_operand, tiles.output)
    arrive_warp(barriers.output_ready, 0)


@T.macro
def state_role(config, place, inputs, tiles, barriers, registers):
    """The serial chain: S -> U' -> X -> S, and the output, all of it in registers."""
    first, last = step(0), step(place.chunks - 1)
    load_state(config, place, inputs, registers)
    take_chunk(first, tiles, barriers, registers)
    multiply_keys(first, tiles, registers)
    solve_values(first, tiles, registers)

    for chunk in T.serial(place.chunks - 1):
        here = step(chunk)
        coming = following(here)
        absorb_values(here, tiles, registers)
        finish_output(here, tiles, registers)
        take_chunk(coming, tiles, barriers, registers)
        finish_state(registers)
        multiply_keys(coming, tiles, registers)
        arrive_warp(barriers.inputs_free, here.stage)
        # That the coming chunk is ready means too that the tile is free.
        hand_over_output(tiles, barriers, registers)
        solve_values(coming, tiles, registers)

    absorb_values(last, tiles, registers)
    finish_output(last, tiles, registers)
    T.barrier_wait(barriers.output_stored[0], place.chunks % 2)
    hand_over_output(tiles, barriers, registers)
    registers.owed[0] = tiles.pending[last.stage]
    finish_state(registers)
    store_state(place, inputs, registers)


# --- scores group
@T.macro
def scores_role(place, scale, tiles, barriers, registers):
    """P of every chunk, ahead of the chain."""
    for chunk in T.serial(place.chunks):
        here = step(chunk)
        T.barrier_wait(barriers.inputs_ready[here.stage], here.filled)
        multiply_queries_keys(here, tiles, registers)
        gate_scores(here, scale, tiles, registers)
        T.copy(registers.scores_operand, tiles.scores[here.stage, :, :])
        T.fence_proxy_async()
        arrive_warp(barriers.chunk_ready, here.stage)


# --- service group
@T.macro
def writer_warp(place, lane, inputs, tiles, barriers):
    """Stores without TMA, so that the state group needs no proxy fence for its output."""
    for chunk in tuple(range(OUTPUT_LAG)):
        arrive_warp(barriers.chunk_ready, chunk)
    for chunk in T.serial(place.chunks):
        T.barrier_wait(barriers.output_ready[0], chunk % 2)
        store_rows(place, chunk * CHUNK, lane, inputs, tiles.output)
        # In this order: who was told that a chunk is ready may not take output_stored for older.
        arrive_warp(barriers.output_stored, 0)
        arrive_warp(barriers.chunk_ready, (chunk + OUTPUT_LAG) % STAGES)


@T.macro
def store_rows(place, first, lane, inputs, tile):
    """The rows of a chunk's output that are there, 16 bytes a lane."""
    for lap in T.unroll(CHUNK * ROW_PIECES // WARP):
        row = lap * (WARP // ROW_PIECES) + lane // ROW_PIECES
        column = lane % ROW_PIECES * VECTOR
        if first + row < place.tokens:
            for e in T.vectorized(VECTOR):
                inputs.output[place.batch, first + row, place.head, place.dv + column + e] = tile[
                    row, column + e
                ]


@T.macro
def fused_cta(config, place, scale, inputs):
    """Everything one CTA does: its memory, its barriers, its roles."""
    tiles = SimpleNamespace(
        **input_tiles(),
        decayed=T.alloc_shared((STAGES, CHUNK, CHUNK), BF16),  # A''
        scores=T.alloc_shared((STAGES, CHUNK, CHUNK), BF16),
        output=T.alloc_shared((CHUNK, TILE), BF16),
    )
    barriers = SimpleNamespace(
        inputs_landed=T.alloc_barrier([WARP] * STAGES),  # by the producer warp and its TMA loads
        inputs_ready=T.alloc_barrier(
            [GATE_WARPS] * STAGES
        ),  # by the gate warps: landed, and the factors written
        chunk_ready=T.alloc_barrier(
            [2 * WARPS_PER_GROUP + 1] * STAGES
        ),  # by the prepare and scores groups, and by the writer warp: the output tile is free
        inputs_free=T.alloc_barrier([WARPS_PER_GROUP] * STAGES),  # by the state group
        output_ready=T.alloc_barrier([WARPS_PER_GROUP]),  # by the state group
        output_stored=T.alloc_barrier([1]),  # by the writer warp
    )
    ahead = prepare_fragments()
    chain = SimpleNamespace(
        state=T.alloc_fragment((TILE, HEAD_DIM), FP32),
        state_operand=[T.alloc_fragment((TILE, TILE), BF16) for _ in DK_HALVES],
        u=T.alloc_fragment((TILE, CHUNK), FP32),
        u_operand=T.alloc_fragment((TILE, CHUNK), BF16),
        x=T.alloc_fragment((TILE, CHUNK), FP32),
        x_operand=T.alloc_fragment((TILE, CHUNK), BF16),
        output=T.alloc_fragment((TILE, CHUNK), FP32),
        gate=T.alloc_fragment((CHUNK,), FP32),
        output_operand=T.alloc_fragment((CHUNK, TILE), BF16),
        keep=T.alloc_local((1,), FP32),
        owed=T.alloc_local((1,), FP32),
        slow=T.alloc_local((1,), "int32"),
        coming_slow=T.alloc_local((1,), "int32"),
    )
    beside = SimpleNamespace(**score_fragments())
    gates = gate_scalars()
    T.annotate_layout(
        {
            chain.output_operand: transposed_accumulator(),
            tiles.output: make_full_bank_swizzled_layout(tiles.output),
        }
    )

    thread = T.get_thread_binding()
    service = config.threads - WARP_GROUP
    if thread < WARP_GROUP:
        set_registers(config, "prepare")
        prepare_role(config, place, tiles, barriers, ahead)
    elif thread < 2 * WARP_GROUP:
        set_registers(config, "state")
        state_role(config, place, inputs, tiles, barriers, chain)
    elif thread < service:
        set_registers(config, "scores")
        scores_role(place, scale, tiles, barriers, beside)
    else:
        set_registers(config, "service")
        if thread < service + WARP:
            producer_warp(place, inputs, tiles, barriers)
        elif thread < service + 2 * WARP:
            writer_warp(place, thread - service - WARP, inputs, tiles, barriers)
        else:
            gate_warps(place, thread - service - 2 * WARP, scale, inputs, tiles, barriers, gates)


def fused_kernel(config: FusedConfig):
    """Build the kernel as a TileLang PrimFunc; its arguments are prepared.forward_prim_func's."""
    return forward_prim_func(config, "gdn_prepared_fused", fused_cta)
