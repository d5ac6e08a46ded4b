"""The operands of wgmmas, made from words in registers: emitted as instructions, or emulated for the interpreter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu.fragmented_array import ir, vector
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.gpu.common import MMA_ROWS

from .registers import EmittedRegisters, EmulatedRegisters
from .sizes import DEPTH
from .widen import TILES, Widening

_THREADS = DEPTH // TILES
"""The threads that share a row of an operand."""


def words_layout(side_by_side: int = 1) -> Any:
    """Return the layout of words [64, 16]: a thread has a word of each tile, in two rows.

    The first thread has the first `side_by_side` words of a row (1, 2 or 4), the next thread the next ones.
    """
    columns = _THREADS * side_by_side
    tiling = plgpu.Tiling(((MMA_ROWS, columns), (16, columns), (8, columns), (side_by_side,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-7,), lane_dims=(-3, -2), vector_dim=-1)


WORDS_BY_OUTPUT = words_layout().reduce(1)
"""The layout of what is the same for all words of a row, [64]."""
_HALVES = 2
"""The rows of an operand that a thread holds, and the registers of each for 16 inputs."""


class Operands(NamedTuple):
    """Operands [64, inputs] of bfloat16 from words [64, 16]."""

    widening: Widening
    zero: Array
    """An int32 0 that is opaque to ptxas."""
    is_emulated: bool
    side_by_side: int = 1
    """The words of a row that a thread has side by side. With 4 a piece's four groups are those of the four threads."""
    layout: Any = plgpu.Layout.WGMMA
    """The operands' layout."""
    registers: type[EmittedRegisters] = EmittedRegisters
    """The instructions of the GPU."""

    def numbers(self, words: Array, parts: Mapping[str, list[Array]], tiles: range) -> Array:
        """Return the numbers of some tiles' codes; `parts` are words [64] by name."""

        def write(registers: Any, words: Sequence[Any], parts: Any, thread: Any) -> list[Any]:
            thread = thread if self.side_by_side == TILES else None
            made = [self.widening.numbers(registers, words[tile], parts, tile, thread) for tile in tiles]
            return [pair for pairs in made for pair in pairs]

        if self.is_emulated:
            by_thread = words.reshape(MMA_ROWS, TILES // self.side_by_side, _THREADS, self.side_by_side)
            of_tiles = [by_thread[:, j, :, k] for j in range(by_thread.shape[1]) for k in range(self.side_by_side)]
            return _emulate(write(EmulatedRegisters(), of_tiles, _columns(parts), _thread_numbers()))
        layouts = {name: [WORDS_BY_OUTPUT] * len(part) for name, part in parts.items()}
        operand = self._operand(len(tiles) * self.widening.depth_of_tile)
        arguments = (words_layout(self.side_by_side), layouts, plgpu.Layout.WG_SPLAT(()))

        @plgpu.inline_mgpu(arg_types=arguments, return_type=operand)
        def emit(_: Any, words: Any, parts: Any, zero: Any) -> Any:
            registers = self.registers(zero.registers.item())
            thread = registers.thread_of_row()
            by_half = [
                write(registers, _registers(words, half), _registers_of_parts(parts, half), thread)
                for half in range(_HALVES)
            ]
            return _join(by_half, operand)

        return emit(words, dict(parts), self.zero)  # pyright: ignore[reportCallIssue]

    def mins(self, parts: Mapping[str, list[Array]]) -> Array:
        """Return the operand that multiplies sums of inputs; `parts` are words [64] by name."""
        parts = {"mins": parts["mins"]}
        if self.is_emulated:
            return _emulate([self.widening.mins(EmulatedRegisters(), _columns(parts), _thread_numbers())])
        layouts = {"mins": [WORDS_BY_OUTPUT] * len(parts["mins"])}
        operand = self._operand(DEPTH)

        @plgpu.inline_mgpu(arg_types=(layouts, plgpu.Layout.WG_SPLAT(())), return_type=operand)
        def emit(_: Any, parts: Any, zero: Any) -> Any:
            registers = self.registers(zero.registers.item())
            thread = registers.thread_of_row()
            by_half = [_registers_of_parts(parts, half) for half in range(_HALVES)]
            return _join([[self.widening.mins(registers, own, thread)] for own in by_half], operand)

        return emit(parts, self.zero)  # pyright: ignore[reportCallIssue]

    def _operand(self, depth: int) -> Any:
        return plgpu.ShapeDtypeStruct((MMA_ROWS, depth), jnp.dtype(jnp.bfloat16), layout=self.layout)


def _registers(array: Any, half: int) -> list[Any]:
    """Return the registers of half of the rows, in the order of columns."""
    vectors = array.registers.reshape(-1, _HALVES)[:, half]
    positions = range(array.layout.vector_length)
    return [vector.extract(x, dynamic_position=[], static_position=[i]) for x in vectors for i in positions]


def _registers_of_parts(parts: Mapping[str, list[Any]], half: int) -> dict[str, list[Any]]:
    return {name: [_registers(array, half)[0] for array in part] for name, part in parts.items()}


def _join(by_half: list[list[tuple[Any, Any]]], operand: Any) -> Any:
    """Return an operand from its registers, by half of the rows and by 16 inputs."""
    layout, kind = operand.layout.to_mgpu(), ir.VectorType.get((2,), ir.BF16Type.get())
    registers = np.empty((len(by_half[0]), 2, _HALVES), object)
    for half, pairs in enumerate(by_half):
        for i, pair in enumerate(pairs):
            registers[i, :, half] = [mgpu.utils.bitcast(register, kind) for register in pair]
    registers = registers.reshape(layout.registers_shape(operand.shape))
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def _thread_numbers() -> Array:
    """Return the numbers of the threads that share a row, [1, 4]."""
    return lax.broadcasted_iota(jnp.int32, (1, _THREADS), 1)


def _columns(parts: Mapping[str, list[Array]]) -> dict[str, list[Array]]:
    return {name: [x[:, None] for x in part] for name, part in parts.items()}


def _emulate(pairs: list[tuple[Array, Array]]) -> Array:
    """Return an operand from its registers [64, 4] for each 16 inputs."""
    registers = [jnp.broadcast_to(x, (MMA_ROWS, _THREADS)) for pair in pairs for x in pair]
    numbers = [lax.bitcast_convert_type(x, jnp.bfloat16).reshape(MMA_ROWS, -1) for x in registers]
    return jnp.concatenate(numbers, axis=1)
