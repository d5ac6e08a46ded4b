"""Skip parts of the sampler that no row of a step uses, where skipping them costs less than running them.

A GPU copies a branch's predicate to the host and waits for it, outside a CUDA graph, so that nothing is skipped there.
"""

from __future__ import annotations

from collections.abc import Callable

from jax import Array, lax


def when[T](is_used: Array | bool, work: Callable[[], T], idle: Callable[[], T]) -> T:
    """Return `work()` if `is_used`, else `idle()`, which has the same shapes; the Python value True makes no branch."""
    return work() if is_used is True else lax.cond(is_used, work, idle)
