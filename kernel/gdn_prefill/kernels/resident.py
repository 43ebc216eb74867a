"""The register-resident forward kernel: the transposed state never leaves its group's registers.

One CTA owns block_dv columns of one head's state and walks its chunks of C = 64 tokens in order.
The state is held as S^T [block_dv, dk], an FP32 accumulator; the register layout of an accumulator
is that of a WGMMA A operand, so a cast to bf16 is all that lies between two products of the serial
chain. With G the cumulative log decay since the state was last multiplied through, and r a
reference for it, both of a token's V head:

    U'^T    = S^T K^T                                   state group
    W'^T    = beta V^T - beta exp(G) U'^T               state group
    V_new^T = W'^T A^T                                  state group
    X^T     = exp(r - G) V_new^T                        state group
    S^T     = keep S^T + X^T K                          state group
    O^T     = scale exp(G) (S^T Q^T) + X^T P^T          output group
    P       = scale exp(G - r) tril(Q K^T)              scores group

X serves both the state and the output, and leaves the scores one factor a row. The decay of the
state is lazy: while the decay since the last multiplication is above FLUSH_LIMIT, keep = 1 and
r = 0. In the chunk that passes it, keep is that decay and r its logarithm; S is multiplied in the
shadow of a product. So X lies between 2^SLOW_LIMIT and 2^-FLUSH_LIMIT times V_new, and P between
scale Q K^T and 2^-SLOW_LIMIT times that.

A chunk that decays by more than SLOW_LIMIT all by itself cannot be written in such factors. There
P = scale tril(exp(g_i - g_j)) * (Q K^T), the output gets V_new and the state exp(g_last - g) V_new:
the same products with more exponentials between them. The gate warps tell every role which chunks
these are. No exponential of either form can overflow, whatever the gates.

Roles of the threads: block_dv / 64 state warp groups, one output warp group, at block_dv = 64 a
scores warp group (at 128 the registers do not reach for one: the output group makes the scores too)
and a service warp group of one producer warp (TMA loads), one writer warp (TMA stores) and two gate
warps (factors made of g and beta). The state group hands bf16 S^T and X^T to the output group as a
dump of its registers: thread t of the output group reads back what thread t of the state group
wrote, so neither side needs a proxy fence, and the output group is never on the chain as long as it
takes less time for a chunk than the chain does.

A tail chunk needs no code of its own: rows past T are filled with zeros by the loads and dropped by
the store, and the gate of such a row repeats that of the last token while its beta is 0.
"""

from dataclasses import KW_ONLY, dataclass
from types import SimpleNamespace
from typing import ClassVar

import tilelang
import tilelang.cuda.language as TC
import tilelang.language as T
from tilelang.layout import Fragment, Layout, make_full_bank_swizzled_layout
from tilelang.tileop.base import GemmWarpPolicy

from ..lowering import OWN_PROXY_FENCES

CHUNK = 64
HEAD_DIM = 128
TILE = 64  # rows of a warp group's WGMMA, columns of a 128-byte swizzled bf16 tile
DK_HALVES = (0, 1)  # the state is two accumulators of 64 dk columns: one converts, one is summed

WARP = 32
WARP_GROUP = 4 * WARP
WARPS_PER_GROUP = WARP_GROUP // WARP
GATE_WARPS = 2  # one thread a token
SERVICE_THREADS = WARP_GROUP
PREPARE_SYNC = 1  # named barrier inside the output group; 0 is the whole block's

SCORE_SLOTS = 2

LOG2_E = 1.4426950408889634
FLUSH_LIMIT = -40.0  # log2 of the smallest decay kept outside the state registers
SLOW_LIMIT = -100.0  # log2 of the smallest decay of one chunk that its factors may hold
REGISTERS_PER_BLOCK = 65536
FULL_ROW = GemmWarpPolicy.FullRow
ACCUMULATOR_REGISTERS = TILE * TILE // WARP_GROUP

# The roles order their shared memory themselves, and fence what they write for WGMMA or TMA.
PASS_CONFIGS = {
    tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True,
    tilelang.PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True,
    OWN_PROXY_FENCES: True,
}


