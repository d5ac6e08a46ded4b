"""Tables of figures as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def print_sheet(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows under their columns' names: text to the left, numbers to the right, missing cells empty."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    is_number = [any(isinstance(row.get(name), int | float) for row in rows) for name in columns]
    print(align([columns, *([str(row.get(name, "")) for name in columns] for row in rows)], is_number))


def align(rows: Sequence[Sequence[str]], to_right: Sequence[bool]) -> str:
    """Return rows as columns of text, each to the left or to the right."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = zip(row, widths, to_right, strict=True)
        lines.append("  ".join(cell.rjust(width) if right else cell.ljust(width) for cell, width, right in cells))
    return "\n".join(line.rstrip() for line in lines)
