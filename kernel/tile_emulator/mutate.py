"""Mutation test of a kernel's synchronisation.

    python -m tile_emulator.mutate MODULE:FACTORY --args EXPRESSION --shape NAME=N,... --out
    FILE.csv

Every synchronisation statement is left out in turn, every wait's parity flipped, every arrival
moved ahead of the work it releases, every barrier's count changed by one role's arrivals. A mutant
is killed when a run under one of the schedules reports something or gives other tensors. A survivor
needs a reason, in a CSV file of mutant,reason (--justified); without one the exit status is 1.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from .api import emulate
from .arguments import Parser, check_schedules, existing, whole
from .edits import ARRIVALS, WAITS, Edit
from .errors import EmulatorError, KernelFault, UnsupportedOperation
from .partition import roles_at
from .program import Program
from .scheduler import adversarial
from .target import Target, add_arguments, load

COLUMNS = (
    "mutant", "mutation", "operation", "roles", "line", "verdict", "found", "schedule", "detail",
    "reason",
)  # fmt: skip
BASIC_SCHEDULES = ("roundrobin", "priority:1", "random:1", "priority:2", "random:2")


@dataclass(frozen=True)
class Mutant:
    """One changed kernel.  name is stable while the kernel's statements keep their text."""

    name: str
    mutation: str
    operation: str
    roles: str
    line: str
    edit: Edit


@dataclass(frozen=True)
class Verdict:
    """killed, by what finding under which schedule; or survived."""

    killed: bool
    found: str = ""
    schedule: str = ""
    detail: str = ""


def mutants(target: Target, arrivals: dict[str, dict[str, int]]) -> Iterator[Mutant]:
    """All mutants; arrivals are those of a clean run."""
    program = target.program()
    seen: Counter = Counter()
    for site in program.compiler.sites:
        roles = " ".join(roles_at(program.compiler, site.around, program.cta_roles, program.groups))
        seen[roles, site.text] += 1
        place = f"{site.text} #{seen[roles, site.text]} in {roles}"
        actions = ["drop"]
        if site.operation in WAITS:
            actions.append("flip")
        if site.operation in ARRIVALS and target.program(Edit(site.number, "early")).compiler.moved:
            actions.append("early")
        for action in actions:
            edit = Edit(site.number, action)
            yield Mutant(f"{action} {place}", action, site.operation, roles, site.line, edit)
    for name, counts in program.compiler.barriers.values():
        for role, threads in by_role(arrivals.get(name, {})):
            for sign in (-1, 1):
                changed = [count + sign * threads for count in counts]
                if min(changed) > 0:
                    what = f"count {name} {sign * threads:+d} ({role})"
                    yield Mutant(
                        what, "count", "alloc_barrier", role, "", Edit(counts={name: changed})
                    )


def by_role(arrivals: dict[str, int]) -> list[tuple[str, int]]:
    """Roles and the threads that arrive together; of those of a cluster's CTAs each once."""
    return list(dict.fromkeys((name.split("@")[0], n) for name, n in arrivals.items()))


class Bench:
    """Runs mutants on the same tensors as the unchanged kernel, a few CTAs of them."""

    def __init__(self, target: Target, ctas: int, schedules: Sequence[str] | None):
        self.target, self.ctas = target, ctas
        program = target.program()
        self.schedules = tuple(schedules or (*BASIC_SCHEDULES, *adversarial(program.roles)))
        self.auto_fence = False
        report = self.run(program, self.schedules[0])[0]
        if report.kinds <= {"fence"} and report.issues:
            self.auto_fence = True
            report = self.run(program, self.schedules[0])[0]
        if not report.ok:
            raise KernelFault(f"the unchanged kernel is not clean:\n{report}", report)
        self.report = report
        self.expected = self.run(program, self.schedules[0])[1]

    def run(self, program: Program, schedule: str):
        tensors = self.target.arguments(program)
        report = emulate(
            program,
            *tensors,
            schedule=schedule,
            raise_on_issue=False,
            pass_configs=self.target.pass_configs,
            auto_fence=self.auto_fence,
            blocks=lambda block: block in self.blocks(program, tensors),
        )
        return report, [as_array(x) for x in tensors if not np.isscalar(x)]

    def blocks(self, program: Program, tensors) -> list:
        return self.target.blocks(program, tensors, self.ctas)

    def judge(self, mutant: Mutant) -> Verdict:
        """Raises UnsupportedOperation where the changed kernel cannot be run."""
        program = self.target.program(mutant.edit)
        for schedule in self.schedules:
            try:
                report, tensors = self.run(program, schedule)
            except UnsupportedOperation:
                raise
            except EmulatorError as error:
                report, tensors = error.report, None
            if not report.ok:
                kinds = " ".join(sorted(report.kinds))
                return Verdict(True, kinds, schedule, str(report.issues[0]).replace("\n", " "))
            if not all(map(same, tensors, self.expected)):
                return Verdict(True, "result", schedule, "other tensors")
        return Verdict(False)


