"""Makes the repository importable without installing it, and skips what needs a Hopper GPU."""

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]
HOPPER = (9, 0)

for entry in (ROOT / "kernel", ROOT):
    if str(entry) not in sys.path:
        sys.path.insert(0, str(entry))

# An example's time says nothing on a shared machine.
settings.register_profile("repository", deadline=None, print_blob=True)
settings.load_profile("repository")


def _no_hopper() -> str | None:
    """Why tests marked gpu cannot run here, or None."""
    if not torch.cuda.is_available():
        return "needs a Hopper GPU: torch.cuda is unavailable"
    capability = torch.cuda.get_device_capability()
    if capability != HOPPER:
        name = torch.cuda.get_device_name()
        return f"needs a Hopper GPU (sm_90): {name} is sm_{capability[0]}{capability[1]}"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = _no_hopper()
    if reason is None:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))
