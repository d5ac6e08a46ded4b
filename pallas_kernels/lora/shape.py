"""The facts about adapters that an implementation needs before it is traced."""

from __future__ import annotations

from typing import NamedTuple

from jax.typing import DTypeLike


class LoraShape(NamedTuple):
    """The sizes and dtypes of the adapters beside one of a model's weights."""

    rank: int
    num_inputs: int
    parts: tuple[int, ...]
    """The number of outputs of each part."""
    dtype: DTypeLike
    """The dtype of x, A and B."""
    out_dtype: DTypeLike
