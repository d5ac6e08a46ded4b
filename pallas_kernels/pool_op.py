"""What ops over a pool have in common, whatever the pool holds: the choice of an implementation, and the pool."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax


class Choice(NamedTuple):
    """The implementation that runs a shape on a device."""

    implementation: str
    interpret: bool
    reason: str | None
    """Why it is not the platform's own kernels, if it is not, and nobody named it."""


@dataclass(frozen=True)
class PoolOp:
    """An op over a pool, for one shape in one implementation."""

    shape: Any
    implementation: str = "xla"
    interpret: bool = False
    """Run a TPU's or GPU's kernels in their interpreter, on a CPU. Slow; for tests."""
    architecture: str | None = None
    """The device's, as `pick` takes it. A TPU's kernels run on all of them; what differs is what they make use of."""

    @property
    def name(self) -> str:
        """Return the op's name for people."""
        raise NotImplementedError

    @property
    def _implementations(self) -> Mapping[str, Any]:
        raise NotImplementedError

    @property
    def _entry(self) -> Any:
        return self._implementations[self.implementation]

    def pool_spec(self, num_layers: int, num_places: int) -> Any:
        """Return shape and dtype of a pool of so many blocks or slots per layer, the null one counted."""
        return self._entry.pool_spec(self.shape, num_layers, num_places)

    def make_pool(self, spec: Any) -> Any:
        """Make a pool of `pool_spec`; traced. On a CPU its memory is not touched."""
        return self._entry.make_pool(spec)

    def settle_pool(self, pool: Any, num_layers: int) -> None:
        """Do what the memory of a new pool needs before it is used; not traced."""
        self._entry.settle_pool(pool, num_layers)

    def missing_kernels(self, platform: str, architecture: str | None = None) -> str | None:
        """Say why a platform's own kernels do not run the op, as `pick` does; None if they do."""
        return choose(self._implementations, self.shape, platform, None, architecture, self.name).reason

    def prepare(self, folder: Path | None = None) -> None:
        """Do what must be done in a process before it loads a program with this op that another one compiled.

        Machine code is kept in a folder, if one is given, for the next time.
        """
        self._entry.prepare(self.shape, folder)


def choose(
    implementations: Mapping[str, Any],
    shape: Any,
    platform: str,
    name: str | None,
    architecture: str | None,
    op: str,
) -> Choice:
    """Choose for a platform as `paged_attention.pick` does; `op` is the op's name for people."""
    if name not in (None, *implementations):
        raise ValueError(f"{op}: there is no implementation {name!r}, only {', '.join(implementations)}")
    own = next((each for each, entry in implementations.items() if entry.platform == platform), None)
    if name is None and own is None:
        return Choice("xla", False, f"it has none for {op} yet")
    entry = implementations[name or own or "xla"]
    is_elsewhere = entry.platform not in (None, platform)
    reason = (None if is_elsewhere else entry.device_refusal(architecture)) or entry.refusal(shape)
    if name is None:
        assert own is not None
        return Choice(own if reason is None else "xla", False, reason)
    if is_elsewhere and platform != "cpu":
        raise ValueError(f"{op}: {name!r} does not run on a {platform}")
    if reason is not None:
        raise ValueError(f"{op}: {name!r} cannot run this model here: {reason}")
    return Choice(name, is_elsewhere, None)


def make_cpu_pool(spec: Any) -> Any:
    """Make a pool for a kernel that does not use what was not written: nothing needs to be cleared."""
    from pallas_kernels.native.uninitialized import uninitialized

    specs, tree = jax.tree.flatten(spec)
    return jax.tree.unflatten(tree, list(uninitialized(specs)))


def settle_cpu_pool(pool: Any, num_layers: int) -> None:
    """Let a pool lie in huge pages if it is large."""
    from pallas_kernels.native.huge_pages import use_huge_pages

    for array in jax.tree.leaves(pool):
        use_huge_pages(array, num_layers)
