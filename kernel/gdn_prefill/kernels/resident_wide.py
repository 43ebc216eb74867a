"""The resident kernel of all 128 state columns: two state groups that make the output too.

One CTA owns one head's state and walks its chunks of C = 64 tokens in order. S^T [128, dk] lies in
the registers of two state groups, 64 rows each, as in resident_narrow.py. With G, r and keep as in
resident_common.py, n_k and n_q the norms of the rows of K and Q, 1 where there are none:

    A'   = n_k exp(r - G) A beta                            prepare group
    P    = exp(-r) tril(Q K^T)                              prepare group
    U'^T = S^T K^T                                          state groups
    X^T  = (-n_k exp(G) U'^T) A'^T + V^T A'^T               state groups
    S^T  = keep S^T + X^T K                                 state groups
    O^T  = scale n_q exp(G) (S^T Q^T + X^T P^T)             state groups

A' and P do not depend on the state, and are made ahead of the chain, which waits for them behind
U'. Factors of n_k and exp(r - G) are those of rows of A, beta of its columns. A is given in rows,
and A' takes its place, or in the blocks of inverse_blocks.py. In a slow chunk

    A' = A beta,  P = scale n_q tril(exp(g_i - g_j)) * (Q K^T) n_k,
    O^T = scale n_q exp(G) (S^T Q^T) + X^T P^T

and the state gets n_k exp(g_last - g) X^T.

Roles of the 512 threads: two state warp groups (the chain and the output, all of it in registers),
a prepare warp group and a service warp group of a producer warp (TMA loads), a writer warp (TMA
stores) and two gate warps. Q, K, A and what is made of them are loaded and made once for both state
groups, and while one of them converts registers the other's products keep the tensor cores busy.
U' and X share an accumulator: all that a WGMMA writes stays allocated over the whole loop, which is
not unrolled by stages, as ptxas then makes the descriptors of WGMMA in ordinary registers and moves
each over.
"""

from types import SimpleNamespace

import tilelang.cuda.language as TC
import tilelang.language as T
from tilelang.layout import make_full_bank_swizzled_layout, make_linear_layout

from .inverse_blocks import (
    BLOCK,
    ELEMENTS,
    LANE_ELEMENTS,
    LAPS,
    STORED,
    addressed,
    block_column,
    block_of,
    block_row,
    in_lap,
    lane_column,
    lane_row,
    store_block,
)
from .resident_common import (
    ACCUMULATOR_REGISTERS,
    CHUNK,
    FULL_ROW,
    GATE_WARPS,
    HEAD_DIM,
    TILE,
    WARP,
    WARP_GROUP,
    WARPS_PER_GROUP,
    arrive_warp,
    chunk_scalars,
    chunk_tokens,
    following,
    gate_slow_scores,
    lower_triangle,
    multiply_queries_keys,
    of_key,
    of_query,
    resident_gates,
    rolled,
    service_role,
    set_registers,
    stage_inverse,
    stage_keys,
    stage_queries,
    step,
    transposed_accumulator,
    write_slow_score_gates,
)

DK_HALVES = (slice(0, TILE), slice(TILE, HEAD_DIM))  # one converts while the other is multiplied
STATE_REGISTERS = len(DK_HALVES) * ACCUMULATOR_REGISTERS
PREPARE_SYNC = 2  # named barrier of the prepare group
INVERSE_SLOTS = 2  # records of A in shared memory
OUTPUT_LAG = 2  # chunks that inputs_ready runs ahead of the output tile that it says is free


# --- prepare group
@T.macro
def prepare_role(config, place, thread, scale, tiles, barriers, registers):
    """A' and P of every chunk, ahead of the chain."""
    warp, lane = thread // WARP, thread % WARP
    if config.inverse_blocks:
        clear_inverse(config, thread, tiles)
    for chunk in rolled(place.chunks):
        here = step(config, chunk)
        T.barrier_wait(barriers.inputs_ready[here.stage], here.filled)
        multiply_queries_keys(here, tiles, registers)
        if config.inverse_blocks:
            fetch_blocks(here, warp, lane, tiles, registers)
            arrive_warp(barriers.inverse_read, chunk % INVERSE_SLOTS)
            gate_blocks(config, here, warp, lane, tiles, registers)
        else:
            gate_rows(here, tiles, registers)
        gate_scores(config, here, scale, tiles, registers)
        T.copy(registers.scores_operand, tiles.scores[here.stage, :, :])
        T.fence_proxy_async()
        arrive_warp(barriers.chunk_ready, here.stage)


