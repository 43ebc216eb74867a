"""Gated DeltaNet chunked prefill for NVIDIA Hopper, in TileLang.

The public names are loaded on first use, so that importing the package costs nothing and touches no
GPU.
"""

from importlib import import_module

__version__ = "0.2.0"

_HOMES = {
    "cache_info": "api",
    "chunk_gate_cumsum": "api",
    "chunk_gated_delta_rule": "operator",
    "clear": "api",
    "gdn_prefill_forward": "api",
    "plan": "plans",
    "prepare": "api",
    "select_block_dv": "dispatch",
    "solve_kkt": "api",
    "warmup": "variants",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str):
    if name in _HOMES:
        value = globals()[name] = getattr(import_module(f".{_HOMES[name]}", __name__), name)
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
