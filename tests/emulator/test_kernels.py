"""The kernels of this repository under the emulator, against float64 at the lab's tolerance."""

from functools import cache, partial

import pytest
import torch
from building import run

from cases import CHUNK, HEAD_DIM, Case, make_inputs
from gdn_prefill.kernels import forward, preprocess, resident
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


def run_forward(program, pass_configs, problem, **options):
    """(report, output, final state); what no CTA writes stays NaN."""
    x, g_cumsum, A, *_ = problem
    state = torch.empty(1) if x.initial_state is None else x.initial_state
    output = torch.full_like(x.v, torch.nan)
    final_state = torch.full((x.v.shape[0], x.v.shape[2], HEAD_DIM, HEAD_DIM), torch.nan)
    report = run(
        program,
        x.q,
        x.k,
        x.v,
        g_cumsum.float(),
        x.beta,
        A.bfloat16(),
        state,
        output,
        final_state,
        HEAD_DIM**-0.5,
        pass_configs=pass_configs,
        **options,
    )
    return report, output, final_state


def assert_forward(report, output, final_state, problem, heads=slice(None)):
    assert report.ok, str(report)
    *_, want, want_state = problem
    torch.testing.assert_close(output[:, :, heads].double(), want[:, :, heads], **TOLERANCE)
    torch.testing.assert_close(final_state[:, heads].double(), want_state[:, heads], **TOLERANCE)


def assert_forward_under_all_schedules(program, pass_configs, problem, ctas):
    """The first CTAs, which own the first head."""
    for schedule in (*RANDOM, *adversarial(program.roles)):
        result = run_forward(
            program, pass_configs, problem, schedule=schedule, blocks=lambda block: block[0] < ctas
        )
        assert_forward(*result, problem, slice(0, 1))


@pytest.mark.parametrize("name", [name for name in SHIPPED if name.startswith("forward")])
def test_shipped_forward(name):
    item = SHIPPED[name]
    case = problem(*heads_of(name), "_init_" in name)
    program = Program(item.build())
    result = run_forward(program, item.pass_configs, case)
    assert_forward(*result, case)
    assert set(result[0].written.values()) == {1.0}
    slices = result[0].ctas // case[0].v.shape[2]
    assert_forward_under_all_schedules(program, item.pass_configs, case, slices)


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 128, 449])
def test_forward_lengths_and_batches(tokens):
    case = problem(1, 2, True, 2, tokens)
    config = forward.ForwardConfig(1, 2, use_initial_state=True)
    result = run_forward(Program(forward.forward_kernel(config)), forward.PASS_CONFIGS, case)
    assert_forward(*result, case)


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("block_dv", [64, 128])
@pytest.mark.parametrize("tokens", [1, TOKENS, 7 * CHUNK])
def test_resident(block_dv, state, tokens):
    case = problem(1, 2, state, 1, tokens)
    config = resident.ResidentConfig(1, 2, block_dv, use_initial_state=state)
    program = Program(resident.resident_kernel(config))
    assert_forward(*run_forward(program, resident.PASS_CONFIGS, case), case)
    if tokens == TOKENS:
        slices = HEAD_DIM // block_dv
        assert_forward_under_all_schedules(program, resident.PASS_CONFIGS, case, slices)


@pytest.mark.parametrize("name", [name for name in SHIPPED if not name.startswith("forward")])
def test_shipped_preprocessing(name):
    item = SHIPPED[name]
    x, g_cumsum, A, *_ = problem(*heads_of(name), False)
    program = Program(item.build())
    execute = partial(run, program, pass_configs=item.pass_configs)
    if name.startswith("cumsum"):
        got, want = torch.full_like(x.g, torch.nan), g_cumsum
        arguments = (x.g, got)
    else:
        got, want = torch.full_like(A, torch.nan, dtype=torch.bfloat16), A
        arguments = (x.k, g_cumsum.float(), x.beta, got)
    report = execute(*arguments)
    assert report.ok, str(report)
    torch.testing.assert_close(got.double(), want, **TOLERANCE)
    first = 2 if x.v.shape[2] > 8 else 4
    for schedule in (*RANDOM[:2], *adversarial(program.roles)):
        assert execute(*arguments, schedule=schedule, blocks=lambda b: b[0] < first).ok


@pytest.mark.parametrize("tokens", [1, 63, 65, 130])
def test_preprocessing_lengths_and_batches(tokens):
    x, g_cumsum, A, *_ = problem(1, 2, False, 2, tokens)
    config = preprocess.PreprocessConfig(1, 2)
    sums = torch.full_like(x.g, torch.nan)
    inverse = torch.full_like(A, torch.nan, dtype=torch.bfloat16)
    assert run(preprocess.cumsum_kernel(config), x.g, sums).ok
    assert run(preprocess.kkt_inverse_kernel(config), x.k, sums, x.beta, inverse).ok
    torch.testing.assert_close(sums.double(), g_cumsum, **TOLERANCE)
    torch.testing.assert_close(inverse.double(), A, **TOLERANCE)
