"""The operations a kernel may call as statements: name -> maker of a step."""

from __future__ import annotations

from collections.abc import Callable

OPERATIONS: dict[str, Callable] = {}


def operation(*names: str):
    """Register make(compiler, call) -> Step under TIR operation names."""

    def register(make: Callable) -> Callable:
        for name in names:
            OPERATIONS[name] = make
        return make

    return register
