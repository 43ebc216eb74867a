"""Command-line values and what is allowed for them.  Errors are one line: argument, value, rule."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from .report import GROUPS, parse_checks
from .scheduler import Schedule

PICTURES = (".png", ".pdf", ".svg")


class Parser(argparse.ArgumentParser):
    """Leaves the usage out of its error messages; exit status 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def one_line(error: BaseException) -> str:
    """Kind and text of an error, without line breaks."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def whole(least: int) -> Callable[[str], int]:
    """Parser of a whole number of at least ``least``."""

    def parse(text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]+", text) or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r}: a whole number >= {least} is needed")
        return int(text)

    return parse


def positive(text: str) -> float:
    """A finite number above 0."""
    value = number(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text!r}: a finite number > 0 is needed")
    return value


def number(text: str) -> float:
    """An int where the text is one, else a float."""
    try:
        return int(text) if re.fullmatch(r"[+-]?[0-9]+", text) else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: a number is needed") from None


def named(parse: Callable[[str], float]) -> Callable[[str], dict[str, float]]:
    """Parser of "a=1,b=2", each value by ``parse``, each name once."""

    def parse_all(text: str) -> dict[str, float]:
        out: dict[str, float] = {}
        for item in filter(None, re.split(r"[,\s]+", text)):
            name, equals, value = item.partition("=")
            if not equals:
                raise argparse.ArgumentTypeError(f"{item!r}: NAME=NUMBER is needed")
            if name in out:
                raise argparse.ArgumentTypeError(f"{item!r}: {name} is given twice")
            try:
                out[name] = parse(value)
            except argparse.ArgumentTypeError as error:
                raise argparse.ArgumentTypeError(f"{name}={error}") from None
        return out

    return parse_all


def checks(text: str) -> str:
    """Groups of findings, at least one."""
    try:
        groups = parse_checks(text)
    except ValueError:
        groups = frozenset()
    if not groups:
        allowed = ", ".join(GROUPS)
        raise argparse.ArgumentTypeError(f"{text!r}: allowed are {allowed}, joined by commas")
    return text


def picture(text: str) -> Path:
    """A file that can be written, of a kind that can be drawn."""
    path = Path(text)
    if path.suffix.lower() not in PICTURES:
        raise argparse.ArgumentTypeError(f"{text!r}: a name in {', '.join(PICTURES)} is needed")
    return writable(text)


def writable(text: str) -> Path:
    """A file in a folder that exists."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: a folder; a file is needed")
    if not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        raise argparse.ArgumentTypeError(
            f"{text!r}: {str(path.parent)!r} is no folder that can be written to"
        )
    return path


def existing(text: str) -> Path:
    """A file that is there."""
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"{text!r}: an existing file is needed")
    return Path(text)


def check_schedules(option: str, names: Sequence[str], roles: Sequence[str]) -> None:
    """Raises ValueError naming the option and the first schedule that there is not."""
    for name in names:
        try:
            Schedule(name, roles)
        except ValueError as error:
            rule = str(error).partition(": ")[2]
            raise ValueError(f"{option} {name!r}: {rule}") from None


def check_names(option: str, given: Sequence[str], allowed: Sequence[str], what: str) -> None:
    """Raises ValueError naming the option and the first name that the kernel does not have."""
    for name in given:
        if name not in allowed:
            known = f"allowed are {', '.join(allowed)}" if allowed else "it has none"
            raise ValueError(f"{option} {name}: the kernel has no such {what}; {known}")
