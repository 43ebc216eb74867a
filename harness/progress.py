"""Progress of long work, on standard error: tables and CSV on standard output stay clean."""

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")


class Progress:
    """A bar over items that says what is being done; only where standard error is a terminal.

    A second bar below it counts the CTAs of an emulated launch.
    """

    def __init__(self, unit: str) -> None:
        self._unit = unit
        self._bar: tqdm | None = None
        self._inner: tqdm | None = None

    def over(self, items: Iterable[T]) -> Iterator[T]:
        """The items, the bar one step further after each."""
        items = list(items)
        shown = len(items) > 0 and sys.stderr.isatty()
        tqdm.monitor_interval = 0
        with tqdm(
            total=len(items), unit=self._unit, file=sys.stderr, disable=not shown, leave=False
        ) as self._bar:
            for item in items:
                yield item
                self._close_inner()
                self._bar.update()
        self._bar = None

    def say(self, text: str) -> None:
        """What is being done now."""
        if self._bar is not None:
            self._bar.set_description(text)

    def steps(self, done: int, total: int) -> None:
        """How far a launch in the emulator is, in CTAs."""
        if self._bar is None or self._bar.disable:
            return
        if self._inner is None or self._inner.total != total or done < self._inner.n:
            self._close_inner()
            self._inner = tqdm(
                total=total, unit="CTA", file=sys.stderr, leave=False, position=1, desc="  emulated"
            )
        self._inner.update(done - self._inner.n)

    def _close_inner(self) -> None:
        if self._inner is not None:
            self._inner.close()
            self._inner = None


def note(text: str) -> None:
    """A line on standard error that a bar does not garble."""
    tqdm.write(text, file=sys.stderr)
