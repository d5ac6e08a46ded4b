"""Draw the pictures of the benchmark: the same in each library's environment, and no two alike."""

from __future__ import annotations

import numpy as np
from PIL import Image

SIDE = 448


def draw(seed: int) -> Image.Image:
    """Return a picture of `SIDE` x `SIDE` pixels: waves of colour with noise in them."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:SIDE, 0:SIDE] / SIDE
    waves = [np.sin(2 * np.pi * (x * a + y * b + c)) for a, b, c in rng.uniform(-6, 6, (3, 3))]
    pixels = 128 + 90 * np.stack(waves, -1) + rng.uniform(-30, 30, (SIDE, SIDE, 3))
    return Image.fromarray(pixels.astype(np.uint8))
