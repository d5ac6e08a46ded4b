"""Split block-quantized GGUF data into codes, scales and mins, and give the `WeightFormat` of each type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import ml_dtypes
import numpy as np

from jaxllm.loading.gguf.file import TensorType
from pallas_kernels.weights import WeightFormat

CHUNK_NUMBERS = 1 << 17
"""The number of elements decoded at once, so that temporaries stay in the cache."""

_BLOCK = WeightFormat(4, 32, offset=8)
_SUPER = WeightFormat(4, 32, scale_dtype="uint8", has_mins=True, factor_group=256)
_SIGNED = WeightFormat(6, 16, offset=32, scale_dtype="int8", factor_group=256)
FORMATS: Mapping[str, WeightFormat] = {
    "Q4_0": _BLOCK,
    "Q4_1": replace(_BLOCK, offset=0, has_mins=True),
    "Q5_0": replace(_BLOCK, bits=5, offset=16),
    "Q5_1": replace(_BLOCK, bits=5, offset=0, has_mins=True),
    "Q8_0": replace(_BLOCK, bits=8, offset=0),
    "Q2_K": replace(_SUPER, bits=2, group=16),
    "Q3_K": replace(_SIGNED, bits=3, offset=4),
    "Q4_K": _SUPER,
    "Q5_K": replace(_SUPER, bits=5),
    "Q6_K": _SIGNED,
    "MXFP4": WeightFormat(4, 32, values="e2m1", scale_dtype="bfloat16"),
    "IQ4_NL": replace(_BLOCK, bits=8, offset=0),
    "IQ4_XS": replace(_SIGNED, bits=8, group=32, offset=0),
}
"""The format in which each quantized GGUF type is kept, by the type's name.

