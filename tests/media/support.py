"""What the tests of media share: the goldens of scripts/make/media_goldens.py, and their pictures and tokenizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from PIL import Image

from jaxllm.media.video_processor import FrameTimes

DATA = Path(__file__).parents[1] / "data" / "media"


class ByteTokenizer:
    """The tokenizer of the goldens, with the method that expanding needs."""

    def __init__(self) -> None:
        self.backend = tokenizers.Tokenizer.from_file(str(DATA / "tokenizer.json"))

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        return [self.backend.encode(text, add_special_tokens=add_special_tokens).ids for text in texts]

    def id(self, token: str) -> int:
        ((token_id,),) = self.encode([token])
        return token_id


@cache
def tokenizer() -> ByteTokenizer:
    return ByteTokenizer()


@cache
def golden(name: str) -> Any:
    path = DATA / name
    return json.loads(path.read_text()) if path.suffix == ".json" else dict(np.load(path))


def picture(height: int, width: int) -> Image.Image:
    """Return the picture of soft waves that the goldens are made of."""
    y, x = np.mgrid[0:height, 0:width]
    waves = (127 + 100 * np.sin(x / 17) * np.cos(y / 23), 127 + 90 * np.cos(x / 11 + y / 40), 60 + 50 * np.sin(y / 7))
    return Image.fromarray(np.stack(waves, -1).astype(np.uint8))


def clip(num_frames: int, height: int, width: int) -> np.ndarray:
    """Return frames that move down a picture, 4 pixels at a time, as the goldens' do."""
    pixels = np.asarray(picture(height + 4 * num_frames, width))
    return np.stack([pixels[4 * number : 4 * number + height] for number in range(num_frames)])


def every_third(num_frames: int) -> FrameTimes:
    """Return the times of the goldens' frames: every third of a video of 12 frames per second."""
    return FrameTimes(12.0, tuple(3 * number for number in range(num_frames)), 3 * num_frames)
