"""Fills the compile cache for the operator, with or without a GPU.

    python -m gdn_prefill.warmup --list                     the kernels of the usual calls
    python -m gdn_prefill.warmup --heads 16/32 --heads 8/16 compiles them for these heads
    python -m gdn_prefill.warmup --heads 16/64 --l2norm --gate raw --dt-bias --cu-seqlens int32
                                                            one way of calling instead of the usual

TILELANG_CACHE_DIR says where. The function is gdn_prefill.warmup.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .specialisations import HEADS
from .variants import DTYPES, USAGES, Usage, compile_variant, operator_variants

INDEX = ("int32", "int64")
STATE = ("float32", "bfloat16", "float16")
CHOICES = {
    "gate": ("log", "linear", "raw"),
    "gate_dtype": STATE,
    "beta": ("plain", "sigmoid", "twice_sigmoid"),
    "beta_dtype": STATE,
    "cu_seqlens": INDEX,
    "initial_state": STATE,
    "final_state": (*STATE, "none"),
    "state_indices": INDEX,
    "kept_states": ("h", "checkpoints"),
}
FLAGS = ("dt_bias", "l2norm", "state_v_first", "batch_invariant", "strided")


def _heads(text: str) -> tuple[int, int]:
    try:
        q, v = map(int, text.split("/"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be Hq/Hv, such as 16/32") from None
    return q, v


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the command; 2 when it cannot run."""
    parser = argparse.ArgumentParser(
        prog="gdn_prefill.warmup", description="Compile the operator's kernels ahead of time."
    )
    parser.add_argument(
        "--heads", type=_heads, action="append", metavar="Hq/Hv", help="repeatable; default: usual"
    )
    parser.add_argument("--dtype", choices=DTYPES, action="append", help="of q, k, v; repeatable")
    parser.add_argument("--list", action="store_true", help="print the names, compile nothing")
    for name, choices in CHOICES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", choices=choices)
    for name in FLAGS:
        parser.add_argument(f"--{name.replace('_', '-')}", action="store_true", default=None)
    options = parser.parse_args(arguments)
    chosen = {
        name: None if value == "none" else value
        for name in (*CHOICES, *FLAGS)
        if (value := getattr(options, name)) is not None
    }
    from .toolchain import ToolchainError

    try:
        items = operator_variants(
            options.heads or HEADS,
            options.dtype or ("bfloat16",),
            (Usage(**chosen),) if chosen else USAGES,
        )
        print(f"{len(items)} kernels")
        for item in items:
            print(item.name, flush=True)
            if not options.list:
                compile_variant(item)
    except (ValueError, ToolchainError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
