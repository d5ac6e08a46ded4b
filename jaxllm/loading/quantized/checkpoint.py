"""A checkpoint that presents quantized matrices under HF's names, dequantized or by their parts."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from typing import override

import numpy as np

from jaxllm.loading.checkpoint import Checkpoint, TensorInfo, WrappedCheckpoint, dominant_dtype, stated_dtype
from jaxllm.loading.json_file import model_error
from jaxllm.loading.names import FLOAT_DTYPES
from jaxllm.loading.quantized.matrix import Matrix, StoredTensors
from jaxllm.loading.quantized.methods import read_scheme
from jaxllm.loading.quantized.scheme import Layout, Scheme
from pallas_kernels.weights import WeightFormat, dequantize

logger = logging.getLogger(__name__)

CHUNK_NUMBERS = 1 << 17
"""The number of elements dequantized at once, so that temporaries stay small."""
_CACHE_SCALES = (
    ".k_scale",
    ".v_scale",
    ".q_scale",
    ".kv_scale",
    ".prob_output_scale",
    ".k_zero_point",
    ".v_zero_point",
)
_INPUT_SCALES = (".input_scale", ".activation_scale", ".input_global_scale", ".input_zero_point", ".output_scale")


class QuantizedCheckpoint(WrappedCheckpoint):
    """A checkpoint whose quantized matrices have HF's names and shapes.

    Raises VLLMValidationError, naming the module, if its tensors do not fit together.
    """

    def __init__(self, inner: Checkpoint, scheme: Scheme) -> None:
        super().__init__(inner)
        self._scheme = scheme
        self.image_processor, self.video_processor = inner.image_processor, inner.video_processor
        self.audio_processor = inner.audio_processor
        self.sentence_files = inner.sentence_files
        if scheme.needs_weights:
            inner.fetch()
        self._matrices = {matrix.module + matrix.layout.target: matrix for matrix in self._find()}
        consumed = {name for matrix in self._matrices.values() for name in matrix.stored}
        unused = {name for name in inner.tensors if name.endswith(_CACHE_SCALES + _INPUT_SCALES)}
        plain = {name: info for name, info in inner.tensors.items() if name not in consumed | unused}
        self.tensors = plain | {name: matrix.info for name, matrix in self._matrices.items()}
        self.spare = frozenset(f"{m.module}.bias" for m in self._matrices.values() if m.layout.writes_biases)
        dtype = scheme.dtype or stated_dtype(inner.config)
        self.dtype = dominant_dtype(plain.values(), inner.config) if dtype is None else dtype
        self._log(unused)

    def read(self, name: str, index: int | None = None) -> np.ndarray:
        matrix = self._matrices.get(name)
        if matrix is None:
            return self._inner.read(name, index)
        numbers = self._widened(matrix, index)
        return numbers if index is None or matrix.layout.is_stacked else numbers[index]

    @property
    def weight_type(self) -> str:
        return self._scheme.method

    def format_of(self, name: str, num_inputs: int = 0) -> WeightFormat | None:
        if not self._inner.tensors:
            return self._scheme.format_of(name, num_inputs)
        matrix = self._matrices.get(name)
        if matrix is None or matrix.form is None:
            return None
        return replace(matrix.form, is_ordered=matrix.layout.is_ordered)

    def read_part(self, name: str, part: str, index: int | None = None) -> np.ndarray:
        matrix, form = self._matrices.get(name), self.format_of(name)
        if matrix is None or form is None or part not in form.parts:
            return super().read_part(name, part, index)
        if part == "order":
            order = self.input_order(name)
            return np.arange(matrix.info.shape[-1], dtype=np.int32) if order is None else order
        values = self._part(matrix, part, index)
        return values if index is None or matrix.layout.is_stacked else values[index]

    def input_order(self, name: str) -> np.ndarray | None:
        matrix = self._matrices.get(name)
        if matrix is None:
            return None
        with self._named(matrix):
            return matrix.layout.order(self._stored(matrix))

    @override
    def _sources(self, name: str) -> Sequence[str]:
        matrix = self._matrices.get(name)
        return (name,) if matrix is None else list(matrix.stored)

    def _find(self) -> Iterator[Matrix]:
        """Yield the quantized matrices among the tensors."""
        tensors = self._inner.tensors
        for name in tensors:
            for end in (".weight", ".qweight", ".weight_packed", "_blocks"):
                layout = self._scheme.layout_of(name.removesuffix(end)) if name.endswith(end) else None
                if layout is not None and layout.needed[0] == end and tensors[name].dtype not in FLOAT_DTYPES:
                    yield self._matrix(name.removesuffix(end), layout)

    def _matrix(self, module: str, layout: Layout) -> Matrix:
        tensors = self._inner.tensors
        missing = [module + end for end in layout.needed if module + end not in tensors]
        if missing:
            raise model_error(f"{module} is quantized, but there is no {', '.join(missing)}", self.source)
        ends = tuple(end for end in (*layout.needed, *layout.optional) if module + end in tensors)
        infos = {end: tensors[module + end] for end in ends}
        try:
            shape = layout.shape(infos, StoredTensors(self._inner, module, ends))
            num_inputs = shape[-2] if layout.is_stacked else shape[-1]
            form = layout.held_as(num_inputs, infos)
        except ValueError as error:
            raise model_error(f"{module}{error}", self.source) from error
        num_bytes = sum(info.num_bytes for info in infos.values())
        return Matrix(module, layout, TensorInfo(shape, layout.dtype, num_bytes), form, ends)

    def _stored(self, matrix: Matrix, index: int | None = None) -> StoredTensors:
        return StoredTensors(self._inner, matrix.module, matrix.ends, index if matrix.layout.is_stacked else None)

    def _part(self, matrix: Matrix, part: str, index: int | None = None) -> np.ndarray:
        with self._named(matrix):
            return matrix.layout.part(part, self._stored(matrix, index))

    def _widened(self, matrix: Matrix, index: int | None) -> np.ndarray:
        layout, stored = matrix.layout, self._stored(matrix, index)
        with self._named(matrix):
            numbers = layout.widened(stored)
            if numbers is not None:
                return numbers
            numbers = widen({part: layout.part(part, stored) for part in layout.form.parts}, layout.form)
            order = layout.order(stored)
        if order is None:
            return numbers
        restored = np.empty_like(numbers)
        restored[..., order] = numbers
        return restored

    @contextmanager
    def _named(self, matrix: Matrix) -> Iterator[None]:
        """Add the matrix's name to errors."""
        try:
            with np.errstate(over="ignore", invalid="ignore"):
                yield
        except ValueError as error:
            raise model_error(f"{matrix.module}{error}", self.source) from error

    def _log(self, unused: set[str]) -> None:
        if self._matrices:
            sizes = [(info.num_bytes, prod(info.shape)) for info in (m.info for m in self._matrices.values())]
            stored, numbers = (sum(column) for column in zip(*sizes, strict=True))
            logger.info(
                "%s: %d weights are %s, %.2f bits a number: %.2f GB, and %.2f GB in bfloat16",
                self.source,
                len(sizes),
                self._scheme.method,
                8 * stored / numbers,
                stored / 1e9,
                2 * numbers / 1e9,
            )
        for note in self._scheme.notes:
            logger.info("%s: %s", self.source, note)
        if any(name.endswith(_CACHE_SCALES) for name in unused):
            logger.info(
                "%s: its scales of keys and values are not used; kv_cache_dtype says what they are", self.source
            )


