"""What ops of recurrent state have in common, whatever a state is: the choice of an implementation, and pools."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.pool_op import PoolOp, make_cpu_pool, settle_cpu_pool


class Implementation(NamedTuple):
    """One way of running an op."""

    load: Callable[[str | None], Callable[..., tuple[Array, Array]]]
    """Import the function for an architecture; it has the signature of the op's `__call__`, with `interpret`."""
    platform: str | None
    """The platform where it runs, or None for all. A CPU interprets what belongs elsewhere, slowly."""
    pool_spec: Callable[[Any, int, int], jax.ShapeDtypeStruct]
    refusal: Callable[[Any], str | None] = lambda _: None
    """A function that says why it cannot run a shape, or None if it can."""
    prepare: Callable[[Any, Path | None], None] = lambda _shape, _folder: None
    """See `StateOp.prepare`."""
    make_pool: Callable[[jax.ShapeDtypeStruct], Array] = lambda spec: jnp.zeros(spec.shape, spec.dtype)
    """Make a pool, traced."""
    settle_pool: Callable[[Array, int], None] = lambda _pool, _num_layers: None
    """See `StateOp.settle_pool`."""
    device_refusal: Callable[[str | None], str | None] = lambda _: None
    """A function that says why it cannot run on a device of its platform, by the architecture, or None if it can."""


@dataclass(frozen=True)
class StateOp(PoolOp):
    """An op of recurrent state for one shape in one implementation."""

    def _run(self, *arguments: Any, **settings: Any) -> tuple[Array, Array]:
        return self._entry.load(self.architecture)(*arguments, interpret=self.interpret, **settings)

    def _check(self, pool: Array, num_layers: int, **arrays: tuple[Array, tuple[int, ...], Any]) -> None:
        """Refuse a pool that is not of this shape, and arrays without the shapes and dtypes beside them.

        A dtype may be None, for any.
        """
        for name, (array, size, dtype) in arrays.items():
            if array.shape != size or array.dtype != (dtype or array.dtype):
                wanted = f"{size} {jnp.dtype(dtype).name}" if dtype else f"{size}"
                raise ValueError(f"{self.name}: {name} is {array.shape} {array.dtype}, not {wanted} as of {self.shape}")
        spec = self.pool_spec(num_layers, len(pool) // num_layers)
        if (pool.shape, pool.dtype) != (spec.shape, spec.dtype):
            raise ValueError(
                f"{self.name}: a pool of {pool.shape} {pool.dtype} does not hold {num_layers} layers of {self.shape}"
            )


def cpu_implementation(
    load: Callable[[], Callable[..., tuple[Array, Array]]],
    pool_spec: Callable[[Any, int, int], jax.ShapeDtypeStruct],
    refusal: Callable[[Any], str | None],
    prepare: Callable[[Any, Path | None], object],
) -> Implementation:
    """Return the entry of a CPU's kernel, which does not use what was not written: no pool needs to be cleared."""
    return Implementation(
        lambda _: load(),
        "cpu",
        pool_spec,
        lambda shape: refusal(shape) or _refuse_on_cpu(shape),
        lambda shape, folder: _prepare_cpu(shape, folder, prepare),
        make_cpu_pool,
        settle_cpu_pool,
    )


def _refuse_on_cpu(shape: Any) -> str | None:
    if shape.dtype not in (jnp.bfloat16, jnp.float32):
        return f"dtype must be bfloat16 or float32, not {jnp.dtype(shape.dtype).name}"
    from pallas_kernels.native.compiling import refuse

    return refuse()


def _prepare_cpu(shape: Any, folder: Path | None, prepare: Callable[[Any, Path | None], object]) -> None:
    from pallas_kernels.native import uninitialized

    uninitialized.prepare(folder)
    prepare(shape, folder)
