"""A as a forward kernel that rewrites it anyway reads it: the blocks that are not zero.

A is lower triangular, so of its sixteen 16x16 blocks the ten on and below the diagonal hold all of
it: 5 KiB a chunk and V head instead of 8. A record [10, 256] has them diagonal after diagonal,

    (0, 0) (1, 1) (2, 2) (3, 3)   (1, 0) (2, 1) (3, 2)   (2, 0) (3, 1)   (3, 0)

each as a warp holds a 16x16 operand of an MMA: sixteen bytes a lane, lane after lane. What a warp
writes or reads of a block is therefore one access of 512 contiguous bytes, from registers to memory
on one side and from shared memory to registers on the other.

Records are numbered by chunks. Chunk c of row b of a dense batch of T tokens has number
b ceil(T / 64) + c. Chunk c of packed sequence n, which begins at token t, has t // 64 + n + c: no
two have the same, as ceil(length / 64) <= (t + length) // 64 + 1 - t // 64. A tail has a record of
its own, with rows of the identity past its end: nothing of a neighbour comes along.
"""

from .preprocess import CHUNK

BLOCK = 16
BLOCKS = CHUNK // BLOCK
ELEMENTS = BLOCK * BLOCK
LANE_ELEMENTS = 8  # of a block, those that a lane holds

# Blocks (i, j) of a record.
ORDER = tuple((j + below, j) for below in range(BLOCKS) for j in range(BLOCKS - below))
STORED = len(ORDER)


def block_number(i, j):
    """Place of block (i, j) in a record."""
    below = i - j
    return below * (2 * BLOCKS + 1 - below) // 2 + j


def lane_row(lane, e):
    """Row within a block of element e of a lane."""
    return lane // 4 + e // 2 % 2 * 8


def lane_column(lane, e):
    """Column within a block of element e of a lane."""
    return e // 4 * 8 + lane % 4 * 2 + e % 2


def record_count(batch: int, tokens: int, sequences: int | None = None) -> int:
    """Records of a dense batch, or of so many packed sequences with that many tokens."""
    return batch * -(-tokens // CHUNK) if sequences is None else tokens // CHUNK + sequences
