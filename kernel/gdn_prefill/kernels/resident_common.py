"""What the register-resident kernels of both tiles share: sizes, steps, layouts, service warps.

The equations are in resident_narrow.py, a CTA for 64 columns of one head's state, and in
resident_wide.py, a CTA for all 128. What both have in common is the decay of the state, which is
lazy: with G the cumulative log decay since the state was last multiplied through, and r a reference
for it, while the decay since then is above FLUSH_LIMIT the state stays as it is, keep = 1 and
r = 0. In the chunk that passes it, keep is that decay and r its logarithm; S is multiplied in the
shadow of a product. A chunk that decays by more than the tile's slow limit all by itself cannot be
written in such factors; the gate warps tell every role which chunks these are. No exponential of
either form can overflow, whatever the gates.

Rows of K and Q may have norms n_k and n_q. Nothing but the factors that the gate warps write knows
about them.

A tail chunk at the end of a tensor needs no code of its own: rows past T are filled with zeros by
the loads and dropped by the store. The gate of such a row repeats that of the last token while its
beta is 0. Where another sequence follows, resident_operator.py sees to its rows.
"""

from dataclasses import KW_ONLY, dataclass
from types import SimpleNamespace

import tilelang
import tilelang.cuda.language as TC
import tilelang.language as T
from tilelang.layout import Fragment
from tilelang.tileop.base import GemmWarpPolicy

from ..lowering import OWN_PROXY_FENCES

CHUNK = 64
HEAD_DIM = 128
TILE = 64  # rows of a warp group's WGMMA, columns of a 128-byte swizzled bf16 tile

WARP = 32
WARP_GROUP = 4 * WARP
WARPS_PER_GROUP = WARP_GROUP // WARP
GATE_WARPS = 2  # one thread a token
GATE_SYNC = 1  # named barrier of the gate warps; 0 is the whole block's
SERVICE_THREADS = WARP_GROUP

LOG2_E = 1.4426950408889634
FLUSH_LIMIT = -40.0  # log2 of the smallest decay kept outside the state registers
REGISTERS_PER_BLOCK = 65536
FULL_ROW = GemmWarpPolicy.FullRow
ACCUMULATOR_REGISTERS = TILE * TILE // WARP_GROUP

# The roles order their shared memory themselves, and fence what they write for WGMMA or TMA. Every
# index is within its tensor as it is written.
PASS_CONFIGS = {
    tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True,
    tilelang.PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True,
    tilelang.PassConfigKey.TL_DISABLE_SAFE_MEMORY_ACCESS: True,
    OWN_PROXY_FENCES: True,
}

SCORE_SLOTS = 2  # of the narrow tile
ROLES = {64: ("state", "output", "scores", "service"), 128: ("state", "prepare", "service")}
REGISTERS = {64: (224, 144, 80, 64), 128: (192, 88, 40)}
# log2 of the smallest decay of one chunk that a tile's factors may hold. In fp16 scores of a chunk
# are then at most 2^8 scale Q K^T, or 2^4 Q K^T.
SLOW_LIMITS = {
    ("bfloat16", 64): -100.0,
    ("bfloat16", 128): -60.0,
    ("float16", 64): -8.0,
    ("float16", 128): -4.0,
}


