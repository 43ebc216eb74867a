"""Reading a TileLang PrimFunc: node kinds, operation names, source lines, walks.

tvm is importable only after tilelang, which puts its own copy on sys.path.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import tilelang  # noqa: F401
from tilelang import ir as tilelang_ir
from tvm import tirx

PARALLEL = 1  # kind of a For that T.Parallel makes


def kind(node) -> str:
    """Class name of a TIR node."""
    return type(node).__name__


def is_op(call) -> bool:
    """Is it a call of an operation (not of another function)?"""
    return hasattr(call.op, "name")


def op_name(call) -> str:
    """Last part of a call's operation name: "tl.tileop.copy" -> "copy"."""
    return str(call.op.name).split(".")[-1]


def source_line(stmt) -> str:
    """ "file.py:123" of a statement, "?:0" where the frontend kept no span."""
    span = tilelang_ir.get_stmt_span(stmt)
    return f"{os.path.basename(span.source_name.name)}:{span.line}" if span else "?:0"


def visit(node, f: Callable) -> None:
    tirx.stmt_functor.post_order_visit(node, f)


def calls(node) -> Iterator:
    """Every Call below a statement or expression."""
    found = []
    visit(node, lambda n: found.append(n) if kind(n) == "Call" else None)
    return iter(found)


def uses(node, keys: set[int]) -> bool:
    """Does the expression mention a Var whose hash is in keys?"""
    hit = []
    visit(node, lambda n: hit.append(n) if kind(n) == "Var" and hash(n) in keys else None)
    return bool(hit)


def unwrap(func) -> tirx.PrimFunc:
    """The PrimFunc in a PrimFunc or in a TileLang object that carries one.

    Raises TypeError for anything else.
    """
    for attribute in ("prim_func",):
        func = getattr(func, attribute, func)
    if not isinstance(func, tirx.PrimFunc):
        raise TypeError(
            f"prim_func={type(func).__name__}: a TileLang PrimFunc (before lowering) is needed; "
            "of a @tilelang.jit factory take .get_tir(...)"
        )
    return func


def int_of(node) -> int:
    """Value of an IntImm (or python int)."""
    return int(getattr(node, "value", node))