def as_array(x) -> np.ndarray:
    return x.float().numpy() if hasattr(x, "numpy") else x


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return np.array_equal(a, b, equal_nan=True)


def read_reasons(path: Path | None) -> dict[str, str]:
    """mutant -> reason.  Raises ValueError for a row without one."""
    if path is None:
        return {}
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        if not (row.get("mutant") and (row.get("reason") or "").strip()):
            raise ValueError(f"{path}: a row needs a mutant and a reason: {row}")
    return {row["mutant"]: row["reason"].strip() for row in rows}


def table(bench: Bench, reasons: dict[str, str], progress: bool = True) -> Iterator[dict[str, str]]:
    """One row a mutant."""
    todo: Iterable[Mutant] = list(mutants(bench.target, bench.report.arrivals))
    for mutant in tqdm(todo, unit="mutant", disable=not progress):
        verdict = bench.judge(mutant)
        yield {
            "mutant": mutant.name,
            "mutation": mutant.mutation,
            "operation": mutant.operation,
            "roles": mutant.roles,
            "line": mutant.line,
            "verdict": "killed" if verdict.killed else "survived",
            "found": verdict.found,
            "schedule": verdict.schedule,
            "detail": verdict.detail,
            "reason": "" if verdict.killed else reasons.get(mutant.name, ""),
        }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m tile_emulator.mutate", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_arguments(parser)
    parser.add_argument("--out", type=Path, required=True, help="CSV file of mutants and verdicts")
    parser.add_argument("--justified", type=existing, help="CSV file of mutant,reason of survivors")
    parser.add_argument("--ctas", type=whole(1), default=2, help="CTAs that are run (default 2)")
    parser.add_argument(
        "--schedules", help="joined by commas (default: five, then each role delayed and hurried)"
    )
    options = parser.parse_args(arguments)
    try:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        reasons = read_reasons(options.justified)
        target = load(options)
        chosen = options.schedules and options.schedules.split(",")
        check_schedules("--schedules", chosen or (), target.program().roles)
        bench = Bench(target, options.ctas, chosen)
    except (OSError, ValueError, TypeError, EmulatorError) as error:
        print(error, file=sys.stderr)
        return 2
    rows = list(table(bench, reasons))
    with options.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return summary(rows, reasons)


def summary(rows: Sequence[dict[str, str]], reasons: dict[str, str]) -> int:
    """Print the counts, unexplained survivors and reasons no longer needed; the exit status."""
    killed = Counter((row["mutation"], row["verdict"]) for row in rows)
    for (mutation, verdict), count in sorted(killed.items()):
        print(f"{mutation:<6} {verdict:<9} {count}")
    bare = [row for row in rows if row["verdict"] == "survived" and not row["reason"]]
    for row in bare:
        print(f"survived without a reason: {row['mutant']}  ({row['line']})")
    survivors = {row["mutant"] for row in rows if row["verdict"] == "survived"}
    for name in sorted(set(reasons) - survivors):
        print(f"reason not needed: {name}")
    return 1 if bare else 0


if __name__ == "__main__":
    sys.exit(main())
