"""Run a kernel on random tensors and print what is found.

    python -m tile_emulator MODULE:FACTORY --args EXPRESSION --shape NAME=N,... --timeline FILE.png

The exit status is 0 when nothing is found, 1 when something is, 2 for a kernel that cannot be run.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from tqdm import tqdm

from .api import ALL_CHECKS, emulate
from .arguments import Parser, check_schedules, checks, one_line, picture, positive, whole
from .errors import DeadlockError, EmulatorError, UnsupportedOperation
from .plot import plot_timeline
from .scheduler import HELP, adversarial
from .target import add_arguments, load


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        if options.until is not None and options.timeline is None:
            raise ValueError(f"--until {options.until:g}: it goes with --timeline FILE.png")
        target = load(options)
        program = target.program()
        blocks = target.blocks(program, target.arguments(program), options.ctas)
        names = schedules(options.schedule, program.roles)
        check_schedules("--schedule", names, program.roles)
    except (ValueError, TypeError, UnsupportedOperation) as error:
        print(error, file=sys.stderr)
        return 2
    except MemoryError as error:
        print(f"--shape {options.shape}: {one_line(error)}; smaller sizes", file=sys.stderr)
        return 2
    if options.cost:
        try:
            print(cost(program, target, blocks, names[0], options.check, options.cost))
        except EmulatorError as error:
            print(error, file=sys.stderr)
            return 2
        return 0
    found = False
    for schedule in names:
        with tqdm(total=len(blocks), unit="CTA", leave=False, disable=len(blocks) < 8) as bar:
            try:
                report = emulate(
                    program,
                    *target.arguments(program),
                    schedule=schedule,
                    check=options.check,
                    raise_on_issue=False,
                    pass_configs=target.pass_configs,
                    blocks=lambda block: block in blocks,
                    workers=options.workers,
                    timeline=options.timeline is not None,
                    progress=lambda *_, bar=bar: bar.update(),
                )
            except DeadlockError as error:
                report = error.report
            except EmulatorError as error:
                print(error, file=sys.stderr)
                return 2
        print(report)
        found = found or not report.ok
        if options.timeline and report.timeline is not None:
            try:
                plot_timeline(report.timeline, options.timeline, target.name, options.until)
            except OSError as error:
                print(f"--timeline '{options.timeline}': {one_line(error)}", file=sys.stderr)
                return 2
            print(f"timeline: {options.timeline}")
            options.timeline = None
    return int(found)


def parser() -> Parser:
    out = Parser(prog="python -m tile_emulator", description=__doc__)
    out.formatter_class = argparse.RawDescriptionHelpFormatter
    add_arguments(out)
    out.add_argument(
        "--schedule", action="append", help=f"{HELP}; or adversarial: all delays and hurries"
    )
    out.add_argument("--check", type=checks, default=ALL_CHECKS, help=f"default {ALL_CHECKS}")
    out.add_argument("--ctas", type=whole(1), help="run only the first CTAs, in whole clusters")
    out.add_argument("--workers", type=whole(1), default=1, help="processes (default 1)")
    out.add_argument("--timeline", type=picture, metavar="FILE.png", help="plot the first CTA")
    out.add_argument(
        "--cost",
        type=whole(1),
        metavar="N",
        help="only compare the CPU time with and without the checks, the best of N runs each",
    )
    out.add_argument("--until", type=positive, help="cost units that the plot shows")
    return out


def cost(program, target, blocks: Sequence, schedule: str, check: str, repeat: int) -> str:
    """CPU time of emulate() with the checks and without, in this process, and their ratio."""
    seconds: dict[str | None, list[float]] = {None: [], check: []}
    for turn in range(repeat + 1):
        for groups, times in seconds.items():
            tensors = target.arguments(program)
            start = time.process_time()
            emulate(
                program,
                *tensors,
                schedule=schedule,
                check=groups,
                raise_on_issue=False,
                pass_configs=target.pass_configs,
                blocks=lambda block: block in blocks,
            )
            if turn:
                times.append(time.process_time() - start)
    bare, full = min(seconds[None]), min(seconds[check])
    ratio = full / bare if bare else float("nan")
    return (
        f"{len(blocks)} CTA: {bare:.3f} s without checks, {full:.3f} s with {check}: {ratio:.2f}x"
    )


def schedules(names: Sequence[str] | None, roles: Sequence[str]) -> list[str]:
    out: list[str] = []
    for name in names or ["roundrobin"]:
        out.extend(adversarial(roles) if name == "adversarial" else [name])
    return out


if __name__ == "__main__":
    sys.exit(main())
