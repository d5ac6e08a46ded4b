"""GGUF files with vision towers, as llama.cpp's converter writes them, and changed copies of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.loading.gguf.file import TENSOR_TYPES, GGUFFile
from tests.loading.files import gguf_bytes

VISION = Path(__file__).parents[1] / "data" / "gguf" / "vision"
MEDIA = Path(__file__).parents[1] / "data" / "media"
FAMILIES = ("gemma3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
Stored = tuple[int, tuple[int, ...], bytes]


def text_file(family: str) -> Path:
    """Return the path of a family's text model."""
    return VISION / family / f"{family}.gguf"


def tower_file(family: str) -> Path:
    """Return the path of a family's vision tower."""
    return VISION / family / f"mmproj-{family}.gguf"


def changed(
    path: Path,
    *,
    metadata: Mapping[str, Any] | None = None,
    without: tuple[str, ...] = (),
    change: Callable[[dict[str, Stored]], None] = lambda _tensors: None,
) -> bytes:
    """Return the bytes of a file with other metadata or tensors."""
    file = GGUFFile(path)
    values = {key: _value(file, key) for key in file.keys if key not in without} | dict(metadata or {})
    numbers = {kind.name: number for number, kind in TENSOR_TYPES.items()}
    tensors: dict[str, Stored] = {
        name: (numbers[tensor.type.name], tensor.shape, file.data(name).tobytes())
        for name, tensor in file.tensors.items()
        if name not in without
    }
    change(tensors)
    return gguf_bytes(values, tensors)


def write_beside(folder: Path, family: str, towers: Mapping[str, bytes], text: bytes | None = None) -> Path:
    """Write a family's text model and files with towers into a folder; return the path of the text model."""
    path = folder / "model.gguf"
    path.write_bytes(text_file(family).read_bytes() if text is None else text)
    for name, data in towers.items():
        (folder / name).write_bytes(data)
    return path


def general_name(name: str) -> str:
    """Return the name that a tensor of HF has in every version of HF."""
    for theirs, ours in (
        ("language_model.model.", "model."),
        ("model.language_model.", "model."),
        ("model.visual.", "visual."),
        ("vision_tower.vision_model.", "vision_tower."),
    ):
        name = name.replace(theirs, ours)
    return name


def _value(file: GGUFFile, key: str) -> Any:
    if not file.is_array(key):
        return file.value(key, object)
    try:
        values = file.array(key)
    except ValueError:
        return file.strings(key)
    return values.tolist() if isinstance(values, np.ndarray) else values
