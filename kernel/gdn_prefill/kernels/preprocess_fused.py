"""The gate's sums and the inverse A in one persistent kernel.

    g = inclusive cumulative sum of the log decay, restarted at every chunk
    A = (I + M)^-1,   M_ij = beta_i exp(g_i - g_j) <k_i, k_j> for i > j, else 0

An item is one chunk and four consecutive V heads, a head a warp; a CTA of four warps walks items
with a stride of the grid. In blocks of 16 rows, e_p being g at the end of block p and G = K K^T:

    G       one WGMMA for every q/k head among the four V heads
    T_pp    forward substitution in fp32, two columns a lane
    X_ij    = sum_{j<k<=i} U_ik G_kj exp(e_{k-1} - e_j),  U_ik = T_ik diag(beta exp(g - e_{k-1}))
    T_ij    = X_ij diag(exp(e_j - g)) (-T_jj)

X and T are 16x16x16 products of fp16 operands with fp32 accumulators. An accumulator's registers
are those of the next product's operand, so only T_jj, U_jj and G_kj come from shared memory. With
fp16 rather than bf16 operands the error of A stays that of rounding it to bf16, also for nearly
collinear keys, where a Neumann series would cancel.

Gates enter as exponentials of differences within a block, none positive. The substitution works on
halves of 8 rows: within a half the decay is left out and multiplied in afterwards, so that no
intermediate grows by more than 8 rows of undecayed keys however long the key vectors are.

Rows past T have beta = 0. Of A in rows the TMA stores drop them, and heads past Hv likewise; in a
record of blocks they are rows of the identity.

Two entries share this: ``fused_preprocess_kernel`` for the lab's g_cumsum and A, and
``operator_preprocess_kernel`` for the full operator, whose options are decided at compile time:

    gate, beta   ``activate`` makes the log decay and beta of what the model hands over
    l2norm       G is scaled by the keys' norms, which are its own diagonal, before it is rounded to
                 fp16; queries are only squared and summed
    packed       ``preprocess_packed`` finds the items; keys of the next sequence that a tail's load
                 brings along are zeroed, as 0 times NaN is not 0, and a tail of A in rows is stored
                 row by row
    inverse      A in rows is put together in shared memory; in blocks (inverse_blocks.py) only the
                 diagonal ones are, all ten are stored from registers
"""

import functools
from types import SimpleNamespace

import tilelang
import tilelang.cuda.language as TC
import tilelang.language as T
from tilelang.layout import make_full_bank_swizzled_layout, make_linear_layout

from .inverse_blocks import BLOCK, BLOCKS, ORDER, addressed, record_count, store_block
from .parameters import inverse, vectors
from .preprocess import (
    CHUNK,
    FORGETS,
    FORGOTTEN,
    HEAD_DIM,
    LOG2_E,
    THREADS,
    OperatorPreprocessConfig,
    PreprocessConfig,
)
from .preprocess_packed import WARP, find, order_sequences, share_sequences

SLOTS = THREADS // WARP  # V heads of an item, one a warp

HALF = 8  # rows of a block between two multiplications by the decay
LANES = WARP // BLOCKS  # lanes of a diagonal block
COLUMNS = BLOCK // LANES  # columns of a block that a lane solves for
TOKENS = CHUNK // WARP  # tokens of a lane in the gate's scan
# Blocks below the diagonal, in the order of their index i (i - 1) / 2 + j.
LOWER = tuple((i, j) for i in range(BLOCKS) for j in range(i))
FRAGMENT = BLOCK * BLOCK // WARP  # elements of a 16x16 block that a lane holds
GRAM_STRIDE = BLOCK * BLOCK + 4  # fp32 diagonal blocks, apart by 4 banks

OPERAND = "float16"

# What the gate and beta of a token past the end are read as: no decay, and beta 0.
ABSENT_GATE = {"log": 0.0, "linear": 1.0, "raw": -1.0e4}
ABSENT_BETA = {"plain": 0.0, "sigmoid": -1.0e4, "twice_sigmoid": -1.0e4}

L2_EPSILON = 1.0e-6
VECTOR = 8  # 16-bit elements of one access
QUERY_LANES = 4  # threads that square a row of q together
QUERY_ROWS = THREADS // QUERY_LANES  # rows at a time
QUERY_LAPS = CHUNK // QUERY_ROWS
QUERY_PIECES = HEAD_DIM // (QUERY_LANES * VECTOR)

# Warps and the two block-wide syncs order the shared memory; reuse of it would need more of them.
PASS_CONFIGS = {
    tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True,
    tilelang.PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True,
    tilelang.PassConfigKey.TL_DISABLE_SHARED_MEMORY_REUSE: True,
    tilelang.PassConfigKey.TL_DISABLE_SAFE_MEMORY_ACCESS: True,
}


