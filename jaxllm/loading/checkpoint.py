"""A checkpoint is to the rest a config, named tensors in the HF form, and a tokenizer.

Opening one reads headers and small files only, so that names and shapes are checked before any weight is fetched.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pallas_kernels.weights import HALVES, WeightFormat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from jaxllm.loading.sentence_transformers import SentenceFiles


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: `shape` and `dtype` are those that `read` returns, `num_bytes` what it takes in the file."""

    shape: tuple[int, ...]
    dtype: str
    num_bytes: int = 0


class Checkpoint(ABC):
    """A model on disk or on the hub, opened. Tensors have HF's names and shapes ([out, in]) wherever they are from."""

    source: str
    """The model as the user named it."""
    config: dict[str, Any]
    """The config in the form of HF's config.json, `architectures` filled."""
    generation_config: dict[str, Any]
    sentence_files: SentenceFiles | None = None
    """What sentence-transformers says of the model; None if nothing."""
    tensors: Mapping[str, TensorInfo]
    is_gguf: bool
    """True for GGUF, whose dtypes were chosen to store the weights, and say nothing about computing."""
    dtype: str
    """The floating-point dtype that most of the weights have, e.g. "bfloat16"."""
    spare: Collection[str] = ()
    """Tensors that tools write for nothing: a model that knows none of them does without."""

    @property
    def num_bytes(self) -> int:
        """The size of the stored tensors in bytes; 0 for a checkpoint that was opened without its weights."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    @property
    def weight_type(self) -> str:
        """The name of what most of the weights are stored as: a dtype, a type of GGUF, or a method of quantization."""
        return self.dtype

    @abstractmethod
    def read(self, name: str, index: int | None = None) -> np.ndarray:
        """Return one tensor in its own dtype, as a read-only view of the file where that is possible.

        With `index` it is what the tensor has there on its first axis, and no more is worked out: one expert of many.
        """

    def format_of(self, name: str, num_inputs: int = 0) -> WeightFormat | None:
        """Return what a matrix is held as; None if it is stored as plain numbers, or in no form that can be kept.

        `num_inputs` is the length of its rows, for a checkpoint that was opened without its weights.
        """
        del name, num_inputs
        return None

    def read_part(self, name: str, part: str, index: int | None = None) -> np.ndarray:
        """Return one of the parts that a matrix is held as, [..., out, width], for a name that has a format.

        Rows are outputs, whichever way round `read` has them; codes are not packed. With `index` it is one expert's.
        """
        where = "" if index is None else f" at {index}"
        raise ValueError(f"{self.source} has no part {part!r} of {name!r}{where}: it is not quantized")

    def input_order(self, name: str) -> np.ndarray | None:
        """Return the order of the inputs that a matrix's parts have their columns in, int32 [in]; None if it is HF's.

        `x[:, order]` is what the parts multiply.
        """
        del name
        return None

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


def held_format(checkpoint: Checkpoint, name: str, num_inputs: int = 0) -> WeightFormat | None:
    """Return what a matrix can be held as, as it is: quantized, or numbers of 16 bits; None for others.

    The dtype of a checkpoint that was opened without its weights stands for those that are not quantized.
    """
    form = checkpoint.format_of(name, num_inputs)
    if form is not None:
        return form
    info = checkpoint.tensors.get(name)
    dtype, is_matrix = (checkpoint.dtype, True) if info is None else (info.dtype, len(info.shape) > 1)
    return WeightFormat(16, values=dtype) if is_matrix and dtype in HALVES else None


def dominant_dtype(tensors: Iterable[TensorInfo], config: Mapping[str, Any]) -> str:
    """Return the float dtype of most elements; the config's where no tensor is a float; else "float32"."""
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
