"""A prepared kernel in five groups: the output is made beside the chain.

See prepared.py for the equations. Roles of the 640 threads: a prepare warp group (A' and A''), a
state warp group (the chain), an output warp group, a scores warp group (P) and a service warp group
of a producer warp (TMA loads), a writer warp (TMA stores) and two gate warps.

Publication n is the bf16 S^T before chunk n with the X^T and the P of chunk n - 1: it ends the
output of one chunk and begins that of the next. S^T and X^T are dumps of registers: thread t of the
output group reads back what thread t of the state group wrote, so neither side needs a proxy fence.
There is one place for a publication; chunk_ready says also that it may be written.
"""

from types import SimpleNamespace
from typing import ClassVar

import tilelang.cuda.language as TC
import tilelang.language as T
from tilelang.layout import Layout, make_full_bank_swizzled_layout

from .prepared import (
    ACCUMULATOR_REGISTERS,
    BF16,
    CHUNK,
    DK_HALVES,
    FP32,
    FULL_ROW,
    GATE_WARPS,
    PASS_CONFIGS,
    STAGES,
    TILE,
    WARP,
    WARP_GROUP,
    WARPS_PER_GROUP,
    PreparedConfig,
    accumulator_register,
    accumulator_thread,
    arrive_warp,
    finish_values,
    following,
    forward_prim_func,
    gate_scalars,
    gate_scores,
    gate_slow_output,
    gate_warps,
    input_tiles,
    laps,
    multiply_queries_keys,
    multiply_values,
    prepare_fragments,
    prepare_role,
    producer_warp,
    round_output,
    score_fragments,
    set_registers,
    step,
    steps,
    transposed_accumulator,
)

__all__ = ["PASS_CONFIGS", "GroupsConfig", "groups_kernel"]

OUTPUT_TILES = 2
INPUT_READERS = ("state", "output", "scores")  # the prepare group is through before chunk_ready


class GroupsConfig(PreparedConfig):
    registers: ClassVar[dict[str, int]] = {
        "prepare": 72,
        "state": 192,
        "output": 112,
        "scores": 72,
        "service": 32,
    }
    unrolled: ClassVar[bool] = True


