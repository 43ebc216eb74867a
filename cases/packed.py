"""Packed batches: several sequences one after the other in one row, as servers run them."""

import csv
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch

from .definitions import HEAD_DIM, SEED, Case
from .inputs import Inputs, make_inputs

PACKED = Path(__file__).with_name("packed.csv")
COLUMNS = ("name", "Hq", "Hv", "lengths", "initial_state", "gate")
_FLAGS = {"yes": True, "no": False}


@dataclass(frozen=True)
class PackedCase:
    """Sequences of `lengths` tokens in one row; the other fields as in Case."""

    name: str
    Hq: int
    Hv: int
    lengths: tuple[int, ...]
    initial_state: bool
    gate: str

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 1:
            raise ValueError(f"case {self.name}: lengths are {self.lengths}, each must be >= 1")
        _ = self.row

    @property
    def row(self) -> Case:
        """The case of one sequence that has all the tokens. Raises ValueError as Case does."""
        tokens = sum(self.lengths)
        return Case(self.name, 1, tokens, self.Hq, self.Hv, self.initial_state, self.gate)

    @property
    def bounds(self) -> tuple[int, ...]:
        """Where each sequence starts, and where the last one ends."""
        return (0, *accumulate(self.lengths))


def load_packed(path: Path = PACKED) -> list[PackedCase]:
    """Reads a file of packed batches (CSV, header of packed.csv).

    lengths are numbers and "8x1024"-like repetitions, separated by blanks. Raises ValueError naming
    the file and the line.
    """
    with path.open(newline="", encoding="utf-8") as handle:
        reader = csv.DictReader(handle)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise ValueError(f"{path}: columns {reader.fieldnames}, must be {list(COLUMNS)}")
        cases = []
        for row in reader:
            try:
                cases.append(_case(row))
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {reader.line_num}: {error}") from None
        return cases


def _case(row: dict[str, str]) -> PackedCase:
    if row["initial_state"] not in _FLAGS:
        raise ValueError(f"initial_state is {row['initial_state']!r}, must be yes or no")
    lengths: list[int] = []
    for part in row["lengths"].split():
        count, times, length = part.rpartition("x")
        lengths += [int(length)] * (int(count) if times else 1)
    return PackedCase(
        row["name"],
        int(row["Hq"]),
        int(row["Hv"]),
        tuple(lengths),
        _FLAGS[row["initial_state"]],
        row["gate"],
    )


def make_packed_inputs(
    case: PackedCase, device: str | torch.device = "cpu", seed: int = SEED
) -> Inputs:
    """The inputs of the row as make_inputs draws them, but with a state for every sequence.

    initial_state: [N, Hv, 128 (dk), 128 (dv)] fp32 or None.
    """
    inputs = make_inputs(case.row, device, seed)
    if not case.initial_state:
        return inputs
    generator = torch.Generator(device=torch.device(device)).manual_seed(seed + 1)
    shape = (len(case.lengths), case.Hv, HEAD_DIM, HEAD_DIM)
    state = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
    return Inputs(inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, state)
