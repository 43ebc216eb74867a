"""Check and time the exact split over time on a GPU, beside the unsplit kernel.

    python benchmarks/split_variants.py --compile           fill the compile cache; no GPU
    python benchmarks/split_variants.py --out split.csv     check, then time by graph replay
    python benchmarks/split_variants.py --cases chain_equal --plans chain_equal:16:64:1
    python benchmarks/split_variants.py --once --plans chain_equal:13:64:1   for a profiler

A plan is CASE:SEGMENTS:BLOCK_DV:PRODUCTS, and :apart where no two CTAs make a pair. Each case runs
in a worker of its own that is killed when it says nothing for --timeout seconds; what it had
reported by then is kept. Times are of one replay of a captured graph: of the whole sequence, of
each of its parts alone, and of the unsplit kernel, all in turn. The parts are the opening (the
first segment with the summary beside it; each of them alone too), the scan and the rest; with two
segments there is no summary and no scan. TILELANG_CACHE_DIR is honoured.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernel")]

HEAD_DIM = 128
UNSPLIT_DV = {"chain_equal": 64, "long_low_gva": 64, "batch_split_gva": 64, "deep_gva_state": 64}
PLANS = (
    "chain_equal:9:64:1",
    "chain_equal:12:64:1",
    "chain_equal:12:64:3",
    "chain_equal:16:64:1",
    "long_low_gva:9:64:1",
    "long_low_gva:9:64:1:apart",
    "long_low_gva:9:64:3",
    "batch_split_gva:3:64:1",
    "batch_split_gva:3:64:1:apart",
    "batch_split_gva:3:128:1",
    "deep_gva_state:3:64:1",
    "deep_gva_state:3:64:1:apart",
    "deep_gva_state:3:64:3",
    "deep_gva_state:3:128:1",
)

APART = ":apart"
RELATIVE_LIMIT = 5e-3
UNSPLIT_RATIO = 1.3  # an error beyond RELATIVE_LIMIT may still be this many times the unsplit one
TOLERANCE = {"rtol": 5e-3, "atol": 5e-3}
EXACT_GATES = ("decay", "mixed")
# B, T, Hq, Hv, initial state, gate, chunks a segment
SMALL = (
    (1, 129, 2, 8, False, "decay", 1),
    (1, 577, 2, 8, False, "mixed", 4),
    (2, 449, 2, 8, False, "wild", 1),
    (1, 1025, 8, 32, True, "mixed", 3),
    (1, 641, 8, 32, True, "strong", 2),
    (1, 2048, 8, 32, True, "zero", 4),
    (1, 2048, 8, 32, True, "collinear", 4),
)
FIELDS = (
    "case",
    "segments",
    "chunks_per_segment",
    "block_dv",
    "products",
    "paired",
    "output_error",
    "state_error",
    "unsplit_output_error",
    "unsplit_state_error",
    "mismatches",
    "total_us",
    "opening_us",
    "first_us",
    "summary_us",
    "scan_us",
    "rest_us",
    "unsplit_us",
    "unsplit_block_dv",
    "workspace_bytes",
)


@dataclass(frozen=True)
class Variant:
    case: str
    segments: int
    block_dv: int
    products: int
    paired: bool = True

    @classmethod
    def parse(cls, text: str) -> Variant:
        case, *numbers = text.removesuffix(APART).split(":")
        if len(numbers) != 3 or not all(number.isdigit() for number in numbers):
            raise argparse.ArgumentTypeError(
                f"{text!r} is not CASE:SEGMENTS:BLOCK_DV:PRODUCTS or that and {APART}"
            )
        return cls(case, *map(int, numbers), paired=not text.endswith(APART))

    def __str__(self) -> str:
        apart = "" if self.paired else APART
        return f"{self.case}:{self.segments}:{self.block_dv}:{self.products}{apart}"

    @property
    def kernels(self) -> tuple:
        """What split_launchers takes beside the heads."""
        return self.block_dv, self.products, self.paired


def split_launchers(heads_q, heads_v, initial_state, block_dv, products, paired=True):
    from gdn_prefill.kernels import resident
    from gdn_prefill.kernels import split as kernels
    from gdn_prefill.runtime import compile_launcher
    from gdn_prefill.split import SplitLaunchers

    class Apart(resident.ResidentConfig):
        pair = None

    class SummaryApart(kernels.SummaryConfig):
        pair = None

    forward = (resident.ResidentConfig if paired else Apart)(
        heads_q, heads_v, block_dv, initial_state, segmented=True
    )
    summary = (kernels.SummaryConfig if paired else SummaryApart)(
        heads_q, heads_v, residual=products == 3
    )
    return SplitLaunchers(
        compile_launcher(kernels.summary_kernel(summary), kernels.PASS_CONFIGS),
        compile_launcher(
            kernels.scan_kernel(kernels.ScanConfig(heads_v, products)), kernels.PASS_CONFIGS
        ),
        compile_launcher(resident.resident_kernel(forward), resident.PASS_CONFIGS),
    )


def parts_of(launchers, plan, *arguments):
    """What split_launches returns, but the first segment and the summary beside it as one; and
    both of them alone.
    """
    from gdn_prefill.split import split_launches

    launches = dict(split_launches(launchers, plan, *arguments))
    first, summary = launches.pop("first"), launches.pop("summary", None)
    if summary is None:
        return {"opening": first, **launches}, {}
    opening = in_order({"summary": summary, "first": first})
    return {"opening": opening, **launches}, {"first": first, "summary": summary}


def unsplit_launcher(heads_q, heads_v, initial_state, block_dv):
    from gdn_prefill.kernels import resident
    from gdn_prefill.runtime import compile_launcher

    config = resident.ResidentConfig(heads_q, heads_v, block_dv, initial_state)
    return compile_launcher(resident.resident_kernel(config), resident.PASS_CONFIGS)


class Bound:
    """Inputs, expected values and outputs of one shape on the GPU."""

    def __init__(self, inputs):
        import torch

        from reference.chunked import chunk_cumsum, gdn_chunked, solve_A

        self.expected = gdn_chunked(
            inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, inputs.initial_state
        )
        self.A = solve_A(inputs.k, inputs.g, inputs.beta).bfloat16()
        self.inputs = (
            inputs.q,
            inputs.k,
            inputs.v,
            chunk_cumsum(inputs.g).float(),
            inputs.beta,
            self.A,
        )
        self.B, self.T, self.Hv = inputs.g.shape
        self.Hq = inputs.q.shape[2]
        self.has_state = inputs.initial_state is not None
        self.initial_state = (
            inputs.initial_state if self.has_state else torch.zeros(1, device=inputs.q.device)
        )
        self.output = torch.empty_like(inputs.v)
        self.final_state = torch.empty_like(self.expected[1], dtype=torch.float32)

    def poison(self) -> None:
        self.output.fill_(float("nan"))
        self.final_state.fill_(float("nan"))

    def unsplit(self, block_dv):
        launch = unsplit_launcher(self.Hq, self.Hv, self.has_state, block_dv)

        def call():
            launch(*self.inputs, self.initial_state, self.output, self.final_state, HEAD_DIM**-0.5)

        return call

    def split(self, plan, block_dv, products, paired=True):
        """The parts by name, those of the opening, and the bytes of their temporaries (filled with
        NaN).
        """
        import torch

        from gdn_prefill.split import workspaces

        shapes = workspaces(plan, self.B, self.Hv, products)
        temporaries = {
            name: torch.full(
                shape.shape, float("nan"), dtype=getattr(torch, shape.dtype), device="cuda"
            )
            for name, shape in shapes.items()
        }
        parts, opening = parts_of(
            split_launchers(self.Hq, self.Hv, self.has_state, block_dv, products, paired),
            plan,
            temporaries,
            self.inputs,
            self.initial_state,
            self.output,
            self.final_state,
            HEAD_DIM**-0.5,
        )
        return parts, opening, sum(shape.bytes for shape in shapes.values())

    def errors(self) -> tuple[float, float]:
        """Relative L2 errors of output and state; NaN where something was not written."""
        return tuple(
            float((got.double() - want).norm() / want.norm())
            for got, want in zip((self.output, self.final_state), self.expected, strict=True)
        )

    def mismatches(self) -> int:
        import torch

        return sum(
            int((~torch.isclose(got.double(), want, **TOLERANCE)).sum())
            for got, want in zip((self.output, self.final_state), self.expected, strict=True)
        )


def in_order(parts):
    def call():
        for launch in parts.values():
            launch()

    return call


def small_inputs(B, T, heads_q, heads_v, initial_state, gate):
    import torch

    from cases import Inputs

    generator = torch.Generator("cuda").manual_seed(T)

    def noise(*shape):
        return torch.randn(shape, generator=generator, device="cuda")

    def unit(x):
        return torch.nn.functional.normalize(x, dim=-1).bfloat16()

    k = noise(B, T, heads_q, HEAD_DIM)
    log_decay = torch.nn.functional.logsigmoid(noise(B, T, heads_v)) / 16
    if gate == "collinear":
        k = noise(B, 1, heads_q, HEAD_DIM) + 0.1 * k
    elif gate == "mixed":
        log_decay[:, ::2] = 0
    elif gate == "zero":
        log_decay.zero_()
    elif gate == "strong":
        log_decay = -50 * torch.rand(log_decay.shape, generator=generator, device="cuda")
    elif gate == "wild":
        draw = torch.rand(log_decay.shape, generator=generator, device="cuda")
        log_decay = torch.where(draw < 0.1, -50.0, torch.where(draw > 0.6, 0.0, log_decay))
    return Inputs(
        q=unit(noise(B, T, heads_q, HEAD_DIM)),
        k=unit(k),
        v=noise(B, T, heads_v, HEAD_DIM).bfloat16(),
        g=log_decay,
        beta=torch.sigmoid(noise(B, T, heads_v)),
        initial_state=noise(B, heads_v, HEAD_DIM, HEAD_DIM) if initial_state else None,
    )


def checked(bound, unsplit, parts, where, exact) -> dict:
    """Errors of the split and the unsplit kernel; AssertionError where the split is wrong."""
    import torch

    bound.poison()
    unsplit()
    torch.cuda.synchronize()
    plain = bound.errors()
    run = in_order(parts)
    bound.poison()
    run()
    torch.cuda.synchronize()
    first = (bound.output.clone(), bound.final_state.clone())
    errors, mismatches = bound.errors(), bound.mismatches()
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    for again, once in zip((bound.output, bound.final_state), first, strict=True):
        assert torch.equal(again, once), f"{where}: two runs differ"
    for name, error, reference in zip(("output", "state"), errors, plain, strict=True):
        limit = max(RELATIVE_LIMIT, UNSPLIT_RATIO * reference)
        assert error <= limit, f"{where}: {name} error {error:.2e}, unsplit {reference:.2e}"
    assert not exact or mismatches == 0, f"{where}: {mismatches} elements beyond the tolerance"
    return {
        "output_error": errors[0],
        "state_error": errors[1],
        "unsplit_output_error": plain[0],
        "unsplit_state_error": plain[1],
        "mismatches": mismatches,
    }


def report(**fields) -> None:
    print("@" + json.dumps(fields), flush=True)


def small_worker(products) -> None:
    from gdn_prefill.split import SegmentPlan

    for B, T, heads_q, heads_v, initial_state, gate, length in SMALL:
        bound = Bound(small_inputs(B, T, heads_q, heads_v, initial_state, gate))
        unsplit = bound.unsplit(64)
        for count in products:
            where = f"B={B} T={T} Hq={heads_q} Hv={heads_v} gate={gate} products={count}"
            try:
                parts, _, _ = bound.split(SegmentPlan(-(-T // 64), length), 64, count)
                found = checked(bound, unsplit, parts, where, gate in EXACT_GATES)
                report(event="small", where=where, **found)
            except AssertionError as error:
                report(event="failed", where=where, reason=str(error))


def case_worker(variants, rounds) -> None:
    import torch

    from cases import load_cases, make_inputs
    from gdn_prefill.split import plan_segments
    from harness.timing import Plan, Protocol, capture, interleave, make_timer

    device = torch.device("cuda")
    name = variants[0].case
    (case,) = [case for case in load_cases() if case.name == name]
    bound = Bound(make_inputs(case, device="cuda"))
    unsplit = bound.unsplit(UNSPLIT_DV[name])
    for variant in variants:
        try:
            plan = plan_segments(bound.T, variant.segments)
            parts, opening, size = bound.split(plan, *variant.kernels)
            fields = checked(bound, unsplit, parts, str(variant), True)
            calls = {"total": in_order(parts), **parts, **opening, "unsplit": unsplit}
            graphs = {part: capture(call, device) for part, call in calls.items()}
            timer = make_timer(device, Protocol.GRAPH)
            samples = interleave(graphs, Plan(Protocol.GRAPH, 5, rounds), timer, device)
            fields.update({f"{part}_us": s.median_ms * 1e3 for part, s in samples.items()})
            report(
                event="timed",
                case=name,
                segments=plan.segments,
                chunks_per_segment=plan.chunks_per_segment,
                block_dv=variant.block_dv,
                products=variant.products,
                paired=variant.paired,
                unsplit_block_dv=UNSPLIT_DV[name],
                workspace_bytes=size,
                **fields,
            )
        except AssertionError as error:
            report(event="failed", where=str(variant), reason=str(error))


def launch_once(variant: Variant) -> None:
    import torch

    from cases import load_cases, make_inputs
    from gdn_prefill.split import plan_segments

    (case,) = [case for case in load_cases() if case.name == variant.case]
    bound = Bound(make_inputs(case, device="cuda"))
    parts, _, _ = bound.split(plan_segments(bound.T, variant.segments), *variant.kernels)
    for _ in range(3):
        in_order(parts)()
    torch.cuda.synchronize()


def compile_all(variants) -> None:
    from cases import load_cases

    heads = {case.name: (case.Hq, case.Hv, case.initial_state) for case in load_cases()}
    small = {(one[2:5], 64, count, True) for one in SMALL for count in (1, 3)}
    wanted = {(heads[one.case], *one.kernels) for one in variants} | small
    unsplit = {(heads[one.case], UNSPLIT_DV[one.case]) for one in variants}
    unsplit |= {(one[2:5], 64) for one in SMALL}
    for key in sorted(wanted):
        begin = time.monotonic()
        split_launchers(*key[0], *key[1:])
        print(f"split {key} {time.monotonic() - begin:.1f} s", flush=True)
    for key in sorted(unsplit):
        begin = time.monotonic()
        unsplit_launcher(*key[0], key[1])
        print(f"unsplit {key} {time.monotonic() - begin:.1f} s", flush=True)


def gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def run_worker(arguments: list[str], timeout: float) -> tuple[list[dict], str | None]:
    """Events of one worker, and why it ended badly, if so. timeout: seconds without an event."""
    process = subprocess.Popen(
        [sys.executable, __file__, *arguments], stdout=subprocess.PIPE, bufsize=0
    )
    os.set_blocking(process.stdout.fileno(), False)
    events: list[dict] = []
    pending, heard = "", time.monotonic()
    while True:
        ended = process.poll() is not None
        text = (process.stdout.read() or b"").decode()
        if text:
            heard = time.monotonic()
            *lines, pending = (pending + text).split("\n")
            for line in lines:
                if line.startswith("@"):
                    events.append(json.loads(line[1:]))
                    print(one_line(events[-1]), flush=True)
                else:
                    print(line, flush=True)
        elif ended:
            return events, f"exit status {process.returncode}" if process.returncode else None
        elif time.monotonic() - heard > timeout:
            process.kill()
            process.wait()
            return events, f"nothing for {timeout:.0f} s"
        else:
            time.sleep(0.05)


def one_line(event: dict) -> str:
    if event["event"] == "failed":
        return f"FAILED {event['where']}: {event['reason']}"
    errors = (
        f"errors {event['output_error']:.2e} {event['state_error']:.2e} "
        f"(unsplit {event['unsplit_output_error']:.2e} {event['unsplit_state_error']:.2e})"
    )
    if event["event"] == "small":
        return f"ok {event['where']}: {errors}"
    return (
        f"{event['case']:16s} {event['segments']:3d} x {event['chunks_per_segment']:4d} chunks "
        f"dv {event['block_dv']:3d} products {event['products']} "
        f"{'' if event['paired'] else 'apart '}"
        f"{event['total_us']:8.1f} us = {event['opening_us']:.1f} / {event.get('scan_us', 0):.1f} "
        f"/ {event['rest_us']:.1f}, unsplit {event['unsplit_us']:.1f}, {errors}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plans", nargs="+", type=Variant.parse, metavar="PLAN")
    parser.add_argument("--cases", nargs="+", help="only plans of these cases")
    parser.add_argument("--out", type=Path, help="CSV of every timed plan")
    parser.add_argument("--rounds", type=int, default=40, help="interleaved replays of every graph")
    parser.add_argument(
        "--timeout", type=float, default=90, help="seconds without news before a worker is killed"
    )
    parser.add_argument("--no-small", action="store_true", help="skip the small checks")
    parser.add_argument("--compile", action="store_true", help="only compile every specialisation")
    parser.add_argument("--once", action="store_true", help="launch the first plan three times")
    parser.add_argument("--worker", choices=("small", "case"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    variants = options.plans or [Variant.parse(plan) for plan in PLANS]
    variants = [one for one in variants if options.cases is None or one.case in options.cases]
    if options.compile:
        compile_all(variants)
        return 0
    if not gpu():
        print("error: no CUDA device here; only --compile works without one", file=sys.stderr)
        return 2
    if options.once:
        launch_once(variants[0])
        return 0
    if options.worker == "small":
        small_worker(sorted({one.products for one in variants}))
        return 0
    if options.worker == "case":
        case_worker(variants, options.rounds)
        return 0

    jobs = [] if options.no_small else [["--worker", "small"]]
    for case in dict.fromkeys(one.case for one in variants):
        plans = [str(one) for one in variants if one.case == case]
        jobs.append(["--worker", "case", "--rounds", str(options.rounds), "--plans", *plans])
    events, bad = [], 0
    for job in jobs:
        found, trouble = run_worker(job, options.timeout)
        events += found
        if trouble:
            bad += 1
            print(f"FAILED worker {' '.join(job)}: {trouble}", flush=True)
    bad += sum(event["event"] == "failed" for event in events)
    timed = [event for event in events if event["event"] == "timed"]
    if options.out:
        with options.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS, extrasaction="ignore", restval="")
            writer.writeheader()
            writer.writerows(timed)
    print(f"{len(timed)} plans timed, {bad} failures")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
