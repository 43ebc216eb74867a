"""The ladder: every version of the forward kernel on the way to the shipped one, each runnable.

    from gdn_ladder import available_versions, forward
    output, final_state = forward("v2b", q, k, v, g_cumsum, beta, A, initial_state)

versions.py is the table of ideas and what became of them, families.py names the kernels behind it.
"""

from .families import Inputs, Kernel, LadderShape
from .launch import NotBuiltError, available_versions, forward, get_version, kernels_of
from .versions import VERSIONS, Version

__all__ = [
    "VERSIONS",
    "Inputs",
    "Kernel",
    "LadderShape",
    "NotBuiltError",
    "Version",
    "available_versions",
    "forward",
    "get_version",
    "kernels_of",
]
