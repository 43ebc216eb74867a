"""docs/report.md: every number is that of the recorded results, and nothing is left out."""

import re

import pytest

from cases import load_cases
from gdn_ladder import VERSIONS
from harness.derivations import Derivations
from harness.derived import MARKER, NUMBER, evaluate, mismatches, shown_as, unmarked
from harness.results import ROOT

PATH = ROOT / "docs" / "report.md"
TEXT = PATH.read_text(encoding="utf-8")
DERIVE = Derivations()
# v1 is what the others are measured against: section 3.
STEPS = [version.name for version in VERSIONS if version.name != "v1"]
MARKERS = [(match["expression"], match["shown"]) for match in MARKER.finditer(TEXT)]


def test_every_number_is_the_recorded_one():
    assert mismatches(TEXT, DERIVE) == []


def test_no_quantity_stands_without_its_derivation():
    assert unmarked(TEXT) == []


def test_a_number_that_is_off_by_one_digit_is_noticed():
    numbers = [marker for marker in MARKERS if NUMBER.fullmatch(marker[1])]
    assert len(numbers) > 100
    for expression, shown in numbers:
        other = shown[:-1] + str((int(shown[-1]) + 1) % 10)
        value = evaluate(expression, DERIVE)
        assert shown_as(value, other, expression) != other, expression


def test_every_version_and_every_case_is_in_it():
    for version in VERSIONS:
        assert re.search(rf"(?m)^(### |\| |){re.escape(version.name)}\b", TEXT), version.name
    for case in load_cases():
        assert case.name in TEXT


@pytest.mark.parametrize("version", STEPS)
def test_every_step_has_prediction_result_and_reason(version):
    section = re.search(rf"(?ms)^### {re.escape(version)}:.*?(?=^##)", TEXT)
    if section:
        parts = re.findall(r"(?m)^\*(Prediction|Result|Reason)\.\*", section[0])
        assert parts == ["Prediction", "Result", "Reason"]
    else:
        row = re.search(rf"(?m)^\| {re.escape(version)}: .*\|$", TEXT)[0]
        assert len(re.findall(r"(?<=\| )[^|]+(?= \|)", row)) == 4


def test_a_design_that_ships_is_not_among_the_rejected():
    rejected = re.search(r"(?ms)^## 5\. Rejected ideas$(.*?)^## ", TEXT)[1]
    names = re.findall(r"(?m)^\| ([\w.]+):", rejected)
    assert "prepared_fused" in names
    assert not {"resident", "prepared_wide", "shipped"} & set(names)


def test_links_and_figures_lead_somewhere():
    targets = re.findall(r"\]\(([^)#]+)\)", TEXT)
    assert len(targets) > 5
    for target in targets:
        assert (PATH.parent / target).exists(), target
