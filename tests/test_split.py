"""Plans, temporaries and the launch sequence of the split over time; no kernel runs here."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdn_prefill.split import (
    HEAD_DIM,
    SegmentPlan,
    SplitLaunchers,
    SplitTimes,
    plan_segments,
    split_forward,
    split_launches,
    workspaces,
)

TIMES = SplitTimes(5.0, 1.2, 4.0, 1.0, 5.0, {64: 1.2, 128: 1.9})
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
    assert plan.summary_ctas(4) == 4 * (12 + 11)
    assert plan.forward_ctas(4, 64) == 4 * 2 * 13


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


def recording_launchers(log):
    def record(name):
        return lambda *arguments: log.append((name, arguments))

    return SplitLaunchers(record("summary"), record("scan"), record("forward"))


@pytest.mark.parametrize(
    "chunks, length, names", [(5, 2, "summary scan forward"), (5, 3, "summary forward")]
)
def test_launch_sequence(chunks, length, names):
    log = []
    temporaries = {name: name for name in ("states", "transitions", "residuals", "decays")}
    arguments = (
        recording_launchers(log),
        SegmentPlan(chunks, length),
        temporaries,
        tuple(["q", "k", "v", "g", "beta", "A"]),
        "initial",
        "output",
        "final",
        0.5,
    )
    split_forward(*arguments)
    assert [name for name, _ in log] == names.split()
    assert [name for name, _ in split_launches(*arguments)] == names.split()
    sent = SimpleNamespace(**dict(log))
    given_temporaries = ("states", "transitions", "residuals", "decays")
    assert sent.summary == ("k", "v", "A", "g", "beta", "initial", *given_temporaries, length)
    assert sent.forward[:7] == ("q", "k", "v", "g", "beta", "A", "initial")
    assert sent.forward[7:] == ("states", "output", "final", 0.5, length)


@given(st.integers(2, 1000), st.integers(1, 64))
def test_best_split_is_the_least_prediction(chunks, states):
    time, plan, block_dv = TIMES.best(chunks, states, 132)
    assert time == pytest.approx(TIMES.predict(plan, states, block_dv, 132))
    for length in {1, (chunks + 1) // 2, -(-chunks // 8)} & set(range(1, chunks)):
        other = SegmentPlan(chunks, length)
        if other.segments <= 64:
            assert time <= TIMES.predict(other, states, 64, 132) + 1e-9


def test_no_split_of_one_chunk():
    assert TIMES.best(1, 4, 132) is None
