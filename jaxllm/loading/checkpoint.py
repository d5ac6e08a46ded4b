"""What a checkpoint is to the rest: a config, named tensors in the HF form, and a tokenizer.

Opening one reads headers and small files only, so that names and shapes are checked before any weight is fetched.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxllm.exceptions import VLLMValidationError
from jaxllm.validation import shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: `shape` and `dtype` are those that `read` returns, `num_bytes` what it takes in the file."""

    shape: tuple[int, ...]
    dtype: str
    num_bytes: int = 0


class Checkpoint(ABC):
    """A model on disk or on the hub, opened. Tensors have HF's names and shapes ([out, in]) wherever they are from."""

    source: str
    """What the user asked for."""
    config: dict[str, Any]
    """In the form of a HF config.json, `architectures` filled."""
    generation_config: dict[str, Any]
    tensors: Mapping[str, TensorInfo]
    is_gguf: bool
    """Its dtypes were chosen to store the weights, and say nothing about computing."""
    dtype: str
    """The floating-point dtype that most of the weights have, e.g. "bfloat16"."""

    @abstractmethod
    def read(self, name: str) -> np.ndarray:
        """Return one tensor in its own dtype, as a read-only view of the file where that is possible."""

    @abstractmethod
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Build the tokenizer, chat template included. Code from the checkpoint is never run."""

    @abstractmethod
    def tokenizer_digest(self) -> str | None:
        """Return a digest of all that `tokenizer` makes it from; None if that cannot be told."""

    def release(self, name: str) -> None:  # noqa: B027 (nothing to let go of by default)
        """Say that the tensor was consumed; its pages may be dropped."""

    def fetch(self) -> None:  # noqa: B027 (nothing to fetch by default)
        """Bring the weights here, with progress shown. `read` may be called after this."""


def dominant_dtype(tensors: Iterable[TensorInfo], config: Mapping[str, Any]) -> str:
    """Return the float dtype of most elements; the config's where no tensor is a float; else "float32"."""
    counts: Counter[str] = Counter()
    for tensor in tensors:
        if tensor.dtype in ("float32", "float64", "float16", "bfloat16"):
            counts[tensor.dtype] += int(np.prod(tensor.shape, dtype=np.float64))
    if counts:
        name = counts.most_common(1)[0][0]
        return "float32" if name == "float64" else name
    inner = config.get("text_config") or {}
    stated = config.get("dtype") or config.get("torch_dtype") or inner.get("dtype") or inner.get("torch_dtype")
    return str(stated).removeprefix("torch.") if stated else "float32"


def open_checkpoint(
    model: str,
    *,
    load_format: str = "auto",
    revision: str | None = None,
    token: str | bool | None = None,
    download_dir: str | None = None,
) -> Checkpoint:
    """Open `model`: a folder, a .gguf file, or a hub id ("org/name", "org/name:Q4_K_M" for one GGUF file of many).

    Raises VLLMValidationError if it cannot be found or read, or if the load format is not supported.
    """
    if load_format not in LOAD_FORMATS:
        raise VLLMValidationError(
            f"load_format={load_format!r} is not supported. Choose one of {', '.join(LOAD_FORMATS)}; "
            "convert other weights to safetensors first.",
            parameter="load_format",
            value=load_format,
        )
    path = _local_path(model)
    if path is None:
        from jaxllm.loading.hub import open_hub

        return open_hub(model, load_format=load_format, revision=revision, token=token, download_dir=download_dir)
    if path.is_dir():
        from jaxllm.loading.folder import open_folder

        return open_folder(path, load_format=load_format)
    return _open_file(path, load_format)


def open_config(
    model: str,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    download_dir: str | None = None,
) -> Checkpoint:
    """Open what a model says of itself, without weights: `model` is as above, or a config.json by its path.

    Raises VLLMValidationError if it cannot be found or read.
    """
    path = _local_path(model)
    if path is None:
        from jaxllm.loading.hub import open_hub_config

        return open_hub_config(model, revision=revision, token=token, download_dir=download_dir)
    if path.suffix == ".json" and path.is_file():
        from jaxllm.loading.folder import ConfigCheckpoint

        return ConfigCheckpoint(path.parent, source=model, name=path.name)
    return open_checkpoint(model, load_format="dummy")


def _local_path(model: str) -> Path | None:
    """Return the folder or file that `model` names, or None if it can only be meant as a hub id."""
    try:
        path = Path(model).expanduser()
        if path.is_dir() or path.is_file():
            return path
    except (OSError, RuntimeError):  # too long for a name, or the home folder of an unknown user
        pass
    if _looks_like_path(model):
        raise VLLMValidationError(
            f"model={shown(model)} is neither a folder nor a file here, nor the form of a hub id (org/name).",
            parameter="model",
            value=model,
        )
    return None


def _open_file(path: Path, load_format: str) -> Checkpoint:
    """Open a single file, which has to be GGUF: it alone carries its own config and tokenizer."""
    with path.open("rb") as file:
        is_gguf = path.suffix == ".gguf" or file.read(4) == b"GGUF"
    if not is_gguf or load_format == "safetensors":
        raise VLLMValidationError(
            f"model={str(path)!r} is a single file, and only a .gguf file carries its config and tokenizer; "
            "give the folder that holds config.json and the weights.",
            parameter="model",
            value=str(path),
        )
    from jaxllm.loading.folder import DummyCheckpoint
    from jaxllm.loading.gguf_checkpoint import GGUFCheckpoint

    checkpoint = GGUFCheckpoint(path)
    return DummyCheckpoint(checkpoint) if load_format == "dummy" else checkpoint


def _looks_like_path(model: str) -> bool:
    """Whether `model` can only be meant as a path: a hub id is "name" or "org/name", with no dots alone or suffix."""
    parts = model.split("/")
    return (
        model.startswith((".", "/", "~"))
        or len(parts) > 2
        or "" in parts
        or "\\" in model
        or model.endswith((".gguf", ".safetensors", ".bin", ".pt"))
    )
