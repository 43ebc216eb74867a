"""Every synchronisation statement of the forward kernel, changed in turn.

The table itself: python -m tile_emulator.mutate gdn_ladder.four_group:forward_kernel
--args "ForwardConfig(1, 2, use_initial_state=True)" --shape batch=1,tokens=264
--justified tests/emulator/survivors_forward.csv --out results/emulator/mutants_forward.csv
"""

import argparse
from collections import Counter
from pathlib import Path

from tile_emulator.mutate import Bench, read_reasons, table
from tile_emulator.target import add_arguments, load

REASONS = Path(__file__).with_name("survivors_forward.csv")


def test_every_mutant_of_the_forward_kernel_is_killed_or_explained():
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = parser.parse_args(
        [
            "gdn_ladder.four_group:forward_kernel",
            "--args=ForwardConfig(1, 2, use_initial_state=True)",
            "--shape=batch=1,tokens=264",
        ]
    )
    bench = Bench(load(options), ctas=1, schedules=None)
    assert not bench.auto_fence  # the kernel has all its fences itself
    rows = list(table(bench, read_reasons(REASONS), progress=False))
    counts = Counter(row["mutation"] for row in rows)
    assert set(counts) == {"drop", "flip", "early", "count"} and counts["drop"] >= 30
    unexplained = [
        row["mutant"] for row in rows if row["verdict"] == "survived" and not row["reason"]
    ]
    assert not unexplained
