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


RUNNING: Mapping[str, Any] = {
    "disable_jit": False,
    "transfer_guard_host_to_device": "allow",
    "transfer_guard_device_to_host": "allow",
    "debug_infs": False,
    "debug_nans": False,
}
"""What running a compiled program and reading its outputs depends on, as `PINNED` has it.

Inputs come from the host's arrays, and rows that nobody reads hold garbage.
"""


@contextmanager
def running() -> Iterator[None]:
    """Pin `RUNNING`, in a microsecond or two where it is so already: each of a step's parts does it anew."""
    if _is_running():
        yield
        return
    with ExitStack() as stack:
        for name, value in RUNNING.items():
            stack.enter_context(getattr(jax, name)(value))
        yield


def _is_running() -> bool:
    config = jax.config
    directions = config.jax_transfer_guard_host_to_device, config.jax_transfer_guard_device_to_host
    # Within `jax.transfer_guard`, which is for all directions, the values of each do not show it.
    allows = all(guard in (None, "allow") for guard in (config.jax_transfer_guard, *directions))
    return allows and not (config.jax_disable_jit or config.jax_debug_infs or config.jax_debug_nans)


def counts(name: str) -> bool:
    """Say whether the user's value of a setting, such as jax_enable_x64, can change a compiled program."""
    return "cache" not in name and not name.removeprefix("jax_").startswith(tuple(PINNED))
