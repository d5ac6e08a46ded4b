"""Read what HF Transformers generates after prompts of random embeddings (scripts/make.py prompt_embeds_goldens)."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

FOLDER = Path(__file__).parents[1] / "data" / "prompt_embeds"
CASES = tuple(sorted(path.stem for path in FOLDER.iterdir()))


class EmbedsGolden(NamedTuple):
    """Random embeddings and what HF generates after them, and the inputs_embeds that HF takes for the same as ids."""

    embeds: np.ndarray
    tokens: np.ndarray
    logprobs: np.ndarray
    ids: np.ndarray
    embedded: np.ndarray


def read_golden(case: str) -> EmbedsGolden:
    """Return the golden of one of CASES."""
    with np.load(FOLDER / f"{case}.npz") as arrays:
        return EmbedsGolden(**{name: arrays[name] for name in EmbedsGolden._fields})
