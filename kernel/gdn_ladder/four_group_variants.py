"""Variants of the four-group kernel: the ideas tried on v7, and what the scan makes of it.

Four warp groups share a CTA that owns the state slice S [128, block_dv] of one batch and V head:

    state     S as bf16 for the others;  S = gamma_last S + K^T (exp(g_last - g) V_new)
    V         U' = K S;  W' = beta (V - gamma U');  V_new = A W'
    O         scores = scale tril(exp(g_i - g_j)) Q K^T;  O = scale gamma (Q S) + scores V_new
    producer  one warp each for Q and K, for V and beta, for A and the gate, and to write O back

The default config is v7's kernel: two stages of inputs, gates loaded by column, O written by a warp
of its own. Each other version changes one field.

A CTA walks one segment of a sequence; all versions but the scan have one segment. For the scan the
state after a segment is M S + N, S being the state before it, and task "summary" makes both: N by
walking the segment from a zero state, M by walking it from the identity with V = 0. It has no O
group and loads no Q.

TMA fills rows past T with zeros and drops them on
the way out; gates past T repeat the last token's, so gamma[63] is always gamma_last.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Literal

import tilelang
import tilelang.language as T
from tilelang.layout import make_swizzled_layout
from tvm import tirx

from gdn_prefill.kernels.naming import named

CHUNK = 64
HEAD_DIM = 128
WARP = 32
WARP_GROUP = 4 * WARP
LOADERS = 3 * WARP  # Q/K, V/beta and A/gate warp
LOG2_E = 1.4426950408889634
SCALE = HEAD_DIM**-0.5
BF16 = "bfloat16"
FP32 = "float32"

V_GROUP_SYNC, O_GROUP_SYNC = 1, 2  # named barriers; 0 is the whole CTA's

MOST_GATE_HEADS = 32  # more heads of g and beta do not fit beside the tiles
TMA_GRANULE_HEADS = 4  # 16 bytes of FP32, the unit of a TMA box and of a tensor's strides

# The roles order their shared memory themselves.
PASS_CONFIGS = {
    tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True,
    tilelang.PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True,
}


@dataclass(frozen=True)
class FourGroupConfig:
    """What a four-group kernel is compiled for; batch and token count stay dynamic.

    heads_q, heads_v, block_dv, use_initial_state: as in EarlyConfig.
    stages: buffers for Q, V, A, g and beta.
    k_stages: buffers for K; where it differs from stages, K gets barriers of its own (v15).
    guards: False drops the two barriers that keep a chunk from overwriting the bf16 state and V_new
        of the one before (v9); a race.
    output: "write_back" by a warp of its own through shared memory, or "direct" element-wise stores
        by the O group (v9.5).
    gates: "column" loads one head's g and beta, "box" those of up to 32 heads by TMA (v10), "rows"
        the same heads by plain loads (v11).
    a_holds_gate: False expects FlashQLA's A, without gate and beta, and multiplies them in (v4).
    task: "forward", or "summary" for the scan: M and N of every segment, no output.
    registers: registers a thread of (state, V, O, producer); None leaves the compiler's choice.
    ctas_per_multiprocessor: what the compiler's register limit must leave room for.
    """

    heads_q: int
    heads_v: int
    block_dv: int = HEAD_DIM
    use_initial_state: bool = False
    stages: int = 2
    k_stages: int = 2
    guards: bool = True
    output: Literal["write_back", "direct"] = "write_back"
    gates: Literal["column", "box", "rows"] = "column"
    a_holds_gate: bool = True
    task: Literal["forward", "summary"] = "forward"
    registers: tuple[int, int, int, int] | None = (168, 160, 144, 40)
    ctas_per_multiprocessor: int = 1

    def __post_init__(self) -> None:
        if self.heads_q < 1 or self.heads_v < 1 or self.heads_v % self.heads_q:
            raise ValueError(
                f"heads_v = {self.heads_v} must be a positive multiple of heads_q = {self.heads_q}"
            )
        if self.block_dv not in (32, 64, 128):
            raise ValueError(f"block_dv = {self.block_dv}, allowed are 32, 64 and 128")
        if self.stages < 1 or self.k_stages < self.stages:
            raise ValueError(
                f"stages = {self.stages} and k_stages = {self.k_stages}: "
                "allowed are stages >= 1 and k_stages >= stages"
            )
        if self.task not in ("forward", "summary"):
            raise ValueError(f"task = {self.task!r}, allowed are 'forward' and 'summary'")
        if self.output not in ("write_back", "direct"):
            raise ValueError(f"output = {self.output!r}, allowed are 'write_back' and 'direct'")
        if self.gates not in ("column", "box", "rows"):
            raise ValueError(f"gates = {self.gates!r}, allowed are 'column', 'box' and 'rows'")
        if self.gates != "column" and self.heads_v % self.gate_heads:
            raise ValueError(
                f"heads_v = {self.heads_v} with gates = {self.gates!r}: allowed are multiples of "
                f"{TMA_GRANULE_HEADS} up to {MOST_GATE_HEADS}, and multiples of {MOST_GATE_HEADS}"
            )

    @property
    def gate_heads(self) -> int:
        """Heads whose g and beta are loaded together where gates is not "column"."""
        if self.heads_v <= MOST_GATE_HEADS and self.heads_v % TMA_GRANULE_HEADS == 0:
            return self.heads_v
        return MOST_GATE_HEADS

    @property
    def k_apart(self) -> bool:
        return self.k_stages != self.stages

    @property
    def has_output(self) -> bool:
        return self.task == "forward"

    @property
    def consumers(self) -> int:
        """Threads of the state and V groups, and of the O group where there is one."""
        return (3 if self.has_output else 2) * WARP_GROUP

    @property
    def threads(self) -> int:
        return self.consumers + WARP_GROUP


def chunk_rows(place, chunk) -> slice:
    """The tokens of a chunk of the CTA's segment."""
    first = place.first + chunk * CHUNK
    return slice(first, first + CHUNK)


