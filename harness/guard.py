"""What the harness relies on inside a child, remembered before a submission is imported.

A submission shares its interpreter with the harness's half there, so it can replace a clock or a
check. It gains nothing from a forged check, since the parent process judges; a forged clock shows
here, and in the parent's own clock.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType

import torch

# The child's own half runs as __main__.
_OWN = ("__main__", "harness", "cases", "reference")
_TENSOR_METHODS = ("clone", "copy_", "cpu", "detach", "fill_", "mul", "numpy", "to", "view")
_TORCH_FUNCTIONS = ("mul", "equal", "empty_like", "full", "randint", "randn", "isfinite")
_STREAM_METHODS = ("synchronize", "wait_stream", "record_event")
_EVENT_METHODS = ("record", "synchronize", "elapsed_time", "query")
_CUDA_FUNCTIONS = (
    "Event",
    "Stream",
    "CUDAGraph",
    "synchronize",
    "current_stream",
    "set_stream",
    "_sleep",
)


def _watched() -> Iterator[tuple[object, str]]:
    """Every (owner, attribute) that must stay the object it is."""
    import json
    import os
    import select

    for clock in ("time", "perf_counter", "monotonic", "process_time", "thread_time"):
        yield time, clock
        yield time, f"{clock}_ns"
    for owner, attributes in (
        (os, ("read", "write", "_exit")),
        (json, ("dumps", "loads")),
        (select, ("select",)),
        (torch, _TORCH_FUNCTIONS),
        (torch.Tensor, _TENSOR_METHODS),
        (torch.cuda, _CUDA_FUNCTIONS),
        (torch.cuda.Event, _EVENT_METHODS),
        (torch.cuda.Stream, _STREAM_METHODS),
        (torch.testing, ("assert_close",)),
    ):
        for attribute in attributes:
            yield owner, attribute
    for name, module in sorted(sys.modules.items()):
        if name.split(".")[0] in _OWN and module is not None:
            yield from _callables(module)


def _callables(module: ModuleType) -> Iterator[tuple[object, str]]:
    """The functions, classes and methods that `module` defines."""
    for attribute, value in list(vars(module).items()):
        if getattr(value, "__module__", None) != module.__name__:
            continue
        if isinstance(value, FunctionType):
            yield module, attribute
        elif isinstance(value, type):
            yield module, attribute
            for method, function in list(vars(value).items()):
                if isinstance(function, FunctionType):
                    yield value, method


def _identity(owner: object, attribute: str) -> tuple[object, ...]:
    value = vars(owner).get(attribute, getattr(owner, attribute, None))
    code = value.__code__ if isinstance(value, FunctionType) else None
    return value, code


class Guard:
    """A snapshot of the watched attributes, of torch's modes and of the interpreter's hooks.

    `instances` are objects of the harness whose own attributes must stay as well.
    """

    def __init__(self, *instances: object) -> None:
        own = [(instance, attribute) for instance in instances for attribute in vars(instance)]
        self._remembered = [(o, a, _identity(o, a)) for o, a in (*_watched(), *own)]
        self._hooks = _hooks()

    def changed(self) -> list[str]:
        """The names of what is no longer what it was."""
        names = [
            f"{getattr(owner, '__name__', type(owner).__name__)}.{attribute}"
            for owner, attribute, before in self._remembered
            if any(
                now is not then
                for now, then in zip(_identity(owner, attribute), before, strict=True)
            )
        ]
        hooks = _hooks()
        return names + [name for name, before in self._hooks.items() if hooks[name] != before]


def _hooks() -> dict[str, object]:
    return {
        "a torch function mode": torch._C._len_torch_function_stack(),
        "a torch dispatch mode": torch._C._len_torch_dispatch_stack(),
        "sys.setprofile": sys.getprofile(),
        "sys.settrace": sys.gettrace(),
        "threading.setprofile": getattr(threading, "_profile_hook", None),
    }


class ThreadWatch:
    """The Python threads that were not there when it was made, and the processor time they take."""

    def __init__(self) -> None:
        self._frames: Callable[[], dict] = sys._current_frames
        self._clock_id = time.pthread_getcpuclockid
        self._clock = time.clock_gettime_ns
        self._known = frozenset(self._frames())

    def extra(self) -> frozenset[int]:
        """The identities of threads beyond the known ones."""
        return frozenset(self._frames()) - self._known

    def busy_ms(self) -> float:
        """Processor time that the extra threads alive now have taken since they started."""
        return sum(self._clock(self._clock_id(thread)) for thread in self.extra()) / 1e6
