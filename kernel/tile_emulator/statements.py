"""Statements compiled to steps: control flow, binds, stores; tile operations come from the registry
in operations.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .auto_sync import accesses, sync_places
from .dtypes import NARROW, rounded
from .edits import HOLDS_BACK, SYNCHRONISATION, Edit, Site
from .errors import UnsupportedOperation
from .expressions import Closure, Expressions
from .indexing import split_linear
from .lanes import is_array, uniform, with_elements
from .memory import BufferSpec, Local, Tile
from .operations import OPERATIONS, blocks_or_is_tile_operation, is_ignored
from .ownership import NestOwner, RegisterTiles, Touch, links_of
from .role import WARP, WARP_GROUP, Role, Share
from .scope import Scope
from .statement_checks import check_collisions, one_value, touch_write
from .steps import NOTHING, Step, repeat, sequence
from .sync_operations import automatic_sync
from .tir import (
    PARALLEL,
    calls,
    int_of,
    is_op,
    kind,
    op_name,
    source_line,
    uses,
    visit,
)

ORDERING = frozenset({"mbarrier_wait_parity", "fence_proxy_async", "tvm_storage_sync"})


@dataclass(frozen=True, eq=False)
class Branch:
    """A conditional on the thread number, inside (conditional, side taken) others."""

    condition: Closure
    around: tuple[tuple[Branch, bool], ...]

    def mask(self, probe: Role) -> np.ndarray | None:
        """Its truth per thread, or None where it depends on more than the thread number."""
        try:
            p = self.condition(probe)
        except (KeyError, AttributeError, TypeError, UnsupportedOperation):
            return None
        return p if is_array(p) and len(p) == probe.width else None


class Compiler:
    """Compiles the body of a PrimFunc; afterwards its attributes describe the launch.

    grid: [(blockIdx variable, extent closure)]; shared / private: allocations; barriers: key ->
    (name, counts); splits: conditionals on the thread number whose bodies block or hold tile
    operations; products: for each matrix product the conditionals on the thread number around it;
    tiles, row_axes: what is known of register tiles; wide_waits: waits whose barrier depends on the
    thread; reach: threads that get to a place.
    """

    def __init__(self, edit: Edit | None = None):
        self.scope = Scope()
        self.expressions = Expressions(self.scope)
        self.edit = edit or Edit()
        self.sites: list[Site] = []
        self.moved = self.settled = False
        self.flip = False
        self.loops = 0
        self.threads = 128
        self.grid: list[tuple[int, Closure]] = []
        self.shared: list[BufferSpec] = []
        self.private: list[BufferSpec] = []
        self.barriers: dict[int, tuple[str, list[int]]] = {}
        self.splits: list[Branch] = []
        self.branches: list[tuple[Branch, bool]] = []
        self.products: list[tuple[tuple[Branch, bool], ...]] = []
        self.tiles = RegisterTiles()
        self.row_axes: dict[int, int] = {}
        self.reach: dict[tuple[tuple[Branch, bool], ...], int] = {}
        self.wide_waits: list[tuple[tuple[Branch, bool], ...]] = []
        self.bound: list[tuple[int, Closure]] = []
        self.line = "?:0"

    def expression(self, e) -> Closure:
        return self.expressions.compile(e)

    # ---- statements ----
    def statement(self, s) -> Step:
        method = getattr(self, "compile_" + kind(s), None)
        if method is None:
            raise UnsupportedOperation(
                f"statement {kind(s)} at {source_line(s)}", where=source_line(s)
            )
        outer, line = self.line, source_line(s)
        self.line = line if not line.startswith("?") else outer
        try:
            return method(s)
        except UnsupportedOperation as error:
            if error.where == "?":
                raise UnsupportedOperation(
                    f"{self.line}: {error.message}", where=self.line
                ) from error
            raise
        finally:
            self.line = outer

    def compile_SeqStmt(self, s) -> Step:
        steps, edited = [], None
        for position, x in enumerate(s.seq):
            first = len(self.sites)
            steps.append(self.statement(x))
            if self.edit.site is not None and first <= self.edit.site < len(self.sites):
                edited = position
        if edited is not None and self.edit.action == "early" and not self.settled:
            target = earliest_place(s.seq, edited)
            if target is not None:
                steps.insert(target, steps.pop(edited))
                self.moved = self.settled = True
        if self.scope.depth == 0 and not self.scope.parallel:
            self.insert_syncs(s.seq, steps)
        return sequence(steps)

    def insert_syncs(self, statements, steps: list[Step]) -> None:
        """Add what ThreadSync adds to code that all threads run."""
        found = [accesses(x, self.scope.buffers, self.scope.on_thread) for x in statements]
        for position in sorted(sync_places(found, self.loops > 0), reverse=True):
            line = source_line(statements[position])
            steps[position] = sequence([automatic_sync(self.threads, line), steps[position]])

    def compile_SBlockRealize(self, s) -> Step:
        return self.compile_SBlock(s.block)

    def compile_SBlock(self, block) -> Step:
        annotations = dict(block.annotations) if block.annotations else {}
        if "tl.launch_threads" in annotations:
            x, *rest = (int_of(n) for n in annotations["tl.launch_threads"])
            if any(n != 1 for n in rest):
                raise UnsupportedOperation("a launch with more than one thread dimension")
            self.threads = x
        for variable, counts in dict(annotations.get("barrier_init", {})).items():
            name = str(variable.name) or f"barrier#{len(self.barriers)}"
            counts = self.edit.counts.get(name, [int_of(n) for n in counts])
            self.barriers[hash(variable)] = (name, list(counts))
        for buffer in block.alloc_buffers:
            self.allocate(buffer)
        return self.statement(block.body)

    def allocate(self, buffer) -> None:
        if str(buffer.scope()) == "shared.barrier":
            return
        shape = tuple(int_of(n) for n in buffer.shape)
        scope = str(buffer.scope())
        size = "x".join(map(str, shape))
        name = str(buffer.name) or f"{scope}#{len(self.scope.buffers)}({size})"
        spec = BufferSpec(hash(buffer.data), name, shape, str(buffer.dtype), scope)
        self.scope.buffers[spec.key] = spec
        (self.shared if spec.is_shared else self.private).append(spec)

    def compile_AttrStmt(self, s) -> Step:
        return self.statement(s.body)

    def compile_DeclBuffer(self, s) -> Step:
        return self.statement(s.body) if getattr(s, "body", None) is not None else NOTHING

    def compile_Bind(self, s) -> Step:
        key, value = hash(s.var), self.expression(s.value)
        if self.scope.in_nest(s.value):
            self.scope.parallel[key] = None

            def bind_element(role):
                role.variables[key] = value(role)
                if key not in role.nest:
                    role.nest.append(key)

            return Step(bind_element)
        if self.scope.parallel or not self.scope.may_vary(s.value):
            self.bound.append((key, value))

            def bind(role):
                role.variables[key] = value(role)

            return Step(bind)
        self.scope.varying.add(key)
        self.bound.append((key, value))

        def bind_thread(role):
            x = value(role)
            if is_array(x) and role.lanes is not None:
                wide = np.zeros(role.width, x.dtype)
                wide[role.lanes] = x
                x = wide
            role.variables[key] = x

        return Step(bind_thread)

    def compile_Evaluate(self, s) -> Step:
        call = s.value
        if kind(call) != "Call":
            return NOTHING
        name, line = op_name(call), self.line
        if is_ignored(name):
            return NOTHING
        action = self.note_site(name, s)
        if action == "drop":
            return NOTHING
        if name not in OPERATIONS:
            raise UnsupportedOperation(f"operation {call.op.name}: {call}")
        self.flip = action == "flip"
        step = OPERATIONS[name](self, call)
        run = step.run
        if step.blocking:

            def generator(role):
                role.line = line
                yield from run(role)

            return Step(generator, True)

        def plain(role):
            role.line = line
            run(role)

        return Step(plain)

    def note_site(self, name: str, s) -> str | None:
        """Number a synchronisation statement; the edit's action if it is the one to change."""
        if name not in SYNCHRONISATION:
            return None
        number = len(self.sites)
        text = " ".join([name, *(self.argument_text(x) for x in s.value.args)])
        self.sites.append(Site(number, name, text, self.line, tuple(self.branches)))
        return self.edit.action if number == self.edit.site else None

    def argument_text(self, e) -> str:
        """An argument of a synchronisation statement, barriers by their names."""
        if kind(e) == "BufferLoad" and hash(e.buffer.data) in self.barriers:
            return f"{self.barriers[hash(e.buffer.data)][0]}[{e.indices[0]}]"
        return str(e)

    # ---- loops ----
    def compile_For(self, s) -> Step:
        if s.thread_binding is not None:
            tag = str(s.thread_binding.thread_tag)
            if not tag.startswith("blockIdx"):
                raise UnsupportedOperation(f"loop bound to {tag}")
            self.grid.append((hash(s.loop_var), self.expression(s.extent)))
            return self.statement(s.body)
        if int(s.kind) == PARALLEL:
            return self.parallel(s)
        return self.serial(s)

    def serial(self, s) -> Step:
        key, name = hash(s.loop_var), str(s.loop_var.name)
        start, extent = self.expression(s.min), self.expression(s.extent)
        step = self.expression(s.step) if getattr(s, "step", None) is not None else (lambda role: 1)
        if self.scope.may_vary(s.extent) or self.scope.may_vary(s.min):
            self.scope.varying.add(key)
        sites = len(self.sites)
        self.loops += 1
        body = self.statement(s.body)
        self.loops -= 1
        if self.edit.site is not None and sites <= self.edit.site < len(self.sites):
            self.settled = True  # an early release stays inside its loop

        def values(role):
            first = uniform(role, start(role), f"the start of loop {name}")
            count = uniform(role, extent(role), f"the trip count of loop {name}")
            stride = step(role)
            outer = role.loops.get(name)
            for i in range(count):
                yield first + i * stride
            if outer is None:
                role.loops.pop(name, None)
            else:
                role.loops[name] = outer

        def enter(role, value):
            role.variables[key] = role.loops[name] = value

        return repeat(values, enter, body)

    def compile_While(self, s) -> Step:
        condition, body = self.expression(s.condition), self.statement(s.body)

        def values(role):
            while uniform(role, condition(role), "the condition of a while loop"):
                yield 0

        return repeat(values, lambda role, value: None, body)

    def parallel(self, s) -> Step:
        if self.scope.parallel:
            raise UnsupportedOperation("T.Parallel inside another one's body")
        loops = []
        while kind(s) == "For" and int(s.kind) == PARALLEL:
            if int_of(s.min):
                raise UnsupportedOperation("T.Parallel that does not start at 0")
            loops.append((hash(s.loop_var), s.extent))
            s = s.body
        if any(kind(n) != "IntImm" for _, n in loops):
            raise UnsupportedOperation("T.Parallel with a run-time extent")
        extents = tuple(int_of(n) for _, n in loops)
        self.scope.parallel = {key: (axis, extents[axis]) for axis, (key, _) in enumerate(loops)}
        try:
            body, owner = self.statement(s), self.owner(s)
        finally:
            self.scope.parallel = {}
        if body.blocking:
            raise UnsupportedOperation("a blocking operation inside T.Parallel")
        rank = len(extents)
        ranges = [
            (key, np.arange(extents[axis]).reshape([-1 if a == axis else 1 for a in range(rank)]))
            for axis, (key, _) in enumerate(loops)
        ]
        keys, run, line = [key for key, _ in loops], body.run, self.line
        row_axes = self.row_axes

        def nest(role):
            role.line = line
            role.variables.update(ranges)
            role.extents, role.masked, role.nest, role.owner = extents, False, list(keys), owner
            if role.lanes is not None:
                run_owned(role, run)
            elif role.is_part and owner.stores_out:
                run_share(role, run, row_axes)
            else:
                run(role)
            role.extents, role.nest, role.owner = (), [], None
            if role.cta.trace:
                role.cta.trace.elementwise(role, extents)

        return Step(nest)

    def owner(self, body) -> NestOwner:
        """What a nest does with register tiles of two dimensions."""
        touches, variables, outside = [], [], []

        def look(node):
            if kind(node) not in ("BufferLoad", "BufferStore"):
                return
            spec = self.scope.buffers.get(hash(node.buffer.data))
            if spec is None:
                return
            if spec.scope == "local.fragment" and len(node.indices) == 2:
                indices = tuple(self.expression(i) for i in node.indices)
                touches.append(Touch(spec.key, spec.shape, indices))
                variables.append((spec.key, tuple(self.nest_variable(i) for i in node.indices)))
            elif kind(node) == "BufferStore" and not spec.is_per_thread:
                outside.append(spec)

        visit(body, look)
        self.tiles.links.extend(links_of(variables))
        return NestOwner(tuple(touches), self.tiles, bool(outside))

    def nest_variable(self, e) -> int | None:
        """The variable of the nest that an index runs with, if it is that plus a scalar."""
        parts = split_linear(e, self.scope, self.expression)
        return parts[0] if parts is not None else None

    # ---- conditionals ----
    def compile_IfThenElse(self, s) -> Step:
        condition = self.expression(s.condition)
        if self.scope.parallel:
            then, other = self.statement(s.then_case), self.optional(s.else_case)
            return self.element_branch(condition, then, other)
        on_thread = self.scope.on_thread(s.condition)
        bodies = [body for body in (s.then_case, s.else_case) if body is not None]
        if on_thread:
            branch = Branch(condition, tuple(self.branches))
            if any(blocks_or_is_tile_operation(body) for body in bodies):
                self.splits.append(branch)
            then = self.side(s.then_case, branch, True)
            other = self.side(s.else_case, branch, False)
        else:
            then, other = self.statement(s.then_case), self.optional(s.else_case)
        orders = any(op_name(call) in ORDERING for body in bodies for call in calls(body))
        return self.thread_branch(condition, then, other, orders)

    def optional(self, s) -> Step:
        return NOTHING if s is None else self.statement(s)

    def side(self, s, branch: Branch, taken: bool) -> Step:
        self.scope.depth += 1
        self.branches.append((branch, taken))
        step = self.optional(s)
        self.branches.pop()
        self.scope.depth -= 1
        return step

    @staticmethod
    def element_branch(condition: Closure, then: Step, other: Step) -> Step:
        def run(role):
            p = condition(role)
            if not is_array(p):
                (then if p else other).run(role)
                return
            mask = np.broadcast_to(p, role.extents)
            if mask.all():
                then.run(role)
            elif not mask.any():
                other.run(role)
            else:
                with_elements(role, mask, then.run)
                if other is not NOTHING:
                    with_elements(role, ~mask, other.run)

        return Step(run)

    @staticmethod
    def thread_branch(condition: Closure, then: Step, other: Step, orders: bool) -> Step:
        """A conditional of thread-level code; where the threads differ both sides run in turn, each
        with its threads.
        """

        def sides(role):
            p = condition(role)
            if not is_array(p):
                yield (then if p else other), role.lanes
                return
            outer = role.lanes
            for mask, side in ((p, then), (~p, other)):
                if side is NOTHING or not mask.any():
                    continue
                if mask.all():
                    yield side, outer
                else:
                    yield side, np.flatnonzero(mask) if outer is None else outer[mask]

        def enter(role, lanes):
            outer, role.lanes = role.lanes, lanes
            subset = lanes is not outer and (orders or role.deferred)
            return outer, role.enter_subset() if subset else None

        def leave(role, outer, saved):
            if saved is not None:
                role.leave_subset(saved, role.lanes)
            role.lanes = outer

        if not (then.blocking or other.blocking):

            def plain(role):
                for side, lanes in sides(role):
                    outer, saved = enter(role, lanes)
                    side.run(role)
                    leave(role, outer, saved)

            return Step(plain)

        def generator(role):
            for side, lanes in sides(role):
                outer, saved = enter(role, lanes)
                if side.blocking:
                    yield from side.run(role)
                else:
                    side.run(role)
                leave(role, outer, saved)

        return Step(generator, True)

    # ---- stores ----
    def compile_BufferStore(self, s) -> Step:
        spec = self.expressions.spec_of(s.buffer)
        index = self.expressions.index(s.buffer, s.indices)
        value, line = self.expression(s.value), self.line
        if spec.is_per_thread:
            if self.scope.parallel:
                raise UnsupportedOperation(
                    f"a store to the per-thread {spec.name} inside T.Parallel"
                )
            base = self.scope.buffers[spec.key].shape
            return Step(local_store(spec, base, index, value, line))
        return Step(tile_store(spec, index, value, line, common=self.scope.depth == 0))


