"""The register-resident forward kernel: the transposed state never leaves its group's registers.

One CTA owns block_dv columns of one head's state and walks its chunks of C = 64 tokens in order.
The state is held as S^T [block_dv, dk], an FP32 accumulator; the register layout of an accumulator
is that of a WGMMA A operand, so a cast to bf16 is all that lies between two products of the serial
chain (gamma = exp(g), g the cumulative log decay):

    U'^T    = S^T K^T                                             state group
    W'^T    = beta V^T - (beta gamma) U'^T                        state group
    V_new^T = W'^T A^T                                            state group
    S^T     = gamma_last S^T + (exp(g_last - g) V_new^T) K        state group
    O^T     = scale gamma (S^T Q^T) + V_new^T P^T                 output group
    P       = scale tril(exp(g_i - g_j)) * (Q K^T)                scores or output group

Roles of the threads: block_dv / 64 state warp groups, one output warp group, at block_dv = 64 a
scores warp group (at 128 the registers do not reach for one: the output group makes the scores too)
and a service warp group of one producer warp (TMA loads), one writer warp (TMA stores) and two gate
warps (factors made of g and beta). The state group hands bf16 S^T and V_new^T to the output group
as a dump of its registers: thread t of the output group reads back what thread t of the state group
wrote, so neither side needs a proxy fence, and the output group is never on the chain as long as it
takes less time for a chunk than the chain does.

With a scores group the state group waits for one barrier a chunk: the output group arrives at
inputs_ready of the chunk whose publication takes the place that it has just read, and the scores
group at published of the publication that carries the values its scores belong to.

Every exponential is of a difference g_i - g_j with i >= j, or of g itself, so no gate can overflow.
The decay of the state is lazy: the registers hold 2^-e S with e <= 0 the decay not yet applied;
once e would fall under LAZY_LIMIT the state is multiplied through and e starts from 0.

A tail chunk needs no code of its own: rows past T are filled with zeros by the loads and dropped by
the store, and the gate of such a row repeats that of the last token while its beta is 0.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import tilelang
import tilelang.cuda.language as TC
import tilelang.language as T
from tilelang.layout import Fragment, Layout, make_full_bank_swizzled_layout
from tilelang.tileop.base import GemmWarpPolicy

CHUNK = 64
HEAD_DIM = 128
TILE = 64  # rows of a warp group's WGMMA, columns of a 128-byte swizzled bf16 tile
DK_HALVES = (
    0,
    1,
)  # the state is two accumulators of 64 dk columns, so that one converts while the other is summed

WARP = 32
WARP_GROUP = 4 * WARP
WARPS_PER_GROUP = WARP_GROUP // WARP
GATE_WARPS = 2  # one thread a token
SERVICE_THREADS = WARP_GROUP
OUTPUT_SYNC = 1  # named barrier inside the output group; 0 is the whole block's

BLOCK = 16  # rows of a warp in an accumulator: the unit in which scores are gated
SCORE_SLOTS = 2

LOG2_E = 1.4426950408889634
LAZY_LIMIT = -60.0  # log2 of the smallest decay kept outside the state registers
REGISTERS_PER_BLOCK = 65536
FULL_ROW = GemmWarpPolicy.FullRow
ACCUMULATOR_REGISTERS = TILE * TILE // WARP_GROUP

# The roles order their shared memory themselves.
PASS_CONFIGS = {
    tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True,
    tilelang.PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True,
}


@dataclass(frozen=True)
class ResidentConfig:
    """What one compiled resident kernel is specialised on; batch, length and scale are arguments.

    None stands for the default of the tile.

    stages: chunks of input in flight. slots: publications that the output group may lag by.
    registers: per thread of (state, output, scores where there are such, service) after setmaxnreg.
    lazy_decay: keep the decay of the state as an exponent as long as it is above LAZY_LIMIT.
    early_values: turn V into beta V before it is needed (32 registers more in the state group).
    early_factors: read the factors of U' and V_new while the product is in flight (16 more).
    early_publish: hand over V_new in the shadow of the state's update, not of K S (16 less).
    shadow_fences: a proxy fence after each publication; without it the compiler places its own
        right before the next product.
    blocked_scores: gate scores left of the diagonal 16x16 blocks by a row and a column factor.
    unrolled: roles whose loop has one copy of its body a stage, which makes addresses constants.
    """

    heads_q: int
    heads_v: int
    block_dv: int = 64
    use_initial_state: bool = False
    store_final_state: bool = True
    stages: int | None = None
    slots: int | None = None
    registers: tuple[int, ...] | None = None
    lazy_decay: bool = True
    early_values: bool | None = None
    early_factors: bool | None = None
    blocked_scores: bool = True
    early_publish: bool | None = None
    shadow_fences: bool = True
    unrolled: tuple[str, ...] = ("state",)

    def __post_init__(self) -> None:
        if self.heads_q < 1 or self.heads_v % self.heads_q:
            raise ValueError(f"heads_v={self.heads_v} must be a multiple of heads_q={self.heads_q}")
        if self.block_dv not in (64, 128):
            raise ValueError(f"block_dv={self.block_dv} must be 64 or 128")
        narrow = self.block_dv == 64
        defaults = {
            "stages": 3 if narrow else 2,
            "slots": 2 if narrow else 1,
            "registers": (216, 144, 88, 64) if narrow else (176, 128, 32),
            "early_values": narrow,
            "early_factors": narrow,
            "early_publish": not narrow,
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

    @property
    def name(self) -> str:
        """A readable name of the specialisation, unique among the shipped ones."""
        start = "init" if self.use_initial_state else "zero"
        end = "final" if self.store_final_state else "drop"
        return f"resident_hq{self.heads_q}_hv{self.heads_v}_dv{self.block_dv}_{start}_{end}"


@dataclass(frozen=True)
class Step:
    """One chunk: its number and its place in the ring of input stages (an int where unrolled)."""

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


def laps(config, role, chunks):
    """Trip count of the role's loop over the chunks."""
    return T.serial(T.ceildiv(chunks, config.stages) if role in config.unrolled else chunks)