@T.macro
def gate_rows(here, tiles, registers):
    """A' in the place of A: each thread writes what it has read."""
    T.copy(tiles.a[here.stage, :, :], registers.inverse)
    for i, j in T.Parallel(CHUNK, CHUNK):
        # A' = n_k exp(r - G) A beta
        registers.inverse[i, j] = (
            T.cast(registers.inverse[i, j], "float32")
            * tiles.row_factor[here.stage, i]
            * tiles.beta[here.stage, j]
        )
    T.copy(registers.inverse, tiles.a[here.stage, :, :])


@T.macro
def clear_inverse(config, thread, tiles):
    """Zero A' in all stages, as what is above its diagonal stays."""
    pieces = CHUNK // LANE_ELEMENTS
    for lap in rolled(config.stages * CHUNK * pieces // WARP_GROUP):
        piece = lap * WARP_GROUP + thread
        for e in T.vectorized(LANE_ELEMENTS):
            tiles.a[
                piece // (CHUNK * pieces),
                piece // pieces % CHUNK,
                piece % pieces * LANE_ELEMENTS + e,
            ] = 0
    T.sync_threads(PREPARE_SYNC, WARP_GROUP)


@T.macro
def fetch_blocks(here, warp, lane, tiles, registers):
    """This warp's blocks of A."""
    for lap in tuple(range(LAPS)):
        if in_lap(lap, warp):
            for e in T.vectorized(LANE_ELEMENTS):
                registers.blocks[lap * LANE_ELEMENTS + e] = tiles.inverse[
                    here.chunk % INVERSE_SLOTS,
                    block_of(lap, warp),
                    lane * LANE_ELEMENTS + e,
                ]


@T.macro
def gate_blocks(config, here, warp, lane, tiles, registers):
    """A' of this warp's blocks of A."""
    for lap in tuple(range(LAPS)):
        if in_lap(lap, warp):
            for e in T.unroll(LANE_ELEMENTS):
                # A' = n_k exp(r - G) A beta
                registers.blocks[lap * LANE_ELEMENTS + e] = T.cast(
                    T.cast(registers.blocks[lap * LANE_ELEMENTS + e], "float32")
                    * tiles.row_factor[here.stage, block_row(lap, warp) * BLOCK + lane_row(lane, e)]
                    * tiles.beta[
                        here.stage, block_column(lap, warp) * BLOCK + lane_column(lane, e)
                    ],
                    config.dtype,
                )
            store_block(
                tiles.a,
                (here.stage, *addressed(block_row(lap, warp), block_column(lap, warp), lane)),
                registers.block_words,
                lap * LANE_ELEMENTS // 2,
            )


@T.macro
def gate_scores(config, here, scale, tiles, registers):
    """P of the chunk, as an operand in registers, of Q K^T in flight."""
    registers.slow[0] = tiles.slow[here.stage]
    registers.growth[0] = tiles.growth[here.stage]
    TC.wait_wgmma(0)
    TC.warpgroup_fence_operand(registers.scores, num_regs=ACCUMULATOR_REGISTERS)
    if registers.slow[0] == 0:
        # P = exp(-r) tril(Q K^T)
        if registers.growth[0] != 1.0:
            for i, j in T.Parallel(CHUNK, CHUNK):
                registers.scores[i, j] *= registers.growth[0]
        lower_triangle(registers)
    else:
        T.copy(tiles.score_gate[here.stage, :], registers.row_gate)
        gate_slow_scores(config, here, scale, tiles, registers)
    T.copy(registers.scores, registers.scores_operand)


# --- state groups
@T.macro
def take_chunk(here, tiles, barriers, registers):
    """What the chunk begins with: K, Q and the factors, not yet A' and P."""
    T.barrier_wait(barriers.inputs_ready[here.stage], here.filled)
    registers.coming_slow[0] = tiles.slow[here.stage]
    registers.keep[0] = tiles.keep[here.stage]


@T.macro
def multiply_state(here, tiles, registers):
    """U'^T = S^T K^T and O^T = S^T Q^T, from the state as an operand, left in flight."""
    for half, columns in enumerate(DK_HALVES):
        for i, j in T.Parallel(HEAD_DIM, TILE):
            registers.state_operand[half][i, j] = registers.state[0][i, half * TILE + j]
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
def decay_state(registers):
    """S^T = keep S^T, where keep is not 1."""
    if registers.keep[0] != 1.0:
        for i, j in T.Parallel(HEAD_DIM, HEAD_DIM):
            registers.state[0][i, j] *= registers.keep[0]


@T.macro
def solve_values(here, tiles, barriers, registers):
    """From U'^T and S^T Q^T in flight to the finished X."""
    registers.slow[0] = registers.coming_slow[0]
    T.copy(tiles.minus_gamma[here.stage, :], registers.gate)
    TC.wait_wgmma(len(DK_HALVES))  # the products with Q are in flight
    TC.warpgroup_fence_operand(registers.x, num_regs=ACCUMULATOR_REGISTERS)
    # -n_k exp(G) U'^T
    for i, j in T.Parallel(HEAD_DIM, CHUNK):
        registers.x_operand[i, j] = registers.x[i, j] * registers.gate[j]
    TC.wait_wgmma(0)
    TC.warpgroup_fence_operand(registers.output, num_regs=ACCUMULATOR_REGISTERS)
    decay_state(registers)
    T.barrier_wait(barriers.chunk_ready[here.stage], here.filled)
    # X^T = (-n_k exp(G) U'^T) A'^T + V^T A'^T
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
    if registers.slow[0] != 0:
        # O^T = scale n_q exp(G) O^T of a slow chunk, before the scores' part
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
        # X^T = n_k exp(g_last - g) X^T
        for i, j in T.Parallel(HEAD_DIM, CHUNK):
            registers.x[i, j] *= tiles.value_gate[here.stage, j]
        T.copy(registers.x, registers.x_operand)
    # S^T += X^T K
    TC.wgmma_gemm(
        registers.x_operand,
        tiles.k[here.stage, :, :],
        registers.state[0],
        policy=FULL_ROW,
    )


@T.macro
def finish_output(config, here, tiles, registers):
    """The finished O [tokens, columns] as stored, beside the state's update."""
    T.copy(tiles.output_gate[here.stage, :], registers.gate)
    TC.wait_wgmma(1)  # the update is in flight
    TC.warpgroup_fence_operand(registers.output, num_regs=ACCUMULATOR_REGISTERS)
    # O^T = scale n_q exp(G) O^T, of a slow chunk O^T
    for i, j in T.Parallel(HEAD_DIM, CHUNK):
        registers.output_operand[j, i] = T.cast(
            registers.output[i, j] * registers.gate[j], config.dtype
        )


@T.macro
def hand_over_output(tiles, barriers, registers):
    """O to the writer warp."""
    T.copy(registers.output_operand, tiles.output)
    T.fence_proxy_async()
    arrive_warp(barriers.output_ready, 0)


@T.macro
def finish_state(registers):
    TC.wait_wgmma(0)
    TC.warpgroup_fence_operand(registers.state[0], num_regs=STATE_REGISTERS)


@T.macro
def state_role(config, place, inputs, hooks, tiles, barriers, registers):
    """The serial chain: S -> U' -> X -> S, and the output, all of it in registers."""
    first, last = step(config, 0), step(config, place.chunks - 1)
    hooks.load_state(config, place, inputs, registers)
    take_chunk(first, tiles, barriers, registers)
    multiply_state(first, tiles, registers)
    solve_values(first, tiles, barriers, registers)

    for chunk in T.serial(place.chunks - 1):
        here = step(config, chunk)
        coming = following(config, here)
        absorb_values(here, tiles, registers)
        arrive_warp(barriers.values_free, here.stage)
        finish_output(config, here, tiles, registers)
        take_chunk(coming, tiles, barriers, registers)
        # That the coming chunk's inputs are ready means too that the tile is free.
        hand_over_output(tiles, barriers, registers)
        finish_state(registers)
        multiply_state(coming, tiles, registers)
        arrive_warp(barriers.inputs_free, here.stage)
        solve_values(coming, tiles, barriers, registers)

    absorb_values(last, tiles, registers)
    finish_output(config, last, tiles, registers)
    T.barrier_wait(barriers.output_stored[0], place.chunks % 2)
    hand_over_output(tiles, barriers, registers)
    registers.owed[0] = tiles.pending[last.stage]
    finish_state(registers)
    hooks.store_state(config, place, inputs, registers)


# --- service group
@T.macro
def stage_inputs(config, place, here, inputs, tiles, barriers):
    """What is used up first is loaded first: K is needed until the chunk is over.

    On a full device a load takes longer than a chunk.
    """
    T.barrier_wait(barriers.values_free[here.stage], here.freed)
    T.tma_copy(
        inputs.v[place.batch, chunk_tokens(here), place.head, 0:HEAD_DIM],
        tiles.v[here.stage, :, :],
        barrier=barriers.inputs_landed[here.stage],
    )
    stage_queries(place, here, inputs, tiles, barriers)
    if config.inverse_blocks:
        stage_blocks(place, here, inputs, tiles, barriers)
    else:
        stage_inverse(place, here, inputs, tiles, barriers)
    T.barrier_wait(barriers.inputs_free[here.stage], here.freed)
    stage_keys(place, here, inputs, tiles, barriers)


@T.macro
def stage_blocks(place, here, inputs, tiles, barriers):
    slot = here.chunk % INVERSE_SLOTS
    T.barrier_wait(barriers.inverse_read[slot], (here.chunk // INVERSE_SLOTS + 1) % 2)
    T.tma_copy(
        inputs.a[place.record + here.chunk, place.head, 0:STORED, 0:ELEMENTS],
        tiles.inverse[slot, :, :],
        barrier=barriers.inputs_landed[here.stage],
    )


@T.macro
def writer_warp(config, place, thread, inputs, hooks, tiles, barriers):
    for chunk in tuple(range(OUTPUT_LAG)):
        arrive_warp(barriers.inputs_ready, chunk)
    for chunk in rolled(place.chunks):
        T.barrier_wait(barriers.output_ready[0], chunk % 2)
        hooks.store_output(config, place, chunk, thread, inputs, tiles)
        # In this order: who was told that inputs are ready may not take output_stored for older.
        arrive_warp(barriers.output_stored, 0)
        arrive_warp(barriers.inputs_ready, (chunk + OUTPUT_LAG) % config.stages)


@T.macro
def write_factors(config, stage, token, scale, tiles, gates):
    tiles.beta[stage, token] = gates.beta[0]
    tiles.minus_gamma[stage, token] = of_key(config, gates, -gates.grown[0])
    if gates.last[0] < config.slow_limit:
        tiles.row_factor[stage, token] = 1.0
        tiles.output_gate[stage, token] = 1.0
        tiles.state_gate[stage, token] = of_query(config, gates, scale * gates.grown[0])
        tiles.value_gate[stage, token] = of_key(config, gates, gates.ratio[0])
        write_slow_score_gates(config, stage, token, tiles, gates)
    else:
        tiles.row_factor[stage, token] = of_key(config, gates, gates.ratio[0])
        tiles.output_gate[stage, token] = of_query(config, gates, scale * gates.grown[0])
    if token == CHUNK - 1:
        tiles.growth[stage] = T.exp2(-gates.reference[0])


@T.macro
def announce_inputs(stage, barriers):
    arrive_warp(barriers.inputs_ready, stage)


@T.macro
def close_inputs(config, place, barriers):
    """Nobody waits for more than the chunks there are."""


SERVICE = SimpleNamespace(
    stage_inputs=stage_inputs,
    writer_warp=writer_warp,
    write_factors=write_factors,
    announce_inputs=announce_inputs,
    close_inputs=close_inputs,
)


@T.macro
def run_roles(config, place, scale, inputs, hooks, memory):
    """What each thread of the CTA does."""
    thread = T.get_thread_binding()
    tiles, barriers = memory.tiles, memory.barriers
    if thread < config.state_threads:
        set_registers(config, "state")
        state_role(config, place, inputs, hooks, tiles, barriers, memory.chain)
    elif thread < config.service_thread:
        set_registers(config, "prepare")
        prepare_role(
            config, place, thread - config.state_threads, scale, tiles, barriers, memory.ahead
        )
    else:
        set_registers(config, "service")
        lane = thread - config.service_thread
        service_role(config, place, lane, scale, inputs, hooks, SERVICE, memory)


def cta_memory(config) -> SimpleNamespace:
    """Shared memory, barriers and registers of a CTA."""
    stages = config.stages
    operand, fp32 = config.dtype, "float32"
    tiles = SimpleNamespace(
        q=T.alloc_shared((stages, CHUNK, HEAD_DIM), operand),
        k=T.alloc_shared((stages, CHUNK, HEAD_DIM), operand),
        v=T.alloc_shared((stages, CHUNK, HEAD_DIM), operand),
        a=T.alloc_shared((stages, CHUNK, CHUNK), operand),  # A' or, of rows, A before it
        inverse=T.alloc_shared((INVERSE_SLOTS, STORED, ELEMENTS), operand)
        if config.inverse_blocks
        else None,
        scores=T.alloc_shared((stages, CHUNK, CHUNK), operand),
        output=T.alloc_shared((CHUNK, HEAD_DIM), operand),
        **{
            name: T.alloc_shared((stages, CHUNK), fp32, scope="shared")
            for name in (
                "beta",
                "minus_gamma",  # -n_k exp(G)
                "row_factor",  # n_k exp(r - G), of a slow chunk 1
                "output_gate",  # scale n_q exp(G), of a slow chunk 1
                "state_gate",  # scale n_q exp(G), of a slow chunk
                "value_gate",  # n_k exp(g_last - g), of a slow chunk
                "score_gate",  # log2 of gamma, times norm of q, of a slow chunk
                *("score_column",) * config.l2norm,  # log2 of gamma / norm of k, of a slow chunk
            )
        },
        growth=T.alloc_shared((stages,), fp32, scope="shared"),  # exp(-r)
        **chunk_scalars(config),
    )
    barriers = SimpleNamespace(
        inputs_landed=T.alloc_barrier([WARP] * stages),  # by the producer warp and its TMA loads
        inputs_ready=T.alloc_barrier(
            [GATE_WARPS + 1] * stages
        ),  # by the gate warps: landed, and the factors written; by the writer warp: the output
        # tile is free
        chunk_ready=T.alloc_barrier([WARPS_PER_GROUP] * stages),  # by the prepare group: A' and P
        values_free=T.alloc_barrier(
            [config.state_groups * WARPS_PER_GROUP] * stages
        ),  # by the state groups: V, Q and A' of the chunk have been used
        inputs_free=T.alloc_barrier(
            [config.state_groups * WARPS_PER_GROUP] * stages
        ),  # by the state groups: all of it has
        output_ready=T.alloc_barrier(
            [config.state_groups * WARPS_PER_GROUP]
        ),  # by the state groups
        output_stored=T.alloc_barrier([1]),  # by the writer warp
        inverse_read=T.alloc_barrier([WARPS_PER_GROUP] * INVERSE_SLOTS)
        if config.inverse_blocks
        else None,  # by the prepare group
    )
    chain = SimpleNamespace(
        state=[T.alloc_fragment((HEAD_DIM, HEAD_DIM), fp32)],
        state_operand=[T.alloc_fragment((HEAD_DIM, TILE), operand) for _ in DK_HALVES],
        x=T.alloc_fragment((HEAD_DIM, CHUNK), fp32),  # U'^T, then X^T
        x_operand=T.alloc_fragment((HEAD_DIM, CHUNK), operand),
        output=T.alloc_fragment((HEAD_DIM, CHUNK), fp32),
        gate=T.alloc_fragment((CHUNK,), fp32),
        output_operand=T.alloc_fragment((CHUNK, HEAD_DIM), operand),
        keep=T.alloc_local((1,), fp32),
        owed=T.alloc_local((1,), fp32),
        slow=T.alloc_local((1,), "int32"),
        coming_slow=T.alloc_local((1,), "int32"),
    )
    blocks = T.alloc_local((LAPS * LANE_ELEMENTS,), operand)
    ahead = SimpleNamespace(
        inverse=None
        if config.inverse_blocks
        else T.alloc_fragment((CHUNK, CHUNK), operand),  # A, then A'
        blocks=blocks,  # the same of a warp's blocks
        block_words=T.view(blocks, (LAPS * LANE_ELEMENTS // 2,), "int32"),
        scores=T.alloc_fragment((CHUNK, CHUNK), fp32),
        scores_operand=T.alloc_fragment((CHUNK, CHUNK), operand),
        row_gate=T.alloc_fragment((CHUNK,), fp32),
        slow=T.alloc_local((1,), "int32"),
        growth=T.alloc_local((1,), fp32),
    )
    T.annotate_layout(
        {
            chain.output_operand: transposed_accumulator(HEAD_DIM),
            tiles.output: make_full_bank_swizzled_layout(tiles.output),
            **({tiles.inverse: make_linear_layout(tiles.inverse)} if config.inverse_blocks else {}),
        }
    )
    return SimpleNamespace(
        tiles=tiles, barriers=barriers, chain=chain, ahead=ahead, gates=resident_gates(config)
    )


@T.macro
def clear_values(config, here, row, piece, tiles, clear_piece):
    """Zero a piece of a row of V."""
    clear_piece(tiles.v, (here.stage, row), piece)
