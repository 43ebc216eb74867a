"""run.py's command line: the lab's options and outputs, and what this project adds."""

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from cases import Case

from .device import CPU, pick_device, throttled, why_untimed
from .emulation import ALL_CHECKS, AUTO, EMULATOR, Emulation, NothingRunsError, resolve_backend
from .implementations import ALIASES, BACKENDS, CORE, OURS, OWN, SCOPES, names
from .options import seconds
from .progress import Progress, note
from .report import FORMATS, Kind, Report
from .results import Stamp, begin_metadata, finish_metadata, load_rows
from .selection import Subject, available_peers, draw_seed, peer_entries, select_cases
from .session import Session
from .timing import REPETITIONS, WARMUP, Plan, Protocol
from .versions import (
    ALL,
    FAILURE_TIMEOUT_S,
    as_expected,
    check_heads,
    every_version,
    expected,
    versions_table,
)
from .worker import TIMEOUT_S

# What --hidden without a number stands for; no number is it.
NEW_SEED = object()
NOTHING_RUNS = 2
MEASURED_DEVICE = "nvidia-h200"
TABLE_CASE = "long_low_gva"


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 only if every case passed; 2 for arguments that make no sense.

    With --version all, a version that is kept to show how it fails must fail. What cannot run here
    is left out with a note: it fails nothing, but 2 is returned if that leaves nothing to run.
    """
    parser = _parser()
    options = parser.parse_args(argv)
    hidden_seed = draw_seed() if options.hidden is NEW_SEED else options.hidden
    subject = Subject(options.impl, options.backend, options.version)
    subjects, absent = [subject], []
    try:
        if options.out is not None:
            _check_writable(Path(options.out))
        cases = select_cases(options.case, options.cases, hidden_seed)
        plan = Plan(Protocol(options.protocol), options.warmup, options.repetitions)
        if not (options.list or options.versions_table):
            _check_emulation(options)
            if options.version == ALL:
                subjects, absent = every_version(subject)
            for one in subjects:
                one.check(options.scope)
    except (ValueError, OSError, ImportError) as error:
        parser.error(str(error))
    if options.versions_table:
        case = options.case[0] if options.case else TABLE_CASE
        rows = load_rows(device=MEASURED_DEVICE)
        print(versions_table(rows, case, options.output_format), end="")
        return 0
    if hidden_seed is not None:
        note(f"hidden cases of seed {hidden_seed} (--hidden {hidden_seed} draws them again)")
    if options.list:
        _list(cases)
        return 0
    for line in absent:
        note(line)
    return _run(options, cases, subjects, plan)


def _check_writable(path: Path) -> None:
    """Raises ValueError, before anything runs, for a file that could not be written."""
    if path.is_dir():
        raise ValueError(f"--out {path} is a directory, must be a file")
    if not path.parent.is_dir():
        raise ValueError(f"--out {path}: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"--out {path} cannot be written")


def _check_emulation(options: argparse.Namespace) -> None:
    if options.check is not None and options.backend != EMULATOR:
        raise ValueError(f"--check is the emulator's, add --backend {EMULATOR}")
    if options.reference_benchmarks and options.backend == EMULATOR:
        raise ValueError("--reference-benchmarks compares times, the emulator has none")
    if options.reference_benchmarks and options.version == ALL:
        raise ValueError("--reference-benchmarks goes with one version, not with all")
    Emulation(options.check)


def _run(
    options: argparse.Namespace, cases: list[Case], subjects: list[Subject], plan: Plan
) -> int:
    emulated = options.backend == EMULATOR
    device = torch.device(CPU) if emulated else pick_device()
    untimed = "the emulator runs on the CPU" if emulated else why_untimed(device)
    if untimed:
        note(f"nothing is timed: {untimed}")
    runs = _runnable(cases, subjects, device)
    if not runs:
        note("nothing can run here")
        return NOTHING_RUNS
    beside, kind = [], Kind.PLAIN
    if options.reference_benchmarks:
        kind = Kind.REFERENCES
        present, absent = available_peers()
        beside = peer_entries(present)
        for line in absent:
            note(line)
    elif options.version == ALL:
        kind = Kind.VERSIONS
    report = Report(options.output_format, kind, cases)
    metadata = begin_metadata(Stamp.now(device))
    progress = Progress("case" if len(subjects) == 1 else "run")
    said = set()
    satisfied = True
    with Session(
        device,
        [plan],
        options.backend,
        options.timeout,
        isolated=not options.in_process,
        check=options.check,
        progress=progress.say,
        steps=progress.steps,
    ) as session:
        for case, subject, meaning in progress.over(runs):
            progress.say(" ".join(filter(None, (case.name, subject.version))))
            if meaning and (case, meaning) not in said:
                note(f"{case.name}: {meaning}")
                said.add((case, meaning))
            expectation = expected(subject.version)
            timeout_s = options.timeout
            if expectation == "fail" and device.type == "cuda":
                timeout_s = min(timeout_s, FAILURE_TIMEOUT_S)
            (student,), references = session.grade(case, subject, options.scope, beside, timeout_s)
            report.add(case, student, references, expectation)
            wanted = expectation if kind is Kind.VERSIONS else "pass"
            satisfied = satisfied and as_expected(student, wanted)
            for outcome in (student, *references):
                name = subject.version if kind is Kind.VERSIONS else outcome.implementation
                for text in filter(None, (outcome.reason, throttled(outcome.clock_mhz))):
                    note(f"{case.name}: {name}: {text}")
    report.finish(finish_metadata(metadata))
    if options.out:
        Path(options.out).write_text(report.text, encoding="utf-8")
    return 0 if satisfied else 1


def _runnable(
    cases: Sequence[Case], subjects: Sequence[Subject], device: torch.device
) -> list[tuple[Case, Subject, str]]:
    """Each case with each subject that can run it, and what that means; the rest is noted."""
    runs = []
    for case in cases:
        for subject in subjects:
            try:
                runs.append((case, *_resolved(subject, case, device)))
            except NothingRunsError as error:
                note(f"{case.name}: {subject.version} left out: {error}")
    return runs


def _resolved(subject: Subject, case: Case, device: torch.device) -> tuple[Subject, str]:
    """The subject with the backend that it gets on `case`, and a line that says so.

    Raises NothingRunsError where there is none.
    """
    if subject.submission is not None or ALIASES.get(subject.name, subject.name) not in OWN:
        return subject, ""
    if subject.version is not None:
        check_heads(subject.version, case)
    backend, meaning = resolve_backend(subject.backend, case, device.type, subject.version)
    return replace(subject, backend=backend), meaning


def _list(cases: Sequence[Case]) -> None:
    width = max(len(case.name) for case in cases)
    for case in cases:
        state = "state" if case.initial_state else "no state"
        print(
            f"{case.name:{width}}  B={case.B} T={case.T} Hq={case.Hq} Hv={case.Hv} {state}"
            f" {case.gate} rtol={case.rtol:g} atol={case.atol:g}"
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="run.py",
        description="Checks Gated DeltaNet prefill on the lab's cases, then times what is right."
        " Exit code 0 only if every case passed; cases left out because a version cannot run"
        " them here do not count.",
    )
    what = parser.add_argument_group("what to run")
    what.add_argument("--case", action="append", default=[], metavar="NAME", help="repeatable")
    what.add_argument("--cases", metavar="PATH", help="a case file instead of cases/public.csv")
    what.add_argument(
        "--hidden",
        nargs="?",
        const=NEW_SEED,
        metavar="SEED",
        type=int,
        help="the hidden cases of SEED (a new one if left out) instead of the public ones; not with"
        " --cases",
    )
    what.add_argument("--list", action="store_true", help="list the cases and stop")
    what.add_argument(
        "--impl",
        default=OURS,
        metavar="NAME|FILE",
        help=f"{', '.join(names())}, package.module:NAME, or a submission file that defines"
        " gdn_prefill_forward (default: %(default)s)",
    )
    what.add_argument(
        "--version",
        metavar="VERSION",
        help="a version of the kernel's ladder, such as v1, or all, one after the other; those that"
        " are kept to show how they fail must fail then",
    )
    what.add_argument(
        "--versions-table",
        action="store_true",
        help=f"print the ladder with the times recorded on an H200 (of --case, else {TABLE_CASE})"
        " and stop",
    )
    what.add_argument(
        "--backend",
        choices=BACKENDS,
        default=AUTO,
        help="cuda: the kernels; torch: the portable functions; emulator: the kernels on the CPU;"
        " auto: cuda on a Hopper GPU, without one the emulator for small cases and torch for large"
        " (default: %(default)s)",
    )
    what.add_argument(
        "--check",
        nargs="?",
        const=ALL_CHECKS,
        metavar="GROUPS",
        help="with --backend emulator: look for races, deadlocks, bad indices and reads of nothing"
        f" (GROUPS: {ALL_CHECKS}; default: all of them)",
    )
    what.add_argument("--scope", choices=SCOPES, default=CORE)
    how = parser.add_argument_group("how to time it")
    how.add_argument("--protocol", choices=[p.value for p in Protocol], default=Protocol.OJ.value)
    how.add_argument("--warmup", type=int, default=WARMUP, metavar="N")
    how.add_argument("--repetitions", type=int, default=REPETITIONS, metavar="N")
    how.add_argument(
        "--timeout", type=seconds, default=TIMEOUT_S, metavar="SECONDS", help="for one case"
    )
    how.add_argument(
        "--in-process",
        action="store_true",
        help="trusted implementations in this process, not in a child (under a profiler always)",
    )
    out = parser.add_argument_group("what to print")
    out.add_argument("--output-format", choices=FORMATS, default=FORMATS[0])
    out.add_argument("--out", metavar="FILE", help="write what is printed to FILE as well")
    out.add_argument(
        "--reference-benchmarks",
        action="store_true",
        help="time the public implementations that are installed, in turn with the student",
    )
    return parser