@dataclass(frozen=True)
class TileConfig:
    """The shape of a CTA of the resident kernels, and what their roles ask of a kernel's options.

    None stands for the default of the tile.

    stages: chunks of input in flight. registers: per thread of each of ROLES after setmaxnreg.
    Of block_dv = 64 only: slots: publications that the output group may lag by. early_factors: make
    beta V, and read the factors of U' and V_new, before they are needed. unrolled: one copy of the
    chain's loop a stage.
    """

    heads_q: int
    heads_v: int
    block_dv: int = 64
    _: KW_ONLY
    stages: int = 3
    slots: int | None = None
    registers: tuple[int, ...] | None = None
    early_factors: bool | None = None
    unrolled: bool | None = None

    def __post_init__(self) -> None:
        if self.heads_q < 1 or self.heads_v % self.heads_q:
            raise ValueError(f"heads_v={self.heads_v} must be a multiple of heads_q={self.heads_q}")
        if self.block_dv not in ROLES:
            raise ValueError(f"block_dv={self.block_dv} must be 64 or 128")
        if self.registers is None:
            object.__setattr__(self, "registers", REGISTERS[self.block_dv])
        for name, value in {"slots": 2, "early_factors": True, "unrolled": True}.items():
            if self.block_dv != TILE and getattr(self, name) is not None:
                raise ValueError(f"{name}={getattr(self, name)} is an option of block_dv={TILE}")
            if self.block_dv == TILE and getattr(self, name) is None:
                object.__setattr__(self, name, value)
        if self.stages < 2:
            raise ValueError(f"stages={self.stages} must be at least 2")
        if self.block_dv == TILE and not SCORE_SLOTS <= self.slots <= self.stages:
            raise ValueError(
                f"slots={self.slots} must be between {SCORE_SLOTS} and stages={self.stages}"
            )
        roles = ROLES[self.block_dv]
        if len(self.registers) != len(roles) or any(count % 8 for count in self.registers):
            raise ValueError(
                f"registers={self.registers} must be a multiple of 8 for each of {', '.join(roles)}"
            )
        asked = (self.state_groups - 1) * self.registers[0] + sum(self.registers)
        pool = launch_registers(self) * self.threads // WARP_GROUP
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
    def threads(self) -> int:
        """A warp group a role, of the state one for every 64 columns."""
        return self.state_threads + (len(ROLES[self.block_dv]) - 1) * WARP_GROUP

    @property
    def service_thread(self) -> int:
        """First thread of the service group, the last role."""
        return self.threads - SERVICE_THREADS

    @property
    def cluster(self) -> tuple[int, int, int] | None:
        """Cluster over a grid whose first extent counts tiles.

        At 64 columns it is the two tiles of a head. At 128 it is any two heads, if they come out
        even, of launches that another one runs beside: a cluster of two takes the two SMs of a TPC,
        which share an instruction cache that holds one kernel but not two. Unpaired, launches side
        by side take up to twice their time.
        """
        pairs = self.block_dv == TILE or (self.segmented and self.heads_v % 2 == 0)
        return (2, 1, 1) if pairs else None

    @property
    def slow_limit(self) -> float:
        """log2 of the smallest decay of one chunk that its factors may hold."""
        return SLOW_LIMITS[self.dtype, self.block_dv]


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


@T.macro
def set_registers(config, role):
    """Registers a thread of a role: taken from the others if more than at launch."""
    count = config.registers[ROLES[config.block_dv].index(role)]
    T.set_max_nreg(count, 1 if count > launch_registers(config) else 0)


