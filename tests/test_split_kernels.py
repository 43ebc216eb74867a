"""The kernels of the split over time under the emulator, against float64 and the unsplit kernel."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from cases import CHUNK, HEAD_DIM, Inputs
from gdn_ladder import four_group
from gdn_prefill import cost
from gdn_prefill.kernels import resident, split
from gdn_prefill.split import SegmentPlan, SplitLaunchers, split_forward, split_launches, workspaces
from reference.chunked import chunk_cumsum, gdn_chunked, solve_A
from tile_emulator import DeadlockError, Edit, Program, adversarial, emulate

TOLERANCE = {"rtol": 5e-3, "atol": 5e-3}
SCALE = HEAD_DIM**-0.5
PASS_CONFIGS = (split.PASS_CONFIGS, split.PASS_CONFIGS, resident.PASS_CONFIGS)


def unit(x):
    return torch.nn.functional.normalize(x, dim=-1).bfloat16()


@cache
def inputs(B, T, Hq, Hv, state=True, gate="decay", beta=None, spread=None):
    """spread: how far the keys of a head are from being one key; None for random keys."""
    generator = torch.Generator().manual_seed(7)

    def noise(*shape):
        return torch.randn(shape, generator=generator)

    k = noise(B, T, Hq, HEAD_DIM)
    if spread is not None:
        k = noise(B, 1, Hq, HEAD_DIM) + spread * k
    draw = torch.rand(B, T, Hv, generator=generator)
    decay = torch.nn.functional.logsigmoid(noise(B, T, Hv)) / 16
    gates = {
        "decay": decay,
        "zero": torch.zeros_like(decay),
        "strong": -50 * draw,
        "wild": torch.where(draw < 0.1, -50.0, torch.where(draw > 0.6, 0.0, decay)),
    }
    row_beta = torch.sigmoid(noise(B, T, Hv))
    return Inputs(
        q=unit(noise(B, T, Hq, HEAD_DIM)),
        k=unit(k),
        v=noise(B, T, Hv, HEAD_DIM).bfloat16(),
        g=gates[gate],
        beta=row_beta if beta is None else torch.full_like(row_beta, beta),
        initial_state=noise(B, Hv, HEAD_DIM, HEAD_DIM) if state else None,
    )


def prepared(x):
    return x.q, x.k, x.v, chunk_cumsum(x.g).float(), x.beta, solve_A(x.k, x.g, x.beta).bfloat16()


def start(x):
    return torch.empty(1) if x.initial_state is None else x.initial_state


def outputs(x):
    shape = (x.v.shape[0], x.v.shape[2], HEAD_DIM, HEAD_DIM)
    return torch.full_like(x.v, torch.nan), torch.full(shape, torch.nan)


def temporaries(x, plan, products):
    found = workspaces(plan, x.v.shape[0], x.v.shape[2], products)
    return {
        name: torch.full(item.shape, torch.nan, dtype=getattr(torch, item.dtype))
        for name, item in found.items()
    }


@cache
def programs(Hq, Hv, state, products, block_dv):
    return (
        Program(split.summary_kernel(split.SummaryConfig(Hq, Hv, products == 3))),
        Program(split.scan_kernel(split.ScanConfig(Hv, products))),
        Program(
            resident.resident_kernel(
                resident.ResidentConfig(Hq, Hv, block_dv, state, segmented=True)
            )
        ),
    )


def run_split(x, length, products=3, block_dv=64, order=None, **options):
    """(output, final state, temporaries) of all launches, in the order of their names where one is
    given; any finding raises.
    """
    B, T, Hv = x.g.shape
    plan = SegmentPlan(-(-T // CHUNK), length)
    kernels = programs(x.q.shape[2], Hv, x.initial_state is not None, products, block_dv)

    def launcher(program, pass_configs):
        return lambda *arguments: emulate(program, *arguments, pass_configs=pass_configs, **options)

    between = temporaries(x, plan, products)
    output, final_state = outputs(x)
    arguments = (
        SplitLaunchers(*map(launcher, kernels, PASS_CONFIGS)),
        plan,
        between,
        prepared(x),
        start(x),
        output,
        final_state,
        SCALE,
    )
    if order is None:
        split_forward(*arguments)
    else:
        launches = dict(split_launches(*arguments))
        for name in order:
            launches[name]()
    return output, final_state, between


def run_unsplit(x):
    config = four_group.ForwardConfig(x.q.shape[2], x.v.shape[2], 64, x.initial_state is not None)
    output, final_state = outputs(x)
    emulate(
        four_group.forward_kernel(config),
        *prepared(x),
        start(x),
        output,
        final_state,
        SCALE,
        pass_configs=four_group.PASS_CONFIGS,
    )
    return output, final_state


def reference(x):
    return gdn_chunked(x.q, x.k, x.v, x.g, x.beta, x.initial_state)


def error(got, want):
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize("products", [1, 2, 3])
@pytest.mark.parametrize(
    "B, T, Hq, Hv, state, length, block_dv",
    [
        (1, 5 * CHUNK + 9, 1, 2, True, 2, 64),
        (2, 3 * CHUNK + 1, 2, 2, False, 1, 128),
        (1, CHUNK + 1, 1, 1, True, 1, 64),
    ],
)
def test_split_matches_float64(B, T, Hq, Hv, state, length, block_dv, products):
    x = inputs(B, T, Hq, Hv, state)
    output, final_state, _ = run_split(x, length, products, block_dv)
    want, want_state = reference(x)
    torch.testing.assert_close(output.double(), want, **TOLERANCE)
    torch.testing.assert_close(final_state.double(), want_state, **TOLERANCE)


@pytest.mark.parametrize("block_dv", [64, 128])
def test_the_first_segment_and_the_summary_run_in_any_order(block_dv):
    """Neither reads or overwrites what the other one writes."""
    x = inputs(1, 4 * CHUNK - 3, 1, 2)
    one = run_split(x, 1, 1, block_dv)
    other = run_split(x, 1, 1, block_dv, ("first", "summary", "scan", "rest"))
    for mine, theirs in zip(one[:2], other[:2], strict=True):
        assert mine.isfinite().all() and torch.equal(mine, theirs)


@pytest.mark.parametrize("block_dv", [64, 128])
def test_the_first_segment_alone_writes_its_output_and_the_state_at_its_end(block_dv):
    x = inputs(1, 4 * CHUNK - 3, 1, 2)
    plan, part = SegmentPlan(4, 1), slice(CHUNK)
    between = temporaries(x, plan, 1)
    output, final_state = outputs(x)
    emulate(
        programs(1, 2, True, 1, block_dv)[2],
        *(*prepared(x), start(x), between["states"], output, final_state, SCALE, 1, 0, 1, 1),
        pass_configs=resident.PASS_CONFIGS,
    )
    head = {name: getattr(x, name)[:, part] for name in ("q", "k", "v", "g", "beta")}
    want, want_state = reference(replace(x, **head))
    assert error(output[:, part], want) < 5e-3
    assert error(between["states"][0].mT, want_state) < 5e-3
    for untouched in (output[:, CHUNK:], between["states"][1:], final_state):
        assert untouched.isnan().all()


@pytest.mark.parametrize("gate", ["strong", "wild"])
def test_any_gate(gate):
    x = inputs(1, 6 * CHUNK + 5, 1, 2, True, gate)
    got = run_split(x, 2)[:2]
    for mine, want in zip(got, reference(x), strict=True):
        assert error(mine, want) < 5e-3


@pytest.mark.parametrize("products", [1, 3])
@pytest.mark.parametrize(
    "gate, beta, spread",
    [("zero", None, None), ("zero", 0.01, None), ("decay", 1.0, 0.1), ("zero", 0.01, 0.1)],
)
def test_error_is_that_of_the_unsplit_kernel(gate, beta, spread, products):
    x = inputs(1, 16 * CHUNK, 1, 1, True, gate, beta, spread)
    got, plain, want = run_split(x, 2, products)[:2], run_unsplit(x), reference(x)
    slack = 1e-3 if products == 1 else 3e-4
    for mine, other, exact in zip(got, plain, want, strict=True):
        assert error(mine, exact) < 1.1 * error(other, exact) + slack


def test_summaries_are_the_affine_map_of_a_segment():
    x = inputs(1, 6 * CHUNK, 1, 2, False)
    middle = slice(2 * CHUNK, 4 * CHUNK)
    part = replace(
        x, **{name: getattr(x, name)[:, middle] for name in ("q", "k", "v", "g", "beta")}
    )
    zero = torch.zeros(1, 2, HEAD_DIM, HEAD_DIM)
    local = reference(replace(part, initial_state=zero))[1]
    transition = reference(replace(part, initial_state=zero + torch.eye(HEAD_DIM)))[1] - local

    plan = SegmentPlan(6, 2)
    between = temporaries(x, plan, 3)
    _, k, v, g, beta, A = prepared(x)
    emulate(
        programs(1, 2, False, 3, 64)[0],
        *(k, v, A, g, beta),
        *between.values(),
        2,
        pass_configs=split.PASS_CONFIGS,
    )
    decay = part.g.double().sum(1).exp()
    torch.testing.assert_close(between["decays"][0].double(), decay, rtol=1e-5, atol=0)
    D = (between["transitions"][0].double() + between["residuals"][0].double()).mT
    M = decay[..., None, None] * torch.eye(HEAD_DIM) + D
    assert error(between["states"][1].mT, local) < 5e-3
    assert between["states"][0].isnan().all()  # the first segment's, which another launch writes
    assert error(M, transition) < 5e-3
    assert error(D, transition - decay[..., None, None] * torch.eye(HEAD_DIM)) < 5e-3


@pytest.mark.parametrize("products", [1, 2, 3])
@pytest.mark.parametrize("steps", [32, 33, 70])
def test_the_scan_is_right_beyond_the_decays_of_one_load(steps, products):
    """It loads the decays of 32 steps at a time."""
    generator = torch.Generator().manual_seed(steps)
    B, Hv = 2, 1
    states = torch.randn((steps + 1, B, Hv, HEAD_DIM, HEAD_DIM), generator=generator)
    D = 0.02 * torch.randn((steps, B, Hv, HEAD_DIM, HEAD_DIM), generator=generator)
    transitions = D.bfloat16()
    residuals = (D - transitions.float()).bfloat16()
    decays = torch.rand((steps, B, Hv), generator=generator)
    want = states.double()
    for step in range(steps):
        made = transitions[step].double() + (residuals[step].double() if products == 3 else 0)
        want[step + 1] += want[step] * decays[step, ..., None, None] + want[step] @ made
    emulate(
        programs(1, Hv, True, products, 64)[1],
        *(states, transitions, residuals if products == 3 else torch.empty(1).bfloat16(), decays),
        pass_configs=split.PASS_CONFIGS,
    )
    assert all(error(*pair) < 2e-3 for pair in zip(states, want, strict=True))


def test_the_cost_model_counts_the_ctas_that_the_scan_has():
    assert cost.SCAN_COLUMNS == split.SCAN_COLUMNS


@pytest.mark.parametrize("products", [1, 3])
def test_every_schedule(products):
    x = inputs(1, 11 * CHUNK + 3, 1, 1)
    want, want_state = reference(x)
    kernels = programs(1, 1, True, products, 64)
    roles = set.union(*(set(adversarial(program.roles)) for program in kernels))
    for schedule in ("random:0", "random:1", "priority:0", *sorted(roles)):
        usable = all(
            schedule.split(":")[0] in ("random", "priority")
            or schedule in adversarial(program.roles)
            for program in kernels
        )
        if not usable:
            continue
        output, final_state, _ = run_split(x, 4, products, schedule=schedule)
        torch.testing.assert_close(output.double(), want, **TOLERANCE)
        torch.testing.assert_close(final_state.double(), want_state, **TOLERANCE)


def found(program, arguments) -> bool:
    """Does any schedule show something wrong with the program's synchronisation?"""
    for schedule in ("roundrobin", *adversarial(program.roles)):
        try:
            report = emulate(
                program,
                *arguments,
                pass_configs=split.PASS_CONFIGS,
                schedule=schedule,
                auto_fence=False,
                raise_on_issue=False,
            )
        except DeadlockError:
            return True
        if not report.ok:
            return True
    return False


