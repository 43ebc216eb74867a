"""Time every plan that the dispatch weighs, over a grid of shapes, to fit the cost model to.

    python benchmarks/dispatch_sweep.py --compile          fill the compile cache; no GPU
    python benchmarks/dispatch_sweep.py --budget 150       measure for at most 150 s, or go on
    python benchmarks/dispatch_sweep.py --list             the points and how many plans each has

A point is a shape; at each, all plans of gdn_prefill.dispatch.candidates run once, must be finite
and agree with the unsplit plan, and are then timed by graph replay in turn. One row a point and
plan goes into --out as soon as its point is done (results/<device>/dispatch_sweep.csv by default);
points that are there already, of the same kernels, are not measured again. The measuring is done by
a worker that is killed when it says nothing for --timeout seconds; the point it was at is then
reported and left out. benchmarks/fit_dispatch.py makes the model of it.
TILELANG_CACHE_DIR is honoured.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import sys
import time
from dataclasses import astuple, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernel"), str(ROOT / "benchmarks")]

from supervised import say, supervise  # noqa: E402

from gdn_prefill.cost import CoreCall  # noqa: E402
from gdn_prefill.dispatch import candidates  # noqa: E402
from gdn_prefill.split import HEAD_DIM, CorePlan  # noqa: E402

NAME = "dispatch_sweep"
SCHEMA = "dispatch_sweep"
# From 4 to 64 V heads, with one q/k head for each and for four.
HEADS = ((4, 4), (2, 8), (8, 32), (16, 64))
LENGTHS = tuple(2**n for n in range(8, 17))
ODD_LENGTHS = (1025, 3000, 12345)
BATCHES = (2, 3, 4, 6, 8, 16)
# Of each batch above 1, every second length is measured, the other half for the next heads.
THIN = 2
MOST_TOKENS = 2**22  # states times tokens: 2.7 GB of V, output and A

SMS = 132  # of an H200, where there is no device to ask
AGREEMENT = 1e-2  # relative L2 distance to the unsplit plan: both are 3e-3 to 4e-3 off
WARMUP = 2
# Seconds of rest before a point: the clock falls little in the few milliseconds that one takes.
REST_S = 0.1
# What the times depend on.
SOURCES = (
    "inverse_blocks",
    "resident",
    "resident_common",
    "resident_narrow",
    "resident_wide",
    "split",
)

FIELDS = (
    "sequences",
    "tokens",
    "heads_q",
    "heads_v",
    "sms",
    "block_dv",
    "segments",
    "chunks_per_segment",
    "products",
    "median_us",
    "p20_us",
    "p80_us",
    "rounds",
    "difference",
    "workspace_bytes",
    "kernels",
)


def grid() -> list[CoreCall]:
    """The points, those of the same heads together."""
    points = []
    for shift, (heads_q, heads_v) in enumerate(HEADS):
        lengths = [(1, T) for T in (*LENGTHS, *ODD_LENGTHS)]
        for row, batch in enumerate(BATCHES):
            lengths += [(batch, T) for T in LENGTHS[(row + shift) % THIN :: THIN]]
        points += [
            CoreCall(batch, tokens, heads_q, heads_v)
            for batch, tokens in lengths
            if batch * tokens * heads_v <= MOST_TOKENS
        ]
    return points


def kernels_hash() -> str:
    """A digest of the kernels' sources: rows of other kernels are measured anew."""
    folder = ROOT / "kernel" / "gdn_prefill" / "kernels"
    sources = [(folder / f"{name}.py").read_bytes() for name in SOURCES]
    return hashlib.sha256(b"".join(sources)).hexdigest()[:12]


@dataclass(frozen=True)
class Tensors:
    """A point on the device: operands of the core, outputs, and the results to agree with."""

    inputs: tuple
    absent_state: object
    output: object
    final_state: object
    reference: tuple

    @classmethod
    def make(cls, call: CoreCall, device) -> Tensors:
        """Random operands. A is a unit lower triangular matrix near the identity, and the gate
        falls evenly within a chunk: cheap to make, and no state grows."""
        import torch

        B, T, Hq, Hv = astuple(call)
        torch.manual_seed(T)

        def noise(*shape):
            return torch.randn(shape, dtype=torch.bfloat16, device=device)

        row = torch.arange(T, device=device) % 64
        rate = torch.linspace(1e-3, 5e-2, Hv, device=device)
        gate = (-(row + 1).view(1, T, 1) * rate).expand(B, T, Hv).contiguous()
        A = noise(B, T, Hv, 64).mul_(0.02)
        A.masked_fill_(torch.arange(64, device=device) >= row.view(T, 1, 1), 0)
        A.scatter_(3, row.view(1, T, 1, 1).expand(B, T, Hv, 1), 1)
        q, k = (torch.nn.functional.normalize(noise(B, T, Hq, HEAD_DIM), dim=-1) for _ in range(2))
        v = noise(B, T, Hv, HEAD_DIM)
        beta = torch.sigmoid(torch.randn((B, T, Hv), device=device))
        state = torch.empty((B, Hv, HEAD_DIM, HEAD_DIM), device=device)
        return cls(
            (q, k, v, gate, beta, A),
            torch.zeros(1, device=device),
            torch.empty_like(v),
            state,
            (torch.empty_like(v), torch.empty_like(state)),
        )

    @property
    def outputs(self) -> tuple:
        return self.output, self.final_state

    def keep(self) -> None:
        """Take what the outputs hold as the reference."""
        for kept, tensor in zip(self.reference, self.outputs, strict=True):
            kept.copy_(tensor)

    def difference(self) -> float:
        """The larger relative L2 distance of output and state to the reference; NaN spreads."""
        import torch

        norm = torch.linalg.vector_norm
        return max(
            (
                float(norm(got - kept, dtype=torch.float32) / norm(kept, dtype=torch.float32))
                for got, kept in zip(self.outputs, self.reference, strict=True)
            ),
            key=lambda distance: (distance != distance, distance),
        )


