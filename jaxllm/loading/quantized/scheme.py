"""What a method says of a checkpoint: how the tensors of each module hold its matrix, known from the config alone."""

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
"""A module's tensors by what their names end in; each is read when asked for."""
_SCALE_DTYPES = {
    **{name: name for name in ("float16", "bfloat16", "float32", "float8_e4m3fn")},
    # Powers of two, all of which bfloat16 has.
    **dict.fromkeys(("uint8", "float8_e8m0fnu"), "bfloat16"),
}


@dataclass(frozen=True)
class Layout(ABC):
    """How the tensors of a module hold its matrix."""

    form: WeightFormat
    """What the matrix is held as. A group or factor group of 0 is a whole row, whose length a config does not say."""

    target: ClassVar[str] = ".weight"
    """What HF's name of the matrix ends in."""
    dtype: ClassVar[str] = "float32"
    """The dtype of the widened numbers."""
    writes_biases: ClassVar[bool] = False
    """Tools write biases of zeros for modules that have none."""
    is_stacked: ClassVar[bool] = False
    """There is one matrix for each expert, along the first axis."""
    is_ordered: bool = field(default=False, kw_only=True)
    """The parts have the inputs sorted by group, in an order of their own."""

    @property
    @abstractmethod
    def needed(self) -> tuple[str, ...]:
        """Return what the names of the module's tensors end in. The first has the codes."""

    @property
    def optional(self) -> tuple[str, ...]:
        """Return what the names of tensors end in that some modules have besides."""
        return ()

    @abstractmethod
    def shape(self, infos: Infos, stored: Stored) -> tuple[int, ...]:
        """Return the shape of HF's matrix. Raises ValueError if the tensors do not fit together."""

    @abstractmethod
    def part(self, name: str, stored: Stored) -> np.ndarray:
        """Return one part of the matrix, [..., out, width]; what is one for all rows may be repeated without copies."""

    def scales(self, infos: Infos) -> TensorInfo | None:
        """Return the tensor whose dtype the scales have; None if it is always the format's."""
        del infos
        return None

    def held_as(self, num_inputs: int, infos: Infos) -> WeightFormat | None:
        """Return the format of rows of `num_inputs`, whose last group is a whole one; None if it can only be widened.

        It has the dtype that scales are stored in.
        """
        form = whole_groups(self.form, num_inputs)
        scales = None if form is None or form.group is None else self.scales(infos)
        return form if form is None or scales is None else replace(form, scale_dtype=_SCALE_DTYPES[scales.dtype])

    def order(self, stored: Stored) -> np.ndarray | None:
        """Return the order of the inputs in which the parts have their columns; None if it is HF's."""
        del stored
        return None

    def widened(self, stored: Stored) -> np.ndarray | None:
        """Return the widened numbers where there is a quicker way than by the parts."""
        del stored
        return None


def whole_groups(form: WeightFormat, num_inputs: int) -> WeightFormat | None:
    """Return a format of rows of `num_inputs`, where groups of 0 are whole rows; None if the last group is none."""
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
    """The method's name, with what of it matters to a reader."""
    layout_of: Callable[[str], Layout | None]
    """It tells how the module of a name is held if it is quantized; None if the config says that it is not."""
    notes: tuple[str, ...] = ()
    """What the method asks of activations or caches that is not done: sentences for the log."""
    has_head: bool = False
    """lm_head is quantized too."""
    dtype: str | None = None
    """The dtype of models that state none; None if that of the other tensors tells."""
    needs_weights: bool = False
    """Shapes are among the weights, and not in the headers of files."""

    def format_of(self, name: str, num_inputs: int) -> WeightFormat | None:
        """Return what HF's tensor `name` with rows of `num_inputs` is held as, from the config alone.

        Norms, embeddings and routers count as plain, as no tool quantizes them unless told to.
        """
        module = name.removesuffix(".weight")
        is_head = module.rpartition(".")[2] == "lm_head"
        if (is_head and not self.has_head) or (not is_head and is_seldom_quantized(module)):
            return None
        layout = self.layout_of(module)
        if layout is None or name != module + layout.target:
            return None
        form = whole_groups(layout.form, num_inputs)
        return None if form is None else replace(form, is_ordered=layout.is_ordered)


def expect(infos: Infos, end: str, shape: tuple[int, ...] | None, *dtypes: str) -> tuple[int, ...]:
    """Return a tensor's shape; raise ValueError if it is not `shape`, or its dtype none of `dtypes`."""
    if end not in infos:
        raise ValueError(f" is quantized, but there is no {end}")
    info = infos[end]
    if shape is not None and tuple(info.shape) != shape:
        raise ValueError(f"{end} has shape {list(info.shape)}, expected {list(shape)}")
    if info.dtype not in dtypes:
        raise ValueError(f"{end} has dtype {info.dtype}, expected {' or '.join(dtypes)}")
    return tuple(info.shape)


def expect_matrix(infos: Infos, end: str, *dtypes: str) -> tuple[int, int]:
    """Return the shape of a tensor that has to have two axes."""
    shape = expect(infos, end, None, *dtypes)
    if len(shape) != 2 or 0 in shape:
        raise ValueError(f"{end} has shape {list(shape)}, expected a matrix")
    return shape[0], shape[1]


def as_scales(stored: np.ndarray, form: WeightFormat) -> np.ndarray:
    """Return scales as numbers: bytes and E8M0 are powers of two."""
    if stored.dtype == np.uint8:
        stored = stored.view(_E8M0)
    dtype = np.dtype(np.float32) if form.group is None else _dtype(_SCALE_DTYPES[stored.dtype.name])
    return stored.astype(dtype, copy=False)


def _dtype(name: str) -> np.dtype:

    return np.dtype(getattr(ml_dtypes, name, name))


_E8M0 = _dtype("float8_e8m0fnu")
SCALE_DTYPES = ("float16", "bfloat16", "float32")
E8M0 = ("uint8", "float8_e8m0fnu")
