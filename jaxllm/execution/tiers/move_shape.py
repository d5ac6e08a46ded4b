"""The programs that move blocks between the devices and the host."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax

from jaxllm.execution.caches import Caches
from jaxllm.execution.step_config import StepConfig

MOVED_BLOCKS = 16
"""The blocks that one run of a program moves."""


class MoveShape(NamedTuple):
    """The program that reads blocks of a cache group, or slots of recurrent state, or fills them.

    It takes (pools, ids [MOVED_BLOCKS]) and returns their content; or (pools, ids, content) and returns the pools. A
    negative id stands for no block.
    """

    holder: int
    """The number of the group, or after all groups that of the states."""
    fills: bool

    def describe(self) -> str:
        """Return a readable name of the program."""
        return f"{'fill' if self.fills else 'read'} blocks of group {self.holder}"


def move_shapes(config: StepConfig) -> list[MoveShape]:
    """Return the programs that move blocks; none where the host keeps none."""
    if not config.keeps_evicted:
        return []
    num_holders = len(config.groups) + bool(config.states)
    return [MoveShape(holder, fills) for holder in range(num_holders) for fills in (False, True)]


def move_program(
    caches: Caches, shape: MoveShape, num_blocks: int, ids: jax.ShapeDtypeStruct
) -> tuple[Callable[..., Any], tuple[int, ...], tuple[Any, ...], Any]:
    """Return a program's function, the arguments that it donates, what it takes, and the shardings it returns."""
    pools = caches.specs(num_blocks)
    content = caches.block_specs(num_blocks, shape.holder, MOVED_BLOCKS)
    pool_shardings, shardings = jax.tree.map(lambda spec: spec.sharding, (pools, content))
    if shape.fills:
        return partial(caches.fill_blocks, holder=shape.holder), (0,), (pools, ids, content), pool_shardings
    return partial(caches.read_blocks, holder=shape.holder), (), (pools, ids), shardings
