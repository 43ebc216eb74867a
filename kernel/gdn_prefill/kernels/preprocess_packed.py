"""Where an item of packed sequences lies, found on the device.

Chunks are numbered through all sequences, c of them before a sequence's own first one:

    c(n) = sum_{m < n} ceil((cu_seqlens[m + 1] - cu_seqlens[m]) / 64)

Every thread of a CTA owns an equal share of the sequences, hence a range of chunk numbers, and
keeps a cursor in it. The one thread whose range holds a chunk moves its cursor there. A CTA's items
ascend, so all of its searches together pass over each sequence once at most. Empty sequences have
no chunks and are passed over.
"""

import tilelang.language as T

from .preprocess import CHUNK, THREADS

WARP = 32
WARPS = THREADS // WARP


@T.macro
def share_sequences(cu_seqlens, sequences, thread, search, totals_shared):
    """Give every thread its share of the sequences and put its cursor at their start.

    search: scalars of the thread. first, last: its range of chunks; sequence, begin, end, chunk:
    the cursor, a sequence with its tokens and its first chunk; other: scratch. Leaves the chunks of
    every warp's shares in totals_shared.
    """
    lane = thread % WARP
    warp = thread // WARP
    share = T.ceildiv(sequences, THREADS)
    for scalar in (search.first, search.last, search.begin, search.end, search.other):
        scalar[0] = 0
    search.sequence[0] = thread * share
    for s in T.serial(share):
        if thread * share + s < sequences:
            if s == 0:
                search.begin[0] = T.cast(cu_seqlens[thread * share], "int32")
                search.other[0] = search.begin[0]
            search.chunk[0] = T.cast(cu_seqlens[thread * share + s + 1], "int32")
            search.last[0] += T.ceildiv(search.chunk[0] - search.other[0], CHUNK)
            search.other[0] = search.chunk[0]
            if s == 0:
                search.end[0] = search.chunk[0]
    # the chunks of the shares before this one: in the warp, then of the warps before
    search.chunk[0] = search.last[0]
    for distance in (1, 2, 4, 8, 16):
        search.other[0] = T.shfl_up(search.chunk[0], distance)
        if lane >= distance:
            search.chunk[0] += search.other[0]
    if lane == WARP - 1:
        totals_shared[warp] = search.chunk[0]
    T.sync_threads()
    search.first[0] = search.chunk[0] - search.last[0]
    for w in tuple(range(WARPS - 1)):
        if warp > w:
            search.first[0] += totals_shared[w]
    search.last[0] += search.first[0]
    search.chunk[0] = search.first[0]


@T.macro
def find(cu_seqlens, chunk, search, found_shared, slot):
    """found_shared[slot] = (first token of the chunk, end of its sequence), by the chunk's owner.

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
