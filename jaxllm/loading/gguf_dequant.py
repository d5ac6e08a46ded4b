"""Turn block-quantized GGUF data into float32, vectorised over blocks.

Operations are in the order of the format's own reference, so that results are bitwise the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from jaxllm.loading.gguf import TensorType

CHUNK_NUMBERS = 1 << 17
"""How many numbers are dequantized at once, so that temporaries stay in the cache."""

_HALF = "<f2"
_NIBBLES = np.array([0, 4], np.uint8)[:, None]
_PAIRS = np.array([0, 2, 4, 6], np.uint8)[:, None]
_TWICE_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
_BITS = np.arange(8, dtype=np.uint8)[:, None]

_LAYOUTS: Mapping[str, np.dtype] = {
    "Q4_0": np.dtype([("d", _HALF), ("qs", "u1", 16)]),
    "Q4_1": np.dtype([("d", _HALF), ("m", _HALF), ("qs", "u1", 16)]),
    "Q5_0": np.dtype([("d", _HALF), ("qh", "u1", 4), ("qs", "u1", 16)]),
    "Q5_1": np.dtype([("d", _HALF), ("m", _HALF), ("qh", "u1", 4), ("qs", "u1", 16)]),
    "Q8_0": np.dtype([("d", _HALF), ("qs", "i1", 32)]),
    "Q2_K": np.dtype([("scales", "u1", 16), ("qs", "u1", 64), ("d", _HALF), ("dmin", _HALF)]),
    "Q3_K": np.dtype([("hmask", "u1", 32), ("qs", "u1", 64), ("scales", "u1", 12), ("d", _HALF)]),
    "Q4_K": np.dtype([("d", _HALF), ("dmin", _HALF), ("scales", "u1", 12), ("qs", "u1", 128)]),
    "Q5_K": np.dtype([("d", _HALF), ("dmin", _HALF), ("scales", "u1", 12), ("qh", "u1", 32), ("qs", "u1", 128)]),
    "MXFP4": np.dtype([("e", "u1"), ("qs", "u1", 16)]),
    "Q6_K": np.dtype([("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), ("d", _HALF)]),
}


def dequantize(kind: TensorType, data: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Return the float32 numbers of stored bytes `data`, uint8 [rows, row bytes], as [rows, row size]; into `out`."""
    num_rows = data.shape[0]
    row_size = data.shape[1] // kind.num_bytes * kind.block_size
    if out is None:
        out = np.empty((num_rows, row_size), np.float32)
    if kind.name not in _LAYOUTS:
        out[...] = _read_floats(kind, data)
        return out
    blocks = np.ascontiguousarray(data).reshape(-1).view(_LAYOUTS[kind.name])
    numbers = out.reshape(-1, kind.block_size)
    unpack = _UNPACKERS[kind.name]
    step = max(1, CHUNK_NUMBERS // kind.block_size)
    for start in range(0, len(blocks), step):
        unpack(blocks[start : start + step], numbers[start : start + step])
    return out


def _read_floats(kind: TensorType, data: np.ndarray) -> np.ndarray:
    """Read F32, F16 or BF16 rows as they are; the latter as float32, since numpy has no such type."""
    if kind.name == "F32":
        return data.view("<f4")
    if kind.name == "F16":
        return data.view(_HALF)
    return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _scale(blocks: np.ndarray, field: str) -> np.ndarray:
    """Return one float16 per block as float32 [blocks, 1]."""
    return blocks[field].astype(np.float32)[:, None]


def _nibbles(blocks: np.ndarray) -> np.ndarray:
    """Return 16 bytes per block as 32 numbers under 16: all low halves, then all high ones."""
    return ((blocks["qs"][:, None, :] >> _NIBBLES) & 15).reshape(len(blocks), 32)


def _fifth_bits(blocks: np.ndarray) -> np.ndarray:
    """Return the 32 bits of `qh` per block, each times 16."""
    return np.unpackbits(blocks["qh"], axis=-1, bitorder="little") << 4


def _unpack_q4_0(blocks: np.ndarray, out: np.ndarray) -> None:
    np.multiply(_scale(blocks, "d"), _nibbles(blocks).view(np.int8) - np.int8(8), out=out)


def _unpack_q4_1(blocks: np.ndarray, out: np.ndarray) -> None:
    np.multiply(_scale(blocks, "d"), _nibbles(blocks), out=out)
    out += _scale(blocks, "m")


def _unpack_q5_0(blocks: np.ndarray, out: np.ndarray) -> None:
    quants = (_nibbles(blocks) | _fifth_bits(blocks)).view(np.int8) - np.int8(16)
    np.multiply(_scale(blocks, "d"), quants, out=out)


def _unpack_q5_1(blocks: np.ndarray, out: np.ndarray) -> None:
    np.multiply(_scale(blocks, "d"), _nibbles(blocks) | _fifth_bits(blocks), out=out)
    out += _scale(blocks, "m")


def _unpack_q8_0(blocks: np.ndarray, out: np.ndarray) -> None:
    np.multiply(blocks["qs"], _scale(blocks, "d"), out=out)


def _unpack_q2_k(blocks: np.ndarray, out: np.ndarray) -> None:
    num = len(blocks)
    scales = (_scale(blocks, "d") * (blocks["scales"] & 15))[..., None]
    mins = (_scale(blocks, "dmin") * (blocks["scales"] >> 4))[..., None]
    quants = (blocks["qs"].reshape(num, 2, 1, 32) >> _PAIRS) & 3
    view = out.reshape(num, 16, 16)
    np.multiply(scales, quants.reshape(num, 16, 16), out=view)
    view -= mins


def _unpack_q3_k(blocks: np.ndarray, out: np.ndarray) -> None:
    num = len(blocks)
    low = (blocks["scales"][:, None, :8] >> _NIBBLES).reshape(num, 16) & 15
    high = (blocks["scales"][:, None, 8:] >> _PAIRS).reshape(num, 16) & 3
    scales = _scale(blocks, "d") * ((low | (high << 4)).view(np.int8) - np.int8(32))
    quants = (blocks["qs"].reshape(num, 2, 1, 32) >> _PAIRS).reshape(num, 256) & 3
    # A cleared mask bit means four less.
    offsets = ((~blocks["hmask"][:, None, :] >> _BITS) & 1).reshape(num, 256) << 2
    values = (quants.view(np.int8) - offsets.view(np.int8)).reshape(num, 16, 16)
    np.multiply(scales[..., None], values, out=out.reshape(num, 16, 16))


def _six_bit_scales(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the eight scales and eight minimums, six bits each, that Q4_K and Q5_K pack in twelve bytes."""
    scale, least, rest = (blocks["scales"][:, start : start + 4] for start in (0, 4, 8))
    scales = np.concatenate([scale & 63, (rest & 15) | ((scale >> 2) & 48)], axis=-1)
    mins = np.concatenate([least & 63, (rest >> 4) | ((least >> 2) & 48)], axis=-1)
    return (_scale(blocks, "d") * scales)[..., None], (_scale(blocks, "dmin") * mins)[..., None]


def _unpack_q4_k(blocks: np.ndarray, out: np.ndarray) -> None:
    num = len(blocks)
    scales, mins = _six_bit_scales(blocks)
    quants = (blocks["qs"].reshape(num, 4, 1, 32) >> _NIBBLES) & 15
    view = out.reshape(num, 8, 32)
    np.multiply(scales, quants.reshape(num, 8, 32), out=view)
    view -= mins


def _unpack_q5_k(blocks: np.ndarray, out: np.ndarray) -> None:
    num = len(blocks)
    scales, mins = _six_bit_scales(blocks)
    low = ((blocks["qs"].reshape(num, 4, 1, 32) >> _NIBBLES) & 15).reshape(num, 8, 32)
    high = ((blocks["qh"][:, None, :] >> _BITS) & 1) << 4
    view = out.reshape(num, 8, 32)
    np.multiply(scales, low | high, out=view)
    view -= mins


def _unpack_q6_k(blocks: np.ndarray, out: np.ndarray) -> None:
    num = len(blocks)
    scales = (_scale(blocks, "d") * blocks["scales"])[..., None]
    low = ((blocks["ql"].reshape(num, 2, 1, 64) >> _NIBBLES) & 15).reshape(num, 256)
    high = ((blocks["qh"].reshape(num, 2, 1, 32) >> _PAIRS) & 3).reshape(num, 256) << 4
    values = ((low | high).view(np.int8) - np.int8(32)).reshape(num, 16, 16)
    np.multiply(scales, values, out=out.reshape(num, 16, 16))


def _unpack_mxfp4(blocks: np.ndarray, out: np.ndarray) -> None:
    # Twice each number is an integer, and half the scale has an exponent in range whatever the byte.
    scales = np.ldexp(np.float32(1), blocks["e"].astype(np.int32) - 128)[:, None]
    with np.errstate(over="ignore"):
        np.multiply(scales, _TWICE_E2M1[_nibbles(blocks)], out=out)


_UNPACKERS: Mapping[str, Callable[[np.ndarray, np.ndarray], None]] = {
    "Q4_0": _unpack_q4_0,
    "Q4_1": _unpack_q4_1,
    "Q5_0": _unpack_q5_0,
    "Q5_1": _unpack_q5_1,
    "Q8_0": _unpack_q8_0,
    "Q2_K": _unpack_q2_k,
    "Q3_K": _unpack_q3_k,
    "Q4_K": _unpack_q4_k,
    "Q5_K": _unpack_q5_k,
    "Q6_K": _unpack_q6_k,
    "MXFP4": _unpack_mxfp4,
}
