"""The operands of wgmmas, made from words in registers: emitted as instructions, or emulated for the interpreter."""

from __future__ import annotations

from collections.abc import Mapping
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
_TILING = plgpu.Tiling(((MMA_ROWS, _THREADS), (16, _THREADS), (8, _THREADS), (1,)))
WORDS = plgpu.Layout.TILED(_TILING, warp_dims=(-7,), lane_dims=(-3, -2), vector_dim=-1)
"""The layout of words [64, 16]: a thread has a word of each tile, in two rows."""
WORDS_BY_OUTPUT = WORDS.reduce(1)
_HALVES = 2
"""The rows of an operand that a thread holds, and the registers of each for 16 inputs."""


class Operands(NamedTuple):
    """Operands [64, inputs] of bfloat16 from words [64, 16]."""

    widening: Widening
    zero: Array
    """An int32 0 that is opaque to ptxas."""
    is_emulated: bool

    def numbers(self, words: Array, parts: Mapping[str, list[Array]], tiles: range) -> Array:
        """Return the numbers of some tiles' codes; `parts` are words [64] by name."""
        words = words[:, tiles[0] * _THREADS : (tiles[-1] + 1) * _THREADS]

        def write(registers: Any, words: Any, parts: Any) -> list[Any]:
            made = [
                self.widening.numbers(registers, word, parts, tile) for tile, word in zip(tiles, words, strict=True)
            ]
            return [pair for pairs in made for pair in pairs]

        if self.is_emulated:
            of_tiles = jnp.split(words, len(tiles), axis=1)
            return _emulate(write(EmulatedRegisters(), of_tiles, _columns(parts)))
        layouts = {name: [WORDS_BY_OUTPUT] * len(part) for name, part in parts.items()}
        operand = _operand(len(tiles) * self.widening.depth_of_tile)

        @plgpu.inline_mgpu(arg_types=(WORDS, layouts, plgpu.Layout.WG_SPLAT(())), return_type=operand)
        def emit(_: Any, words: Any, parts: Any, zero: Any) -> Any:
            registers = EmittedRegisters(zero.registers.item())
            return _join(
                [write(registers, _registers(words, half), _registers_of_parts(parts, half)) for half in range(_HALVES)]
            )

        return emit(words, dict(parts), self.zero)  # pyright: ignore[reportCallIssue]

    def mins(self, parts: Mapping[str, list[Array]]) -> Array:
        """Return the operand that multiplies sums of inputs; `parts` are words [64] by name."""
        parts = {"mins": parts["mins"]}
        if self.is_emulated:
            thread = lax.broadcasted_iota(jnp.int32, (1, _THREADS), 1)
            return _emulate([self.widening.mins(EmulatedRegisters(), _columns(parts), thread)])
        layouts = {"mins": [WORDS_BY_OUTPUT] * len(parts["mins"])}

        @plgpu.inline_mgpu(arg_types=(layouts, plgpu.Layout.WG_SPLAT(())), return_type=_operand(DEPTH))
        def emit(_: Any, parts: Any, zero: Any) -> Any:
            registers = EmittedRegisters(zero.registers.item())
            thread = registers.thread_of_row()
            by_half = [_registers_of_parts(parts, half) for half in range(_HALVES)]
            return _join([[self.widening.mins(registers, own, thread)] for own in by_half])

        return emit(parts, self.zero)  # pyright: ignore[reportCallIssue]


def _operand(depth: int) -> Any:
    return plgpu.ShapeDtypeStruct((MMA_ROWS, depth), jnp.dtype(jnp.bfloat16), layout=plgpu.Layout.WGMMA)


def _registers(array: Any, half: int) -> list[Any]:
    """Return the registers of half of the rows, in the order of columns."""
    registers = array.registers.reshape(-1, _HALVES)[:, half]
    return [vector.extract(x, dynamic_position=[], static_position=[0]) for x in registers]


def _registers_of_parts(parts: Mapping[str, list[Any]], half: int) -> dict[str, list[Any]]:
    return {name: [_registers(array, half)[0] for array in part] for name, part in parts.items()}


def _join(by_half: list[list[tuple[Any, Any]]]) -> Any:
    """Return an operand from its registers, by half of the rows and by 16 inputs."""
    layout, kind = plgpu.Layout.WGMMA.to_mgpu(), ir.VectorType.get((2,), ir.BF16Type.get())
    registers = np.empty((len(by_half[0]), 2, _HALVES), object)
    for half, pairs in enumerate(by_half):
        for i, pair in enumerate(pairs):
            registers[i, :, half] = [mgpu.utils.bitcast(register, kind) for register in pair]
    shape = layout.registers_shape((MMA_ROWS, DEPTH * len(registers)))
    return mgpu.FragmentedArray(_registers=registers.reshape(shape), _layout=layout, _is_signed=None)


def _columns(parts: Mapping[str, list[Array]]) -> dict[str, list[Array]]:
    return {name: [x[:, None] for x in part] for name, part in parts.items()}


def _emulate(pairs: list[tuple[Array, Array]]) -> Array:
    """Return an operand from its registers [64, 4] for each 16 inputs."""
    registers = [jnp.broadcast_to(x, (MMA_ROWS, _THREADS)) for pair in pairs for x in pair]
    numbers = [lax.bitcast_convert_type(x, jnp.bfloat16).reshape(MMA_ROWS, -1) for x in registers]
    return jnp.concatenate(numbers, axis=1)
