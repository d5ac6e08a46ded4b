"""The way of choices from VMEM to HBM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention.tpu.options import LANES

from .choice import ROWS


class ChosenScratch(NamedTuple):
    """Scratch of choices that leave: refs in a kernel, their shapes outside."""

    words: Any
    """[m, 8, w] in VMEM."""
    is_sent: Any
    """[m] in SMEM: 1 where a copy is on its way."""
    semaphores: Any


def chosen_scratch(count: int, words: int) -> ChosenScratch:
    """Return the shapes of `count` buffers of eight rows each."""
    return ChosenScratch(
        pltpu.VMEM((count, ROWS, words), jnp.int32),
        pltpu.SMEM((count,), jnp.int32),
        pltpu.SemaphoreType.DMA((count,)),
    )


@dataclass(frozen=True)
class ChosenRows:
    """Buffers for the words of eight rows each, and where they go."""

    scratch: ChosenScratch
    out: Any
    """[t / 8, 8, w] in HBM."""

    def start(self) -> None:
        """Begin with nothing on its way."""
        for i in range(self.scratch.is_sent.shape[0]):
            self.scratch.is_sent[i] = 0

    def clear(self, index: Array | int) -> None:
        """Make a buffer ready for new words: all are 0."""
        self._wait(index)
        self.scratch.words[index] = jnp.zeros(self.scratch.words.shape[1:], jnp.int32)

    def write(self, index: Array | int, lanes: Array, words: Array) -> None:
        """Store the words [8, 128] that begin at 128 times `lanes`."""
        self.scratch.words[index, :, pl.ds(pl.multiple_of(lanes * LANES, LANES), LANES)] = words

    def send(self, index: Array | int, number: Array) -> None:
        """Start the copy of a buffer to the eight rows from 8 * `number` on."""
        self._copy(index, number).start()
        self.scratch.is_sent[index] = 1

    def finish(self) -> None:
        """Wait for all copies."""
        for i in range(self.scratch.is_sent.shape[0]):
            self._wait(i)

    def _wait(self, index: Array | int) -> None:
        @pl.when(self.scratch.is_sent[index] == 1)
        def _() -> None:
            self._copy(index, 0).wait()  # all copies are of one size
            self.scratch.is_sent[index] = 0

    def _copy(self, index: Array | int, number: Array | int) -> Any:
        return pltpu.make_async_copy(
            self.scratch.words.at[index], self.out.at[number], self.scratch.semaphores.at[index]
        )
