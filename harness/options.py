"""Argument types that the commands share."""

import argparse
import math

# A selector takes its milliseconds as a C int.
LONGEST_S = 1e6


def seconds(text: str) -> float:
    """A time limit. argparse turns what float() refuses into its own error."""
    value = float(text)
    if math.isnan(value) or not 0 < value <= LONGEST_S:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most {LONGEST_S:.0f}")
    return value
