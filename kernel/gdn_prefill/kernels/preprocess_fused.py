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

Rows past T have beta = 0; the TMA stores drop them, and heads past Hv likewise.
"""

from types import SimpleNamespace

import tilelang
import tilelang.language as T
from tilelang.layout import make_full_bank_swizzled_layout, make_linear_layout

from .preprocess import CHUNK, FORGETS, FORGOTTEN, HEAD_DIM, LOG2_E, PreprocessConfig

WARP = 32
SLOTS = 4  # V heads of an item, one a warp
THREADS = SLOTS * WARP

BLOCK = 16
BLOCKS = CHUNK // BLOCK
HALF = 8  # rows of a block between two multiplications by the decay
LANES = WARP // BLOCKS  # lanes of a diagonal block
COLUMNS = BLOCK // LANES  # columns of a block that a lane solves for
TOKENS = CHUNK // WARP  # tokens of a lane in the gate's scan
# Blocks below the diagonal, in the order of their index i (i - 1) / 2 + j.
LOWER = tuple((i, j) for i in range(BLOCKS) for j in range(i))
FRAGMENT = BLOCK * BLOCK // WARP  # elements of a 16x16 block that a lane holds
GRAM_STRIDE = BLOCK * BLOCK + 4  # fp32 diagonal blocks, apart by 4 banks

OPERAND = "float16"

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


def grid(config: PreprocessConfig, batch: int, tokens: int, sm_count: int) -> int:
    """CTAs to launch: all items at once, or what the device holds at a time."""
    items = batch * -(-tokens // CHUNK) * head_groups(config.heads_v)
    return min(items, sm_count * blocks_per_sm(config))


def below(i: int, j: int) -> int:
    """First register of block (i, j) below the diagonal."""
    return (i * (i - 1) // 2 + j) * FRAGMENT


@T.macro
def locate(item, groups, chunks, place):
    """place = (row of the batch, first token, group of V heads) of an item."""
    chunk = T.truncdiv(item, groups)
    place[0] = T.truncdiv(chunk, chunks)
    place[1] = (chunk - place[0] * chunks) * CHUNK
    place[2] = item - chunk * groups


@T.macro
def fetch_keys(config, k, tiles, k_loaded, place, tile, stage):
    """Start loading the keys of the tile-th q/k head of an item."""
    head = T.truncdiv(place[2] * SLOTS, config.group) + tile
    T.tma_copy(
        k[place[0], place[1] : place[1] + CHUNK, head, 0:HEAD_DIM],
        tiles.k[stage, :, :],
        barrier=k_loaded[stage],
    )
    T.barrier_arrive(k_loaded[stage])


@T.macro
def fetch_gates(config, g, beta, tokens, place, warp, lane, gates):
    """gates = (log decay, beta) of this lane's tokens; zeros past the end."""
    head = place[2] * SLOTS + warp
    first = place[1] + lane * TOKENS
    for v in T.unroll(TOKENS):
        gates[v] = 0.0
        gates[TOKENS + v] = 0.0
        if first + v < tokens and (config.heads_v % SLOTS == 0 or head < config.heads_v):
            gates[v] = g[place[0], first + v, head]
            gates[TOKENS + v] = beta[place[0], first + v, head]