def bind(plan: CorePlan, call: CoreCall, tensors: Tensors):
    """A call of the plan on the point's tensors, with temporaries of its own."""
    import torch

    from gdn_prefill.runtime import RUNTIME

    device = tensors.output.device
    core = RUNTIME.core(plan, call.heads_q, call.heads_v, use_initial_state=False)
    temporaries = {
        name: torch.full(item.shape, float("nan"), dtype=getattr(torch, item.dtype), device=device)
        for name, item in plan.workspaces(call.sequences, call.heads_v).items()
    }

    def run() -> None:
        core(
            tensors.inputs,
            tensors.absent_state,
            *tensors.outputs,
            HEAD_DIM**-0.5,
            temporaries,
        )

    return run


def captured(run):
    """The replay of a graph of `run`, which has run before; keeps the temporaries it works on."""
    from gdn_prefill.runtime import record
    from harness.timing import Replay

    return Replay(record(None, run), run, None)


def measure(call: CoreCall, sms: int, rounds: int, device) -> tuple[list[dict], list[str]]:
    """The rows of a point, and what is wrong with the plans that have none."""
    from harness.timing import Plan, Protocol, interleave, make_timer

    tensors = Tensors.make(call, device)
    replays, differences, failures = {}, {}, []
    for plan in candidates(call, sms):
        run = bind(plan, call, tensors)
        for tensor in tensors.outputs:
            tensor.fill_(float("nan"))
        run()
        if not replays:
            tensors.keep()
        distance = tensors.difference()
        if not distance <= AGREEMENT:
            failures.append(f"{plan}: {distance:.1e} away from the first plan")
            continue
        differences[plan], replays[plan] = distance, captured(run)
    timer = make_timer(device, Protocol.GRAPH)
    plan = Plan(Protocol.GRAPH, WARMUP, rounds, rest_s=REST_S)
    samples = interleave(replays, plan, timer, device)
    kernels = kernels_hash()
    return [
        {
            **dict(zip(FIELDS, (*astuple(call), sms), strict=False)),
            "block_dv": plan.block_dv,
            "segments": plan.segments,
            "chunks_per_segment": plan.chunks_per_segment,
            "products": plan.products,
            "median_us": round(sample.median_ms * 1e3, 3),
            "p20_us": round(sample.p20_ms * 1e3, 3),
            "p80_us": round(sample.p80_ms * 1e3, 3),
            "rounds": sample.repetitions,
            "difference": float(f"{differences[plan]:.2e}"),
            "workspace_bytes": plan.workspace_bytes(call.sequences, call.heads_v),
            "kernels": kernels,
        }
        for plan, sample in samples.items()
    ], failures


def work(points: list[int], rounds: int, seconds: float) -> None:
    """The worker: measures points of the grid by their numbers until `seconds` have passed."""
    import torch

    from gdn_prefill.runtime import sm_count

    end = time.monotonic() + seconds
    device = torch.device("cuda", torch.cuda.current_device())
    sms = sm_count(device)
    calls = grid()
    for number in points:
        if time.monotonic() > end:
            return
        say(event="start", point=number)
        rows, failures = measure(calls[number], sms, rounds, device)
        say(event="done", point=number, rows=rows, failures=failures)


def key(row: dict) -> tuple[int, ...]:
    """The point of a row."""
    return tuple(int(row[name]) for name in FIELDS[:4])


def recorded(path: Path, kernels: str) -> list[dict]:
    """The rows of a file that were measured with these kernels."""
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as handle:
        return [row for row in csv.DictReader(handle) if row["kernels"] == kernels]


def write(path: Path, rows: list[dict]) -> None:
    """All rows, in the order of the grid."""
    order = {astuple(call): number for number, call in enumerate(grid())}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as handle:
        writer = csv.DictWriter(handle, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(rows, key=lambda row: order.get(key(row), len(order))))