def steps(config, role, lap) -> tuple[Step, ...]:
    """The chunks of one trip; of several, those past the last chunk are to be skipped."""
    if role in config.unrolled:
        return tuple(
            Step(lap * config.stages + stage, stage, lap) for stage in range(config.stages)
        )
    return (step(config, lap),)


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


def accumulator_row(rows: int) -> Fragment:
    """Fragment of [64]: each thread has the columns that it holds of an accumulator [rows, 64]."""
    owners = rows // 2  # threads that share a column of the accumulator

    def forward(j, owner):
        return owner * 4 + j % 8 // 2, j // 8 * 2 + j % 2

    return Fragment((CHUNK,), forward_fn=forward, replicate=owners)


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
def take_values(config, here, tiles, registers):
    """V of the chunk, or beta V, into registers."""
    load_values(config, here, tiles, registers.v)
    if config.early_values:
        # beta V
        for i, j in T.Parallel(config.block_dv, CHUNK):
            registers.beta_v[i, j] = tiles.beta[here.stage, j] * T.cast(
                registers.v[j, i], "float32"
            )


@T.macro
def multiply_keys(half, here, tiles, registers):
    """One dk half of U'^T = S^T K^T, from the state as bf16."""
    T.copy(registers.state[half], registers.state_bf16[half])
    TC.wgmma_gemm(
        registers.state_bf16[half],
        tiles.k[here.stage, :, half * TILE : (half + 1) * TILE],
        registers.u,
        transpose_B=True,
        policy=FULL_ROW,
        clear_accum=half == 0,
    )


