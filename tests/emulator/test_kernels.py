"""The kernels of this repository under the emulator, against float64 at the lab's tolerance."""

from functools import cache, partial

import pytest
import torch
from building import run

from cases import CHUNK, HEAD_DIM, Case, make_inputs
from gdn_ladder import four_group
from gdn_prefill.kernels import preprocess, preprocess_fused, resident
from gdn_prefill.specialisations import shipped_specialisations
from reference.chunked import chunk_cumsum, gdn_chunked, solve_A
from tile_emulator import Program, adversarial

TOKENS = 3 * CHUNK + 8
TOLERANCE = {"rtol": 5e-3, "atol": 5e-3}
RANDOM = [f"random:{seed}" for seed in range(14)] + [f"priority:{seed}" for seed in range(6)]
SHIPPED = {item.name: item for item in shipped_specialisations()}


@cache
def problem(heads_q, heads_v, state, batch=1, tokens=TOKENS):
    """Inputs of a case, what the preparation makes of them, and the float64 result."""
    case = Case("emulated", batch, tokens, heads_q, heads_v, state, "mixed")
    x = make_inputs(case)
    output, final_state = gdn_chunked(x.q, x.k, x.v, x.g, x.beta, x.initial_state)
    return x, chunk_cumsum(x.g), solve_A(x.k, x.g, x.beta), output, final_state


def heads_of(name):
    """(Hq, Hv) in the name of a specialisation; Hq = Hv where only the latter is there."""
    parts = name.split("_")
    heads_v = int(next(p for p in parts if p.startswith("hv"))[2:])
    heads_q = [int(p[2:]) for p in parts if p.startswith("hq")]
    return (heads_q[0] if heads_q else heads_v), heads_v


def named(*kinds):
    return [name for name in SHIPPED if name.startswith(kinds)]


def run_forward(program, pass_configs, problem, block_dv, heads=None, **options):
    """Run the CTAs of some heads (all, if None) and compare what they write."""
    x, g_cumsum, A, want, want_state = problem
    heads_v, slices = x.v.shape[2], HEAD_DIM // block_dv
    heads = list(range(heads_v)) if heads is None else heads
    output = torch.full_like(x.v, torch.nan)
    final_state = torch.full((x.v.shape[0], heads_v, HEAD_DIM, HEAD_DIM), torch.nan)
    report = run(
        program,
        x.q,
        x.k,
        x.v,
        g_cumsum.float(),
        x.beta,
        A.bfloat16(),
        torch.empty(1) if x.initial_state is None else x.initial_state,
        output,
        final_state,
        HEAD_DIM**-0.5,
        pass_configs=pass_configs,
        blocks=lambda block: block[0] // slices % heads_v in heads,
        **options,
    )
    assert report.ok, str(report)
    assert report.ctas == x.v.shape[0] * len(heads) * slices
    assert set(report.written.values()) == {len(heads) / heads_v}
    torch.testing.assert_close(output[:, :, heads].double(), want[:, :, heads], **TOLERANCE)
    torch.testing.assert_close(final_state[:, heads].double(), want_state[:, heads], **TOLERANCE)


def run_under_all_schedules(program, *arguments):
    for schedule in (*RANDOM, *adversarial(program.roles)):
        run_forward(program, *arguments, heads=[0], schedule=schedule)


@pytest.mark.parametrize("name", named("resident"))
def test_shipped_forward(name):
    item, (heads_q, heads_v) = SHIPPED[name], heads_of(name)
    case = problem(heads_q, heads_v, "_init_" in name)
    block_dv = int(name.split("_dv")[1].split("_")[0])
    run_forward(Program(item.build()), item.pass_configs, case, block_dv, sorted({0, heads_v - 1}))


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 128, 449])
def test_forward_lengths_and_batches(tokens):
    config = four_group.ForwardConfig(1, 2, use_initial_state=True)
    program = Program(four_group.forward_kernel(config))
    run_forward(program, four_group.PASS_CONFIGS, problem(1, 2, True, 2, tokens), config.block_dv)


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("block_dv", [64, 128])
@pytest.mark.parametrize("tokens", [1, TOKENS, 7 * CHUNK])
def test_resident(block_dv, state, tokens):
    config = resident.ResidentConfig(1, 2, block_dv, use_initial_state=state)
    program = Program(resident.resident_kernel(config))
    arguments = resident.PASS_CONFIGS, problem(1, 2, state, 1, tokens), block_dv
    run_forward(program, *arguments)
    if tokens == TOKENS:
        run_under_all_schedules(program, *arguments)


def run_preprocessing(name, program, pass_configs, problem, **options):
    """(report, [(got, want)...]) of a preprocessing kernel; what no CTA writes stays NaN."""
    x, g_cumsum, A, *_ = problem
    heads = preprocess.PreprocessConfig(x.k.shape[2], x.v.shape[2])
    ctas = preprocess_fused.grid(heads, x.v.shape[0], x.v.shape[1], sm_count=1)
    sums, inverse = torch.full_like(x.g, torch.nan), torch.full(A.shape, torch.nan).bfloat16()
    arguments, results = {
        "cumsum": ((x.g, sums), [(sums, g_cumsum)]),
        "kkt": ((x.k, g_cumsum.float(), x.beta, inverse), [(inverse, A)]),
        "preprocess": (
            (x.k, x.g, x.beta, sums, inverse, ctas),
            [(sums, g_cumsum), (inverse, A)],
        ),
    }[name.split("_")[0]]
    report = run(program, *arguments, pass_configs=pass_configs, **options)
    assert report.ok, str(report)
    return report, results


@pytest.mark.parametrize("name", named("cumsum", "kkt", "preprocess"))
def test_shipped_preprocessing(name):
    item, heads = SHIPPED[name], heads_of(name)
    case = problem(*heads, False, tokens=TOKENS if heads[1] <= 16 else CHUNK + 8)
    program = Program(item.build())
    arguments = name, program, item.pass_configs, case
    for got, want in run_preprocessing(*arguments)[1]:
        torch.testing.assert_close(got.double(), want, **TOLERANCE)
    first = partial(run_preprocessing, *arguments, blocks=lambda block: block[0] == 0)
    for schedule in (*RANDOM, *adversarial(program.roles)):
        first(schedule=schedule)


@pytest.mark.parametrize("tokens", [1, 63, 65, 130])
@pytest.mark.parametrize("name", ["cumsum", "kkt", "preprocess"])
def test_preprocessing_lengths_and_batches(name, tokens):
    config = preprocess.PreprocessConfig(1, 4)
    kernel = {
        "cumsum": preprocess.cumsum_kernel,
        "kkt": preprocess.kkt_inverse_kernel,
        "preprocess": preprocess_fused.fused_preprocess_kernel,
    }[name](config)
    pass_configs = preprocess_fused.PASS_CONFIGS if name == "preprocess" else {}
    case = problem(1, 4, False, 2, tokens)
    for got, want in run_preprocessing(name, Program(kernel), pass_configs, case)[1]:
        torch.testing.assert_close(got.double(), want, **TOLERANCE)
