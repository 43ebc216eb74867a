"""The forward kernel of the full operator: the roles of resident.py over other operands.

What the options change is where a CTA's tokens lie, what its gate warps fetch, and where states
come from and go to; the chain of products is that of resident_narrow.py or resident_wide.py.

Tables are time-contiguous, [B, heads, T]. Index tensors are read as 32-bit words with a step: 1 for
int32, 2 for int64, of which the low word is the number; 0 where there is none and entry n is n.

Packed sequences: B = 1, and a CTA's tokens begin at cu_seqlens[n]. The last chunk of a sequence
brings rows of the next along. They are zeroed in shared memory before anyone reads them, as 0 times
NaN is not 0: those of K, V and, where it is given in rows, A; rows of Q reach nothing but rows of
the output that are not stored. Such a chunk's output is stored row by row, all others by TMA. A
sequence without tokens has no chain; its state is copied, or left alone where it is updated in
place.

fp16 operands hold neither X nor P of a lazy decay: every chunk is flushed, so that X is at most
V_new, and a chunk is slow from little decay on (SLOW_LIMITS), so that P is not much more than
Q K^T. The state is an operand as well: its elements must stay below 65504.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import tilelang.cuda.language as TC
import tilelang.language as T

from .parameters import inverse, pool, vectors
from .resident import TILES, resident_cta
from .resident_common import (
    CHUNK,
    FLUSH_LIMIT,
    GATE_WARPS,
    HEAD_DIM,
    PASS_CONFIGS,
    TILE,
    WARP,
    SegmentTokens,
    TileConfig,
    clear_state,
    load_boundary,
    rolled,
    state_parts,
    store_first_boundary,
    store_tile,
)

__all__ = ["PASS_CONFIGS", "OperatorConfig", "operator_kernel"]

DTYPES = ("bfloat16", "float16")
STATE_DTYPES = ("float32", "bfloat16", "float16")
SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", None: "none"}
ALWAYS = 3.0e38  # a flush limit that every chunk passes
VECTOR = 8  # 16-bit elements of one access
KEY_PIECES = HEAD_DIM // VECTOR  # of a row of K
INVERSE_PIECES = CHUNK // VECTOR  # of a row of A


def check_dtypes(config, *states: str) -> None:
    """Raises ValueError for an operand's or a state's dtype that there is no kernel for."""
    if config.dtype not in DTYPES:
        raise ValueError(f"dtype={config.dtype!r} must be one of {', '.join(DTYPES)}")
    for name in states:
        if getattr(config, name) not in (None, *STATE_DTYPES):
            raise ValueError(
                f"{name}={getattr(config, name)!r} must be one of {', '.join(STATE_DTYPES)} or None"
            )


@dataclass(frozen=True)
class OperatorConfig(TileConfig):
    """What one compiled operator kernel is specialised on; sizes and row numbers are arguments.

    dtype: of q, k, v, A and the output. l2norm: rows of q and k have norms. packed: cu_seqlens says
    where sequences lie. initial_state, final_state, kept_states: dtype, None where there is none.
    state_v_first: all of these are [dv, dk]. segmented: run over the segments of a split over time.
    """

    dtype: str = "bfloat16"
    l2norm: bool = False
    packed: bool = False
    initial_state: str | None = None
    final_state: str | None = "float32"
    kept_states: str | None = None
    state_v_first: bool = False
    segmented: bool = False

    def __post_init__(self) -> None:
        if self.keeps_states:
            if self.block_dv != TILE:
                raise ValueError(
                    f"block_dv={self.block_dv} must be {TILE} with kept_states: registers do not "
                    "reach for more"
                )
            if self.early_factors is None:
                object.__setattr__(self, "early_factors", False)
        super().__post_init__()
        check_dtypes(self, "initial_state", "final_state", "kept_states")
        if self.segmented and (self.packed or self.keeps_states):
            raise ValueError("segmented=True: packed sequences and kept states are not split")

    @property
    def keeps_states(self) -> bool:
        return self.kept_states is not None

    @property
    def inverse_blocks(self) -> bool:
        """Is A given as inverse_blocks.py says: where the prepare group rewrites it anyway."""
        return self.block_dv != TILE and not self.segmented

    def flush_limit(self, batch_invariant: bool) -> float:
        """log2 of the smallest decay kept outside the state registers: the argument of a launch.

        Where all chunks are flushed, the registers hold the very state at every chunk, so that
        neither what came before it nor how it was cut can matter.
        """
        return ALWAYS if batch_invariant or self.dtype == "float16" else FLUSH_LIMIT

    @property
    def name(self) -> str:
        """A readable name of the specialisation, unique among the shipped ones."""
        states = "_".join(
            SHORT[dtype] for dtype in (self.initial_state, self.final_state, self.kept_states)
        )
        flags = "".join(
            f"_{name}" for name in ("l2norm", "packed", "segmented") if getattr(self, name)
        )
        return (
            f"operator_hq{self.heads_q}_hv{self.heads_v}_dv{self.block_dv}_{SHORT[self.dtype]}"
            f"_{states}_{'vk' if self.state_v_first else 'kv'}{flags}"
        )


# --- rows of states
def entry(numbers, n, step):
    """Entry n of an index tensor seen as 32-bit words; n itself where there is no tensor."""
    return T.if_then_else(step == 0, n, numbers[n * step])


def within(row, rows):
    """A row of a tensor of so many, -1 where it is none of them."""
    return T.if_then_else(row < rows, row, -1)


def cell(config, row, place, dk, dv):
    """Index of an element of the CTA's part of a state."""
    return (
        (row, place.head, place.dv + dv, dk)
        if config.state_v_first
        else (row, place.head, dk, place.dv + dv)
    )


