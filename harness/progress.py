"""Progress of long work, on standard error: tables and CSV on standard output stay clean."""

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")


class Progress:
    """A bar over items that says what is being done; only where standard error is a terminal."""

    def __init__(self, unit: str) -> None:
        self._unit = unit
        self._bar: tqdm | None = None

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
                self._bar.update()
        self._bar = None

    def say(self, text: str) -> None:
        """What is being done now."""
        if self._bar is not None:
            self._bar.set_description(text)


def note(text: str) -> None:
    """A line on standard error that a bar does not garble."""
    tqdm.write(text, file=sys.stderr)