def head_groups(heads_v: int) -> int:
    """Items of a chunk."""
    return -(-heads_v // SLOTS)


@functools.lru_cache(maxsize=256)
def key_tiles(config: PreprocessConfig) -> int:
    """Most q/k heads that the V heads of one item belong to."""
    spans = []
    for first in range(0, config.heads_v, SLOTS):
        last = min(first + SLOTS, config.heads_v) - 1
        spans.append(last // config.group - first // config.group + 1)
    return max(spans)


def key_stages(tiles: int) -> int:
    """Key tiles held in shared memory; divides their number, so that a tile's stage is static."""
    return 2 if tiles % 2 == 0 else 1


def blocks_per_sm(config: PreprocessConfig) -> int:
    """CTAs that an SM's shared memory holds: 62 KiB each with one key tile, 85 to 99 with more."""
    return 3 if key_tiles(config) == 1 else 2


def grid(
    config: PreprocessConfig, batch: int, tokens: int, sm_count: int, sequences: int | None = None
) -> int:
    """CTAs to launch: all items at once, or what the device holds at a time.

    sequences: of a packed batch; the items are then as many as that number of sequences with that
    many tokens could have, and the last CTA has none of them: it orders the sequences.
    """
    room = sm_count * blocks_per_sm(config)
    items = record_count(batch, tokens, sequences) * head_groups(config.heads_v)
    return min(items, room) if sequences is None else min(items, room - 1) + 1


def walkers(config, ctas):
    """CTAs that have items: of a packed batch the last one orders the sequences instead."""
    return ctas - 1 if config.packed else ctas


def below(i: int, j: int) -> int:
    """First register of block (i, j) below the diagonal."""
    return (i * (i - 1) // 2 + j) * FRAGMENT


@T.macro
def locate(config, item, groups, chunks, found, slot, place):
    """place = (row of the batch, first token, group of V heads, record of A) of an item.

    Of packed items the end of the sequence instead of the row: found holds (first token, end,
    record) in two slots. A dense batch has none, its sequences all end with the tokens.
    """
    chunk = T.truncdiv(item, groups)
    if config.packed:
        place[1] = found[slot, 0]
        place[0] = found[slot, 1]
        place[3] = found[slot, 2]
    else:
        place[0] = T.truncdiv(chunk, chunks)
        place[1] = (chunk - place[0] * chunks) * CHUNK
        place[3] = chunk
    place[2] = item - chunk * groups


def at(config, place, tokens) -> SimpleNamespace:
    """The scalars of a place by name."""
    return SimpleNamespace(
        row=0 if config.packed else place[0],
        first=place[1],
        group=place[2],
        record=place[3],
        end=place[0] if config.packed else tokens,
    )


def exists(config, head):
    """Is this a V head at all: an item may have fewer than it has warps."""
    return True if config.heads_v % SLOTS == 0 else head < config.heads_v


@T.macro
def fetch_keys(config, k, tiles, k_loaded, place, tile, stage):
    """Start loading the keys of the tile-th q/k head of an item."""
    head = T.truncdiv(place.group * SLOTS, config.group) + tile
    T.tma_copy(
        k[place.row, place.first : place.first + CHUNK, head, 0:HEAD_DIM],
        tiles.k[stage, :, :],
        barrier=k_loaded[stage],
    )
    T.barrier_arrive(k_loaded[stage])


@T.macro
def drop_neighbours(place, tiles, stage):
    """Zero the keys of the next sequence that came along with a tail."""
    if place.end - place.first < CHUNK:
        for i, j in T.Parallel(CHUNK, HEAD_DIM):
            if i >= place.end - place.first:
                tiles.k[stage, i, j] = 0
        T.fence_proxy_async()
        T.sync_threads()


@T.macro
def fetch_gates(config, inputs, place, warp, lane, raw):
    """raw = gate and beta of this lane's tokens, as they are given."""
    head = place.group * SLOTS + warp
    first = place.first + lane * TOKENS
    for v in T.unroll(TOKENS):
        raw.g[v] = ABSENT_GATE[config.gate]
        raw.beta[v] = ABSENT_BETA[config.beta]
        if first + v < place.end and exists(config, head):
            raw.g[v] = inputs.g[place.row, first + v, head]
            raw.beta[v] = inputs.beta[place.row, first + v, head]
    if config.gate == "raw":
        raw.A_log[0] = 0.0
        raw.dt_bias[0] = 0.0
        if exists(config, head):
            raw.A_log[0] = inputs.A_log[head]
            if config.dt_bias:
                raw.dt_bias[0] = inputs.dt_bias[head]


@T.macro
def activate(config, raw, gates):
    """gates = (log decay, beta) of this lane's tokens."""
    for v in T.unroll(TOKENS):
        if config.gate == "log":
            gates[v] = T.cast(raw.g[v], "float32")
        elif config.gate == "linear":
            # fast math's logarithm has no digits left near 1, where decays are
            gates[v] = T.if_then_else(
                T.cast(raw.g[v], "float32") > 0.5,
                T.log1p(T.cast(raw.g[v], "float32") - 1.0),
                T.log(T.cast(raw.g[v], "float32")),
            )
        else:
            # -exp(A_log) softplus(x), softplus(x) = max(x, 0) + log(1 + exp(-|x|))
            gates[v] = T.cast(raw.g[v], "float32") + raw.dt_bias[0]
            gates[v] = -T.exp2(raw.A_log[0] * LOG2_E) * (
                T.max(gates[v], 0.0) + T.log1p(T.exp2(-T.abs(gates[v]) * LOG2_E))
            )
        gates[v] = T.if_then_else(gates[v] < FORGETS, FORGOTTEN, gates[v])
        if config.beta == "plain":
            gates[TOKENS + v] = T.cast(raw.beta[v], "float32")
        else:
            gates[TOKENS + v] = (2.0 if config.beta == "twice_sigmoid" else 1.0) / (
                1.0 + T.exp2(-T.cast(raw.beta[v], "float32") * LOG2_E)
            )


@T.macro
def scan_gates(tiles, warp, lane, gates, scan, span_decay):
    """Sums of one head's gate, and the factors that carry it into the blocks.

    Leaves the sums in the first TOKENS of scan.

    Lanes of a block scan it by themselves; the ends of the blocks before are added afterwards.
    """
    token = warp * CHUNK + lane * TOKENS
    # scan = (sum up to and with this lane, shuffled), then the sums of its two tokens in the block
    scan[0] = gates[0] + gates[1]
    for distance in (1, 2, 4):
        scan[1] = T.shfl_up(scan[0], distance, LANES)
        if lane % LANES >= distance:
            scan[0] = scan[0] + scan[1]
    scan[1] = T.shfl_up(scan[0], 1, LANES)
    if lane % LANES == 0:
        scan[1] = 0.0
    scan[0] = scan[1] + gates[0]
    scan[1] = scan[0] + gates[1]
    scan[2] = T.shfl_sync(scan[1], lane // LANES * LANES + LANES - 1)
    scan[3] = 0.0
    for p in tuple(range(BLOCKS - 1)):
        scan[4] = T.shfl_sync(scan[1], p * LANES + LANES - 1)
        if lane // LANES > p:
            scan[3] = scan[3] + scan[4]
        if p > 0:
            span_decay[p] = T.exp2(scan[4] * LOG2_E)
    for v in T.unroll(TOKENS):
        tiles.beta[token + v] = gates[TOKENS + v]
        tiles.decay[token + v] = T.exp2(gates[v] * LOG2_E)
        tiles.row_factor[token + v] = T.exp2(scan[v] * LOG2_E) * gates[TOKENS + v]
        tiles.column_factor[token + v] = T.exp2((scan[2] - scan[v]) * LOG2_E)
        scan[v] = scan[3] + scan[v]


def owns(config, place, head):
    """Is the first V head of this q/k head in the item: then the item writes the head's norms."""
    slot = head * config.group - place.group * SLOTS
    return T.And(T.And(slot >= 0, slot < SLOTS), head < config.heads_q)


@T.macro
def share_squares(tiles, gram_fragment, tile):
    """The diagonal of K K^T, what the norms of the keys are made of."""
    for i, j in T.Parallel(CHUNK, CHUNK):
        if i == j:
            tiles.squares[tile, i] = gram_fragment[i, j]


@T.macro
def normalise_gram(tiles, gram_fragment, tile):
    """K K^T of keys of unit length: at most 1, whatever the keys were."""
    for i, j in T.Parallel(CHUNK, CHUNK):
        gram_fragment[i, j] = gram_fragment[i, j] * (
            T.rsqrt(tiles.squares[tile, i] + L2_EPSILON)
            * T.rsqrt(tiles.squares[tile, j] + L2_EPSILON)
        )


@T.macro
def store_norm(config, norms, place, head, token, square):
    """norms at a token of a q/k head = 1 / sqrt(square + 1e-6)."""
    if config.layout == "time":
        norms[place.row, head, token] = T.rsqrt(square + L2_EPSILON)
    else:
        norms[place.row, token, head] = T.rsqrt(square + L2_EPSILON)


@T.macro
def store_key_norms(config, outputs, place, thread, tiles, tile):
    """A thread a token of the tile-th q/k head of an item."""
    head = T.truncdiv(place.group * SLOTS, config.group) + tile
    token = place.first + thread
    if thread < CHUNK and token < place.end and owns(config, place, head):
        store_norm(config, outputs.key_norm, place, head, token, tiles.squares[tile, thread])


@T.macro
def fetch_queries(config, q, place, thread, tile, elements):
    """elements = this thread's part of the tile-th q/k head's queries, four threads a row."""
    head = T.truncdiv(place.group * SLOTS, config.group) + tile
    row = place.first + thread // QUERY_LANES
    if owns(config, place, head):
        for lap in tuple(range(QUERY_LAPS)):
            for piece in tuple(range(QUERY_PIECES)):
                for v in T.vectorized(VECTOR):
                    elements[(lap * QUERY_PIECES + piece) * VECTOR + v] = q[
                        place.row,
                        T.min(row + lap * QUERY_ROWS, place.end - 1),
                        head,
                        (piece * QUERY_LANES + thread % QUERY_LANES) * VECTOR + v,
                    ]


@T.macro
def store_query_norms(config, query_norm, place, thread, tile, elements, square):
    """Square what fetch_queries has loaded; square is a scalar of the thread."""
    head = T.truncdiv(place.group * SLOTS, config.group) + tile
    token = place.first + thread // QUERY_LANES
    if owns(config, place, head):
        for lap in tuple(range(QUERY_LAPS)):
            square[0] = 0.0
            for e in T.unroll(QUERY_PIECES * VECTOR):
                square[0] += T.cast(elements[lap * QUERY_PIECES * VECTOR + e], "float32") * T.cast(
                    elements[lap * QUERY_PIECES * VECTOR + e], "float32"
                )
            for distance in (1, 2):
                square[0] = square[0] + T.shfl_xor(square[0], distance)
            if thread % QUERY_LANES == 0 and token + lap * QUERY_ROWS < place.end:
                store_norm(config, query_norm, place, head, token + lap * QUERY_ROWS, square[0])


@T.macro
def share_gram(tiles, gram_fragment, gram_half_fragment, tile):
    """K K^T to shared memory: diagonal blocks in fp32, those below in fp16."""
    for i, j in T.Parallel(CHUNK, CHUNK):
        if i // BLOCK == j // BLOCK:
            tiles.gram_diagonal[tile, i // BLOCK * GRAM_STRIDE + i % BLOCK * BLOCK + j % BLOCK] = (
                gram_fragment[i, j]
            )
    T.copy(gram_fragment, gram_half_fragment)
    for i, j in T.Parallel(CHUNK, CHUNK):
        if i // BLOCK > j // BLOCK:
            tiles.gram_below[
                tile,
                (i // BLOCK * (i // BLOCK - 1) // 2 + j // BLOCK) * BLOCK * BLOCK
                + i % BLOCK * BLOCK
                + (j % BLOCK // 8 + i % 8 // 4) % 2 * 8
                + j % 8,
            ] = gram_half_fragment[i, j]


@T.macro
def store_gates(config, outputs, place, warp, lane, gates, sums):
    """The sums and beta of this lane's tokens."""
    head = place.group * SLOTS + warp
    first = place.first + lane * TOKENS
    for v in T.unroll(TOKENS):
        if first + v < place.end and exists(config, head):
            if config.layout == "time":
                outputs.gate[place.row, head, first + v] = sums[v]
                outputs.beta[place.row, head, first + v] = gates[TOKENS + v]
            else:
                outputs.gate[place.row, first + v, head] = sums[v]
                outputs.beta[place.row, first + v, head] = gates[TOKENS + v]


@T.macro
def share_sums(tiles, warp, lane, parity, sums):
    for v in T.unroll(TOKENS):
        tiles.sums[parity, warp * CHUNK + lane * TOKENS + v] = sums[v]


@T.macro
def store_sums(config, g_cumsum, place, thread, tiles, parity, pair):
    """The sums of the four heads, tokens side by side: a thread a token and two heads."""
    token = place.first + thread // 2
    slot = thread % 2 * 2
    if token < place.end:
        for v in T.unroll(2):
            pair[v] = tiles.sums[parity, (slot + v) * CHUNK + thread // 2]
        # the head written out: bound to a name, TileLang would not see that it is even
        if config.heads_v % SLOTS == 0:
            for v in T.vectorized(2):
                g_cumsum[place.row, token, place.group * SLOTS + slot + v] = pair[v]
        else:
            for v in T.unroll(2):
                if place.group * SLOTS + slot + v < config.heads_v:
                    g_cumsum[place.row, token, place.group * SLOTS + slot + v] = pair[v]


@T.macro
def solve_diagonal(config, tiles, warp, lane, tile, regs):
    """T_pp row after row: T[i] = e_i - beta_i sum_j<i G_ij exp(g_i - g_j) T[j].

    Writes T_pp to A's tile, and -T_pp and U_pp by columns into blocks of that tile which are still
    free, as fp16 operands.
    """
    p = lane // LANES
    column = lane % LANES * COLUMNS
    top = warp * CHUNK + p * BLOCK
    for q in T.unroll(BLOCK // 4):
        for v in T.vectorized(4):
            regs.beta[q * 4 + v] = tiles.beta[top + q * 4 + v]
        for v in T.vectorized(4):
            regs.decay[q * 4 + v] = tiles.decay[top + q * 4 + v]
    for half in (0, 1):
        for i in tuple(range(half * HALF, half * HALF + HALF)):
            for q in T.unroll((i + 3) // 4):
                for v in T.vectorized(4):
                    regs.gram[q * 4 + v] = tiles.gram_diagonal[
                        tile, p * GRAM_STRIDE + i * BLOCK + q * 4 + v
                    ]
            for u in T.unroll(COLUMNS):
                regs.total[u] = 0.0
            for j in T.unroll(i):
                for u in T.unroll(COLUMNS):
                    regs.total[u] += regs.gram[j] * regs.solved[u * BLOCK + j]
            for u in T.unroll(COLUMNS):
                regs.solved[u * BLOCK + i] = (
                    T.if_then_else(column + u == i, 1.0, 0.0) - regs.beta[i] * regs.total[u]
                )
        # the decay from the first row of the half, or from the column's own row if it is later
        for u in T.unroll(COLUMNS):
            regs.ratio[u] = 1.0
        for i in tuple(range(HALF)):
            for u in T.unroll(COLUMNS):
                regs.ratio[u] = T.if_then_else(
                    half * HALF + i > column + u, regs.ratio[u] * regs.decay[half * HALF + i], 1.0
                )
                regs.gated[u * HALF + i] = regs.solved[u * BLOCK + half * HALF + i] * regs.ratio[u]
                regs.out[u] = T.cast(regs.gated[u * HALF + i], config.dtype)
            for u in T.vectorized(COLUMNS):
                tiles.a[top + half * HALF + i, p * BLOCK + column + u] = regs.out[u]
        if half == 0:
            for u in T.unroll(COLUMNS):
                for j in T.unroll(HALF):
                    regs.solved[u * BLOCK + j] = regs.solved[u * BLOCK + j] * regs.ratio[u]
        for u in T.unroll(COLUMNS):
            if p < BLOCKS - 1:
                for i in T.unroll(HALF):
                    regs.half[i] = T.cast(-regs.gated[u * HALF + i], OPERAND)
                for v in T.vectorized(HALF):
                    tiles.a[top + BLOCK + column + u, p * BLOCK + half * HALF + v] = regs.bits[v]
            if p > 0:
                regs.factor[0] = tiles.row_factor[top + column + u]
                for i in T.unroll(HALF):
                    regs.half[i] = T.cast(regs.gated[u * HALF + i] * regs.factor[0], OPERAND)
                # U_11, U_22, U_33 wait in blocks (2, 0), (3, 0), (3, 1)
                for v in T.vectorized(HALF):
                    tiles.a[
                        warp * CHUNK + (2 + p // 2 - p // 4) * BLOCK + column + u,
                        p // 3 * BLOCK + half * HALF + v,
                    ] = regs.bits[v]


@T.macro
def load_block(tiles_a, row, column, transposed, registers, offset):
    """A 16x16 block, lane addresses given, into the four registers of an operand."""
    T.ptx_ldmatrix(
        T.bool(transposed),
        4,
        T.access_ptr(tiles_a[row, column], "r", extent=8),
        T.access_ptr(registers[offset], "w", extent=8),
    )


@T.macro
def multiply(left, left_offset, right, right_offset, sums, sums_offset):
    """sums += left right for 16x16 blocks, two products of 8 columns."""
    for n in (0, 1):
        T.ptx_mma(
            "float32", "m16n8k16", "row", "col", "fp16", "fp16", "fp32",
            left.data, left_offset, right.data, right_offset + n * FRAGMENT // 2,
            sums.data, sums_offset + n * FRAGMENT // 2, T.bool(False),
        )  # fmt: skip


@T.macro
def merge_blocks(config, tiles, warp, lane, tile, span_decay, regs):
    """T_ij for all i > j, diagonal after diagonal, from T_jj, U_ii and G, left in registers."""
    top = warp * CHUNK
    by_row = lane // 8 % 2 * 8 + lane % 8
    by_column = lane // 16 * 8 + lane % 8
    by_column_row = lane // 8 % 2 * 8
    for i in (1, 2, 3):
        load_block(
            tiles.a,
            top + (2 + i // 2 - i // 4) * BLOCK + by_column,
            i // 3 * BLOCK + by_column_row,
            True,
            regs.own,
            (i - 1) * FRAGMENT,
        )
    for j in (0, 1, 2):
        load_block(
            tiles.a,
            top + (j + 1) * BLOCK + by_column,
            j * BLOCK + by_column_row,
            False,
            regs.inverse,
            j * FRAGMENT,
        )
    for i, j in LOWER:
        T.ptx_ldmatrix(
            T.bool(True),
            4,
            T.access_ptr(
                tiles.gram_below[
                    tile,
                    below(i, j) * WARP + by_row * BLOCK + (lane // 16 + by_row % 8 // 4) % 2 * 8,
                ],
                "r",
                extent=8,
            ),
            T.access_ptr(regs.gram_below[below(i, j)], "w", extent=8),
        )
    for j in (0, 1, 2):
        for e in T.unroll(FRAGMENT // 2):
            regs.column_factor[j * (FRAGMENT // 2) + e] = tiles.column_factor[
                top + j * BLOCK + e // 2 * 8 + lane % 4 * 2 + e % 2
            ]
            regs.row_factor[j * (FRAGMENT // 2) + e] = tiles.row_factor[
                top + j * BLOCK + e // 2 * 8 + lane % 4 * 2 + e % 2
            ]
    for i in T.unroll(len(LOWER) * FRAGMENT):
        regs.x[i] = 0.0
        regs.t[i] = 0.0
    # X_ij = U_ii G_ij, the farthest term of each sum
    for i, j in LOWER:
        multiply(regs.own, (i - 1) * FRAGMENT, regs.gram_below, below(i, j), regs.x, below(i, j))
    for distance in (1, 2, 3):
        for i, j in LOWER:
            if i - j == distance:
                # T_ij = X_ij diag(exp(e_j - g)) (-T_jj)
                for e in T.unroll(FRAGMENT):
                    regs.left[e] = T.cast(
                        regs.x[below(i, j) + e]
                        * regs.column_factor[j * (FRAGMENT // 2) + e // 4 * 2 + e % 2],
                        OPERAND,
                    )
                multiply(regs.left, 0, regs.inverse, j * FRAGMENT, regs.t, below(i, j))
                if j > 0:
                    # U_ij = T_ij diag(beta exp(g - e_{j-1}))
                    for e in T.unroll(FRAGMENT):
                        regs.u[below(i, j) + e] = T.cast(
                            regs.t[below(i, j) + e]
                            * regs.row_factor[j * (FRAGMENT // 2) + e // 4 * 2 + e % 2],
                            OPERAND,
                        )
        # X_ij = X_ij exp(e_k - e_{k-1}) + U_ik G_kj for the block k nearer by one
        for i, j in LOWER:
            if i - j > distance:
                for e in T.unroll(FRAGMENT):
                    regs.x[below(i, j) + e] = regs.x[below(i, j) + e] * span_decay[i - distance]
                multiply(
                    regs.u,
                    below(i, i - distance),
                    regs.gram_below,
                    below(i - distance, j),
                    regs.x,
                    below(i, j),
                )


@T.macro
def stage_merged(config, tiles, warp, lane, regs):
    """T_ij for all i > j into A's tile, beside the diagonal that is there."""
    T.sync_warp()
    for i, j in LOWER:
        for e in T.unroll(FRAGMENT):
            regs.row[e] = T.cast(regs.t[below(i, j) + e], config.dtype)
        row, column = addressed(i, j, lane, warp * CHUNK)
        store_block(tiles.a, (row, column), regs.row_words, 0)
    T.fence_proxy_async()
    T.sync_warp()


@T.macro
def store_record(config, A, tiles, place, warp, lane, regs):
    """All ten blocks of this warp's head, those on the diagonal by way of A's tile."""
    head = place.group * SLOTS + warp
    if exists(config, head):
        for number, (i, j) in enumerate(ORDER):
            if i == j:
                load_block(
                    tiles.a,
                    *addressed(i, i, lane, warp * CHUNK),
                    False,
                    regs.row,
                    0,
                )
            else:
                for e in T.unroll(FRAGMENT):
                    regs.row[e] = T.cast(regs.t[below(i, j) + e], config.dtype)
            for e in T.vectorized(FRAGMENT):
                A[place.record, head, number, lane * FRAGMENT + e] = regs.row[e]
    T.sync_warp()


@T.macro
def store_tail(config, A, tiles, place, warp, lane):
    """The valid rows of this warp's head only: the rows after them are another sequence's."""
    head = place.group * SLOTS + warp
    lanes = CHUNK // VECTOR
    for lap in T.serial(CHUNK * lanes // WARP):
        row = lap * (WARP // lanes) + lane // lanes
        if place.first + row < place.end and exists(config, head):
            for v in T.vectorized(VECTOR):
                A[place.row, place.first + row, head, lane % lanes * VECTOR + v] = tiles.a[
                    warp * CHUNK + row, lane % lanes * VECTOR + v
                ]


@T.macro
def preprocess_items(config, inputs, outputs, batch, tokens, sequences, block, ctas):
    """All items of a CTA.

    inputs: q, k, g, beta, A_log, dt_bias, cu_seqlens; outputs: A and gate, beta, query_norm,
    key_norm, order, or sums alone: the gate's sums token by token as the lab's entry wants them.
    """
    heads_v, group = config.heads_v, config.group
    groups = head_groups(heads_v)
    key_count = key_tiles(config)
    stages = key_stages(key_count)
    dtype, fp32 = config.dtype, "float32"

    T.annotate_min_blocks_per_sm(blocks_per_sm(config))
    tiles = SimpleNamespace(
        k=T.alloc_shared((stages, CHUNK, HEAD_DIM), dtype),
        a=T.alloc_shared((SLOTS * CHUNK, CHUNK), dtype),
        gram_diagonal=T.alloc_shared((key_count, BLOCKS * GRAM_STRIDE), fp32),
        gram_below=T.alloc_shared((key_count, len(LOWER) * BLOCK * BLOCK), OPERAND),
        beta=T.alloc_shared((SLOTS * CHUNK,), fp32),
        decay=T.alloc_shared((SLOTS * CHUNK,), fp32),
        row_factor=T.alloc_shared((SLOTS * CHUNK,), fp32),
        column_factor=T.alloc_shared((SLOTS * CHUNK,), fp32),
        sums=None if outputs.sums is None else T.alloc_shared((2, SLOTS * CHUNK), fp32),
        squares=T.alloc_shared((key_count, CHUNK), fp32) if config.l2norm else None,
        # packed: chunks of each warp's sequences; first token, end and record of the items at hand
        totals=T.alloc_shared((SLOTS,), "int32") if config.packed else None,
        found=T.alloc_shared((2, 3), "int32") if config.packed else None,
    )
    T.annotate_layout(
        {
            tiles.a: make_full_bank_swizzled_layout(tiles.a),
            tiles.gram_diagonal: make_linear_layout(tiles.gram_diagonal),
            tiles.gram_below: make_linear_layout(tiles.gram_below),
        }
    )
    k_loaded = T.alloc_barrier([THREADS] * stages)
    gram_fragment = T.alloc_fragment((CHUNK, CHUNK), fp32)
    gram_half_fragment = T.alloc_fragment((CHUNK, CHUNK), OPERAND)
    half = T.alloc_local((HALF,), OPERAND)
    row = T.alloc_local((FRAGMENT,), dtype)
    regs = SimpleNamespace(
        # substitution
        beta=T.alloc_local((BLOCK,), fp32),
        decay=T.alloc_local((BLOCK,), fp32),
        gram=T.alloc_local((BLOCK,), fp32),
        total=T.alloc_local((COLUMNS,), fp32),
        solved=T.alloc_local((COLUMNS * BLOCK,), fp32),
        ratio=T.alloc_local((COLUMNS,), fp32),
        gated=T.alloc_local((COLUMNS * HALF,), fp32),
        factor=T.alloc_local((1,), fp32),
        out=T.alloc_local((COLUMNS,), dtype),
        half=half,
        bits=T.view(half, (HALF,), dtype),
        # merges: operands, then accumulators
        own=T.alloc_local((3 * FRAGMENT,), OPERAND),
        inverse=T.alloc_local((3 * FRAGMENT,), OPERAND),
        gram_below=T.alloc_local((len(LOWER) * FRAGMENT,), OPERAND),
        u=T.alloc_local((len(LOWER) * FRAGMENT,), OPERAND),
        left=T.alloc_local((FRAGMENT,), OPERAND),
        column_factor=T.alloc_local((3 * FRAGMENT // 2,), fp32),
        row_factor=T.alloc_local((3 * FRAGMENT // 2,), fp32),
        x=T.alloc_local((len(LOWER) * FRAGMENT,), fp32),
        t=T.alloc_local((len(LOWER) * FRAGMENT,), fp32),
        row=row,
        row_words=T.view(row, (FRAGMENT // 2,), "int32"),
    )
    raw = SimpleNamespace(
        g=T.alloc_local((TOKENS,), config.gate_dtype),
        beta=T.alloc_local((TOKENS,), config.beta_dtype),
        A_log=T.alloc_local((1,), fp32),
        dt_bias=T.alloc_local((1,), fp32),
    )
    query = SimpleNamespace(
        elements=T.alloc_local((QUERY_LAPS * QUERY_PIECES * VECTOR,), dtype),
        square=T.alloc_local((1,), fp32),
    )
    search = SimpleNamespace(
        **{
            name: T.alloc_local((1,), "int32")
            for name in ("first", "last", "sequence", "begin", "end", "chunk", "other")
        }
    )
    ordering = SimpleNamespace(
        **{
            name: T.alloc_local((1,), "int32")
            for name in ("mine", "position", "begun", "member", "length", "least", "below")
        }
    )
    gates = T.alloc_local((2 * TOKENS,), fp32)
    scan = T.alloc_local((5,), fp32)
    span_decay = T.alloc_local((BLOCKS,), fp32)
    zeros = T.alloc_local((4,), "int32")
    here_local = T.alloc_local((4,), "int32")
    ahead_local = T.alloc_local((4,), "int32")
    here, ahead = at(config, here_local, tokens), at(config, ahead_local, tokens)
    thread = T.get_thread_binding()
    warp = thread // WARP
    lane = thread % WARP
    chunks = T.ceildiv(tokens, CHUNK)
    steps, tile = T.alloc_var("int32"), T.alloc_var("int32")
    if config.packed:
        share_sequences(inputs.cu_seqlens, sequences, thread, search, tiles.totals)
        steps = T.truncdiv(
            (tiles.totals[0] + tiles.totals[1] + tiles.totals[2] + tiles.totals[3]) * groups
            - block
            + walkers(config, ctas)
            - 1,
            walkers(config, ctas),
        )
        find(inputs.cu_seqlens, T.truncdiv(block, groups), search, tiles.found, 0)
        T.sync_threads()
        if block == walkers(config, ctas):
            steps = 0
            order_sequences(
                *(inputs.cu_seqlens, sequences, tokens, thread, ordering),
                *(tiles.totals, outputs.order),
            )
    else:
        steps = T.truncdiv(batch * chunks * groups - block + ctas - 1, ctas)

    # a dense batch is never launched with more CTAs than items
    if not config.packed or steps > 0:
        locate(config, block, groups, chunks, tiles.found, 0, here_local)
        for stage in tuple(range(stages)):
            fetch_keys(config, inputs.k, tiles, k_loaded, here, stage, stage)
        fetch_gates(config, inputs, here, warp, lane, raw)
    if config.inverse == "rows":
        # the blocks above the diagonal stay zero
        for i in T.unroll(4):
            zeros[i] = 0
        for i, j in LOWER:
            row, column = addressed(j, i, lane, warp * CHUNK)
            store_block(tiles.a, (row, column), zeros, 0)

    for step in T.serial(steps):
        following = block + (step + 1) * walkers(config, ctas)
        slot = (step + 1) % 2
        if config.packed:
            find(inputs.cu_seqlens, T.truncdiv(following, groups), search, tiles.found, slot)
        else:
            locate(config, following, groups, chunks, tiles.found, slot, ahead_local)
        if config.l2norm:
            fetch_queries(config, inputs.q, here, thread, 0, query.elements)
        activate(config, raw, gates)
        scan_gates(tiles, warp, lane, gates, scan, span_decay)
        if outputs.sums is not None:
            share_sums(tiles, warp, lane, step % 2, scan)
        else:
            store_gates(config, outputs, here, warp, lane, gates, scan)
        if config.l2norm:
            for key in tuple(range(key_count)):
                store_query_norms(
                    config, outputs.query_norm, here, thread, key, query.elements, query.square
                )
                if key + 1 < key_count:
                    fetch_queries(config, inputs.q, here, thread, key + 1, query.elements)
        for key in tuple(range(key_count)):
            T.barrier_wait(
                k_loaded[key % stages],
                (step * (key_count // stages) + key // stages) % 2,
            )
            if config.packed:
                drop_neighbours(here, tiles, key % stages)
            # G = K K^T
            T.gemm(
                tiles.k[key % stages, :, :],
                tiles.k[key % stages, :, :],
                gram_fragment,
                transpose_B=True,
                clear_accum=True,
            )
            if config.l2norm:
                share_squares(tiles, gram_fragment, key)
            # every warp is done with these keys, and with the blocks of the item before
            T.sync_threads()
            if config.packed and key == 0 and step + 1 < steps:
                locate(config, following, groups, chunks, tiles.found, slot, ahead_local)
            if key + stages < key_count:
                fetch_keys(config, inputs.k, tiles, k_loaded, here, key + stages, key % stages)
            elif step + 1 < steps:
                fetch_keys(
                    config,
                    inputs.k,
                    tiles,
                    k_loaded,
                    ahead,
                    key + stages - key_count,
                    key % stages,
                )
            if config.l2norm:
                normalise_gram(tiles, gram_fragment, key)
                store_key_norms(config, outputs, here, thread, tiles, key)
            share_gram(tiles, gram_fragment, gram_half_fragment, key)
        if step + 1 < steps:
            fetch_gates(config, inputs, ahead, warp, lane, raw)
        T.sync_threads()
        if outputs.sums is not None:
            store_sums(config, outputs.sums, here, thread, tiles, step % 2, scan)
        head = here.group * SLOTS + warp
        if key_count > 1:
            tile = T.truncdiv(head, group) - T.truncdiv(here.group * SLOTS, group)
            tile = T.min(tile, key_count - 1)
        if config.inverse == "rows":
            T.tma_store_wait(0)
            T.sync_warp()
        solve_diagonal(config, tiles, warp, lane, tile if key_count > 1 else 0, regs)
        T.sync_warp()
        merge_blocks(config, tiles, warp, lane, tile if key_count > 1 else 0, span_decay, regs)
        if config.inverse == "blocks":
            store_record(config, outputs.A, tiles, here, warp, lane, regs)
        else:
            stage_merged(config, tiles, warp, lane, regs)
            if not config.packed or here.first + CHUNK <= here.end:
                T.tma_copy(
                    tiles.a[warp * CHUNK : warp * CHUNK + CHUNK, :],
                    outputs.A[here.row, here.first : here.first + CHUNK, head, 0:CHUNK],
                    leader_scope_threads=WARP,
                )
            else:
                store_tail(config, outputs.A, tiles, here, warp, lane)
        if not config.packed or step + 1 < steps:
            for i in T.unroll(4):
                here_local[i] = ahead_local[i]
    if config.inverse == "rows":
        T.tma_store_wait(0)


def fused_preprocess_kernel(config: PreprocessConfig):
    """PrimFunc(k, g, beta, g_cumsum, A, ctas): both results in one launch of ``grid`` CTAs.

    k [B, T, Hq, 128] bf16; g (raw log decay) and beta [B, T, Hv] fp32; g_cumsum [B, T, Hv] fp32 and
    A [B, T, Hv, 64] bf16, written.
    """
    batch, tokens = T.dynamic("batch"), T.dynamic("tokens")
    heads_q, heads_v = config.heads_q, config.heads_v
    plain = OperatorPreprocessConfig(heads_q, heads_v)
    bf16, fp32 = "bfloat16", "float32"

    @T.prim_func
    def gdn_preprocess(
        k: T.Tensor((batch, tokens, heads_q, HEAD_DIM), bf16),
        g: T.Tensor((batch, tokens, heads_v), fp32),
        beta: T.Tensor((batch, tokens, heads_v), fp32),
        g_cumsum: T.Tensor((batch, tokens, heads_v), fp32),
        A: T.Tensor((batch, tokens, heads_v, CHUNK), bf16),
        ctas: T.int32,
    ):
        with T.Kernel(ctas, threads=THREADS) as (block,):
            TC.pdl_trigger()  # the forward kernel waits for this one's end by itself
            inputs = SimpleNamespace(k=k, g=g, beta=beta)
            outputs = SimpleNamespace(A=A, sums=g_cumsum)
            preprocess_items(plain, inputs, outputs, batch, tokens, 0, block, ctas)

    return gdn_preprocess


def operator_preprocess_kernel(config: OperatorPreprocessConfig):
    """PrimFunc(q, k, g, beta, A_log, dt_bias, cu_seqlens, A, gate, beta_out, query_norm, key_norm,
    order, ctas): stage one of the operator in one launch of ``grid`` CTAs.

    q, k [B, T, Hq, 128] and A [B, T, Hv, 64] or records of it, written, in config.dtype; g and beta
    [B, T, Hv] in their dtypes; A_log, dt_bias [Hv] fp32; cu_seqlens [N + 1]; gate (the natural
    logarithm of the decay, summed within every chunk of a sequence) and beta_out [B, Hv, T] fp32,
    query_norm and key_norm [B, Hq, T] fp32, written. With config.strided q and k have a token
    stride each, a batch stride of T of those, and heads 128 apart. What an option that is off would
    need is a one-element fp32 dummy. Rows past the last sequence are left alone. order [N] int32,
    written with cu_seqlens: the sequences in the order in which the forward kernel begins them.
    """
    batch, tokens = T.dynamic("batch"), T.dynamic("tokens")
    heads_q, heads_v = config.heads_q, config.heads_v
    boundaries, sequences = T.dynamic("boundaries"), T.dynamic("sequences")
    dtype, fp32 = config.dtype, "float32"
    time = config.layout == "time"

    def if_present(present, shape, dtype=fp32):
        return T.Tensor(shape, dtype) if present else T.Tensor((1,), fp32)

    def rows(name):
        if config.strided:
            return vectors(name, batch, tokens, heads_q, dtype)
        return T.Tensor((batch, tokens, heads_q, HEAD_DIM), dtype)

    def scalars(heads):
        return T.Tensor((batch, heads, tokens) if time else (batch, tokens, heads), fp32)

    @T.prim_func
    def gdn_operator_preprocess(
        q: rows("query") if config.l2norm else T.Tensor((1,), fp32),
        k: rows("key"),
        g: T.Tensor((batch, tokens, heads_v), config.gate_dtype),
        beta: T.Tensor((batch, tokens, heads_v), config.beta_dtype),
        A_log: if_present(config.gate == "raw", (heads_v,)),
        dt_bias: if_present(config.dt_bias, (heads_v,)),
        cu_seqlens: if_present(config.packed, (boundaries,), config.cu_seqlens),
        A: inverse(config.inverse == "blocks", batch, tokens, heads_v, dtype),
        gate: scalars(heads_v),
        beta_out: scalars(heads_v),
        query_norm: scalars(heads_q) if config.l2norm else T.Tensor((1,), fp32),
        key_norm: scalars(heads_q) if config.l2norm else T.Tensor((1,), fp32),
        order: T.Tensor((sequences,), "int32") if config.packed else T.Tensor((1,), fp32),
        ctas: T.int32,
    ):
        with T.Kernel(ctas, threads=THREADS) as (block,):
            TC.pdl_trigger()
            if config.strided and config.l2norm:
                T.assume(q.strides[1] % VECTOR == 0)
            inputs = SimpleNamespace(
                q=q, k=k, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias, cu_seqlens=cu_seqlens
            )
            outputs = SimpleNamespace(
                A=A,
                sums=None,
                gate=gate,
                beta=beta_out,
                query_norm=query_norm,
                key_norm=key_norm,
                order=order,
            )
            preprocess_items(
                *(config, inputs, outputs, batch, tokens),
                *(sequences if config.packed else 0, block, ctas),
            )

    return gdn_operator_preprocess
