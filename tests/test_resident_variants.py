"""The benchmark of the resident kernel's variants: a worker that speaks, hangs or dies."""

import importlib.util
import sys
from pathlib import Path

import pytest

pytest.importorskip("tilelang")

PATH = Path(__file__).resolve().parent.parent / "benchmarks" / "resident_variants.py"

WORKER = """
import sys, time
for text in {chunks!r}:
    sys.stdout.write(text)
    sys.stdout.flush()
    time.sleep(0.05)
{end}
"""


@pytest.fixture
def variants(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("resident_variants", PATH)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "resident_variants", module)
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec.loader.exec_module(module)

    def worker(chunks, end=""):
        path = tmp_path / "worker.py"
        path.write_text(WORKER.format(chunks=chunks, end=end))
        monkeypatch.setattr(module, "__file__", str(path))
        return module

    return worker


@pytest.mark.parametrize(
    ("name", "symbol"),
    [
        ("dv64", "gdn_forward_resident"),
        ("groups", "gdn_prepared_groups"),
        ("fused", "gdn_prepared_fused"),
        ("wide", "gdn_prepared_wide"),
    ],
)
def test_a_variant_is_the_shipped_kernel_or_one_of_the_ladder(variants, name, symbol):
    module = variants([])
    prim_func, _ = module.built(module.VARIANTS[name], (2, 8, True))
    assert prim_func.attrs["global_symbol"] == symbol
    assert len(prim_func.params) == 10


def test_events_are_those_of_whole_lines_however_they_arrive(variants, capsys):
    module = variants(['@{"event": "sta', 'rt"}\nchatter\n@{"event": "checked"}\n'])
    assert module.run_worker([], timeout=30) == ([{"event": "start"}, {"event": "checked"}], None)
    assert capsys.readouterr().out == "chatter\n"


def test_a_silent_worker_is_killed_and_keeps_its_events(variants):
    module = variants(['@{"event": "start"}\n'], "time.sleep(600)")
    events, trouble = module.run_worker([], timeout=2)
    assert events == [{"event": "start"}]
    assert trouble == "nothing for 2 s"


def test_a_dead_worker_says_how_it_ended(variants):
    module = variants(['@{"event": "start"}\n'], "sys.exit(3)")
    assert module.run_worker([], timeout=30) == ([{"event": "start"}], "exit status 3")


def test_a_variant_that_kills_its_worker_does_not_lose_the_others(variants):
    names = ["one", "two", "three"]
    module = variants(
        [],
        """
import json
for name in sys.argv[sys.argv.index("--variants") + 1 :]:
    print("@" + json.dumps({"event": "start", "variant": name}), flush=True)
    if name == "two":
        sys.exit(9)
    print("@" + json.dumps({"event": "checked", "variant": name}), flush=True)
""",
    )
    results = module.check_all(names, timeout=30)
    assert [results[name]["event"] for name in names] == ["checked", "failed", "checked"]
    assert results["two"]["reason"] == "exit status 9"
