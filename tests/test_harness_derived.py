"""Numbers in documents: what a marker means, what is rewritten, and what is derived from what."""

import json
import lzma

import pytest

from cases import load_cases
from gdn_ladder import VERSIONS
from gdn_prefill.cost import PACKAGED
from gdn_prefill.dispatch import core_plan
from harness import derived
from harness.check import Status
from harness.derivations import Derivations, NotRecordedError
from harness.derived import UnderivableError, main, mismatches, refresh, unmarked
from harness.evaluate import Outcome
from harness.metrics import Metric, write_metrics
from harness.results import Stamp, to_row, write_results

TEXT = 'It takes <!--= ms("v7") -->1.34 ms, <!--= word() -->PASS.\n'
ROWS = "<!-- table: times -->\n| old |\n<!-- end table -->\n"


class Stub:
    """Two functions and a table."""

    def __init__(self, recorded=True):
        self._recorded = recorded

    def functions(self):
        return {"ms": self._ms, "word": lambda: "PASS"}

    def _ms(self, version):
        if version == "v7" and not self._recorded:
            raise NotRecordedError("v7")
        return {"v7": 1.3449, "zero": -0.001}[version]

    def table(self, name):
        return {"times": "| new |"}[name]


@pytest.mark.parametrize(
    "shown, fresh", [("1.34", "1.34"), ("1.3", "1.3"), ("9", "1"), ("+1.0", "+1.3")]
)
def test_numbers_keep_their_digits(shown, fresh):
    assert refresh(TEXT.replace("1.34", shown), Stub()) == TEXT.replace("1.34", fresh)


def test_what_differs_is_told_by_line():
    assert mismatches(TEXT, Stub()) == []
    assert mismatches("first\n" + TEXT.replace("1.34", "1.35"), Stub()) == [
        'line 2: ms("v7") is 1.34, not 1.35'
    ]
    assert mismatches(TEXT.replace("PASS", "WRONG"), Stub()) == [
        "line 1: word() is PASS, not WRONG"
    ]


@pytest.mark.parametrize("shown, pending", [("1.34", "n.nn"), ("9", "n"), ("+1.0", "+n.n")])
def test_what_is_not_recorded_keeps_its_place_and_digits(shown, pending, capsys):
    text = TEXT.replace("1.34", shown)
    absent = refresh(text, Stub(recorded=False))
    assert absent == TEXT.replace("1.34", pending)
    assert mismatches(absent, Stub(recorded=False)) == []
    assert mismatches(absent, Stub()) != []
    assert refresh(absent, Stub()) == refresh(text, Stub())


def test_the_command_counts_what_is_not_recorded(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(derived, "Derivations", lambda: Stub(recorded=False))
    path = tmp_path / "page.md"
    path.write_text(TEXT.replace("1.34", "n.nn"))
    assert main([str(path)]) == 0
    assert "1 numbers are not recorded yet" in capsys.readouterr().err


def test_a_zero_has_no_sign():
    assert refresh('<!--= ms("zero") -->-0.1', Stub()) == '<!--= ms("zero") -->0.0'


def test_tables_are_replaced_whole():
    assert refresh(ROWS, Stub()) == ROWS.replace("old", "new")
    assert mismatches(ROWS, Stub()) == ["line 2: it is '| new |', not '| old |'"]
    longer = ROWS.replace("| old |", "| old |\n| older |")
    assert mismatches(longer, Stub()) == ["a table has another number of rows"]


@pytest.mark.parametrize(
    "text, message",
    [
        ('<!--= ms("v8") -->1', r'ms\("v8"\): KeyError'),
        ("<!--= open('x') -->1", "NameError"),
        ('<!--= ms("v7") -->', "cannot show 1.3449"),
        ('<!--= ms("v7") -->fast', "'fast' cannot show"),
        ('<!--= ms("v7") > 1 -->1', "cannot show True"),
        ("<!-- table: nope -->\nx\n<!-- end table -->", "table nope"),
    ],
)
def test_what_cannot_be_derived_is_named(text, message):
    with pytest.raises(UnderivableError, match=message):
        refresh(text, Stub())


def test_quantities_without_a_marker_are_found():
    text = TEXT + ROWS + "`2.5 ms`\n```\n3.5 ms\n```\nv9.5 with 64 tokens on 132 SMs, torch v2.11\n"
    assert unmarked(text) == []
    for quantity in ("4.5 ms", "41 % more", "0.66 of it", "2 times", "-3.1", "12 us"):
        (found,) = unmarked(text + quantity)
        assert quantity.split()[0].lstrip("-") in found


def test_the_command_rewrites_on_request(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(derived, "Derivations", Stub)
    path = tmp_path / "page.md"
    path.write_text(TEXT.replace("1.34", "9.99"))
    assert main([str(path)]) == 1
    assert capsys.readouterr().out == 'line 1: ms("v7") is 1.34, not 9.99\n'
    assert main([str(path), "--write"]) == 0
    assert path.read_text() == TEXT
    assert main([str(path)]) == 0
    path.write_text("<!--= nothing() -->1")
    assert main([str(path)]) == 1


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("nowhere.md", None, "cannot be read: No such file"),
        (".", None, "cannot be read: Is a directory"),
        ("page.md", b"Nothing but text.", "holds nothing derived, must have a marker"),
        ("page.png", b"\x89PNG", "is not UTF-8 text"),
    ],
)
def test_what_is_no_document_is_refused(name, content, message, tmp_path, capsys):
    path = tmp_path / name
    if content:
        path.write_bytes(content)
    with pytest.raises(SystemExit) as exit_:
        main([str(path), "--write"])
    said = capsys.readouterr().err
    assert exit_.value.code == 2 and f"argument document: {path} {message}" in said