@T.macro
def read_state(config, place, states, row, registers):
    """A row of a pool, zero where there is none."""
    for part, first in state_parts(registers):
        if config.initial_state == "bfloat16":
            # One branch around all loads would have them wait as 16 bits, in other registers.
            for i, j in T.Parallel(*part.shape):
                part[i, j] = T.if_then_else(
                    row >= 0,
                    T.cast(states[cell(config, row, place, first + j, i)], "float32"),
                    0.0,
                )
        else:
            if row >= 0:
                for i, j in T.Parallel(*part.shape):
                    part[i, j] = T.cast(states[cell(config, row, place, first + j, i)], "float32")
            else:
                T.clear(part)


@T.macro
def write_state(config, place, states, row, dtype, registers):
    """With the decay that is still to be applied."""
    for part, first in state_parts(registers):
        for i, j in T.Parallel(*part.shape):
            states[cell(config, row, place, first + j, i)] = T.cast(
                part[i, j] * registers.owed[0], dtype
            )


@T.macro
def load_initial_state(config, place, inputs, registers):
    if config.initial_state is not None:
        place.row[0] = within(
            entry(inputs.initial_rows, place.sequence, place.initial_step),
            inputs.initial_state.shape[0],
        )
        read_state(config, place, inputs.initial_state, place.row[0], registers)
    else:
        clear_state(registers)


@T.macro
def load_state(config, place, inputs, registers):
    """The state that the CTA's first chunk begins with; keeps it where it is asked for."""
    if config.segmented:
        if place.segment > 0:
            load_boundary(place, inputs.segment_states, registers)
        else:
            load_initial_state(config, place, inputs, registers)
    else:
        load_initial_state(config, place, inputs, registers)
    if config.keeps_states and place.kept_after == 0:
        place.row[0] = within(
            entry(inputs.kept_starts, place.sequence, place.kept_step),
            inputs.kept_states.shape[0],
        )
        if place.row[0] >= 0:
            registers.owed[0] = 1.0
            write_state(
                config, place, inputs.kept_states, place.row[0], config.kept_states, registers
            )


@T.macro
def store_final_state(config, place, inputs, registers):
    place.row[0] = within(
        entry(inputs.final_rows, place.sequence, place.final_step), inputs.final_state.shape[0]
    )
    if place.row[0] >= 0:
        write_state(config, place, inputs.final_state, place.row[0], config.final_state, registers)


@T.macro
def store_state(config, place, inputs, registers):
    """The state after a sequence's last chunk; of a split also that after its first segment."""
    if config.segmented:
        if place.segment == 0:
            store_first_boundary(place, inputs.segment_states, registers)
        elif config.final_state is not None and place.segment == place.segments - 1:
            store_final_state(config, place, inputs, registers)
    elif config.final_state is not None:
        store_final_state(config, place, inputs, registers)


