"""What the two prepared kernels share: the chain's factors are made ahead of it.

Both are register-resident: one CTA owns 64 columns of one head's state as S^T [64, dk], an FP32
accumulator, and walks the chunks of C = 64 tokens in order. With G the cumulative log decay since
the state was last multiplied through, and r a reference for it, both of a token's V head:

    A'   = exp(r - G) A beta                        prepare group
    A''  = -A' exp(G)                               prepare group
    P    = exp(-r) tril(Q K^T)                      scores group
    U'^T = S^T K^T                                  state group
    X^T  = V^T A'^T + U'^T A''^T                    state group
    S^T  = keep S^T + X^T K                         state group
    O^T  = scale exp(G) (S^T Q^T + X^T P^T)         state group; prepared_groups: output group

A', A'' and P do not depend on the state, so a chunk's are ready before the chain comes to it, and
no factor is left on the chain but keep, which is 1 in most chunks.

The decay of the state is lazy: while the decay since the last multiplication is above FLUSH_LIMIT,
keep = 1 and r = 0. In the chunk that passes it, keep is that decay and r its logarithm. A chunk
that decays by more than SLOW_LIMIT all by itself cannot be written in such factors. There

    A' = A beta,  P = scale tril(exp(g_i - g_j)) * (Q K^T),  O^T = scale exp(G) S^T Q^T + X^T P^T

and the state gets exp(g_last - g) X^T. No exponential of either form overflows.

Rows past T are filled with zeros by the loads and dropped by the store; the gate of such a row
repeats that of the last token while its beta is 0.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

import tilelang
import tilelang.cuda.language as TC
import tilelang.language as T
from tilelang.layout import Fragment
from tilelang.tileop.base import GemmWarpPolicy

from gdn_prefill.lowering import OWN_PROXY_FENCES

CHUNK = 64
HEAD_DIM = 128
TILE = 64  # rows of a warp group's WGMMA, state columns of a CTA
DK_HALVES = (slice(0, TILE), slice(TILE, HEAD_DIM))  # one converts while the other is multiplied
STAGES = 3  # chunks of input in flight

WARP = 32
WARP_GROUP = 4 * WARP
WARPS_PER_GROUP = WARP_GROUP // WARP
GATE_WARPS = 2  # one thread a token
PREPARE_SYNC = 1  # named barrier inside the prepare group; 0 is the whole block's

LOG2_E = 1.4426950408889634
FLUSH_LIMIT = -40.0  # log2 of the smallest decay kept outside the state registers
SLOW_LIMIT = -60.0  # log2 of the smallest decay of one chunk that its factors may hold

REGISTERS_PER_BLOCK = 65536
FULL_ROW = GemmWarpPolicy.FullRow
ACCUMULATOR_REGISTERS = TILE * TILE // WARP_GROUP
BF16, FP32 = "bfloat16", "float32"

# The roles order their shared memory themselves, and fence what they write for WGMMA or TMA.
PASS_CONFIGS = {
    tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True,
    tilelang.PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True,
    OWN_PROXY_FENCES: True,
}


@dataclass(frozen=True)
class PreparedConfig:
    """What one compiled kernel is specialised on; batch and length are run-time arguments.

    registers: of the kernel, per thread after setmaxnreg, by role in the order of its warp groups.
    unrolled: whether the chain's loop has one copy of its body a stage.
    """

    heads_q: int
    heads_v: int
    use_initial_state: bool = False

    block_dv: ClassVar[int] = TILE
    registers: ClassVar[dict[str, int]]
    unrolled: ClassVar[bool]

    def __post_init__(self) -> None:
        if self.heads_q < 1 or self.heads_v < 1 or self.heads_v % self.heads_q:
            raise ValueError(
                f"heads_v = {self.heads_v} is not a positive multiple of heads_q = {self.heads_q}"
            )

    @property
    def threads(self) -> int:
        """A warp group a role, of the state one a tile."""
        return (len(self.registers) - 1 + self.block_dv // TILE) * WARP_GROUP


@dataclass(frozen=True)
class Step:
    """One chunk: its number and its place in the ring of input stages, an int where unrolled."""

    chunk: object
    stage: object
    round: object

    @property
    def filled(self):
        """Parity of the phase that ends when the stage holds this chunk."""
        return self.round % 2

    @property
    def freed(self):
        """Parity of the phase that ends when the chunk before has left the stage."""
        return (self.round + 1) % 2


def step(chunk) -> Step:
    return Step(chunk, chunk % STAGES, chunk // STAGES)


def laps(config: PreparedConfig, chunks):
    """Trip count of a loop over chunks."""
    return T.serial(T.ceildiv(chunks, STAGES) if config.unrolled else chunks)


def steps(config: PreparedConfig, lap) -> tuple[Step, ...]:
    """The chunks of one trip; those past the last chunk are to be skipped."""
    if not config.unrolled:
        return (step(lap),)
    return tuple(Step(lap * STAGES + stage, stage, lap) for stage in range(STAGES))


def following(here: Step) -> Step:
    if not isinstance(here.stage, int):
        return step(here.chunk + 1)
    wraps = here.stage + 1 == STAGES
    return Step(here.chunk + 1, (here.stage + 1) % STAGES, here.round + wraps)


def accumulator_thread(i, j):
    """Thread of a warp group that holds (i, j) of a 64-row accumulator, or of a bf16 A operand."""
    return i % 64 // 16 * 32 + i % 8 * 4 + j % 8 // 2


def accumulator_register(i, j):
    return j // 8 * 4 + i % 16 // 8 * 2 + j % 2


def transposed_accumulator(columns: int = TILE) -> Fragment:
    """Fragment of [64, columns]: (t, d) lies where an accumulator [columns, 64] holds (d, t)."""

    def forward(t, d):
        return d // TILE * WARP_GROUP + accumulator_thread(d, t), accumulator_register(d, t)

    return Fragment((CHUNK, columns), forward_fn=forward)


@T.macro
def set_registers(config, role):
    """Registers a thread of a role: taken from the others if more than at launch."""
    count = config.registers[role]
    T.set_max_nreg(count, 1 if count > REGISTERS_PER_BLOCK // config.threads // 8 * 8 else 0)


@T.macro
def arrive_warp(barrier, index):
    """One arrival for the warp, after all its lanes have come this far."""
    T.sync_warp()
    if T.shuffle_elect(WARP):
        T.barrier_arrive(barrier[index])


def input_tiles(columns: int = TILE) -> dict:
    """Shared memory of the inputs, with so many columns of V, and of the gate's factors."""
    return {
        "q": T.alloc_shared((STAGES, CHUNK, HEAD_DIM), BF16),
        "k": T.alloc_shared((STAGES, CHUNK, HEAD_DIM), BF16),
        "v": T.alloc_shared((STAGES, CHUNK, columns), BF16),
        "a": T.alloc_shared((STAGES, CHUNK, CHUNK), BF16),  # A, then A' in its place
        **{
            name: T.alloc_shared((STAGES, CHUNK), FP32, scope="shared")
            for name in (
                "beta",
                "minus_gamma",  # -exp(G)
                "row_factor",  # exp(r - G), of a slow chunk 1
                "output_gate",  # scale exp(G), of a slow chunk 1
                "state_gate",  # scale exp(G), of a slow chunk
                "value_gate",  # exp(g_last - g), of a slow chunk
                "score_gate",  # log2 of gamma, of a slow chunk
            )
        },
        "slow": T.alloc_shared((STAGES,), "int32", scope="shared"),
        "keep": T.alloc_shared((STAGES,), FP32, scope="shared"),
        "growth": T.alloc_shared((STAGES,), FP32, scope="shared"),  # exp(-r)
        "pending": T.alloc_shared((STAGES,), FP32, scope="shared"),  # decay still to be applied
    }


