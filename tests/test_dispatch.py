"""The pure choices: plan by cost model, tile by waves of CTAs, backend by device."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cases import load_cases
from gdn_prefill.cost import (
    LAUNCHES,
    CoreCall,
    CostModel,
    LaunchCost,
    LaunchWork,
    launch_works,
    load_model,
    packaged_model,
)
from gdn_prefill.dispatch import (
    SEGMENTS,
    SPLIT_MARGIN,
    TILES,
    candidates,
    choose_backend,
    core_plan,
    select_block_dv,
)
from gdn_prefill.split import CorePlan, SegmentPlan

SMS = 132
KERNEL = Path(__file__).resolve().parents[1] / "kernel"


def launch(chunk, load=0.0, fixed=2.0, wave=2.0, traffic=0.0):
    return LaunchCost(fixed, wave, chunk, load, traffic)


# Not the packaged constants: a refit changes those.
MODEL = CostModel(
    {
        "unsplit64": launch(1.1, 0.2),
        "unsplit128": launch(1.7, 0.2),
        "opening64": launch(1.4, 0.1),
        "opening128": launch(1.9, 0.1),
        "scan": launch(1.8, wave=0.0),
        "segment64": launch(1.1, 0.2),
        "segment128": launch(1.7, 0.2),
    },
    {"device": "none"},
)


@st.composite
def calls(draw, most_tokens=2**20):
    """Any call: heads with any ratio, a batch, a length."""
    heads_q = draw(st.integers(1, 16))
    return CoreCall(
        draw(st.integers(1, 64)),
        draw(st.integers(1, most_tokens)),
        heads_q,
        heads_q * draw(st.sampled_from((1, 2, 3, 4, 8))),
    )


def plan_for(call, sm_count=SMS, **options):
    options = {"model": MODEL, **options}
    sizes = (call.sequences, call.tokens, call.heads_q, call.heads_v)
    return core_plan(*sizes, sm_count, **options)


@given(calls(), st.integers(1, 160))
def test_the_choice_is_the_least_prediction_but_for_the_margin(call, sms):
    plan = plan_for(call, sms)
    found = candidates(call, sms)
    assert plan in found
    times = {each: MODEL.predict(each, call, sms) for each in found}
    plain = min(time for each, time in times.items() if each.kind == "unsplit")
    least = min(times.values())
    if plan.kind == "split":
        assert times[plan] == least <= (1 - SPLIT_MARGIN) * plain
    else:
        assert times[plan] == plain and least >= (1 - SPLIT_MARGIN) * plain - 1e-9


@given(calls(), st.integers(1, 160))
def test_the_same_question_has_the_same_answer(call, sms):
    assert plan_for(call, sms) == plan_for(replace(call), sms)


@given(calls(), st.integers(1, 160))
def test_full_devices_are_not_split(call, sms):
    if call.states >= sms:
        assert plan_for(call, sms).kind == "unsplit"


@given(calls(), st.integers(1, 160))
def test_unsplit_predictions_grow_with_the_work_and_fall_with_the_device(call, sms):
    def time(call, sms):
        return MODEL.predict(plan_for(call, sms, split=False), call, sms)

    now = time(call, sms)
    assert time(replace(call, tokens=call.tokens + 64), sms) > now
    assert time(replace(call, sequences=call.sequences + 1), sms) >= now
    assert time(call, sms + 1) <= now


@given(calls(), st.integers(1, 160))
def test_cuts_cover_the_chunks(call, sms):
    for plan in candidates(call, sms):
        if plan.kind == "split":
            cut = plan.cut
            # Three, or as many as there are of a third of the chunks: of four chunks that is two.
            fewest = -(-call.chunks // -(-call.chunks // 3))
            assert fewest <= cut.segments <= SEGMENTS[-1] and cut.chunks == call.chunks
            assert cut.chunks - (cut.segments - 1) * cut.chunks_per_segment > 0
        else:
            assert plan.segments == 1 and plan.chunks_per_segment is None


@given(calls(), st.sampled_from(TILES), st.sampled_from([False, "auto", True, 2, 5]))
def test_options_are_heeded(call, tile, split):
    least = {False: 1, "auto": 1, True: 2}.get(split, split)
    if call.chunks < least:
        with pytest.raises(ValueError, match=f"split is {split}"):
            plan_for(call, block_dv=tile, split=split)
        return
    plan = plan_for(call, block_dv=tile, split=split)
    assert plan.block_dv == tile
    if split is False:
        assert plan == CorePlan(tile)
    elif split != "auto":
        assert plan.kind == "split" and plan.segments <= (SEGMENTS[-1] if split is True else split)


@pytest.mark.parametrize(
    ("sizes", "kind"),
    [
        ((1, 8192, 4, 4), "split"),  # 4 states for 132 SMs, 128 chunks each
        ((1, 32768, 2, 8), "split"),
        ((1, 1025, 2, 8), "unsplit"),  # too short for four launches
        ((1, 64, 4, 4), "unsplit"),
        ((1, 8192, 16, 64), "unsplit"),  # 64 states fill the device
    ],
)
def test_few_states_and_long_sequences_are_split(sizes, kind):
    assert core_plan(*sizes, SMS, model=MODEL).kind == kind


def test_the_wider_tile_is_taken_where_the_narrow_one_needs_another_wave():
    assert plan_for(CoreCall(1, 4096, 64, 64)).block_dv == 64
    assert plan_for(CoreCall(2, 4096, 64, 64)).block_dv == 128


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        ((0, 64, 1, 1), {}, "sequences=0"),
        ((1, 0, 1, 1), {}, "tokens=0"),
        ((1, 64, 2, 3), {}, "heads_v=3"),
        ((1, 64, 1, 1), {"sm_count": 0}, "sm_count=0"),
        ((1, 64, 1, 1), {"block_dv": 32}, "block_dv=32"),
        ((1, 64, 1, 1), {"split": True}, "split is True, but tokens=64 is 1 chunk"),
        ((1, 640, 1, 1), {"split": 11}, "split is 11, but tokens=640 is 10 chunk"),
        ((1, 640, 1, 1), {"split": 1}, "split is 1; it must be at least 2"),
        ((1, 640, 1, 1), {"split": "yes"}, "split is 'yes'"),
        ((65536, 640, 1, 1), {"split": 2}, "sequences=65536"),
    ],
)
def test_impossible_questions_are_refused(sizes, options, message):
    options = {"sm_count": SMS, **options}
    with pytest.raises(ValueError, match=message):
        core_plan(*sizes, options.pop("sm_count"), **options)


@pytest.mark.parametrize("split", [2.0, None])
def test_a_split_of_another_type_is_refused(split):
    with pytest.raises(TypeError, match=f"split is {split}"):
        core_plan(1, 640, 1, 1, SMS, split=split)


def test_nothing_is_asked_of_a_device():
    """Neither torch nor TileLang is loaded for a choice, so no device can have been looked at."""
    code = (
        "import sys; sys.modules.update(torch=None, tilelang=None)\n"
        "from gdn_prefill.dispatch import core_plan\n"
        "print(core_plan(1, 8192, 4, 4, 132).workspace_bytes(1, 4) > 0)"
    )
    command = [sys.executable, "-c", code]
    environment = {"PYTHONPATH": str(KERNEL)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_a_launch_costs_what_its_constants_say():
    work = LaunchWork(ctas=200, chunks=10, megabytes=3.0, sm_count=100)
    assert work.features == (1, 2, 20, 20, 3)
    assert LaunchCost(1.0, 2.0, 3.0, 4.0, 5.0).time(work) == 1 + 4 + 60 + 80 + 15


def test_the_work_of_a_plan():
    call = CoreCall(2, 10 * 64, 2, 4)
    (name, work), *more = launch_works(CorePlan(128), call, SMS).items()
    assert (name, work.ctas, work.chunks, more) == ("unsplit128", 8, 10, [])
    # q and k once for two V heads, v and the output, A, two gates
    chunk = 2 * 64 * 256 / 2 + 2 * 64 * 256 + 64 * 128 + 2 * 64 * 4
    assert work.megabytes == pytest.approx(8 * 10 * chunk / 1e6)
    split = launch_works(CorePlan(64, SegmentPlan(10, 3), 1), call, SMS)
    assert list(split) == ["opening64", "scan", "segment64"]
    # two tiles of the first segment and N and D of two others, four parts of every state, then two
    # tiles of three segments
    assert [(one.ctas, one.chunks) for one in split.values()] == [(8 * 6, 3), (32, 2), (48, 3)]
    # the summary reads k, v, A and the gates
    summarised = 8 * 2 * 3 * (chunk - 64 * 256 / 2 - 64 * 256)
    assert split["opening64"].megabytes == pytest.approx((8 * 3 * chunk + summarised) / 1e6)
    assert split["segment64"].megabytes == pytest.approx(8 * 7 * chunk / 1e6)
    wide = launch_works(CorePlan(128, SegmentPlan(10, 3), 1), call, SMS)
    assert list(wide) == ["opening128", "scan", "segment128"]
    assert [one.ctas for one in wide.values()] == [8 * 5, 32, 24]
    two = launch_works(CorePlan(64, SegmentPlan(10, 5), 1), call, SMS)
    assert list(two) == ["opening64", "segment64"]
    assert [(one.ctas, one.chunks) for one in two.values()] == [(16, 5), (16, 5)]
    assert sum(one.megabytes for one in two.values()) == pytest.approx(work.megabytes)


def test_the_packaged_model_says_where_it_comes_from():
    model = packaged_model()
    assert set(model.launches) == set(LAUNCHES)
    assert model.provenance["device"]


def test_the_model_is_part_of_what_is_installed():
    """setuptools takes a file that is no module into the package only where it is listed."""
    listed = (KERNEL.parent / "MANIFEST.in").read_text().splitlines()
    assert "include kernel/gdn_prefill/cost_model.json" in listed


def test_a_model_survives_being_written(tmp_path):
    path = tmp_path / "model.json"
    path.write_text(MODEL.to_json())
    assert load_model(path) == MODEL


@pytest.mark.parametrize(
    "change", ['{"launches": {}}', "[]", "no json", MODEL.to_json().replace("1.1", "-1.1")]
)
def test_a_broken_model_is_named(tmp_path, change):
    path = tmp_path / "model.json"
    path.write_text(change)
    with pytest.raises(ValueError, match="model.json is no cost model"):
        load_model(path)


@pytest.mark.parametrize("case", load_cases(), ids=lambda case: case.name)
def test_public_cases_have_plans_under_the_packaged_model(case):
    plan = core_plan(case.B, case.T, case.Hq, case.Hv, SMS)
    invariant = core_plan(case.B, case.T, case.Hq, case.Hv, SMS, split=False, block_dv=64)
    assert plan.workspace_bytes(case.B, case.Hv) < 64e6
    assert invariant == CorePlan(64) and invariant.workspace_bytes(case.B, case.Hv) == 0


@pytest.mark.parametrize(
    ("heads_v", "heads_q", "tile"), [(4, 4, 64), (16, 16, 64), (16, 4, 128), (8, 2, 128)]
)
def test_the_labs_rule_looks_at_the_heads_alone(heads_v, heads_q, tile):
    assert select_block_dv(heads_v, heads_q) == tile


@pytest.mark.parametrize(
    ("requested", "device", "capability", "chosen"),
    [
        ("auto", "cuda", (9, 0), "cuda"),
        ("auto", "cuda", (8, 0), "torch"),
        ("auto", "cuda", (10, 0), "torch"),
        ("auto", "cpu", None, "torch"),
        ("torch", "cuda", (9, 0), "torch"),
        ("cuda", "cuda", (9, 0), "cuda"),
    ],
)
def test_backend(requested, device, capability, chosen):
    assert choose_backend(requested, device, capability) == chosen


@pytest.mark.parametrize(("device", "capability"), [("cpu", None), ("cuda", (8, 0))])
def test_cuda_is_refused_where_the_kernels_cannot_run(device, capability):
    with pytest.raises(ValueError, match="backend='cuda' needs"):
        choose_backend("cuda", device, capability)


def test_an_unknown_backend_is_named():
    with pytest.raises(ValueError, match="'hip'"):
        choose_backend("hip", "cuda", (9, 0))


@pytest.mark.parametrize(("heads_v", "heads_q"), [(0, 0), (7, 2), (4, 0)])
def test_the_labs_rule_refuses_heads_that_do_not_divide(heads_v, heads_q):
    with pytest.raises(ValueError, match="positive multiple"):
        select_block_dv(heads_v, heads_q)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"split": 40000}, "split=40000: a split takes at most 32767"),
        ({"block_dv": 64.0}, "block_dv=64.0"),
        ({"split": 4, "products": 0}, "products=0"),
    ],
)
def test_what_no_launch_could_take_is_refused(options, match):
    with pytest.raises(ValueError, match=match):
        core_plan(1, 64 * 70000, 1, 2, SMS, **options)