@T.macro
def copy_state(config, place, inputs):
    """The final state of a sequence without tokens, by all threads."""
    if config.final_state is not None:
        place.row[0] = within(
            entry(inputs.final_rows, place.sequence, place.final_step), inputs.final_state.shape[0]
        )
        if place.row[0] >= 0 and place.in_place == 0:
            if config.initial_state is not None:
                place.other_row[0] = within(
                    entry(inputs.initial_rows, place.sequence, place.initial_step),
                    inputs.initial_state.shape[0],
                )
                if place.other_row[0] >= 0:
                    for i, j in T.Parallel(HEAD_DIM, config.block_dv):
                        inputs.final_state[cell(config, place.row[0], place, i, j)] = T.cast(
                            T.cast(
                                inputs.initial_state[cell(config, place.other_row[0], place, i, j)],
                                "float32",
                            ),
                            config.final_state,
                        )
                else:
                    clear_final_state(config, place, inputs)
            else:
                clear_final_state(config, place, inputs)


@T.macro
def clear_final_state(config, place, inputs):
    for i, j in T.Parallel(HEAD_DIM, config.block_dv):
        inputs.final_state[cell(config, place.row[0], place, i, j)] = T.cast(
            0.0, config.final_state
        )


# --- states along the way
@T.macro
def choose_row(config, place, here, inputs, tiles):
    """Where the state after a chunk is kept, if it is."""
    done = here.chunk + 1
    tiles.kept_row[here.stage] = T.if_then_else(
        T.And(
            T.truncmod(done, place.kept_every) == 0,
            done * CHUNK < place.tokens + place.kept_after,
        ),
        within(
            entry(inputs.kept_starts, place.sequence, place.kept_step)
            + T.truncdiv(done, place.kept_every)
            - place.kept_after,
            inputs.kept_states.shape[0],
        ),
        -1,
    )


@T.macro
def keep_state(config, place, here, inputs, tiles, registers):
    """The state after a chunk, where it is asked for."""
    place.row[0] = tiles.kept_row[here.stage]
    if place.row[0] >= 0:
        write_state(config, place, inputs.kept_states, place.row[0], config.kept_states, registers)


# --- service group
@T.macro
def fetch_gates(config, place, chunk, token, inputs, gates):
    """What a token brings along; one past the end has the last one's gate, and beta 0."""
    own = chunk * CHUNK + token
    here = place.first + T.min(own, place.tokens - 1)
    gates.gate[0] = inputs.gate[place.batch, place.head, here]
    gates.beta[0] = T.if_then_else(
        own < place.tokens, inputs.beta[place.batch, place.head, here], 0.0
    )
    if config.l2norm:
        gates.query_norm[0] = inputs.query_norm[place.batch, place.head_q, here]
        gates.key_norm[0] = inputs.key_norm[place.batch, place.head_q, here]


@T.macro
def clear_piece(tile, row, piece):
    """Zero 16 bytes of a row of a tile; row: its index, in all dimensions but the last."""
    for e in T.vectorized(VECTOR):
        tile[(*row, piece * VECTOR + e)] = 0


