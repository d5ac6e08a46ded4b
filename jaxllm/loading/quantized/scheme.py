"""The interface of quantization methods: which tensors of each module store its matrix, known from the config alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import ml_dtypes
import numpy as np

from jaxllm.loading.checkpoint import TensorInfo
from jaxllm.loading.quantized.patterns import is_seldom_quantized
from pallas_kernels.weights import WeightFormat

Infos = Mapping[str, TensorInfo]
Stored = Mapping[str, np.ndarray]
"""A module's tensors by the endings of their names, read on access."""
_SCALE_DTYPES = {
    **{name: name for name in ("float16", "bfloat16", "float32", "float8_e4m3fn")},
    # Powers of two, which bfloat16 represents exactly.
    **dict.fromkeys(("uint8", "float8_e8m0fnu"), "bfloat16"),
}


@dataclass(frozen=True)
class Layout(ABC):
    """How the tensors of a module store its matrix."""

    form: WeightFormat
    """The format of the parts. A group or factor group of 0 is a whole row, as a config does not state its length."""

    target: ClassVar[str] = ".weight"
    """The ending of HF's name of the matrix."""
    dtype: ClassVar[str] = "float32"
    """The dtype of the dequantized numbers."""
    writes_biases: ClassVar[bool] = False
    """Whether tools write biases of zeros for modules without a bias."""
    is_stacked: ClassVar[bool] = False
    """Whether there is one matrix per expert, along the first axis."""
    is_ordered: bool = field(default=False, kw_only=True)
    """Whether the parts have the inputs sorted by group, not in HF's order."""

    @property
    @abstractmethod
    def needed(self) -> tuple[str, ...]:
        """Return the name endings of the module's tensors. The first has the codes."""

    @property
    def optional(self) -> tuple[str, ...]:
        """Return the name endings of tensors that only some modules have."""
        return ()

    @abstractmethod
    def shape(self, infos: Infos, stored: Stored) -> tuple[int, ...]:
        """Return the shape of HF's matrix. Raises ValueError if the tensors do not fit together."""

    @abstractmethod
    def part(self, name: str, stored: Stored) -> np.ndarray:
        """Return one part of the matrix, [..., out, width]; one row for all may be broadcast without a copy."""

    def scales(self, infos: Infos) -> TensorInfo | None:
        """Return the tensor with the dtype of the scales; None if it is always the format's."""
        del infos
        return None

    def held_as(self, num_inputs: int, infos: Infos) -> WeightFormat | None:
        """Return the format for rows of `num_inputs`; None if they can only be dequantized (an incomplete last group).

        Its scale dtype is that of the stored scales.
        """
        form = _whole_groups(self.form, num_inputs)
        scales = None if form is None or form.group is None else self.scales(infos)
        return form if form is None or scales is None else replace(form, scale_dtype=_SCALE_DTYPES[scales.dtype])

    def order(self, stored: Stored) -> np.ndarray | None:
        """Return the order of the inputs in the parts' columns; None if it is HF's."""
        del stored
        return None

    def widened(self, stored: Stored) -> np.ndarray | None:
        """Return the dequantized numbers if there is a quicker way than through the parts; otherwise None."""
        del stored
        return None


def _whole_groups(form: WeightFormat, num_inputs: int) -> WeightFormat | None:
    """Return the format for rows of `num_inputs`, with groups of 0 as whole rows; None if a group is incomplete."""
    if not num_inputs:
        return form
    group = None if form.group is None else min(form.group or num_inputs, num_inputs)
    if group is not None and num_inputs % group:
        return None
    return replace(form, group=group, factor_group=num_inputs if form.factor_group == 0 else form.factor_group)


@dataclass(frozen=True)
class Scheme:
    """How a checkpoint is quantized."""

    method: str
    """The method's name, with details for the reader."""
    layout_of: Callable[[str], Layout | None]
    """Return the layout of a module by name; None if the config does not quantize it."""
    notes: tuple[str, ...] = ()
    """Log messages about ignored requests of the method, such as quantized activations or caches."""
    has_head: bool = False
    """Whether lm_head is quantized too."""
    dtype: str | None = None
    """The dtype of models that state none; None to take it from the other tensors."""
    needs_weights: bool = False
    """Whether shapes are stored in the weights, not in the files' headers."""

    def format_of(self, name: str, num_inputs: int) -> WeightFormat | None:
        """Return the format of HF's tensor `name` with rows of `num_inputs`, from the config alone.

        Norms, embeddings and routers count as plain, since tools quantize them only on request.
        """
        module = name.removesuffix(".weight")
        is_head = module.rpartition(".")[2] == "lm_head"
        if (is_head and not self.has_head) or (not is_head and is_seldom_quantized(module)):
            return None
        layout = self.layout_of(module)
        if layout is None or name != module + layout.target:
            return None
        form = _whole_groups(layout.form, num_inputs)
        return None if form is None else replace(form, is_ordered=layout.is_ordered)


def expect(infos: Infos, end: str, shape: tuple[int, ...] | None, *dtypes: str) -> tuple[int, ...]:
    """Return a tensor's shape. Raises ValueError if it is not `shape`, or if the dtype is not one of `dtypes`."""
    if end not in infos:
        raise ValueError(f" is quantized, but there is no {end}")
    info = infos[end]
    if shape is not None and tuple(info.shape) != shape:
        raise ValueError(f"{end} has shape {list(info.shape)}, expected {list(shape)}")
    if info.dtype not in dtypes:
        raise ValueError(f"{end} has dtype {info.dtype}, expected {' or '.join(dtypes)}")
    return tuple(info.shape)


def expect_matrix(infos: Infos, end: str, *dtypes: str) -> tuple[int, int]:
    """Return the shape of a tensor that must have two axes."""
    shape = expect(infos, end, None, *dtypes)
    if len(shape) != 2 or 0 in shape:
        raise ValueError(f"{end} has shape {list(shape)}, expected a matrix")
    return shape[0], shape[1]


def as_scales(stored: np.ndarray, form: WeightFormat) -> np.ndarray:
    """Return scales as numbers: bytes and E8M0 are exponents of two."""
    if stored.dtype == np.uint8:
        stored = stored.view(_E8M0)
    dtype = np.dtype(np.float32) if form.group is None else _dtype(_SCALE_DTYPES[stored.dtype.name])
    return stored.astype(dtype, copy=False)


def _dtype(name: str) -> np.dtype:

    return np.dtype(getattr(ml_dtypes, name, name))


_E8M0 = _dtype("float8_e8m0fnu")
SCALE_DTYPES = ("float16", "bfloat16", "float32")
E8M0 = ("uint8", "float8_e8m0fnu")
