"""Clusters of CTAs over a pool of forked processes.

Working arrays lie in shared memory, so outputs need no transfer.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait

from threadpoolctl import threadpool_limits

from .cta import Options
from .errors import EmulatorError
from .program import Launch, Program
from .report import Report


def run_in_pool(
    program: Program,
    launch: Launch,
    clusters: Sequence[tuple[int, ...]],
    schedule: str,
    options: Options,
    report: Report,
    progress: Callable[[], None],
    workers: int,
) -> None:
    """Run the CTAs and merge their reports; progress() follows for each.  The first EmulatorError
    that ended a worker is raised with all of them.
    """
    context = multiprocessing.get_context("fork")
    workers = min(workers, len(clusters))
    pipes, processes = [], []
    for worker in range(workers):
        ours, theirs = context.Pipe(duplex=False)
        arguments = (program, launch, clusters[worker::workers], schedule, options, theirs)
        process = context.Process(target=work, args=arguments, daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    error = None
    try:
        while pipes:
            for pipe in wait(pipes):
                try:
                    kind, value = pipe.recv()
                except EOFError:
                    pipes.remove(pipe)
                    continue
                if kind == "done":
                    progress()
                    continue
                if kind == "error":
                    error = error or value
                    value = getattr(value, "report", None)
                if value is not None:
                    report.merge(value)
    finally:
        for process in processes:
            process.join(timeout=5)
            if process.is_alive():
                process.terminate()
                process.join()
    if error is not None:
        if isinstance(error, EmulatorError):
            error.report = report
        raise error
    crashed = [process.exitcode for process in processes if process.exitcode]
    if crashed:
        raise EmulatorError(f"a worker process ended with exit code {crashed[0]}", report)


def work(program, launch, clusters, schedule, options, pipe) -> None:
    """Body of a worker process, of one BLAS thread: more would fight over the cores."""
    report = Report(schedule=schedule, roles=program.roles)
    try:
        with threadpool_limits(limits=1):
            program.run_clusters(
                launch, clusters, schedule, options, report, lambda: pipe.send(("done", None))
            )
    except Exception as error:
        pipe.send(("error", error))
    else:
        pipe.send(("report", report))
    finally:
        pipe.close()
