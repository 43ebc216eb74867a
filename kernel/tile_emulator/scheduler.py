"""Which runnable role (or in-flight TMA load) takes the next step."""

from __future__ import annotations

import random
from collections.abc import Sequence

ENGINE = "tma"
HELP = "roundrobin, random:SEED, priority:SEED, delay:ROLE, hurry:ROLE (ROLE: name, number, or tma)"


class Schedule:
    """Picks from the runnable units; the last unit is the TMA engine.

    roundrobin: in turn, TMA loads in order.  random: any, seeded.  priority: a favoured unit runs
    as far as it can, favours change now and then.  delay / hurry: one unit runs only when nothing
    else can / whenever it can. Raises ValueError for another name or an unknown role.
    """

    def __init__(self, name: str, roles: Sequence[str], salt: int = 0):
        self.name = name
        self.kind, _, argument = name.partition(":")
        units = [*roles, ENGINE]
        self.count = len(units)
        self.turn = 0
        self.favour: list[float] = []
        if self.kind in ("random", "priority"):
            if not argument.lstrip("-").isdigit():
                raise ValueError(f"schedule={name!r}: a seed is needed; allowed are {HELP}")
            self.random = random.Random(f"{argument}/{salt}")
            self.favour = [self.random.random() for _ in units]
        elif self.kind in ("delay", "hurry"):
            if argument.isdecimal() and int(argument) < len(roles):
                self.special = int(argument)
            elif argument in units:
                self.special = units.index(argument)
            else:
                raise ValueError(
                    f"schedule={name!r}: no role {argument!r}; roles are {', '.join(units)}"
                )
        elif name != "roundrobin":
            raise ValueError(f"schedule={name!r}: allowed are {HELP}")

    def next_unit(self, runnable: Sequence[int]) -> int:
        if self.kind == "random":
            return self.random.choice(runnable)
        if self.kind == "priority":
            if self.random.random() < 0.05:
                self.favour[self.random.randrange(self.count)] = self.random.random()
            return max(runnable, key=self.favour.__getitem__)
        if self.kind in ("delay", "hurry") and self.special in runnable:
            if self.kind == "hurry" or len(runnable) == 1:
                return self.special
            runnable = [unit for unit in runnable if unit != self.special]
        self.turn = min(runnable, key=lambda unit: (unit - self.turn - 1) % self.count)
        return self.turn

    def next_load(self, loads: int) -> int:
        """Which of the in-flight loads lands."""
        return self.random.randrange(loads) if self.kind in ("random", "priority") else 0


def adversarial(roles: Sequence[str]) -> tuple[str, ...]:
    """The schedules that delay each role, and the TMA engine, in turn, and those that hurry
    them."""
    units = [*roles, ENGINE]
    return tuple(f"delay:{unit}" for unit in units) + tuple(f"hurry:{unit}" for unit in units)
