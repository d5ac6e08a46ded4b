"""Quantized matrices in numpy: packing, unpacking, and the definition of the numbers that their parts represent."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .format import CHUNK, PLANES, WeightFormat


def dequantize(parts: Mapping[str, np.ndarray], form: WeightFormat) -> np.ndarray:
    """Return the float32 numbers [..., out, in] that a matrix's parts represent; the codes are not packed.

    Integers and scales have so few bits that their products are exact, except with float32 scales. Each number is
    rounded once.
    """
    codes = parts["codes"]
    values = form.table()[codes] if form.is_packed else codes.astype(np.float32)
    if form.is_half:
        return values
    num_inputs = codes.shape[-1]
    scales = _spread(parts["scales"], num_inputs)
    if "scale_factors" in parts:
        scales = scales * _spread(parts["scale_factors"], num_inputs)
    numbers = values * scales
    if "mins" in parts:
        mins = _spread(parts["mins"], num_inputs)
        if "min_factors" in parts:
            mins = mins * _spread(parts["min_factors"], num_inputs)
        return numbers - mins
    if "zeros" in parts:
        return numbers - _spread(parts["zeros"], num_inputs) * scales
    return numbers


def _spread(part: np.ndarray, num_inputs: int) -> np.ndarray:
    """Repeat a part's entry of each group for every number of the group."""
    return np.repeat(part.astype(np.float32), num_inputs // part.shape[-1], axis=-1)


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Pack codes of `bits` bits, uint8 [..., in], into bytes [..., in * bits / 8], chunk by chunk.

    A chunk of 64 codes is one plane of bits after the other. The plane of 4 bits has 32 bytes: the low halves are those
    of codes 0 to 31, the high ones those of codes 32 to 63. The plane of 2 bits has 16 bytes: byte i has those of codes
    i, 16 + i, 32 + i and 48 + i, the lowest first. The plane of 1 bit has 8 bytes, code i's in bit i of them all.
    """
    if bits == 8:
        return codes
    chunks = codes.reshape(*codes.shape[:-1], -1, CHUNK)
    planes, low = [], 0
    for width in PLANES[bits]:
        plane = (chunks >> low) & ((1 << width) - 1)
        low += width
        planes.append(np.packbits(plane, axis=-1, bitorder="little") if width == 1 else _join(plane, width))
    return np.concatenate(planes, axis=-1).reshape(*codes.shape[:-1], -1)


def unpack(packed: np.ndarray, bits: int) -> np.ndarray:
    """Return the codes that `pack` packed."""
    if bits == 8:
        return packed
    chunks = packed.reshape(*packed.shape[:-1], -1, CHUNK * bits // 8)
    codes = np.zeros((*chunks.shape[:-1], CHUNK), np.uint8)
    start = low = 0
    for width in PLANES[bits]:
        stop = start + CHUNK * width // 8
        plane = chunks[..., start:stop]
        bits_of_plane = np.unpackbits(plane, axis=-1, bitorder="little") if width == 1 else _cut(plane, width)
        codes |= bits_of_plane << low
        start, low = stop, low + width
    return codes.reshape(*packed.shape[:-1], -1)


def _join(plane: np.ndarray, width: int) -> np.ndarray:
    """Return bytes that hold a chunk's numbers of `width` bits, several in each."""
    per_byte = 8 // width
    parts = plane.reshape(*plane.shape[:-1], per_byte, CHUNK // per_byte)
    joined = parts[..., 0, :].copy()
    for index in range(1, per_byte):
        joined |= parts[..., index, :] << (width * index)
    return joined


def _cut(joined: np.ndarray, width: int) -> np.ndarray:
    """Return the numbers that `_join` joined."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    return ((joined[..., None, :] >> shifts) & ((1 << width) - 1)).reshape(*joined.shape[:-1], CHUNK)
