"""Every version of the ladder in the emulator, against the float64 reference."""

import pytest
import torch

from cases import Case, make_inputs
from gdn_ladder import VERSIONS, Inputs, LadderShape, forward, get_version
from gdn_ladder.families import VARIANT, PackageRuntime
from gdn_ladder.scan import ScanConfig, scan_kernel
from gdn_ladder.segments import CHUNK_PARALLEL_SCAN, Split
from reference.chunked import chunk_cumsum, gdn_chunked, solve_A
from tile_emulator import DeadlockError, emulate

TOLERANCE = 5e-3
RIGHT = [
    version.name
    for version in VERSIONS
    # The package's runtime launches by itself: its kernel is v7's.
    if version.expected == "pass" and not isinstance(version.family, PackageRuntime)
]

PREPARED = ["prepared_groups", "prepared_fused", "prepared_wide"]

CASES = {
    "gva, batch, tail, state": Case("gva", 2, 200, 1, 4, True, "random_decay", 5e-3, 5e-3),
    "equal heads, one short chunk": Case("short", 1, 63, 4, 4, False, "mixed", 5e-3, 5e-3),
    "one token": Case("token", 1, 1, 2, 4, True, "mixed", 5e-3, 5e-3),
    "whole chunks, mixed gates": Case("whole", 1, 256, 2, 4, False, "mixed", 5e-3, 5e-3),
}


class Problem:
    """Inputs, what a kernel needs made of them, and the expected results."""

    def __init__(self, case, gate_factor=1.0):
        inputs = make_inputs(case)
        g = inputs.g * gate_factor
        self.output, self.state = gdn_chunked(
            inputs.q, inputs.k, inputs.v, g, inputs.beta, inputs.initial_state
        )
        self.arguments = (
            inputs.q,
            inputs.k,
            inputs.v,
            chunk_cumsum(g).float(),
            inputs.beta,
            solve_A(inputs.k, g, inputs.beta).bfloat16(),
            inputs.initial_state,
        )

    def wrong(self, result):
        """How many elements of (output, final state) are out of tolerance; NaN is."""
        return tuple(
            int((~torch.isclose(got.double(), want, rtol=TOLERANCE, atol=TOLERANCE)).sum())
            for got, want in zip(result, (self.output, self.state), strict=True)
        )


def emulated(reports, schedule="roundrobin"):
    """An execute that runs kernels in the emulator and appends its reports."""

    def execute(kernel, config):
        prim_func = kernel.build(config)

        def launch(*arguments):
            report = emulate(
                prim_func,
                *arguments,
                schedule=schedule,
                pass_configs=kernel.pass_configs,
                raise_on_issue=False,
            )
            reports.append(report)

        return launch

    return execute


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("version", RIGHT)
def test_right_and_free_of_races(version, case):
    problem, reports = Problem(case), []
    result = forward(version, *problem.arguments, execute=emulated(reports))
    assert problem.wrong(result) == (0, 0)
    for report in reports:
        assert report.ok, report
        assert set(report.written.values()) == {1.0}
    assert set(report.written) == {"output", "final_state"}


@pytest.mark.parametrize("schedule", ["priority:1", "random:2"])
@pytest.mark.parametrize("version", RIGHT)
def test_other_schedules_give_the_same_bits(version, schedule):
    problem = Problem(CASES["gva, batch, tail, state"])
    first = forward(version, *problem.arguments, execute=emulated([]))
    second = forward(version, *problem.arguments, execute=emulated([], schedule))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("version", ["v2b", "v7", "v11", "v20", *PREPARED])
def test_strong_gates_do_not_overflow(version):
    problem = Problem(CASES["whole chunks, mixed gates"], gate_factor=400.0)
    assert float(problem.arguments[3].min()) < -500  # exp(-g) would be infinite
    result = forward(version, *problem.arguments, execute=emulated([]))
    assert problem.wrong(result) == (0, 0)


@pytest.mark.parametrize("gate_factor", [0.0, 3.0, 12.0])
@pytest.mark.parametrize("version", PREPARED)
def test_prepared_kernels_keep_the_decay_outside_the_state(version, gate_factor):
    """No decay; 15 bits of it a chunk, which pass one limit now and then; 60, around the other."""
    case = Case("long", 1, 449, 1, 1, True, "random_decay", 5e-3, 5e-3)
    problem, reports = Problem(case, gate_factor), []
    result = forward(version, *problem.arguments, execute=emulated(reports, "random:3"))
    assert reports[0].ok, reports[0]
    for got, want in zip(result, (problem.output, problem.state), strict=True):
        assert (got.double() - want).norm() < 5e-3 * want.norm()


