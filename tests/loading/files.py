"""Writers of small checkpoint files, written for the tests: they share no code with the readers."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxllm.models.params import ParamSpec

SAFETENSORS_NAMES = {
    np.dtype(np.float32): "F32",
    np.dtype(np.float16): "F16",
    np.dtype(np.float64): "F64",
    np.dtype(ml_dtypes.bfloat16): "BF16",
    np.dtype(ml_dtypes.float8_e4m3fn): "F8_E4M3",
    np.dtype(ml_dtypes.float8_e8m0fnu): "F8_E8M0",
    np.dtype(np.int8): "I8",
    np.dtype(np.uint8): "U8",
    np.dtype(np.int32): "I32",
    np.dtype(np.int64): "I64",
    np.dtype(np.bool_): "BOOL",
}
# Value types of GGUF metadata.
UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64 = 4, 5, 6, 7, 8, 9, 10
_FORMATS = {UINT32: "<I", INT32: "<i", FLOAT32: "<f", BOOL: "<B", UINT64: "<Q"}
F32, F16, Q8_0 = 0, 1, 8


def safetensors_bytes(tensors: Mapping[str, np.ndarray]) -> bytes:
    """Return a safetensors file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, tensor in tensors.items():
        offsets = [start, start + tensor.nbytes]
        header[name] = {"dtype": SAFETENSORS_NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": offsets}
        start += tensor.nbytes
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(tensor.tobytes() for tensor in tensors.values())


def gguf_string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def gguf_value(value: Any) -> bytes:
    """Return a typed value: str, bool, int, float, or a list of one of these."""
    if isinstance(value, list):
        kind, _ = _typed(value[0])
        items = b"".join(_typed(item)[1] for item in value)
        return struct.pack("<IIQ", ARRAY, kind, len(value)) + items
    kind, data = _typed(value)
    return struct.pack("<I", kind) + data


def _typed(value: Any) -> tuple[int, bytes]:
    if isinstance(value, str):
        return STRING, gguf_string(value)
    kind = BOOL if isinstance(value, bool) else INT32 if isinstance(value, int) and value < 0 else UINT32
    kind = FLOAT32 if isinstance(value, float) else kind
    return kind, struct.pack(_FORMATS[kind], value)


def gguf_bytes(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, tuple[int, Sequence[int], bytes]],
    *,
    version: int = 3,
    alignment: int = 32,
) -> bytes:
    """Return a GGUF file; a tensor is (type, shape outermost first, stored bytes)."""
    out = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, value in metadata.items():
        out += gguf_string(key) + gguf_value(value)
    offset, data = 0, b""
    for name, (kind, shape, stored) in tensors.items():
        dims = list(shape)[::-1]
        out += gguf_string(name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims) + struct.pack("<IQ", kind, offset)
        data += stored + b"\0" * (-len(stored) % alignment)
        offset = len(data)
    return out + b"\0" * (-len(out) % alignment) + data


def gguf_f32(tensors: Mapping[str, np.ndarray]) -> dict[str, tuple[int, Sequence[int], bytes]]:
    """Return the tensors as F32 entries for `gguf_bytes`."""
    return {name: (F32, tensor.shape, tensor.astype(np.float32).tobytes()) for name, tensor in tensors.items()}


def llama_metadata(arch: str = "llama", more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the metadata of a tiny model: width 8, 2 heads of 4, 1 kv head, 1 layer, 6 tokens."""
    values = {
        "block_count": 1,
        "context_length": 64,
        "embedding_length": 8,
        "feed_forward_length": 12,
        "attention.head_count": 2,
        "attention.head_count_kv": 1,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
        "attention.key_length": 4,
    }
    return {"general.architecture": arch} | {
        f"{arch}.{key}": value for key, value in (values | dict(more or {})).items()
    }


def write_folder(folder: Path, tensors: Mapping[str, np.ndarray], config: Mapping[str, Any] | None = None) -> Path:
    """Write a folder with one safetensors file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or {"architectures": ["LlamaForCausalLM"]}))
    (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    return folder


def write_sharded_folder(folder: Path, shards: Mapping[str, Mapping[str, np.ndarray]]) -> Path:
    """Write a folder of several safetensors files and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    for name, tensors in shards.items():
        (folder / name).write_bytes(safetensors_bytes(tensors))
    weight_map = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def spec(
    shape: tuple[int, ...], sources: Sequence[str], layout: str, hf_shape: tuple[int, ...], *, stacked: bool, dtype: Any
) -> ParamSpec:
    """Return the spec of one parameter."""
    axes: tuple[str | None, ...] = ("layers",) if stacked else ()
    return ParamSpec(
        shape, np.dtype(dtype), axes + (None,) * (len(shape) - len(axes)), tuple(sources), layout, hf_shape
    )