@dataclass(frozen=True)
class TileConfig:
    """The shape of a CTA of the resident kernels, and what their roles ask of a kernel's options.

    None stands for the default of the tile.

    stages: chunks of input in flight. slots: publications that the output group may lag by.
    registers: per thread of (state, output, scores where there are such, service) after setmaxnreg.
    early_factors: make beta V, and read the factors of U' and V_new, before they are needed.
    """

    heads_q: int
    heads_v: int
    block_dv: int = 64
    _: KW_ONLY
    stages: int | None = None
    slots: int | None = None
    registers: tuple[int, ...] | None = None
    early_factors: bool | None = None
    unrolled: bool = True

    def __post_init__(self) -> None:
        if self.heads_q < 1 or self.heads_v % self.heads_q:
            raise ValueError(f"heads_v={self.heads_v} must be a multiple of heads_q={self.heads_q}")
        if self.block_dv not in (64, 128):
            raise ValueError(f"block_dv={self.block_dv} must be 64 or 128")
        narrow = self.block_dv == 64
        defaults = {
            "stages": 3 if narrow else 2,
            "slots": 2 if narrow else 1,
            "registers": (224, 144, 80, 64) if narrow else (160, 152, 40),
            "early_factors": narrow,
        }
        for name, value in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        if self.stages < 2:
            raise ValueError(f"stages={self.stages} must be at least 2")
        if self.slots < 1:
            raise ValueError(f"slots={self.slots} must be at least 1")
        if self.scores_group and not SCORE_SLOTS <= self.slots <= self.stages:
            raise ValueError(
                f"slots={self.slots} must be between {SCORE_SLOTS} and stages={self.stages}"
            )
        roles = ("state", "output", *("scores",) * self.scores_group, "service")
        if len(self.registers) != len(roles) or any(count % 8 for count in self.registers):
            raise ValueError(
                f"registers={self.registers} must be a multiple of 8 for each of {', '.join(roles)}"
            )
        asked = (self.state_groups - 1) * self.registers[0] + sum(self.registers)
        pool = REGISTERS_PER_BLOCK // self.threads // 8 * 8 * self.threads // WARP_GROUP
        if asked > pool:
            raise ValueError(
                f"registers={self.registers} with {self.state_groups} state groups "
                f"ask for {asked} of {pool}"
            )

    @property
    def state_groups(self) -> int:
        return self.block_dv // TILE

    @property
    def state_threads(self) -> int:
        return self.state_groups * WARP_GROUP

    @property
    def scores_group(self) -> bool:
        return self.block_dv == TILE

    @property
    def service_thread(self) -> int:
        """First thread of the service group, the last role."""
        return self.state_threads + WARP_GROUP * (1 + self.scores_group)

    @property
    def threads(self) -> int:
        return self.service_thread + SERVICE_THREADS


@dataclass(frozen=True)
class ResidentConfig(TileConfig):
    """What one compiled resident kernel is specialised on; batch, length and scale are arguments.

    segmented: run over the segments of a split over time, from the states that its scan leaves.
    """

    use_initial_state: bool = False
    store_final_state: bool = True
    segmented: bool = False

    dtype: ClassVar[str] = "bfloat16"
    l2norm: ClassVar[bool] = False
    packed: ClassVar[bool] = False
    keeps_states: ClassVar[bool] = False
    slow_limit: ClassVar[float] = SLOW_LIMIT

    @property
    def name(self) -> str:
        """A readable name of the specialisation, unique among the shipped ones."""
        start = "init" if self.use_initial_state else "zero"
        end = "final" if self.store_final_state else "drop"
        kind = "segment_" if self.segmented else ""
        return f"{kind}resident_hq{self.heads_q}_hv{self.heads_v}_dv{self.block_dv}_{start}_{end}"


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


def launch_registers(config) -> int:
    return REGISTERS_PER_BLOCK // config.threads // 8 * 8