@T.macro
def scan_gates(tiles, warp, lane, parity, gates, scan, span_decay):
    """Sums of one head's gate, and the factors that carry it into the blocks.

    Lanes of a block scan it by themselves; the ends of the blocks before are added afterwards.
    """
    token = warp * CHUNK + lane * TOKENS
    for v in T.unroll(TOKENS):
        gates[v] = T.if_then_else(gates[v] < FORGETS, FORGOTTEN, gates[v])
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
        tiles.sums[parity, token + v] = scan[3] + scan[v]
        tiles.beta[token + v] = gates[TOKENS + v]
        tiles.decay[token + v] = T.exp2(gates[v] * LOG2_E)
        tiles.row_factor[token + v] = T.exp2(scan[v] * LOG2_E) * gates[TOKENS + v]
        tiles.column_factor[token + v] = T.exp2((scan[2] - scan[v]) * LOG2_E)


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
def store_sums(config, g_cumsum, tokens, place, thread, tiles, parity, pair):
    """The sums of the four heads, tokens side by side: a thread a token and two heads."""
    token = place[1] + thread // 2
    slot = thread % 2 * 2
    if token < tokens:
        for v in T.unroll(2):
            pair[v] = tiles.sums[parity, (slot + v) * CHUNK + thread // 2]
        # the head written out: bound to a name, TileLang would not see that it is even
        if config.heads_v % SLOTS == 0:
            for v in T.vectorized(2):
                g_cumsum[place[0], token, place[2] * SLOTS + slot + v] = pair[v]
        else:
            for v in T.unroll(2):
                if place[2] * SLOTS + slot + v < config.heads_v:
                    g_cumsum[place[0], token, place[2] * SLOTS + slot + v] = pair[v]


@T.macro
def solve_diagonal(tiles, warp, lane, tile, regs):
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
                regs.out[u] = T.cast(regs.gated[u * HALF + i], "bfloat16")
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
def merge_blocks(tiles, warp, lane, tile, span_decay, regs):
    """T_ij for all i > j, diagonal after diagonal, from T_jj, U_ii and G."""
    top = warp * CHUNK
    by_row = lane // 8 % 2 * 8 + lane % 8
    by_row_column = lane // 16 * 8
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
    T.sync_warp()
    for i, j in LOWER:
        for e in T.unroll(FRAGMENT):
            regs.row[e] = T.cast(regs.t[below(i, j) + e], "bfloat16")
        store_block(tiles.a, top + i * BLOCK + by_row, j * BLOCK + by_row_column, regs.row_words)


@T.macro
def store_block(tiles_a, row, column, words):
    """A 16x16 block from an accumulator's registers, lane addresses given."""
    T.call_extern(
        "handle",
        "tl::ptx_stmatrix_m8n8_x4",
        T.access_ptr(tiles_a[row, column], "w", extent=8),
        words[0],
        words[1],
        words[2],
        words[3],
    )


def fused_preprocess_kernel(config: PreprocessConfig):
    """PrimFunc(k, g, beta, g_cumsum, A, ctas): both results in one launch of ``grid`` CTAs.

    k [B, T, Hq, 128] bf16; g (raw log decay) and beta [B, T, Hv] fp32; g_cumsum [B, T, Hv] fp32 and
    A [B, T, Hv, 64] bf16, written.
    """
    batch, tokens = T.dynamic("batch"), T.dynamic("tokens")
    heads_q, heads_v, group = config.heads_q, config.heads_v, config.group
    groups = head_groups(heads_v)
    key_count = key_tiles(config)
    stages = key_stages(key_count)
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
            T.annotate_min_blocks_per_sm(blocks_per_sm(config))
            tiles = SimpleNamespace(
                k=T.alloc_shared((stages, CHUNK, HEAD_DIM), bf16),
                a=T.alloc_shared((SLOTS * CHUNK, CHUNK), bf16),
                gram_diagonal=T.alloc_shared((key_count, BLOCKS * GRAM_STRIDE), fp32),
                gram_below=T.alloc_shared((key_count, len(LOWER) * BLOCK * BLOCK), OPERAND),
                sums=T.alloc_shared((2, SLOTS * CHUNK), fp32),
                beta=T.alloc_shared((SLOTS * CHUNK,), fp32),
                decay=T.alloc_shared((SLOTS * CHUNK,), fp32),
                row_factor=T.alloc_shared((SLOTS * CHUNK,), fp32),
                column_factor=T.alloc_shared((SLOTS * CHUNK,), fp32),
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
            row = T.alloc_local((FRAGMENT,), bf16)
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
                out=T.alloc_local((COLUMNS,), bf16),
                half=half,
                bits=T.view(half, (HALF,), bf16),
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
            gates = T.alloc_local((2 * TOKENS,), fp32)
            scan = T.alloc_local((5,), fp32)
            span_decay = T.alloc_local((BLOCKS,), fp32)
            zeros = T.alloc_local((4,), "int32")
            here = T.alloc_local((3,), "int32")
            ahead = T.alloc_local((3,), "int32")
            thread = T.get_thread_binding()
            warp = thread // WARP
            lane = thread % WARP
            chunks = T.ceildiv(tokens, CHUNK)
            steps, tile = T.alloc_var("int32"), T.alloc_var("int32")
            steps = T.truncdiv(batch * chunks * groups - block + ctas - 1, ctas)

            locate(block, groups, chunks, here)
            for stage in tuple(range(stages)):
                fetch_keys(config, k, tiles, k_loaded, here, stage, stage)
            fetch_gates(config, g, beta, tokens, here, warp, lane, gates)
            # the blocks above the diagonal stay zero
            for i in T.unroll(4):
                zeros[i] = 0
            for i, j in LOWER:
                store_block(
                    tiles.a,
                    warp * CHUNK + j * BLOCK + lane // 8 % 2 * 8 + lane % 8,
                    i * BLOCK + lane // 16 * 8,
                    zeros,
                )

            for step in T.serial(steps):
                locate(block + (step + 1) * ctas, groups, chunks, ahead)
                scan_gates(tiles, warp, lane, step % 2, gates, scan, span_decay)
                for key in tuple(range(key_count)):
                    T.barrier_wait(
                        k_loaded[key % stages],
                        (step * (key_count // stages) + key // stages) % 2,
                    )
                    # G = K K^T
                    T.gemm(
                        tiles.k[key % stages, :, :],
                        tiles.k[key % stages, :, :],
                        gram_fragment,
                        transpose_B=True,
                        clear_accum=True,
                    )
                    # every warp is done with these keys, and with the blocks of the item before
                    T.sync_threads()
                    if key + stages < key_count:
                        fetch_keys(config, k, tiles, k_loaded, here, key + stages, key % stages)
                    elif step + 1 < steps:
                        fetch_keys(
                            config,
                            k,
                            tiles,
                            k_loaded,
                            ahead,
                            key + stages - key_count,
                            key % stages,
                        )
                    share_gram(tiles, gram_fragment, gram_half_fragment, key)
                if step + 1 < steps:
                    fetch_gates(config, g, beta, tokens, ahead, warp, lane, gates)
                T.sync_threads()
                store_sums(config, g_cumsum, tokens, here, thread, tiles, step % 2, scan)
                head = here[2] * SLOTS + warp
                if key_count > 1:
                    tile = T.truncdiv(head, group) - T.truncdiv(here[2] * SLOTS, group)
                    tile = T.min(tile, key_count - 1)
                T.tma_store_wait(0)
                T.sync_warp()
                solve_diagonal(tiles, warp, lane, tile if key_count > 1 else 0, regs)
                T.sync_warp()
                merge_blocks(tiles, warp, lane, tile if key_count > 1 else 0, span_decay, regs)
                T.fence_proxy_async()
                T.sync_warp()
                T.tma_copy(
                    tiles.a[warp * CHUNK : warp * CHUNK + CHUNK, :],
                    A[here[0], here[1] : here[1] + CHUNK, head, 0:CHUNK],
                    leader_scope_threads=WARP,
                )
                for i in T.unroll(3):
                    here[i] = ahead[i]
            T.tma_store_wait(0)

    return gdn_preprocess
