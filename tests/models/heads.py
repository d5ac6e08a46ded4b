"""Read the draft heads of tests/data/heads, and their goldens, made with HF's parts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.models.tiny import folder

HEADS = Path(__file__).parents[1] / "data" / "heads"
BASES = {"eagle3": "llama2", "eagle3_speculators": "qwen3"}
"""The tiny case for whose tokens each EAGLE-3 head guesses; an MTP case is a checkpoint with its model."""
CASES = tuple(sorted(path.name for path in HEADS.iterdir()))


@dataclass(frozen=True)
class HeadGolden:
    """A sequence, and the outputs of HF's parts for it in float32."""

    sequence: np.ndarray
    guesses: np.ndarray
    """Greedy guesses of the next tokens."""
    logprobs: np.ndarray | None
    """[sequence - 1, v]: row i is of the token after next; for the shorter sequences."""


def model_folder(case: str) -> Path:
    """Return the checkpoint of the model for a case's head."""
    return folder(BASES[case]) if case in BASES else HEADS / case


def read_goldens(case: str) -> list[HeadGolden]:
    """Return a case's goldens, one per sequence."""
    with np.load(HEADS / case / "golden.npz") as arrays:
        count = sum(name.startswith("guesses_") for name in arrays)
        return [
            HeadGolden(arrays[f"sequence_{index}"], arrays[f"guesses_{index}"], arrays.get(f"logprobs_{index}"))
            for index in range(count)
        ]
