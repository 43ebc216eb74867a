"""A kernel named on a command line: its factory, its arguments, random tensors of given sizes."""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from .edits import Edit
from .program import Program
from .tir import kind, unwrap, visit

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

        Raises ValueError naming a symbolic size that was not given.
        """
        draw = np.random.default_rng(self.seed)
        read = read_buffers(program.func)
        out: list = []
        for param, buffer in program.params:
            if buffer is None:
                out.append(self.scalars.get(str(param.name), 1))
                continue
            shape = tuple(self.size_of(n, str(buffer.name)) for n in buffer.shape)
            only_written = hash(buffer.data) in program.outputs - read
            out.append(random_tensor(draw, shape, str(buffer.dtype), self.scale, only_written))
        return out

    def size_of(self, n, tensor: str) -> int:
        if kind(n) == "IntImm":
            return int(n.value)
        names = sorted(set(re.findall(r"[A-Za-z_]\w*", str(n))))
        missing = [name for name in names if name not in self.sizes]
        if missing:
            raise ValueError(f"--shape lacks {', '.join(missing)}: a dimension of {tensor} is {n}")
        return int(eval(str(n), {"__builtins__": {}}, dict(self.sizes)))


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


def pairs(text: str) -> dict[str, float]:
    """ "a=1,b=2.5" -> {"a": 1, "b": 2.5}"""
    out: dict[str, float] = {}
    for item in filter(None, re.split(r"[,\s]+", text)):
        name, equals, value = item.partition("=")
        if not equals:
            raise argparse.ArgumentTypeError(f"{item!r}: NAME=NUMBER is needed")
        out[name] = float(value) if "." in value or "e" in value else int(value)
    return out


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
        type=pairs,
        default={},
        metavar="NAME=N,...",
        help="sizes of the symbolic dimensions",
    )
    parser.add_argument(
        "--scalars",
        type=pairs,
        default={},
        metavar="NAME=X,...",
        help="scalar parameters (default 1)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random inputs")
    parser.add_argument("--scale", type=float, default=0.1, help="standard deviation of the inputs")
    parser.add_argument(
        "--pass-configs", default="PASS_CONFIGS", metavar="NAME", help="variable in MODULE, if any"
    )
    parser.add_argument(
        "--roles",
        default="ROLES",
        metavar="NAME",
        help="variable in MODULE with thread ranges by role name, if any",
    )


def load(options: argparse.Namespace) -> Target:
    """Import the module and call the factory.

    Raises ValueError for a name that is not there, TypeError for what gives no PrimFunc.
    """
    module_name, _, factory_name = options.target.partition(":")
    if not factory_name:
        raise ValueError(f"{options.target!r}: MODULE:FACTORY is needed")
    module = importlib.import_module(module_name)
    factory = getattr(module, factory_name, None)
    if factory is None:
        raise ValueError(f"module {module_name} has no {factory_name}")
    names = {**vars(module), "dict": dict}
    if options.args or not is_prim_func(factory):
        args, kwargs = eval(f"(lambda *a, **k: (a, k))({options.args})", names)
        factory = factory(*args, **kwargs)
    return Target(
        options.target + (f"({options.args})" if options.args else ""),
        unwrap(factory),
        getattr(module, options.pass_configs, {}),
        options.shape,
        options.scalars,
        getattr(module, options.roles, {}),
        options.seed,
        options.scale,
    )


def is_prim_func(x) -> bool:
    try:
        unwrap(x)
    except TypeError:
        return False
    return True
