"""Read tests/data/sounds: tiny checkpoints of models that hear, and HF's outputs for prompts with sounds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from tests.e2e.pictures import draw
from tests.models.clips import draw_clip

SOUNDS = Path(__file__).parents[1] / "data" / "sounds"
FAMILIES = tuple(sorted(path.parent.name for path in SOUNDS.glob("*/config.json")))
NAMES = ("text", "one", "two", "turn")
WITH_PICTURE = ("gemma4",)
"""The families that see too, with a golden "picture"."""


@dataclass(frozen=True)
class SoundGolden:
    """A prompt with sounds, and HF's outputs for it in float32."""

    text: str
    """The prompt, with what stands for a sound in the family's prompts."""
    ids: np.ndarray
    """The tokens of the text, before sounds are expanded."""
    sounds: tuple[int, ...]
    """The number of each sound, in the prompt's order."""
    expanded: np.ndarray
    """The tokens that the model sees."""
    tokens: np.ndarray
    """Greedy tokens."""
    logprobs: np.ndarray
    """[tokens, v]: row i is the distribution that tokens[i] was taken from."""


def folder(family: str) -> Path:
    """Return a family's checkpoint folder."""
    return SOUNDS / family


def sound(family: str, number: int) -> np.ndarray:
    """Return the samples of a sound of the goldens, 16,000 a second."""
    with np.load(folder(family) / "golden.npz") as arrays:
        return draw_clip(float(arrays["seconds"][number]), number)


def num_sounds(family: str) -> int:
    """Return the number of sounds of the goldens."""
    with np.load(folder(family) / "golden.npz") as arrays:
        return len(arrays["seconds"])


def rows_of(family: str, number: int) -> np.ndarray:
    """Return the rows [r, d] that HF's tower makes of a sound."""
    with np.load(folder(family) / "golden.npz") as arrays:
        return arrays[f"rows_{number}"]


def picture() -> Image.Image:
    """Return the picture of the golden "picture"."""
    return Image.fromarray(draw(37, 61, 0))


def read_golden(family: str, name: str) -> SoundGolden:
    """Return one golden of a family: `name` is of NAMES, or "picture" in a family of WITH_PICTURE."""
    with np.load(folder(family) / "golden.npz") as arrays:
        return SoundGolden(
            text=str(arrays[f"{name}_text"]),
            ids=arrays[f"{name}_ids"],
            sounds=tuple(arrays[f"{name}_sounds"].tolist()),
            expanded=arrays[f"{name}_expanded"],
            tokens=arrays[f"{name}_tokens"],
            logprobs=arrays[f"{name}_logprobs"],
        )
