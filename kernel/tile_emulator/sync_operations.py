"""Synchronisation: mbarriers, named barriers, fences, waits for asynchronous engines."""

from __future__ import annotations

from .lanes import uniform
from .registry import operation
from .role import Role, Wait
from .steps import Step
from .transactions import compile_barriers


@operation("mbarrier_wait_parity")
def wait_parity(compiler, call) -> Step:
    barriers_of = compile_barriers(compiler, call.args[0])
    parity_of = compiler.expression(call.args[1])
    if compiler.scope.may_vary(call.args[0].indices[0]):
        compiler.wide_waits.append(tuple(compiler.branches))
    flip = compiler.flip

    def run(role: Role):
        parity = int(uniform(role, parity_of(role), "a parity")) ^ flip
        for barrier, _ in barriers_of(role):
            role.wait = Wait(barrier, parity=parity)
            while barrier.blocks(parity):
                yield
            role.wait = None
            barrier.observe(role)
            if role.cta.trace:
                role.cta.trace.waited(role, barrier)

    return Step(run, True)


def arrival(compiler, call, expects: bool) -> Step:
    barriers_of = compile_barriers(compiler, call.args[0])
    size = compiler.expression(call.args[1]) if expects else None

    def run(role: Role):
        released = role.released()
        for barrier, threads in barriers_of(role):
            if size is not None:
                barrier.expect(threads * int(uniform(role, size(role), "a transaction count")))
            if role.cta.trace:
                role.cta.trace.arrived(role, barrier)
            barrier.arrive(role, threads, released)
        role.tick()
        yield

    return Step(run, True)


@operation("ptx_arrive_barrier")
def arrive(compiler, call) -> Step:
    return arrival(compiler, call, expects=False)


@operation("ptx_arrive_barrier_expect_tx")
def arrive_expect(compiler, call) -> Step:
    return arrival(compiler, call, expects=True)


@operation("mbarrier_expect_tx")
def expect(compiler, call) -> Step:
    barriers_of, size = compile_barriers(compiler, call.args[0]), compiler.expression(call.args[1])

    def run(role: Role):
        for barrier, threads in barriers_of(role):
            barrier.expect(threads * int(uniform(role, size(role), "a transaction count")))

    return Step(run)


@operation("fence_proxy_async")
def fence(compiler, call) -> Step:
    common = compiler.scope.depth == 0

    def run(role: Role):
        role.fence()
        if common and role.leader:
            role.cta.fence_common()

    return Step(run)


@operation("sync_warp")
def sync_warp(compiler, call) -> Step:
    def run(role: Role):
        if role.lanes is None:
            role.sync_warp()

    return Step(run)


@operation("tvm_storage_sync")
def sync_threads(compiler, call) -> Step:
    """T.sync_threads: of all threads that get to this place, or of ``count`` threads on a named
    barrier.
    """
    named = len(call.args) >= 3
    if named:
        ident, count = compiler.expression(call.args[1]), compiler.expression(call.args[2])
    around = tuple(compiler.branches)
    reach = compiler.reach
    reach[around] = compiler.threads
    line = compiler.line

    def run(role: Role):
        if named:
            number, threads = int(uniform(role, ident(role))), int(uniform(role, count(role)))
        else:
            number, threads = f"of all threads at {line}", reach[around]
            if threads == role.width:
                role.sync_role()
                return
        yield from meet(role, role.cta.named_barrier(number, threads, role), not around)

    return Step(run, True)


def meet(role: Role, barrier, everyone: bool):
    """Arrive at a barrier and wait until all have; everyone publishes common code, too."""
    if everyone:
        barrier.incoming[:, role.cta.common] = role.cta.common_times()
    role.wait = Wait(barrier, phase=barrier.phase)
    if role.cta.trace:
        role.cta.trace.arrived(role, barrier)
    role.arrive(barrier)
    while role.wait.blocked:
        yield
    role.wait = None
    role.acquire(barrier.released)
    role.sync_role()
    if role.cta.trace:
        role.cta.trace.waited(role, barrier)


def automatic_sync(threads: int, line: str) -> Step:
    """A sync of all threads that TileLang's ThreadSync adds before a line."""

    def run(role: Role):
        if role.cta.options.auto_sync and len(role.cta.roles) > 1:
            barrier = role.cta.named_barrier(f"before {line}", threads, role)
            yield from meet(role, barrier, True)

    return Step(run, True)


@operation("named_barrier_arrive")
def named_arrive(compiler, call) -> Step:
    ident, count = compiler.expression(call.args[0]), compiler.expression(call.args[1])

    def run(role: Role):
        barrier = role.cta.named_barrier(
            int(uniform(role, ident(role))), int(uniform(role, count(role))), role
        )
        if role.cta.trace:
            role.cta.trace.arrived(role, barrier)
        role.arrive(barrier)

    return Step(run)


@operation("wait_wgmma", "warpgroup_wait")
def wait_wgmma(compiler, call) -> Step:
    left = compiler.expression(call.args[0])

    def run(role: Role):
        role.wait_groups(int(left(role)))
        if role.cta.trace:
            role.cta.trace.wait_groups(role, int(left(role)))

    return Step(run)


@operation("tma_store_wait")
def wait_store(compiler, call) -> Step:
    left = compiler.expression(call.args[0])

    def run(role: Role):
        role.wait_stores(int(left(role)))
        if role.cta.trace:
            role.cta.trace.wait_stores(role, int(left(role)))

    return Step(run)
