"""Small forwards, whole and split, and their preprocessing, for compute-sanitizer to watch.

compute-sanitizer --tool memcheck --kernel-name kns=gdn python benchmarks/sanitize.py
"""

import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernel")]


def main() -> int:
    if not torch.cuda.is_available():
        print("nothing to watch: torch sees no GPU", file=sys.stderr)
        return 2
    import gdn_prefill
    from cases import Case, make_inputs

    case = Case("sanitized", 2, 200, 2, 4, True, "mixed", 5e-3, 5e-3)
    inputs = make_inputs(case, "cuda")
    g_cumsum, A = gdn_prefill.prepare(inputs.k, inputs.g, inputs.beta)
    call = (inputs.q, inputs.k, inputs.v, g_cumsum, inputs.beta, A, inputs.initial_state)
    for tile in (64, 128):
        for split in (False, 3):
            results = gdn_prefill.gdn_prefill_forward(*call, block_dv=tile, split=split)
            torch.cuda.synchronize()
            finite = all(bool(x.isfinite().all()) for x in results)
            print(f"block_dv {tile}, split {split}: finite {finite}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
