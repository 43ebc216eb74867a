"""emulate(): run a TileLang kernel on CPU tensors and judge it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count

from .cta import Options
from .program import Program
from .report import Report, parse_checks
from .scheduler import Schedule

ALL_CHECKS = "race,deadlock,bounds,init"
NO_THREAD_SYNC = "tl.disable_thread_storage_sync"


def emulate(
    prim_func,
    *tensors,
    schedule: str = "roundrobin",
    check: str | None = ALL_CHECKS,
    raise_on_issue: bool = True,
    pass_configs: Mapping | None = None,
    auto_fence: bool = True,
    auto_sync: bool | None = None,
    blocks: Callable[[tuple[int, ...]], bool] | None = None,
    role_names: dict[str, tuple[int, int]] | None = None,
    progress: Callable[[int, int], None] | None = None,
    workers: int = 1,
    timeline: bool = False,
) -> Report:
    """Run a TileLang PrimFunc (before lowering), or a Program, on numpy or torch CPU tensors;
    outputs are written in place.

    tensors: one per parameter, scalars as python numbers.  schedule: see scheduler.HELP.
    check: groups of findings, joined by commas; None runs without the detector (bounds are still
    enforced). raise_on_issue: raise the typed error of the first kind found (DeadlockError and
    UnsupportedOperation always are). pass_configs: those the kernel is compiled with; with
    TL_DISABLE_THREAD_STORAGE_SYNC missing syncs between the threads of one role are looked for.
    auto_sync overrides that; auto_fence=False takes TileLang's InjectFenceProxy away. blocks(block
    index) -> bool picks CTAs, those of their clusters with them.  progress(done, total) is called
    after each CTA. workers: processes the CTAs are spread over. timeline: report.timeline of the
    first CTA. Raises KernelFault (its .report holds everything found), UnsupportedOperation,
    TypeError / ValueError for arguments.
    """
    if not isinstance(workers, int) or workers < 1:
        raise ValueError(f"workers={workers!r}: a whole number >= 1 is needed")
    program = (
        prim_func if isinstance(prim_func, Program) else Program(prim_func, role_names=role_names)
    )
    if auto_sync is None:
        auto_sync = not disables_thread_sync(pass_configs or {})
    checks = parse_checks(check) | {"bounds", "deadlock"}
    options = Options(checks, auto_fence, auto_sync, timeline)
    Schedule(schedule, program.roles)
    launch = program.bind(tensors)
    if "race" in options.checks:
        program.track_outputs(launch)
    clusters = launch.clusters if blocks is None else launch.select(blocks)
    if not clusters:
        raise ValueError(f"blocks: none of the launch's {len(launch.blocks)} CTAs would run")
    report = Report(schedule=schedule, roles=program.roles)
    total, done = sum(map(len, clusters)), count(1)
    step = (lambda: progress(next(done), total)) if progress else (lambda: None)
    if workers > 1 and len(clusters) > 1:
        from .pool import run_in_pool

        run_in_pool(program, launch, clusters, schedule, options, report, step, workers)
    else:
        program.run_clusters(launch, clusters, schedule, options, report, step)
    program.write_back(launch)
    report.written = program.coverage(launch)
    error = report.error()
    if error and raise_on_issue:
        raise error
    return report


def disables_thread_sync(pass_configs: Mapping) -> bool:
    """Is TileLang's ThreadSync switched off in these pass configs (keys: PassConfigKey or
    strings)?"""
    for key, value in pass_configs.items():
        if str(getattr(key, "value", key)).lower() == NO_THREAD_SYNC and value:
            return True
    return False
