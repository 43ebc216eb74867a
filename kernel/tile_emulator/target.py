"""A kernel named on a command line: its factory, its arguments, random tensors of given sizes."""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .arguments import check_names, named, number, one_line, positive, whole
from .edits import Edit
from .program import Program
from .tir import kind, unwrap, visit

PASS_CONFIGS, ROLES = "PASS_CONFIGS", "ROLES"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Target:
    """What the command line names: a PrimFunc, its pass configs, sizes of its symbolic
    dimensions."""

    name: str
    func: object
    pass_configs: Mapping
    sizes: Mapping[str, int]
    scalars: Mapping[str, float]
    role_names: Mapping[str, tuple[int, int]]
    seed: int = 0
    scale: float = 0.1

    def program(self, edit: Edit | None = None) -> Program:
        return Program(self.func, edit, dict(self.role_names))

    def arguments(self, program: Program) -> list:
        """Random tensors: inputs normal times scale, outputs NaN, integers 0; scalars as given.

        Raises ValueError naming a symbolic size that was not given, or what the kernel has not.
        """
        self.check_names(program)
        draw = np.random.default_rng(self.seed)
        read = read_buffers(program.func)
        out: list = []
        for param, buffer in program.params:
            if buffer is None:
                out.append(self.scalars.get(str(param.name), 1))
                continue
            shape = tuple(self.size_of(n, str(buffer.name)) for n in buffer.shape)
            only_written = hash(buffer.data) in program.outputs - read
            try:
                out.append(random_tensor(draw, shape, str(buffer.dtype), self.scale, only_written))
            except (MemoryError, OverflowError, ValueError) as error:
                raise ValueError(
                    f"--shape: {buffer.name} would have the shape {shape}; smaller sizes are needed"
                    f" ({one_line(error)})"
                ) from error
        return out

    def blocks(self, program: Program, tensors: Sequence, most: int | None = None) -> list:
        """Indices of the first CTAs, in whole clusters.  Raises ValueError where the kernel has
        none.
        """
        launch = program.bind(tensors)
        first = set(launch.blocks[:most])
        blocks = [launch.blocks[n] for c in launch.select(first.__contains__) for n in c]
        if not blocks:
            sizes = ",".join(f"{name}={n}" for name, n in self.sizes.items())
            raise ValueError(f"--shape {sizes}: the kernel's grid is empty; it needs a CTA")
        return blocks

    def check_names(self, program: Program) -> None:
        """Raises ValueError for sizes and scalars that are no parameters of the kernel."""
        dimensions = {
            name
            for _, buffer in program.params
            if buffer is not None
            for n in buffer.shape
            if kind(n) != "IntImm"
            for name in names_in(n)
        }
        scalars = [str(param.name) for param, buffer in program.params if buffer is None]
        check_names("--shape", self.sizes, sorted(dimensions), "symbolic dimension")
        check_names("--scalars", self.scalars, scalars, "scalar parameter")

    def size_of(self, n, tensor: str) -> int:
        if kind(n) == "IntImm":
            return int(n.value)
        missing = [name for name in names_in(n) if name not in self.sizes]
        if missing:
            raise ValueError(f"--shape lacks {', '.join(missing)}: a dimension of {tensor} is {n}")
        return int(eval(str(n), {"__builtins__": {}}, dict(self.sizes)))


def names_in(n) -> list[str]:
    """Variables of a dimension."""
    return sorted(set(re.findall(r"[A-Za-z_]\w*", str(n))))


def random_tensor(draw, shape, dtype: str, scale: float, only_written: bool):
    if "float" not in dtype:
        return np.zeros(shape, dtype)
    x = np.full(shape, np.nan) if only_written else draw.standard_normal(shape) * scale
    if dtype in DTYPES:
        return torch.from_numpy(x).to(DTYPES[dtype])
    return x.astype(dtype)