def sweep(
    path: Path, points: list[int], rounds: int, budget: float, timeout: float, script: Path
) -> list[str]:
    """Measure the points that `path` lacks, within `budget` seconds; what went wrong, by point."""
    end = time.monotonic() + budget
    calls = grid()
    rows = recorded(path, kernels_hash())
    known = {key(row) for row in rows}
    left = [number for number in points if astuple(calls[number]) not in known]
    bad: list[str] = []
    while left and time.monotonic() < end:
        at: list[int] = []

        def heard(event: dict, at: list[int] = at) -> None:
            call = calls[event["point"]]
            if event["event"] == "start":
                at.append(event["point"])
                return
            left.remove(event["point"])
            rows.extend(event["rows"])
            write(path, rows)
            bad.extend(f"{call}: {failure}" for failure in event["failures"])
            print(line(call, event["rows"]), flush=True)

        arguments = ["--worker", *map(str, left), "--rounds", str(rounds)]
        arguments += ["--budget", f"{end - time.monotonic():.1f}"]
        trouble = supervise(script, arguments, timeout, heard)
        if trouble is None:
            break
        if not at:
            bad.append(f"the worker ended before its first point: {trouble}")
            break
        if at[-1] in left:
            left.remove(at[-1])
        bad.append(f"{calls[at[-1]]}: {trouble}")
    print(f"{len(points) - len(left)} of {len(points)} points done, {len(bad)} failures")
    return bad


def line(call: CoreCall, rows: list[dict]) -> str:
    """A point in one line: its unsplit times, and its fastest split."""
    B, T, Hq, Hv = astuple(call)
    head = f"B {B:3d} T {T:6d} heads {Hq:2d}/{Hv:2d}"
    plain = [row for row in rows if row["segments"] == 1]
    split = [row for row in rows if row["segments"] > 1]
    text = "  ".join(f"dv {row['block_dv']:3d} {row['median_us']:9.1f}" for row in plain)
    if split:
        best = min(split, key=lambda row: row["median_us"])
        text += f"  best of {len(split)} splits {best['median_us']:9.1f} us "
        text += f"({best['segments']} segments, dv {best['block_dv']})"
    return f"{head}  {text}"


def compile_all(sms: int) -> None:
    """Compile what every point launches into the cache."""
    from gdn_prefill.core import core_kernels
    from gdn_prefill.runtime import compile_launcher

    kernels = {}
    for call in grid():
        for plan in candidates(call, sms):
            for kernel in core_kernels(plan, call.heads_q, call.heads_v, False).values():
                kernels[kernel.name] = kernel
    for number, (name, kernel) in enumerate(kernels.items(), 1):
        begin = time.monotonic()
        compile_launcher(kernel.factory(kernel.config), kernel.pass_configs)
        took = time.monotonic() - begin
        print(f"{number:3d}/{len(kernels)} {name} {took:.1f} s", flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="CSV to write and to go on with")
    parser.add_argument("--budget", type=float, default=150, help="seconds (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=11, help="timed replays of every plan")
    parser.add_argument("--timeout", type=float, default=60, help="seconds of silence of a worker")
    parser.add_argument("--heads", nargs="+", metavar="HQ/HV", help="only points of these heads")
    parser.add_argument("--compile", action="store_true", help="only compile every kernel")
    parser.add_argument("--list", action="store_true", help="only print the points")
    parser.add_argument("--worker", type=int, nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    calls = grid()
    wanted = [
        number
        for number, call in enumerate(calls)
        if not options.heads or f"{call.heads_q}/{call.heads_v}" in options.heads
    ]
    if options.list:
        for number in wanted:
            print(f"{calls[number]} {len(candidates(calls[number], SMS))} plans")
        print(f"{len(wanted)} points")
        return 0
    if options.compile:
        compile_all(SMS)
        return 0
    import torch

    if not torch.cuda.is_available():
        print("error: no CUDA device here; --compile and --list work without one", file=sys.stderr)
        return 2
    if options.worker is not None:
        work(options.worker, options.rounds, options.budget)
        return 0
    from harness.results import RESULTS, Stamp, begin_metadata, finish_metadata

    stamp = Stamp.now(torch.device("cuda", torch.cuda.current_device()))
    path = options.out or RESULTS / stamp.device / f"{NAME}.csv"
    metadata = begin_metadata(stamp) | {"schema": SCHEMA, "unit": "us", "protocol": "graph"}
    bad = sweep(path, wanted, options.rounds, options.budget, options.timeout, Path(__file__))
    if path.is_file():
        text = json.dumps(finish_metadata(metadata), indent=2, default=str)
        path.with_suffix(".json").write_text(text + "\n", encoding="utf-8")
    for failure in bad:
        print(f"FAILED {failure}")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
