"""What the detector does per chunk of the forward kernel, counted: time is not asserted.

Measured times are in kernel/tile_emulator/README.md.
"""

from collections import Counter

import pytest
import torch

from gdn_ladder.four_group import PASS_CONFIGS, ForwardConfig, forward_kernel
from tile_emulator import Program, detector, emulate
from tile_emulator.__main__ import main

HEADS_Q, HEADS_V, CHUNK = 2, 8, 64
SHORT, LONG = 6, 10  # chunks
RECORDS = 35  # accesses of shared memory a chunk of a CTA
COMPARED = 50  # element sets looked through for the accesses that came before


def counted(monkeypatch, program, chunks, check="race,deadlock,bounds,init"):
    """Calls of one CTA by kind."""
    tokens, count = chunks * CHUNK, Counter()
    record, distinct = detector.Detector.record, detector.distinct

    def counting_record(self, *arguments):
        count["records"] += 1
        return record(self, *arguments)

    def counting_distinct(x):
        count["compared"] += 1
        numbers = distinct(x)
        count["accesses"] += len(numbers)
        return numbers

    with monkeypatch.context() as patch:
        patch.setattr(detector.Detector, "record", counting_record)
        patch.setattr(detector, "distinct", counting_distinct)
        report = emulate(
            program,
            *(torch.zeros(1, tokens, HEADS_Q, 128, dtype=torch.bfloat16) for _ in range(2)),
            torch.zeros(1, tokens, HEADS_V, 128, dtype=torch.bfloat16),
            torch.zeros(1, tokens, HEADS_V),
            torch.zeros(1, tokens, HEADS_V),
            torch.zeros(1, tokens, HEADS_V, CHUNK, dtype=torch.bfloat16),
            torch.zeros(1, HEADS_V, 128, 128),
            torch.zeros(1, tokens, HEADS_V, 128, dtype=torch.bfloat16),
            torch.zeros(1, HEADS_V, 128, 128),
            1.0,
            check=check,
            pass_configs=PASS_CONFIGS,
            blocks=lambda block: block == (0,),
        )
    assert report.ok and report.ctas == 1
    return count


@pytest.fixture(scope="module")
def program():
    return Program(forward_kernel(ForwardConfig(HEADS_Q, HEADS_V, 32, True)))


def test_work_per_chunk_is_small_and_does_not_grow(monkeypatch, program):
    short, middle, long = (
        counted(monkeypatch, program, n) for n in (SHORT, LONG, 2 * LONG - SHORT)
    )
    chunks = LONG - SHORT
    per_chunk = {kind: (middle[kind] - short[kind]) / chunks for kind in middle}
    assert 0 < per_chunk["records"] <= RECORDS
    assert 0 < per_chunk["compared"] <= COMPARED
    assert per_chunk["accesses"] <= 1.5 * per_chunk["compared"]
    assert {kind: (long[kind] - middle[kind]) / chunks for kind in long} == per_chunk


def test_without_checks_the_detector_does_nothing(monkeypatch, program):
    assert not counted(monkeypatch, program, 3, check=None)


def test_the_command_prints_both_times(capsys):
    kernel = ["test_commands:pipeline", "--shape", "chunks=3"]
    assert main([*kernel, "--cost", "1", "--check", "race"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("1 CTA: ") and " s without checks, " in out and " s with race: " in out