@T.macro
def open_publication(config, index, group, barriers):
    """Wait until the publication before has left the slot; inputs_ready may say so already."""
    if not config.scores_group:
        T.barrier_wait(
            barriers.consumed[index % config.slots * config.state_groups + group],
            (index // config.slots + 1) % 2,
        )


@T.macro
def publish_values(config, index, tiles, registers):
    T.copy(registers.v_new_bf16, tiles.values[index % config.slots, :, :])


@T.macro
def publish_state(config, index, tiles, registers):
    for half in DK_HALVES:
        T.copy(
            registers.state_bf16[half],
            tiles.state[index % config.slots * len(DK_HALVES) + half, :, :],
        )


@T.macro
def close_publication(config, index, group, barriers):
    arrive_warp(barriers.published, index % config.slots * config.state_groups + group)


@T.macro
def shadow_fence(config):
    """Keeps the compiler from placing its own later; no async proxy reads a publication."""
    if config.shadow_fences:
        T.fence_proxy_async()


@T.macro
def fetch_factors(config, here, tiles, registers):
    """Before a publication is written, behind which these reads would queue."""
    registers.keep[0] = tiles.keep[here.stage]
    if config.early_factors:
        T.copy(tiles.beta_gamma[here.stage, :], registers.beta_gamma)


@T.macro
def decay_state(config, registers):
    """S = gamma_last S, or nothing as long as the decay may wait."""
    if config.lazy_decay:
        if registers.keep[0] != 1.0:
            for half in DK_HALVES:
                for i, j in T.Parallel(config.block_dv, TILE):
                    registers.state[half][i, j] *= registers.keep[0]
    else:
        for half in DK_HALVES:
            for i, j in T.Parallel(config.block_dv, TILE):
                registers.state[half][i, j] *= registers.keep[0]


@T.macro
def solve_values(config, here, tiles, registers):
    """From U'^T in flight to the finished V_new^T."""
    TC.wait_wgmma(0)
    TC.warpgroup_fence_operand(registers.u, num_regs=ACCUMULATOR_REGISTERS)

    # W'^T = beta V^T - (beta gamma) U'^T
    if config.early_factors:
        for i, j in T.Parallel(config.block_dv, CHUNK):
            registers.u[i, j] *= registers.beta_gamma[j]
    else:
        for i, j in T.Parallel(config.block_dv, CHUNK):
            registers.u[i, j] *= tiles.beta_gamma[here.stage, j]
    if config.early_values:
        for i, j in T.Parallel(config.block_dv, CHUNK):
            registers.w[i, j] = registers.beta_v[i, j] - registers.u[i, j]
    else:
        for i, j in T.Parallel(config.block_dv, CHUNK):
            registers.w[i, j] = (
                tiles.beta[here.stage, j] * T.cast(registers.v[j, i], "float32") - registers.u[i, j]
            )

    # V_new^T = W'^T A^T
    TC.wgmma_gemm(
        registers.w,
        tiles.a[here.stage, :, :],
        registers.v_new,
        transpose_B=True,
        policy=FULL_ROW,
        clear_accum=True,
    )
    if config.early_factors:
        T.copy(tiles.decay[here.stage, :], registers.decay)
    TC.wait_wgmma(0)
    TC.warpgroup_fence_operand(registers.v_new, num_regs=ACCUMULATOR_REGISTERS)


@T.macro
def absorb_values(config, here, tiles, registers):
    """S^T += (exp(g_last - g) V_new^T) K, left in flight: one WGMMA group a dk half."""
    if config.early_factors:
        for i, j in T.Parallel(config.block_dv, CHUNK):
            registers.decayed[i, j] = registers.v_new[i, j] * registers.decay[j]
    else:
        for i, j in T.Parallel(config.block_dv, CHUNK):
            registers.decayed[i, j] = registers.v_new[i, j] * tiles.decay[here.stage, j]
    for half in DK_HALVES:
        TC.wgmma_gemm(
            registers.decayed,
            tiles.k[here.stage, :, half * TILE : (half + 1) * TILE],
            registers.state[half],
            policy=FULL_ROW,
        )
    T.copy(registers.v_new, registers.v_new_bf16)


@T.macro
def state_role(config, place, thread, inputs, tiles, barriers, registers):
    """The serial chain: S -> U' -> W' -> V_new -> S, all of it in registers."""
    dv = config.block_dv
    group = thread // WARP_GROUP
    first = step(config, 0)
    last = step(config, place.chunks - 1)
    if config.use_initial_state:
        for half in DK_HALVES:
            for i, j in T.Parallel(dv, TILE):
                registers.state[half][i, j] = inputs.initial_state[
                    place.batch, place.head, half * TILE + j, place.dv + i
                ]
    else:
        for half in DK_HALVES:
            T.clear(registers.state[half])

    T.barrier_wait(barriers.inputs_ready[first.stage], first.filled)
    take_values(config, first, tiles, registers)
    for half in DK_HALVES:
        multiply_keys(half, first, tiles, registers)
    fetch_factors(config, first, tiles, registers)
    open_publication(config, 0, group, barriers)
    publish_state(config, 0, tiles, registers)
    close_publication(config, 0, group, barriers)
    decay_state(config, registers)
    shadow_fence(config)
    solve_values(config, first, tiles, registers)

    for lap in laps(config, "state", place.chunks - 1):
        for here in steps(config, "state", lap):
            if here.chunk < place.chunks - 1:
                coming = following(config, here)
                absorb_values(config, here, tiles, registers)
                T.barrier_wait(barriers.inputs_ready[coming.stage], coming.filled)
                if config.early_publish:
                    open_publication(config, coming.chunk, group, barriers)
                    publish_values(config, coming.chunk, tiles, registers)
                    shadow_fence(config)
                take_values(config, coming, tiles, registers)
                for half in DK_HALVES:
                    # Only the newest WGMMA group may be unfinished: the other half.
                    TC.wait_wgmma(1)
                    TC.warpgroup_fence_operand(
                        registers.state[half], num_regs=ACCUMULATOR_REGISTERS
                    )
                    multiply_keys(half, coming, tiles, registers)
                arrive_warp(barriers.inputs_free, here.stage)
                fetch_factors(config, coming, tiles, registers)
                if not config.early_publish:
                    open_publication(config, coming.chunk, group, barriers)
                    publish_values(config, coming.chunk, tiles, registers)
                publish_state(config, coming.chunk, tiles, registers)
                close_publication(config, coming.chunk, group, barriers)
                decay_state(config, registers)
                shadow_fence(config)
                solve_values(config, coming, tiles, registers)

    absorb_values(config, last, tiles, registers)
    if config.scores_group:
        after = step(config, place.chunks)
        T.barrier_wait(barriers.inputs_ready[after.stage], after.filled)
    open_publication(config, place.chunks, group, barriers)
    publish_values(config, place.chunks, tiles, registers)
    close_publication(config, place.chunks, group, barriers)
    registers.keep[0] = tiles.pending[last.stage]
    TC.wait_wgmma(0)
    for half in DK_HALVES:
        TC.warpgroup_fence_operand(registers.state[half], num_regs=ACCUMULATOR_REGISTERS)
    if config.store_final_state:
        for half in DK_HALVES:
            for i, j in T.Parallel(dv, TILE):
                inputs.final_state[place.batch, place.head, half * TILE + j, place.dv + i] = (
                    registers.state[half][i, j] * registers.keep[0]
                )


# --- output group
@T.macro
def multiply_queries_keys(here, tiles, barriers, registers):
    """Q K^T of the chunk, left in flight."""
    T.barrier_wait(barriers.inputs_ready[here.stage], here.filled)
    TC.wgmma_gemm(
        tiles.q[here.stage, :, :],
        tiles.k[here.stage, :, :],
        registers.scores,
        transpose_B=True,
        clear_accum=True,
    )


@T.macro
def gate_scores(config, here, scale, tiles, registers):
    """P, as bf16 in registers, of the finished Q K^T."""
    for block in tuple(range(CHUNK // BLOCK)):
        # P = scale tril(exp(g_i - g_j)) * (Q K^T)
        if registers.warp[0] > block:
            if config.blocked_scores:
                for i, j in T.Parallel(CHUNK, BLOCK):
                    registers.scores[i, block * BLOCK + j] *= (
                        tiles.row_gate[here.stage, i]
                        * tiles.column_gate[here.stage, registers.warp[0] - 1, block * BLOCK + j]
                    )
            else:
                for i, j in T.Parallel(CHUNK, BLOCK):
                    registers.scores[i, block * BLOCK + j] *= scale * T.exp2(
                        tiles.gate[here.stage, i] - tiles.gate[here.stage, block * BLOCK + j]
                    )
        elif registers.warp[0] == block:
            for i, j in T.Parallel(CHUNK, BLOCK):
                registers.scores[i, block * BLOCK + j] = T.if_then_else(
                    i % BLOCK >= j,
                    registers.scores[i, block * BLOCK + j]
                    * (
                        scale
                        * T.exp2(
                            tiles.gate[here.stage, i] - tiles.gate[here.stage, block * BLOCK + j]
                        )
                    ),
                    0.0,
                )
        else:
            for i, j in T.Parallel(CHUNK, BLOCK):
                registers.scores[i, block * BLOCK + j] = 0.0
    T.copy(registers.scores, registers.scores_bf16)


@T.macro
def store_scores(here, tiles, registers):
    T.copy(registers.scores_bf16, tiles.scores[here.chunk % SCORE_SLOTS, :, :])


@T.macro
def finish_scores(registers):
    TC.wait_wgmma(0)
    TC.warpgroup_fence_operand(registers.scores, num_regs=ACCUMULATOR_REGISTERS)


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
        arrive_warp(barriers.inputs_ready, (index + config.slots) % config.stages)
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
def gate_output(here, tiles, source, destination):
    """O^T = scale gamma O^T"""
    for i, j in T.Parallel(TILE, CHUNK):
        destination[i, j] = source[i, j] * tiles.output_gate[here.stage, j]


@T.macro
def add_scores_values(here, tiles, registers):
    """O^T += V_new^T P^T, left in flight."""
    TC.wgmma_gemm(
        registers.values,
        tiles.scores[here.chunk % SCORE_SLOTS, :, :],
        registers.output,
        transpose_B=True,
        policy=FULL_ROW,
    )


@T.macro
def stage_output(group, here, tiles, barriers, registers):
    """The finished O^T as bf16 [tokens, columns] in shared memory."""
    for i, j in T.Parallel(TILE, CHUNK):
        registers.output_bf16[j, i] = T.cast(registers.output[i, j], "bfloat16")
    if group == 0:
        T.barrier_wait(barriers.output_stored[0], (here.chunk + 1) % 2)
    T.copy(registers.output_bf16, tiles.output[group])


@T.macro
def show_tiles(barriers):
    """Output and scores become visible to the TMA store and to the whole group's WGMMA."""
    T.fence_proxy_async()
    arrive_warp(barriers.output_ready, 0)
    T.sync_threads(OUTPUT_SYNC, WARP_GROUP)


@T.macro
def prepare_scores(config, here, scale, tiles, barriers, registers):
    multiply_queries_keys(here, tiles, barriers, registers)
    finish_scores(registers)
    gate_scores(config, here, scale, tiles, registers)
    store_scores(here, tiles, registers)
    T.fence_proxy_async()
    T.sync_threads(OUTPUT_SYNC, WARP_GROUP)


@T.macro
def scores_role(config, place, thread, scale, tiles, barriers, registers):
    """P of every chunk, up to SCORE_SLOTS ahead of the output group."""
    # In a variable: under a condition on the thread itself TileLang renumbers the group's threads.
    registers.warp[0] = (thread - config.state_threads - WARP_GROUP) // WARP
    arrive_warp(barriers.published, 0)
    multiply_queries_keys(step(config, 0), tiles, barriers, registers)
    finish_scores(registers)
    for lap in laps(config, "scores", place.chunks):
        for here in steps(config, "scores", lap):
            if here.chunk < place.chunks:
                gate_scores(config, here, scale, tiles, registers)
                arrive_warp(barriers.inputs_free, here.stage)
                if here.chunk + 1 < place.chunks:
                    multiply_queries_keys(following(config, here), tiles, barriers, registers)
                # Also keeps this group from arriving twice in one phase of a publication.
                index = here.chunk + 1
                T.barrier_wait(
                    barriers.scores_free[index % SCORE_SLOTS], (index // SCORE_SLOTS + 1) % 2
                )
                store_scores(here, tiles, registers)
                T.fence_proxy_async()
                arrive_warp(barriers.published, index % config.slots)
                finish_scores(registers)


@T.macro
def free_scores(index, barriers):
    """The scores that came with a publication have been used; with the first came none."""
    arrive_warp(barriers.scores_free, index % SCORE_SLOTS)


@T.macro
def finish_output(here, tiles, barriers, registers):
    """Hand the finished O^T over to the writer warp."""
    free_scores(here.chunk + 1, barriers)
    stage_output(0, here, tiles, barriers, registers)
    T.fence_proxy_async()
    arrive_warp(barriers.output_ready, 0)


@T.macro
def lookahead_output_role(config, place, tiles, barriers, registers):
    """Output of one state group; a publication ends a chunk and begins the next."""
    last = place.chunks - 1
    for index in tuple(range(config.slots)):
        arrive_warp(barriers.inputs_ready, index)
    wait_published(config, 0, 0, barriers)
    free_scores(0, barriers)
    fetch_state(config, 0, 0, tiles, registers)
    release(config, 0, 0, barriers)
    multiply_queries(step(config, 0), tiles, registers, registers.next_output)
    TC.wait_wgmma(0)
    TC.warpgroup_fence_operand(registers.next_output, num_regs=ACCUMULATOR_REGISTERS)
    gate_output(step(config, 0), tiles, registers.next_output, registers.output)
    arrive_warp(barriers.inputs_free, 0)

    for lap in laps(config, "output", last):
        for here in steps(config, "output", lap):
            if here.chunk < last:
                coming = following(config, here)
                wait_published(config, coming.chunk, 0, barriers)
                fetch_values(config, coming.chunk, 0, tiles, registers)
                fetch_state(config, coming.chunk, 0, tiles, registers)
                release(config, coming.chunk, 0, barriers)
                add_scores_values(here, tiles, registers)
                multiply_queries(coming, tiles, registers, registers.next_output)
                # The products of the queries are the two newest groups.
                TC.wait_wgmma(2)
                TC.warpgroup_fence_operand(registers.output, num_regs=ACCUMULATOR_REGISTERS)
                finish_output(here, tiles, barriers, registers)
                TC.wait_wgmma(0)
                TC.warpgroup_fence_operand(registers.next_output, num_regs=ACCUMULATOR_REGISTERS)
                gate_output(coming, tiles, registers.next_output, registers.output)
                arrive_warp(barriers.inputs_free, coming.stage)

    wait_published(config, place.chunks, 0, barriers)
    fetch_values(config, place.chunks, 0, tiles, registers)
    add_scores_values(step(config, last), tiles, registers)
    TC.wait_wgmma(0)
    TC.warpgroup_fence_operand(registers.output, num_regs=ACCUMULATOR_REGISTERS)
    finish_output(step(config, last), tiles, barriers, registers)


@T.macro
def output_tile(config, here, group, coming, scale, tiles, barriers, registers):
    """Output of one state group; the scores of the coming chunk, if any, while V_new is awaited."""
    fetch_state(config, here.chunk, group, tiles, registers)
    release(config, here.chunk, group, barriers)
    multiply_queries(here, tiles, registers, registers.output)
    TC.wait_wgmma(0)
    TC.warpgroup_fence_operand(registers.output, num_regs=ACCUMULATOR_REGISTERS)
    gate_output(here, tiles, registers.output, registers.output)
    if group == config.state_groups - 1:
        arrive_warp(barriers.inputs_free, here.stage)
    if coming is not None:
        multiply_queries_keys(coming, tiles, barriers, registers)
        finish_scores(registers)
        gate_scores(config, coming, scale, tiles, registers)
        store_scores(coming, tiles, registers)
    wait_published(config, here.chunk + 1, group, barriers)
    fetch_values(config, here.chunk + 1, group, tiles, registers)
    add_scores_values(here, tiles, registers)
    TC.wait_wgmma(0)
    TC.warpgroup_fence_operand(registers.output, num_regs=ACCUMULATOR_REGISTERS)
    stage_output(group, here, tiles, barriers, registers)


@T.macro
def output_role(config, place, thread, scale, tiles, barriers, registers):
    """Output of the state groups one after the other, with the registers of one."""
    # In a variable: under a condition on the thread itself TileLang renumbers the group's threads.
    registers.warp[0] = (thread - config.state_threads) // WARP
    last = step(config, place.chunks - 1)
    prepare_scores(config, step(config, 0), scale, tiles, barriers, registers)
    for group in tuple(range(config.state_groups)):
        wait_published(config, 0, group, barriers)

    for lap in laps(config, "output", place.chunks - 1):
        for here in steps(config, "output", lap):
            if here.chunk < place.chunks - 1:
                for group in tuple(range(config.state_groups)):
                    ends = group == config.state_groups - 1
                    coming = following(config, here) if ends else None
                    output_tile(config, here, group, coming, scale, tiles, barriers, registers)
                show_tiles(barriers)

    for group in tuple(range(config.state_groups)):
        output_tile(config, last, group, None, scale, tiles, barriers, registers)
    show_tiles(barriers)


# --- service group
@T.macro
def producer_warp(config, place, inputs, tiles, barriers):
    dv = config.block_dv
    for lap in laps(config, "service", place.chunks):
        for here in steps(config, "service", lap):
            if here.chunk < place.chunks:
                first = here.chunk * CHUNK
                tokens = slice(first, first + CHUNK)
                T.barrier_wait(barriers.inputs_free[here.stage], here.freed)
                T.tma_copy(
                    inputs.k[place.batch, tokens, place.head_q, 0:HEAD_DIM],
                    tiles.k[here.stage, :, :],
                    barrier=barriers.inputs_landed[here.stage],
                )
                T.tma_copy(
                    inputs.a[place.batch, tokens, place.head, 0:CHUNK],
                    tiles.a[here.stage, :, :],
                    barrier=barriers.inputs_landed[here.stage],
                )
                if isinstance(here.stage, int):
                    T.tma_copy(
                        inputs.v[place.batch, tokens, place.head, place.dv : place.dv + dv],
                        tiles.v[here.stage],
                        barrier=barriers.inputs_landed[here.stage],
                    )
                else:
                    for stage in tuple(range(config.stages)):
                        if here.stage == stage:
                            T.tma_copy(
                                inputs.v[place.batch, tokens, place.head, place.dv : place.dv + dv],
                                tiles.v[stage],
                                barrier=barriers.inputs_landed[here.stage],
                            )
                T.tma_copy(
                    inputs.q[place.batch, tokens, place.head_q, 0:HEAD_DIM],
                    tiles.q[here.stage, :, :],
                    barrier=barriers.inputs_landed[here.stage],
                )
                T.barrier_arrive(barriers.inputs_landed[here.stage])


@T.macro
def writer_warp(config, place, inputs, tiles, barriers):
    for chunk in T.serial(place.chunks):
        first = chunk * CHUNK
        T.barrier_wait(barriers.output_ready[0], chunk % 2)
        for group in tuple(range(config.state_groups)):
            column = place.dv + group * TILE
            T.copy(
                tiles.output[group],
                inputs.output[
                    place.batch, first : first + CHUNK, place.head, column : column + TILE
                ],
            )
        T.barrier_arrive(barriers.output_stored[0])


@T.macro
def gate_warps(config, place, thread, scale, inputs, tiles, barriers, gates):
    """One thread a token: the factors that the other groups multiply with.

    gates: scalars of the thread. gate, beta: of its token; last: gate of the chunk's last valid
    token; first, heads: gates at the starts of the 16-token blocks 0 and 1..3; pending: log2 of the
    decay that is not in the state registers, before: the same one chunk earlier.
    """
    token = thread - (config.threads - GATE_WARPS * WARP)
    gates.pending[0] = 0.0
    fetch_gates(place, 0, token, inputs, gates)
    for lap in laps(config, "service", place.chunks):
        for here in steps(config, "service", lap):
            if here.chunk < place.chunks:
                stage = here.stage
                T.barrier_wait(barriers.inputs_free[stage], here.freed)
                for raw in (gates.gate, gates.last, gates.first):
                    raw[0] = raw[0] * LOG2_E
                for block in tuple(range(CHUNK // BLOCK - 1)):
                    gates.heads[block] = gates.heads[block] * LOG2_E
                gates.before[0] = gates.pending[0]
                gates.pending[0] = gates.pending[0] + gates.last[0]
                gates.keep[0] = 1.0
                if config.lazy_decay:
                    if gates.pending[0] < LAZY_LIMIT:
                        gates.keep[0] = T.exp2(gates.pending[0])
                        gates.pending[0] = 0.0
                else:
                    gates.keep[0] = T.exp2(gates.pending[0])
                    gates.pending[0] = 0.0
                gates.grown[0] = T.exp2(gates.gate[0] + gates.before[0])
                tiles.beta[stage, token] = gates.beta[0]
                tiles.beta_gamma[stage, token] = gates.beta[0] * gates.grown[0]
                tiles.decay[stage, token] = T.exp2(gates.last[0] - gates.gate[0] - gates.pending[0])
                tiles.output_gate[stage, token] = scale * gates.grown[0]
                tiles.gate[stage, token] = gates.gate[0]
                if config.blocked_scores:
                    gates.start[0] = gates.first[0]
                    for block in tuple(range(1, CHUNK // BLOCK)):
                        if token >= block * BLOCK:
                            gates.start[0] = gates.heads[block - 1]
                        tiles.column_gate[stage, block - 1, token] = T.exp2(
                            T.min(gates.heads[block - 1] - gates.gate[0], 0.0)
                        )
                    tiles.row_gate[stage, token] = scale * T.exp2(gates.gate[0] - gates.start[0])
                if token == 0:
                    tiles.keep[stage] = gates.keep[0]
                    tiles.pending[stage] = T.exp2(gates.pending[0])
                if here.chunk + 1 < place.chunks:
                    fetch_gates(place, here.chunk + 1, token, inputs, gates)
                T.barrier_wait(barriers.inputs_landed[stage], here.filled)
                arrive_warp(barriers.inputs_ready, stage)
    if config.scores_group:
        # The last publication has no chunk of its own to begin with.
        after = step(config, place.chunks)
        T.barrier_wait(barriers.inputs_free[after.stage], after.freed)
        arrive_warp(barriers.inputs_ready, after.stage)


@T.macro
def fetch_gates(place, chunk, token, inputs, gates):
    first = chunk * CHUNK
    last = T.min(first + CHUNK, place.tokens) - 1
    here = T.min(first + token, last)
    gates.gate[0] = inputs.g[place.batch, here, place.head]
    gates.beta[0] = T.if_then_else(
        first + token <= last, inputs.beta[place.batch, here, place.head], 0.0
    )
    gates.last[0] = inputs.g[place.batch, last, place.head]
    gates.first[0] = inputs.g[place.batch, first, place.head]
    for block in tuple(range(1, CHUNK // BLOCK)):
        gates.heads[block - 1] = inputs.g[
            place.batch, T.min(first + block * BLOCK, last), place.head
        ]


def resident_kernel(config: ResidentConfig):
    """Build the register-resident forward kernel as a TileLang PrimFunc.

    Arguments of the PrimFunc: q, k [B, T, Hq, 128] bf16, v [B, T, Hv, 128] bf16, g_cumsum and
    beta [B, T, Hv] fp32, A [B, T, Hv, 64] bf16, initial_state [B, Hv, 128, 128] fp32 (a one-element
    dummy unless config.use_initial_state), output [B, T, Hv, 128] bf16, final_state
    [B, Hv, 128, 128] fp32 (a one-element dummy unless config.store_final_state), scale fp32.
    B and T are dynamic.
    """
    batch, tokens = T.dynamic("batch"), T.dynamic("tokens")
    heads_q, heads_v, dv, stages = config.heads_q, config.heads_v, config.block_dv, config.stages
    groups = config.state_groups
    slices = HEAD_DIM // dv
    state_shape = (batch, heads_v, HEAD_DIM, HEAD_DIM)
    bf16, fp32 = "bfloat16", "float32"

    @T.prim_func
    def gdn_resident(
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
            )
            tiles = SimpleNamespace(
                q=T.alloc_shared((stages, CHUNK, HEAD_DIM), bf16),
                k=T.alloc_shared((stages, CHUNK, HEAD_DIM), bf16),
                v=[T.alloc_shared((CHUNK, dv), bf16) for _ in range(stages)],
                a=T.alloc_shared((stages, CHUNK, CHUNK), bf16),
                state=T.alloc_shared((config.slots * len(DK_HALVES), dv, TILE), bf16),
                values=T.alloc_shared((config.slots, dv, CHUNK), bf16),
                scores=T.alloc_shared((SCORE_SLOTS, CHUNK, CHUNK), bf16),
                output=[T.alloc_shared((CHUNK, TILE), bf16) for _ in range(groups)],
                beta=T.alloc_shared((stages, CHUNK), fp32, scope="shared"),
                beta_gamma=T.alloc_shared((stages, CHUNK), fp32, scope="shared"),
                decay=T.alloc_shared((stages, CHUNK), fp32, scope="shared"),  # exp(g_last - g)
                output_gate=T.alloc_shared((stages, CHUNK), fp32, scope="shared"),  # scale gamma
                gate=T.alloc_shared((stages, CHUNK), fp32, scope="shared"),  # log2 of gamma
                row_gate=T.alloc_shared((stages, CHUNK), fp32, scope="shared"),
                column_gate=T.alloc_shared(
                    (stages, CHUNK // BLOCK - 1, CHUNK), fp32, scope="shared"
                ),
                keep=T.alloc_shared(
                    (stages,), fp32, scope="shared"
                ),  # what the state is to be multiplied with
                pending=T.alloc_shared(
                    (stages,), fp32, scope="shared"
                ),  # decay outside the state registers
            )
            barriers = SimpleNamespace(
                inputs_landed=T.alloc_barrier(
                    [WARP] * stages
                ),  # by the producer warp and its TMA loads
                inputs_ready=T.alloc_barrier(
                    [GATE_WARPS + WARPS_PER_GROUP * config.scores_group] * stages
                ),  # landed, and the gate factors written; by the output group if it shares it
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
                state_bf16=[T.alloc_fragment((dv, TILE), bf16) for _ in DK_HALVES],
                u=T.alloc_fragment((dv, CHUNK), fp32),
                v=T.alloc_fragment((CHUNK, dv), bf16),
                beta_v=T.alloc_fragment((dv, CHUNK), fp32),
                w=T.alloc_fragment((dv, CHUNK), bf16),
                v_new=T.alloc_fragment((dv, CHUNK), fp32),
                v_new_bf16=T.alloc_fragment((dv, CHUNK), bf16),
                decayed=T.alloc_fragment((dv, CHUNK), bf16),
                beta_gamma=T.alloc_fragment((CHUNK,), fp32),
                decay=T.alloc_fragment((CHUNK,), fp32),
                keep=T.alloc_local((1,), fp32),
            )
            beside = SimpleNamespace(
                scores=T.alloc_fragment((CHUNK, CHUNK), fp32),
                scores_bf16=T.alloc_fragment((CHUNK, CHUNK), bf16),
                old_state=[T.alloc_fragment((TILE, TILE), bf16) for _ in DK_HALVES],
                values=T.alloc_fragment((TILE, CHUNK), bf16),
                output=T.alloc_fragment((TILE, CHUNK), fp32),
                next_output=T.alloc_fragment((TILE, CHUNK), fp32),
                output_bf16=T.alloc_fragment((CHUNK, TILE), bf16),
                warp=T.alloc_local((1,), "int32"),
            )
            gates = SimpleNamespace(
                **{
                    name: T.alloc_local((1,), fp32)
                    for name in (
                        "gate",
                        "beta",
                        "first",
                        "last",
                        "before",
                        "pending",
                        "keep",
                        "grown",
                        "start",
                    )
                },
                heads=T.alloc_local((CHUNK // BLOCK - 1,), fp32),
            )
            T.annotate_layout(
                {
                    chain.v: transposed_accumulator(dv),
                    beside.output_bf16: transposed_accumulator(TILE),
                    **{row: accumulator_row(dv) for row in (chain.beta_gamma, chain.decay)},
                    tiles.state: register_dump(config.slots * len(DK_HALVES), dv),
                    tiles.values: register_dump(config.slots, dv),
                    **{
                        tile: make_full_bank_swizzled_layout(tile)
                        for tile in (*tiles.v, *tiles.output)
                    },
                }
            )
            thread = T.get_thread_binding()

            if thread < config.state_threads:
                T.set_max_nreg(config.registers[0], 1)
                state_role(config, place, thread, inputs, tiles, barriers, chain)
            elif thread < config.state_threads + WARP_GROUP:
                T.set_max_nreg(
                    config.registers[1], 1 if config.registers[1] > launch_registers(config) else 0
                )
                if config.scores_group:
                    lookahead_output_role(config, place, tiles, barriers, beside)
                else:
                    output_role(config, place, thread, scale, tiles, barriers, beside)
            elif thread < config.service_thread:
                T.set_max_nreg(config.registers[2], 0)
                scores_role(config, place, thread, scale, tiles, barriers, beside)
            else:
                T.set_max_nreg(config.registers[-1], 0)
                if thread < config.service_thread + WARP:
                    producer_warp(config, place, inputs, tiles, barriers)
                elif thread < config.service_thread + 2 * WARP:
                    writer_warp(config, place, inputs, tiles, barriers)
                else:
                    gate_warps(config, place, thread, scale, inputs, tiles, barriers, gates)

    return gdn_resident
