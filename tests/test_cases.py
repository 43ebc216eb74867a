"""Cases are data: what is on disk, what is drawn from a seed, and what is refused."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from cases import (
    CHUNK,
    HEAD_DIM,
    SEED,
    Baseline,
    Case,
    hidden_cases,
    load_baselines,
    load_cases,
    load_provenance,
    make_inputs,
)

COURSE = "nvidia-h800-mig-1g-10gb"
HEADER = "name,B,T,Hq,Hv,initial_state,gate"
SMALL = Case("small", B=2, T=70, Hq=2, Hv=4, initial_state=True, gate="random_decay")


def test_public_cases_are_the_labs():
    shapes = {c.name: (c.B, c.T, c.Hq, c.Hv, c.initial_state, c.gate) for c in load_cases()}
    assert shapes == {
        "short_tail_state": (1, 1025, 2, 8, True, "random_decay"),
        "chain_equal": (1, 8192, 4, 4, False, "random_decay"),
        "parallel_equal": (1, 2048, 16, 16, False, "random_decay"),
        "parallel_gva": (1, 2048, 4, 16, False, "mixed"),
        "long_low_gva": (1, 32768, 2, 8, False, "random_decay"),
        "batch_split_gva": (4, 8192, 2, 8, False, "random_decay"),
        "wide_gva_state": (1, 8192, 16, 64, True, "random_decay"),
        "deep_gva_state": (1, 16384, 8, 32, True, "random_decay"),
    }
    assert {(c.rtol, c.atol, c.twin_of) for c in load_cases()} == {(5e-3, 5e-3, None)}


@pytest.mark.parametrize(
    ("T", "chunks", "tail"), [(1, 1, 1), (63, 1, 63), (64, 1, 64), (65, 2, 1), (1025, 17, 1)]
)
def test_chunks_and_tail(T, chunks, tail):
    case = dataclasses.replace(SMALL, T=T)
    assert (case.chunks, case.tail) == (chunks, tail)


def test_derived_head_counts():
    assert (SMALL.group, SMALL.state_heads, SMALL.baseline_name) == (2, 8, "small")


@given(st.integers(min_value=0, max_value=2**63))
def test_hidden_cases_are_twins(seed):
    public = {case.name: case for case in load_cases()}
    drawn = hidden_cases(seed)
    assert [case.twin_of for case in drawn] == [
        "short_tail_state",
        "chain_equal",
        "parallel_gva",
        "long_low_gva",
    ]
    assert drawn == hidden_cases(seed)
    for case in drawn:
        twin = public[case.twin_of]
        assert case.name == f"hidden_{twin.name}"
        assert case.baseline_name == twin.name
        assert (case.B, case.Hq, case.Hv, case.chunks) == (twin.B, twin.Hq, twin.Hv, twin.chunks)
        assert case.tail != twin.tail and 1 <= case.tail <= CHUNK
        assert case.initial_state != twin.initial_state
        assert case.gate != twin.gate


def test_hidden_seeds_differ_and_reach_every_tail():
    tails = {hidden_cases(seed)[1].tail for seed in range(2000)}
    assert tails == set(range(1, CHUNK))


def test_hidden_seed_must_be_an_integer():
    with pytest.raises(TypeError, match="seed is '7'"):
        hidden_cases("7")


def test_inputs_follow_the_labs_draw_order():
    inputs = make_inputs(SMALL)
    generator = torch.Generator().manual_seed(42)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    q, k, v = normal(2, 70, 2, 128), normal(2, 70, 2, 128), normal(2, 70, 4, 128)
    g, beta, state = normal(2, 70, 4), normal(2, 70, 4), normal(2, 4, 128, 128)
    assert torch.equal(inputs.q, F.normalize(q, dim=-1).bfloat16())
    assert torch.equal(inputs.k, F.normalize(k, dim=-1).bfloat16())
    assert torch.equal(inputs.v, v.bfloat16())
    assert torch.equal(inputs.g, F.logsigmoid(g) / 16)
    assert torch.equal(inputs.beta, beta.sigmoid())
    assert torch.equal(inputs.initial_state, state)


def test_mixed_gate_clears_every_second_token_only():
    plain = make_inputs(SMALL)
    mixed = make_inputs(dataclasses.replace(SMALL, gate="mixed"))
    assert torch.count_nonzero(mixed.g[:, ::2]) == 0
    assert torch.equal(mixed.g[:, 1::2], plain.g[:, 1::2])
    assert torch.equal(mixed.beta, plain.beta)


def test_inputs_shapes_and_types():
    inputs = make_inputs(dataclasses.replace(SMALL, initial_state=False))
    assert inputs.initial_state is None
    assert inputs.q.shape == inputs.k.shape == (2, 70, 2, HEAD_DIM)
    assert inputs.v.shape == (2, 70, 4, HEAD_DIM)
    assert inputs.g.shape == inputs.beta.shape == (2, 70, 4)
    assert {inputs.q.dtype, inputs.k.dtype, inputs.v.dtype} == {torch.bfloat16}
    assert {inputs.g.dtype, inputs.beta.dtype} == {torch.float32}
    assert inputs.g.max() <= 0


def test_seed_selects_the_values():
    assert torch.equal(make_inputs(SMALL).q, make_inputs(SMALL, seed=SEED).q)
    assert not torch.equal(make_inputs(SMALL).q, make_inputs(SMALL, seed=SEED + 1).q)


def write(path, *lines):
    path.write_text("\n".join(lines) + "\n")
    return path


def test_case_file_round_trip(tmp_path):
    path = write(tmp_path / "cases.csv", HEADER, "mine,3,65,2,6,yes,mixed")
    expected = Case("mine", B=3, T=65, Hq=2, Hv=6, initial_state=True, gate="mixed")
    assert load_cases(path) == [expected]
    path = write(tmp_path / "cases.csv", HEADER + ",rtol,atol", "mine,3,65,2,6,no,mixed,1e-2,")
    assert load_cases(path)[0].rtol == 1e-2
    assert load_cases(path)[0].atol == 5e-3


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((HEADER,), "no case in it"),
        (("name,B,T",), r"columns missing \['Hq', 'Hv', 'initial_state', 'gate'\]"),
        ((HEADER + ",speed", "a,1,1,1,1,no,mixed,3"), r"unknown \['speed'\]"),
        ((HEADER, "a,1,x,1,1,no,mixed"), "line 2: T is 'x', must be a number"),
        ((HEADER, "a,1,0,1,1,no,mixed"), "T is 0, must be an integer >= 1"),
        ((HEADER, "a,1,1,2,3,no,mixed"), "Hv=3 is not a multiple of Hq=2"),
        ((HEADER, "a,1,1,1,1,maybe,mixed"), "initial_state is 'maybe', must be yes or no"),
        ((HEADER, "a,1,1,1,1,no,fast"), "gate is 'fast', must be one of"),
        ((HEADER, "a,1,1,1,1,no"), "gate is '', must be one of"),
        ((HEADER, "a,1,1,1,1,no,mixed,9"), "more fields than the header"),
        ((HEADER + ",rtol", "a,1,1,1,1,no,mixed,nan"), "rtol is nan, must be finite"),
        (
            (HEADER, "a,1,1,1,1,no,mixed", "a,1,2,1,1,no,mixed"),
            "line 3: the name 'a' is used twice",
        ),
    ],
)
def test_bad_case_files_are_refused_by_line(tmp_path, lines, message):
    with pytest.raises(ValueError, match=message):
        load_cases(write(tmp_path / "cases.csv", *lines))


def test_missing_case_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere.csv does not exist"):
        load_cases(tmp_path / "nowhere.csv")
    with pytest.raises(ValueError, match="is a directory, must be a CSV file"):
        load_cases(tmp_path)


def test_encodings_of_case_files(tmp_path):
    path, text = tmp_path / "cases.csv", f"{HEADER}\nmine,3,65,2,6,yes,mixed\n"
    path.write_text(text, encoding="utf-8-sig")
    assert load_cases(path)[0].name == "mine"
    for encoding in ("utf-16", "latin-1"):
        path.write_bytes(text.replace("mine", "m\xe9").encode(encoding))
        with pytest.raises(ValueError, match=r"cases\.csv: not UTF-8 text, byte 0x[ef]"):
            load_cases(path)


def test_a_nul_is_no_part_of_a_name(tmp_path):
    with pytest.raises(ValueError, match=r"cases\.csv.*(control characters|NUL)"):
        load_cases(write(tmp_path / "cases.csv", HEADER, "mi\0ne,3,65,2,6,yes,mixed"))


def test_course_baselines_cover_every_public_case():
    baselines = load_baselines(COURSE)
    assert set(baselines) == {case.name for case in load_cases()}
    assert baselines["chain_equal"].t60_ms == 3.999968
    assert baselines["chain_equal"].t100_ms == 0.497792
    assert "course" in load_provenance(COURSE)["source"]
    assert load_provenance(COURSE)["device"] == COURSE


def test_unknown_device_lists_the_known_ones():
    with pytest.raises(KeyError, match=f"'abacus'.*{COURSE}"):
        load_baselines("abacus")
    with pytest.raises(KeyError, match="'../baseline'"):
        load_provenance("../baseline")


@pytest.mark.parametrize(("t60", "t100"), [(1.0, 1.0), (1.0, 2.0), (1.0, 0.0), (float("nan"), 1.0)])
def test_baseline_must_order_its_times(t60, t100):
    with pytest.raises(ValueError, match="baseline of a: t"):
        Baseline("a", t60, t100, "slow", "fast")


def test_baseline_file_errors_name_the_line(tmp_path):
    header = "case,t60_ms,t100_ms,t60_implementation,t100_implementation"
    write(tmp_path / "toy.csv", header, "a,2,1,slow,fast", "b,1,2,slow,fast")
    with pytest.raises(ValueError, match="line 3: baseline of b: t60_ms=1.0 must be longer"):
        load_baselines("toy", tmp_path)
    write(tmp_path / "toy.csv", header, "a,2,1,slow,fast", "a,2,1,slow,fast")
    with pytest.raises(ValueError, match="line 3: the case 'a' is given twice"):
        load_baselines("toy", tmp_path)
    write(tmp_path / "toy.csv", header, "a,2")
    with pytest.raises(ValueError, match="line 2"):
        load_baselines("toy", tmp_path)
    write(tmp_path / "toy.csv", "case,t60_ms", "a,2")
    with pytest.raises(ValueError, match="columns"):
        load_baselines("toy", tmp_path)
