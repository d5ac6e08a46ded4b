"""JAX's settings that the engine depends on. They are set around its own work alone: the user's code keeps the user's.

Each holds for one thread and for as long as the context is open.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import jax

PINNED: Mapping[str, Any] = {
    "disable_jit": False,
    "enable_x64": False,
    "numpy_dtype_promotion": "standard",
    "numpy_rank_promotion": "allow",
    "threefry_partitionable": True,
    "transfer_guard": "allow",
    "debug_infs": False,
    "debug_nans": False,
}
"""Values by the names of JAX's context managers; `jax_` and the name is the setting's."""


@contextmanager
def tracing() -> Iterator[None]:
    """Pin all that a trace, or an operation outside a program, depends on; entering takes some 20 microseconds."""
    with ExitStack() as stack:
        for name, value in PINNED.items():
            stack.enter_context(getattr(jax, name)(value))
        yield


@contextmanager
def running() -> Iterator[None]:
    """Pin what running a compiled program and reading its outputs depends on, in a few microseconds.

    Inputs come from the host's arrays, and rows that nobody reads hold garbage.
    """
    with (
        jax.disable_jit(False),
        jax.transfer_guard_host_to_device("allow"),
        jax.transfer_guard_device_to_host("allow"),
        jax.debug_infs(False),
        jax.debug_nans(False),
    ):
        yield


def counts(name: str) -> bool:
    """Say whether the user's value of a setting, such as jax_enable_x64, can change a compiled program."""
    return "cache" not in name and not name.removeprefix("jax_").startswith(tuple(PINNED))
