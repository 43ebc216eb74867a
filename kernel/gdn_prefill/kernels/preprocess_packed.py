"""Where an item of packed sequences lies, found on the device.

Chunks are numbered through all sequences, c of them before a sequence's own first one:

    c(n) = sum_{m < n} ceil((cu_seqlens[m + 1] - cu_seqlens[m]) / 64)

Every thread of a CTA owns an equal share of the sequences, hence a range of chunk numbers, and
keeps a cursor in it. The one thread whose range holds a chunk moves its cursor there. A CTA's items
ascend, so all of its searches together pass over each sequence once at most. Empty sequences have
no chunks and are passed over.

The last CTA has no items: it says in which order the forward kernel begins the sequences, longer
ones first.
"""

import tilelang.language as T

from .preprocess import CHUNK, THREADS
from .resident_common import rolled

WARP = 32
WARPS = THREADS // WARP

# Sequences are begun class by class: those of at least so many eighths of the mean length, which
# is all tokens over all sequences, first. Each has half of the one before, the last none.
CLASSES = (64, 32, 16, 8, 4, 0)
LONGEST = 2**31 - 1


@T.macro
def sum_before(mine, before, other, thread, totals_shared):
    """before = the sum of mine over the CTA's earlier threads; a warp's own in totals_shared.

    other: scratch. The caller syncs before totals_shared is written again.
    """
    lane = thread % WARP
    warp = thread // WARP
    before[0] = mine[0]
    for distance in (1, 2, 4, 8, 16):
        other[0] = T.shfl_up(before[0], distance)
        if lane >= distance:
            before[0] += other[0]
    if lane == WARP - 1:
        totals_shared[warp] = before[0]
    before[0] -= mine[0]
    T.sync_threads()
    for w in tuple(range(WARPS - 1)):
        if warp > w:
            before[0] += totals_shared[w]


@T.macro
def share_sequences(cu_seqlens, sequences, thread, search, totals_shared):
    """Give every thread its share of the sequences and put its cursor at their start.

    search: scalars of the thread. first, last: its range of chunks; sequence, begin, end, chunk:
    the cursor, a sequence with its tokens and its first chunk; other: scratch. Leaves the chunks of
    every warp's shares in totals_shared.
    """
    share = T.ceildiv(sequences, THREADS)
    for scalar in (search.first, search.last, search.begin, search.end, search.other):
        scalar[0] = 0
    search.sequence[0] = thread * share
    for s in rolled(share):
        if thread * share + s < sequences:
            if s == 0:
                search.begin[0] = T.cast(cu_seqlens[thread * share], "int32")
                search.other[0] = search.begin[0]
            search.chunk[0] = T.cast(cu_seqlens[thread * share + s + 1], "int32")
            search.last[0] += T.ceildiv(search.chunk[0] - search.other[0], CHUNK)
            search.other[0] = search.chunk[0]
            if s == 0:
                search.end[0] = search.chunk[0]
    sum_before(search.last, search.first, search.other, thread, totals_shared)
    search.last[0] += search.first[0]
    search.chunk[0] = search.first[0]


@T.macro
def find(cu_seqlens, chunk, search, found_shared, slot):
    """found_shared[slot] = (first token of the chunk, end of its sequence, record), by its owner.

    The chunk is the last one's successor or later.
    """
    if chunk >= search.first[0] and chunk < search.last[0]:
        while chunk >= search.chunk[0] + T.ceildiv(search.end[0] - search.begin[0], CHUNK):
            search.chunk[0] += T.ceildiv(search.end[0] - search.begin[0], CHUNK)
            search.sequence[0] += 1
            search.begin[0] = search.end[0]
            search.end[0] = T.cast(cu_seqlens[search.sequence[0] + 1], "int32")
        found_shared[slot, 0] = search.begin[0] + (chunk - search.chunk[0]) * CHUNK
        found_shared[slot, 1] = search.end[0]
        found_shared[slot, 2] = (
            T.truncdiv(search.begin[0], CHUNK) + search.sequence[0] + chunk - search.chunk[0]
        )


@T.macro
def order_sequences(cu_seqlens, sequences, tokens, thread, at, totals_shared, order):
    """order = the sequences, longer ones first by CLASSES, in their own order within a class.

    at: scalars of the thread; least, below: lengths of the class at hand. A long sequence that is
    begun last keeps the whole launch waiting. By one CTA, a class at a time.
    """
    share = T.ceildiv(sequences, THREADS)
    at.begun[0] = 0
    at.least[0] = T.truncdiv(tokens, sequences * 8) * CLASSES[0]
    at.below[0] = LONGEST
    for number in rolled(len(CLASSES)):
        at.mine[0] = 0
        for s in rolled(share):
            classify(cu_seqlens, sequences, thread * share + s, at)
            at.mine[0] += at.member[0]
        sum_before(at.mine, at.position, at.member, thread, totals_shared)
        at.position[0] += at.begun[0]
        for w in tuple(range(WARPS)):
            at.begun[0] += totals_shared[w]
        for s in rolled(share):
            classify(cu_seqlens, sequences, thread * share + s, at)
            if at.member[0] != 0:
                order[at.position[0]] = thread * share + s
                at.position[0] += 1
        at.below[0] = at.least[0]
        at.least[0] = T.if_then_else(number + 2 < len(CLASSES), T.truncdiv(at.least[0], 2), 0)
        T.sync_threads()  # totals_shared is read


@T.macro
def classify(cu_seqlens, sequences, sequence, at):
    """at.member = 1 if it is a sequence of the class at hand, else 0."""
    at.member[0] = 0
    if sequence < sequences:
        at.length[0] = T.cast(cu_seqlens[sequence + 1] - cu_seqlens[sequence], "int32")
        if at.length[0] >= at.least[0] and at.length[0] < at.below[0]:
            at.member[0] = 1
