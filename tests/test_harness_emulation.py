"""The kernels in the emulator behind run.py: which case goes where, and what comes back."""

import io
import sys
from types import SimpleNamespace

import pytest
import torch

from cases import Case, hidden_cases, load_cases
from gdn_ladder.families import PackageCore
from gdn_prefill.core import core_kernels
from gdn_prefill.dispatch import core_plan
from harness import cli, emulation
from harness.check import Status
from harness.emulation import (
    ALL_CHECKS,
    AUTO_LIMIT,
    Emulation,
    NothingRunsError,
    emulated_chunks,
    resolve_backend,
)
from harness.evaluate import Entry, compare
from harness.implementations import BACKENDS
from harness.progress import Progress
from harness.timing import Plan
from harness.worker import Worker

CPU = torch.device("cpu")
TINY = Case("tiny", 1, 130, 1, 2, True, "mixed")
PLAN = Plan(warmup=1, repetitions=2)
HEADER = "name,B,T,Hq,Hv,initial_state,gate\n"


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def emulate(case=TINY, version=None, scope="core", **options):
    (found,) = compare(
        case,
        [Entry("ours", scope, version)],
        [PLAN],
        CPU,
        backend="emulator",
        emulation=Emulation(workers=1, **options),
    )
    return found


@pytest.mark.parametrize("scope", ["core", "full"])
@pytest.mark.parametrize("check", [None, ALL_CHECKS])
def test_the_shipped_kernel_passes(scope, check):
    found = emulate(scope=scope, check=check)
    assert (found.status, found.reason, found.backend) == (Status.PASS, "", "emulator")
    assert found.times_ms == ()


def test_it_is_the_kernel_that_an_h200_would_be_given(monkeypatch):
    seen = []
    original = Emulation.execute

    def spy(self, kernel, config):
        seen.append((kernel.build(config).attrs["global_symbol"], config))
        return original(self, kernel, config)

    monkeypatch.setattr(Emulation, "execute", spy)
    assert emulate().status is Status.PASS
    ((name, config),) = seen
    assert name == "gdn_forward_resident"
    assert (config.heads_q, config.heads_v, config.use_initial_state) == (1, 2, True)


def test_the_launches_are_those_of_the_packages_plan():
    for case in load_cases():
        launches = []
        recorder = SimpleNamespace(execute=lambda *launch, to=launches: to.append(launch))
        emulation.shipped_forward(SimpleNamespace(case=case, inputs=None), recorder)
        plan = core_plan(case.B, case.T, case.Hq, case.Hv, 132)
        planned = core_kernels(plan, case.Hq, case.Hv, case.initial_state).values()
        assert [(kernel.name, config) for kernel, config in launches] == [
            (kernel.name, kernel.config) for kernel in planned
        ]


def test_a_split_over_time_is_emulated_whole(monkeypatch):
    plan = core_plan(1, 330, 1, 2, 132, split=3)
    monkeypatch.setattr(PackageCore, "plan", lambda *_: plan)
    launched = []
    original = Emulation.execute
    monkeypatch.setattr(
        Emulation,
        "execute",
        lambda self, kernel, config: launched.append(kernel.name) or original(self, kernel, config),
    )
    assert emulate(Case("cut", 1, 330, 1, 2, True, "mixed")).status is Status.PASS
    assert len(launched) == 3


@pytest.mark.parametrize("version", ["v1", "v6", "scan", "four_group", "resident"])
def test_versions_of_the_ladder_pass(version):
    found = emulate(version=version)
    assert (found.implementation, found.version, found.status) == (
        "gdn_ladder",
        version,
        Status.PASS,
    )


def test_a_race_is_an_error_in_the_emulators_words():
    found = emulate(Case("four", 1, 256, 1, 2, False, "mixed"), "v9")
    assert found.status is Status.ERROR
    first, *findings = found.reason.splitlines()
    assert first.startswith("RaceError: ")
    assert any("state_shared" in finding for finding in findings)


def test_the_detector_is_off_unless_asked_for_or_failure_is_expected():
    assert Emulation().check is None
    assert Emulation().for_version("pass").check is None
    assert Emulation().for_version("fail").check == ALL_CHECKS
    assert Emulation("race").for_version("fail").check == "race"
    with pytest.raises(ValueError, match="check='taste'"):
        Emulation("taste")


def test_an_unsupported_operation_is_named(monkeypatch):
    import tile_emulator

    def refuse(*_, **__):
        raise tile_emulator.UnsupportedOperation("tl.copy_to_mars at forward.py:1")

    monkeypatch.setattr(tile_emulator, "emulate", refuse)
    found = emulate()
    assert found.status is Status.ERROR
    assert found.reason == "UnsupportedOperation: tl.copy_to_mars at forward.py:1"


