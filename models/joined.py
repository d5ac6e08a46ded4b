"""A merged array whose parameters are held in different formats is several arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Joined:
    """Arrays [num_shards, rows, ...], which stand for one with all their rows, shard by shard."""

    members: tuple[Any, ...]
