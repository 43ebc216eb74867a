"""The profilers' command lines as text; what is missing is said."""

import re
import subprocess
import sys

import pytest
import torch

from harness import profile
from harness.child import ROOT
from harness.profile import MISSING, main


def printed(capsys, *arguments):
    code = main([*arguments, "--python", "/opt/venv/bin/python"])
    return code, capsys.readouterr()


@pytest.fixture(autouse=True)
def no_tools(monkeypatch):
    monkeypatch.setattr(profile, "find_tool", lambda _: None)


def test_nsys_as_the_lab_prescribes(capsys):
    code, shown = printed(capsys, "nsys", "--print-only")
    assert code == 0
    assert shown.out == (
        "nsys profile --clock-control none --capture-range=cudaProfilerApi"
        " --capture-range-end=stop --force-overwrite=true -o long_low_gva_nsys"
        " /opt/venv/bin/python run.py --case long_low_gva --output-format csv\n"
    )


def test_ncu_as_the_lab_prescribes(capsys):
    code, shown = printed(capsys, "ncu", "--print-only", "--case", "chain_equal")
    assert code == 0
    assert shown.out == (
        "ncu --clock-control none --set full"
        " --kernel-name 'regex:^gdn_'"
        " --launch-skip 3 --launch-count 2 --csv -f -o chain_equal_ncu"
        " /opt/venv/bin/python run.py --case chain_equal --output-format csv\n"
    )


def test_more_arguments_environment_and_filter(capsys):
    arguments = ["--print-only", "--env", "A=b c", "--kernel-name", "x", "--output", "/tmp/r"]
    _, shown = printed(capsys, "ncu", *arguments)
    assert shown.out.startswith("A='b c' ncu ")
    assert "--kernel-name x " in shown.out and " -o /tmp/r " in shown.out
    assert main(["nsys", "--print-only", "--", "--version", "v1"]) == 0
    assert capsys.readouterr().out.endswith(
        f"{sys.executable} run.py --case long_low_gva --output-format csv --version v1\n"
    )


def test_the_filter_matches_every_kernel():
    sources = "".join(path.read_text() for path in (ROOT / "kernel").rglob("*.py"))
    names = re.findall(r"@T\.prim_func.*\n\s+def (\w+)", sources)
    assert {"gdn_forward_resident", "gdn_summary", "gdn_scan", "gdn_int8"} <= set(names)
    assert len(names) == len(set(names))
    kind, _, pattern = profile.KERNELS.partition(":")
    assert kind == "regex"
    assert [name for name in names if not re.search(pattern, f"{name}_kernel")] == []


def test_the_help_says_how_to_pass_arguments_on(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "make profile-ncu ARGS='-- --version v7'" in " ".join(capsys.readouterr().out.split())


def test_reports_are_not_committed():
    names = ["a.ncu-rep", "b.nsys-rep", "c.sqlite"]
    done = subprocess.run(["git", "check-ignore", *names], cwd=ROOT, capture_output=True, text=True)
    if done.returncode == 128:
        pytest.skip("no repository here")
    assert done.stdout.split() == names


def test_a_missing_tool_is_named(capsys):
    code, shown = printed(capsys, "nsys")
    assert code == MISSING
    assert "not run: nsys is neither on PATH nor" in shown.err


def test_a_missing_gpu_is_named(capsys, monkeypatch):
    monkeypatch.setattr(profile, "find_tool", lambda tool: f"/opt/{tool}")
    monkeypatch.setattr(profile, "pick_device", lambda: torch.device("cpu"))
    code, shown = printed(capsys, "ncu")
    assert (code, "not run: torch sees no GPU" in shown.err) == (MISSING, True)


def test_the_tool_runs_with_the_environment(capsys, monkeypatch, tmp_path):
    tool = tmp_path / "ncu"
    tool.write_text('#!/bin/sh\necho "$GDN_PROFILING $EXTRA" >"$0.log"\nexit 5\n')
    tool.chmod(0o755)
    monkeypatch.setattr(profile, "find_tool", lambda _: str(tool))
    monkeypatch.setattr(profile, "pick_device", lambda: torch.device("cuda"))
    code, shown = printed(capsys, "ncu", "--env", "EXTRA=yes")
    assert code == 5
    assert "ncu ended with exit code 5" in shown.err
    assert (tmp_path / "ncu.log").read_text() == "ncu yes\n"


@pytest.mark.parametrize(
    "arguments, message", [(["--case", "nope"], "no case named"), (["--env", "A"], "NAME=VALUE")]
)
def test_bad_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit):
        main(["ncu", *arguments])
    assert message in capsys.readouterr().err
