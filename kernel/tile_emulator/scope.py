"""What is known about names while a kernel is compiled to closures."""

from __future__ import annotations

from dataclasses import dataclass, field

from .memory import BufferSpec
from .tir import calls, kind, op_name, uses, visit

LANE_CALLS = frozenset({
    "launch_thread_idx", "tl_shuffle_elect", "get_warp_idx_sync", "get_lane_idx", "shfl_sync",
    "shfl_up_sync",
    "shfl_down_sync", "shfl_xor_sync", "get_warp_group_idx",
})  # fmt: skip


@dataclass
class Scope:
    """Buffers of the kernel, variables of the enclosing T.Parallel nest, variables that differ
    between threads.

    parallel maps a variable to (axis, extent), or to None for a value bound inside the nest.
    depth is the number of enclosing conditionals on the thread number: at 0 all threads of the CTA
    run the same code.
    """

    buffers: dict[int, BufferSpec] = field(default_factory=dict)
    parallel: dict[int, tuple[int, int] | None] = field(default_factory=dict)
    varying: set[int] = field(default_factory=set)
    depth: int = 0

    def in_nest(self, e) -> bool:
        """Does the expression depend on a variable of the enclosing parallel nest?"""
        return bool(self.parallel) and uses(e, set(self.parallel))

    def on_thread(self, e) -> bool:
        """Does the expression depend on the thread number, other than through locals?"""
        return uses(e, self.varying) or any(op_name(call) in LANE_CALLS for call in calls(e))

    def may_vary(self, e) -> bool:
        """Can the expression differ between the threads of a role?"""
        if self.on_thread(e):
            return True
        found = []

        def local_load(node):
            if kind(node) == "BufferLoad":
                spec = self.buffers.get(hash(node.buffer.data))
                if spec is not None and spec.is_per_thread:
                    found.append(node)

        visit(e, local_load)
        return bool(found)
