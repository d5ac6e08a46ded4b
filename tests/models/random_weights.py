"""Random weights of a checkpoint, from the names and shapes of its tensors alone: HF's process makes the same."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import numpy as np

EMBEDDINGS = ("embed_tokens", "embed_positions", "embeddings", "wte", "wpe")
HEADS = ("lm_head",)
OFFSET_TYPES = ("gemma2", "gemma3", "qwen3_next", "qwen3_5")
"""Types of models whose norms add 1 to their scales."""


def draw_weights(
    shapes: Mapping[str, Sequence[int]], seed: int, model_type: str, dtype: str = "float32"
) -> dict[str, np.ndarray]:
    """Return float32 weights large enough that every feature moves the logits, with values that `dtype` can hold."""
    weights = {name: np.asarray(_draw(name, tuple(shape), seed, model_type)) for name, shape in shapes.items()}
    return {name: _rounded(each) for name, each in weights.items()} if dtype == "bfloat16" else weights


def _draw(name: str, shape: tuple[int, ...], seed: int, model_type: str) -> np.ndarray:
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    noise = rng.standard_normal(shape, dtype=np.float32)
    if name.endswith(("e_score_correction_bias", "expert_bias")):
        return 0.2 * noise
    if name.endswith(("_min", "_max")):
        return np.asarray((-1 if name.endswith("_min") else 1) * (0.5 + np.abs(noise)))
    if name.endswith(("bias", "sinks")):
        # With large ones a Whisper says the same token again and again.
        return (0.1 if model_type == "whisper" else 0.5) * noise
    if len(shape) <= 1:
        # The norm in a gated delta net has no offset.
        has_offset = (model_type == "gemma" or model_type.startswith(OFFSET_TYPES)) and not name.endswith(
            "linear_attn.norm.weight"
        )
        return (0.0 if has_offset else 1.0) + 0.3 * noise
    if any(part in name for part in EMBEDDINGS):
        # Gemma scales its embeddings up; they must not drown the layers.
        return (0.3 if model_type.startswith("gemma") else 0.6) * noise
    gain = 3.0 if any(part in name for part in HEADS) else 1.1
    # Experts are stacked; they may sum over either of the other axes, which have similar sizes.
    num_inputs = shape[1] if len(shape) == 3 and shape[1] > 1 else int(np.prod(shape[1:]))
    return gain * noise / np.float32(num_inputs) ** np.float32(0.5)


def _rounded(weights: np.ndarray) -> np.ndarray:
    """Return float32 numbers cut to the bits of bfloat16."""
    return (weights.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def draw_pixels(shape: Sequence[int], seed: int) -> np.ndarray:
    """Return normalised float32 pixels."""
    return np.random.default_rng(seed).standard_normal(tuple(shape), dtype=np.float32)
