"""The shape of a body is what Python's own decoder finds, wherever pieces of it begin, and is bounded."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from jaxllm.exceptions import VLLMValidationError
from jaxllm.server.http import shape


def depth_of(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(depth_of, inner), default=0)


def counts_of(value: Any) -> tuple[int, int, int]:
    """Return how many lists and objects there are in a value, how many names, and how many commas."""
    if not isinstance(value, (dict, list)):
        return 0, 0, 0
    counts = [counts_of(each) for each in (value.values() if isinstance(value, dict) else value)]
    totals = [sum(each[i] for each in counts) for i in range(3)]
    return totals[0] + 1, totals[1] + (len(value) if isinstance(value, dict) else 0), totals[2] + max(len(value) - 1, 0)


def some_value(rng: random.Random, levels: int) -> Any:
    text = "".join(rng.choices('ab"\\[]{}:,\n ü', k=rng.randrange(8)))
    if levels == 0 or rng.random() < 0.3:
        return rng.choice([text, 1, None, 2.5])
    inner = [some_value(rng, levels - 1) for _ in range(rng.randrange(5))]
    return inner if rng.random() < 0.5 else {f"{text}{i}": each for i, each in enumerate(inner)}


@pytest.mark.parametrize("seed", range(4))
def test_every_limit_is_exact(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    value = [some_value(rng, 4) for _ in range(6)]
    body, limits = json.dumps(value).encode(), [depth_of(value), *counts_of(value)]
    for piece in (1, 7, shape.PIECE):
        monkeypatch.setattr(shape, "PIECE", piece)
        for less in range(5):
            bounds = [limit - (less == i) for i, limit in enumerate(limits)]
            monkeypatch.setattr(shape, "MAX_DEPTH", bounds[0])
            monkeypatch.setattr(shape, "_MOST", tuple(bounds[1:]))
            for name, most in zip(("MAX_LISTS", "MAX_NAMES", "MAX_VALUES"), bounds[1:], strict=True):
                monkeypatch.setattr(shape, name, most)
            if less == 4:
                shape.check_shape(body)
                continue
            with pytest.raises(VLLMValidationError, match=["deep", "lists and objects", "names", "values"][less]):
                shape.check_shape(body)


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt":[' + b"[]," * shape.MAX_LISTS + b"[]]}",
        b"{" + b'"a":1,' * (shape.MAX_NAMES + 1) + b'"b":1}',
        b'{"prompt":[' + b"1," * (shape.MAX_VALUES + 1) + b"1]}",
        b"[" * (shape.MAX_DEPTH + 1),
    ],
)
def test_what_has_too_many_values_is_refused(body: bytes) -> None:
    with pytest.raises(VLLMValidationError, match=r"more than \d+ "):
        shape.check_shape(body)


def test_texts_may_have_any_characters() -> None:
    shape.check_shape(json.dumps({"prompt": '[{:,"\\' * 2**20, "n": [[]] * 300}).encode())


def test_what_is_no_json_is_left_to_the_decoder() -> None:
    for body in (b'"' + b"[" * 1000, b"]" * 1000 + b"[" * 150, b"\\" * 999, b"{" * 150 + b'"\\'):
        shape.check_shape(body)
