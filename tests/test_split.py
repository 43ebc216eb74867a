"""Plans, temporaries and the launch sequence of the split over time; no kernel runs here."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdn_prefill.split import (
    HEAD_DIM,
    CorePlan,
    SegmentPlan,
    SplitLaunchers,
    plan_segments,
    split_forward,
    split_launches,
    workspaces,
)

SQUARE = HEAD_DIM * HEAD_DIM


@given(st.integers(65, 10**7), st.integers(2, 200))
def test_segments_cover_the_chunks_once(tokens, segments):
    plan = plan_segments(tokens, segments)
    chunks = -(-tokens // 64)
    last = chunks - (plan.segments - 1) * plan.chunks_per_segment
    assert 2 <= plan.segments <= segments
    assert 1 <= last <= plan.chunks_per_segment
    assert plan.scan_steps == plan.segments - 2


@pytest.mark.parametrize("tokens, segments", [(64, 2), (0, 2), (1024, 1)])
def test_impossible_plans_are_refused(tokens, segments):
    with pytest.raises(ValueError, match="segments|tokens"):
        plan_segments(tokens, segments)


@pytest.mark.parametrize("length", [0, 8, 9])
def test_segment_length_must_leave_two_segments(length):
    with pytest.raises(ValueError, match="chunks_per_segment"):
        SegmentPlan(8, length)


def test_ctas():
    plan = SegmentPlan(128, 10)
    assert plan.segments == 13
    # N and D of the eleven between, beside the first's tiles
    assert plan.opening_ctas(4, 64) == 4 * (2 + 2 * 11)
    assert plan.opening_ctas(4, 128) == 4 * (1 + 2 * 11)
    assert plan.forward_ctas(4, 64) == 4 * 2 * 12
    two = SegmentPlan(128, 64)
    assert (two.opening_ctas(4, 64), two.forward_ctas(4, 128)) == (4 * 2, 4)


def test_temporaries():
    found = workspaces(SegmentPlan(128, 10), B=2, Hv=4)
    assert found["states"].shape == (12, 2, 4, 128, 128)
    assert found["states"].bytes == 12 * 8 * SQUARE * 4
    assert found["transitions"].bytes == found["residuals"].bytes == 11 * 8 * SQUARE * 2
    assert found["decays"].shape == (11, 2, 4)
    single = workspaces(SegmentPlan(128, 64), B=1, Hv=4, products=1)
    assert single["states"].shape[0] == 1
    assert single["transitions"].shape[0] == single["decays"].shape[0] == 1
    assert single["residuals"].shape == (1,)
    with pytest.raises(ValueError, match="products=4"):
        workspaces(SegmentPlan(4, 2), 1, 1, 4)


TEMPORARIES = ("states", "transitions", "residuals", "decays")
FORWARD = ("q", "k", "v", "g", "beta", "A", "initial", "states", "output", "final", 0.5)


def launch_arguments(launchers, chunks, length):
    return (
        launchers,
        SegmentPlan(chunks, length),
        {name: name for name in TEMPORARIES},
        ("q", "k", "v", "g", "beta", "A"),
        "initial",
        "output",
        "final",
        0.5,
    )


def recording_launchers(log, *kernels):
    """Those of some kernels only."""

    def record(name):
        return lambda *arguments: log.append((name, *arguments))

    found = {name: record(name) for name in kernels}
    return SplitLaunchers(found.get("summary"), found.get("scan"), found["forward"])


def test_the_summary_runs_beside_the_first_segment():
    log = []
    arguments = launch_arguments(recording_launchers(log, "summary", "scan", "forward"), 5, 2)
    summary = ("summary", "k", "v", "A", "g", "beta", *TEMPORARIES, 2)
    first, rest = (("forward", *FORWARD, 2, *which) for which in ((0, 1, 1), (1, 2, 0)))
    scan = ("scan", *TEMPORARIES)
    split_forward(*arguments)
    assert log == [summary, first, scan, rest]
    names = [name for name, _ in split_launches(*arguments)]
    assert names == ["summary", "first", "scan", "rest"]


def test_two_segments_are_two_forward_launches():
    log = []
    arguments = launch_arguments(recording_launchers(log, "forward"), 5, 3)
    split_forward(*arguments)
    assert log == [("forward", *FORWARD, 3, 0, 1, 0), ("forward", *FORWARD, 3, 1, 1, 0)]
    assert [name for name, _ in split_launches(*arguments)] == ["first", "rest"]


@given(st.integers(65, 10**5), st.integers(2, 200))
def test_every_segment_is_launched_once(tokens, segments):
    plan, log = plan_segments(tokens, segments), []
    launchers = recording_launchers(log, "summary", "scan", "forward")
    split_forward(*launch_arguments(launchers, plan.chunks, plan.chunks_per_segment))
    ranges = [entry[-3:-1] for entry in log if entry[0] == "forward"]
    launched = [number for first, count in ranges for number in range(first, first + count)]
    assert launched == list(range(plan.segments))


def test_a_plan_states_its_memory():
    split = CorePlan(64, SegmentPlan(128, 10), products=1)
    assert (split.kind, split.segments, split.chunks_per_segment) == ("split", 13, 10)
    assert split.workspaces(2, 4) == workspaces(split.cut, 2, 4, 1)
    boundaries, steps = 12 * 8, 11 * 8
    assert split.workspace_bytes(2, 4) == (
        boundaries * SQUARE * 4 + steps * SQUARE * 2 + 2 + steps * 4
    )
    plain = CorePlan(128)
    assert (plain.kind, plain.segments, plain.chunks_per_segment) == ("unsplit", 1, None)
    assert plain.workspaces(2, 4) == {} and plain.workspace_bytes(2, 4) == 0


@pytest.mark.parametrize("fields", [{"cut": SegmentPlan(4, 2)}, {"products": 1}])
def test_half_a_split_is_refused(fields):
    with pytest.raises(ValueError, match="a split has both"):
        CorePlan(64, **fields)