def prepare_fragments() -> SimpleNamespace:
    names = ("inverse", "gated", "decayed")  # A, A', A''
    return SimpleNamespace(**{name: T.alloc_fragment((CHUNK, CHUNK), BF16) for name in names})


def score_fragments() -> dict:
    return {
        "scores": T.alloc_fragment((CHUNK, CHUNK), FP32),
        "scores_operand": T.alloc_fragment((CHUNK, CHUNK), BF16),
        "slow": T.alloc_local((1,), "int32"),
        "growth": T.alloc_local((1,), FP32),
    }


def gate_scalars() -> SimpleNamespace:
    """See gate_warps."""
    names = ("gate", "beta", "last", "pending", "total", "reference", "keep", "grown", "ratio")
    return SimpleNamespace(**{name: T.alloc_local((1,), FP32) for name in names})


# --- prepare group
@T.macro
def prepare_role(config, place, tiles, barriers, registers):
    """A' and A'' of every chunk, ahead of the chain."""
    for lap in laps(config, place.chunks):
        for here in steps(config, lap):
            if here.chunk < place.chunks:
                prepare_chunk(here, tiles, barriers, registers)


@T.macro
def prepare_chunk(here, tiles, barriers, registers):
    T.barrier_wait(barriers.inputs_ready[here.stage], here.filled)
    T.copy(tiles.a[here.stage, :, :], registers.inverse)
    for i, j in T.Parallel(CHUNK, CHUNK):
        # A' = exp(r - G) A beta
        registers.gated[i, j] = (
            T.cast(registers.inverse[i, j], FP32)
            * tiles.row_factor[here.stage, i]
            * tiles.beta[here.stage, j]
        )
        # A'' = -A' exp(G), of A' before it is rounded
        registers.decayed[i, j] = (
            T.cast(registers.inverse[i, j], FP32)
            * tiles.row_factor[here.stage, i]
            * tiles.beta[here.stage, j]
            * tiles.minus_gamma[here.stage, j]
        )
    T.copy(registers.decayed, tiles.decayed[here.stage, :, :])
    T.sync_threads(PREPARE_SYNC, WARP_GROUP)
    T.copy(registers.gated, tiles.a[here.stage, :, :])
    T.fence_proxy_async()
    arrive_warp(barriers.chunk_ready, here.stage)


