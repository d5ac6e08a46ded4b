"""MXFP4 for the tests, written as the format says: it shares no code with the readers."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

GPT_OSS = Path(__file__).parents[1] / "data" / "tiny" / "gpt_oss"
QUANTIZED = {
    "architectures": ["GptOssForCausalLM"],
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
}
MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
CODES = np.concatenate([MAGNITUDES, -MAGNITUDES])
BIAS = 127


def oracle(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return the bfloat16 numbers of blocks [..., b, 16] with scales [..., b]."""
    values = np.empty((*blocks.shape, 2), np.float64)
    values[..., 0], values[..., 1] = CODES[blocks % 16], CODES[blocks // 16]
    values *= 2.0 ** (scales.astype(np.float64)[..., None, None] - BIAS)
    with np.errstate(over="ignore"):
        return values.reshape(*blocks.shape[:-2], -1).astype(np.float32).astype(ml_dtypes.bfloat16)


def encode(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Round numbers [..., b * 32] to codes [..., b, 32] and scales [..., b], a block's largest to 4 or 6."""
    grouped = values.astype(np.float32).reshape(*values.shape[:-1], -1, 32)
    largest = np.maximum(np.abs(grouped).max(axis=-1), 2.0**-100)
    exponents = np.floor(np.log2(largest)) - 2
    nearest = np.abs(grouped[..., None] / 2.0 ** exponents[..., None, None] - CODES).argmin(axis=-1)
    return nearest.astype(np.uint8), (exponents + BIAS).astype(np.uint8)


def quantized(tensors: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return a gpt-oss with its experts stored in MXFP4, and the same numbers stored widened."""
    stored, widened = dict(tensors), dict(tensors)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        codes, scales = encode(stored.pop(name).swapaxes(1, 2))
        blocks = codes[..., 0::2] | codes[..., 1::2] << 4
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        widened[name] = np.ascontiguousarray(oracle(blocks, scales).swapaxes(1, 2))
    return stored, widened


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    """Read a folder's one file of bfloat16 tensors."""
    data = (folder / "model.safetensors").read_bytes()
    [size] = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            start, stop = (8 + size + offset for offset in entry["data_offsets"])
            dtype = {"BF16": np.dtype(ml_dtypes.bfloat16), "F32": np.dtype(np.float32)}[entry["dtype"]]
            tensors[name] = np.frombuffer(data[start:stop], dtype).reshape(entry["shape"])
    return tensors
