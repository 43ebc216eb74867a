"""Keeps a document's numbers those of results/.

    python -m harness.derived docs/report.md            says which differ
    python -m harness.derived docs/report.md --write    rewrites them

A marker is an HTML comment with an expression over harness/derivations.py, and stands right before
its number or word:

    <!--= ladder("v7", "long_low_gva") -->1.343 ms

The number must be the value, rounded to the digits that are shown. Of what is not recorded yet it
is n.nnn, with as many n as there will be digits. A table stands between <!-- table: NAME --> and
<!-- end table -->. What a document says about its numbers nothing checks: read it again when they
change.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from .derivations import Derivations, NotRecordedError
from .progress import note

MARKER = re.compile(r"<!--= (?P<expression>.+?) -->(?P<shown>[+-]?\w(?:[\w.:+-]*\w)?)?", re.S)
TABLE = re.compile(r"<!-- table: (?P<name>\w+) -->\n(?P<rows>.*?)\n?<!-- end table -->", re.S)
# What stands where a number will stand.
PENDING = re.compile(r"[+-]?n+(?:\.(?P<decimals>n+))?")
NUMBER = re.compile(r"[+-]?\d+(?:\.(?P<decimals>\d+))?")
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.S)
# A measured quantity: a decimal fraction, or a number with a unit behind it.
QUANTITY = re.compile(
    r"(?<![\w.])[+-]?\d+\.\d+\b|(?<![\w.])[+-]?\d+(?:\.\d+)?"
    r"(?= ?(?:%|ms\b|us\b|GB/s|TB/s|TFLOP|points?\b|times\b|KB\b|x\b))"
)


class UnderivableError(ValueError):
    """A marker or table that cannot be evaluated; the message says which and why."""


def evaluate(expression: str, derive: Derivations) -> object:
    """The value of a marker's expression, None where it is not recorded yet."""
    names = {"__builtins__": {}, **derive.functions()}
    try:
        return eval(compile(expression.strip(), "<marker>", "eval"), names)
    except NotRecordedError:
        return None
    except Exception as error:
        raise UnderivableError(f"{expression.strip()}: {type(error).__name__}: {error}") from error


def shown_as(value: object, shown: str | None, expression: str) -> str:
    """`value` with as many digits as `shown` has, and its sign where `shown` has one."""
    if isinstance(value, str):
        return value
    number = NUMBER.fullmatch(shown or "") or PENDING.fullmatch(shown or "")
    if number is not None and value is None:
        decimals = "n" * len(number["decimals"] or "")
        return ("+" if shown.startswith("+") else "") + "n" + (decimals and f".{decimals}")
    if number is None or isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UnderivableError(f"{expression.strip()}: {shown!r} cannot show {value!r}")
    sign = "+" if shown.startswith("+") else ""
    text = f"{value:{sign}.{len(number['decimals'] or '')}f}"
    return text.replace("-", "", 1) if text.strip("-0.") == "" else text


def refresh(text: str, derive: Derivations) -> str:
    """The document with every marked number and table as results/ have them now."""

    def table(match: re.Match) -> str:
        try:
            rows = derive.table(match["name"])
        except LookupError as error:
            raise UnderivableError(f"table {match['name']}: {error}") from error
        return f"<!-- table: {match['name']} -->\n{rows}\n<!-- end table -->"

    def marker(match: re.Match) -> str:
        expression, shown = match["expression"], match["shown"]
        value = shown_as(evaluate(expression, derive), shown, expression)
        return f"<!--= {expression} -->{value}"

    return MARKER.sub(marker, TABLE.sub(table, text))


def mismatches(text: str, derive: Derivations) -> list[str]:
    """One line about each line of the document that refresh() would change."""
    fresh = refresh(text, derive)
    if len(fresh.splitlines()) != len(text.splitlines()):
        return ["a table has another number of rows"]
    pairs = zip(text.splitlines(), fresh.splitlines(), strict=True)
    return [
        f"line {number}: {_differing(old, new)}"
        for number, (old, new) in enumerate(pairs, 1)
        if old != new
    ]


def _differing(old: str, new: str) -> str:
    shown = zip(MARKER.finditer(old), MARKER.finditer(new), strict=False)
    for before, after in shown:
        if before["shown"] != after["shown"]:
            return f"{before['expression'].strip()} is {after['shown']}, not {before['shown']}"
    return f"it is {new.strip()!r}, not {old.strip()!r}"


def unmarked(text: str) -> list[str]:
    """Quantities that no marker and no derived table stands behind, with what surrounds them."""
    bare = MARKER.sub("", TABLE.sub("", text))
    bare = CODE.sub("", bare)
    return [
        bare[max(0, found.start() - 30) : found.end() + 15].replace("\n", " ")
        for found in QUANTITY.finditer(bare)
    ]


def read_document(path: Path) -> str:
    """A document's text. Raises ValueError where it cannot be read or holds nothing derived."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text, must be a Markdown file") from None
    if not (MARKER.search(text) or TABLE.search(text)):
        raise ValueError(
            f"{path} holds nothing derived, must have a marker <!--= EXPRESSION --> or a table"
            " <!-- table: NAME --> ... <!-- end table -->"
        )
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 if the document says what results/ say, or was made to."""
    parser = argparse.ArgumentParser(
        prog="python -m harness.derived",
        description="Checks the marked numbers of a document against results/.",
    )
    parser.add_argument("document", type=Path)
    parser.add_argument("--write", action="store_true", help="rewrite the numbers that differ")
    options = parser.parse_args(argv)
    try:
        text = read_document(options.document)
    except ValueError as error:
        parser.error(f"argument document: {error}")
    derive = Derivations()
    try:
        found = mismatches(text, derive)
        if options.write and found:
            options.document.write_text(refresh(text, derive), encoding="utf-8")
    except UnderivableError as error:
        note(str(error))
        return 1
    for line in found:
        print(line)
    pending = sum(bool(PENDING.fullmatch(match["shown"] or "")) for match in MARKER.finditer(text))
    if pending and not found:
        note(f"{pending} numbers are not recorded yet")
    return 0 if options.write or not found else 1


if __name__ == "__main__":
    sys.exit(main())
