"""The commands and the pins that the README and the adapters rely on."""

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from reference.peers import fla, flash_qla, flashinfer

ROOT = Path(__file__).resolve().parents[1]
TARGETS = [
    "setup",
    "run",
    "test",
    "lint",
    "score",
    "bench",
    "baseline",
    "profile-nsys",
    "profile-ncu",
    "plots",
    "clean",
]
needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def make(*arguments):
    command = ["make", "-C", str(ROOT), "--no-print-directory", *arguments]
    # These tests may themselves run under `make test ARGS=...`, which hands its variables down.
    handed_down = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "ARGS", "CASE")
    env = {name: value for name, value in os.environ.items() if name not in handed_down}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout


@needs_make
def test_bare_make_lists_every_target_with_its_purpose():
    listed = dict(re.findall(r"^ +make (\S+) +(\S.*)$", make(), re.MULTILINE))
    assert set(TARGETS) <= set(listed)


@needs_make
def test_an_empty_venv_uses_python_as_it_is_and_installs_nothing():
    commands = make("-n", "run", "VENV=", "PYTHON=some-python", "CASE=chain_equal")
    assert commands.split() == ["some-python", "run.py", "--case", "chain_equal"]
    assert "pip" not in make("-n", "test", "VENV=", "PYTHON=some-python")


@needs_make
@pytest.mark.parametrize("target", [name for name in TARGETS if name not in ("setup", "clean")])
def test_every_target_runs_something_that_exists(target):
    command = make("-n", target, "VENV=", "PYTHON=python").strip().splitlines()[-1]
    module = re.search(r"-m (\S+)", command)
    if module:
        assert importlib.util.find_spec(module[1]) is not None
    else:
        assert (ROOT / command.split()[1]).is_file()


@pytest.mark.parametrize("peer", [flash_qla, fla, flashinfer], ids=lambda peer: peer.PACKAGE)
def test_the_peers_are_pinned_to_what_their_adapters_were_written_against(peer):
    pin = f"{peer.DISTRIBUTION}=={peer.RELEASE}"
    assert f'"{pin}"' in (ROOT / "pyproject.toml").read_text()
    pinned_in_ci = re.findall(rf"{peer.DISTRIBUTION}==\S+", (ROOT / ".ci/run").read_text())
    assert set(pinned_in_ci) <= {pin}