def earliest_place(statements, position: int) -> int | None:
    """Where a release may be moved to: ahead of work, not of a wait or of a value it uses."""
    target, work = position, False
    for k in range(position - 1, -1, -1):
        s = statements[k]
        if any(is_op(call) and op_name(call) in HOLDS_BACK for call in calls(s)):
            break
        if kind(s) == "Bind":
            if uses(statements[position], {hash(s.var)}):
                break
            continue
        target, work = k, True
    return target if work else None


def run_owned(role: Role, run: Callable) -> None:
    """A nest that only some threads of the role reach: each works on the elements it owns."""
    positions = role.owner.positions(role)
    if positions is None:
        raise UnsupportedOperation(
            f"T.Parallel by {role.active_count} of the {role.width} threads of {role.name}, "
            "over tiles of unknown layout",
            where=role.where(),
        )
    mine = np.isin(positions, role.share.offset + role.lanes)
    if mine.all():
        run(role)
    elif mine.any():
        with_elements(role, mine, run)


def run_share(role: Role, run: Callable, row_axes: dict[int, int]) -> None:
    """A nest of a wide role that stores outside of registers: each warp group its own rows, or the
    first all where the layout is not known.
    """
    mine = role.owner.share(role, row_axes)
    if mine is None:
        if role.share.offset == 0:
            run(role)
    elif mine.any():
        with_elements(role, mine, run)


