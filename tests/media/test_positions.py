"""M-RoPE's positions are those of transformers' get_rope_index, on random mixes of texts, images and videos."""

from __future__ import annotations

import numpy as np
import pytest

from jaxllm.media.expand import Span
from jaxllm.media.positions import rope_positions
from jaxllm.media.shapes import ItemShape
from tests.media.support import golden

MODELS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v")
NUM_CASES = 8


def lay_out(parts: np.ndarray, *, splits: bool) -> tuple[int, list[Span], list[ItemShape]]:
    """Return the tokens, spans and shapes of parts as scripts/make/media_goldens.py draws them."""
    end = 0
    spans: list[Span] = []
    shapes: list[ItemShape] = []
    for modality, time, height, width, seconds in parts:
        if not modality:
            end += int(time)
            continue
        grid = int(time), int(height), int(width)
        rows = grid[1] * grid[2] // 4
        name = "image" if modality == 1 else "video"
        steps, per_span = (grid[0], rows) if splits else (1, rows * grid[0])
        for step in range(steps):
            end += 3 if step else 0
            spans.append(Span(end, per_span, len(shapes), step * per_span))
            end += per_span
        shapes.append(ItemShape(name, (grid,), (1, 1), seconds_per_step=float(seconds)))
    return end, spans, shapes


@pytest.mark.parametrize("model", MODELS)
def test_positions_are_those_of_transformers(model: str):
    arrays = golden("positions.npz")
    for case in range(NUM_CASES):
        parts = arrays[f"{model}-{case}-parts"]
        num_tokens, spans, shapes = lay_out(parts, splits=model not in ("qwen2_vl", "qwen2_5_vl"))
        speed = 2.0 if model == "qwen2_5_vl" else None
        result = rope_positions(num_tokens, spans, shapes, merge_size=2, steps_per_second=speed)
        assert result.positions.dtype == np.int64
        np.testing.assert_array_equal(result.positions, arrays[f"{model}-{case}-positions"])
        assert result.delta == arrays[f"{model}-{case}-delta"]


def test_positions_in_time_may_be_large():
    shape = ItemShape("video", ((16, 2, 2),), (1, 1), seconds_per_step=1.4e8)
    result = rope_positions(17, [Span(1, 16, 0, 0)], [shape], merge_size=2, steps_per_second=2.0)
    assert result.positions[0, -1] == 1 + 15 * 280_000_000
    assert result.delta == 2 + 15 * 280_000_000 - 17


def test_text_alone_counts_on():
    result = rope_positions(5, [], [], merge_size=2)
    assert result.positions.tolist() == [[0, 1, 2, 3, 4]] * 3
    assert result.delta == 0
    assert rope_positions(0, [], [], merge_size=2).delta == 0
