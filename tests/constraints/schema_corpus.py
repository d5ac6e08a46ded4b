"""Schemas to try structured outputs on: tests/data/schemas. keywords.jsonl has cases for each keyword of draft 2020-12,
in the manner of the JSON-Schema-Test-Suite; realistic.jsonl has what applications ask for.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema

FOLDER = Path(__file__).resolve().parents[1] / "data" / "schemas"


class Case(NamedTuple):
    name: str
    schema: dict[str, Any]

    def is_valid(self, text: str) -> bool:
        """Return whether a text is JSON that the schema allows."""
        try:
            value = json.loads(text)
        except ValueError:
            return False
        return jsonschema.Draft202012Validator(self.schema).is_valid(value)


def cases(file: str) -> list[Case]:
    lines = map(json.loads, (FOLDER / file).read_text(encoding="utf-8").splitlines())
    return [Case(f"{line['keyword']}: {line['description']}", line["schema"]) for line in lines]


def corpus() -> list[Case]:
    """Return 200 keyword cases drawn with a fixed seed, and all 50 realistic ones."""
    return random.Random(2020_12).sample(cases("keywords.jsonl"), 200) + cases("realistic.jsonl")