def local_store(
    spec: BufferSpec, base: tuple[int, ...], index: Callable, value: Closure, line: str
) -> Callable:
    """Store to a per-thread buffer; spec may be a view of an allocation of shape ``base``."""
    key, shape, dtype = spec.key, spec.shape, spec.dtype
    single = int(np.prod(shape)) == 1

    def run(role: Role):
        role.line = line
        local: Local = role.buffers[key]
        target = local.seen_as(spec) if spec.is_view else local
        x = rounded(value(role), dtype)
        at = index(role, shape).key
        per_thread = is_array(x) or any(is_array(i) for i in at)
        if role.lanes is None and single and not per_thread and target.per_thread:
            target.gather()
        if not target.per_thread and (per_thread or role.lanes is not None):
            target.spread()
        if target.per_thread:
            at = (role.positions if role.lanes is None else role.lanes, *at)
        target.arr[at] = x
        if target.ready is not None:
            target.ready[at] = True
        if spec.is_view:
            local.take_from(target, base)
        if role.cta.trace:
            role.cta.trace.thread_code(role)

    return run


def tile_store(
    spec: BufferSpec, index: Callable, value: Closure, line: str, common: bool
) -> Callable:
    key, dtype, narrow = spec.key, spec.dtype, spec.dtype in NARROW

    def run(role: Role):
        role.line = line
        x = value(role)
        tile: Tile = role.buffers[key]
        at = index(role, tile.arr.shape)
        thread_level = is_array(at.lanes)
        if not thread_level and not role.extents and role.leaves(tile, common):
            return
        if narrow:
            x = rounded(x, dtype)
        if at.axes is not None:
            x = from_nest(x, at.axes, role.extents)
        elif thread_level and is_array(x):
            check_collisions(role, tile, at, x)
        elif is_array(x) and not role.extents:
            x = one_value(role, tile, x)
        partner = ("nest", role.extents) if role.extents else None
        touch_write(role, tile, at, partner, common and not thread_level)
        tile.arr[at.key] = x
        tile.mark_ready(at.key)
        if role.cta.trace and not role.extents:
            role.cta.trace.thread_code(role)

    return run


