"""A checkpoint in one .gguf file: config, tokenizer and weights, the weights with their HF names and values."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from jaxllm.exceptions import VLLMValidationError
from jaxllm.loading import gguf_config
from jaxllm.loading.checkpoint import Checkpoint, TensorInfo, dominant_dtype
from jaxllm.loading.gguf import GGUFFile
from jaxllm.loading.gguf_dequant import dequantize

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_FLOATS = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}


class GGUFCheckpoint(Checkpoint):
    """A GGUF file. Raises VLLMValidationError if it is corrupt or holds something that is not supported."""

    def __init__(self, path: Path, *, source: str = "") -> None:
        self.source = source or str(path)
        self._path = path
        try:
            self._file = GGUFFile(path)
            self._arch = gguf_config.architecture(self._file)
            self.config = gguf_config.hf_config(self._file)
            self.generation_config = gguf_config.generation_config(self._file)
        except (OSError, ValueError) as error:
            raise VLLMValidationError(f"{path}: {error}.", parameter="model", value=self.source) from error
        self._names = {
            gguf_config.hf_name(name, self._arch): name
            for name in self._file.tensors
            if name not in gguf_config.IGNORED_NAMES
        }
        self.tensors = {name: self._info(theirs) for name, theirs in self._names.items()}
        self.is_gguf = True
        self.dtype = dominant_dtype(self.tensors.values(), self.config)

    def read(self, name: str, index: int | None = None) -> np.ndarray:
        values = self._values(name)
        return values if index is None else values[index]

    def _values(self, name: str) -> np.ndarray:
        theirs = self._names[name]
        tensor = self._file.tensors[theirs]
        data = self._file.data(theirs)
        if self._arch in gguf_config.PERMUTED_ARCHITECTURES and ".attn_q." in theirs:
            data = self._unpermute(data, tensor.shape[0], self.config["num_attention_heads"])
        elif self._arch in gguf_config.PERMUTED_ARCHITECTURES and ".attn_k." in theirs:
            data = self._unpermute(data, tensor.shape[0], self.config["num_key_value_heads"])
        if tensor.type.name in _FLOATS:
            values = data.view(_FLOATS[tensor.type.name]).reshape(tensor.shape)
        else:
            values = dequantize(tensor.type, data).reshape(tensor.shape)
        if self._arch in gguf_config.OFFSET_NORM_ARCHITECTURES and theirs.endswith("norm.weight"):
            return values - values.dtype.type(1)
        return values

    def release(self, name: str) -> None:
        self._file.release(self._names[name])

    def tokenizer(self) -> PreTrainedTokenizerFast:
        from jaxllm.loading.gguf_tokenizer import build_tokenizer

        try:
            return build_tokenizer(self._file)
        except ValueError as error:
            raise VLLMValidationError(
                f"{self._path}: {error}. Give another tokenizer with tokenizer=..., "
                "or set skip_tokenizer_init=True and pass token ids.",
                parameter="tokenizer",
                value=self.source,
            ) from error

    def tokenizer_digest(self) -> str:
        # Ours is the code that reads it.
        digest = hashlib.sha256(self._file.metadata_digest().encode())
        for name in ("gguf.py", "gguf_tokenizer.py"):
            digest.update(Path(__file__).with_name(name).read_bytes())
        return digest.hexdigest()

    def _info(self, theirs: str) -> TensorInfo:
        tensor = self._file.tensors[theirs]
        dtype = _FLOATS.get(tensor.type.name, np.dtype(np.float32))
        return TensorInfo(tensor.shape, dtype.name, tensor.num_bytes)

    @staticmethod
    def _unpermute(data: np.ndarray, num_rows: int, num_heads: int) -> np.ndarray:
        """Undo the converter's interleaving of each head's halves; `data` is [rows, bytes], or one row of a bias."""
        shape = data.shape
        if num_rows % (2 * num_heads):
            raise ValueError(f"{num_rows} rows are not {num_heads} heads of an even size")
        rows = data.reshape(num_heads, num_rows // num_heads // 2, 2, -1)
        return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(shape)
