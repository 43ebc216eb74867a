"""Draws the figures of the report from the recorded results.

python -m plots                    all of them, into plots/figures/
python -m plots waterfall roofline --results elsewhere/results --out elsewhere
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from .common import save, styled
from .data import DEVICE, RESULTS, MissingDataError, Recorded

FIGURES = (
    "stall_decomposition",
    "core_time",
    "heat_map",
    "ablation",
    "rejected",
    "open_source",
    "two_cases",
    "tensor_activity",
    "waterfall",
    "roofline",
    "speedup",
)
FOLDER = Path(__file__).with_name("figures")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 if every figure asked for was drawn; 1 names those that were not, and why."""
    options = _parser().parse_args(argv)
    recorded = Recorded(options.results, options.device)
    missing = {}
    for name in options.figure or FIGURES:
        try:
            with styled():
                paths = save(import_module(f"plots.{name}").draw(recorded), name, options.out)
            print(*paths)
        except MissingDataError as error:
            missing[name] = str(error)
    for name, what in missing.items():
        print(f"{name} is not drawn: {what}", file=sys.stderr)
    return 1 if missing else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m plots", description="Draws the figures.")
    # No `choices`: with nargs="*" argparse holds an empty list against them.
    parser.add_argument("figure", nargs="*", type=_figure, help=", ".join(FIGURES))
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--device", default=DEVICE, metavar="SLUG")
    parser.add_argument("--out", type=Path, default=FOLDER, metavar="FOLDER")
    return parser


def _figure(name: str) -> str:
    if name not in FIGURES:
        raise argparse.ArgumentTypeError(f"no figure {name!r}, there are {', '.join(FIGURES)}")
    return name
