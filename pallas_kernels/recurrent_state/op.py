"""The base of ops of recurrent state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array

from pallas_kernels.implementations import load
from pallas_kernels.pool_op import PoolOp


@dataclass(frozen=True)
class StateOp(PoolOp):
    """An op of recurrent state for one shape in one implementation."""

    def _run(self, *arguments: Any, **settings: Any) -> tuple[Array, Array]:
        return load(self._entry.function)(*arguments, interpret=self.interpret, **settings)

    def _check(self, pool: Array, num_layers: int, **arrays: tuple[Array, tuple[int, ...], Any]) -> None:
        """Raise ValueError for a pool of another shape, and for arrays without the shapes and dtypes beside them.

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
