"""The interface of an opened checkpoint: a config, named tensors in the HF form, and a tokenizer.

Opening one reads headers and small files only, so that names and shapes are checked before any weight is fetched.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxllm.loading.mapped_file import FileSpan
from pallas_kernels.weights import HALVES, WeightFormat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from jaxllm.loading.sentence_transformers import SentenceFiles


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: the `shape` and `dtype` that `read` returns, and its `num_bytes` in the file."""

    shape: tuple[int, ...]
    dtype: str
    num_bytes: int = 0


class Checkpoint(ABC):
    """An opened model, on disk or on the hub. Tensors have HF's names and shapes ([out, in]) in every file format."""

    source: str
    """The model as the user named it."""
    config: dict[str, Any]
    """The config in the form of HF's config.json, with `architectures` set."""
    generation_config: dict[str, Any]
    image_processor: Mapping[str, Any] = MappingProxyType({})
    video_processor: Mapping[str, Any] = MappingProxyType({})
    """The settings of HF's processors of images and of videos; empty if the checkpoint has none."""
    audio_processor: Mapping[str, Any] = MappingProxyType({})
    """The settings of HF's feature extractor of sounds; empty if the checkpoint has none."""
    text_only: str = ""
    """Why a model reads text alone that could see, with the way out; "" for other models."""
    sentence_files: SentenceFiles | None = None
    """The settings of sentence-transformers in the model's folder; None if there are none."""
    tensors: Mapping[str, TensorInfo]
    is_gguf: bool
    """True for GGUF: its dtypes were chosen for storage and imply nothing about the compute dtype."""
    dtype: str
    """The floating-point dtype that most of the weights have, e.g. "bfloat16"."""
    spare: Collection[str] = ()
    """Tensors that some tools write needlessly: a model that does not know them ignores them."""

    @property
    def num_bytes(self) -> int:
        """The size of the stored tensors in bytes; 0 for a checkpoint that was opened without its weights."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    @property
    def weight_type(self) -> str:
        """The storage type of most of the weights: a dtype, a GGUF type, or a quantization method."""
        return self.dtype

    @abstractmethod
    def read(self, name: str, index: int | None = None) -> np.ndarray:
        """Return one tensor in its own dtype, as a read-only view of the file where possible.

        With `index`, return only that entry of the first axis (one expert of many), without decoding the others.
        """

    def format_of(self, name: str, num_inputs: int = 0) -> WeightFormat | None:
        """Return the format in which a matrix can be kept quantized; None if there is no such format.

        `num_inputs` is the length of its rows, for a checkpoint that was opened without its weights.
        """
        del name, num_inputs
        return None

    def read_part(self, name: str, part: str, index: int | None = None) -> np.ndarray:
        """Return one part of a quantized matrix, such as its codes or scales, as [..., out, width].

        Rows are always outputs, even where `read` returns inputs first; codes are not packed. `index` selects one
        expert. The matrix must have a format (see `format_of`).
        """
        where = "" if index is None else f" at {index}"
        raise ValueError(f"{self.source} has no part {part!r} of {name!r}{where}: it is not quantized")

    def input_order(self, name: str) -> np.ndarray | None:
        """Return the order of the inputs in the columns of a matrix's parts, int32 [in]; None if it is HF's order.

        The parts multiply `x[:, order]`.
        """
        del name
        return None

    @abstractmethod
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Build the tokenizer, chat template included. Code from the checkpoint is never run."""

    @abstractmethod
    def tokenizer_digest(self) -> str | None:
        """Return a digest of all files that `tokenizer` reads; None if one cannot be read."""

    def spans(self, name: str) -> Sequence[FileSpan]:
        """Return where the bytes of a fetched tensor are; () if that is not known."""
        del name
        return ()

    def release(self, name: str) -> None:  # noqa: B027 (nothing to let go of by default)
        """Mark the tensor as consumed; its pages may be dropped."""

    @property
    def is_local(self) -> bool:
        """Return whether the weights are on this machine, so that `fetch` has nothing to download."""
        return True

    def stamp(self) -> str:
        """Return a text that is another one when the weights are others, as far as names, sizes and times tell."""
        return f"{self.source} without weights"

    def fetch(self) -> None:  # noqa: B027 (nothing to fetch by default)
        """Download the weights, with progress shown. `read` may be called after this."""


class WrappedCheckpoint(Checkpoint):
    """A checkpoint whose tensors are made of those of another one, `inner`; its files are that one's."""

    def __init__(self, inner: Checkpoint) -> None:
        self._inner = inner
        self.source, self.config, self.generation_config = inner.source, inner.config, inner.generation_config
        self.is_gguf = inner.is_gguf

    @abstractmethod
    def _sources(self, name: str) -> Sequence[str]:
        """Return the names of the inner tensors that a tensor is made of."""

    def spans(self, name: str) -> Sequence[FileSpan]:
        return [span for source in self._sources(name) for span in self._inner.spans(source)]

    def release(self, name: str) -> None:
        for source in self._sources(name):
            self._inner.release(source)

    @property
    def is_local(self) -> bool:
        return self._inner.is_local

    def fetch(self) -> None:
        self._inner.fetch()

    def tokenizer(self) -> PreTrainedTokenizerFast:
        return self._inner.tokenizer()

    def tokenizer_digest(self) -> str | None:
        return self._inner.tokenizer_digest()

    def stamp(self) -> str:
        return self._inner.stamp()


def stamp_of(paths: Iterable[Path]) -> str:
    """Return the stamp of files: the name, the size, and the time of the last change of each."""
    stats = [(path.name, path.stat()) for path in sorted(paths)]
    return " ".join(f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats)


def held_format(checkpoint: Checkpoint, name: str, num_inputs: int = 0) -> WeightFormat | None:
    """Return the format in which a matrix can be kept in memory unchanged: quantized or 16-bit; None for others.

    A matrix that is not quantized, of a checkpoint that was opened without its weights, has the checkpoint's dtype.
    """
    form = checkpoint.format_of(name, num_inputs)
    if form is not None:
        return form
    info = checkpoint.tensors.get(name)
    dtype, is_matrix = (checkpoint.dtype, True) if info is None else (info.dtype, len(info.shape) > 1)
    return WeightFormat(16, values=dtype) if is_matrix and dtype in HALVES else None


def dominant_dtype(tensors: Iterable[TensorInfo], config: Mapping[str, Any]) -> str:
    """Return the float dtype of most elements; the config's if no tensor is a float; otherwise "float32"."""
    counts: Counter[str] = Counter()
    for tensor in tensors:
        if tensor.dtype in ("float32", "float64", "float16", "bfloat16"):
            counts[tensor.dtype] += int(np.prod(tensor.shape, dtype=np.float64))
    if counts:
        name = counts.most_common(1)[0][0]
        return "float32" if name == "float64" else name
    return stated_dtype(config) or "float32"


def stated_dtype(config: Mapping[str, Any]) -> str | None:
    """Return the dtype that a config names for the model, or None."""
    inner = config.get("text_config")
    inner = inner if isinstance(inner, Mapping) else {}
    stated = config.get("dtype") or config.get("torch_dtype") or inner.get("dtype") or inner.get("torch_dtype")
    return str(stated).removeprefix("torch.") if stated else None