def from_nest(x, axes: tuple[int, ...], extents: tuple[int, ...]):
    """A value over the nest as an array over the index's slices; where elements collide the last
    one stays.
    """
    if not is_array(x):
        return x
    rank = len(extents)
    if len(axes) < rank:
        x = np.broadcast_to(x, extents)[
            tuple(slice(None) if axis in axes else -1 for axis in range(rank))
        ]
        kept = sorted(axes)
        axes = tuple(kept.index(axis) for axis in axes)
    elif x.ndim < len(axes):
        x = np.broadcast_to(x, extents)
    return x if axes == tuple(range(len(axes))) else x.transpose(axes)


def find_roles(compiler: Compiler) -> list[tuple[np.ndarray, Share]]:
    """Threads grouped by the conditions on the thread number whose bodies block or hold tile
    operations.

    A condition that cuts through a warp, or through the threads of a matrix product, makes no
    roles: its body runs with a part of the role's threads. A role of several warp groups of which
    each waits for barriers of its own is a role for each of them, with a share of the tiles.
    """
    probe = make_probe(compiler)
    product_threads = {around: reached(around, probe) for around in compiler.products}
    columns = []
    for branch in compiler.splits:
        mask = branch.mask(probe)
        if mask is None:
            continue
        taken = mask & reached(branch.around, probe)
        cut = [
            threads
            for threads in product_threads.values()
            if 0 < np.sum(taken & threads) < np.sum(threads)
        ]
        if not cuts_warp(taken) and not cut:
            columns.append(taken)
    groups: dict[tuple, list[int]] = {}
    for thread in range(compiler.threads):
        groups.setdefault(tuple(bool(mask[thread]) for mask in columns), []).append(thread)
    roles = []
    for threads in map(np.array, groups.values()):
        width = len(threads)
        waits = any(reached(around, probe)[threads].all() for around in compiler.wide_waits)
        parts = width // WARP_GROUP if waits and width % WARP_GROUP == 0 else 1
        for number, part in enumerate(np.split(threads, parts)):
            roles.append((part, Share(width, number * (width // parts))))
    for around in compiler.reach:
        compiler.reach[around] = int(np.sum(reached(around, probe)))
    compiler.row_axes.update(compiler.tiles.row_axes())
    return roles


def make_probe(compiler: Compiler) -> Role:
    """All threads of the CTA, with what can be computed from the thread number alone."""
    probe = Role(None, "probe", np.arange(compiler.threads), {}, {})
    for key, value in compiler.bound:
        try:
            probe.variables[key] = value(probe)
        except (KeyError, AttributeError, TypeError, UnsupportedOperation):
            continue
    return probe


def roles_at(
    compiler: Compiler, around: tuple, names: Sequence[str], groups: Sequence[np.ndarray]
) -> list[str]:
    """Names of the roles with a thread that gets to a place inside these conditionals."""
    threads = reached(around, make_probe(compiler))
    return [name for name, group in zip(names, groups, strict=True) if threads[group].any()]


def reached(around: tuple[tuple[Branch, bool], ...], probe: Role) -> np.ndarray:
    """Threads that get to a place inside these conditionals (all, where that is not known)."""
    threads = np.ones(probe.width, bool)
    for branch, taken in around:
        mask = branch.mask(probe)
        if mask is not None:
            threads &= mask if taken else ~mask
    return threads


def cuts_warp(mask: np.ndarray) -> bool:
    """Does the boundary of these threads run through a warp?"""
    starts = np.arange(0, len(mask), WARP)
    return bool(
        (np.logical_and.reduceat(mask, starts) != np.logical_or.reduceat(mask, starts)).any()
    )
