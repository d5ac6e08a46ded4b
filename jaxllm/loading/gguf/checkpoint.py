"""A checkpoint in a .gguf file, or in several parts: config, tokenizer and weights, with HF's names and values.

A vision tower is in a further file.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jaxllm.exceptions import VLLMValidationError
from jaxllm.loading.checkpoint import Checkpoint, TensorInfo, dominant_dtype, stamp_of
from jaxllm.loading.gguf import config as gguf_config
from jaxllm.loading.gguf import parts as gguf_parts
from jaxllm.loading.gguf.dequant import FLOATS, decode
from jaxllm.loading.gguf.layouts import find_layouts
from jaxllm.loading.gguf.names import Source, find_sources, find_zeros
from jaxllm.loading.gguf.split_files import open_gguf, part_names
from jaxllm.loading.gguf.vision import VISION_ARCHITECTURES, VisionFile
from jaxllm.loading.sentence_transformers import Module, SentenceFiles

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from pallas_kernels.weights import WeightFormat

logger = logging.getLogger(__name__)


class GGUFCheckpoint(Checkpoint):
    """A GGUF file, or all parts of a split one, opened by the first part, with the file of its vision tower if any.

    `find_vision` returns the files that may hold the tower; it is called if the architecture may have one. Raises
    VLLMValidationError if a file is corrupt or uses an unsupported feature, and if several hold the model's tower.
    """

    def __init__(
        self, path: Path, *, source: str = "", find_vision: Callable[[], Sequence[Path]] | None = None
    ) -> None:
        self.source = source or str(path)
        self._path = path
        try:
            self._file = open_gguf(path)
            self._arch = gguf_config.architecture(self._file)
            special = gguf_config.special_tokens(self._file)
            self.config = gguf_config.hf_config(self._file, special)
            self.generation_config = gguf_config.generation_config(special)
            self.sentence_files = _sentence_files(gguf_config.pooling_mode(self._file), self.source)
            self._layouts = find_layouts(self._file.tensors, self._arch, self.config)
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
        self._vision = None
        if find_vision is not None and self._arch in VISION_ARCHITECTURES:
            self._vision = self._attach_vision(find_vision())

    def read(self, name: str, index: int | None = None) -> np.ndarray:
        if self._vision is not None and name in self._vision.tensors:
            values = self._vision.read(name)
            return values if index is None else values[index]
        if name in self._zeros:
            values = np.zeros(self._zeros[name], np.float32)
            return values if index is None else values[index]
        source = self._sources[name]
        if source.has_experts and source.expert is None:
            return self._values(source, index)
        values = self._values(source, source.expert)
        return values if index is None else values[index]

    @property
    def num_bytes(self) -> int:
        of_text = sum(tensor.num_bytes for tensor in self._file.tensors.values())
        return of_text + (0 if self._vision is None else self._vision.num_bytes)

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
        is_changed = any(self._layouts[theirs].convert for theirs in source.names if theirs in self._layouts)
        if is_changed or len({tensor.type.name for tensor in stored}) > 1 or len(self._shape(source.names[0])) < 2:
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
        if self._vision is not None and name in self._vision.tensors:
            self._vision.release(name)
        for theirs in self._sources[name].names if name in self._sources else ():
            self._file.release(theirs)

    def _attach_vision(self, paths: Sequence[Path]) -> VisionFile | None:
        """Open the file with the model's vision tower and make the config that of the whole model; None without one."""
        files, errors = _open_towers(paths)
        fitting = [file for file in files if file.fits(self._arch, self.config["hidden_size"])]
        if errors and not fitting:
            raise self._vision_error(f"{errors[0]}. Fetch it again, move it away")
        for error in errors:
            logger.warning("%s; the model sees with another file", error)
        if len(fitting) > 1:
            names = ", ".join(file.path.name for file in fitting)
            raise self._vision_error(f"{self._path}: several files hold its vision tower: {names}. Leave one of them")
        if not fitting:
            others = ", ".join(path.name for path in paths)
            self.text_only = "it sees with its mmproj*.gguf beside it, and there is "
            self.text_only += f"that of another model: {others}" if others else "none"
            if others or self._arch != "gemma3":  # a Gemma 3 may be one of those that see nothing
                logger.warning("%s reads text alone: %s", self._path, self.text_only)
            return None
        [vision] = fitting
        try:
            self.config = vision.attach(self.config, self._file)
            self.image_processor, self.video_processor = vision.processors(self.config)
        except ValueError as error:
            raise self._vision_error(f"{vision.path}: {error}. Fetch it again, or convert the model anew") from error
        self.tensors = {**self.tensors, **vision.tensors}
        return vision

    def _vision_error(self, text: str) -> VLLMValidationError:
        message = f"{text}, or set language_model_only=True: text alone can be read."
        return VLLMValidationError(message, parameter="model", value=self.source)

    def _part(self, theirs: str, expert: int | None, part: str) -> np.ndarray:
        """Return one part (codes, scales, ...) of a tensor of the file, or of one of its experts."""
        shape = self._shape(theirs)
        lead = shape[:-1] if expert is None else shape[1:-1]
        values = gguf_parts.read_part(self._file.tensors[theirs].type, self._rows(theirs, expert), part)
        return values.reshape(*lead, values.shape[-1])

    def _values(self, source: Source, expert: int | None) -> np.ndarray:
        """Return a tensor of HF's, or that of one of its experts."""
        parts = [self._part_values(theirs, expert) for theirs in source.names]
        join = _take_turns if source.alternates else np.concatenate
        values = parts[0] if len(parts) == 1 else join(parts, axis=source.joined_axis)
        values = values.reshape(-1, values.shape[-1]) if source.folded else values
        return values.swapaxes(-1, -2) if source.transposed else values

    def _part_values(self, theirs: str, expert: int | None) -> np.ndarray:
        """Return the numbers of a tensor of the file, or of one of its experts, as HF has them."""
        tensor, layout = self._file.tensors[theirs], self._layouts.get(theirs)
        values = decode(tensor.type, self._rows(theirs, expert))
        if layout is not None and layout.convert is not None:
            values = layout.convert(values.reshape(tensor.shape))
        shape = self._shape(theirs)
        return values.reshape(shape if expert is None else shape[1:])

    def _rows(self, theirs: str, expert: int | None = None) -> np.ndarray:
        """Return the stored rows of a tensor, or of one of its experts, in HF's order."""
        tensor, data, layout = self._file.tensors[theirs], self._file.data(theirs), self._layouts.get(theirs)
        if expert is not None:
            num_rows = math.prod(tensor.shape[1:-1])
            return data[expert * num_rows : (expert + 1) * num_rows]
        if layout is None or layout.order is None:
            return data
        return data.reshape(len(layout.order), -1)[layout.order].reshape(data.shape)

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

    def stamp(self) -> str:
        parts = [self._path.with_name(name) for name in part_names(self._path.name)]
        vision = [] if self._vision is None else [self._vision.path]
        return stamp_of({self._path, *parts, *vision})

    def tokenizer_digest(self) -> str:
        # The digest covers the code that reads the tokenizer.
        digest = hashlib.sha256(self._file.metadata_digest().encode())
        for name in ("file.py", "special_tokens.py", "text_splitting.py", "tokenizer.py", "word_pieces.py"):
            digest.update(Path(__file__).with_name(name).read_bytes())
        return digest.hexdigest()

    def _shape(self, theirs: str) -> tuple[int, ...]:
        """Return the shape that a tensor of the file has in HF."""
        layout = self._layouts.get(theirs)
        return self._file.tensors[theirs].shape if layout is None or layout.shape is None else layout.shape

    def _info(self, source: Source) -> TensorInfo:
        stored = [self._file.tensors[theirs] for theirs in source.names]
        dtypes = {FLOATS.get(tensor.type.name, np.dtype(np.float32)) for tensor in stored}
        shapes, num_bytes = [self._shape(theirs) for theirs in source.names], sum(tensor.num_bytes for tensor in stored)
        shape = list(shapes[0])
        if len(stored) > 1:
            shape[source.joined_axis] = sum(each[source.joined_axis] for each in shapes)
        if source.folded:
            shape = [shape[0] * shape[1], *shape[2:]]
        if source.expert is not None:
            num_bytes //= shape.pop(0)
        if source.transposed:
            shape[-2:] = shape[:-3:-1]
        dtype = dtypes.pop() if len(dtypes) == 1 else np.dtype(np.float32)
        return TensorInfo(tuple(shape), dtype.name, num_bytes)


def _sentence_files(mode: str | None, source: str) -> SentenceFiles | None:
    """Return sentence-transformers' settings of a model that embeds by a mode of pooling; llama.cpp's have length 1."""
    if mode is None:
        return None
    pooling = Module("Pooling", "1_Pooling", {"pooling_mode": mode})
    return SentenceFiles(source, (Module("Transformer", ""), pooling, Module("Normalize", "2_Normalize")))


def _open_towers(paths: Sequence[Path]) -> tuple[list[VisionFile], list[str]]:
    """Return the files with vision towers that can be read, and the paths of the others with the reasons."""
    files: list[VisionFile] = []
    errors: list[str] = []
    for path in paths:
        try:
            files.append(VisionFile(path))
        except (OSError, ValueError) as error:
            errors.append(f"{path}: {error}")
    return files, errors


def _take_turns(parts: Sequence[np.ndarray], axis: int) -> np.ndarray:
    """Interleave arrays of one shape along an axis, counted from the end."""
    shape = list(parts[0].shape)
    shape[axis] *= len(parts)
    return np.stack(parts, axis=axis).reshape(shape)
