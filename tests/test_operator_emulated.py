"""The operator's two launches in the emulator, through the calls that a user makes, on the CPU."""

import contextlib
import random
from dataclasses import replace

import pytest
import torch
from test_operator import tokens
from test_operator_sweep import (
    BF16,
    FP16,
    FP32,
    GPU_VARIANTS,
    INT32,
    INT64,
    Data,
    Variant,
    check,
)

pytest.importorskip("tilelang")

from gdn_prefill import (
    chunk_gated_delta_rule,
    operator,
    operator_cuda,
    operator_forward,
    preprocess,
    runtime,
)
from gdn_prefill.kernels.resident_operator import OperatorConfig
from gdn_prefill.kernels.split import ScanConfig
from gdn_prefill.kernels.split_operator import OperatorSummaryConfig
from gdn_prefill.runtime import Runtime
from gdn_prefill.split import CorePlan, SegmentPlan
from tile_emulator import Program, adversarial, emulate

PLAIN = Variant(
    heads=(1, 2),
    dtype=BF16,
    packed=None,
    gate="log",
    gate_dtype=FP32,
    beta="plain",
    beta_dtype=FP32,
    l2norm=False,
    initial=None,
    slots=None,
    final="fresh",
    final_dtype=FP32,
    v_first=False,
    kept=None,
    kept_dtype=FP32,
    batch_invariant=False,
)
DATA = Data(
    lengths=(200,),
    surplus=0,
    strength=1.0,
    garbage=1.0,
    every=64,
    scale=None,
    padded_rows=False,
    output_given=False,
    seed=1,
)


@pytest.fixture
def emulated(monkeypatch):
    """run_cuda runs on the CPU, its kernels in the emulator; any finding raises.

    Set `schedules` of what is returned to run the forward kernel under these, one after the other.
    `order_steps` says what its launches were given as order_step.
    """
    layer = Runtime()
    layer.schedules = lambda program: ("roundrobin",)
    layer.order_steps = []

    def compiled(prim_func, pass_configs):
        program = Program(prim_func)

        def launch(*arguments):
            forward = "operator_forward" in str(prim_func.attrs["global_symbol"])
            if forward:
                names = [parameter.name for parameter in prim_func.params]
                layer.order_steps.append(arguments[names.index("order_step")])
            for schedule in layer.schedules(program) if forward else ("roundrobin",):
                report = emulate(program, *arguments, pass_configs=pass_configs, schedule=schedule)
                assert report.ok, str(report)

        return launch

    monkeypatch.setattr(runtime, "compile_launcher", compiled)
    for module in (operator_forward, preprocess):
        monkeypatch.setattr(module, "RUNTIME", layer)
    for module in (operator_forward, preprocess):
        monkeypatch.setattr(module, "sm_count", lambda _: 132)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(operator, "implementation", lambda *_: operator_cuda.run_cuda)
    return layer


def planned(monkeypatch, plan):
    """All calls that are free to choose run by this plan."""
    monkeypatch.setattr(operator_forward, "sequence_plan", lambda *_: plan)


