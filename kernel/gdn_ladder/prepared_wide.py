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
    PREPARE_SYNC,
    STAGES,
    TILE,
    WARP,
    WARP_GROUP,
    WARPS_PER_GROUP,
    PreparedConfig,
    arrive_warp,
    following,
    forward_prim_func,
    gate_scalars,
    gate_scores,
    gate_slow_output,
    gate_warps,
    input_tiles,
    multiply_queries_keys,
    multiply_values,
    producer_warp,
    score_fragments,
    set_registers,
    step,
    transposed_accumulator,
)
from .prepared_fused import (
    OUTPUT_LAG,
    absorb_values,
    decay_state,
    finish_output,
    finish_state,
    load_state,
    multiply_keys,
    multiply_queries,
    store_state,
    take_chunk,
)

__all__ = ["PASS_CONFIGS", "WideConfig", "wide_kernel"]

STATE_GROUPS = HEAD_DIM // TILE


class WideConfig(PreparedConfig):
    block_dv: ClassVar[int] = HEAD_DIM
    registers: ClassVar[dict[str, int]] = {"state": 192, "prepare": 96, "service": 32}
    unrolled: ClassVar[bool] = False


# --- prepare group
@T.macro
def prepare_role(place, scale, tiles, barriers, registers):
    """A' and P of every chunk, ahead of the chain."""
    for chunk in T.serial(place.chunks):
        here = step(chunk)
        T.barrier_wait(barriers.inputs_ready[here.stage], here.filled)
        multiply_queries_keys(here, tiles, registers)
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
        gate_scores(here, scale, tiles, registers)
        T.copy(registers.scores_operand, tiles.scores[here.stage, :, :])
        T.fence_proxy_async()
        arrive_warp(barriers.chunk_ready, here.stage)


# --- state groups
@T.macro
def multiply_state(here, tiles, registers):
    """U'^T = S^T K^T and O^T = S^T Q^T, from the state as bf16, left in flight."""
    multiply_keys(here, tiles, registers)
    multiply_queries(here, tiles, registers)


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
    decay_state(registers)
    # X^T = (-exp(G) U'^T) A'^T + V^T A'^T
    TC.wgmma_gemm(
        registers.x_operand,
        tiles.a[here.stage, :, :],
        registers.x,
        transpose_B=True,
        policy=FULL_ROW,
        clear_accum=True,
    )
    multiply_values(here, tiles, registers, False)
    gate_slow_output(here, tiles, registers)
    TC.wait_wgmma(0)
    TC.warpgroup_fence_operand(registers.x, num_regs=ACCUMULATOR_REGISTERS)
    T.copy(registers.x, registers.x_operand)


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
        **score_fragments(),
        inverse=T.alloc_fragment((CHUNK, CHUNK), BF16),
        gated=T.alloc_fragment((CHUNK, CHUNK), BF16),
    )
    product = T.alloc_fragment((HEAD_DIM, CHUNK), FP32)
    chain = SimpleNamespace(
        state=T.alloc_fragment((HEAD_DIM, HEAD_DIM), FP32),
        state_operand=[T.alloc_fragment((HEAD_DIM, TILE), BF16) for _ in DK_HALVES],
        u=product,
        x=product,
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
            chain.output_operand: transposed_accumulator(HEAD_DIM),
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
