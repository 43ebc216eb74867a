"""Plain text tables."""

from collections.abc import Sequence


def render(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Aligned columns, the first to the left, the others to the right; None is blank."""
    lines = [tuple("" if cell is None else str(cell) for cell in line) for line in (header, *rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        + "\n"
        for line in lines
    )


def fixed(value: float | None, digits: int) -> str | None:
    """A number with so many decimals, None for None."""
    return None if value is None else f"{value:.{digits}f}"
