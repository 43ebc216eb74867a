"""The README's numbers are those of the recorded results, and what it links to exists."""

import re

from cases import load_cases
from harness import score
from harness.derivations import Derivations
from harness.derived import MARKER, NUMBER, TABLE, evaluate, mismatches, shown_as
from harness.results import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
DERIVE = Derivations()


def test_every_number_and_table_is_the_recorded_one():
    assert mismatches(README, DERIVE) == []


def test_the_results_have_every_public_case():
    (rows,) = (match["rows"] for match in TABLE.finditer(README) if match["name"] == "core")
    names = [line.split(" | ")[0].strip("| ") for line in rows.splitlines()[2:]]
    assert names == [case.name for case in load_cases()]


def test_a_number_that_is_off_by_one_digit_is_noticed():
    markers = [(match["expression"], match["shown"]) for match in MARKER.finditer(README)]
    numbers = [marker for marker in markers if NUMBER.fullmatch(marker[1])]
    assert len(numbers) >= 5
    for expression, shown in numbers:
        other = shown[:-1] + str((int(shown[-1]) + 1) % 10)
        assert shown_as(evaluate(expression, DERIVE), other, expression) != other, expression


def test_the_score_is_what_the_command_prints(capsys):
    assert score.main(["--recorded", "nvidia-h200"]) == 0
    sheet = capsys.readouterr().out
    total = re.search(r"0\.6 public \+ 0\.4 hidden[^\n]*?\s([\d.]+)$", sheet, re.MULTILINE)[1]
    assert f'<!--= score("total") -->{total} points' in README


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
