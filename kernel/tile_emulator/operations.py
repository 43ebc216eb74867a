"""The registry with every operation module loaded, and what the compiler asks about operations."""

from __future__ import annotations

from . import (  # noqa: F401
    cluster_operations,
    sync_operations,
    tile_operations,
    warp_operations,
)
from .registry import OPERATIONS
from .tir import PARALLEL, is_op, kind, op_name, visit

IGNORED = frozenset({
    "set_max_nreg", "no_set_max_nreg", "warpgroup_fence_operand", "warpgroup_arrive",
    "warpgroup_commit_batch",
    "annotate_producer_reg_dealloc", "annotate_consumer_reg_alloc", "tma_store_arrive",
    "fence_barrier_init", "pdl_sync", "pdl_trigger", "assume",
})  # fmt: skip
SPLITTING = frozenset({
    "mbarrier_wait_parity", "tvm_storage_sync", "cluster_sync", "copy", "gemm", "wgmma_gemm",
    "fill", "reduce", "cumsum", "transpose",
})  # fmt: skip


def is_ignored(name: str) -> bool:
    """Operations without an effect here (registers, launch hints)."""
    return name in IGNORED


def blocks_or_is_tile_operation(body) -> bool:
    """Does a branch body make its threads a role of their own?"""
    found = []

    def look(node):
        nest = kind(node) == "For" and int(node.kind) == PARALLEL
        if nest or (kind(node) == "Call" and is_op(node) and op_name(node) in SPLITTING):
            found.append(node)

    visit(body, look)
    return bool(found)


__all__ = ["IGNORED", "OPERATIONS", "blocks_or_is_tile_operation", "is_ignored"]