# Of lengths: no tokens, one, a tail that is almost a chunk, whole chunks. NaN are the neighbours.
CASES = {
    "dense": (PLAIN, DATA),
    "decays beyond a chunk's factors": (PLAIN, replace(DATA, strength=40.0)),
    "packed": (
        replace(PLAIN, packed=INT32),
        replace(DATA, lengths=(127, 0, 1, 130), garbage=float("nan"), surplus=70),
    ),
    "norms": (replace(PLAIN, l2norm=True), replace(DATA, strength=0.06)),
    "norms under strong decay": (replace(PLAIN, l2norm=True), replace(DATA, strength=40.0)),
    "fp16": (
        replace(PLAIN, dtype=FP16, packed=INT64),
        replace(DATA, strength=0.06, lengths=(64, 65, 200)),
    ),
    "fp16 under strong decay": (
        replace(PLAIN, dtype=FP16, l2norm=True),
        replace(DATA, strength=40.0),
    ),
    "pool in place": (
        replace(
            PLAIN,
            packed=INT64,
            initial=FP32,
            slots=INT64,
            final="in place",
            v_first=True,
            l2norm=True,
        ),
        replace(DATA, lengths=(65, 0, 3, 64), seed=3, padded_rows=True, garbage=float("nan")),
    ),
    "pool to pool": (
        replace(PLAIN, packed=INT32, initial=BF16, slots=INT32, final="buffer", final_dtype=FP16),
        replace(DATA, lengths=(65, 0, 128), seed=2, padded_rows=True, output_given=True),
    ),
    "every chunk's state": (
        replace(PLAIN, kept="h", packed=INT32, final_dtype=BF16, kept_dtype=BF16, initial=FP16),
        replace(DATA, lengths=(64, 130, 0, 5)),
    ),
    "checkpoints": (
        replace(PLAIN, kept="checkpoints", packed=INT64, v_first=True, kept_dtype=BF16),
        replace(DATA, lengths=(128, 65, 0, 5, 256), every=128),
    ),
    "dense checkpoints": (
        replace(PLAIN, kept="checkpoints", batch_invariant=True),
        replace(DATA, lengths=(192, 192), every=64),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_option(emulated, name):
    check(*CASES[name], "cpu", "auto")


@pytest.mark.parametrize("number", range(len(GPU_VARIANTS)))
def test_variants_of_the_gpu(emulated, number):
    draw = random.Random(number)
    lengths = (0, 1, 31, 63, 64, 65, 100, 128, 129)
    data = Data(
        lengths=tuple(draw.choice(lengths) for _ in range(draw.randint(1, 3))),
        surplus=draw.choice((0, 1, 70)),
        strength=draw.choice((0.0, 0.06, 1.0, 40.0)),
        garbage=draw.choice((1.0, 1e4, float("nan"))),
        every=draw.choice((64, 128)),
        scale=draw.choice((None, 0.3)),
        padded_rows=draw.random() < 0.5,
        output_given=draw.random() < 0.5,
        seed=number,
    )
    check(replace(GPU_VARIANTS[number], heads=(1, 2)), data, "cpu", "auto")


BOTH_TILES = {
    "packed with norms": (
        replace(PLAIN, packed=INT32, initial=FP32, l2norm=True),
        replace(DATA, lengths=(70, 0, 129), garbage=float("nan")),
    ),
    "dense with tails": (PLAIN, replace(DATA, lengths=(70, 70))),
    "decays beyond a chunk's factors": (PLAIN, replace(DATA, lengths=(130,), strength=40.0)),
    "fp16": (
        replace(PLAIN, dtype=FP16, packed=INT64),
        replace(DATA, lengths=(65, 64, 1), strength=0.06),
    ),
}


@pytest.mark.parametrize("name", BOTH_TILES)
@pytest.mark.parametrize("tile", [64, 128])
def test_both_tiles(emulated, monkeypatch, tile, name):
    planned(monkeypatch, CorePlan(tile))
    variant, data = BOTH_TILES[name]
    check(variant, data, "cpu", "auto")
    assert [config.block_dv for config in forward_configs(emulated)] == [tile]


@pytest.mark.parametrize(
    ("packed", "sms", "step"), [(INT64, 16, 0), (INT64, 15, 1), (INT32, 1, 1), (None, 1, 0)]
)
def test_packed_sequences_are_ordered_where_not_all_ctas_run_at_once(
    emulated, monkeypatch, packed, sms, step
):
    """Four sequences of two heads in two slices are 16 CTAs; the longest sequence is the third."""
    planned(monkeypatch, CorePlan(64))
    monkeypatch.setattr(operator_forward, "sm_count", lambda _: sms)
    variant = replace(PLAIN, packed=packed, initial=FP32, l2norm=True)
    lengths = (65, 0, 130, 1) if packed else (65, 65, 65, 65)
    check(variant, replace(DATA, lengths=lengths, garbage=float("nan")), "cpu", "auto")
    assert emulated.order_steps and set(emulated.order_steps) == {step}


def forward_configs(layer):
    return [config for _, config in layer.kernels._entries if isinstance(config, OperatorConfig)]


SPLITS = {
    "norms": replace(PLAIN, l2norm=True),
    "from a pool": replace(PLAIN, initial=BF16, slots=INT64, final="buffer", v_first=True),
    "fp16": replace(PLAIN, dtype=FP16, l2norm=True, initial=FP32, final="none"),
    "in place": replace(PLAIN, initial=FP32, slots=INT32, final="in place"),
}


@pytest.mark.parametrize(("tile", "length"), [(64, 2), (64, 1), (128, 1)])
@pytest.mark.parametrize("name", SPLITS)
def test_split_over_time(emulated, monkeypatch, name, tile, length):
    planned(monkeypatch, CorePlan(tile, SegmentPlan(4, length), 1))
    data = replace(DATA, lengths=(220, 220), strength=0.06, padded_rows=True)
    check(replace(SPLITS[name], heads=(1, 1)), data, "cpu", "auto")
    assert [config.segmented for config in forward_configs(emulated)] == [True]
    configs = [type(config) for _, config in emulated.kernels._entries]
    between = [kind for kind in configs if kind in (OperatorSummaryConfig, ScanConfig)]
    assert between == ([] if length == 2 else [OperatorSummaryConfig, ScanConfig])


@pytest.mark.parametrize(
    "changes",
    [
        {"packed": INT32},
        {"batch_invariant": True},
        {"kept": "h"},
    ],
)
def test_what_is_never_split(emulated, changes):
    variant = replace(PLAIN, heads=(1, 1), **changes)
    check(variant, replace(DATA, lengths=(5000,), strength=0.06), "cpu", "auto")
    assert [config.segmented for config in forward_configs(emulated)] == [False]


@pytest.mark.parametrize("lengths", [(5000,), (3000, 3000)])
def test_long_sequences_are_split(emulated, lengths):
    check(
        replace(PLAIN, heads=(1, 1)), replace(DATA, lengths=lengths, strength=0.06), "cpu", "auto"
    )
    assert [config.segmented for config in forward_configs(emulated)] == [True]


@pytest.mark.parametrize(("tile", "kept"), [(64, None), (64, "h"), (128, None)])
def test_every_schedule(emulated, monkeypatch, tile, kept):
    emulated.schedules = lambda program: (
        *(f"random:{seed}" for seed in range(4)),
        "priority:0",
        *adversarial(program.roles),
    )
    planned(monkeypatch, CorePlan(tile))
    variant = replace(PLAIN, heads=(1, 1), packed=INT32, initial=FP32, l2norm=True, kept=kept)
    data = replace(DATA, lengths=(65, 0, 330), garbage=float("nan"), surplus=1)
    check(variant, data, "cpu", "auto")


@pytest.mark.parametrize("strength", [0.06, 40.0])
def test_a_cut_at_a_chunk_changes_nothing(emulated, strength):
    x = tokens(200, heads=(1, 1), strength=strength)
    named = {"output_final_state": True, "batch_invariant": True}
    whole, whole_state = chunk_gated_delta_rule(*x, **named)
    first, state = chunk_gated_delta_rule(*(t[:, :128] for t in x), **named)
    second, state = chunk_gated_delta_rule(*(t[:, 128:] for t in x), initial_state=state, **named)
    assert torch.equal(torch.cat((first, second), dim=1), whole)
    assert torch.equal(state, whole_state)


def test_lazy_decay_does_depend_on_the_cut(emulated):
    """What the test above would show if batch_invariant did nothing."""
    x = tokens(200, heads=(1, 1), strength=0.06)
    whole, _ = chunk_gated_delta_rule(*x)
    _, state = chunk_gated_delta_rule(*(t[:, :128] for t in x), output_final_state=True)
    second, _ = chunk_gated_delta_rule(*(t[:, 128:] for t in x), initial_state=state)
    assert not torch.equal(second, whole[:, 128:])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "float32"}, "dtype='float32'"),
        ({"initial_state": "float64"}, "initial_state='float64'"),
        ({"packed": True, "segmented": True}, "segmented=True"),
        ({"kept_states": "float32", "block_dv": 128}, "block_dv=128"),
    ],
)
def test_configuration_names_what_is_wrong(settings, message):
    with pytest.raises(ValueError, match=message):
        OperatorConfig(1, 2, **settings)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("packed", [INT32, None])
def test_what_is_never_forgotten_stays_within_the_tolerance(emulated, monkeypatch, packed, seed):
    """A thousand tokens without any decay and with beta up to 2: neither the tile of 128 columns
    nor a split would do.
    """
    planned(monkeypatch, CorePlan(128))
    variant = replace(PLAIN, beta="twice", initial=BF16, packed=packed)
    check(variant, replace(DATA, lengths=(1000,), strength=0.0, seed=seed), "cpu", "auto")
    assert [config.block_dv for config in forward_configs(emulated)] == [64]


@pytest.mark.parametrize("option", ["batch_invariant", "keeps_states", "allow_neg_eigval", None])
@pytest.mark.parametrize("packed", [True, False])
def test_some_calls_have_no_choice(monkeypatch, option, packed):
    monkeypatch.setattr(operator_forward, "sm_count", lambda _: 132)
    names = ("batch_invariant", "keeps_states", "allow_neg_eigval")
    options = {name: name == option for name in names}
    call = (1, 65536, 2, 8, torch.device("cpu"))
    plan = operator_forward.call_plan(*call, packed=packed, **options)
    if option is None:
        assert (plan.cut is None) == packed
    else:
        assert plan == CorePlan(64)
