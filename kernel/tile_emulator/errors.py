"""Typed errors of the emulator.  Every error that ends a run carries the report of what was found
until then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .report import Report


class EmulatorError(Exception):
    """Base class.  ``report`` is the Report of the run, or None when no run had started."""

    def __init__(self, message: str, report: Report | None = None):
        super().__init__(message)
        self.message = message
        self.report = report

    def __reduce__(self):
        return type(self), (self.message, self.report)


class UnsupportedOperation(EmulatorError):
    """The kernel uses something that is not modelled; names the operation and its source line."""

    def __init__(self, message: str, report: Report | None = None, where: str = "?"):
        super().__init__(message, report)
        self.where = where

    def __reduce__(self):
        return type(self), (self.message, self.report, self.where)


class KernelFault(EmulatorError):
    """The kernel was executed and an issue was found; ``report.issues`` lists them all."""


class DeadlockError(KernelFault):
    """Every role that has not ended waits for a barrier that nobody completes."""


class RaceError(KernelFault):
    """Two accesses without an ordering, a missing proxy fence, or a wgmma result used too early."""


class BarrierError(KernelFault):
    """Arrivals that do not match a barrier's count, or a barrier left half used."""


class BoundsError(KernelFault):
    """An index outside a buffer."""


class InitError(KernelFault):
    """A read of shared memory, a fragment or a local that nothing has written."""
