"""Where TileLang's ThreadSync makes all threads of a CTA meet.

Modelled for code that all threads run: between two accesses of one shared buffer of which one is a
write and at least one is made by all threads. Accesses inside branches on the thread number are the
kernel's own to order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from .memory import BufferSpec
from .tir import int_of, is_op, kind, op_name

READ, WRITE = 1, 2


@dataclass
class Accesses:
    """Keys of shared buffers that a statement reads and writes, by all threads or in branches."""

    reads: set[int] = field(default_factory=set)
    writes: set[int] = field(default_factory=set)
    branch_reads: set[int] = field(default_factory=set)
    branch_writes: set[int] = field(default_factory=set)

    def add(self, key: int, mask: int, in_branch: bool) -> None:
        if mask & READ:
            (self.branch_reads if in_branch else self.reads).add(key)
        if mask & WRITE:
            (self.branch_writes if in_branch else self.writes).add(key)

    def join(self, other: Accesses) -> None:
        self.reads |= other.reads
        self.writes |= other.writes
        self.branch_reads |= other.branch_reads
        self.branch_writes |= other.branch_writes

    def must_precede(self, later: Accesses) -> bool:
        """Is a sync needed between these accesses and later ones?"""
        all_later = later.reads | later.writes | later.branch_reads | later.branch_writes
        mine = self.branch_reads | self.branch_writes
        return bool(
            self.writes & all_later
            or self.reads & (later.writes | later.branch_writes)
            or mine & later.writes
            or self.branch_writes & later.reads
        )


def accesses(statement, buffers: Mapping[int, BufferSpec], on_thread: Callable) -> Accesses:
    """Accesses of shared buffers below a statement; on_thread(condition) tells thread branches."""
    found = Accesses()

    def note(buffer, mask: int, in_branch: bool) -> None:
        spec = buffers.get(hash(buffer.data))
        if spec is not None and spec.is_shared:
            found.add(spec.key, mask, in_branch)

    def walk(node, in_branch: bool) -> None:
        name = kind(node)
        if name == "BufferStore":
            note(node.buffer, WRITE, in_branch)
        elif name == "BufferLoad":
            note(node.buffer, READ, in_branch)
        elif name == "IfThenElse":
            walk(node.condition, in_branch)
            inside = in_branch or on_thread(node.condition)
            for body in (node.then_case, node.else_case):
                if body is not None:
                    walk(body, inside)
            return
        elif name == "Call" and is_op(node):
            operation = op_name(node)
            if operation == "region":
                note(node.args[0].buffer, int_of(node.args[1]), in_branch)
                return
            if operation == "tma_copy" and "barrier" in dict(node.annotations or {}):
                return
        for child in children(node):
            walk(child, in_branch)

    walk(statement, False)
    return found


CHILDREN = (
    "seq", "body", "block", "value", "values", "indices", "args", "a", "b", "condition", "min",
    "extent", "true_value", "false_value",
)  # fmt: skip


def children(node):
    """Nodes directly below a statement or expression."""
    for name in CHILDREN:
        child = getattr(node, name, None)
        if child is None or isinstance(child, int | float | str):
            continue
        if hasattr(child, "__iter__"):
            yield from child
        else:
            yield child


def sync_places(statements: Sequence[Accesses], in_loop: bool) -> set[int]:
    """Positions in a sequence of statements before which all threads must meet."""
    places: set[int] = set()
    pending = Accesses()
    for _ in range(2 if in_loop else 1):
        for position, here in enumerate(statements):
            if position in places:
                pending = Accesses()
            elif pending.must_precede(here):
                places.add(position)
                pending = Accesses()
            pending.join(here)
    return places
