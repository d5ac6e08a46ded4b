"""A trial: one call of an op on a made-up step, and the comparison of its result with the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from pallas_kernels.weights import WeightFormat


class Outcome(NamedTuple):
    """The result of a comparison."""

    error: float
    """The largest error of a number, as `largest_error` measures it; NaN or infinite if a number is."""
    allowed: float
    """The largest error that rounding explains."""
    missed: tuple[str, ...] = ()
    """What else is wrong, such as memory that the op must not touch."""

    @property
    def is_right(self) -> bool:
        """Return whether the op did what its reference does."""
        return self.error <= self.allowed and not self.missed


class Call(NamedTuple):
    """What a trial runs."""

    function: Callable[..., Any]
    """The op with its settings; it is traced."""
    arguments: tuple[Any, ...]
    compare: Callable[[Any], Outcome]
    """Compares what the function returns with the reference."""


class Trial(NamedTuple):
    """A call that is made when it is needed."""

    op: str
    """The name of the op's folder, such as "paged_attention"; a matmul's is followed by its weights' format, as in
    "linear of int4/32+mins", because plain XLA can take its place for one format alone."""
    implementation: str
    shape: str
    """The op's shape, for people."""
    step: str
    """The name of the step."""
    make: Callable[[], Call]


def bucket(count: int) -> int:
    """Return the number of rows, or of sequences, that an engine's step has for a count of them: a power of two."""
    return max(8, 1 << (count - 1).bit_length())


def allowed_error(dtype: Any) -> float:
    """Return the largest error of outputs of a dtype: a few roundings to it, or to the halves of a float32 product."""
    return 2**-6 if jnp.dtype(dtype).itemsize == 2 else 2**-10


def largest_error(got: np.ndarray, want: np.ndarray) -> float:
    """Return the largest error of a number, in parts of its size plus the root mean square of its row.

    The first axis is rows. A row of zeros must be zeros.
    """
    got, want = (np.asarray(x, np.float64).reshape(len(x), -1) for x in (got, want))
    sizes = abs(want) + np.sqrt(np.mean(want**2, axis=1, keepdims=True))
    errors = abs(got - want)
    return float(np.max(np.divide(errors, sizes, out=np.where(errors == 0, 0.0, np.inf), where=sizes != 0), initial=0))


def is_same(got: np.ndarray, want: np.ndarray) -> bool:
    """Return whether two arrays have the same numbers; NaN equals NaN."""
    return np.array_equal(_plain(got), _plain(want), equal_nan=True)


def is_finite(x: Any) -> bool:
    """Return whether all numbers of an array are finite."""
    return bool(np.isfinite(_plain(x)).all())


def _plain(x: Any) -> np.ndarray:
    array = np.asarray(x)
    return array if array.dtype.kind in "iub" else array.astype(np.float32)


def describe(shape: Any) -> str:
    """Return a named tuple in a few words, such as "num_heads 32, dtype bfloat16"."""
    facts = {name: value for name, value in shape._asdict().items() if value is not None and value is not True}
    return ", ".join(f"{name} {_word(value)}" for name, value in facts.items())


def _word(value: Any) -> str:
    if isinstance(value, WeightFormat):
        return value.name
    try:
        return jnp.dtype(value).name if not isinstance(value, int | str | bool) else str(value)
    except TypeError:
        return str(value)
