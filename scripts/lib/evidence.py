"""Write a program's rows to disk one by one, so that a killed process leaves its evidence."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lib import results


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the arguments that scripts/lib/stages.sh passes to every program."""
    parser = results.make_parser(description)
    parser.add_argument(
        "--dry-run", metavar="IMPLEMENTATION", help="on a CPU at toy size, kernels of gpu or tpu interpreted"
    )
    return parser


class Evidence:
    """A report of facts and rows. It is complete once the program has ended and no row has missed."""

    def __init__(self, path: Path | None, facts: Mapping[str, Any]) -> None:
        self._path = path
        self._report: dict[str, Any] = {**facts, "complete": False, "rows": []}
        self.note(**facts)

    def note(self, **facts: Any) -> None:
        """Add facts, and show them."""
        print(json.dumps(facts, indent=1), flush=True)
        self._report |= facts
        self._write()

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a row, and show it. Its `missed` lists its failed checks."""
        print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
        self._report["rows"].append(dict(row))
        self._write()

    def skip(self, reason: str) -> int:
        """End without rows, because this machine cannot run the program. Return the exit status."""
        self._report["skipped"] = reason
        return self._finish(f"skipped: {reason}", is_complete=True)

    def finish(self) -> int:
        """End, and return the exit status: non-zero if a row has missed something, or if there is none."""
        rows = self._report["rows"]
        wrong = sum(bool(row.get("missed")) for row in rows)
        return self._finish(f"{len(rows)} rows, {wrong} wrong", is_complete=bool(rows) and not wrong)

    def _finish(self, summary: str, *, is_complete: bool) -> int:
        self._report["complete"] = is_complete
        self._write()
        print(summary, flush=True)
        return int(not is_complete)

    def _write(self) -> None:
        results.save(self._path, self._report)
