"""What the adapters share: whether a peer can run here, and which release of it is installed."""

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor

CORE = "core"
FULL = "full"
HOPPER = (9, 0)

Call = Callable[[], tuple[Tensor, Tensor]]


def unavailable(package: str, requirement: str, entry: Callable[[], object]) -> str | None:
    """Why a peer cannot run here, in words, or None.

    `package` is its import name, `requirement` what pip would install, `entry` imports what the
    adapter calls; it runs only where a Hopper GPU is present, since a peer may ask for one then.
    """
    if importlib.util.find_spec(package) is None:
        return f"{package} is not installed (pip install {requirement})"
    reason = no_hopper()
    if reason is not None:
        return f"{package} {reason}"
    try:
        entry()
    except Exception as error:  # whatever a peer's import does, it is a reason and not a crash
        return f"{package} cannot be imported: {type(error).__name__}: {error}"
    return None


def no_hopper() -> str | None:
    """Why no Hopper kernel can run in this process, or None."""
    if not torch.cuda.is_available():
        return "needs a Hopper GPU: torch.cuda is unavailable"
    capability = torch.cuda.get_device_capability()
    if capability != HOPPER:
        name = torch.cuda.get_device_name()
        return f"needs a Hopper GPU (sm_90): {name} is sm_{capability[0]}{capability[1]}"
    return None


def release(distribution: str) -> str:
    """The installed release of a distribution; "unknown" if it left no metadata."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def check_scope(name: str, scope: str, scopes: tuple[str, ...]) -> None:
    """Raises ValueError if an implementation has no such scope."""
    if scope not in scopes:
        raise ValueError(f"scope is {scope!r}, {name} has {', '.join(scopes)}")
