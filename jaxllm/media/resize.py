"""Resize 8-bit images to the very values of torch's antialiased interpolation on a CPU.

One pass resizes the rows, and a second one the columns; a pass whose size stays is left out. Between them values are
rounded to 8 bits. Weights are whole numbers, of as many binary places as the largest of them has room for in 16 bits.
A pass is thus a sum of whole numbers. Matrix products of floats compute it without any error: the products and their
sums stay within the digits of a float32 or, where an image shrinks much, of a float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

LANCZOS, BILINEAR, BICUBIC = 1, 2, 3
FILTERS = (LANCZOS, BILINEAR, BICUBIC)
"""Pillow's numbers of the filters."""
_MAX_PLACES = 22
"""The most binary places of a weight."""
_BLOCK = 16
"""Values of an output line that one matrix product makes."""
_BUFFER = 2**18
"""About how many input values are converted to floats at once, so that they stay in a core's cache."""


def _triangle(x: np.ndarray) -> np.ndarray:
    return np.maximum(1 - np.abs(x), 0)


def _cubic(x: np.ndarray) -> np.ndarray:
    """Return Keys' cubic with a = -0.5."""
    x = np.abs(x)
    near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    return np.where(x < 1, near, np.where(x < 2, far, 0))


def _lanczos(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < 3, np.sinc(x) * np.sinc(x / 3), 0)


_KERNELS: dict[int, tuple[Callable[[np.ndarray], np.ndarray], int]] = {
    BILINEAR: (_triangle, 1),
    BICUBIC: (_cubic, 2),
    LANCZOS: (_lanczos, 3),
}
"""Each filter and half the width on which it is not 0."""


@dataclass(frozen=True, slots=True)
class _Weights:
    """What each value of a resized line takes of the line before."""

    starts_o: np.ndarray
    """The first value that an output value takes, int64 [out]."""
    weights_ot: np.ndarray
    """Its weights, int16 [out, taps]: 0 beyond its last one."""
    places: int
    """The binary places of the weights: 2**places is one."""
    dtype: type[np.floating]
    """The floats that hold all sums exactly."""

    def blocks(self, size: int) -> Iterator[tuple[slice, slice, np.ndarray]]:
        """Yield (outputs, inputs, matrix float [inputs, outputs]) of blocks of a line that had `size` values."""
        taps = self.weights_ot.shape[1]
        for first in range(0, len(self.starts_o), _BLOCK):
            starts_o = self.starts_o[first : first + _BLOCK]
            offsets_o = starts_o - starts_o[0]
            matrix_io = np.zeros((offsets_o[-1] + taps, len(starts_o)), self.dtype)
            inputs_ot = offsets_o[:, None] + np.arange(taps)
            matrix_io[inputs_ot, np.arange(len(starts_o))[:, None]] = self.weights_ot[first : first + _BLOCK]
            matrix_io *= self.dtype(0.5**self.places)
            inputs = slice(starts_o[0], min(starts_o[0] + len(matrix_io), size))
            yield slice(first, first + len(starts_o)), inputs, matrix_io[: inputs.stop - inputs.start]


def resize(pixels_chw: np.ndarray, size: tuple[int, int], resample: int) -> np.ndarray:
    """Return an image, uint8 [channels, h, w] of any strides, resized to a (height, width).

    `resample` is BILINEAR, BICUBIC or LANCZOS. Raises ValueError for another filter.
    """
    if resample not in FILTERS:
        raise ValueError(f"images are resized with a filter of {FILTERS} (Pillow's numbers), not {resample}")
    height, width = size
    if width != pixels_chw.shape[2]:
        pixels_chw = _resize_rows(pixels_chw, _weights(pixels_chw.shape[2], width, resample))
    if height != pixels_chw.shape[1]:
        pixels_chw = _resize_columns(pixels_chw, _weights(pixels_chw.shape[1], height, resample))
    return pixels_chw


@lru_cache(maxsize=64)
def _weights(before: int, after: int, resample: int) -> _Weights:
    """Return the weights that resize a line of `before` values to `after`."""
    kernel, half_width = _KERNELS[resample]
    scale = before / after
    support = half_width * max(scale, 1.0)
    centres_o = scale * (np.arange(after) + 0.5)
    starts_o = np.maximum((centres_o - support + 0.5).astype(np.int64), 0)
    ends_o = np.minimum((centres_o + support + 0.5).astype(np.int64), before)
    inputs_ot = starts_o[:, None] + np.arange((ends_o - starts_o).max())
    values_ot = kernel((inputs_ot - centres_o[:, None] + 0.5) * (1 / scale if scale >= 1 else 1.0))
    values_ot *= inputs_ot < ends_o[:, None]
    values_ot /= values_ot.cumsum(1)[:, -1:]  # from left to right, as torch adds them
    largest = float(values_ot.max())
    places = next(n for n in range(_MAX_PLACES + 1) if n == _MAX_PLACES or int(0.5 + largest * 2 ** (n + 1)) >= 2**15)
    weights_ot = np.trunc(values_ot * 2**places + np.copysign(0.5, values_ot))
    most = 255 * np.abs(weights_ot).sum(1).max() + 2 ** (places - 1)
    return _Weights(starts_o, weights_ot.astype(np.int16), places, np.float32 if most <= 2**24 else np.float64)


def _resize_rows(pixels_chw: np.ndarray, weights: _Weights) -> np.ndarray:
    """Return an image whose rows have the length of the weights, a view [channels, h, w] of [h, channels, w]."""
    channels, height, width = pixels_chw.shape
    pixels_hcw = pixels_chw.transpose(1, 0, 2)
    resized_hcw = np.empty((height, channels, len(weights.starts_o)), np.uint8)
    for outputs, inputs, matrix_io in weights.blocks(width):
        number = max(1, _BUFFER // (channels * len(matrix_io)))
        for first in range(0, height, number):
            rows = slice(first, min(first + number, height))
            values_lci = np.ascontiguousarray(pixels_hcw[rows, :, inputs], weights.dtype)
            resized_hcw[rows, :, outputs] = _rounded(values_lci @ matrix_io)
    return resized_hcw.transpose(1, 0, 2)


def _resize_columns(pixels_chw: np.ndarray, weights: _Weights) -> np.ndarray:
    """Return an image whose columns have the length of the weights, a view [channels, h, w] of [h, channels, w]."""
    channels, height, width = pixels_chw.shape
    pixels_hl = np.ascontiguousarray(pixels_chw.transpose(1, 0, 2)).reshape(height, channels * width)
    resized_hl = np.empty((len(weights.starts_o), channels * width), np.uint8)
    for outputs, inputs, matrix_io in weights.blocks(height):
        number = max(1, _BUFFER // len(matrix_io))
        for first in range(0, channels * width, number):
            lines = slice(first, first + number)
            resized_hl[outputs, lines] = _rounded(matrix_io.T @ pixels_hl[inputs, lines].astype(weights.dtype))
    return resized_hl.reshape(-1, channels, width).transpose(1, 0, 2)


def _rounded(values: np.ndarray) -> np.ndarray:
    """Return the values of pixels rounded to whole numbers from 0 to 255, halves up; the argument is overwritten."""
    values += values.dtype.type(0.5)
    return np.clip(values, 0, 255, out=values).astype(np.uint8)
