"""A as a forward kernel that rewrites it anyway reads it: the blocks that are not zero.

A is lower triangular, so of its sixteen 16x16 blocks the ten on and below the diagonal hold all of
it: 5 KiB a chunk and V head instead of 8. A record [10, 256] has them in this order,

    (0, 0) (1, 1) (2, 2) (3, 3)   (1, 0) (2, 1) (3, 2) (3, 0)   (2, 0) (3, 1)

in which four warps take one after another, all but one of a warp's in the same column, each as a
warp holds a 16x16 operand of an MMA: sixteen bytes a lane, lane after lane. What a warp writes to
memory of a block, or reads of it in shared memory, is therefore one access of 512 contiguous bytes.

Records are numbered by chunks. Chunk c of row b of a dense batch of T tokens has number
b ceil(T / 64) + c. Chunk c of packed sequence n, which begins at token t, has t // 64 + n + c: no
two have the same, as ceil(length / 64) <= (t + length) // 64 + 1 - t // 64. A tail has a record of
its own, with rows of the identity past its end: nothing of a neighbour comes along.
"""

import tilelang.language as T

from .resident_common import CHUNK, WARPS_PER_GROUP

BLOCK = 16
BLOCKS = CHUNK // BLOCK
ELEMENTS = BLOCK * BLOCK
LANE_ELEMENTS = 8  # of a block, those that a lane holds

ORDER = ((0, 0), (1, 1), (2, 2), (3, 3), (1, 0), (2, 1), (3, 2), (3, 0), (2, 0), (3, 1))
STORED = len(ORDER)  # blocks of a record
LAPS = -(-STORED // WARPS_PER_GROUP)


def in_lap(lap: int, warp):
    """Does a warp have a block in a lap: only the last one has fewer than there are warps."""
    return True if (lap + 1) * WARPS_PER_GROUP <= STORED else block_of(lap, warp) < STORED


def block_of(lap: int, warp):
    """Place in a record of the block that a warp of a group has in a lap."""
    return lap * WARPS_PER_GROUP + warp


def block_row(lap: int, warp):
    """i of the block (i, j) that a warp has in a lap, ORDER[block_of(lap, warp)]."""
    return (warp, T.min(warp + 1, BLOCKS - 1), warp + 2)[lap]


def block_column(lap: int, warp):
    """j of that block."""
    return (warp, T.if_then_else(warp == BLOCKS - 1, 0, warp), warp)[lap]


def lane_row(lane, e):
    """Row within a block of element e of a lane."""
    return lane // 4 + e // 2 % 2 * 8


def lane_column(lane, e):
    """Column within a block of element e of a lane."""
    return e // 4 * 8 + lane % 4 * 2 + e % 2


def addressed(i, j, lane, top=0):
    """Row and column that a lane has the address of, where ldmatrix or stmatrix moves block (i, j)
    of what begins at row top.
    """
    return top + i * BLOCK + lane // 8 % 2 * 8 + lane % 8, j * BLOCK + lane // 16 * 8


@T.macro
def store_block(tile, index, words, first):
    """A block from the registers of an accumulator, four words from the first on.

    index: in all dimensions of the tile, of what this lane has the address of.
    """
    T.call_extern(
        "handle",
        "tl::ptx_stmatrix_m8n8_x4",
        T.access_ptr(tile[index], "w", extent=8),
        words[first],
        words[first + 1],
        words[first + 2],
        words[first + 3],
    )


def record_count(batch: int, tokens: int, sequences: int | None = None) -> int:
    """Records of a dense batch, or of so many packed sequences with that many tokens."""
    return batch * -(-tokens // CHUNK) if sequences is None else tokens // CHUNK + sequences