def register_dump(tiles: int) -> Layout:
    """Shared layout of [tiles, 64, 64] bf16: a thread's registers as 16-byte words.

    Even one tile has its number in front: a store to a buffer of two dimensions TileLang makes
    an stmatrix, which has no such layout.
    """

    def forward(tile, i, j):
        register = accumulator_register(i, j)
        return [tile, register // 8, accumulator_thread(i, j), register % 8]

    return Layout((tiles, TILE, TILE), forward)


# --- prepare group
@T.macro
def admit_last_publication(place, barriers):
    """The last publication has no chunk of its own to begin with."""
    after = step(place.chunks)
    T.barrier_wait(barriers.inputs_free[after.stage], after.freed)
    arrive_warp(barriers.chunk_ready, after.stage)


# --- state group
@T.macro
def load_state(config, place, inputs, registers):
    for half, columns in enumerate(DK_HALVES):
        if config.use_initial_state:
            for i, j in T.Parallel(TILE, TILE):
                registers.state[half][i, j] = inputs.initial_state[
                    place.batch, place.head, columns.start + j, place.dv + i
                ]
        else:
            T.clear(registers.state[half])


@T.macro
def store_state(place, inputs, registers):
    """The state after the last chunk, with the decay that is still to be applied."""
    for half, columns in enumerate(DK_HALVES):
        for i, j in T.Parallel(TILE, TILE):
            inputs.final_state[place.batch, place.head, columns.start + j, place.dv + i] = (
                registers.state[half][i, j] * registers.owed[0]
            )


@T.macro
def begin_values(here, tiles, barriers, registers):
    """V^T A'^T, left in flight."""
    T.barrier_wait(barriers.chunk_ready[here.stage], here.filled)
    multiply_values(here, tiles, registers, True)
    registers.keep[0] = tiles.keep[here.stage]
    registers.slow[0] = tiles.slow[here.stage]


@T.macro
def multiply_keys(half, here, tiles, registers):
    """One dk half of U'^T = S^T K^T, from the state as bf16, left in flight."""
    T.copy(registers.state[half], registers.state_operand[half])
    TC.wgmma_gemm(
        registers.state_operand[half],
        tiles.k[here.stage, :, DK_HALVES[half]],
        registers.u,
        transpose_B=True,
        policy=FULL_ROW,
        clear_accum=half == 0,
    )


@T.macro
def publish_state(tiles, barriers, registers):
    for half, _ in enumerate(DK_HALVES):
        T.copy(registers.state_operand[half], tiles.state[half, :, :])
    arrive_warp(barriers.published, 0)


@T.macro
def take_values(here, tiles, barriers, registers):
    """From U'^T in flight to the finished X as an operand; a slow chunk's is published before."""
    # S^T = keep S^T
    if registers.keep[0] != 1.0:
        for half, _ in enumerate(DK_HALVES):
            for i, j in T.Parallel(TILE, TILE):
                registers.state[half][i, j] *= registers.keep[0]
    TC.wait_wgmma(0)
    finish_values(here, tiles, registers)
    registers.was_slow[0] = registers.slow[0]
    if registers.slow[0] != 0:
        coming = following(here)
        T.barrier_wait(barriers.chunk_ready[coming.stage], coming.filled)
        T.copy(registers.x, registers.x_operand)
        T.copy(registers.x_operand, tiles.values[0, :, :])
        # X^T = exp(g_last - g) X^T
        for i, j in T.Parallel(TILE, CHUNK):
            registers.x[i, j] *= tiles.value_gate[here.stage, j]
    T.copy(registers.x, registers.x_operand)


@T.macro
def absorb_values(here, tiles, registers):
    """S^T += X^T K, left in flight: one WGMMA group a dk half."""
    for half, columns in enumerate(DK_HALVES):
        TC.wgmma_gemm(
            registers.x_operand,
            tiles.k[here.stage, :, columns],
            registers.state[half],
            policy=FULL_ROW,
        )


@T.macro
def state_role(config, place, inputs, tiles, barriers, registers):
    """The serial chain: S -> U' -> X -> S, all of it in registers."""
    first, last, after = step(0), step(place.chunks - 1), step(place.chunks)
    load_state(config, place, inputs, registers)
    begin_values(first, tiles, barriers, registers)
    for half, _ in enumerate(DK_HALVES):
        multiply_keys(half, first, tiles, registers)
    publish_state(tiles, barriers, registers)
    take_values(first, tiles, barriers, registers)

    for lap in laps(config, place.chunks - 1):
        for here in steps(config, lap):
            if here.chunk < place.chunks - 1:
                coming = following(here)
                absorb_values(here, tiles, registers)
                begin_values(coming, tiles, barriers, registers)
                if registers.was_slow[0] == 0:
                    T.copy(registers.x_operand, tiles.values[0, :, :])
                for half, _ in enumerate(DK_HALVES):
                    # In flight: the other half, and the product of V.
                    TC.wait_wgmma(2)
                    TC.warpgroup_fence_operand(
                        registers.state[half], num_regs=ACCUMULATOR_REGISTERS
                    )
                    multiply_keys(half, coming, tiles, registers)
                arrive_warp(barriers.inputs_free, here.stage)
                publish_state(tiles, barriers, registers)
                take_values(coming, tiles, barriers, registers)

    absorb_values(last, tiles, registers)
    T.barrier_wait(barriers.chunk_ready[after.stage], after.filled)
    if registers.was_slow[0] == 0:
        T.copy(registers.x_operand, tiles.values[0, :, :])
    arrive_warp(barriers.published, 0)
    registers.owed[0] = tiles.pending[last.stage]
    TC.wait_wgmma(0)
    for half, _ in enumerate(DK_HALVES):
        TC.warpgroup_fence_operand(registers.state[half], num_regs=ACCUMULATOR_REGISTERS)
    store_state(place, inputs, registers)


# --- scores group
@T.macro
def scores_role(place, scale, tiles, barriers, registers):
    """P of every chunk, as soon as the output group has done with that of the chunk before."""
    arrive_warp(barriers.published, 0)
    for chunk in T.serial(place.chunks):
        here = step(chunk)
        T.barrier_wait(barriers.inputs_ready[here.stage], here.filled)
        multiply_queries_keys(here, tiles, registers)
        gate_scores(here, scale, tiles, registers)
        arrive_warp(barriers.inputs_free, here.stage)
        # Also keeps this group from arriving twice in one phase of a publication.
        T.barrier_wait(barriers.scores_free[0], chunk % 2)
        T.copy(registers.scores_operand, tiles.scores)
        T.fence_proxy_async()
        arrive_warp(barriers.published, 0)


# --- output group
@T.macro
def fetch_state(tiles, registers):
    for half, _ in enumerate(DK_HALVES):
        T.copy(tiles.state[half, :, :], registers.old_state[half])


@T.macro
def multiply_queries(here, tiles, registers):
    """O^T = S^T Q^T, left in flight."""
    for half, columns in enumerate(DK_HALVES):
        TC.wgmma_gemm(
            registers.old_state[half],
            tiles.q[here.stage, :, columns],
            registers.output,
            transpose_B=True,
            policy=FULL_ROW,
            clear_accum=half == 0,
        )


@T.macro
def settle_queries(here, tiles, barriers, registers):
    """The finished S^T Q^T; of a slow chunk with its factor, as the scores have theirs."""
    registers.slow[0] = tiles.slow[here.stage]
    T.copy(tiles.output_gate[here.stage, :], registers.gate)
    TC.wait_wgmma(0)
    TC.warpgroup_fence_operand(registers.output, num_regs=ACCUMULATOR_REGISTERS)
    gate_slow_output(here, tiles, registers)
    arrive_warp(barriers.inputs_free, here.stage)


@T.macro
def finish_output(tiles, barriers, registers):
    """The finished O as bf16; the scores have been used."""
    # O^T += X^T P^T
    TC.wgmma_gemm(
        registers.values,
        tiles.scores,
        registers.output,
        transpose_B=True,
        policy=FULL_ROW,
    )
    TC.wait_wgmma(0)
    TC.warpgroup_fence_operand(registers.output, num_regs=ACCUMULATOR_REGISTERS)
    round_output(registers)
    arrive_warp(barriers.scores_free, 0)


@T.macro
def hand_over_output(chunk, tiles, barriers, registers):
    """O [tokens, columns] to the writer warp."""
    tile = chunk % OUTPUT_TILES
    T.barrier_wait(barriers.output_stored[tile], (chunk // OUTPUT_TILES + 1) % 2)
    for index in tuple(range(OUTPUT_TILES)):
        if tile == index:
            T.copy(registers.output_operand, tiles.output[index])
    T.fence_proxy_async()
    arrive_warp(barriers.output_ready, tile)


@T.macro
def output_role(place, tiles, barriers, registers):
    """A publication ends a chunk and begins the next."""
    arrive_warp(barriers.chunk_ready, 0)
    T.barrier_wait(barriers.published[0], 0)
    arrive_warp(barriers.scores_free, 0)  # with the first publication came none
    fetch_state(tiles, registers)
    arrive_warp(barriers.chunk_ready, 1)
    multiply_queries(step(0), tiles, registers)
    settle_queries(step(0), tiles, barriers, registers)

    for chunk in T.serial(place.chunks - 1):
        coming = step(chunk + 1)
        T.barrier_wait(barriers.published[0], coming.chunk % 2)
        T.copy(tiles.values[0, :, :], registers.values)
        fetch_state(tiles, registers)
        arrive_warp(barriers.chunk_ready, (chunk + 2) % STAGES)
        finish_output(tiles, barriers, registers)
        multiply_queries(coming, tiles, registers)
        hand_over_output(chunk, tiles, barriers, registers)
        settle_queries(coming, tiles, barriers, registers)

    T.barrier_wait(barriers.published[0], place.chunks % 2)
    T.copy(tiles.values[0, :, :], registers.values)
    finish_output(tiles, barriers, registers)
    hand_over_output(place.chunks - 1, tiles, barriers, registers)


# --- service group
@T.macro
def writer_warp(place, inputs, tiles, barriers):
    """One TMA store a chunk; it drops rows past the tensor's end."""
    for chunk in T.serial(place.chunks):
        tile = chunk % OUTPUT_TILES
        first = chunk * CHUNK
        T.barrier_wait(barriers.output_ready[tile], chunk // OUTPUT_TILES % 2)
        for index in tuple(range(OUTPUT_TILES)):
            if tile == index:
                T.copy(
                    tiles.output[index],
                    inputs.output[
                        place.batch,
                        first : first + CHUNK,
                        place.head,
                        place.dv : place.dv + TILE,
                    ],
                )
        T.barrier_arrive(barriers.output_stored[tile])


@T.macro
def groups_cta(config, place, scale, inputs):
    """Everything one CTA does: its memory, its barriers, its roles."""
    tiles = SimpleNamespace(
        **input_tiles(),
        decayed=T.alloc_shared((STAGES, CHUNK, CHUNK), BF16),  # A''
        state=T.alloc_shared((len(DK_HALVES), TILE, TILE), BF16),
        values=T.alloc_shared((1, TILE, CHUNK), BF16),  # X^T
        scores=T.alloc_shared((CHUNK, CHUNK), BF16),
        output=[T.alloc_shared((CHUNK, TILE), BF16) for _ in range(OUTPUT_TILES)],
    )
    barriers = SimpleNamespace(
        inputs_landed=T.alloc_barrier([WARP] * STAGES),  # by the producer warp and its TMA loads
        inputs_ready=T.alloc_barrier(
            [GATE_WARPS] * STAGES
        ),  # by the gate warps: landed, and the factors written
        chunk_ready=T.alloc_barrier(
            [2 * WARPS_PER_GROUP] * STAGES
        ),  # by the prepare group, and by the output group: a publication may be written
        inputs_free=T.alloc_barrier([len(INPUT_READERS) * WARPS_PER_GROUP] * STAGES),
        published=T.alloc_barrier([2 * WARPS_PER_GROUP]),  # by the state and scores groups
        scores_free=T.alloc_barrier([WARPS_PER_GROUP]),  # by the output group
        output_ready=T.alloc_barrier([WARPS_PER_GROUP] * OUTPUT_TILES),  # by the output group
        output_stored=T.alloc_barrier([WARP] * OUTPUT_TILES),  # by the writer warp
    )
    ahead = prepare_fragments()
    chain = SimpleNamespace(
        state=[T.alloc_fragment((TILE, TILE), FP32) for _ in DK_HALVES],
        state_operand=[T.alloc_fragment((TILE, TILE), BF16) for _ in DK_HALVES],
        u=T.alloc_fragment((TILE, CHUNK), FP32),
        u_operand=T.alloc_fragment((TILE, CHUNK), BF16),
        x=T.alloc_fragment((TILE, CHUNK), FP32),
        x_operand=T.alloc_fragment((TILE, CHUNK), BF16),
        keep=T.alloc_local((1,), FP32),
        owed=T.alloc_local((1,), FP32),
        slow=T.alloc_local((1,), "int32"),
        was_slow=T.alloc_local((1,), "int32"),
    )
    beside = SimpleNamespace(
        old_state=[T.alloc_fragment((TILE, TILE), BF16) for _ in DK_HALVES],
        values=T.alloc_fragment((TILE, CHUNK), BF16),
        output=T.alloc_fragment((TILE, CHUNK), FP32),
        gate=T.alloc_fragment((CHUNK,), FP32),
        output_operand=T.alloc_fragment((CHUNK, TILE), BF16),
        **score_fragments(),
    )
    gates = gate_scalars()
    T.annotate_layout(
        {
            beside.output_operand: transposed_accumulator(),
            tiles.state: register_dump(len(DK_HALVES)),
            tiles.values: register_dump(1),
            **{tile: make_full_bank_swizzled_layout(tile) for tile in tiles.output},
        }
    )

    thread = T.get_thread_binding()
    service = config.threads - WARP_GROUP
    if thread < WARP_GROUP:
        set_registers(config, "prepare")
        prepare_role(config, place, tiles, barriers, ahead)
        admit_last_publication(place, barriers)
    elif thread < 2 * WARP_GROUP:
        set_registers(config, "state")
        state_role(config, place, inputs, tiles, barriers, chain)
    elif thread < 3 * WARP_GROUP:
        set_registers(config, "output")
        output_role(place, tiles, barriers, beside)
    elif thread < service:
        set_registers(config, "scores")
        scores_role(place, scale, tiles, barriers, beside)
    else:
        set_registers(config, "service")
        if thread < service + WARP:
            producer_warp(place, inputs, tiles, barriers)
        elif thread < service + 2 * WARP:
            writer_warp(place, inputs, tiles, barriers)
        else:
            gate_warps(place, thread - service - 2 * WARP, scale, inputs, tiles, barriers, gates)


def groups_kernel(config: GroupsConfig):
    """Build the kernel as a TileLang PrimFunc; its arguments are prepared.forward_prim_func's."""
    return forward_prim_func(config, "gdn_prepared_groups", groups_cta)