STAMP = Stamp("gpu", "2026-01-02T00:00:00+00:00", "abc")


def packaged_model() -> dict:
    return json.loads(PACKAGED.read_text())


CASES = [case.name for case in load_cases()]


def rows(times):
    """Outcomes of {(implementation, version, scope, protocol): ms}, the same for every case."""
    return [
        Outcome(case, name, version, scope, protocol, Status.PASS if ms else Status.WRONG, "", ms)
        for (name, version, scope, protocol), ms in times.items()
        for case in CASES
    ]


def record(root, name, times):
    outcomes = rows(times)
    metadata = {"date": STAMP.date, "software": {"torch": "2.11.0"}}
    write_results(name, [to_row(o, STAMP) for o in outcomes], metadata, root=root)


@pytest.fixture
def recorded(tmp_path):
    ladder = {
        ("gdn_ladder", "v7", "core", "graph"): (1.0, 2.0, 3.0),
        ("gdn_ladder", "v7", "core", "oj"): (2.5,),
        ("gdn_ladder", "v14", "core", "oj"): (2.25,),
        ("gdn_ladder", "v6", "core", "graph"): (4.0,),
        ("gdn_ladder", "v4", "core", "graph"): (),
        ("gdn_prefill", "0.1.0", "core", "graph"): (0.75,),
        ("gdn_prefill", "9.9.9", "core", "graph"): (0.5,),
    }
    bench = {
        ("gdn_prefill", "0.1.0", "core", "graph"): (0.25,),
        ("gdn_prefill", "0.1.0", "full", "graph"): (0.375,),
        ("fla", "1", "full", "graph"): (0.75,),
    }
    record(tmp_path, "ladder", ladder)
    record(tmp_path, "bench", bench)
    counters = {"duration": 1e6, "stall_barrier": 1.0, "stall_selected": 3.0}
    metrics = [
        Metric("gpu", "d", "r", "v7", CASES[0], launch, "k", name, "", value / (launch + 1))
        for launch in range(2)
        for name, value in counters.items()
    ]
    write_metrics(metrics, {}, root=tmp_path)
    (tmp_path / "emulator").mkdir()
    reason = "output: 1 of 2 elements off (largest finite error 0.0065, 0 not finite)"
    found = {"version": "v4", "correctness": "WRONG", "reason": reason}
    (tmp_path / "emulator" / "versions.json").write_text(json.dumps({"rows": [found]}))
    return Derivations(tmp_path, "gpu")


