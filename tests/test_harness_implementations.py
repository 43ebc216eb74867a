"""The registry: names, backends, versions, and errors that say what is allowed."""

from pathlib import Path

import pytest
import torch

from harness import implementations
from harness.implementations import Implementation, get


@pytest.fixture(autouse=True)
def fakes(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def test_ours_by_name_and_alias():
    ours = get("ours", backend="torch")
    assert (ours.name, ours.backend, ours.reuse_outputs) == ("gdn_prefill", "torch", True)
    assert get("gdn_prefill_fresh").reuse_outputs is False
    assert ours.unavailable() is None
    assert ours.operator and get("gdn_prefill_fresh").operator
    assert (get("gdn_prefill_lab").operator, get("gdn_prefill_lab").scopes) == (False, ("full",))


def test_a_backend_that_needs_a_gpu_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "needs a GPU" in get("ours", backend="cuda").unavailable()


def test_every_name_is_found_and_is_an_implementation():
    for name in implementations.names():
        found = get(name)
        assert isinstance(found, Implementation)
        assert found.name == name
        assert set(found.scopes) <= set(implementations.SCOPES)
        assert found.version
        missing = found.unavailable()
        assert missing is None or isinstance(missing, str)


def test_ladder_versions():
    versions = implementations.ladder_versions()
    assert "v1" in versions
    found = get("ours", version="v1")
    assert (found.name, found.version, found.scopes) == ("gdn_ladder", "v1", ("core",))
    with pytest.raises(ValueError, match="version is 'v8', must be one of v1"):
        get("ours", version="v8")
    with pytest.raises(ValueError, match="not of fla"):
        get("fla", version="v1")


def test_ones_own_implementation():
    assert get("fakes:RIGHT").name == "right"
    with pytest.raises(ValueError, match="is a str, not an Implementation"):
        get("fakes:NOT_ONE")
    with pytest.raises(ValueError, match="cannot be imported"):
        get("fakes:NO_SUCH")


@pytest.mark.parametrize(
    "arguments, message",
    [(("nothing",), "must be one of gdn_prefill"), (("ours", "metal"), "must be one of auto")],
)
def test_unknown_names_list_what_there_is(arguments, message):
    with pytest.raises(ValueError, match=message):
        get(*arguments)


def test_unknown_scopes_are_refused():
    with pytest.raises(ValueError, match="scope is 'full', core_only has core"):
        implementations.check_scope(get("fakes:CORE_ONLY"), "full")