def step(config, chunk) -> Step:
    return Step(chunk, chunk % config.stages, chunk // config.stages)


def rolled(extent):
    """A loop with one copy of its body, as kernels side by side share instruction caches."""
    return TC.unroll(extent, unroll_factor=1)


def laps(config, chunks):
    """A loop whose body has one copy a stage, so that addresses are known; see steps."""
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


def state_parts(registers) -> tuple:
    """The accumulators of the state, each with the dk column that it begins at."""
    columns = HEAD_DIM // len(registers.state)
    return tuple((part, number * columns) for number, part in enumerate(registers.state))


def accumulator_thread(i, j):
    """Thread of a warp group that holds (i, j) of a 64-row accumulator, or of a bf16 A operand."""
    return i % 64 // 16 * 32 + i % 8 * 4 + j % 8 // 2


def accumulator_register(i, j):
    return j // 8 * 4 + i % 16 // 8 * 2 + j % 2


def transposed_accumulator(columns: int) -> Fragment:
    """Fragment of [64, columns]: (t, d) lies where an accumulator [columns, 64] holds (d, t)."""

    def forward(t, d):
        return d // TILE * WARP_GROUP + accumulator_thread(d, t), accumulator_register(d, t)

    return Fragment((CHUNK, columns), forward_fn=forward)


@T.macro
def arrive_warp(barrier, index):
    """One arrival for the warp, after all its lanes have come this far."""
    T.sync_warp()
    if T.shuffle_elect(WARP):
        T.barrier_arrive(barrier[index])


# --- scores
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
def lower_triangle(registers):
    for i, j in T.Parallel(CHUNK, CHUNK):
        registers.scores[i, j] = T.if_then_else(i >= j, registers.scores[i, j], 0.0)


def score_column(config, tiles):
    """What a slow chunk's score_gate is compared with: the same, unless keys have norms."""
    return tiles.score_column if config.l2norm else tiles.score_gate


@T.macro
def gate_slow_scores(config, here, scale, tiles, registers):
    """P = scale tril(exp(g_i - g_j)) * (Q K^T), of a slow chunk."""
    for i, j in T.Parallel(CHUNK, CHUNK):
        registers.scores[i, j] = T.if_then_else(
            i >= j,
            registers.scores[i, j]
            * (scale * T.exp2(registers.row_gate[i] - score_column(config, tiles)[here.stage, j])),
            0.0,
        )


# --- states and output, whatever the operands
@T.macro
def clear_state(registers):
    for part, _first in state_parts(registers):
        T.clear(part)


@T.macro
def load_boundary(place, states, registers):
    """The state at the end of the segment before, as the scan leaves it."""
    for part, first in state_parts(registers):
        for i, j in T.Parallel(*part.shape):
            part[i, j] = states[place.segment - 1, place.batch, place.head, place.dv + i, first + j]


@T.macro
def store_first_boundary(place, states, registers):
    """The state at the end of the first segment, with the decay that is still to be applied."""
    for part, first in state_parts(registers):
        for i, j in T.Parallel(*part.shape):
            states[0, place.batch, place.head, place.dv + i, first + j] = (
                part[i, j] * registers.owed[0]
            )


@T.macro
def store_tile(config, place, chunk, inputs, tiles):
    """The output of a chunk by TMA, which drops rows past the tensor's end."""
    first = chunk * CHUNK
    T.copy(
        tiles.output,
        inputs.output[
            place.batch,
            first : first + CHUNK,
            place.head,
            place.dv : place.dv + config.block_dv,
        ],
    )


# --- service group
@T.macro
def service_role(config, place, lane, scale, inputs, hooks, roles, memory):
    """A producer warp, a writer warp and the gate warps."""
    tiles, barriers = memory.tiles, memory.barriers
    if lane < WARP:
        producer_warp(config, place, inputs, roles, tiles, barriers)
    elif lane < 2 * WARP:
        roles.writer_warp(config, place, lane - WARP, inputs, hooks, tiles, barriers)
    else:
        token = lane - 2 * WARP
        gate_warps(config, place, token, scale, inputs, hooks, roles, tiles, barriers, memory.gates)


@T.macro
def producer_warp(config, place, inputs, roles, tiles, barriers):
    for chunk in rolled(place.chunks):
        here = step(config, chunk)
        roles.stage_inputs(config, place, here, inputs, tiles, barriers)
        T.barrier_arrive(barriers.inputs_landed[here.stage])


def chunk_tokens(here) -> slice:
    return slice(here.chunk * CHUNK, here.chunk * CHUNK + CHUNK)


@T.macro
def stage_keys(place, here, inputs, tiles, barriers):
    T.tma_copy(
        inputs.k[place.batch, chunk_tokens(here), place.head_q, 0:HEAD_DIM],
        tiles.k[here.stage, :, :],
        barrier=barriers.inputs_landed[here.stage],
    )


@T.macro
def stage_queries(place, here, inputs, tiles, barriers):
    T.tma_copy(
        inputs.q[place.batch, chunk_tokens(here), place.head_q, 0:HEAD_DIM],
        tiles.q[here.stage, :, :],
        barrier=barriers.inputs_landed[here.stage],
    )


@T.macro
def stage_inverse(place, here, inputs, tiles, barriers):
    T.tma_copy(
        inputs.a[place.batch, chunk_tokens(here), place.head, 0:CHUNK],
        tiles.a[here.stage, :, :],
        barrier=barriers.inputs_landed[here.stage],
    )


def of_key(config, gates, factor):
    """A factor of a token's row of K."""
    return factor * gates.key_norm[0] if config.l2norm else factor


def of_query(config, gates, factor):
    """A factor of a token's row of Q."""
    return factor * gates.query_norm[0] if config.l2norm else factor


def gate_scalars(fetched: tuple[str, ...], made: tuple[str, ...]) -> SimpleNamespace:
    """Scalars of a thread of the gate warps; coming: what is fetched for the chunk after."""

    def scalars(names):
        return {name: T.alloc_local((1,), "float32") for name in names}

    coming = SimpleNamespace(**scalars(fetched))
    return SimpleNamespace(coming=coming, **scalars(fetched), **scalars(made))


def resident_gates(config) -> SimpleNamespace:
    """See gate_warps."""
    return gate_scalars(
        ("gate", "beta", *("query_norm", "key_norm") * config.l2norm),
        ("last", "pending", "total", "reference", "keep", "grown", "ratio"),
    )


@T.macro
def take_gates(gates):
    """What has been fetched becomes the chunk's."""
    for name in tuple(vars(gates.coming)):
        getattr(gates, name)[0] = getattr(gates.coming, name)[0]


def chunk_scalars(config) -> dict:
    """Shared memory for what the gate warps say of a chunk as a whole."""
    shape = (config.stages,)
    return {
        "last": T.alloc_shared(shape, "float32", scope="shared"),  # log2 of the chunk's decay
        "slow": T.alloc_shared(shape, "int32", scope="shared"),
        "keep": T.alloc_shared(shape, "float32", scope="shared"),
        "pending": T.alloc_shared(shape, "float32", scope="shared"),  # decay still to be applied
        # where the state after the chunk is kept, or -1
        "kept_row": T.alloc_shared(shape, "int32", scope="shared") if config.keeps_states else None,
    }


@T.macro
def gate_warps(config, place, token, scale, inputs, hooks, roles, tiles, barriers, gates):
    """One thread a token: the factors that the other groups multiply with.

    gates, scalars of the thread: gate, beta: of its token; last: gate of token 63, which is that of
    the chunk's last valid one; pending: log2 of the decay that is not in the state registers;
    total: G of the token, reference: r, keep: what the state is multiplied with; grown: exp(G),
    ratio: exp(r - G); query_norm, key_norm: where the config has them, factors of the rows of Q and
    K.
    """
    gates.pending[0] = 0.0
    hooks.fetch_gates(config, place, 0, token, inputs, gates.coming)
    for chunk in rolled(place.chunks):
        here = step(config, chunk)
        stage = here.stage
        take_gates(gates)
        # On its way while this chunk waits: a load takes about as long as a chunk does.
        hooks.fetch_gates(config, place, chunk + 1, token, inputs, gates.coming)
        T.barrier_wait(barriers.inputs_free[stage], here.freed)
        gates.gate[0] = gates.gate[0] * LOG2_E
        if token == CHUNK - 1:
            tiles.last[stage] = gates.gate[0]
        T.sync_threads(GATE_SYNC, GATE_WARPS * WARP)
        gates.last[0] = tiles.last[stage]
        gates.total[0] = gates.gate[0] + gates.pending[0]
        gates.pending[0] = gates.pending[0] + gates.last[0]
        gates.reference[0] = 0.0
        gates.keep[0] = 1.0
        if gates.pending[0] < place.flush_limit:
            gates.reference[0] = gates.pending[0]
            gates.keep[0] = T.exp2(gates.pending[0])
            gates.pending[0] = 0.0
        gates.grown[0] = T.exp2(gates.total[0])
        gates.ratio[0] = T.exp2(gates.reference[0] - gates.total[0])
        roles.write_factors(config, stage, token, scale, tiles, gates)
        if token == 0:
            tiles.slow[stage] = T.if_then_else(gates.last[0] < config.slow_limit, 1, 0)
            tiles.keep[stage] = gates.keep[0]
            tiles.pending[stage] = T.exp2(gates.pending[0])
            if config.keeps_states:
                hooks.choose_row(config, place, here, inputs, tiles)
        T.barrier_wait(barriers.inputs_landed[stage], here.filled)
        if config.packed:
            hooks.clear_neighbours(config, place, here, token, tiles)
        roles.announce_inputs(stage, barriers)
    roles.close_inputs(config, place, barriers)


@T.macro
def write_slow_score_gates(config, stage, token, tiles, gates):
    """log2 of the factors of rows and columns of a slow chunk's scores."""
    tiles.score_gate[stage, token] = gates.gate[0]
    if config.l2norm:
        tiles.score_gate[stage, token] = gates.gate[0] + T.log2(gates.query_norm[0])
        tiles.score_column[stage, token] = gates.gate[0] - T.log2(gates.key_norm[0])


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
