"""CPU emulator of TileLang kernels: runs the tile program of a warp-specialised kernel and judges
its synchronisation.
"""

from .api import emulate
from .edits import Edit
from .errors import (
    BarrierError,
    BoundsError,
    DeadlockError,
    EmulatorError,
    InitError,
    KernelFault,
    RaceError,
    UnsupportedOperation,
)
from .program import Program
from .report import Issue, Report
from .scheduler import adversarial

__all__ = [
    "BarrierError", "BoundsError", "DeadlockError", "Edit", "EmulatorError", "InitError", "Issue",
    "KernelFault",
    "Program", "RaceError", "Report", "UnsupportedOperation", "adversarial", "emulate",
]  # fmt: skip
