"""One small forward and its preprocessing, for compute-sanitizer to watch.

compute-sanitizer --tool memcheck python benchmarks/sanitize.py
"""

import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernel")]

import gdn_prefill  # noqa: E402
from cases import Case, make_inputs  # noqa: E402

CASE = Case("sanitized", 2, 200, 2, 4, True, "mixed", 5e-3, 5e-3)

inputs = make_inputs(CASE, "cuda")
g_cumsum, A = gdn_prefill.prepare(inputs.k, inputs.g, inputs.beta)
for tile in (32, 64, 128):
    output, state = gdn_prefill.gdn_prefill_forward(
        inputs.q, inputs.k, inputs.v, g_cumsum, inputs.beta, A, inputs.initial_state, block_dv=tile
    )
    torch.cuda.synchronize()
    print(f"block_dv {tile}: finite {bool(output.isfinite().all() and state.isfinite().all())}")