@T.macro
def wait_inputs(config, barriers, chunk):
    T.barrier_wait(barriers.inputs_ready[chunk % config.stages], chunk // config.stages % 2)
    if config.k_apart:
        T.barrier_wait(barriers.k_ready[chunk % config.k_stages], chunk // config.k_stages % 2)


@T.macro
def release_inputs(config, barriers, chunk):
    T.barrier_arrive(barriers.inputs_free[chunk % config.stages])
    if config.k_apart:
        T.barrier_arrive(barriers.k_free[chunk % config.k_stages])


@T.macro
def state_role(config, place, inputs, tiles, barriers):
    """Publishes the state before each chunk, then advances it."""
    dv = config.block_dv
    columns = slice(place.dv, place.dv + dv)
    state_fragment = T.alloc_fragment((HEAD_DIM, dv), FP32)
    if not config.has_output:
        for i, j in T.Parallel(HEAD_DIM, dv):
            state_fragment[i, j] = T.if_then_else(i == place.dv + j, place.identity, 0)
    elif config.use_initial_state:
        T.copy(inputs.initial_state[place.initial, place.head, 0:HEAD_DIM, columns], state_fragment)
    else:
        T.clear(state_fragment)
    for chunk in T.serial(place.chunks):
        stage = chunk % config.stages
        if config.guards:
            T.barrier_wait(barriers.state_consumed, (chunk + 1) % 2)
        T.copy(state_fragment, tiles.state)
        T.fence_proxy_async()
        T.barrier_arrive(barriers.state_ready)

        # S = gamma_last S + K^T (exp(g_last - g) V_new)
        wait_inputs(config, barriers, chunk)
        for i, j in T.Parallel(HEAD_DIM, dv):
            state_fragment[i, j] *= tiles.gamma[stage, CHUNK - 1]
        T.barrier_wait(barriers.decayed_ready, chunk % 2)
        T.gemm(
            tiles.k[chunk % config.k_stages, :, :], tiles.decayed, state_fragment, transpose_A=True
        )
        release_inputs(config, barriers, chunk)
    if place.keeps_state:
        T.copy(state_fragment, inputs.final_state[place.final, place.head, 0:HEAD_DIM, columns])


@T.macro
def v_role(config, place, tiles, barriers):
    """From V and the state before the chunk to V_new and its decayed copy."""
    dv = config.block_dv
    u_fragment = T.alloc_fragment((CHUNK, dv), FP32)
    v_new_fragment = T.alloc_fragment((CHUNK, dv), FP32)
    for chunk in T.serial(place.chunks):
        stage = chunk % config.stages
        wait_inputs(config, barriers, chunk)
        if not config.a_holds_gate:
            # A = exp(g_i - g_j) A beta_j, from an A without gate and beta
            a_fragment = T.alloc_fragment((CHUNK, CHUNK), FP32)
            for i, j in T.Parallel(CHUNK, CHUNK):
                a_fragment[i, j] = tiles.a[stage, i, j]
            for i, j in T.Parallel(CHUNK, CHUNK):
                a_fragment[i, j] *= T.if_then_else(
                    i >= j,
                    tiles.beta[stage, j] * T.exp2(tiles.gate[stage, i] - tiles.gate[stage, j]),
                    0,
                )
            for i, j in T.Parallel(CHUNK, CHUNK):
                tiles.a[stage, i, j] = a_fragment[i, j]
        # U' = K S
        T.barrier_wait(barriers.state_ready, chunk % 2)
        T.gemm(tiles.k[chunk % config.k_stages, :, :], tiles.state, u_fragment, clear_accum=True)
        if config.guards:
            T.barrier_arrive(barriers.state_consumed)

        # W' = beta (V - gamma U'), in place of V; beta is in A already where A came without it
        for i, j in T.Parallel(CHUNK, dv):
            u_fragment[i, j] = tiles.v[stage, i, j] - tiles.gamma[stage, i] * u_fragment[i, j]
        if config.a_holds_gate:
            for i, j in T.Parallel(CHUNK, dv):
                u_fragment[i, j] *= tiles.beta[stage, i]
        for i, j in T.Parallel(CHUNK, dv):
            tiles.v[stage, i, j] = u_fragment[i, j]
        T.fence_proxy_async()
        T.sync_threads(V_GROUP_SYNC, WARP_GROUP)

        # V_new = A W'
        T.gemm(tiles.a[stage, :, :], tiles.v[stage, :, :], v_new_fragment, clear_accum=True)
        # The state group is done with the last chunk's decayed V_new: it has published S since.
        for i, j in T.Parallel(CHUNK, dv):
            tiles.decayed[i, j] = v_new_fragment[i, j] * tiles.decay[stage, i]
        T.fence_proxy_async()
        T.barrier_arrive(barriers.decayed_ready)

        if config.has_output:
            if config.guards:
                T.barrier_wait(barriers.v_new_consumed, (chunk + 1) % 2)
            T.copy(v_new_fragment, tiles.v_new)
            T.fence_proxy_async()
            T.barrier_arrive(barriers.v_new_ready)
        release_inputs(config, barriers, chunk)


@T.macro
def o_role(config, place, inputs, tiles, barriers):
    """The gated causal scores, then the output from the state before the chunk and V_new."""
    dv = config.block_dv
    scores_fragment = T.alloc_fragment((CHUNK, CHUNK), FP32)
    output_fragment = T.alloc_fragment((CHUNK, dv), FP32)
    for chunk in T.serial(place.chunks):
        stage = chunk % config.stages
        wait_inputs(config, barriers, chunk)

        # scores = scale tril(exp(g_i - g_j)) Q K^T
        T.gemm(
            tiles.q[stage, :, :],
            tiles.k[chunk % config.k_stages, :, :],
            scores_fragment,
            transpose_B=True,
            clear_accum=True,
        )
        for i, j in T.Parallel(CHUNK, CHUNK):
            scores_fragment[i, j] = T.if_then_else(
                i >= j,
                scores_fragment[i, j]
                * (SCALE * T.exp2(tiles.gate[stage, i] - tiles.gate[stage, j])),
                0,
            )
        T.copy(scores_fragment, tiles.scores)
        T.fence_proxy_async()
        T.sync_threads(O_GROUP_SYNC, WARP_GROUP)

        # O = scale gamma (Q S) + scores V_new
        T.barrier_wait(barriers.state_ready, chunk % 2)
        T.gemm(tiles.q[stage, :, :], tiles.state, output_fragment, clear_accum=True)
        if config.guards:
            T.barrier_arrive(barriers.state_consumed)
        for i, j in T.Parallel(CHUNK, dv):
            output_fragment[i, j] *= SCALE * tiles.gamma[stage, i]
        release_inputs(config, barriers, chunk)
        T.barrier_wait(barriers.v_new_ready, chunk % 2)
        T.gemm(tiles.scores, tiles.v_new, output_fragment)
        if config.guards:
            T.barrier_arrive(barriers.v_new_consumed)

        if config.output == "write_back":
            T.barrier_wait(barriers.output_stored, (chunk + 1) % 2)
            T.copy(output_fragment, tiles.output)
            T.fence_proxy_async()
            T.barrier_arrive(barriers.output_ready)
        else:
            first = place.first + chunk * CHUNK
            for i, j in T.Parallel(CHUNK, dv):
                if first + i < place.tokens:
                    inputs.output[place.batch, first + i, place.head, place.dv + j] = (
                        output_fragment[i, j]
                    )


@T.macro
def load_k(config, place, inputs, tiles, barriers, chunk):
    stage = chunk % config.k_stages
    T.barrier_wait(barriers.k_free[stage], (chunk // config.k_stages + 1) % 2)
    T.tma_copy(
        inputs.k[place.batch, chunk_rows(place, chunk), place.head_q, 0:HEAD_DIM],
        tiles.k[stage, :, :],
        barrier=barriers.k_ready[stage],
    )
    T.barrier_arrive(barriers.k_ready[stage])


@T.macro
def load_qk_warp(config, place, inputs, tiles, barriers):
    """Q and K; where K has more stages it runs that much further ahead."""
    ahead = config.k_stages - config.stages
    if config.k_apart:
        for chunk in T.serial(T.min(ahead, place.chunks)):
            load_k(config, place, inputs, tiles, barriers, chunk)
    for chunk in T.serial(place.chunks):
        stage = chunk % config.stages
        rows = chunk_rows(place, chunk)
        if config.k_apart and chunk + ahead < place.chunks:
            load_k(config, place, inputs, tiles, barriers, chunk + ahead)
        T.barrier_wait(barriers.inputs_free[stage], (chunk // config.stages + 1) % 2)
        if not config.k_apart:
            T.tma_copy(
                inputs.k[place.batch, rows, place.head_q, 0:HEAD_DIM],
                tiles.k[stage, :, :],
                barrier=barriers.inputs_ready[stage],
            )
        if config.has_output:
            T.tma_copy(
                inputs.q[place.batch, rows, place.head_q, 0:HEAD_DIM],
                tiles.q[stage, :, :],
                barrier=barriers.inputs_ready[stage],
            )
        T.barrier_arrive(barriers.inputs_ready[stage])


@T.macro
def load_gate_heads(config, place, source, chunk, heads, ready):
    """Rows of a chunk of g or beta, many heads wide, into `heads` [64, gate_heads]."""
    rows = chunk_rows(place, chunk)
    head = place.head // config.gate_heads * config.gate_heads
    if config.gates == "box":
        T.tma_copy(
            source[place.batch, rows, head : head + config.gate_heads],
            heads,
            barrier=ready,
        )
        T.barrier_arrive(ready)
    else:
        for i, j in T.Parallel(CHUNK, config.gate_heads):
            heads[i, j] = source[place.batch, T.min(rows.start + i, place.tokens - 1), head + j]


@T.macro
def read_gate(config, place, source, chunk, heads, ready, column):
    """This head's column of a chunk of g or beta, repeating the last token past T."""
    first = place.first + chunk * CHUNK
    last = T.min(CHUNK, place.tokens - first) - 1
    if config.gates == "column":
        for i in T.Parallel(CHUNK):
            column[i] = source[place.batch, first + T.min(i, last), place.head]
    else:
        if config.gates == "box":
            T.barrier_wait(ready, chunk % 2)
        else:
            T.sync_warp()
        for i in T.Parallel(CHUNK):
            column[i] = heads[T.min(i, last), place.head % config.gate_heads]
        T.sync_warp()
        if chunk + 1 < place.chunks:
            load_gate_heads(config, place, source, chunk + 1, heads, ready)


@T.macro
def load_v_beta_warp(config, place, inputs, tiles, barriers):
    dv = config.block_dv
    beta_fragment = T.alloc_fragment((CHUNK,), FP32)
    if config.gates != "column":
        load_gate_heads(config, place, inputs.beta, 0, tiles.beta_heads, barriers.beta_ready)
    for chunk in T.serial(place.chunks):
        stage = chunk % config.stages
        rows = chunk_rows(place, chunk)
        read_gate(
            config,
            place,
            inputs.beta,
            chunk,
            tiles.beta_heads,
            barriers.beta_ready,
            beta_fragment,
        )
        T.barrier_wait(barriers.inputs_free[stage], (chunk // config.stages + 1) % 2)
        # M is made with V = 0: rows past T.
        T.tma_copy(
            inputs.v[
                place.batch,
                rows.start + place.v_shift : rows.stop + place.v_shift,
                place.head,
                place.dv : place.dv + dv,
            ],
            tiles.v[stage, :, :],
            barrier=barriers.inputs_ready[stage],
        )
        for i in T.Parallel(CHUNK):
            tiles.beta[stage, i] = beta_fragment[i]
        T.barrier_arrive(barriers.inputs_ready[stage])


@T.macro
def load_a_gate_warp(config, place, inputs, tiles, barriers):
    """A, and the gate with the factors made of it."""
    gate_fragment = T.alloc_fragment((CHUNK,), FP32)
    if config.gates != "column":
        load_gate_heads(config, place, inputs.g, 0, tiles.g_heads, barriers.g_ready)
    for chunk in T.serial(place.chunks):
        stage = chunk % config.stages
        rows = chunk_rows(place, chunk)
        read_gate(config, place, inputs.g, chunk, tiles.g_heads, barriers.g_ready, gate_fragment)
        T.barrier_wait(barriers.inputs_free[stage], (chunk // config.stages + 1) % 2)
        T.tma_copy(
            inputs.a[place.batch, rows, place.head, 0:CHUNK],
            tiles.a[stage, :, :],
            barrier=barriers.inputs_ready[stage],
        )
        for i in T.Parallel(CHUNK):
            tiles.gate[stage, i] = gate_fragment[i] * LOG2_E
        T.sync_warp()
        for i in T.Parallel(CHUNK):
            tiles.gamma[stage, i] = T.exp2(tiles.gate[stage, i])
            tiles.decay[stage, i] = T.exp2(tiles.gate[stage, CHUNK - 1] - tiles.gate[stage, i])
        T.barrier_arrive(barriers.inputs_ready[stage])


@T.macro
def write_back_warp(config, place, inputs, tiles, barriers):
    """O of a chunk, while the consumers work on the next."""
    columns = slice(place.dv, place.dv + config.block_dv)
    for chunk in T.serial(place.chunks):
        rows = chunk_rows(place, chunk)
        T.barrier_wait(barriers.output_ready, chunk % 2)
        T.copy(tiles.output, inputs.output[place.batch, rows, place.head, columns])
        T.barrier_arrive(barriers.output_stored)


@T.macro
def set_registers(config, role):
    """Takes registers from the producer's group for the consumers', or leaves them all alike."""
    if config.registers is not None:
        T.set_max_nreg(config.registers[role], 1 if role < 3 else 0)


def allocate_tiles(config: FourGroupConfig) -> SimpleNamespace:
    """The CTA's shared memory; fields that the config has no use for are None."""
    dv, stages = config.block_dv, config.stages
    many_gates = config.gates != "column"

    def bf16(*shape):
        return T.alloc_shared(shape, BF16)

    def per_row():
        return T.alloc_shared((stages, CHUNK), FP32, scope="shared")

    def gate_heads():
        return T.alloc_shared((CHUNK, config.gate_heads), FP32) if many_gates else None

    return named(
        "_shared",
        q=bf16(stages, CHUNK, HEAD_DIM) if config.has_output else None,
        k=bf16(config.k_stages, CHUNK, HEAD_DIM),
        v=bf16(stages, CHUNK, dv),
        a=bf16(stages, CHUNK, CHUNK),
        beta=per_row(),
        gate=per_row(),  # log2 of gamma
        gamma=per_row(),
        decay=per_row(),  # exp(g_last - g)
        state=bf16(HEAD_DIM, dv),
        v_new=bf16(CHUNK, dv) if config.has_output else None,
        decayed=bf16(CHUNK, dv),
        scores=bf16(CHUNK, CHUNK) if config.has_output else None,
        output=bf16(CHUNK, dv) if config.has_output and config.output == "write_back" else None,
        g_heads=gate_heads(),
        beta_heads=gate_heads(),
    )


def allocate_barriers(config: FourGroupConfig) -> SimpleNamespace:
    """The CTA's mbarriers, counted in arriving threads; None where the config has no use for it."""

    def barrier(threads, used=True, stages=1):
        return T.alloc_barrier([threads] * stages) if used else None

    write_back = config.has_output and config.output == "write_back"
    readers = config.consumers - WARP_GROUP  # of the bf16 state: all but the state group
    box = config.gates == "box"
    return named(
        inputs_ready=barrier(LOADERS, stages=config.stages),
        inputs_free=barrier(config.consumers, stages=config.stages),
        k_ready=barrier(WARP, config.k_apart, config.k_stages),
        k_free=barrier(config.consumers, config.k_apart, config.k_stages),
        g_ready=barrier(WARP, box),
        beta_ready=barrier(WARP, box),
        state_ready=barrier(WARP_GROUP),  # by the state group
        state_consumed=barrier(readers, config.guards),  # by the V and O groups
        decayed_ready=barrier(WARP_GROUP),  # by the V group
        v_new_ready=barrier(WARP_GROUP, config.has_output),  # by the V group
        v_new_consumed=barrier(WARP_GROUP, config.has_output and config.guards),  # by the O group
        output_ready=barrier(WARP_GROUP, write_back),  # by the O group
        output_stored=barrier(WARP, write_back),  # by the write-back warp
    )


def locate(config, block, segment, bb, batch, tokens, segments, segment_chunks) -> SimpleNamespace:
    """Which slice of what the CTA owns.

    Summaries are stored kind first, N before M; a block of the grid's first dimension names kind,
    head and slice, in that order.
    """
    slices = HEAD_DIM // config.block_dv
    head = block // slices % config.heads_v
    place = SimpleNamespace(
        batch=bb,
        head=head,
        head_q=head // (config.heads_v // config.heads_q),
        dv=block % slices * config.block_dv,
        tokens=tokens,
        first=segment * segment_chunks * CHUNK,
        chunks=T.min(segment_chunks, T.ceildiv(tokens, CHUNK) - segment * segment_chunks),
        initial=bb * segments + segment,
        final=bb,
        keeps_state=segment == segments - 1,
        v_shift=0,
    )
    if not config.has_output:
        kind = block // (slices * config.heads_v)
        place.identity = T.cast(kind, FP32)
        place.v_shift = kind * tokens
        place.final = (kind * batch + bb) * segments + segment
        place.keeps_state = True
    return place


def four_group_kernel(config: FourGroupConfig) -> tirx.PrimFunc:
    """Build the kernel for `config` as a TileLang PrimFunc.

    Its arguments: those of early.early_kernel, then segments (int32, segments of a sequence) and
    segment_chunks (int32, chunks of each but the last). initial_state holds [B * segments, Hv, 128,
    128], the state before each segment. A "summary" writes no output, and as final_state takes
    [2 * B * segments, Hv, 128, 128] for N and, in the second half, M.
    """
    batch, tokens = T.dynamic("batch"), T.dynamic("tokens")
    initial_states, final_states = T.dynamic("initial_states"), T.dynamic("final_states")
    heads_q, heads_v = config.heads_q, config.heads_v
    kinds = 1 if config.has_output else 2
    blocks = kinds * heads_v * (HEAD_DIM // config.block_dv)

    @T.prim_func
    def gdn_four_group(
        q: T.Tensor((batch, tokens, heads_q, HEAD_DIM), BF16),
        k: T.Tensor((batch, tokens, heads_q, HEAD_DIM), BF16),
        v: T.Tensor((batch, tokens, heads_v, HEAD_DIM), BF16),
        g_cumsum: T.Tensor((batch, tokens, heads_v), FP32),
        beta: T.Tensor((batch, tokens, heads_v), FP32),
        a: T.Tensor((batch, tokens, heads_v, CHUNK), BF16),
        initial_state: T.Tensor((initial_states, heads_v, HEAD_DIM, HEAD_DIM), FP32),
        output: T.Tensor((batch, tokens, heads_v, HEAD_DIM), BF16),
        final_state: T.Tensor((final_states, heads_v, HEAD_DIM, HEAD_DIM), FP32),
        segments: T.int32,
        segment_chunks: T.int32,
    ):
        with T.Kernel(blocks, segments, batch, threads=config.threads) as (block, segment, bb):
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
            place = locate(config, block, segment, bb, batch, tokens, segments, segment_chunks)
            tiles, barriers = allocate_tiles(config), allocate_barriers(config)
            if tiles.output is not None:
                T.annotate_layout({tiles.output: make_swizzled_layout(tiles.output)})

            thread = T.get_thread_binding()
            if thread < WARP_GROUP:
                set_registers(config, 0)
                state_role(config, place, inputs, tiles, barriers)
            elif thread < 2 * WARP_GROUP:
                set_registers(config, 1)
                v_role(config, place, tiles, barriers)
            elif config.has_output and thread < config.consumers:
                set_registers(config, 2)
                o_role(config, place, inputs, tiles, barriers)
            else:
                set_registers(config, 3)
                if thread < config.consumers + WARP:
                    load_qk_warp(config, place, inputs, tiles, barriers)
                elif thread < config.consumers + 2 * WARP:
                    load_v_beta_warp(config, place, inputs, tiles, barriers)
                elif thread < config.consumers + 3 * WARP:
                    load_a_gate_warp(config, place, inputs, tiles, barriers)
                elif tiles.output is not None:
                    write_back_warp(config, place, inputs, tiles, barriers)

    return gdn_four_group
