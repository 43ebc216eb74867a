"""Compiled statements.  A step is a plain closure, or a generator function where it can block or
offers a switch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Step:
    """run(role); when blocking it returns a generator that yields wherever another role may run."""

    run: Callable
    blocking: bool = False


NOTHING = Step(lambda role: None)


def sequence(steps: Sequence[Step]) -> Step:
    """Steps one after the other."""
    steps = [step for step in steps if step is not NOTHING]
    if not steps:
        return NOTHING
    if len(steps) == 1:
        return steps[0]
    if not any(step.blocking for step in steps):
        closures = tuple(step.run for step in steps)

        def plain(role):
            for f in closures:
                f(role)

        return Step(plain)
    pairs = tuple((step.run, step.blocking) for step in steps)

    def generator(role):
        for f, blocking in pairs:
            if blocking:
                yield from f(role)
            else:
                f(role)

    return Step(generator, True)


def repeat(values: Callable, enter: Callable, body: Step) -> Step:
    """A loop: for each value of values(role): enter(role, value), then the body."""
    run = body.run
    if body.blocking:

        def generator(role):
            for value in values(role):
                enter(role, value)
                yield from run(role)

        return Step(generator, True)

    def plain(role):
        for value in values(role):
            enter(role, value)
            run(role)

    return Step(plain)