def test_times_and_what_follows_from_them(recorded):
    case = CASES[0]
    assert recorded.ladder("v7", case) == 2.0
    assert recorded.ladder("shipped", case) == 0.5
    assert recorded.ladder("four_group", case) == 0.75  # what release 0.1.0 shipped
    assert recorded.release("bench") == "0.1.0"
    assert recorded.bench("gdn_prefill", case) == 0.25
    assert recorded.over("v7", "v6", case) == 0.5
    assert recorded.changes("v7", "v6") == [-50.0] * 8
    assert recorded.mean_over("v7", "v6") == pytest.approx(0.5)
    assert recorded.saved_us("v14", "v7", case) == pytest.approx(250)
    assert recorded.peer_ratio("fla", case, "full") == 2.0
    assert recorded.mean_peer_ratio("fla", "full") == pytest.approx(2.0)
    assert recorded.preprocessing(case) == 0.125
    assert recorded.chunk_us("v7", "long_low_gva") == 2000 / 512
    assert recorded.wrong_cases("v4") == 8 and recorded.passes("v7") == 8
    with pytest.raises(LookupError, match="gdn_ladder v4 is WRONG"):
        recorded.ladder("v4", case)
    with pytest.raises(NotRecordedError, match="nothing recorded of v1"):
        recorded.ladder("v1", case)
    for wrong in (lambda: recorded.ladder("v8", case), lambda: recorded.ladder("v7", "nope")):
        with pytest.raises((LookupError, ValueError)) as raised:
            wrong()
        assert not isinstance(raised.value, NotRecordedError)


def test_counters_verdicts_and_provenance(recorded):
    assert recorded.counter("v7", CASES[0], "duration") == 1e6
    assert recorded.stall("v7", CASES[0], "barrier") == 25.0
    assert (recorded.emulated("v4"), recorded.emulated_error("v4")) == ("WRONG", 0.0065)
    assert (recorded.recorded("ladder", "software", "torch"), recorded.day("ladder")) == (
        "2.11.0",
        "2026-01-02",
    )


def test_the_sources_numbers_are_those_of_the_ladders_table(recorded):
    assert recorded.source("v1", "long_low_gva") == 8.545
    assert (recorded.said("v9.5", "2.1"), recorded.said("v15", "1.6")) == (2.1, 1.6)
    with pytest.raises(LookupError, match="3 is not what the table says of v3"):
        recorded.said("v3", "3")


def test_shapes_and_tensor_work(recorded):
    assert recorded.tile("v7", "chain_equal") == 64 and recorded.tile("v7", "long_low_gva") == 128
    assert recorded.ctas("v1", "wide_gva_state") == 256
    assert recorded.tile("four_group", "wide_gva_state") == 64
    for case in load_cases():
        plan = core_plan(case.B, case.T, case.Hq, case.Hv, 132)
        assert recorded.tile("shipped", case.name) == plan.block_dv
        assert recorded.segments(case.name) == plan.segments
        ctas = case.state_heads * 128 // plan.block_dv
        assert recorded.ctas("shipped", case.name) == (
            ctas if plan.cut is None else plan.cut.forward_ctas(case.state_heads, plan.block_dv)
        )
    # 1280 and 2304 cycles at 1.98 GHz.
    assert recorded.tensor_us(64) == pytest.approx(1280 / 1980)
    assert recorded.tensor_us(128) == pytest.approx(2304 / 1980)
    assert recorded.tensor_us(128, True) - recorded.tensor_us(128) == pytest.approx(256 / 1980)


def test_a_table_has_a_row_for_what_was_timed(recorded):
    lines = recorded.table("times").splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == [
        "| v6",
        "| v7",
        "| four_group",
        "| **shipped**",
    ]
    assert lines[0].count("|") == len(CASES) + 2
    assert {version.name for version in VERSIONS} >= {"v6", "v7"}
    with pytest.raises(KeyError):
        recorded.table("nope")


def test_the_operator_is_read_from_its_own_run(recorded, tmp_path):
    with pytest.raises(NotRecordedError, match="operator.csv is not recorded"):
        recorded.operator("fla", "packed_8x1024")
    assert "| packed_8x1024 | n.nnnn |" in recorded.table("operator")
    found = [
        Outcome("packed_8x1024", name, "1", "full", "graph", status, "", times)
        for name, status, times in (
            ("gdn_prefill", Status.PASS, (0.5,)),
            ("fla", Status.PASS, (2.0,)),
            ("flash_qla", Status.WRONG, ()),
        )
    ]
    write_results("operator", [to_row(o, STAMP) for o in found], {"date": "d"}, root=tmp_path)
    assert recorded.operator_ratio("fla", "packed_8x1024") == 4.0
    line = "| packed_8x1024 | 0.5000 | n.nnnn |  | 2.0000 | n.nnnn |"
    assert line in recorded.table("operator").splitlines()
    with pytest.raises(LookupError, match="no workload nope"):
        recorded.operator("fla", "nope")
    with pytest.raises(NotRecordedError):
        recorded.operator_host("plan", "packed_8x1024")
    path = tmp_path / "gpu" / "operator_host.csv"
    path.write_text("case,plan,fresh,replay\npacked_8x1024,4.5,30.0,4.0\n")
    assert recorded.operator_host("plan", "packed_8x1024") == 4.5
    with pytest.raises(NotRecordedError):
        recorded.operator_host("plan", "chain_equal")


