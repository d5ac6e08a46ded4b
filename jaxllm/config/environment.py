"""What the process's environment says: the only place of the engine that reads it."""

from __future__ import annotations

import os
from pathlib import Path


def default_cache_dir() -> str:
    """Return where compiled programs and fetched files are kept: JAXLLM_CACHE, or jaxllm in the user's cache folder."""
    own = os.environ.get("JAXLLM_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return str(Path(own or Path(base, "jaxllm")).expanduser())


def environment(prefixes: tuple[str, ...]) -> dict[str, str]:
    """Return the environment variables whose names start with one of `prefixes`, sorted by name."""
    return {name: os.environ[name] for name in sorted(os.environ) if name.startswith(prefixes)}


def reserve_gpu_memory(utilization: float) -> None:
    """Let JAX's allocator have what the engine is to use of a GPU; by itself it takes 75 % of what is free.

    The user's own setting stands, and so does what a JAX that already runs was started with.
    """
    if not environment(("XLA_CLIENT_MEM", "XLA_PYTHON_CLIENT_")):
        # Of free memory, which is a little less than all, of which the engine takes its part; and some is lost in gaps.
        os.environ["XLA_CLIENT_MEM_FRACTION"] = f"{min(0.97, utilization + 0.05):.2f}"