# --- state group
@T.macro
def multiply_values(here, tiles, registers, clear):
    """X^T = V^T A'^T, added to X unless that is cleared, left in flight."""
    TC.wgmma_gemm(
        tiles.v[here.stage, :, :],
        tiles.a[here.stage, :, :],
        registers.x,
        transpose_A=True,
        transpose_B=True,
        policy=FULL_ROW,
        clear_accum=clear,
    )


@T.macro
def finish_values(here, tiles, registers):
    """X^T += U'^T A''^T, of the finished U'; all that is in flight with it is waited for."""
    TC.warpgroup_fence_operand(registers.u, num_regs=ACCUMULATOR_REGISTERS)
    T.copy(registers.u, registers.u_operand)
    TC.wgmma_gemm(
        registers.u_operand,
        tiles.decayed[here.stage, :, :],
        registers.x,
        transpose_B=True,
        policy=FULL_ROW,
    )
    TC.wait_wgmma(0)
    TC.warpgroup_fence_operand(registers.x, num_regs=ACCUMULATOR_REGISTERS)


# --- scores group
@T.macro
def multiply_queries_keys(here, tiles, registers):
    """Q K^T, left in flight."""
    TC.wgmma_gemm(
        tiles.q[here.stage, :, :],
        tiles.k[here.stage, :, :],
        registers.scores,
        transpose_B=True,
        clear_accum=True,
    )


@T.macro
def gate_scores(here, scale, tiles, registers):
    """P of the chunk, as bf16 in registers, of Q K^T in flight."""
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


# --- output
@T.macro
def round_output(registers):
    """O^T = scale exp(G) O^T, of a slow chunk O^T, as bf16 [tokens, columns]."""
    for i, j in T.Parallel(*registers.output.shape):
        registers.output_operand[j, i] = T.cast(registers.output[i, j] * registers.gate[j], BF16)


@T.macro
def gate_slow_output(here, tiles, registers):
    """O^T = scale exp(G) O^T of a slow chunk, before the scores' part."""
    if registers.slow[0] != 0:
        for i, j in T.Parallel(*registers.output.shape):
            registers.output[i, j] *= tiles.state_gate[here.stage, j]


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
            inputs.v[place.batch, tokens, place.head, place.dv : place.dv + place.columns],
            tiles.v[here.stage, :, :],
            barrier=barriers.inputs_landed[here.stage],
        )
        T.barrier_arrive(barriers.inputs_landed[here.stage])