The 16 values of an IQ4 code are integers, so it is kept as 8-bit codes, for which every platform has kernels.
"""

_HALF = "<f2"
_NIBBLES = np.array([0, 4], np.uint8)[:, None]
_PAIRS = np.array([0, 2, 4, 6], np.uint8)[:, None]
_BITS = np.arange(8, dtype=np.uint8)[:, None]
_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)

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
    "IQ4_NL": np.dtype([("d", _HALF), ("qs", "u1", 16)]),
    "IQ4_XS": np.dtype([("d", _HALF), ("high", "<u2"), ("low", "u1", 4), ("qs", "u1", 128)]),
    "Q6_K": np.dtype([("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), ("d", _HALF)]),
}


def blocks_of(kind: TensorType, data: np.ndarray) -> np.ndarray:
    """Return stored bytes, uint8 [rows, row bytes], as an array of blocks with the fields of their type."""
    return np.ascontiguousarray(data).reshape(-1).view(_LAYOUTS[kind.name])


def read_part(kind: TensorType, data: np.ndarray, part: str) -> np.ndarray:
    """Return one part, [rows, width], of stored bytes `data`, uint8 [rows, row bytes]; codes are not packed.

    An MXFP4 scale byte of 255 is NaN, as in its standard; llama.cpp reads it as 2**128.
    """
    form, blocks = FORMATS[kind.name], blocks_of(kind, data)
    width = form.width(part, kind.block_size)
    out = np.empty((len(blocks), width), form.dtype(part))
    step = max(1, CHUNK_NUMBERS // kind.block_size)
    for start in range(0, len(blocks), step):
        out[start : start + step] = block_part(kind.name, blocks[start : start + step], part)
    return out.reshape(len(data), -1)


def block_part(name: str, blocks: np.ndarray, part: str) -> np.ndarray:
    """Return one part, [blocks, width], of blocks of type `name`."""
    if part == "codes":
        return _CODES[name](blocks)
    if part == "scale_factors":
        return blocks["d"][:, None]
    if part == "min_factors":
        return blocks["dmin"][:, None]
    return (_SCALES if part == "scales" else _MINS)[name](blocks)


def _nibbles(blocks: np.ndarray) -> np.ndarray:
    """Return 16 bytes per block as 32 codes: all low halves, then all high ones."""
    return ((blocks["qs"][:, None, :] >> _NIBBLES) & 15).reshape(len(blocks), 32)


def _five_bits(blocks: np.ndarray) -> np.ndarray:
    return _nibbles(blocks) | (np.unpackbits(blocks["qh"], axis=-1, bitorder="little") << 4)


def _pairs(blocks: np.ndarray) -> np.ndarray:
    """Return 64 bytes per block as 256 codes of two bits."""
    return ((blocks["qs"].reshape(-1, 2, 1, 32) >> _PAIRS) & 3).reshape(-1, 256)


def _q3_k(blocks: np.ndarray) -> np.ndarray:
    # A cleared mask bit subtracts four, which is the format's offset.
    return _pairs(blocks) | (((blocks["hmask"][:, None, :] >> _BITS) & 1) << 2).reshape(-1, 256)


def _q4_k(blocks: np.ndarray) -> np.ndarray:
    return ((blocks["qs"].reshape(-1, 4, 1, 32) >> _NIBBLES) & 15).reshape(-1, 256)


def _q5_k(blocks: np.ndarray) -> np.ndarray:
    return _q4_k(blocks) | (((blocks["qh"][:, None, :] >> _BITS) & 1) << 4).reshape(-1, 256)


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    low = ((blocks["ql"].reshape(-1, 2, 1, 64) >> _NIBBLES) & 15).reshape(-1, 256)
    return low | (((blocks["qh"].reshape(-1, 2, 1, 32) >> _PAIRS) & 3) << 4).reshape(-1, 256)


def _iq4(blocks: np.ndarray) -> np.ndarray:
    """Return 16 bytes per group of 32 as the integers of their 4-bit codes: all low halves, then all high ones."""
    return _IQ4[(blocks["qs"].reshape(len(blocks), -1, 1, 16) >> _NIBBLES) & 15].reshape(len(blocks), -1)


def _iq4_xs_scales(blocks: np.ndarray) -> np.ndarray:
    low = ((blocks["low"][:, :, None] >> _NIBBLES[:, 0]) & 15).reshape(-1, 8)
    high = (blocks["high"][:, None] >> np.arange(0, 16, 2, dtype=np.uint16)) & 3
    return (low | (high << 4)).astype(np.int8) - np.int8(32)


def _q3_k_scales(blocks: np.ndarray) -> np.ndarray:
    low = ((blocks["scales"][:, None, :8] >> _NIBBLES) & 15).reshape(-1, 16)
    high = ((blocks["scales"][:, None, 8:] >> _PAIRS) & 3).reshape(-1, 16)
    return (low | (high << 4)).view(np.int8) - np.int8(32)


def _six_bit_scales(blocks: np.ndarray) -> np.ndarray:
    """Return the eight 6-bit scales that twelve bytes hold together with eight mins."""
    scale, _, rest = (blocks["scales"][:, start : start + 4] for start in (0, 4, 8))
    return np.concatenate([scale & 63, (rest & 15) | ((scale >> 2) & 48)], axis=-1)


def _six_bit_mins(blocks: np.ndarray) -> np.ndarray:
    _, least, rest = (blocks["scales"][:, start : start + 4] for start in (0, 4, 8))
    return np.concatenate([least & 63, (rest >> 4) | ((least >> 2) & 48)], axis=-1)


def _half(blocks: np.ndarray) -> np.ndarray:
    return blocks["d"][:, None]


def _negated(blocks: np.ndarray) -> np.ndarray:
    return -blocks["m"][:, None]


_Unpack = Callable[[np.ndarray], np.ndarray]
_CODES: Mapping[str, _Unpack] = {
    "Q4_0": _nibbles,
    "Q4_1": _nibbles,
    "Q5_0": _five_bits,
    "Q5_1": _five_bits,
    "Q8_0": lambda blocks: blocks["qs"],
    "Q2_K": _pairs,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "MXFP4": _nibbles,
    "IQ4_NL": _iq4,
    "IQ4_XS": _iq4,
}
_SCALES: Mapping[str, _Unpack] = {
    **dict.fromkeys(("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL"), _half),
    "IQ4_XS": _iq4_xs_scales,
    "Q2_K": lambda blocks: blocks["scales"] & 15,
    "Q3_K": _q3_k_scales,
    "Q4_K": _six_bit_scales,
    "Q5_K": _six_bit_scales,
    "Q6_K": lambda blocks: blocks["scales"],
    "MXFP4": lambda blocks: blocks["e"].view(ml_dtypes.float8_e8m0fnu)[:, None].astype(ml_dtypes.bfloat16),
}
_MINS: Mapping[str, _Unpack] = {
    "Q4_1": _negated,
    "Q5_1": _negated,
    "Q2_K": lambda blocks: blocks["scales"] >> 4,
    "Q4_K": _six_bit_mins,
    "Q5_K": _six_bit_mins,
}
