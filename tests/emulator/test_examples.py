"""The worked example passes as it is graded by hand, and a mistake in it is found."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cases import load_cases, make_inputs
from harness.check import Status
from harness.judge import judge
from harness.timing import Plan
from tile_emulator.__main__ import main

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SUBMISSION = EXAMPLES / "emulated_submission.py"
PLAN = Plan(warmup=1, repetitions=4)


def test_the_readme_command_passes():
    (command,) = (
        line.split()
        for line in (EXAMPLES / "README.md").read_text().splitlines()
        if line.strip().startswith("python run.py")
    )
    done = subprocess.run(
        [sys.executable, *command[1:]], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].split()[-1] == "PASS"


@pytest.mark.parametrize(
    ("right", "wrong", "status", "reason"),
    [
        ("T.copy(s_fragment, s_shared)", "pass", Status.ERROR, "s_shared, which nothing"),
        ("i >= j", "i > j", Status.WRONG, "output"),
    ],
)
def test_a_mistake_is_found(right, wrong, status, reason, tmp_path):
    text = SUBMISSION.read_text()
    assert text.count(right) == 1
    path = tmp_path / "mine.py"
    path.write_text(text.replace(right, wrong))
    (case,) = load_cases(EXAMPLES / "tiny.csv")
    outcome = judge(path, case, PLAN, torch.device("cpu"), backend="torch", timeout_s=300)
    assert outcome.status == status and reason in outcome.reason


def test_the_emulator_command_takes_it(monkeypatch, capsys):
    monkeypatch.syspath_prepend(EXAMPLES)
    command = ["emulated_submission:forward_kernel", "--args", "1,2"]
    assert main([*command, "--shape", "batch=1,tokens=200"]) == 0
    assert "8 CTA" in (out := capsys.readouterr().out) and "no issue" in out


def test_tensors_of_another_device_are_refused(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    from emulated_submission import gdn_prefill_forward

    (case,) = load_cases(EXAMPLES / "tiny.csv")
    x = make_inputs(case)
    with pytest.raises(ValueError, match="q is on meta"):
        gdn_prefill_forward(x.q.to("meta"), x.k, x.v, x.g, x.beta, None)
