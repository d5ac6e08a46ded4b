"""Tables of figures as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def print_sheet(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows under the names of their columns: text to the left, numbers to the right, what is missing empty."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    is_number = [any(isinstance(row.get(name), int | float) for row in rows) for name in columns]
    lines = [columns, *([str(row.get(name, "")) for name in columns] for row in rows)]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    for line in lines:
        aligned = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, is_number, strict=True)
        ]
        print("  ".join(aligned).rstrip())
