"""A compiled kernel: bind tensors, run CTAs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from .cluster import Cluster, group_blocks, uses_cluster
from .cta import Cta, Options, suffix
from .edits import Edit
from .errors import EmulatorError
from .memory import BufferSpec, Local, Tile
from .partition import find_roles
from .report import Report
from .role import Role
from .scheduler import Schedule
from .statements import Compiler
from .tensors import check_tensor, shared_array, working_copy, write_back
from .timeline import Trace
from .tir import int_of, is_op, kind, op_name, unwrap, visit

WRITES = 2  # bit of an access mask


@dataclass
class Launch:
    """Tensors bound to a program: variables hold symbolic sizes and scalar parameters, blocks every
    CTA's index, clusters the numbers of the CTAs that run together, by rank.
    """

    variables: dict[int, object]
    tensors: dict[int, Tile]
    blocks: list[tuple[int, ...]]
    clusters: list[tuple[int, ...]]
    written: list[tuple[object, Tile]]

    def select(self, wanted: Callable[[tuple[int, ...]], bool]) -> list[tuple[int, ...]]:
        """The clusters with a CTA whose index is wanted."""
        chosen = {number for number, block in enumerate(self.blocks) if wanted(block)}
        return [cluster for cluster in self.clusters if chosen.intersection(cluster)]


class Program:
    """A PrimFunc compiled to closures.  role_names: names for thread ranges, e.g. {"state": (0,
    128)}.

    cta_roles, groups and shares describe the roles of one CTA; roles names those of all CTAs of a
    cluster, rank by rank.
    """

    def __init__(
        self,
        prim_func,
        edit: Edit | None = None,
        role_names: dict[str, tuple[int, int]] | None = None,
    ):
        self.func = unwrap(prim_func)
        self.compiler = Compiler(edit)
        self.params = []
        for param in self.func.params:
            buffer = self.func.buffer_map.get(param, None)
            self.params.append((param, buffer))
            if buffer is not None:
                spec = BufferSpec(
                    hash(buffer.data), str(buffer.name), (), str(buffer.dtype), "global"
                )
                self.compiler.scope.buffers[spec.key] = spec
        self.outputs = written_buffers(self.func)
        self.body = self.compiler.statement(self.func.body)
        found = find_roles(self.compiler)
        self.groups = [threads for threads, _ in found]
        self.shares = [share for _, share in found]
        self.cluster = self.compiler.cluster if uses_cluster(self.func) else (1, 1, 1)
        self.cta_roles = tuple(self.role_name(part, role_names or {}) for part in self.groups)
        ranks = range(prod(self.cluster))
        self.roles = tuple(name + suffix(rank) for rank in ranks for name in self.cta_roles)

    @staticmethod
    def role_name(threads: np.ndarray, names: dict[str, tuple[int, int]]) -> str:
        first, last = int(threads[0]), int(threads[-1]) + 1
        for name, (a, z) in names.items():
            if (a, z) == (first, last):
                return name
        return f"tx[{first},{last})"

    # ---- binding ----
    def bind(self, tensors: Sequence) -> Launch:
        """Check the arguments against the signature.

        Raises TypeError / ValueError naming the argument, its value and what the kernel takes.
        """
        if len(tensors) != len(self.params):
            names = ", ".join(str(b.name if b is not None else p.name) for p, b in self.params)
            raise TypeError(
                f"{len(tensors)} arguments; the kernel takes {len(self.params)}: {names}"
            )
        variables: dict[int, object] = {}
        bound: list[tuple[object, Tile, object]] = []
        for (param, buffer), tensor in zip(self.params, tensors, strict=True):
            if buffer is None:
                variables[hash(param)] = tensor
                continue
            name, dtype = str(buffer.name), str(buffer.dtype)
            check_tensor(name, tensor, dtype)
            if len(tensor.shape) != len(buffer.shape):
                rank = len(buffer.shape)
                raise ValueError(
                    f"{name}: shape {tuple(tensor.shape)}; the kernel takes {rank} dimensions"
                )
            for size, n in zip(buffer.shape, tensor.shape, strict=True):
                if (
                    kind(size) in ("Var", "SizeVar")
                    and variables.setdefault(hash(size), int(n)) != n
                ):
                    raise ValueError(
                        f"{name}: {size} is {variables[hash(size)]} in another tensor, {n} here"
                    )
            bound.append((tensor, Tile(name, working_copy(tensor, dtype), dtype, "global"), buffer))
        host = Role(None, "host", np.arange(1), variables, {})
        for tensor, tile, buffer in bound:
            want = tuple(int(self.compiler.expression(size)(host)) for size in buffer.shape)
            if tuple(tensor.shape) != want:
                raise ValueError(
                    f"{tile.name}: shape {tuple(tensor.shape)}; the kernel takes {want}"
                )
        tiles = {hash(buffer.data): tile for _, tile, buffer in bound}
        sizes = [int(extent(host)) for _, extent in self.compiler.grid]
        for size, n in itertools.zip_longest(sizes, self.cluster, fillvalue=1):
            if size % n:
                raise ValueError(f"a grid of {sizes} CTAs is not made of clusters {self.cluster}")
        blocks = list(itertools.product(*map(range, sizes)))
        written = [
            (tensor, tile) for tensor, tile, buffer in bound if hash(buffer.data) in self.outputs
        ]
        return Launch(variables, tiles, blocks, group_blocks(blocks, self.cluster), written)

    def track_outputs(self, launch: Launch) -> None:
        for _, tile in launch.written:
            tile.owner = shared_array(tile.arr.shape, np.int32)

    # ---- running ----
    def run_clusters(
        self,
        launch: Launch,
        clusters: Iterable[tuple[int, ...]],
        schedule: str,
        options: Options,
        report: Report,
        progress: Callable[[], None],
    ) -> None:
        """Run some clusters of CTAs, one after the other; progress() follows for each CTA.

        An EmulatorError that ends the run carries the report.
        """
        for numbers in clusters:
            traced = options.timeline and report.timeline is None
            trace = Trace(launch.blocks[numbers[0]], self.roles) if traced else None
            cluster = Cluster(len(numbers), report, options, trace, self.compiler.meets_at_start)
            for number in numbers:
                self.fill(cluster.add(number, launch.blocks[number]), launch)
            programs = [
                self.body.run(role) if self.body.blocking else run_plain(self.body, role)
                for role in cluster.roles
            ]
            try:
                with np.errstate(all="ignore"):
                    cluster.run(programs, Schedule(schedule, self.roles, numbers[0]))
            except EmulatorError as error:
                error.report = report
                raise
            finally:
                if trace:
                    report.timeline = trace.finish()
            for _ in numbers:
                progress()

    def fill(self, cta: Cta, launch: Launch) -> None:
        """Give a CTA its shared memory, barriers and roles."""
        track, init = cta.options.tracking, "init" in cta.options.checks
        for spec in self.compiler.shared:
            cta.tiles[spec.key] = tile = Tile.allocate(spec, track, False)
            tile.name += suffix(cta.rank)
        cta.make_barriers(self.compiler.barriers)
        variables = {
            **launch.variables,
            **{k: i for (k, _), i in zip(self.compiler.grid, cta.block, strict=True)},
        }
        parts = zip(self.cta_roles, self.groups, self.shares, strict=True)
        for name, threads, share in parts:
            buffers = {**launch.tensors, **cta.tiles}
            for spec in self.compiler.private:
                if spec.is_per_thread:
                    buffers[spec.key] = Local(spec, len(threads), init)
                else:
                    buffers[spec.key] = Tile.allocate(spec, False, init)
            name += suffix(cta.rank)
            cta.roles.append(Role(cta, name, threads, dict(variables), buffers, share))
        cta.roles[0].leader = True

    def write_back(self, launch: Launch) -> None:
        for tensor, tile in launch.written:
            write_back(tensor, tile.arr)

    def coverage(self, launch: Launch) -> dict[str, float]:
        """Fraction of each output's elements that were written (only when tracked)."""
        return {
            tile.name: float(np.count_nonzero(tile.owner)) / max(tile.owner.size, 1)
            for _, tile in launch.written
            if tile.owner is not None
        }


def run_plain(step, role):
    step.run(role)
    yield from ()


def written_buffers(func) -> set[int]:
    """Keys of the buffers that the kernel stores to."""
    keys: set[int] = set()

    def look(node):
        if kind(node) == "BufferStore":
            keys.add(hash(node.buffer.data))
        elif kind(node) == "Call":
            position = {"region": 1, "access_ptr": 2}.get(op_name(node) if is_op(node) else "")
            if position is not None and int_of(node.args[position]) & WRITES:
                keys.add(hash(node.args[0].buffer.data))

    visit(func.body, look)
    return keys
