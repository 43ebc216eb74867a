"""docs/rounds.md: the times of every round are the recorded ones."""

import re

import pytest

from harness.derivations import Derivations
from harness.derived import MARKER, mismatches
from harness.results import RESULTS, ROOT

TEXT = (ROOT / "docs" / "rounds.md").read_text(encoding="utf-8")
ROUNDS = sorted(
    int(re.search(r"\d+", path.stem)[0])
    for path in (RESULTS / "nvidia-h200" / "rounds").glob("resident_round*.csv")
    if path.stem.count("_") == 1
)


def test_every_time_is_the_recorded_one():
    assert mismatches(TEXT, Derivations()) == []


@pytest.mark.parametrize("number", ROUNDS)
def test_every_recorded_round_has_a_section_with_its_times(number):
    section = re.search(rf"(?ms)^## Round {number}:.*?(?=^## |\Z)", TEXT)
    expressions = [match["expression"].strip() for match in MARKER.finditer(section[0])]
    assert any(re.match(rf"slope\({number}\b", expression) for expression in expressions)
