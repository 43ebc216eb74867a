"""The resident kernel of 64 state columns: the state never leaves its group's registers.

One CTA owns 64 columns of one head's state and walks its chunks of C = 64 tokens in order. The
state is held as S^T [64, dk], an FP32 accumulator; the register layout of an accumulator is that of
a WGMMA A operand, so a cast to bf16 is all that lies between two products of the serial chain. With
G, r and keep as in resident_common.py:

    U'^T    = S^T K^T                                   state group
    W'^T    = beta V^T - beta exp(G) U'^T               state group
    V_new^T = W'^T A^T                                  state group
    X^T     = exp(r - G) V_new^T                        state group
    S^T     = keep S^T + X^T K                          state group
    O^T     = scale exp(G) (S^T Q^T) + X^T P^T          output group
    P       = scale exp(G - r) tril(Q K^T)              scores group

X serves both the state and the output, and leaves the scores one factor a row. X lies between
2^slow_limit and 2^-FLUSH_LIMIT times V_new, and P between 2^FLUSH_LIMIT and 2^-slow_limit times
scale Q K^T.
In a slow chunk P = scale tril(exp(g_i - g_j)) * (Q K^T), the output gets V_new and the state
exp(g_last - g) V_new: the same products with more exponentials between them. With norms n_k of the
rows of K and n_q of those of Q,

    W'^T    = beta V^T - (beta exp(G) n_k) U'^T
    X^T     = (n_k exp(r - G)) V_new^T
    P       = (scale n_q exp(G - r)) tril(Q K^T)

so that X serves K as it is stored, and the scores need none of K's. In a slow chunk the output gets
V_new, and P has both norms.

Roles of the 512 threads: a state warp group, an output warp group, a scores warp group and a
service warp group of one producer warp (TMA loads), one writer warp (TMA stores) and two gate warps
(factors made of g and beta). The state group hands bf16 S^T and X^T to the output group as a dump
of its registers: thread t of the output group reads back what thread t of the state group wrote, so
neither side needs a proxy fence, and the output group is never on the chain as long as it takes
less time for a chunk than the chain does.

The two CTAs of a head are a cluster. P is the same for both, so each makes that of every other
chunk and copies it into the other's shared memory: CTA r of the cluster owns the chunks c with
c % 2 = r.
"""

from types import SimpleNamespace

import tilelang.cuda.language as TC
import tilelang.language as T
from tilelang.layout import Fragment, Layout, make_full_bank_swizzled_layout

from .resident_common import (
    ACCUMULATOR_REGISTERS,
    CHUNK,
    FULL_ROW,
    GATE_WARPS,
    HEAD_DIM,
    SCORE_SLOTS,
    TILE,
    WARP,
    WARP_GROUP,
    WARPS_PER_GROUP,
    accumulator_register,
    accumulator_thread,
    arrive_warp,
    chunk_scalars,
    chunk_tokens,
    following,
    gate_slow_scores,
    laps,
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
    steps,
    transposed_accumulator,
    write_slow_score_gates,
)

PAIR = 2  # CTAs of a head, a cluster
SCORES_SYNC = 2  # named barrier of the scores group
DK_HALVES = (0, 1)  # the state is two accumulators of 64 dk columns: one converts, one is summed


