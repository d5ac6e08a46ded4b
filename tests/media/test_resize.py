"""Images are resized to the very bits of torch's antialiased interpolation."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from jaxllm.media.resize import BICUBIC, FILTERS, LANCZOS, resize
from tests.media.support import golden


def noise(seed: int, height: int, width: int) -> np.ndarray:
    """Return the noise that the goldens are made of, [h, w, 3]."""
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return values if seed % 2 else np.where(values < 128, np.uint8(0), np.uint8(255))


@pytest.mark.parametrize(
    "case", golden("resize.json"), ids=lambda case: "{1[0]}x{1[1]}-{2[0]}x{2[1]}-{3}".format(*case)
)
def test_every_bit_is_torchs(case: tuple[int, list[int], tuple[int, int], int, str]):
    seed, before, after, resample, digest = case
    resized = resize(noise(seed, *before).transpose(2, 0, 1), after, resample)
    assert (resized.dtype, resized.shape) == (np.uint8, (3, *after))
    assert hashlib.sha256(resized.tobytes()).hexdigest() == digest


@pytest.mark.parametrize("resample", FILTERS)
@pytest.mark.parametrize("size", [(900, 31), (3, 2000), (5, 7)])
def test_one_colour_stays(resample: int, size: tuple[int, int]):
    for level in (0, 1, 127, 254, 255):
        assert set(resize(np.full((3, 200, 301), level, np.uint8), size, resample).ravel()) == {level}


@pytest.mark.parametrize("number", [1, 4, 5])
def test_channels_and_memory_orders_change_nothing(number: int):
    pixels_chw = np.random.default_rng(number).integers(0, 256, (number, 50, 61), np.uint8)
    together = resize(pixels_chw, (23, 40), BICUBIC)
    for order in (np.asfortranarray(pixels_chw), pixels_chw[:, ::-1][:, ::-1], pixels_chw.transpose(2, 1, 0).T):
        np.testing.assert_array_equal(resize(order, (23, 40), BICUBIC), together)
    for channel, pixels_hw in enumerate(pixels_chw):
        np.testing.assert_array_equal(resize(pixels_hw[None], (23, 40), BICUBIC)[0], together[channel])


def test_a_size_that_stays_keeps_the_pixels():
    pixels_chw = noise(1, 9, 8).transpose(2, 0, 1)
    np.testing.assert_array_equal(resize(pixels_chw, (9, 8), LANCZOS), pixels_chw)


def test_other_filters_are_refused():
    with pytest.raises(ValueError, match=r"a filter of \(1, 2, 3\).*not 0"):
        resize(np.zeros((3, 4, 4), np.uint8), (2, 2), 0)
