"""The lab's problem as data: cases, seeded inputs, hidden twins, baselines by device."""

from .baseline import Baseline, load_baselines, load_provenance
from .definitions import (
    CHUNK,
    GATES,
    HEAD_DIM,
    SEED,
    Case,
    hidden_cases,
    load_cases,
)
from .inputs import Inputs, make_inputs
from .packed import PackedCase, load_packed, make_packed_inputs

__all__ = [
    "CHUNK",
    "GATES",
    "HEAD_DIM",
    "SEED",
    "Baseline",
    "Case",
    "Inputs",
    "PackedCase",
    "hidden_cases",
    "load_baselines",
    "load_cases",
    "load_packed",
    "load_provenance",
    "make_inputs",
    "make_packed_inputs",
]
