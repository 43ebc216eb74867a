"""The README's numbers are those of the recorded results, and what it links to exists."""

import re

import pytest

from harness.results import RESULTS, ROOT, read_rows

README = (ROOT / "README.md").read_text(encoding="utf-8")
# Scope and implementations of the result table's columns; of several, the fastest.
COLUMNS = (
    ("core", ("gdn_prefill",)),
    ("core", ("flash_qla_nocp",)),
    ("core", ("flash_qla",)),
    ("full", ("gdn_prefill",)),
    ("full", ("flash_qla",)),
    ("full", ("flashinfer_one_kernel", "flashinfer_split")),
    ("full", ("fla",)),
)
TABLE = re.findall(r"^\| (\w+) ((?:\| \d\.\d{4} ){7})\|$", README, flags=re.MULTILINE)


def test_the_table_has_every_public_case():
    from cases import load_cases

    assert [name for name, _ in TABLE] == [case.name for case in load_cases()]


@pytest.mark.parametrize(("case", "cells"), TABLE, ids=[name for name, _ in TABLE])
def test_times_are_the_recorded_ones(case, cells):
    rows = [
        row
        for row in read_rows(RESULTS / "nvidia-h200" / "bench.csv")
        if row.case == case and row.protocol == "graph"
    ]
    printed = [cell.strip() for cell in cells.strip("| ").split("|")]
    for cell, (scope, implementations) in zip(printed, COLUMNS, strict=True):
        times = [
            row.median_ms
            for row in rows
            if row.scope == scope and row.implementation in implementations
        ]
        assert cell == f"{min(times):.4f}"


def test_the_score_is_the_recorded_one(capsys):
    from harness import score

    assert score.main(["--recorded", "nvidia-h200"]) == 0
    sheet = capsys.readouterr().out
    total, core, full = (
        re.search(label + r"[^\n]*?\s([\d.]+)x?$", sheet, flags=re.MULTILINE)[1]
        for label in (
            r"0\.6 public \+ 0\.4 hidden",
            "^core over the fastest",
            "^full over the fastest",
        )
    )
    assert f"{total} points" in README
    assert f"{core} times as fast as FlashQLA's" in README
    assert f"full forward {full} times as fast" in README


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
