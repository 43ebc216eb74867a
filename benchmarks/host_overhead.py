"""What a warm call of gdn_prefill_forward costs on the host, over the kernels alone.

    python benchmarks/host_overhead.py [--case NAME] [--record]

Four things are timed in turn on the same inputs, all but the last by the lab's protocol (an event
before and behind the call, then a synchronisation):

    reused   the call with reuse_outputs=True: a graph replay behind the package's checks
    fresh    the call as it is by default: output tensors allocated, the kernel launched
    replay   a bare CUDAGraph.replay() of the same launch: what no Python call can undercut
    kernel   that replay queued behind other work, so that no host time is inside

--record writes results/<device>/host_overhead.csv (medians in microseconds) and its metadata.
"""

import argparse
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernel")]

import gdn_prefill  # noqa: E402
from cases import load_cases, make_inputs  # noqa: E402
from harness.results import (  # noqa: E402
    RESULTS,
    Stamp,
    begin_metadata,
    finish_metadata,
    write_table,
)
from harness.timing import Plan, Protocol, capture, interleave, make_timer  # noqa: E402

COLUMNS = ("case", "reused", "fresh", "replay", "kernel", "reused_minus_replay", "reused_over")
SCHEMA = "host_overhead"


def measure(case, device, plan) -> dict:
    """The medians of one case in microseconds."""
    inputs = make_inputs(case, device)
    g_cumsum, A = gdn_prefill.prepare(inputs.k, inputs.g, inputs.beta)
    call = (inputs.q, inputs.k, inputs.v, g_cumsum, inputs.beta, A, inputs.initial_state)
    replay = capture(lambda: gdn_prefill.gdn_prefill_forward(*call), device)
    timed = {
        "reused": lambda: gdn_prefill.gdn_prefill_forward(*call, reuse_outputs=True),
        "fresh": lambda: gdn_prefill.gdn_prefill_forward(*call),
        "replay": replay,
    }
    samples = interleave(timed, plan, make_timer(device), device)
    samples |= interleave({"kernel": replay}, plan, make_timer(device, Protocol.GRAPH), device)
    row = {name: sample.median_ms * 1e3 for name, sample in samples.items()}
    row["reused_minus_replay"] = row["reused"] - row["replay"]
    row["reused_over"] = row["reused"] - row["kernel"]
    return {"case": case.name} | {name: round(value, 2) for name, value in row.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", action="append", help="default: all public cases")
    parser.add_argument("--repetitions", type=int, default=200)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("nothing to measure: torch sees no GPU", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    stamp = Stamp.now(device)
    metadata = begin_metadata(stamp) | {"schema": SCHEMA, "unit": "us"}
    print(("{:20s}" + "{:>20s}" * (len(COLUMNS) - 1)).format(*COLUMNS))
    rows = []
    for case in load_cases():
        if options.case and case.name not in options.case:
            continue
        rows.append(measure(case, device, Plan(repetitions=options.repetitions)))
        print(("{:20s}" + "{:20.2f}" * (len(COLUMNS) - 1)).format(*rows[-1].values()), flush=True)
    if options.record:
        path = RESULTS / stamp.device / "host_overhead.csv"
        write_table(path, COLUMNS, rows, finish_metadata(metadata))
    return 0


if __name__ == "__main__":
    sys.exit(main())