@pytest.mark.parametrize("name", ["summary", "scan"])
def test_every_wait_arrival_and_fence_is_needed(name):
    segments, length = (3, 6) if name == "summary" else (9, 1)
    x = inputs(1, segments * length * CHUNK, 1, 1)
    between = temporaries(x, SegmentPlan(segments * length, length), 3)
    between = {key: torch.zeros_like(value) for key, value in between.items()}
    if name == "summary":
        kernel = split.summary_kernel(split.SummaryConfig(1, 1))
        _, k, v, g, beta, A = prepared(x)
        arguments = (k, v, A, g, beta, *between.values(), length)
    else:
        kernel = split.scan_kernel(split.ScanConfig(1, 3))
        arguments = tuple(between.values())
    program = Program(kernel)
    assert not found(program, arguments)
    # A warp is in step after wait_wgmma, so the sync before the arrival behind it is a formality.
    sites = [site for site in program.compiler.sites if site.operation != "sync_warp"]
    missed = [
        site for site in sites if not found(Program(kernel, edit=Edit(site.number)), arguments)
    ]
    assert len(sites) >= 5 and not missed


@pytest.mark.parametrize(
    "build, match",
    [
        (lambda: split.SummaryConfig(3, 4), "heads_v=4"),
        (lambda: split.SummaryConfig(1, 1, stages=1), "stages=1"),
        (lambda: split.SummaryConfig(1, 1, registers=(240, 240, 40)), "registers"),
        (lambda: split.ScanConfig(0), "heads_v=0"),
        (lambda: split.ScanConfig(4, 4), "products=4"),
    ],
)
def test_configurations_are_checked(build, match):
    with pytest.raises(ValueError, match=match):
        build()
