"""The base of ops over a pool: the choice of an implementation, and the pool."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from .implementations import Implementation, Implementations, choose, load


@dataclass(frozen=True)
class PoolOp:
    """An op over a pool, for one shape in one implementation."""

    name: ClassVar[str]
    """The op's name for people."""
    implementations: ClassVar[Implementations]

    shape: Any
    implementation: str = "xla"
    interpret: bool = False
    """Run a TPU's or GPU's kernels in their interpreter, on a CPU. Slow; for tests."""
    architecture: str | None = None
    """The device's architecture, as `pick` takes it. TPU kernels run on all TPUs, and use what a kind of TPU has."""
    num_cores: int | None = None
    """The number of a GPU's multiprocessors, as `pick` takes it."""

    @property
    def _entry(self) -> Implementation:
        return self.implementations[self.implementation]

    def pool_spec(self, num_layers: int, num_places: int) -> Any:
        """Return shape and dtype of a pool of `num_places` blocks or slots per layer, the null one counted."""
        assert self._entry.pool_spec is not None
        return load(self._entry.pool_spec)(self.shape, num_layers, num_places)

    def make_pool(self, spec: Any) -> Any:
        """Make a pool of `pool_spec`; traced. On a CPU it is not cleared: kernels read only what was written."""
        if self._entry.platform == "cpu":
            specs, tree = jax.tree.flatten(spec)
            return jax.tree.unflatten(tree, list(load("native.uninitialized:uninitialized")(specs)))
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), spec)

    def settle_pool(self, pool: Any, num_layers: int) -> None:
        """Put a CPU's new pool in huge pages if it is large; not traced."""
        if self._entry.platform == "cpu":
            for array in jax.tree.leaves(pool):
                load("native.huge_pages:use_huge_pages")(array, num_layers)

    def missing_kernels(self, platform: str, architecture: str | None = None) -> str | None:
        """Return why a platform's own kernels do not run the op, as `pick` does, or None if they do."""
        return choose(self.implementations, [self.shape], platform, None, architecture, self.name).reason

    def prepare(self, folder: Path | None = None) -> None:
        """Compile what the op calls, before a process loads a program with this op that another one compiled.

        Machine code is kept in `folder`, if it is not None, for the next time.
        """
        if self._entry.prepare:
            load("native.uninitialized:prepare")(folder)
            load(self._entry.prepare)(self.shape, folder)


def pick_pool_op[Op: PoolOp](
    op: type[Op],
    shape: Any,
    platform: str,
    name: str | None,
    architecture: str | None,
    num_cores: int | None = None,
) -> tuple[Op, str | None]:
    """Return the op for a platform, and why it is not the platform's own kernels; see `paged_attention.pick`."""
    choice = choose(op.implementations, [shape], platform, name, architecture, op.name)
    return op(shape, choice.implementation, choice.interpret, architecture, num_cores), choice.reason
