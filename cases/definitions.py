"""What a case is, the public cases on disk, and the rule that draws hidden ones."""

import csv
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

SEED = 42
CHUNK = 64
HEAD_DIM = 128
GATES = ("random_decay", "mixed")
TOLERANCE = 5e-3
PUBLIC = Path(__file__).with_name("public.csv")
# The hidden cases are drawn around these public ones, in this order.
TWINS = ("short_tail_state", "chain_equal", "parallel_gva", "long_low_gva")

_REQUIRED = ("name", "B", "T", "Hq", "Hv", "initial_state", "gate")
_OPTIONAL = ("rtol", "atol")
_FLAGS = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}


@dataclass(frozen=True)
class Case:
    """One problem size with its gate mode and its tolerance.

    B sequences of T tokens, Hq query/key heads, Hv value heads (Hv % Hq == 0).
    `twin_of` names the public case whose baseline a hidden case borrows; None for any other.
    """

    name: str
    B: int
    T: int
    Hq: int
    Hv: int
    initial_state: bool
    gate: str
    rtol: float = TOLERANCE
    atol: float = TOLERANCE
    twin_of: str | None = None

    def __post_init__(self) -> None:
        if (
            not self.name
            or self.name != self.name.strip()
            or "," in self.name
            or not self.name.isprintable()
        ):
            raise ValueError(
                f"case name {self.name!r}: must be a word without commas, blanks or control"
                " characters"
            )
        for field in ("B", "T", "Hq", "Hv"):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"case {self.name}: {field} is {value!r}, must be an integer >= 1")
        if self.Hv % self.Hq:
            raise ValueError(f"case {self.name}: Hv={self.Hv} is not a multiple of Hq={self.Hq}")
        if not isinstance(self.initial_state, bool):
            raise ValueError(
                f"case {self.name}: initial_state is {self.initial_state!r}, must be True or False"
            )
        if self.gate not in GATES:
            raise ValueError(f"case {self.name}: gate is {self.gate!r}, must be one of {GATES}")
        for field in _OPTIONAL:
            value = getattr(self, field)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"case {self.name}: {field} is {value!r}, must be finite and >= 0")

    @property
    def chunks(self) -> int:
        """Chunks of one sequence, a partial last one included."""
        return -(-self.T // CHUNK)

    @property
    def tail(self) -> int:
        """Tokens in the last chunk, 1 to CHUNK."""
        return self.T - (self.chunks - 1) * CHUNK

    @property
    def group(self) -> int:
        """Value heads that share one query/key head."""
        return self.Hv // self.Hq

    @property
    def state_heads(self) -> int:
        """Independent recurrences: B * Hv."""
        return self.B * self.Hv

    @property
    def baseline_name(self) -> str:
        """The case whose baseline scores this one."""
        return self.twin_of or self.name


def load_cases(path: str | Path | None = None) -> list[Case]:
    """Reads a case file (CSV, header of public.csv; rtol and atol may be left out).

    None means the eight public cases. Raises FileNotFoundError, or ValueError that names the file,
    the line and what is allowed there.
    """
    path = PUBLIC if path is None else Path(path)
    if path.is_dir():
        raise ValueError(f"case file {path} is a directory, must be a CSV file")
    if not path.is_file():
        raise FileNotFoundError(f"case file {path} does not exist")
    try:
        # A byte order mark, which spreadsheets write, is skipped.
        with path.open(newline="", encoding="utf-8-sig") as handle:
            cases = list(_parse(handle, path))
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise ValueError(f"{path}: not UTF-8 text, byte 0x{byte:02x} is no part of it") from None
    except csv.Error as error:
        raise ValueError(f"{path}: {error}") from None
    if not cases:
        raise ValueError(f"{path}: no case in it")
    return cases


def _parse(handle, path: Path) -> Iterator[Case]:
    reader = csv.DictReader(handle, restval="")
    columns = reader.fieldnames or []
    missing = [column for column in _REQUIRED if column not in columns]
    unknown = [column for column in columns if column not in _REQUIRED + _OPTIONAL]
    if missing or unknown:
        raise ValueError(
            f"{path}: columns missing {missing}, unknown {unknown}; "
            f"wanted {','.join(_REQUIRED)} and optionally {','.join(_OPTIONAL)}"
        )
    seen: set[str] = set()
    for row in reader:
        where = f"{path}, line {reader.line_num}"
        if None in row:
            raise ValueError(f"{where}: more fields than the header's {len(columns)} columns")
        try:
            case = _case(row)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        if case.name in seen:
            raise ValueError(f"{where}: the name {case.name!r} is used twice")
        seen.add(case.name)
        yield case


def _case(row: dict[str, str]) -> Case:
    flag = row["initial_state"].strip().lower()
    if flag not in _FLAGS:
        raise ValueError(f"initial_state is {row['initial_state']!r}, must be yes or no")
    return Case(
        name=row["name"].strip(),
        **{field: _number(int, row, field) for field in ("B", "T", "Hq", "Hv")},
        initial_state=_FLAGS[flag],
        gate=row["gate"].strip(),
        **{field: _number(float, row, field) for field in _OPTIONAL if row.get(field)},
    )


def _number(kind: type, row: dict[str, str], field: str):
    try:
        return kind(row[field])
    except ValueError:
        raise ValueError(f"{field} is {row[field]!r}, must be a number ({kind.__name__})") from None


def hidden_cases(seed: int) -> list[Case]:
    """Draws the four hidden cases: each a twin of a public one.

    A twin keeps B, the heads and the number of chunks; its tail length is another one (1 to CHUNK),
    drawn from `seed`; the state and the gate mode are flipped. The same seed gives the same cases.
    """
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise TypeError(f"seed is {seed!r}, must be an integer")
    draw = random.Random(seed)
    public = {case.name: case for case in load_cases()}
    return [_twin(public[name], draw) for name in TWINS]


def _twin(case: Case, draw: random.Random) -> Case:
    tail = draw.choice([length for length in range(1, CHUNK + 1) if length != case.tail])
    flipped = GATES[1 - GATES.index(case.gate)]
    return replace(
        case,
        name=f"hidden_{case.name}",
        T=(case.chunks - 1) * CHUNK + tail,
        initial_state=not case.initial_state,
        gate=flipped,
        twin_of=case.name,
    )
