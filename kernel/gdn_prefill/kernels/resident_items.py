"""Persistent CTAs: each takes items off one list until there are no more.

An item is a head of a sequence. CTAs are as many as the device holds; a CTA's first item is the one
of its own number, and every further one the next that nobody has taken. The roles of a CTA go
through its items each at its own pace, so that the producer loads the first chunks of an item while
the state groups are still at work on the one before, and the chunks of all items pass through one
ring of stages.

The producer warp looks an item up and writes it into one of ITEM_SLOTS slots of shared memory,
where the other roles read it:

    item_ready[slot]   by the producer warp: the slot holds an item, or that there are no more
    item_free[slot]    by every other warp: it is done with the item

schedule [1 + N] int32: how many items have been taken beyond the first ones, 0 at the launch, and
the sequences in the order in which they are begun. Without cu_seqlens it is [1], and the order that
of the batch.
"""

from types import SimpleNamespace

import tilelang.language as T

from .resident_common import CHUNK, WARP, SegmentTokens, arrive_warp

ITEM_SLOTS = 4
NO_ITEM = -1
FIELDS = ("sequence", "head", "first", "tokens")  # sequence: NO_ITEM after the last item


def item_tiles() -> dict:
    """Shared memory of a CTA for its items."""
    return {"items": T.alloc_shared((ITEM_SLOTS, len(FIELDS)), "int32", scope="shared")}


def item_barriers(config) -> dict:
    return {
        "item_ready": T.alloc_barrier([1] * ITEM_SLOTS),  # by the producer warp
        "item_free": T.alloc_barrier(
            [config.threads // WARP - 1] * ITEM_SLOTS
        ),  # by every warp but the producer's
    }


def item_turn() -> SimpleNamespace:
    """Scalars of a thread. lap: items it is done with; before: chunks of those; chunks: of the item
    at hand; number: of an item.
    """
    names = ("lap", "before", "chunks", "number", "first")
    return SimpleNamespace(**{name: T.alloc_local((1,), "int32") for name in names})


def slot_of(turn):
    return turn.lap[0] % ITEM_SLOTS


def round_of(turn):
    return turn.lap[0] // ITEM_SLOTS


def field(memory, name):
    """What the slot says of the item at hand."""
    return memory.tiles.items[slot_of(memory.turn), FIELDS.index(name)]


def item_place(config, place, memory) -> SimpleNamespace:
    """place with where the item at hand lies."""
    sequence, head = field(memory, "sequence"), field(memory, "head")
    return SimpleNamespace(
        **{
            **vars(place),
            "batch": 0 if config.packed else sequence,
            "sequence": sequence,
            "head": head,
            "head_q": head // (config.heads_v // config.heads_q),
            "first": field(memory, "first"),
            "tokens": field(memory, "tokens"),
            "chunks": memory.turn.chunks[0],
            "before": memory.turn.before[0],
        }
    )


def item_inputs(inputs, place) -> SimpleNamespace:
    """inputs with tokens counted from the first of the item."""
    return SimpleNamespace(
        **{
            name: SegmentTokens(tensor.tensor, place.first)
            if isinstance(tensor, SegmentTokens)
            else tensor
            for name, tensor in vars(inputs).items()
        }
    )


@T.macro
def begin_items(memory):
    memory.turn.lap[0] = 0
    memory.turn.before[0] = 0


@T.macro
def begin_item(memory):
    memory.turn.chunks[0] = T.ceildiv(field(memory, "tokens"), CHUNK)


@T.macro
def end_item(memory):
    memory.turn.before[0] += memory.turn.chunks[0]
    memory.turn.lap[0] += 1


@T.macro
def each_item(config, place, inputs, memory, role):
    """role(place, inputs) for every item of the CTA, by any role but the producer."""
    begin_items(memory)
    T.barrier_wait(memory.barriers.item_ready[0], 0)
    while field(memory, "sequence") != NO_ITEM:
        begin_item(memory)
        here = item_place(config, place, memory)
        role(here, item_inputs(inputs, here))
        arrive_warp(memory.barriers.item_free, slot_of(memory.turn))
        end_item(memory)
        T.barrier_wait(memory.barriers.item_ready[slot_of(memory.turn)], round_of(memory.turn) % 2)


@T.macro
def each_produced_item(config, place, inputs, memory, role):
    """The same by the producer warp, which finds the items."""
    begin_items(memory)
    memory.turn.number[0] = place.block
    announce_item(config, place, inputs, memory)
    while field(memory, "sequence") != NO_ITEM:
        begin_item(memory)
        here = item_place(config, place, memory)
        role(here, item_inputs(inputs, here))
        end_item(memory)
        if T.shuffle_elect(WARP):
            memory.turn.number[0] = place.ctas + T.atomic_add(
                inputs.schedule[0], 1, return_prev=True
            )
        announce_item(config, place, inputs, memory)


@T.macro
def announce_item(config, place, inputs, memory):
    """Write the item of the elected thread's number into the slot, for all roles."""
    turn, items = memory.turn, memory.tiles.items
    T.barrier_wait(memory.barriers.item_free[slot_of(turn)], (round_of(turn) + 1) % 2)
    if T.shuffle_elect(WARP):
        items[slot_of(turn), 0] = NO_ITEM
        if turn.number[0] < place.sequences * config.heads_v:
            write_item(config, place, inputs, memory)
    arrive_warp(memory.barriers.item_ready, slot_of(turn))


@T.macro
def write_item(config, place, inputs, memory):
    turn, items = memory.turn, memory.tiles.items
    items[slot_of(turn), 1] = turn.number[0] % config.heads_v
    turn.number[0] = turn.number[0] // config.heads_v
    if config.packed:
        turn.number[0] = inputs.schedule[1 + turn.number[0]]
        turn.first[0] = inputs.cu_seqlens[turn.number[0] * place.cu_step]
        items[slot_of(turn), 2] = turn.first[0]
        items[slot_of(turn), 3] = (
            inputs.cu_seqlens[(turn.number[0] + 1) * place.cu_step] - turn.first[0]
        )
    else:
        items[slot_of(turn), 2] = 0
        items[slot_of(turn), 3] = place.tokens
    items[slot_of(turn), 0] = turn.number[0]


ITEMS = SimpleNamespace(each=each_item, produce=each_produced_item)