def widen(parts: Mapping[str, np.ndarray], form: WeightFormat) -> np.ndarray:
    """Return the float32 numbers of a matrix's parts, also if the last group of a row is incomplete."""
    num_rows, num_inputs = parts["codes"].shape
    num_groups = parts["scales"].shape[-1]
    whole = num_groups * form.group if form.group and num_groups > 1 else num_inputs
    out = np.empty((num_rows, num_inputs), np.float32)
    step = max(1, CHUNK_NUMBERS // num_inputs)
    for start in range(0, num_rows, step):
        rows = {part: array[start : start + step] for part, array in parts.items()}
        rows["codes"] = (
            np.pad(rows["codes"], ((0, 0), (0, whole - num_inputs))) if whole > num_inputs else rows["codes"]
        )
        out[start : start + step] = dequantize(rows, form)[:, :num_inputs]
    return out


def with_quantized(checkpoint: Checkpoint) -> Checkpoint:
    """Wrap a checkpoint so that its quantized matrices can be read; return it unchanged if its config declares none.

    Raises VLLMValidationError for an unsupported method or option, by its name.
    """
    quantization = checkpoint.config.get("quantization_config")
    if not quantization or checkpoint.is_gguf:
        return checkpoint
    try:
        scheme = read_scheme(quantization, stated_dtype(checkpoint.config))
    except ValueError as error:
        raise model_error(f"config.json: {error}", checkpoint.source) from error
    return QuantizedCheckpoint(checkpoint, scheme)
