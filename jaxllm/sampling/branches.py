"""Parts of the sampler that no row of a step uses are skipped, where skipping them costs less than doing them.

A GPU brings a branch's predicate to the host and waits for it, outside a CUDA graph: there everything is done.
"""

from __future__ import annotations

from collections.abc import Callable

from jax import Array, lax


def when[T](is_used: Array | bool, work: Callable[[], T], idle: Callable[[], T]) -> T:
    """Return what `work` gives if `is_used`, else what `idle` gives, of the same shapes; True itself is no branch."""
    return work() if is_used is True else lax.cond(is_used, work, idle)
