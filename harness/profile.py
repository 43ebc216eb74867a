"""The lab's profiler command lines: built, shown, and run where the tool and a GPU are there.

python -m harness.profile ncu --case long_low_gva
python -m harness.profile nsys --case long_low_gva --print-only
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from .child import ROOT, child_environment
from .device import pick_device
from .progress import note
from .selection import select_cases

TOOLS = ("ncu", "nsys")
# The kernels of this package and of its ladder, whatever else a process launches.
KERNELS = "regex:^gdn_"
MISSING = 3
_PLACES = (
    "/usr/local/cuda/bin",
    "/opt/nvidia/nsight-compute/*",
    "/opt/nvidia/nsight-systems/*/bin",
)


def find_tool(tool: str) -> str | None:
    """The tool's path: on PATH, or where NVIDIA's installers put it (the newest one)."""
    found = shutil.which(tool)
    if found:
        return found
    candidates = [
        path
        for place in _PLACES
        for path in Path("/").glob(f"{place[1:]}/{tool}")
        if os.access(path, os.X_OK) and path.is_file()
    ]
    return str(max(candidates)) if candidates else None


def run_command(case: str, python: str, arguments: Sequence[str] = ()) -> list[str]:
    """The lab's command under the profiler."""
    return [python, "run.py", "--case", case, "--output-format", "csv", *arguments]


def nsys_command(case: str, tool: str, python: str, output: str, arguments: Sequence[str]) -> list:
    """The timeline of the timed calls: run.py opens the capture range by the profiler API."""
    return [
        tool,
        "profile",
        "--clock-control",
        "none",
        "--capture-range=cudaProfilerApi",
        "--capture-range-end=stop",
        "--force-overwrite=true",
        "-o",
        output,
        *run_command(case, python, arguments),
    ]


def ncu_command(
    case: str, tool: str, python: str, output: str, arguments: Sequence[str], kernels: str = KERNELS
) -> list[str]:
    """The counters of two launches of our kernels, after three that are skipped.

    An earlier report of that name is written over.
    """
    return [
        tool,
        "--clock-control",
        "none",
        "--set",
        "full",
        "--kernel-name",
        kernels,
        "--launch-skip",
        "3",
        "--launch-count",
        "2",
        "--csv",
        "-f",
        "-o",
        output,
        *run_command(case, python, arguments),
    ]


def report_command(tool: str, output: str, page: str = "details") -> list[str]:
    """Prints a recorded ncu report as CSV."""
    return [tool, "--import", f"{output}.ncu-rep", "--page", page, "--csv"]


def build(options: argparse.Namespace, tool: str) -> list[str]:
    """The command line of `options`; `tool` is the profiler's path or name."""
    output = options.output or f"{options.case}_{options.tool}"
    python = options.python or sys.executable
    if options.tool == "nsys":
        return nsys_command(options.case, tool, python, output, options.arguments)
    return ncu_command(options.case, tool, python, output, options.arguments, options.kernel_name)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the profiler's exit code; 3 where the tool or a GPU is missing."""
    parser = _parser()
    own, passed_on = _split(sys.argv[1:] if argv is None else argv)
    options = parser.parse_args(own)
    options.arguments = passed_on
    try:
        select_cases([options.case])
        extra = dict(_assignment(text) for text in options.env)
    except ValueError as error:
        parser.error(str(error))
    tool = find_tool(options.tool)
    command = build(options, tool or options.tool)
    prefix = [f"{name}={shlex.quote(value)}" for name, value in extra.items()]
    print(" ".join([*prefix, shlex.join(command)]), flush=True)
    if options.print_only:
        return 0
    missing = _missing(options.tool, tool)
    if missing:
        note(f"not run: {missing}")
        return MISSING
    environment = {**child_environment(), "GDN_PROFILING": options.tool, **extra}
    code = subprocess.run(command, cwd=ROOT, env=environment).returncode
    if code:
        note(f"{options.tool} ended with exit code {code}; its own message is above")
    elif options.tool == "ncu":
        note(f"read it with: {shlex.join(report_command(tool, command[command.index('-o') + 1]))}")
    return code


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """What stands before "--" and what stands after it."""
    argv = list(argv)
    where = argv.index("--") if "--" in argv else len(argv)
    return argv[:where], argv[where + 1 :]


def _missing(name: str, tool: str | None) -> str | None:
    lacks = []
    if tool is None:
        lacks.append(f"{name} is neither on PATH nor where NVIDIA installs it")
    if pick_device().type != "cuda":
        lacks.append("torch sees no GPU")
    return " and ".join(lacks) or None


def _assignment(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not (name and sign):
        raise ValueError(f"--env is {text!r}, must be NAME=VALUE")
    return name, value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m harness.profile",
        usage="%(prog)s {ncu,nsys} [options] [-- ARGUMENTS OF run.py]",
        description="Profiles run.py on a case with the lab's command lines. What follows -- goes"
        " to run.py: -- --version v7; through make: make profile-ncu ARGS='-- --version v7'.",
    )
    parser.add_argument("tool", choices=TOOLS)
    parser.add_argument("--case", default="long_low_gva", metavar="NAME")
    parser.add_argument("--print-only", action="store_true", help="show the command, run nothing")
    parser.add_argument("--output", metavar="PREFIX", help="report file (default: CASE_TOOL)")
    parser.add_argument(
        "--kernel-name", default=KERNELS, metavar="FILTER", help="ncu's (default: %(default)s)"
    )
    parser.add_argument("--python", metavar="PATH", help="the interpreter to profile")
    parser.add_argument(
        "--env", action="append", default=[], metavar="NAME=VALUE", help="repeatable"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