def register_dump(slots: int, rows: int) -> Layout:
    """Shared layout of [slots, rows, 64] bf16: a thread's registers as 16-byte words."""

    def forward(slot, i, j):
        register = accumulator_register(i, j)
        return [slot, i // TILE, register // 8, accumulator_thread(i, j), register % 8]

    return Layout((slots, rows, TILE), forward)


def accumulator_row() -> Fragment:
    """Fragment of [64]: each thread has the columns that it holds of an accumulator [64, 64]."""
    owners = TILE // 2  # threads that share a column of the accumulator

    def forward(j, owner):
        return owner * 4 + j % 8 // 2, j // 8 * 2 + j % 2

    return Fragment((CHUNK,), forward_fn=forward, replicate=owners)


def factor_pairs() -> Fragment:
    """Fragment of [32, 4]: of every pair of tokens the thread that holds their columns has all."""
    owners = TILE // 2

    def forward(pair, factor, owner):
        return owner * 4 + pair % 4, pair // 4 * 4 + factor

    return Fragment((CHUNK // 2, 4), forward_fn=forward, replicate=owners)


def beta(factors, token, *stage):
    """Factors lie in fours, (beta, beta) and (beta exp(G), beta exp(G)) of two tokens."""
    return factors[(*stage, token // 2, token % 2)]


def beta_gamma(factors, token, *stage):
    return factors[(*stage, token // 2, 2 + token % 2)]


def owns(place, chunk):
    """Does this CTA make the scores of the chunk?"""
    return chunk % PAIR == place.dv // TILE


@T.macro
def load_values(config, here, tiles, values_fragment):
    """V of the chunk, read transposed."""
    if isinstance(here.stage, int):
        T.copy(tiles.v[here.stage], values_fragment)
    else:
        for stage in tuple(range(config.stages)):
            if here.stage == stage:
                T.copy(tiles.v[stage], values_fragment)


# --- state group
@T.macro
def take_values(config, here, tiles, barriers, registers):
    """What the chunk brings to the chain, where registers reach with beta V and its factors."""
    T.barrier_wait(barriers.chunk_ready[here.stage], here.filled)
    registers.keep[0] = tiles.keep[here.stage]
    if config.early_factors:
        load_values(config, here, tiles, registers.v)
        T.copy(tiles.factors[here.stage, :, :], registers.factors)
        # beta V
        for i, j in T.Parallel(TILE, CHUNK):
            registers.beta_v[i, j] = beta(registers.factors, j) * T.cast(
                registers.v[j, i], "float32"
            )


@T.macro
def multiply_keys(half, here, tiles, registers):
    """One dk half of U'^T = S^T K^T, from the state as bf16, left in flight."""
    T.copy(registers.state[half], registers.state_operand[half])
    TC.wgmma_gemm(
        registers.state_operand[half],
        tiles.k[here.stage, :, half * TILE : (half + 1) * TILE],
        registers.u,
        transpose_B=True,
        policy=FULL_ROW,
        clear_accum=half == 0,
    )


@T.macro
def publish_values(config, index, tiles, values):
    T.copy(values, tiles.values[index % config.slots, :, :])


@T.macro
def publish_state(config, index, tiles, registers):
    for half in DK_HALVES:
        T.copy(
            registers.state_operand[half],
            tiles.state[index % config.slots * len(DK_HALVES) + half, :, :],
        )


@T.macro
def close_publication(config, index, barriers):
    arrive_warp(barriers.published, index % config.slots)


@T.macro
def decay_state(config, registers):
    """S = keep S, where keep is not 1."""
    if registers.keep[0] != 1.0:
        for half in DK_HALVES:
            for i, j in T.Parallel(TILE, TILE):
                registers.state[half][i, j] *= registers.keep[0]


@T.macro
def solve_values(config, place, here, tiles, barriers, registers):
    """From U'^T in flight to the finished V_new^T; what the next chunk brings in its shadow."""
    if config.early_factors:
        T.copy(tiles.x_factor[here.stage, :], registers.x_factor)
    else:
        load_values(config, here, tiles, registers.v)
    TC.wait_wgmma(0)
    TC.warpgroup_fence_operand(registers.u, num_regs=ACCUMULATOR_REGISTERS)

    # W'^T = beta V^T - beta exp(G) U'^T
    if config.early_factors:
        for i, j in T.Parallel(TILE, CHUNK):
            registers.w[i, j] = (
                registers.beta_v[i, j] - beta_gamma(registers.factors, j) * registers.u[i, j]
            )
    else:
        for i, j in T.Parallel(TILE, CHUNK):
            registers.w[i, j] = (
                beta(tiles.factors, j, here.stage) * T.cast(registers.v[j, i], "float32")
                - beta_gamma(tiles.factors, j, here.stage) * registers.u[i, j]
            )

    # V_new^T = W'^T A^T
    TC.wgmma_gemm(
        registers.w,
        tiles.a[here.stage, :, :],
        registers.x,
        transpose_B=True,
        policy=FULL_ROW,
        clear_accum=True,
    )
    if here.chunk + 1 < place.chunks:
        # Before the publication of V_new too: that it may take its place is part of the wait.
        take_values(config, following(config, here), tiles, barriers, registers)
    registers.slow[0] = tiles.slow[here.stage]  # a branch would wait for a read before it
    TC.wait_wgmma(0)
    TC.warpgroup_fence_operand(registers.x, num_regs=ACCUMULATOR_REGISTERS)


@T.macro
def absorb_values(config, here, tiles, registers):
    """S^T += X^T K, left in flight: one WGMMA group a dk half."""
    # X^T = exp(r - G) V_new^T, or exp(g_last - g) V_new^T
    if config.early_factors:
        for i, j in T.Parallel(TILE, CHUNK):
            registers.x_operand[i, j] = registers.x[i, j] * registers.x_factor[j]
    else:
        for i, j in T.Parallel(TILE, CHUNK):
            registers.x_operand[i, j] = registers.x[i, j] * tiles.x_factor[here.stage, j]
    for half in DK_HALVES:
        TC.wgmma_gemm(
            registers.x_operand,
            tiles.k[here.stage, :, half * TILE : (half + 1) * TILE],
            registers.state[half],
            policy=FULL_ROW,
        )
    if registers.slow[0] == 0:
        publish_values(config, here.chunk + 1, tiles, registers.x_operand)
    else:
        T.copy(registers.x, registers.w)
        publish_values(config, here.chunk + 1, tiles, registers.w)


@T.macro
def state_role(config, place, inputs, hooks, tiles, barriers, registers):
    """The serial chain: S -> U' -> W' -> X -> S, all of it in registers."""
    first = step(config, 0)
    last = step(config, place.chunks - 1)
    hooks.load_state(config, place, inputs, registers)

    take_values(config, first, tiles, barriers, registers)
    for half in DK_HALVES:
        multiply_keys(half, first, tiles, registers)
    publish_state(config, 0, tiles, registers)
    close_publication(config, 0, barriers)
    decay_state(config, registers)
    solve_values(config, place, first, tiles, barriers, registers)

    for lap in laps(config, place.chunks - 1):
        for here in steps(config, lap):
            if here.chunk < place.chunks - 1:
                coming = following(config, here)
                absorb_values(config, here, tiles, registers)
                for half in DK_HALVES:
                    # Only the newest WGMMA group may be unfinished: the other half.
                    TC.wait_wgmma(1)
                    TC.warpgroup_fence_operand(
                        registers.state[half], num_regs=ACCUMULATOR_REGISTERS
                    )
                    multiply_keys(half, coming, tiles, registers)
                if config.keeps_states:
                    registers.owed[0] = tiles.pending[here.stage]
                    hooks.keep_state(config, place, here, inputs, tiles, registers)
                arrive_warp(barriers.inputs_free, here.stage)
                publish_state(config, coming.chunk, tiles, registers)
                close_publication(config, coming.chunk, barriers)
                decay_state(config, registers)
                solve_values(config, place, coming, tiles, barriers, registers)

    # The output group's last arrival there is for the publication without a chunk.
    after = step(config, place.chunks)
    T.barrier_wait(barriers.chunk_ready[after.stage], after.filled)
    absorb_values(config, last, tiles, registers)
    close_publication(config, place.chunks, barriers)
    registers.owed[0] = tiles.pending[last.stage]
    TC.wait_wgmma(0)
    for half in DK_HALVES:
        TC.warpgroup_fence_operand(registers.state[half], num_regs=ACCUMULATOR_REGISTERS)
    hooks.store_state(config, place, inputs, registers)
    if config.keeps_states:
        hooks.keep_state(config, place, last, inputs, tiles, registers)


# --- scores
@T.macro
def gate_scores(config, here, scale, tiles, registers):
    """P, as bf16 in registers, of Q K^T in flight."""
    registers.slow[0] = tiles.slow[here.stage]
    T.copy(tiles.score_gate[here.stage, :], registers.row_gate)
    TC.wait_wgmma(0)
    TC.warpgroup_fence_operand(registers.scores, num_regs=ACCUMULATOR_REGISTERS)
    if registers.slow[0] == 0:
        # P = scale exp(G - r) tril(Q K^T)
        for i, j in T.Parallel(CHUNK, CHUNK):
            registers.scores[i, j] *= registers.row_gate[i]
        lower_triangle(registers)
    else:
        gate_slow_scores(config, here, scale, tiles, registers)
    T.copy(registers.scores, registers.scores_operand)


@T.macro
def publish_scores(config, place, here, tiles, barriers, registers):
    """P to this CTA and the other one of the cluster, once neither uses the last of this owner."""
    index, slot = here.chunk + 1, here.chunk % SCORE_SLOTS
    T.barrier_wait(barriers.scores_free[0], (index // PAIR + 1) % 2)
    T.copy(registers.scores_operand, tiles.scores[slot, :, :])
    T.fence_proxy_async()
    T.sync_threads(SCORES_SYNC, WARP_GROUP)
    T.copy_cluster(
        tiles.scores[slot, :, :],
        tiles.scores[slot, :, :],
        dst_block=1 - place.dv // TILE,
        remote_barrier=barriers.published[index % config.slots],
    )
    if T.shuffle_elect(WARP_GROUP):
        T.barrier_arrive(barriers.published[index % config.slots])


@T.macro
def scores_role(config, place, scale, tiles, barriers, registers):
    """P of every other chunk for both CTAs, up to SCORE_SLOTS ahead of the output groups."""
    if T.shuffle_elect(WARP_GROUP):
        T.barrier_arrive(barriers.published[0])
    for chunk in rolled(place.chunks):
        here = step(config, chunk)
        T.barrier_wait(barriers.inputs_ready[here.stage], here.filled)
        if owns(place, chunk):
            multiply_queries_keys(here, tiles, registers)
            gate_scores(config, here, scale, tiles, registers)
        arrive_warp(barriers.inputs_free, here.stage)
        if owns(place, chunk):
            publish_scores(config, place, here, tiles, barriers, registers)


# --- output group
@T.macro
def fetch_state(config, index, tiles, registers):
    slot = index % config.slots
    for half in DK_HALVES:
        T.copy(tiles.state[slot * len(DK_HALVES) + half, :, :], registers.old_state[half])


@T.macro
def fetch_values(config, index, tiles, registers):
    T.copy(tiles.values[index % config.slots, :, :], registers.values)


@T.macro
def wait_published(config, index, barriers):
    T.barrier_wait(barriers.published[index % config.slots], index // config.slots % 2)


@T.macro
def release(config, index, barriers):
    arrive_warp(barriers.chunk_ready, (index + config.slots) % config.stages)


@T.macro
def multiply_queries(here, tiles, registers):
    """O^T = S^T Q^T, left in flight."""
    for half in DK_HALVES:
        TC.wgmma_gemm(
            registers.old_state[half],
            tiles.q[here.stage, :, half * TILE : (half + 1) * TILE],
            registers.next_output,
            transpose_B=True,
            policy=FULL_ROW,
            clear_accum=half == 0,
        )


@T.macro
def add_scores_values(here, tiles, registers):
    """O^T += X^T P^T, left in flight."""
    TC.wgmma_gemm(
        registers.values,
        tiles.scores[here.chunk % SCORE_SLOTS, :, :],
        registers.output,
        transpose_B=True,
        policy=FULL_ROW,
    )


@T.macro
def stage_output(config, here, tiles, barriers, registers):
    """The finished O^T as bf16 [tokens, columns] in shared memory."""
    for i, j in T.Parallel(TILE, CHUNK):
        registers.output_operand[j, i] = T.cast(registers.output[i, j], config.dtype)
    T.barrier_wait(barriers.output_stored[0], (here.chunk + 1) % 2)
    T.copy(registers.output_operand, tiles.output)


@T.macro
def hand_over_output(barriers):
    T.fence_proxy_async()
    arrive_warp(barriers.output_ready, 0)


@T.macro
def free_scores(index, barriers):
    """Tell their owner that the scores that came with a publication have been used.

    With the first came none, but until it is over the second's would be taken for a part of it.
    """
    T.sync_warp()
    if T.shuffle_elect(WARP):
        T.mbarrier_arrive(barriers.scores_free[0], (index + 1) % PAIR)


@T.macro
def begin_output(here, tiles, registers):
    """O^T of the chunk as far as the state goes, of the finished S^T Q^T."""
    TC.wait_wgmma(0)
    TC.warpgroup_fence_operand(registers.next_output, num_regs=ACCUMULATOR_REGISTERS)
    # O^T = scale exp(G) O^T
    for i, j in T.Parallel(TILE, CHUNK):
        registers.output[i, j] = registers.next_output[i, j] * tiles.output_gate[here.stage, j]


@T.macro
def output_role(config, place, tiles, barriers, registers):
    """The output; a publication ends a chunk and begins the next."""
    last = place.chunks - 1
    for index in tuple(range(config.slots)):
        arrive_warp(barriers.chunk_ready, index)
    wait_published(config, 0, barriers)
    free_scores(0, barriers)
    fetch_state(config, 0, tiles, registers)
    release(config, 0, barriers)
    multiply_queries(step(config, 0), tiles, registers)
    begin_output(step(config, 0), tiles, registers)
    arrive_warp(barriers.inputs_free, 0)

    for chunk in T.serial(last):
        here = step(config, chunk)
        coming = following(config, here)
        wait_published(config, coming.chunk, barriers)
        fetch_values(config, coming.chunk, tiles, registers)
        fetch_state(config, coming.chunk, tiles, registers)
        release(config, coming.chunk, barriers)
        add_scores_values(here, tiles, registers)
        multiply_queries(coming, tiles, registers)
        # The products of the queries are the two newest groups.
        TC.wait_wgmma(len(DK_HALVES))
        TC.warpgroup_fence_operand(registers.output, num_regs=ACCUMULATOR_REGISTERS)
        free_scores(coming.chunk, barriers)
        stage_output(config, here, tiles, barriers, registers)
        hand_over_output(barriers)
        begin_output(coming, tiles, registers)
        arrive_warp(barriers.inputs_free, coming.stage)

    wait_published(config, place.chunks, barriers)
    fetch_values(config, place.chunks, tiles, registers)
    add_scores_values(step(config, last), tiles, registers)
    TC.wait_wgmma(0)
    TC.warpgroup_fence_operand(registers.output, num_regs=ACCUMULATOR_REGISTERS)
    stage_output(config, step(config, last), tiles, barriers, registers)
    hand_over_output(barriers)


# --- service group
@T.macro
def stage_inputs(config, place, here, inputs, tiles, barriers):
    T.barrier_wait(barriers.inputs_free[here.stage], here.freed)
    stage_keys(place, here, inputs, tiles, barriers)
    stage_queries(place, here, inputs, tiles, barriers)
    stage_inverse(place, here, inputs, tiles, barriers)
    for stage in tuple(range(config.stages)):
        if here.stage == stage:
            T.tma_copy(
                inputs.v[place.batch, chunk_tokens(here), place.head, place.dv : place.dv + TILE],
                tiles.v[stage],
                barrier=barriers.inputs_landed[here.stage],
            )


@T.macro
def writer_warp(config, place, thread, inputs, hooks, tiles, barriers):
    for chunk in rolled(place.chunks):
        T.barrier_wait(barriers.output_ready[0], chunk % 2)
        hooks.store_output(config, place, chunk, thread, inputs, tiles)
        T.barrier_arrive(barriers.output_stored[0])


@T.macro
def write_factors(config, stage, token, scale, tiles, gates):
    tiles.factors[stage, token // 2, token % 2] = gates.beta[0]
    tiles.factors[stage, token // 2, 2 + token % 2] = of_key(
        config, gates, gates.beta[0] * gates.grown[0]
    )
    tiles.output_gate[stage, token] = of_query(config, gates, scale * gates.grown[0])
    tiles.x_factor[stage, token] = of_key(config, gates, gates.ratio[0])
    if gates.last[0] < config.slow_limit:
        write_slow_score_gates(config, stage, token, tiles, gates)
    else:
        tiles.score_gate[stage, token] = of_query(
            config, gates, scale * T.exp2(gates.total[0] - gates.reference[0])
        )


@T.macro
def announce_inputs(stage, barriers):
    arrive_warp(barriers.inputs_ready, stage)
    arrive_warp(barriers.chunk_ready, stage)


@T.macro
def close_inputs(config, place, barriers):
    """The last publication has no chunk of its own to begin with."""
    after = step(config, place.chunks)
    T.barrier_wait(barriers.inputs_free[after.stage], after.freed)
    arrive_warp(barriers.chunk_ready, after.stage)


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
    if thread < WARP_GROUP:
        set_registers(config, "state")
        state_role(config, place, inputs, hooks, tiles, barriers, memory.chain)
    elif thread < 2 * WARP_GROUP:
        set_registers(config, "output")
        output_role(config, place, tiles, barriers, memory.beside)
    elif thread < config.service_thread:
        set_registers(config, "scores")
        scores_role(config, place, scale, tiles, barriers, memory.beside)
    else:
        set_registers(config, "service")
        lane = thread - config.service_thread
        service_role(config, place, lane, scale, inputs, hooks, SERVICE, memory)
    TC.cluster_sync()  # the other CTA may still copy from here, or arrive


def cta_memory(config) -> SimpleNamespace:
    """Shared memory, barriers and registers of a CTA."""
    stages = config.stages
    operand, fp32 = config.dtype, "float32"
    tiles = SimpleNamespace(
        q=T.alloc_shared((stages, CHUNK, HEAD_DIM), operand),
        k=T.alloc_shared((stages, CHUNK, HEAD_DIM), operand),
        v=[T.alloc_shared((CHUNK, TILE), operand) for _ in range(stages)],
        a=T.alloc_shared((stages, CHUNK, CHUNK), operand),
        state=T.alloc_shared((config.slots * len(DK_HALVES), TILE, TILE), operand),
        values=T.alloc_shared((config.slots, TILE, CHUNK), operand),
        scores=T.alloc_shared((SCORE_SLOTS, CHUNK, CHUNK), operand),
        output=T.alloc_shared((CHUNK, TILE), operand),
        **{
            name: T.alloc_shared((stages, CHUNK), fp32, scope="shared")
            for name in (
                "x_factor",  # exp(r - G), in a slow chunk exp(g_last - g)
                "score_gate",  # scale exp(G - r), in a slow chunk log2 of gamma
                "output_gate",  # scale exp(G)
                *("score_column",) * config.l2norm,  # in a slow chunk log2 of gamma / norm of k
            )
        },
        factors=T.alloc_shared((stages, CHUNK // 2, 4), fp32, scope="shared"),
        **chunk_scalars(config),
    )
    barriers = SimpleNamespace(
        inputs_landed=T.alloc_barrier([WARP] * stages),  # by the producer warp and its TMA loads
        inputs_ready=T.alloc_barrier(
            [GATE_WARPS] * stages
        ),  # by the gate warps: landed, and the factors written
        chunk_ready=T.alloc_barrier(
            [GATE_WARPS + WARPS_PER_GROUP] * stages
        ),  # the same, and by the output group that a publication may take its place
        inputs_free=T.alloc_barrier(
            [3 * WARPS_PER_GROUP] * stages
        ),  # by state, output and scores groups
        published=T.alloc_barrier(
            [WARPS_PER_GROUP + 1] * config.slots
        ),  # by the state group, and with P
        scores_free=T.alloc_cluster_barrier([PAIR * WARPS_PER_GROUP]),  # by both output groups
        output_ready=T.alloc_barrier([WARPS_PER_GROUP]),  # by the output group
        output_stored=T.alloc_barrier([WARP]),  # by the writer warp
    )
    chain = SimpleNamespace(
        state=[T.alloc_fragment((TILE, TILE), fp32) for _ in DK_HALVES],
        state_operand=[T.alloc_fragment((TILE, TILE), operand) for _ in DK_HALVES],
        u=T.alloc_fragment((TILE, CHUNK), fp32),
        v=T.alloc_fragment((CHUNK, TILE), operand),
        w=T.alloc_fragment((TILE, CHUNK), operand),
        x=T.alloc_fragment((TILE, CHUNK), fp32),
        x_operand=T.alloc_fragment((TILE, CHUNK), operand),
        beta_v=T.alloc_fragment((TILE, CHUNK), fp32),
        factors=T.alloc_fragment((CHUNK // 2, 4), fp32),
        x_factor=T.alloc_fragment((CHUNK,), fp32),
        keep=T.alloc_local((1,), fp32),
        owed=T.alloc_local((1,), fp32),
        slow=T.alloc_local((1,), "int32"),
    )
    beside = SimpleNamespace(
        scores=T.alloc_fragment((CHUNK, CHUNK), fp32),
        slow=T.alloc_local((1,), "int32"),
        row_gate=T.alloc_fragment((CHUNK,), fp32),
        scores_operand=T.alloc_fragment((CHUNK, CHUNK), operand),
        old_state=[T.alloc_fragment((TILE, TILE), operand) for _ in DK_HALVES],
        values=T.alloc_fragment((TILE, CHUNK), operand),
        output=T.alloc_fragment((TILE, CHUNK), fp32),
        next_output=T.alloc_fragment((TILE, CHUNK), fp32),
        output_operand=T.alloc_fragment((CHUNK, TILE), operand),
    )
    T.annotate_layout(
        {
            chain.v: transposed_accumulator(TILE),
            beside.output_operand: transposed_accumulator(TILE),
            chain.factors: factor_pairs(),
            chain.x_factor: accumulator_row(),
            tiles.state: register_dump(config.slots * len(DK_HALVES), TILE),
            tiles.values: register_dump(config.slots, TILE),
            **{tile: make_full_bank_swizzled_layout(tile) for tile in (*tiles.v, tiles.output)},
        }
    )
    return SimpleNamespace(
        tiles=tiles, barriers=barriers, chain=chain, beside=beside, gates=resident_gates(config)
    )


@T.macro
def clear_values(config, here, row, piece, tiles, clear_piece):
    """Zero a piece of a row of V."""
    for stage in tuple(range(config.stages)):
        if here.stage == stage:
            clear_piece(tiles.v[stage], (row,), piece)