def test_the_core_stands_beside_flashqlas(recorded, tmp_path):
    with pytest.raises(NotRecordedError, match="core.csv"):
        recorded.core("gdn_prefill", CASES[0])
    times = {
        ("gdn_prefill", "9.9.9", "core", "graph"): (0.5,),
        ("flash_qla", "1", "core", "graph"): (0.8,),
        ("flash_qla_nocp", "1", "core", "graph"): (0.6,),
    }
    record(tmp_path, "core", times)
    fresh = Derivations(tmp_path, "gpu")
    assert fresh.core_ratio("flash_qla", CASES[1]) == pytest.approx(1.6)
    assert fresh.mean_core_ratio("flash_qla_nocp") == pytest.approx(1.2)
    # Of a run from before clocks were taken.
    assert fresh.table("core").splitlines()[2] == f"| {CASES[0]} | 0.5000 | 0.8000 | 0.6000 | n. |"
    with pytest.raises(NotRecordedError, match="fla"):
        fresh.core("fla", CASES[0])


def test_what_sustained_load_costs_is_read_by_case(recorded, tmp_path):
    with pytest.raises(NotRecordedError, match="deep"):
        recorded.sustained("deep", "last_us")
    (tmp_path / "gpu" / "sustained.csv").write_text("case,last_us,sm_mhz\ndeep,300.5,1500\n")
    assert recorded.sustained("deep", "last_us") == 300.5
    with pytest.raises(NotRecordedError, match="wide"):
        recorded.sustained("wide", "last_us")


def test_constants_of_the_cost_model_are_the_packaged_ones(recorded):
    assert recorded.fitted("scan", "chunk") == packaged_model()["launches"]["scan"]["chunk"]


def test_splits_are_found_by_their_plan(recorded, tmp_path):
    with pytest.raises(NotRecordedError, match="round 3"):
        recorded.split(3, "deep:3:64:1")
    rows = ["deep,3,64,1,True,250,130", "deep,3,64,1,False,300,180"]
    path = tmp_path / "gpu" / "rounds" / "split_round3.csv"
    path.parent.mkdir(exist_ok=True)
    header = "case,segments,block_dv,products,paired,total_us,opening_us"
    path.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    assert recorded.split(3, "deep:3:64:1") == 250
    assert recorded.split(3, "deep:3:64:1:apart", "opening") == 180
    with pytest.raises(NotRecordedError, match="deep:4:64:1"):
        recorded.split(3, "deep:4:64:1")


def test_slopes_leave_the_fixed_costs_out(recorded, tmp_path):
    folder = tmp_path / "gpu" / "rounds"
    folder.mkdir()
    rows = ["slope_short,100", "slope_long,484", "full_short,50", "wide_gva_state,146"]
    text = "".join(f"dv64,{row},0,0\n" for row in rows)
    (folder / "resident_round3.csv").write_text("variant,shape,median_us,a,b\n" + text)
    assert recorded.slope(3) == 2.0  # 384 us more for 192 chunks more
    assert recorded.slope(3, "dv64", "full") == 1.0
    for missing in ((4,), (3, "dv128")):
        with pytest.raises(NotRecordedError):
            recorded.slope(*missing)


def test_wavefronts_are_those_of_a_chunk_by_how_the_instruction_begins(recorded, tmp_path):
    folder = tmp_path / "gpu" / "rounds"
    folder.mkdir()
    lines = ["    LDS.128 R4, [R2]", "    @!P0 STS [R2], R4", "  LDSM.16.M88.4 R4, [R2]"]
    rows = "".join(f'"{line}","{160 << n}"\n' for n, line in enumerate(lines))
    with lzma.open(folder / "resident_round8_x.source.csv.xz", "wt") as file:
        file.write('"Kernel Name","k",\n"Source","L1 Wavefronts Shared"\n' + rows)
    assert recorded.wavefronts(8, "x", 10) == 14.0  # 8 CTAs
    assert recorded.wavefronts(8, "x", 10, "LDS") == 10.0
    assert recorded.wavefronts(8, "x", 10, "ST") == 4.0
    with pytest.raises(NotRecordedError, match="no profile of y"):
        recorded.wavefronts(8, "y", 10)
