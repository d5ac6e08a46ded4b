"""Decode block-quantized GGUF data to float32, vectorised over blocks.

Operations follow the order of the format's reference, so that results are bitwise the same.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from jaxllm.loading.gguf.file import TensorType
from jaxllm.loading.gguf.parts import CHUNK_NUMBERS, FORMATS, block_part, blocks_of

FLOATS = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
"""The types of tensors that are not quantized, and their dtypes."""


def decode(kind: TensorType, data: np.ndarray) -> np.ndarray:
    """Return the numbers of stored bytes `data`, uint8 [rows, row bytes]: in their own dtype, quantized as float32."""
    return data.view(FLOATS[kind.name]) if kind.name in FLOATS else dequantize(kind, data)


def dequantize(kind: TensorType, data: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Return the float32 numbers of stored bytes `data`, uint8 [rows, row bytes], as [rows, row size].

    They are written into `out` if it is passed.
    """
    num_rows = data.shape[0]
    row_size = data.shape[1] // kind.num_bytes * kind.block_size
    if out is None:
        out = np.empty((num_rows, row_size), np.float32)
    if kind.name not in FORMATS:
        out[...] = _read_floats(kind, data)
        return out
    blocks = blocks_of(kind, data)
    numbers = out.reshape(-1, kind.block_size)
    step = max(1, CHUNK_NUMBERS // kind.block_size)
    for start in range(0, len(blocks), step):
        _unpack(kind.name, blocks[start : start + step], numbers[start : start + step])
    return out


def _read_floats(kind: TensorType, data: np.ndarray) -> np.ndarray:
    """Read F32, F16 or BF16 rows; BF16 becomes float32, since numpy has no such type."""
    if kind.name == "F32":
        return data.view("<f4")
    if kind.name == "F16":
        return data.view("<f2")
    return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _unpack(name: str, blocks: np.ndarray, out: np.ndarray) -> None:
    form = FORMATS[name]
    codes = block_part(name, blocks, "codes")
    values = codes.view(np.int8) if form.values == "integer" else form.table()[codes]
    if form.offset:
        values = values - np.int8(form.offset)
    scales = _scales(name, blocks, "scale")
    groups = out.reshape(*scales.shape[:2], -1)
    with np.errstate(over="ignore"):  # MXFP4's range exceeds float32's
        np.multiply(values.reshape(groups.shape), scales, out=groups)
    if form.has_mins:
        groups -= _scales(name, blocks, "min")


def _scales(name: str, blocks: np.ndarray, which: str) -> np.ndarray:
    """Return the scales or the mins, float32 [blocks, groups, 1], multiplied by their factors."""
    scales = block_part(name, blocks, f"{which}s").astype(np.float32)
    if FORMATS[name].factor_group is not None:
        scales *= block_part(name, blocks, f"{which}_factors").astype(np.float32)
    return scales[..., None]