@T.macro
def gate_warps(place, token, scale, inputs, tiles, barriers, gates):
    """One thread a token: the factors that the other groups multiply with.

    gates, scalars of the thread: gate, beta: of its token; last: gate of the chunk's last valid
    token; pending: log2 of the decay that is not in the state registers; total: G of the token,
    reference: r, keep: what the state is multiplied with; grown: scale exp(G); ratio: exp(r - G).
    """
    gates.pending[0] = 0.0
    for chunk in T.serial(place.chunks):
        here = step(chunk)
        stage = here.stage
        first = chunk * CHUNK
        last = T.min(first + CHUNK, place.tokens) - 1
        own = T.min(first + token, last)
        gates.gate[0] = inputs.g[place.batch, own, place.head]
        gates.last[0] = inputs.g[place.batch, last, place.head]
        gates.beta[0] = T.if_then_else(
            first + token <= last, inputs.beta[place.batch, own, place.head], 0.0
        )
        T.barrier_wait(barriers.inputs_free[stage], here.freed)
        gates.gate[0] = gates.gate[0] * LOG2_E
        gates.last[0] = gates.last[0] * LOG2_E
        gates.total[0] = gates.gate[0] + gates.pending[0]
        gates.pending[0] = gates.pending[0] + gates.last[0]
        gates.reference[0] = 0.0
        gates.keep[0] = 1.0
        if gates.pending[0] < FLUSH_LIMIT:
            gates.reference[0] = gates.pending[0]
            gates.keep[0] = T.exp2(gates.pending[0])
            gates.pending[0] = 0.0
        gates.grown[0] = T.exp2(gates.total[0])
        tiles.beta[stage, token] = gates.beta[0]
        tiles.minus_gamma[stage, token] = -gates.grown[0]
        gates.grown[0] = scale * gates.grown[0]
        gates.ratio[0] = T.exp2(gates.reference[0] - gates.total[0])
        if gates.last[0] < SLOW_LIMIT:
            tiles.row_factor[stage, token] = 1.0
            tiles.output_gate[stage, token] = 1.0
            tiles.state_gate[stage, token] = gates.grown[0]
            tiles.value_gate[stage, token] = gates.ratio[0]
            tiles.score_gate[stage, token] = gates.gate[0]
        else:
            tiles.row_factor[stage, token] = gates.ratio[0]
            tiles.output_gate[stage, token] = gates.grown[0]
        if token == 0:
            tiles.slow[stage] = T.if_then_else(gates.last[0] < SLOW_LIMIT, 1, 0)
            tiles.keep[stage] = gates.keep[0]
            tiles.growth[stage] = T.exp2(-gates.reference[0])
            tiles.pending[stage] = T.exp2(gates.pending[0])
        T.barrier_wait(barriers.inputs_landed[stage], here.filled)
        arrive_warp(barriers.inputs_ready, stage)


def forward_prim_func(config: PreparedConfig, name: str, cta):
    """The PrimFunc called `name` whose CTAs run the macro cta(config, place, scale, inputs).

    Arguments of the PrimFunc: q, k [B, T, Hq, 128] bf16, v [B, T, Hv, 128] bf16, g_cumsum and
    beta [B, T, Hv] fp32, A [B, T, Hv, 64] bf16, initial_state [B, Hv, 128, 128] fp32 (a one-element
    dummy unless config.use_initial_state), output [B, T, Hv, 128] bf16, final_state
    [B, Hv, 128, 128] fp32, scale fp32. B and T are dynamic.
    """
    batch, tokens = T.dynamic("batch"), T.dynamic("tokens")
    heads_q, heads_v = config.heads_q, config.heads_v
    slices = HEAD_DIM // config.block_dv
    state_shape = (batch, heads_v, HEAD_DIM, HEAD_DIM)

    @T.prim_func
    def gdn_prepared(
        q: T.Tensor((batch, tokens, heads_q, HEAD_DIM), BF16),
        k: T.Tensor((batch, tokens, heads_q, HEAD_DIM), BF16),
        v: T.Tensor((batch, tokens, heads_v, HEAD_DIM), BF16),
        g_cumsum: T.Tensor((batch, tokens, heads_v), FP32),
        beta: T.Tensor((batch, tokens, heads_v), FP32),
        A: T.Tensor((batch, tokens, heads_v, CHUNK), BF16),
        initial_state: T.Tensor(state_shape if config.use_initial_state else (1,), FP32),
        output: T.Tensor((batch, tokens, heads_v, HEAD_DIM), BF16),
        final_state: T.Tensor(state_shape, FP32),
        scale: T.float32,
    ):
        with T.Kernel(slices * heads_v * batch, threads=config.threads) as (block,):
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
                dv=block % slices * config.block_dv,
                columns=config.block_dv,
                tokens=tokens,
                chunks=T.ceildiv(tokens, CHUNK),
            )
            cta(config, place, scale, inputs)

    return gdn_prepared.with_attr("global_symbol", name)