def read_buffers(func) -> set[int]:
    """Keys of the buffers that the kernel loads from, element by element or as a tile operand."""
    keys: set[int] = set()
    inside: set[int] = set()

    def look(node):
        if kind(node) == "Call" and str(getattr(node.op, "name", "")).endswith("region"):
            inside.add(hash(node.args[0]))
            if int(node.args[1].value) & 1:
                keys.add(hash(node.args[0].buffer.data))

    def loads(node):
        if kind(node) == "BufferLoad" and hash(node) not in inside:
            keys.add(hash(node.buffer.data))

    visit(func.body, look)
    visit(func.body, loads)
    return keys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="MODULE:FACTORY", help="what gives the PrimFunc")
    parser.add_argument(
        "--args",
        default="",
        metavar="EXPRESSION",
        help="the factory's arguments, as python in MODULE",
    )
    parser.add_argument(
        "--shape",
        type=named(whole(1)),
        default={},
        metavar="NAME=N,...",
        help="sizes of the symbolic dimensions",
    )
    parser.add_argument(
        "--scalars",
        type=named(number),
        default={},
        metavar="NAME=X,...",
        help="scalar parameters (default 1)",
    )
    parser.add_argument("--seed", type=whole(0), default=0, help="of the random inputs")
    parser.add_argument(
        "--scale", type=positive, default=0.1, help="standard deviation of the inputs"
    )
    parser.add_argument(
        "--pass-configs",
        metavar="NAME",
        help=f"variable in MODULE (default {PASS_CONFIGS}, if there is one)",
    )
    parser.add_argument(
        "--roles",
        metavar="NAME",
        help="variable in MODULE with thread ranges by role name"
        f" (default {ROLES}, if there is one)",
    )


def load(options: argparse.Namespace) -> Target:
    """Import the module and call the factory.

    Raises ValueError naming the argument, its value and what is needed.
    """
    module_name, _, factory_name = options.target.partition(":")
    if not (module_name and factory_name):
        raise ValueError(f"{options.target!r}: MODULE:FACTORY is needed")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ValueError(
            f"MODULE {module_name!r} cannot be imported: {one_line(error)}; a module on the python"
            " path is needed"
        ) from error
    factory = getattr(module, factory_name, None)
    if factory is None:
        raise ValueError(f"{options.target!r}: module {module_name} has no {factory_name}")
    pass_configs = mapping_in(module, "--pass-configs", options.pass_configs, PASS_CONFIGS)
    return Target(
        options.target + (f"({options.args})" if options.args else ""),
        make(module, options.target, factory, options.args),
        pass_configs,
        options.shape,
        options.scalars,
        roles_in(module, options.roles),
        options.seed,
        options.scale,
    )


def make(module, target: str, factory, expression: str):
    """The PrimFunc that the factory gives for arguments written as python."""
    if expression or not is_prim_func(factory):
        try:
            names = {**vars(module), "dict": dict}
            args, kwargs = eval(f"(lambda *a, **k: (a, k))({expression})", names)
        except Exception as error:
            raise ValueError(
                f"--args {expression!r}: {one_line(error)}; python arguments that can be evaluated"
                f" in {module.__name__} are needed"
            ) from error
        try:
            factory = factory(*args, **kwargs)
        except Exception as error:
            raise ValueError(
                f"{target!r} cannot be called with --args {expression!r}: {one_line(error)}"
            ) from error
    try:
        return unwrap(factory)
    except TypeError as error:
        raise ValueError(f"{target!r} gives no PrimFunc: {one_line(error)}") from error


def mapping_in(module, option: str, name: str | None, default: str) -> Mapping:
    """A dict of the module: the one asked for, else the usual one if it is there, else empty."""
    found = getattr(module, name or default, None)
    if found is None and name is None:
        return {}
    if not isinstance(found, Mapping):
        what = "no" if found is None else f"a {type(found).__name__}"
        raise ValueError(
            f"{option} {name or default}: the name of a dict in {module.__name__} is needed, which"
            f" has {what} {name or default}"
        )
    return found


def roles_in(module, name: str | None) -> Mapping[str, tuple[int, int]]:
    found = mapping_in(module, "--roles", name, ROLES)
    for role, threads in found.items():
        pair = isinstance(threads, tuple | list) and len(threads) == 2
        if not (pair and all(isinstance(n, int) for n in threads)):
            raise ValueError(
                f"--roles {name or ROLES}: {role!r}: {threads!r}; (first, last + 1) is needed"
            )
    return found


def is_prim_func(x) -> bool:
    try:
        unwrap(x)
    except TypeError:
        return False
    return True
