"""Check and time variants of the register-resident kernel on a GPU, one table for all of them.

    python benchmarks/resident_variants.py --compile            fill the compile cache; no GPU
    python benchmarks/resident_variants.py --out variants.csv   check, then time by graph replay
    python benchmarks/resident_variants.py --once NAME --case C three launches, for a profiler

A worker process does the GPU work. When it hangs or dies in the middle of a variant, the parent
notes that and goes on with the next variant in a fresh worker; only variants that passed every
check are timed, replay by replay in turn. TILELANG_CACHE_DIR is honoured.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import queue
import re
import statistics
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernel")]

HEAD_DIM = 128
CHUNK = 64
TOLERANCE = 5e-3
RELATIVE_LIMIT = 5e-3
LAUNCHES_PER_GRAPH = 8


@dataclasses.dataclass(frozen=True)
class Shape:
    """One timed shape; initial_state also selects the specialisation."""

    name: str
    B: int
    T: int
    Hq: int
    Hv: int
    initial_state: bool = False

    @property
    def heads(self) -> tuple[int, int, bool]:
        return self.Hq, self.Hv, self.initial_state


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("short_tail_state", 1, 1025, 2, 8, True),
        Shape("chain_equal", 1, 8192, 4, 4),
        Shape("parallel_equal", 1, 2048, 16, 16),
        Shape("parallel_gva", 1, 2048, 4, 16),
        Shape("long_low_gva", 1, 32768, 2, 8),
        Shape("batch_split_gva", 4, 8192, 2, 8),
        Shape("wide_gva_state", 1, 8192, 16, 64, True),
        Shape("deep_gva_state", 1, 16384, 8, 32, True),
        Shape("slope_short", 1, 4096, 4, 4),
        Shape("slope_long", 1, 16384, 4, 4),
        Shape("full_short", 1, 2048, 16, 64, True),
    )
}
# us per chunk is the slope between two lengths: with few CTAs, and with a CTA for nearly every SM.
SLOPES = {"slope": ("slope_short", "slope_long"), "full": ("full_short", "wide_gva_state")}

CHAIN_SHAPES = ("chain_equal", "slope_short", "slope_long")
FULL_SHAPES = ("full_short", "wide_gva_state")


@dataclasses.dataclass(frozen=True)
class Variant:
    """settings: other than ResidentConfig's defaults. bare: without the state group's fences.

    version: a register-resident kernel of the ladder, in place of the shipped one with settings.
    """

    name: str
    settings: dict
    shapes: tuple[str, ...]
    bare: bool = False
    version: str | None = None


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("dv64", {}, (*CHAIN_SHAPES, *FULL_SHAPES)),
        Variant("dv64_rolled", {"unrolled": False}, (*CHAIN_SHAPES, *FULL_SHAPES)),
        Variant("dv128", {"block_dv": 128}, (*CHAIN_SHAPES, *FULL_SHAPES)),
        Variant("dv128_bare", {"block_dv": 128}, FULL_SHAPES, bare=True),
        Variant("groups", {}, (*CHAIN_SHAPES, *FULL_SHAPES), version="prepared_groups"),
        Variant("fused", {}, (*CHAIN_SHAPES, *FULL_SHAPES), version="prepared_fused"),
        Variant("wide", {}, (*CHAIN_SHAPES, *FULL_SHAPES), version="prepared_wide"),
    )
}

# B, T and gate of the checks; the heads are those of the variant's first specialisation.
CHECKS = (
    (1, 64, "decay"),
    (1, 1, "decay"),
    (2, 200, "wild"),
    (1, 129, "strong"),
    (2, 1025, "mixed"),
    (1, 449, "zero"),
    (1, 4096, "decay"),
    (1, 2048, "mixed"),
)
EXACT_GATES = ("decay", "mixed")  # those whose every element must be within TOLERANCE


def built(variant: Variant, heads: tuple[int, int, bool]):
    """PrimFunc and pass configs; all take the arguments of Call."""
    heads_q, heads_v, initial_state = heads
    if variant.version is not None:
        from gdn_ladder import LadderShape, kernels_of

        shape = LadderShape(1, CHUNK, heads_q, heads_v, initial_state)
        ((kernel, config),) = kernels_of(variant.version, shape)
        return kernel.build(config), kernel.pass_configs

    from gdn_prefill.kernels.resident import PASS_CONFIGS, ResidentConfig, resident_kernel

    config = ResidentConfig(heads_q, heads_v, use_initial_state=initial_state, **variant.settings)
    return resident_kernel(config), PASS_CONFIGS


def specialisations(variant: Variant) -> list[tuple[int, int, bool]]:
    return list(dict.fromkeys(SHAPES[name].heads for name in variant.shapes))


def without_state_fences(source: str) -> str:
    """CUDA source less the proxy fences of its first warp group, the state group."""
    first, second = (
        match.start() for match in list(re.finditer(r"warpgroup_reg_(?:de)?alloc", source))[:2]
    )
    state = source[first:second].replace("tl::fence_proxy_async();", "")
    return source[:first] + state + source[second:]


def compiled(variant: Variant, heads: tuple[int, int, bool]):
    import tvm_ffi

    from gdn_prefill.toolchain import compile_for_hopper

    def postprocess(source, _target):
        bare = variant.bare and "gdn_forward_resident" in source and "warpgroup_reg_" in source
        return without_state_fences(source) if bare else source

    tvm_ffi.register_global_func("tilelang_callback_cuda_postproc", f=postprocess, override=True)
    return compile_for_hopper(*built(variant, heads))


# --- worker
def log_gate(kind: str, shape, generator, device):
    import torch

    def noise():
        return torch.randn(shape, generator=generator, device=device)

    decay = torch.nn.functional.logsigmoid(noise()) / 16
    if kind == "mixed":
        decay[:, ::2] = 0
    elif kind == "zero":
        decay.zero_()
    elif kind == "strong":
        decay = -20 * torch.rand(shape, generator=generator, device=device)
    elif kind == "wild":
        draw = torch.rand(shape, generator=generator, device=device)
        decay = torch.where(draw < 0.1, -50.0, torch.where(draw > 0.6, 0.0, decay))
    return decay


class Call:
    """One variant bound to the inputs of one shape; a call launches the kernel."""

    def __init__(self, kernel, B, T, heads, gate, seed=42):
        import torch

        from reference.chunked import chunk_cumsum, solve_A

        heads_q, heads_v, initial_state = heads
        device = "cuda"
        generator = torch.Generator(device).manual_seed(seed)

        def noise(*shape):
            return torch.randn(shape, generator=generator, device=device)

        def unit(*shape):
            return torch.nn.functional.normalize(noise(*shape), dim=-1).bfloat16()

        self.kernel = kernel
        self.q, self.k = unit(B, T, heads_q, HEAD_DIM), unit(B, T, heads_q, HEAD_DIM)
        self.v = noise(B, T, heads_v, HEAD_DIM).bfloat16()
        self.g = log_gate(gate, (B, T, heads_v), generator, device)
        self.beta = torch.sigmoid(noise(B, T, heads_v))
        self.initial_state = noise(B, heads_v, HEAD_DIM, HEAD_DIM) if initial_state else None
        self.g_cumsum = chunk_cumsum(self.g).float()
        self.A = solve_A(self.k, self.g, self.beta).bfloat16()
        self.output = torch.full_like(self.v, float("nan"))
        self.final_state = torch.full((B, heads_v, HEAD_DIM, HEAD_DIM), float("nan"), device=device)
        dummy = torch.zeros(1, device=device)
        self.arguments = (
            self.q,
            self.k,
            self.v,
            self.g_cumsum,
            self.beta,
            self.A,
            dummy if self.initial_state is None else self.initial_state,
            self.output,
            self.final_state,
            HEAD_DIM**-0.5,
        )

    def __call__(self):
        self.kernel(*self.arguments)


def check(variant: Variant, kernel, heads) -> tuple[float, float]:
    """Worst relative L2 error of output and state over CHECKS; AssertionError on any failure."""
    import torch

    from reference.chunked import gdn_chunked

    worst = [0.0, 0.0]
    for B, T, gate in CHECKS:
        call = Call(kernel, B, T, heads, gate)
        expected = gdn_chunked(call.q, call.k, call.v, call.g, call.beta, call.initial_state)
        call()
        torch.cuda.synchronize()
        first = (call.output.clone(), call.final_state.clone())
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        for index, (name, got, again, want) in enumerate(
            zip(("output", "state"), first, (call.output, call.final_state), expected, strict=True)
        ):
            where = f"{name} of B={B} T={T} gate={gate}"
            assert bool(torch.isfinite(got).all()), f"{where} is not finite"
            assert torch.equal(got, again), f"{where} differs between two launches"
            error = float((got.double() - want).norm() / want.norm().clamp_min(1e-30))
            worst[index] = max(worst[index], error)
            assert error < RELATIVE_LIMIT, f"{where}: relative L2 error {error:.2e}"
            if gate in EXACT_GATES:
                wrong = int(
                    (~torch.isclose(got.double(), want, rtol=TOLERANCE, atol=TOLERANCE)).sum()
                )
                assert wrong == 0, f"{where}: {wrong} elements beyond {TOLERANCE}"
    return worst[0], worst[1]


def report(**fields) -> None:
    print("@" + json.dumps(fields), flush=True)


def check_worker(names: list[str]) -> None:
    for name in names:
        variant = VARIANTS[name]
        report(event="start", variant=name)
        try:
            heads = specialisations(variant)
            errors = [check(variant, compiled(variant, one), one) for one in (heads[0], heads[-1])]
            report(
                event="checked",
                variant=name,
                output_error=max(error[0] for error in errors),
                state_error=max(error[1] for error in errors),
            )
        except AssertionError as error:
            report(event="failed", variant=name, reason=str(error))
        except Exception as error:  # a broken variant must not lose the others
            traceback.print_exc()
            report(event="failed", variant=name, reason=f"{type(error).__name__}: {error}"[:300])
            if "CUDA" in str(error):
                raise


def capture(call: Call):
    import torch

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES_PER_GRAPH):
            call()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def time_worker(names: list[str], rounds: int) -> None:
    import torch

    for shape in SHAPES.values():
        graphs = {}
        for name in names:
            if shape.name not in VARIANTS[name].shapes:
                continue
            call = Call(
                compiled(VARIANTS[name], shape.heads), shape.B, shape.T, shape.heads, "decay"
            )
            graphs[name] = (capture(call), call)
        times: dict[str, list[float]] = {name: [] for name in graphs}
        for _ in range(rounds):
            for name, (graph, _call) in graphs.items():
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                graph.replay()
                end.record()
                end.synchronize()
                times[name].append(begin.elapsed_time(end) * 1e3 / LAUNCHES_PER_GRAPH)
        for name, values in times.items():
            cuts = statistics.quantiles(values, n=10)
            report(
                event="timed",
                variant=name,
                shape=shape.name,
                median_us=statistics.median(values),
                p20_us=cuts[1],
                p80_us=cuts[7],
            )
        del graphs
        torch.cuda.empty_cache()


# --- parent
def run_worker(arguments: list[str], timeout: float) -> tuple[list[dict], str | None]:
    """Events of one worker, and why it ended badly, if so. timeout: seconds without an event."""
    process = subprocess.Popen(
        [sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True
    )
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    events: list[dict] = []
    try:
        while (line := lines.get(timeout=timeout)) is not None:
            if line.startswith("@"):
                events.append(json.loads(line[1:]))
            else:
                print(line, end="", flush=True)
        status = process.wait(timeout=timeout)
    except (queue.Empty, subprocess.TimeoutExpired):
        process.kill()
        process.wait()
        return events, f"nothing for {timeout:.0f} s"
    return events, None if status == 0 else f"exit status {status}"


def check_all(names: list[str], timeout: float) -> dict[str, dict]:
    results: dict[str, dict] = {}
    left = list(names)
    while left:
        events, trouble = run_worker(["--worker", "check", "--variants", *left], timeout)
        for event in events:
            if event["event"] in ("checked", "failed"):
                results[event["variant"]] = event
        started = [event["variant"] for event in events if event["event"] == "start"]
        if trouble and started and started[-1] not in results:
            results[started[-1]] = {"event": "failed", "variant": started[-1], "reason": trouble}
        elif trouble and not started:
            raise SystemExit(f"the worker ended before its first variant: {trouble}")
        left = [name for name in left if name not in results]
    return results


def table(names, checks, times) -> list[str]:
    lines = [
        f"{'variant':22s} {'check':>18s} "
        + " ".join(f"{name[:12]:>12s}" for name in SHAPES)
        + " us/chunk: slope, full"
    ]
    for name in names:
        found = checks.get(name, {})
        status = (
            f"{found['output_error']:.1e} {found['state_error']:.1e}"
            if found.get("event") == "checked"
            else "FAILED"
        )
        cells = [
            f"{times[name, shape]['median_us']:12.1f}" if (name, shape) in times else f"{'':12s}"
            for shape in SHAPES
        ]
        slopes = []
        for short, long in SLOPES.values():
            if (name, short) in times and (name, long) in times:
                chunks = (SHAPES[long].T - SHAPES[short].T) / CHUNK
                added = times[name, long]["median_us"] - times[name, short]["median_us"]
                slopes.append(f"{added / chunks:.3f}")
        lines.append(f"{name:22s} {status:>18s} " + " ".join(cells) + " " + " ".join(slopes))
        if found.get("event") == "failed":
            lines.append(f"{'':22s} {found['reason']}")
    return lines


def gpu_is_there() -> bool:
    import torch

    return torch.cuda.is_available()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS), metavar="NAME"
    )
    parser.add_argument("--out", type=Path, help="CSV of every measurement")
    parser.add_argument("--rounds", type=int, default=40, help="interleaved replays of every graph")
    parser.add_argument(
        "--timeout", type=float, default=60, help="seconds without news before a worker is killed"
    )
    parser.add_argument("--compile", action="store_true", help="only compile every specialisation")
    parser.add_argument("--once", choices=list(VARIANTS), help="launch one variant three times")
    parser.add_argument(
        "--case", default="chain_equal", choices=list(SHAPES), help="shape of --once"
    )
    parser.add_argument("--worker", choices=("check", "time"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not (arguments.compile or gpu_is_there()):
        parser.exit(2, "nothing to measure: torch sees no GPU\n")

    if arguments.compile:
        for name in arguments.variants:
            for heads in specialisations(VARIANTS[name]):
                begin = time.monotonic()
                compiled(VARIANTS[name], heads)
                print(f"{name} {heads} {time.monotonic() - begin:.1f} s", flush=True)
    elif arguments.once:
        shape = SHAPES[arguments.case]
        call = Call(
            compiled(VARIANTS[arguments.once], shape.heads), shape.B, shape.T, shape.heads, "decay"
        )
        for _ in range(3):
            call()
        import torch

        torch.cuda.synchronize()
    elif arguments.worker == "check":
        check_worker(arguments.variants)
    elif arguments.worker == "time":
        time_worker(arguments.variants, arguments.rounds)
    else:
        checks = check_all(arguments.variants, arguments.timeout)
        passed = [name for name in arguments.variants if checks[name]["event"] == "checked"]
        times = {}
        if passed:
            options = ["--worker", "time", "--rounds", str(arguments.rounds), "--variants", *passed]
            events, trouble = run_worker(options, arguments.timeout)
            times = {
                (event["variant"], event["shape"]): event
                for event in events
                if event["event"] == "timed"
            }
            if trouble:
                print(f"timing ended early: {trouble}")
        if arguments.out:
            with arguments.out.open("w", newline="") as file:
                writer = csv.writer(file)
                writer.writerow(
                    [
                        "variant",
                        "shape",
                        "median_us",
                        "p20_us",
                        "p80_us",
                        "output_error",
                        "state_error",
                    ]
                )
                for (name, shape), event in times.items():
                    writer.writerow(
                        [name, shape]
                        + [f"{event[key]:.3f}" for key in ("median_us", "p20_us", "p80_us")]
                        + [f"{checks[name][key]:.3e}" for key in ("output_error", "state_error")]
                    )
        print("\n".join(table(arguments.variants, checks, times)))


if __name__ == "__main__":
    main()
