"""Plain text for terminals and pipes."""

from __future__ import annotations

import shutil
from collections.abc import Sequence


def columns(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Aligned columns under a header.

    Args:
        header: titles, one a column.
        rows: cells as text.
        right: indices of the columns that are aligned to the right.
    """
    table = [list(header), *map(list, rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(header))]
    lines = []
    for row in table:
        cells = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])


def shorten(text: str, width: int) -> str:
    """The text in at most `width` characters, cut at a word."""
    if len(text) <= width:
        return text
    return text[: max(1, width - 3)].rsplit(" ", 1)[0] + "..."


def terminal_width(otherwise: int = 160) -> int:
    """Columns of the terminal; pipes and files get `otherwise`."""
    return shutil.get_terminal_size((otherwise, 24)).columns


def duration(seconds: float) -> str:
    """Seconds as a person reads them: 8.1 s, 2 min 05 s, 1 h 04 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def count(number: int) -> str:
    """A count with thousands separated."""
    return f"{number:,}"