def test_where_auto_goes_without_a_gpu():
    cases = {case.name: case for case in load_cases()}
    chosen = {name: resolve_backend("auto", case, "cpu") for name, case in cases.items()}
    assert {name for name, (backend, _) in chosen.items() if backend == "torch"} == {
        "wide_gva_state",
        "deep_gva_state",
    }
    assert "8192 chunks of a head's state" in chosen["deep_gva_state"][1]
    assert f"emulates up to {AUTO_LIMIT}" in chosen["deep_gva_state"][1]
    assert chosen["short_tail_state"] == (
        "emulator",
        "the H200's kernel in the emulator, 136 chunks of a head's state",
    )
    assert emulated_chunks(cases["batch_split_gva"]) == 4 * 8 * 128 == AUTO_LIMIT


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_asked_for_stays(backend):
    deep = load_cases()[-1]
    assert resolve_backend(backend, deep, "cuda") == (backend, "")
    if backend != "auto":
        assert resolve_backend(backend, deep, "cpu")[0] == backend


def test_a_version_is_emulated_or_refused_never_replaced():
    small, *_, deep = load_cases()
    assert resolve_backend("auto", small, "cpu", "v6")[0] == "emulator"
    with pytest.raises(NothingRunsError, match="8192 chunks .* torch cannot stand in"):
        resolve_backend("auto", deep, "cpu", "v6")


def test_what_a_version_cannot_run_is_left_out(cases, capsys, monkeypatch):
    monkeypatch.setattr(emulation, "AUTO_LIMIT", 4)
    arguments = ["--cases", cases, "--in-process", "--version", "v6", "--protocol", "graph"]
    assert cli.main([*arguments, "--output-format", "csv"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "case,correctness,median_ms\ntiny,PASS,\n"
    assert "long: v6 left out: 22 chunks of a head's state, 'auto' emulates up to 4" in printed.err
    assert cli.main([*arguments, "--case", "long"]) == 2
    printed = capsys.readouterr()
    assert (printed.out, "nothing can run here" in printed.err) == ("", True)


def test_hidden_cases_are_emulated_like_their_twins():
    for case in hidden_cases(3):
        assert resolve_backend("auto", case, "cpu")[0] == "emulator"


@pytest.fixture
def cases(tmp_path, monkeypatch):
    path = tmp_path / "cases.csv"
    path.write_text(HEADER + "tiny,1,65,1,2,yes,mixed\nlong,1,700,1,2,no,random_decay\n")
    monkeypatch.setattr(cli, "pick_device", lambda: CPU)
    return str(path)


def test_run_says_what_ran(cases, capsys, monkeypatch):
    monkeypatch.setattr(emulation, "AUTO_LIMIT", 4)
    arguments = ["--cases", cases, "--in-process", "--output-format", "csv"]
    assert cli.main(arguments) == 0
    printed = capsys.readouterr()
    assert printed.out == "case,correctness,median_ms\ntiny,PASS,\nlong,PASS,\n"
    assert "tiny: the H200's kernel in the emulator, 4 chunks of a head's state\n" in printed.err
    assert "long: torch stands in for the kernel: 22 chunks of a head's state" in printed.err
    assert cli.main([*arguments, "--backend", "emulator", "--check", "--case", "long"]) == 0
    printed = capsys.readouterr()
    assert "nothing is timed: the emulator runs on the CPU" in printed.err
    assert "long: the H200's kernel in the emulator" in printed.err


def test_hidden_cases_go_by_their_seed(capsys, monkeypatch):
    monkeypatch.setattr(cli, "pick_device", lambda: CPU)
    arguments = ["--backend", "emulator", "--hidden", "5", "--case", "hidden_short_tail_state"]
    assert cli.main([*arguments, "--output-format", "csv"]) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines()[1:] == ["hidden_short_tail_state,PASS,"]


def test_the_child_passes_on_how_far_it_is():
    steps = []
    with Worker(timeout_s=300, steps=lambda *step: steps.append(step)) as worker:
        (found,) = worker.compare(TINY, [Entry("ours")], [PLAN], backend="emulator", cpu=True)
    assert found.status is Status.PASS
    assert steps[-1] == (4, 4)


def test_the_bar_counts_ctas(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    progress = Progress("case")
    for _ in progress.over(["a"]):
        progress.steps(3, 8)
        assert (progress._inner.n, progress._inner.total) == (3, 8)
        progress.steps(8, 8)
        progress.steps(1, 4)
        assert (progress._inner.n, progress._inner.total) == (1, 4)
    assert progress._inner is None
    assert "CTA" in sys.stderr.getvalue()
    Progress("case").steps(1, 2)
