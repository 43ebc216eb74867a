"""Statements compiled to steps: control flow, binds, stores; tile operations come from the registry
in operations.py.
"""

from __future__ import annotations

import numpy as np

from .auto_sync import accesses, sync_places
from .branches import element_branch, run_owned, run_share, thread_branch
from .cluster import BARRIER_SCOPE
from .edits import HOLDS_BACK, SYNCHRONISATION, Edit, Site
from .errors import UnsupportedOperation
from .expressions import Closure, Expressions
from .indexing import split_linear
from .lanes import is_array, uniform
from .memory import BufferSpec
from .operations import OPERATIONS, blocks_or_is_tile_operation, is_ignored
from .ownership import NestOwner, RegisterTiles, Touch, links_of
from .partition import Branch
from .scope import Scope
from .steps import NOTHING, Step, repeat, sequence
from .stores import local_store, tile_store
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

ORDERING = frozenset({
    "mbarrier_wait_parity", "fence_proxy_async", "tvm_storage_sync", "cluster_sync",
})  # fmt: skip


class Compiler:
    """Compiles the body of a PrimFunc; afterwards its attributes describe the launch.

    grid: [(blockIdx variable, extent closure)]; cluster: CTAs of a cluster by dimension;
    meets_at_start: they wait for each other before their first statement; shared / private:
    allocations; barriers: key -> (name, counts); splits: conditionals on the thread number whose
    bodies block or hold tile operations; products: for each matrix product the conditionals on the
    thread number around it; tiles, row_axes: what is known of register tiles; wide_waits: waits
    whose barrier depends on the thread; reach: threads that get to a place.
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
        self.cluster: tuple[int, ...] = (1, 1, 1)
        self.meets_at_start = False
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
        if "cluster_dims" in annotations:
            self.cluster = tuple(int_of(n) for n in annotations["cluster_dims"])
        for variable, counts in dict(annotations.get("barrier_init", {})).items():
            name = str(variable.name) or f"barrier#{len(self.barriers)}"
            counts = self.edit.counts.get(name, [int_of(n) for n in counts])
            self.barriers[hash(variable)] = (name, list(counts))
        for buffer in block.alloc_buffers:
            self.allocate(buffer)
        return self.statement(block.body)

    def allocate(self, buffer) -> None:
        scope = str(buffer.scope())
        if scope in ("shared.barrier", BARRIER_SCOPE):
            self.meets_at_start |= scope == BARRIER_SCOPE
            return
        shape = tuple(int_of(n) for n in buffer.shape)
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
            return element_branch(condition, then, other)
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
        return thread_branch(condition, then, other, orders)

    def optional(self, s) -> Step:
        return NOTHING if s is None else self.statement(s)

    def side(self, s, branch: Branch, taken: bool) -> Step:
        self.scope.depth += 1
        self.branches.append((branch, taken))
        step = self.optional(s)
        self.branches.pop()
        self.scope.depth -= 1
        return step

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
