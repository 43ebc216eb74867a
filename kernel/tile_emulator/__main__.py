"""Run a kernel on random tensors and print what is found.

    python -m tile_emulator MODULE:FACTORY --args EXPRESSION --shape NAME=N,... --timeline FILE.png

The exit status is 0 when nothing is found, 1 when something is, 2 for a kernel that cannot be run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from .api import ALL_CHECKS, emulate
from .errors import DeadlockError, UnsupportedOperation
from .plot import plot_timeline
from .scheduler import HELP, adversarial
from .target import add_arguments, load


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tile_emulator", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_arguments(parser)
    parser.add_argument(
        "--schedule", action="append", help=f"{HELP}; or adversarial: all delays and hurries"
    )
    parser.add_argument("--check", default=ALL_CHECKS, help=f"default {ALL_CHECKS}")
    parser.add_argument("--ctas", type=int, help="run only the first CTAs")
    parser.add_argument("--workers", type=int, default=1, help="processes (default 1)")
    parser.add_argument("--timeline", type=Path, metavar="FILE.png", help="plot the first CTA")
    parser.add_argument("--until", type=float, help="cost units that the plot shows")
    options = parser.parse_args(arguments)
    try:
        target = load(options)
        program = target.program()
        tensors = target.arguments(program)
    except (ValueError, TypeError, UnsupportedOperation) as error:
        print(error, file=sys.stderr)
        return 2
    blocks = program.bind(tensors).blocks[: options.ctas]
    found = False
    for schedule in schedules(options.schedule, program.roles):
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
            except UnsupportedOperation as error:
                print(error, file=sys.stderr)
                return 2
        print(report)
        found = found or not report.ok
        if options.timeline and report.timeline is not None:
            plot_timeline(report.timeline, options.timeline, target.name, options.until)
            print(f"timeline: {options.timeline}")
            options.timeline = None
    return int(found)


def schedules(names: Sequence[str] | None, roles: Sequence[str]) -> list[str]:
    out: list[str] = []
    for name in names or ["roundrobin"]:
        out.extend(adversarial(roles) if name == "adversarial" else [name])
    return out


if __name__ == "__main__":
    sys.exit(main())
