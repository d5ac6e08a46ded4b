"""A checkpoint in a .gguf file, or in several parts: config, tokenizer and weights, with HF's names and values."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from jaxllm.exceptions import VLLMValidationError
from jaxllm.loading.checkpoint import Checkpoint, TensorInfo, dominant_dtype
from jaxllm.loading.gguf import config as gguf_config
from jaxllm.loading.gguf import parts as gguf_parts
from jaxllm.loading.gguf.dequant import dequantize
from jaxllm.loading.gguf.file import GGUFTensor
from jaxllm.loading.gguf.names import OFFSET_NORM_ARCHITECTURES, Source, find_sources, find_zeros
from jaxllm.loading.gguf.split_files import open_gguf

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from pallas_kernels.weights import WeightFormat

_FLOATS = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}


class GGUFCheckpoint(Checkpoint):
    """A GGUF file, or all parts of a split one, opened by the first part.

    Raises VLLMValidationError if it is corrupt or uses an unsupported feature.
    """

    def __init__(self, path: Path, *, source: str = "") -> None:
        self.source = source or str(path)
        self._path = path
        try:
            self._file = open_gguf(path)
            self._arch = gguf_config.architecture(self._file)
            special = gguf_config.special_tokens(self._file)
            self.config = gguf_config.hf_config(self._file, special)
            self.generation_config = gguf_config.generation_config(special)
        except (OSError, ValueError) as error:
            raise VLLMValidationError(f"{path}: {error}.", parameter="model", value=self.source) from error
        num_layers = self.config["num_hidden_layers"]
        drafts = range(num_layers, num_layers + gguf_config.num_draft_layers(self._file))
        self._sources = find_sources(self._file.tensors, self._arch, drafts)
        self.tensors = {name: self._info(source) for name, source in self._sources.items()}
        self.is_gguf = True
        self._zeros = find_zeros(self._file.tensors, self._arch, drafts)
        self.tensors |= {name: TensorInfo((length,), "float32") for name, length in self._zeros.items()}
        self.dtype = dominant_dtype(self.tensors.values(), self.config)

    def read(self, name: str, index: int | None = None) -> np.ndarray:
        if name in self._zeros:
            values = np.zeros(self._zeros[name], np.float32)
            return values if index is None else values[index]
        source = self._sources[name]
        if source.has_experts and source.expert is None:
            return self._experts(source, index)
        if source.expert is not None:
            values = self._experts(source, source.expert)
        else:
            values = self._values(source.names[0])
            values = values.T if source.transposed else values
        return values if index is None else values[index]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self._file.tensors.values())

    @property
    def weight_type(self) -> str:
        sizes: Counter[str] = Counter()
        for tensor in self._file.tensors.values():
            sizes[tensor.type.name] += tensor.num_bytes
        return sizes.most_common(1)[0][0]

    def format_of(self, name: str, num_inputs: int = 0) -> WeightFormat | None:
        del num_inputs
        source = self._sources.get(name)
        if source is None or (source.transposed and not source.has_experts):
            return None
        stored = [self._file.tensors[theirs] for theirs in source.names]
        if len({tensor.type.name for tensor in stored}) > 1 or len(self._shape(source.names[0])) < 2:
            return None
        return gguf_parts.FORMATS.get(stored[0].type.name)

    def read_part(self, name: str, part: str, index: int | None = None) -> np.ndarray:
        if self.format_of(name) is None:
            return super().read_part(name, part, index)
        source = self._sources[name]
        is_whole = source.has_experts and source.expert is None
        expert = index if is_whole else source.expert
        rows = [self._part(theirs, expert, part) for theirs in source.names]
        join = _take_turns if source.alternates else np.concatenate
        values = rows[0] if len(rows) == 1 else join(rows, axis=-2)
        return values if is_whole or index is None else values[index]

    def release(self, name: str) -> None:
        for theirs in self._sources[name].names if name in self._sources else ():
            self._file.release(theirs)

    def _part(self, theirs: str, expert: int | None, part: str) -> np.ndarray:
        """Return one part (codes, scales, ...) of a tensor of the file, or of one of its experts."""
        shape = self._shape(theirs)
        lead = shape[:-1] if expert is None else shape[1:-1]
        values = gguf_parts.read_part(self._file.tensors[theirs].type, self._rows(theirs, expert), part)
        return values.reshape(*lead, values.shape[-1])

    def _experts(self, source: Source, expert: int | None) -> np.ndarray:
        """Return one expert, or all, of a source's tensors, joined."""
        parts = [self._expert_values(theirs, expert) for theirs in source.names]
        join = _take_turns if source.alternates else np.concatenate
        [values] = parts if len(parts) == 1 else [join(parts, axis=-2 if source.transposed else -1)]
        return values.swapaxes(-1, -2) if source.transposed else values

    def _expert_values(self, theirs: str, expert: int | None) -> np.ndarray:
        tensor = self._file.tensors[theirs]
        shape = tensor.shape if expert is None else tensor.shape[1:]
        return self._decode(tensor, self._rows(theirs, expert)).reshape(shape)

    def _rows(self, theirs: str, expert: int | None = None) -> np.ndarray:
        """Return the stored rows of a tensor, or of one of its experts, in HF's order."""
        tensor, data = self._file.tensors[theirs], self._file.data(theirs)
        if expert is not None:
            num_rows = math.prod(tensor.shape[1:-1])
            return data[expert * num_rows : (expert + 1) * num_rows]
        if self._arch in gguf_config.PERMUTED_ARCHITECTURES and ".attn_q." in theirs:
            return self._unpermute(data, tensor.shape[0], self.config["num_attention_heads"])
        if self._arch in gguf_config.PERMUTED_ARCHITECTURES and ".attn_k." in theirs:
            return self._unpermute(data, tensor.shape[0], self.config["num_key_value_heads"])
        return data

    def _values(self, theirs: str) -> np.ndarray:
        values = self._decode(self._file.tensors[theirs], self._rows(theirs)).reshape(self._shape(theirs))
        if self._arch in OFFSET_NORM_ARCHITECTURES and theirs.endswith("norm.weight"):
            return values - values.dtype.type(1)
        return values

    @staticmethod
    def _decode(tensor: GGUFTensor, data: np.ndarray) -> np.ndarray:
        """Decode stored rows to numbers."""
        kind = tensor.type
        return data.view(_FLOATS[kind.name]) if kind.name in _FLOATS else dequantize(kind, data)

    def tokenizer(self) -> PreTrainedTokenizerFast:
        from jaxllm.loading.gguf.tokenizer import build_tokenizer

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
        # The digest covers the code that reads the tokenizer.
        digest = hashlib.sha256(self._file.metadata_digest().encode())
        for name in ("file.py", "special_tokens.py", "text_splitting.py", "tokenizer.py"):
            digest.update(Path(__file__).with_name(name).read_bytes())
        return digest.hexdigest()

    def _shape(self, theirs: str) -> tuple[int, ...]:
        """Return the shape of a tensor in HF: the gate of a shared expert is a matrix there."""
        shape = self._file.tensors[theirs].shape
        return (1, *shape) if theirs.endswith(".ffn_gate_inp_shexp.weight") and len(shape) == 1 else shape

    def _info(self, source: Source) -> TensorInfo:
        stored = [self._file.tensors[theirs] for theirs in source.names]
        dtypes = {_FLOATS.get(tensor.type.name, np.dtype(np.float32)) for tensor in stored}
        shape, num_bytes = list(self._shape(source.names[0])), sum(tensor.num_bytes for tensor in stored)
        if source.expert is not None:
            num_bytes //= shape.pop(0)
        if source.transposed:
            shape[-2:] = shape[:-3:-1]
        if len(stored) > 1:
            shape[-1] *= len(stored)
        dtype = dtypes.pop() if len(dtypes) == 1 else np.dtype(np.float32)
        return TensorInfo(tuple(shape), dtype.name, num_bytes)

    @staticmethod
    def _unpermute(data: np.ndarray, num_rows: int, num_heads: int) -> np.ndarray:
        """Undo the converter's interleaving of each head's halves; `data` is [rows, bytes], or one row of a bias."""
        shape = data.shape
        if num_rows % (2 * num_heads):
            raise ValueError(f"{num_rows} rows are not {num_heads} heads of an even size")
        rows = data.reshape(num_heads, num_rows // num_heads // 2, 2, -1)
        return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(shape)


def _take_turns(parts: Sequence[np.ndarray], axis: int) -> np.ndarray:
    """Interleave arrays of one shape along an axis, counted from the end."""
    shape = list(parts[0].shape)
    shape[axis] *= len(parts)
    return np.stack(parts, axis=axis).reshape(shape)