def test_v4_is_wrong_on_an_A_that_holds_the_gate():
    problem, reports = Problem(CASES["gva, batch, tail, state"]), []
    result = forward("v4", *problem.arguments, execute=emulated(reports))
    assert reports[0].ok, reports[0]  # a misunderstanding, not a race
    _, wrong_state = problem.wrong(result)
    assert wrong_state > problem.state.numel() / 10
    error = (result[0].double() - problem.output).abs().max()
    assert 3e-3 < error < 2e-2  # the source reports about 7e-3; rounding alone is 1e-3


def test_v4_is_right_on_flash_qlas_own_A():
    problem = Problem(CASES["gva, batch, tail, state"])
    q, k, v, g_cumsum, beta, _, state = problem.arguments
    # FlashQLA's A: no gate, and beta only inside the inverse
    ungated = solve_A(k, torch.zeros_like(g_cumsum), beta).bfloat16()
    result = forward("v4", q, k, v, g_cumsum, beta, ungated, state, execute=emulated([]))
    assert problem.wrong(result) == (0, 0)


def test_v9_races():
    problem, reports = Problem(CASES["whole chunks, mixed gates"]), []
    forward("v9", *problem.arguments, execute=emulated(reports))
    (report,) = reports
    races = [str(issue) for issue in report.issues if issue.kind == "race"]
    assert any("state_shared" in race for race in races)
    assert any("v_new_shared" in race for race in races)


def test_v9_deadlocks_when_the_O_group_falls_behind():
    problem = Problem(CASES["gva, batch, tail, state"])
    with pytest.raises(DeadlockError, match="state_ready"):
        forward("v9", *problem.arguments, execute=emulated([], "priority:1"))


def test_v9_with_its_barriers_is_right():
    """What the race report above hangs on is the one setting."""
    settings = {**get_version("v9").settings, "guards": True}
    assert settings != get_version("v9").settings
    problem, reports = Problem(CASES["whole chunks, mixed gates"]), []
    call = VARIANT.bind(settings, LadderShape(1, 256, 2, 4), emulated(reports))
    assert problem.wrong(call(Inputs(*problem.arguments))) == (0, 0)
    assert reports[0].ok, reports[0]


def test_the_scan_step_loses_no_more_than_fp32_does():
    heads, segments = 2, 3
    states = torch.full((segments, heads, 128, 128), torch.nan)
    torch.manual_seed(0)
    offsets, transitions = torch.randn(2, segments - 1, heads, 128, 128)
    initial = torch.randn(1, heads, 128, 128)
    summaries = torch.cat([offsets, transitions])
    emulate(scan_kernel(ScanConfig(heads, True)), summaries, initial, states, segments)
    expected = [initial[0].double()]
    for N, M in zip(offsets.double(), transitions.double(), strict=True):
        expected.append(M @ expected[-1] + N)
    # Entries grow to 128: bf16 would be off by 0.3, FP32 by 1e-5.
    assert (states - torch.stack(expected)).abs().max() < 5e-3


def emulator_sums_int8_in_int32():
    """Whether the emulator's integer GEMM keeps products that int8 cannot hold."""
    problem = Problem(CASES["one token"])
    result = forward("w8a8", *problem.arguments, execute=emulated([]))
    return float((result[1].double() - problem.state).abs().max()) < 0.1


def test_the_scan_is_right_for_any_number_of_segments():
    problem = Problem(Case("segments", 2, 400, 1, 2, True, "mixed", 5e-3, 5e-3))
    for split in (Split(7, 1), Split(4, 2), Split(2, 6)):
        settings, reports = {"block_dv": 64, "split": split}, []
        shape = LadderShape(2, 400, 1, 2, use_initial_state=True)
        call = CHUNK_PARALLEL_SCAN.bind(settings, shape, emulated(reports))
        assert problem.wrong(call(Inputs(*problem.arguments))) == (0, 0)
        assert len(reports) == 3 and all(report.ok for report in reports)


def test_w8a8_is_out_of_tolerance_by_rounding_alone():
    if not emulator_sums_int8_in_int32():
        pytest.skip("the emulator's integer GEMM overflows int8")
    problem, reports = Problem(CASES["gva, batch, tail, state"]), []
    result = forward("w8a8", *problem.arguments, execute=emulated(reports))
    assert reports[0].ok, reports[0]
    _, wrong_state = problem.wrong(result)
    assert wrong_state > 0
    assert (result[1].double() - problem.state).abs().max() < 0.1