@T.macro
def clear_neighbours(config, place, here, token, tiles):
    """Zero the rows that a sequence's last chunk has of the next, a row a warp at a time."""
    valid = place.tokens - here.chunk * CHUNK
    inverse_pieces = 0 if config.inverse_blocks else INVERSE_PIECES
    if valid < CHUNK:
        lane = token % WARP
        for lap in rolled(CHUNK // GATE_WARPS):
            row = lap * GATE_WARPS + token // WARP
            if row >= valid:
                if lane < KEY_PIECES:
                    clear_piece(tiles.k, (here.stage, row), lane)
                elif lane < KEY_PIECES + inverse_pieces:
                    clear_piece(tiles.a, (here.stage, row), lane - KEY_PIECES)
                if lane >= WARP - config.block_dv // VECTOR:
                    TILES[config.block_dv].clear_values(
                        config,
                        here,
                        row,
                        lane - (WARP - config.block_dv // VECTOR),
                        tiles,
                        clear_piece,
                    )
        T.fence_proxy_async()


@T.macro
def store_output(config, place, chunk, lane, inputs, tiles):
    """By TMA; where the next sequence begins in the tile, row by row."""
    first = chunk * CHUNK
    if config.packed:
        if first + CHUNK <= place.tokens:
            store_tile(config, place, chunk, inputs, tiles)
        else:
            store_rows(config, place, first, lane, inputs, tiles)
    else:
        store_tile(config, place, chunk, inputs, tiles)


@T.macro
def store_rows(config, place, first, lane, inputs, tiles):
    pieces = config.block_dv // VECTOR
    for lap in T.serial(CHUNK * pieces // WARP):
        row = lap * (WARP // pieces) + lane // pieces
        if first + row < place.tokens:
            for e in T.vectorized(VECTOR):
                inputs.output.tensor[
                    place.batch,
                    place.first + first + row,
                    place.head,
                    place.dv + lane % pieces * VECTOR + e,
                ] = tiles.output[row, lane % pieces * VECTOR + e]


HOOKS = SimpleNamespace(
    load_state=load_state,
    keep_state=keep_state,
    store_state=store_state,
    copy_state=copy_state,
    choose_row=choose_row,
    fetch_gates=fetch_gates,
    clear_neighbours=clear_neighbours,
    store_output=store_output,
)


def first_token(config, cu_seqlens, sequence, cu_step, segment, chunks_per_segment):
    """Where the CTA's tokens begin in their row of the batch."""
    if config.packed:
        return cu_seqlens[sequence * cu_step]
    return segment * chunks_per_segment * CHUNK if config.segmented else 0


def tokens_from(config, cu_seqlens, sequence, cu_step, begin, tokens, chunks_per_segment):
    """How many they are."""
    if config.packed:
        return cu_seqlens[(sequence + 1) * cu_step] - begin
    return T.min(tokens - begin, chunks_per_segment * CHUNK) if config.segmented else tokens


def operator_kernel(config: OperatorConfig):
    """Build the operator's forward kernel as a TileLang PrimFunc.

    Arguments of the PrimFunc; what the configuration does not have is a one-element dummy, fp32 or
    of the dtype given here, and B, T and all numbers of rows are dynamic:

        q, k [B, T, Hq, 128], v [B, T, Hv, 128], tokens apart by any stride, A [B, T, Hv, 64] or
            with config.inverse_blocks records of it, all of config.dtype
        gate, beta [B, Hv, T], query_norm, key_norm [B, Hq, T] fp32
        cu_seqlens [cu_step (N + 1)] int32
        order [N] int32, read if order_step is 1: the sequences in the order in which they are begun
        initial_state, final_state, kept_states [rows, Hv, 128, 128], rows apart by any stride
        initial_rows, final_rows, kept_starts int32, entry n at n times their step
        segment_states [segments - 1, B, Hv, 128 (dv), 128 (dk)] fp32
        output [B, T, Hv, 128] of config.dtype
        scale, flush_limit fp32, sequences and the steps int32
        in_place: empty sequences' states stay as they are
        kept_every chunks; kept_after = 0: before chunks whose number it divides, in row start + i;
        1: after every so many full ones, in row start + i - 1
        chunks_per_segment, first_segment, launched, beside int32, read if config.segmented: see
            resident.py
    """
    dynamic = {
        name: T.dynamic(name)
        for name in (
            "batch",
            "tokens",
            "bounds",
            "initial_pool",
            "initial_entries",
            "final_pool",
            "final_entries",
            "kept_pool",
            "kept_entries",
            "boundaries",
            "sequences",
        )
    }
    d = SimpleNamespace(**dynamic)
    heads_q, heads_v, dv = config.heads_q, config.heads_v, config.block_dv
    slices = HEAD_DIM // dv
    fp32 = "float32"

    def present(is_there, shape, dtype=fp32):
        return T.Tensor(shape if is_there else (1,), dtype)

    @T.prim_func
    def gdn_operator_forward(
        q: vectors("query", d.batch, d.tokens, heads_q, config.dtype),
        k: vectors("key", d.batch, d.tokens, heads_q, config.dtype),
        v: vectors("value", d.batch, d.tokens, heads_v, config.dtype),
        gate: T.Tensor((d.batch, heads_v, d.tokens), fp32),
        beta: T.Tensor((d.batch, heads_v, d.tokens), fp32),
        A: inverse(config.inverse_blocks, d.batch, d.tokens, heads_v, config.dtype),
        query_norm: present(config.l2norm, (d.batch, heads_q, d.tokens)),
        key_norm: present(config.l2norm, (d.batch, heads_q, d.tokens)),
        cu_seqlens: present(config.packed, (d.bounds,), "int32"),
        order: present(config.packed, (d.sequences,), "int32"),
        initial_state: pool("initial", d.initial_pool, heads_v, config.initial_state),
        initial_rows: present(config.initial_state, (d.initial_entries,), "int32"),
        segment_states: present(
            config.segmented, (d.boundaries, d.batch, heads_v, HEAD_DIM, HEAD_DIM)
        ),
        output: T.Tensor((d.batch, d.tokens, heads_v, HEAD_DIM), config.dtype),
        final_state: pool("final", d.final_pool, heads_v, config.final_state),
        final_rows: present(config.final_state, (d.final_entries,), "int32"),
        kept_states: pool("kept", d.kept_pool, heads_v, config.kept_states),
        kept_starts: present(config.keeps_states, (d.kept_entries,), "int32"),
        scale: T.float32,
        flush_limit: T.float32,
        sequences: T.int32,
        cu_step: T.int32,
        order_step: T.int32,
        initial_step: T.int32,
        final_step: T.int32,
        kept_step: T.int32,
        in_place: T.int32,
        kept_every: T.int32,
        kept_after: T.int32,
        chunks_per_segment: T.int32,
        first_segment: T.int32,
        launched: T.int32,
        beside: T.int32,
    ):
        with T.Kernel(
            *(
                (slices * heads_v, sequences, launched)
                if config.segmented
                else (slices * heads_v * sequences, 1, 1)
            ),
            threads=config.threads,
            cluster_dims=config.cluster,
        ) as (block, row, number):
            segment = first_segment + number
            if config.packed:  # noqa: SIM102, one of them is of the kernel itself
                if order_step != 0:
                    TC.pdl_sync()  # the order is made by the launch that this one starts beside
            sequence = (
                row
                if config.segmented
                else entry(order, block // (slices * heads_v), order_step)
                if config.packed
                else block // (slices * heads_v)
            )
            tile = block if config.segmented else block % (slices * heads_v)
            # Names of the loads themselves: a condition on them stays one condition.
            begin = first_token(config, cu_seqlens, sequence, cu_step, segment, chunks_per_segment)
            length = tokens_from(
                config, cu_seqlens, sequence, cu_step, begin, d.tokens, chunks_per_segment
            )
            place = SimpleNamespace(
                batch=0 if config.packed else sequence,
                sequence=sequence,
                head=tile // slices,
                head_q=tile // slices // (heads_v // heads_q),
                dv=tile % slices * dv,
                segment=segment,
                segments=d.boundaries + 1,
                beside=beside,
                first=begin,
                tokens=length,
                record=T.truncdiv(begin, CHUNK) + sequence
                if config.packed
                else sequence * T.ceildiv(d.tokens, CHUNK),
                chunks=T.ceildiv(length, CHUNK),
                flush_limit=flush_limit,
                row=T.alloc_local((1,), "int32"),
                other_row=T.alloc_local((1,), "int32"),
                initial_step=initial_step,
                final_step=final_step,
                kept_step=kept_step,
                in_place=in_place,
                kept_every=kept_every,
                kept_after=kept_after,
            )
            inputs = SimpleNamespace(
                q=SegmentTokens(q, begin),
                k=SegmentTokens(k, begin),
                v=SegmentTokens(v, begin),
                a=A if config.inverse_blocks else SegmentTokens(A, begin),
                output=SegmentTokens(output, begin),
                gate=gate,
                beta=beta,
                query_norm=query_norm,
                key_norm=key_norm,
                initial_state=initial_state,
                initial_rows=initial_rows,
                segment_states=segment_states,
                final_state=final_state,
                final_rows=final_rows,
                kept_states=kept_states,
                kept_starts=kept_starts,
            )
            resident_cta(config, place, scale, inputs, HOOKS)

    return gdn_operator_forward