def step(config, chunk) -> Step:
    return Step(chunk, chunk % config.stages, chunk // config.stages)


def laps(config, chunks):
    """Trip count of a loop that has one copy of its body a stage, so that addresses are known."""
    return T.serial(T.ceildiv(chunks, config.stages) if config.unrolled else chunks)


def steps(config, lap) -> tuple[Step, ...]:
    """The chunks of one trip; those past the last chunk are to be skipped."""
    if not config.unrolled:
        return (step(config, lap),)
    return tuple(Step(lap * config.stages + stage, stage, lap) for stage in range(config.stages))


def following(config, here) -> Step:
    if isinstance(here.stage, int):
        wraps = here.stage + 1 == config.stages
        return Step(
            here.chunk + 1, 0 if wraps else here.stage + 1, here.round + 1 if wraps else here.round
        )
    return step(config, here.chunk + 1)


def accumulator_thread(i, j):
    """Thread of a warp group that holds (i, j) of a 64-row accumulator, or of a bf16 A operand."""
    return i % 64 // 16 * 32 + i % 8 * 4 + j % 8 // 2


def accumulator_register(i, j):
    return j // 8 * 4 + i % 16 // 8 * 2 + j % 2


def register_dump(slots: int, rows: int) -> Layout:
    """Shared layout of [slots, rows, 64] bf16: a thread's registers as 16-byte words."""

    def forward(slot, i, j):
        register = accumulator_register(i, j)
        return [slot, i // TILE, register // 8, accumulator_thread(i, j), register % 8]

    return Layout((slots, rows, TILE), forward)


def transposed_accumulator(columns: int) -> Fragment:
    """Fragment of [64, columns]: (t, d) lies where an accumulator [columns, 64] holds (d, t)."""

    def forward(t, d):
        return d // TILE * WARP_GROUP + accumulator_thread(d, t), accumulator_register(d, t)

    return Fragment((CHUNK, columns), forward_fn=forward)


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


@T.macro
def arrive_warp(barrier, index):
    """One arrival for the warp, after all its lanes have come this far."""
    T.sync_warp()
    if T.shuffle_elect(WARP):
        T.barrier_arrive(barrier[index])


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
        for i, j in T.Parallel(config.block_dv, CHUNK):
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
def open_publication(config, index, group, barriers):
    """Wait until the publication before has left the slot; chunk_ready may have said so already."""
    if not config.scores_group:
        T.barrier_wait(
            barriers.consumed[index % config.slots * config.state_groups + group],
            (index // config.slots + 1) % 2,
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
def close_publication(config, index, group, barriers):
    arrive_warp(barriers.published, index % config.slots * config.state_groups + group)


@T.macro
def decay_state(config, registers):
    """S = keep S, where keep is not 1."""
    if registers.keep[0] != 1.0:
        for half in DK_HALVES:
            for i, j in T.Parallel(config.block_dv, TILE):
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
        for i, j in T.Parallel(config.block_dv, CHUNK):
            registers.w[i, j] = (
                registers.beta_v[i, j] - beta_gamma(registers.factors, j) * registers.u[i, j]
            )
    else:
        for i, j in T.Parallel(config.block_dv, CHUNK):
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
    if config.scores_group and here.chunk + 1 < place.chunks:
        # Before the publication of V_new too: that it may take its place is part of the wait.
        take_values(config, following(config, here), tiles, barriers, registers)
    registers.slow[0] = tiles.slow[here.stage]  # a branch would wait for a read before it
    TC.wait_wgmma(0)
    TC.warpgroup_fence_operand(registers.x, num_regs=ACCUMULATOR_REGISTERS)


@T.macro
def absorb_values(config, here, group, tiles, barriers, registers):
    """S^T += X^T K, left in flight: one WGMMA group a dk half."""
    # X^T = exp(r - G) V_new^T, or exp(g_last - g) V_new^T
    if config.early_factors:
        for i, j in T.Parallel(config.block_dv, CHUNK):
            registers.x_operand[i, j] = registers.x[i, j] * registers.x_factor[j]
    else:
        for i, j in T.Parallel(config.block_dv, CHUNK):
            registers.x_operand[i, j] = registers.x[i, j] * tiles.x_factor[here.stage, j]
    for half in DK_HALVES:
        TC.wgmma_gemm(
            registers.x_operand,
            tiles.k[here.stage, :, half * TILE : (half + 1) * TILE],
            registers.state[half],
            policy=FULL_ROW,
        )
    open_publication(config, here.chunk + 1, group, barriers)
    if registers.slow[0] == 0:
        publish_values(config, here.chunk + 1, tiles, registers.x_operand)
    else:
        T.copy(registers.x, registers.w)
        publish_values(config, here.chunk + 1, tiles, registers.w)


@T.macro
def state_role(config, place, thread, inputs, hooks, tiles, barriers, registers):
    """The serial chain: S -> U' -> W' -> X -> S, all of it in registers."""
    group = thread // WARP_GROUP
    first = step(config, 0)
    last = step(config, place.chunks - 1)
    hooks.load_state(config, place, inputs, registers)

    take_values(config, first, tiles, barriers, registers)
    for half in DK_HALVES:
        multiply_keys(half, first, tiles, registers)
    publish_state(config, 0, tiles, registers)
    close_publication(config, 0, group, barriers)
    decay_state(config, registers)
    solve_values(config, place, first, tiles, barriers, registers)

    for lap in laps(config, place.chunks - 1):
        for here in steps(config, lap):
            if here.chunk < place.chunks - 1:
                coming = following(config, here)
                absorb_values(config, here, group, tiles, barriers, registers)
                if not config.scores_group:
                    take_values(config, coming, tiles, barriers, registers)
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
                close_publication(config, coming.chunk, group, barriers)
                decay_state(config, registers)
                solve_values(config, place, coming, tiles, barriers, registers)

    if config.scores_group:
        # The output group's last arrival there is for the publication without a chunk.
        after = step(config, place.chunks)
        T.barrier_wait(barriers.chunk_ready[after.stage], after.filled)
    absorb_values(config, last, group, tiles, barriers, registers)
    close_publication(config, place.chunks, group, barriers)
    registers.owed[0] = tiles.pending[last.stage]
    TC.wait_wgmma(0)
    for half in DK_HALVES:
        TC.warpgroup_fence_operand(registers.state[half], num_regs=ACCUMULATOR_REGISTERS)
    hooks.store_state(config, place, inputs, registers)
    if config.keeps_states:
        hooks.keep_state(config, place, last, inputs, tiles, registers)


# --- scores
def score_column(config, tiles):
    """What a slow chunk's score_gate is compared with: the same, unless keys have norms."""
    return tiles.score_column if config.l2norm else tiles.score_gate


@T.macro
def multiply_queries_keys(here, tiles, registers):
    """Q K^T of the chunk, left in flight."""
    TC.wgmma_gemm(
        tiles.q[here.stage, :, :],
        tiles.k[here.stage, :, :],
        registers.scores,
        transpose_B=True,
        clear_accum=True,
    )


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
                    * T.exp2(registers.row_gate[i] - score_column(config, tiles)[here.stage, j])
                ),
                0.0,
            )
    T.copy(registers.scores, registers.scores_operand)


@T.macro
def store_scores(here, tiles, registers):
    T.copy(registers.scores_operand, tiles.scores[here.chunk % SCORE_SLOTS, :, :])
    T.fence_proxy_async()


@T.macro
def scores_role(config, place, scale, tiles, barriers, registers):
    """P of every chunk, up to SCORE_SLOTS ahead of the output group."""
    arrive_warp(barriers.published, 0)
    for chunk in T.serial(place.chunks):
        here = step(config, chunk)
        T.barrier_wait(barriers.inputs_ready[here.stage], here.filled)
        multiply_queries_keys(here, tiles, registers)
        gate_scores(config, here, scale, tiles, registers)
        arrive_warp(barriers.inputs_free, here.stage)
        # Also keeps this group from arriving twice in one phase of a publication.
        index = chunk + 1
        T.barrier_wait(barriers.scores_free[index % SCORE_SLOTS], (index // SCORE_SLOTS + 1) % 2)
        store_scores(here, tiles, registers)
        arrive_warp(barriers.published, index % config.slots)


# --- output group
@T.macro
def fetch_state(config, index, group, tiles, registers):
    slot = index % config.slots
    for half in DK_HALVES:
        T.copy(
            tiles.state[slot * len(DK_HALVES) + half, group * TILE : (group + 1) * TILE, :],
            registers.old_state[half],
        )


@T.macro
def fetch_values(config, index, group, tiles, registers):
    T.copy(
        tiles.values[index % config.slots, group * TILE : (group + 1) * TILE, :], registers.values
    )


@T.macro
def wait_published(config, index, group, barriers):
    T.barrier_wait(
        barriers.published[index % config.slots * config.state_groups + group],
        index // config.slots % 2,
    )


@T.macro
def release(config, index, group, barriers):
    if config.scores_group:
        arrive_warp(barriers.chunk_ready, (index + config.slots) % config.stages)
    else:
        arrive_warp(barriers.consumed, index % config.slots * config.state_groups + group)


@T.macro
def multiply_queries(here, tiles, registers, accumulator):
    """O^T = S^T Q^T, left in flight."""
    for half in DK_HALVES:
        TC.wgmma_gemm(
            registers.old_state[half],
            tiles.q[here.stage, :, half * TILE : (half + 1) * TILE],
            accumulator,
            transpose_B=True,
            policy=FULL_ROW,
            clear_accum=half == 0,
        )


@T.macro
def add_scores_values(group, here, tiles, registers):
    """O^T += X^T P^T, left in flight."""
    TC.wgmma_gemm(
        registers.values,
        tiles.scores[here.chunk % SCORE_SLOTS, :, :],
        registers.output[group],
        transpose_B=True,
        policy=FULL_ROW,
    )


@T.macro
def stage_output(config, group, here, tiles, barriers, registers):
    """The finished O^T as bf16 [tokens, columns] in shared memory."""
    for i, j in T.Parallel(TILE, CHUNK):
        registers.output_operand[j, i] = T.cast(registers.output[group][i, j], config.dtype)
    if group == 0:
        T.barrier_wait(barriers.output_stored[0], (here.chunk + 1) % 2)
    T.copy(registers.output_operand, tiles.output[group])


@T.macro
def hand_over_output(barriers):
    T.fence_proxy_async()
    arrive_warp(barriers.output_ready, 0)


@T.macro
def free_scores(index, barriers):
    """The scores that came with a publication have been used; with the first came none."""
    arrive_warp(barriers.scores_free, index % SCORE_SLOTS)


@T.macro
def begin_output(here, barriers, registers, accumulator, group, tiles):
    """O^T of the chunk as far as the state goes, of the finished S^T Q^T."""
    TC.wait_wgmma(0)
    TC.warpgroup_fence_operand(accumulator, num_regs=ACCUMULATOR_REGISTERS)
    # O^T = scale exp(G) O^T
    for i, j in T.Parallel(TILE, CHUNK):
        registers.output[group][i, j] = accumulator[i, j] * tiles.output_gate[here.stage, j]


@T.macro
def output_role(config, place, tiles, barriers, registers):
    """Output of one state group; a publication ends a chunk and begins the next."""
    last = place.chunks - 1
    for index in tuple(range(config.slots)):
        arrive_warp(barriers.chunk_ready, index)
    wait_published(config, 0, 0, barriers)
    free_scores(0, barriers)
    fetch_state(config, 0, 0, tiles, registers)
    release(config, 0, 0, barriers)
    multiply_queries(step(config, 0), tiles, registers, registers.next_output)
    begin_output(step(config, 0), barriers, registers, registers.next_output, 0, tiles)
    arrive_warp(barriers.inputs_free, 0)

    for chunk in T.serial(last):
        here = step(config, chunk)
        coming = following(config, here)
        wait_published(config, coming.chunk, 0, barriers)
        fetch_values(config, coming.chunk, 0, tiles, registers)
        fetch_state(config, coming.chunk, 0, tiles, registers)
        release(config, coming.chunk, 0, barriers)
        add_scores_values(0, here, tiles, registers)
        multiply_queries(coming, tiles, registers, registers.next_output)
        # The products of the queries are the two newest groups.
        TC.wait_wgmma(len(DK_HALVES))
        TC.warpgroup_fence_operand(registers.output[0], num_regs=ACCUMULATOR_REGISTERS)
        free_scores(coming.chunk, barriers)
        stage_output(config, 0, here, tiles, barriers, registers)
        hand_over_output(barriers)
        begin_output(coming, barriers, registers, registers.next_output, 0, tiles)
        arrive_warp(barriers.inputs_free, coming.stage)

    wait_published(config, place.chunks, 0, barriers)
    fetch_values(config, place.chunks, 0, tiles, registers)
    add_scores_values(0, step(config, last), tiles, registers)
    TC.wait_wgmma(0)
    TC.warpgroup_fence_operand(registers.output[0], num_regs=ACCUMULATOR_REGISTERS)
    stage_output(config, 0, step(config, last), tiles, barriers, registers)
    hand_over_output(barriers)


# --- output group where it makes the scores too
@T.macro
def prepare_chunk(config, here, scale, tiles, barriers, registers):
    """P of a chunk, by the output group itself."""
    T.barrier_wait(barriers.inputs_ready[here.stage], here.filled)
    multiply_queries_keys(here, tiles, registers)
    gate_scores(config, here, scale, tiles, registers)
    store_scores(here, tiles, registers)
    T.sync_threads(PREPARE_SYNC, WARP_GROUP)


@T.macro
def begin_outputs(config, here, tiles, barriers, registers):
    """The state's part of the output of every state group, one after the other."""
    for group in tuple(range(config.state_groups)):
        fetch_state(config, here.chunk, group, tiles, registers)
        release(config, here.chunk, group, barriers)
        multiply_queries(here, tiles, registers, registers.output[group])
        begin_output(here, barriers, registers, registers.output[group], group, tiles)
    arrive_warp(barriers.inputs_free, here.stage)


@T.macro
def finish_outputs(config, here, tiles, barriers, registers):
    """The chunk's own part of the output of every state group, and the way out."""
    for group in tuple(range(config.state_groups)):
        wait_published(config, here.chunk + 1, group, barriers)
        fetch_values(config, here.chunk + 1, group, tiles, registers)
        add_scores_values(group, here, tiles, registers)
        TC.wait_wgmma(0)
        TC.warpgroup_fence_operand(registers.output[group], num_regs=ACCUMULATOR_REGISTERS)
        stage_output(config, group, here, tiles, barriers, registers)
    hand_over_output(barriers)


@T.macro
def output_and_scores_role(config, place, scale, tiles, barriers, registers):
    """Output of all state groups, and P one chunk ahead."""
    prepare_chunk(config, step(config, 0), scale, tiles, barriers, registers)
    for group in tuple(range(config.state_groups)):
        wait_published(config, 0, group, barriers)
    begin_outputs(config, step(config, 0), tiles, barriers, registers)
    for chunk in T.serial(place.chunks - 1):
        here = step(config, chunk)
        coming = following(config, here)
        prepare_chunk(config, coming, scale, tiles, barriers, registers)
        finish_outputs(config, here, tiles, barriers, registers)
        begin_outputs(config, coming, tiles, barriers, registers)
    finish_outputs(config, step(config, place.chunks - 1), tiles, barriers, registers)


# --- service group
@T.macro
def producer_warp(config, place, inputs, tiles, barriers):
    dv = config.block_dv
    for chunk in T.serial(place.chunks):
        here = step(config, chunk)
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
        for stage in tuple(range(config.stages)):
            if here.stage == stage:
                T.tma_copy(
                    inputs.v[place.batch, tokens, place.head, place.dv : place.dv + dv],
                    tiles.v[stage],
                    barrier=barriers.inputs_landed[here.stage],
                )
        T.barrier_arrive(barriers.inputs_landed[here.stage])


@T.macro
def writer_warp(config, place, thread, inputs, hooks, tiles, barriers):
    for chunk in T.serial(place.chunks):
        T.barrier_wait(barriers.output_ready[0], chunk % 2)
        hooks.store_output(config, place, chunk, thread, inputs, tiles)
        T.barrier_arrive(barriers.output_stored[0])


def of_key(config, gates, factor):
    """A factor of a token's row of K."""
    return factor * gates.key_norm[0] if config.l2norm else factor


def of_query(config, gates, factor):
    """A factor of a token's row of Q."""
    return factor * gates.query_norm[0] if config.l2norm else factor


@T.macro
def gate_warps(config, place, thread, scale, inputs, hooks, tiles, barriers, gates):
    """One thread a token: the factors that the other groups multiply with.

    gates, scalars of the thread: gate, beta: of its token; last: gate of the chunk's last valid
    token; pending: log2 of the decay that is not in the state registers; total: G of the token,
    reference: r, keep: what the state is multiplied with; query_norm, key_norm: where the config
    has them, factors of the rows of Q and K.
    """
    token = thread - (config.threads - GATE_WARPS * WARP)
    gates.pending[0] = 0.0
    for chunk in T.serial(place.chunks):
        here = step(config, chunk)
        stage = here.stage
        hooks.fetch_gates(config, place, chunk, token, inputs, gates)
        T.barrier_wait(barriers.inputs_free[stage], here.freed)
        gates.gate[0] = gates.gate[0] * LOG2_E
        gates.last[0] = gates.last[0] * LOG2_E
        gates.total[0] = gates.gate[0] + gates.pending[0]
        gates.pending[0] = gates.pending[0] + gates.last[0]
        gates.reference[0] = 0.0
        gates.keep[0] = 1.0
        if gates.pending[0] < place.flush_limit:
            gates.reference[0] = gates.pending[0]
            gates.keep[0] = T.exp2(gates.pending[0])
            gates.pending[0] = 0.0
        gates.grown[0] = T.exp2(gates.total[0])
        tiles.factors[stage, token // 2, token % 2] = gates.beta[0]
        tiles.factors[stage, token // 2, 2 + token % 2] = of_key(
            config, gates, gates.beta[0] * gates.grown[0]
        )
        tiles.output_gate[stage, token] = of_query(config, gates, scale * gates.grown[0])
        tiles.x_factor[stage, token] = of_key(
            config, gates, T.exp2(gates.reference[0] - gates.total[0])
        )
        if gates.last[0] < config.slow_limit:
            tiles.score_gate[stage, token] = gates.gate[0]
            if config.l2norm:
                tiles.score_gate[stage, token] = gates.gate[0] + T.log2(gates.query_norm[0])
                tiles.score_column[stage, token] = gates.gate[0] - T.log2(gates.key_norm[0])
        else:
            tiles.score_gate[stage, token] = of_query(
                config, gates, scale * T.exp2(gates.total[0] - gates.reference[0])
            )
        if token == 0:
            tiles.slow[stage] = T.if_then_else(gates.last[0] < config.slow_limit, 1, 0)
            tiles.keep[stage] = gates.keep[0]
            tiles.pending[stage] = T.exp2(gates.pending[0])
            if config.keeps_states:
                hooks.choose_row(config, place, here, inputs, tiles)
        T.barrier_wait(barriers.inputs_landed[stage], here.filled)
        if config.packed:
            hooks.clear_neighbours(config, place, here, token, tiles)
        arrive_warp(barriers.inputs_ready, stage)
        arrive_warp(barriers.chunk_ready, stage)
    if config.scores_group:
        # The last publication has no chunk of its own to begin with.
        after = step(config, place.chunks)
        T.barrier_wait(barriers.inputs_free[after.stage], after.freed)
        arrive_warp(barriers.chunk_ready, after.stage)


@T.macro
def run_roles(config, place, scale, inputs, hooks, memory):
    """What each thread of the CTA does."""
    thread = T.get_thread_binding()
    if thread < config.state_threads:
        T.set_max_nreg(config.registers[0], 1)
        state_role(
            config, place, thread, inputs, hooks, memory.tiles, memory.barriers, memory.chain
        )
    elif thread < config.state_threads + WARP_GROUP:
        T.set_max_nreg(
            config.registers[1], 1 if config.registers[1] > launch_registers(config) else 0
        )
        if config.scores_group:
            output_role(config, place, memory.tiles, memory.barriers, memory.beside)
        else:
            output_and_scores_role(
                config, place, scale, memory.tiles, memory.barriers, memory.beside
            )
    elif thread < config.service_thread:
        T.set_max_nreg(config.registers[2], 0)
        scores_role(config, place, scale, memory.tiles, memory.barriers, memory.beside)
    else:
        T.set_max_nreg(config.registers[-1], 0)
        if thread < config.service_thread + WARP:
            producer_warp(config, place, inputs, memory.tiles, memory.barriers)
        elif thread < config.service_thread + 2 * WARP:
            writer_warp(
                config,
                place,
                thread - config.service_thread - WARP,
                inputs,
                hooks,
                memory.tiles,
                memory.barriers,
            )
        else:
            gate_warps(
                config,
                place,
                thread,
                scale,
                inputs,
                hooks,
                memory.tiles,
                memory.barriers,
                memory.gates,
            )


@T.macro
def resident_cta(config, place, scale, inputs, hooks):
    """Everything one CTA does: its memory, its barriers, its roles."""
    TC.pdl_sync()  # launched before the launch that it reads from has ended
    dv, stages, groups = config.block_dv, config.stages, config.state_groups
    operand, fp32 = config.dtype, "float32"
    tiles = SimpleNamespace(
        q=T.alloc_shared((stages, CHUNK, HEAD_DIM), operand),
        k=T.alloc_shared((stages, CHUNK, HEAD_DIM), operand),
        v=[T.alloc_shared((CHUNK, dv), operand) for _ in range(stages)],
        a=T.alloc_shared((stages, CHUNK, CHUNK), operand),
        state=T.alloc_shared((config.slots * len(DK_HALVES), dv, TILE), operand),
        values=T.alloc_shared((config.slots, dv, CHUNK), operand),
        scores=T.alloc_shared((SCORE_SLOTS, CHUNK, CHUNK), operand),
        output=[T.alloc_shared((CHUNK, TILE), operand) for _ in range(groups)],
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
        slow=T.alloc_shared((stages,), "int32", scope="shared"),
        kept_row=T.alloc_shared((stages,), "int32", scope="shared")
        if config.keeps_states
        else None,  # where the state after the chunk is kept, or -1
        keep=T.alloc_shared((stages,), fp32, scope="shared"),
        pending=T.alloc_shared((stages,), fp32, scope="shared"),  # decay still to be applied
    )
    barriers = SimpleNamespace(
        inputs_landed=T.alloc_barrier([WARP] * stages),  # by the producer warp and its TMA loads
        inputs_ready=T.alloc_barrier(
            [GATE_WARPS] * stages
        ),  # by the gate warps: landed, and the factors written
        chunk_ready=T.alloc_barrier(
            [GATE_WARPS + WARPS_PER_GROUP * config.scores_group] * stages
        ),  # the same, and by the output group that a publication may take its place
        inputs_free=T.alloc_barrier(
            [(groups + 1 + config.scores_group) * WARPS_PER_GROUP] * stages
        ),  # by state, output and scores groups
        published=T.alloc_barrier(
            [WARPS_PER_GROUP * (1 + config.scores_group)] * (config.slots * groups)
        ),  # by each state group, and the scores group
        scores_free=T.alloc_barrier([WARPS_PER_GROUP] * SCORE_SLOTS),  # by the output group
        consumed=T.alloc_barrier(
            [WARPS_PER_GROUP] * (config.slots * groups)
        ),  # by the output group
        output_ready=T.alloc_barrier([WARPS_PER_GROUP]),  # by the output group
        output_stored=T.alloc_barrier([WARP]),  # by the writer warp
    )
    chain = SimpleNamespace(
        state=[T.alloc_fragment((dv, TILE), fp32) for _ in DK_HALVES],
        state_operand=[T.alloc_fragment((dv, TILE), operand) for _ in DK_HALVES],
        u=T.alloc_fragment((dv, CHUNK), fp32),
        v=T.alloc_fragment((CHUNK, dv), operand),
        w=T.alloc_fragment((dv, CHUNK), operand),
        x=T.alloc_fragment((dv, CHUNK), fp32),
        x_operand=T.alloc_fragment((dv, CHUNK), operand),
        beta_v=T.alloc_fragment((dv, CHUNK), fp32),
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
        output=[T.alloc_fragment((TILE, CHUNK), fp32) for _ in range(groups)],
        next_output=T.alloc_fragment((TILE, CHUNK), fp32),
        output_operand=T.alloc_fragment((CHUNK, TILE), operand),
    )
    gates = SimpleNamespace(
        **{
            name: T.alloc_local((1,), fp32)
            for name in (
                "gate",
                "beta",
                "last",
                "pending",
                "total",
                "reference",
                "keep",
                "grown",
                *("query_norm", "key_norm") * config.l2norm,
            )
        },
    )
    T.annotate_layout(
        {
            chain.v: transposed_accumulator(dv),
            beside.output_operand: transposed_accumulator(TILE),
            chain.factors: factor_pairs(),
            chain.x_factor: accumulator_row(),
            tiles.state: register_dump(config.slots * len(DK_HALVES), dv),
            tiles.values: register_dump(config.slots, dv),
            **{tile: make_full_bank_swizzled_layout(tile) for tile in (*tiles.v, *tiles.output)},
        }
    )
    memory = SimpleNamespace(
        tiles=tiles, barriers=barriers, chain=chain, beside=beside, gates=gates
    )
    if config.packed:
        if place.chunks > 0:
            run_roles(config, place, scale, inputs, hooks, memory)
        else:
            hooks.copy_state(config, place, inputs)
    else:
        run_roles(config, place, scale, inputs, hooks, memory)


@dataclass(frozen=True)
class SegmentTokens:
    """A tensor [B, T, ...] whose tokens are counted from the first of a segment."""

    tensor: object
    first: object

    def __getitem__(self, index):
        sequence, token, *rest = index
        if isinstance(token, slice):
            token = slice(self.first + token.start, self.first + token.stop)
        else:
            token = self.first + token
        return self.tensor[(sequence, token, *rest)]


# --- the lab's kernel
@T.macro
def load_initial_state(config, place, inputs, registers):
    if config.use_initial_state:
        for half in DK_HALVES:
            for i, j in T.Parallel(config.block_dv, TILE):
                registers.state[half][i, j] = inputs.initial_state[
                    place.batch, place.head, half * TILE + j, place.dv + i
                ]
    else:
        for half in DK_HALVES:
            T.clear(registers.state[half])


@T.macro
def load_state(config, place, inputs, registers):
    """The state that the CTA's first chunk begins with."""
    if config.segmented:
        if place.segment > 0:
            for half in DK_HALVES:
                for i, j in T.Parallel(config.block_dv, TILE):
                    registers.state[half][i, j] = inputs.states[
                        place.segment - 1, place.batch, place.head, place.dv + i, half * TILE + j
                    ]
        else:
            load_initial_state(config, place, inputs, registers)
    else:
        load_initial_state(config, place, inputs, registers)


@T.macro
def store_final_state(config, place, inputs, registers):
    for half in DK_HALVES:
        for i, j in T.Parallel(config.block_dv, TILE):
            inputs.final_state[place.batch, place.head, half * TILE + j, place.dv + i] = (
                registers.state[half][i, j] * registers.owed[0]
            )


@T.macro
def store_state(config, place, inputs, registers):
    """The state after a sequence's last chunk, with the decay that is still to be applied."""
    if config.store_final_state:
        if config.segmented:
            if place.segment == place.segments - 1:
                store_final_state(config, place, inputs, registers)
        else:
            store_final_state(config, place, inputs, registers)


@T.macro
def fetch_gates(config, place, chunk, token, inputs, gates):
    """log2 of gamma of the token and of the chunk's last, and beta; a tail repeats its last."""
    first = chunk * CHUNK
    last = T.min(first + CHUNK, place.tokens) - 1
    here = T.min(first + token, last)
    gates.gate[0] = inputs.g[place.batch, here, place.head]
    gates.last[0] = inputs.g[place.batch, last, place.head]
    gates.beta[0] = T.if_then_else(
        first + token <= last, inputs.beta[place.batch, here, place.head], 0.0
    )


@T.macro
def store_output(config, place, chunk, lane, inputs, tiles):
    """One TMA store a state group; it drops rows past the tensor's end."""
    first = chunk * CHUNK
    for group in tuple(range(config.state_groups)):
        column = place.dv + group * TILE
        T.copy(
            tiles.output[group],
            inputs.output[place.batch, first : first + CHUNK, place.head, column : column + TILE],
        )


LAB = SimpleNamespace(
    load_state=load_state,
    store_state=store_state,
    fetch_gates=fetch_gates,
    store_output=store_output,
)


def resident_kernel(config: ResidentConfig):
    """Build the register-resident forward kernel as a TileLang PrimFunc.

    Arguments of the PrimFunc: q, k [B, T, Hq, 128] bf16, v [B, T, Hv, 128] bf16, g_cumsum and
    beta [B, T, Hv] fp32, A [B, T, Hv, 64] bf16, initial_state [B, Hv, 128, 128] fp32 (a one-element
    dummy unless config.use_initial_state), output [B, T, Hv, 128] bf16, final_state
    [B, Hv, 128, 128] fp32 (a one-element dummy unless config.store_final_state), scale fp32.
    B and T are dynamic.

    With config.segmented there are two more: after initial_state, states [segments - 1, B, Hv, 128
    (dv), 128 (dk)] fp32, the state at the end of every segment but the last as the scan of a split
    leaves it, and at the end chunks_per_segment int32, of which the last segment has what remains,
    at least one. Segments >= 2 are dynamic.
    """
    return _segments(config) if config.segmented else _sequences(config)


def _sequences(config: ResidentConfig):
    """One CTA per tile of a sequence's state."""
    batch, tokens = T.dynamic("batch"), T.dynamic("tokens")
    heads_q, heads_v, dv = config.heads_q, config.heads_v, config.block_dv
    slices = HEAD_DIM // dv
    state_shape = (batch, heads_v, HEAD_DIM, HEAD_DIM)
    bf16, fp32 = "bfloat16", "float32"

    @T.prim_func
    def gdn_forward_resident(
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
                dv=block % slices * dv,
                tokens=tokens,
                chunks=T.ceildiv(tokens, CHUNK),
                flush_limit=FLUSH_LIMIT,
            )
            resident_cta(config, place, scale, inputs, LAB)

    return gdn_forward_resident


def _segments(config: ResidentConfig):
    """One CTA per tile of a sequence's state and segment of its tokens."""
    batch, tokens, boundaries = T.dynamic("batch"), T.dynamic("tokens"), T.dynamic("boundaries")
    heads_q, heads_v, dv = config.heads_q, config.heads_v, config.block_dv
    slices = HEAD_DIM // dv
    state_shape = (batch, heads_v, HEAD_DIM, HEAD_DIM)
    bf16, fp32 = "bfloat16", "float32"

    @T.prim_func
    def gdn_segment_forward(
        q: T.Tensor((batch, tokens, heads_q, HEAD_DIM), bf16),
        k: T.Tensor((batch, tokens, heads_q, HEAD_DIM), bf16),
        v: T.Tensor((batch, tokens, heads_v, HEAD_DIM), bf16),
        g_cumsum: T.Tensor((batch, tokens, heads_v), fp32),
        beta: T.Tensor((batch, tokens, heads_v), fp32),
        A: T.Tensor((batch, tokens, heads_v, CHUNK), bf16),
        initial_state: T.Tensor(state_shape if config.use_initial_state else (1,), fp32),
        states: T.Tensor((boundaries, *state_shape), fp32),
        output: T.Tensor((batch, tokens, heads_v, HEAD_DIM), bf16),
        final_state: T.Tensor(state_shape if config.store_final_state else (1,), fp32),
        scale: T.float32,
        chunks_per_segment: T.int32,
    ):
        # Three extents, as a division by a run-time number would land in every TMA coordinate.
        with T.Kernel(slices * heads_v, batch, boundaries + 1, threads=config.threads) as (
            tile,
            sequence,
            segment,
        ):
            first = segment * chunks_per_segment * CHUNK
            inputs = SimpleNamespace(
                q=SegmentTokens(q, first),
                k=SegmentTokens(k, first),
                v=SegmentTokens(v, first),
                g=SegmentTokens(g_cumsum, first),
                beta=SegmentTokens(beta, first),
                a=SegmentTokens(A, first),
                initial_state=initial_state,
                states=states,
                output=SegmentTokens(output, first),
                final_state=final_state,
            )
            place = SimpleNamespace(
                batch=sequence,
                head=tile // slices,
                head_q=tile // slices // (heads_v // heads_q),
                dv=tile % slices * dv,
                segment=segment,
                segments=boundaries + 1,
                tokens=tokens - first,
                chunks=T.min(chunks_per_segment, T.ceildiv(tokens - first, CHUNK)),
                flush_limit=FLUSH_LIMIT,
            )
            resident_cta(config, place, scale, inputs, LAB)

    return gdn_segment_forward
