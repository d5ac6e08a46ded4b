"""Codes of a GPU's kernel become bfloat16 numbers in registers, two at a time.

An integer's bits in the mantissa of 128 in bfloat16 give 128 plus the integer. The bits of a smaller float, where
bfloat16 has the same fields, give the float divided by a power of two. This avoids conversions, which are slow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pallas_kernels.weights import WeightFormat

from .registers import Registers
from .sizes import LARGE_GROUP, piece

_SUM_POWER = 32
"""Numbers of e2m1 are smaller by this power of two until sums are complete, so that large scales stay finite."""
TILES = 4
"""The parts of a piece whose words are held by four threads each, a word by each."""
_MAGIC = 0x43004300
"""128 and 128. A byte below 128 in the lower bits of each adds to it."""
_MINUS_128 = 0xC300C300
_SIGN, _LOW_BITS, _HIGH_BIT = 0x80008000, 0x007F007F, 0x00800080
_E4M3, _E2M1 = (4, 0x07F007F0), (6, 0x01C001C0)
"""The distance from the bits of a small float below its sign to the same fields of bfloat16, and their mask there."""
_E4M3_POWER, _E2M1_POWER = 120, 126
"""The powers of two by which the bits there are too small."""
_ENTRY_BYTES = {"uint8": 1, "int8": 1, "float16": 2, "bfloat16": 2, "float32": 4}

type Words = Sequence[Any]
"""Registers with the entries of a piece of a row, in order."""


class Widening(NamedTuple):
    """How a format's codes become numbers, and what multiplies their sums.

    Numbers are a code less its zero, exactly, times their scale if groups are small, rounded once. Scales of large
    groups, and factors of scales, multiply sums. Mins multiply sums of a group's inputs, which x has besides.
    """

    form: WeightFormat

    @property
    def scales_numbers(self) -> bool:
        """Return whether `scales` multiply numbers."""
        return self.form.group is not None and (self.form.factor_group is not None or self.form.group < LARGE_GROUP)

    @property
    def sum_scales(self) -> str | None:
        """Return the part that multiplies sums, if there is one for groups."""
        if self.form.factor_group is not None:
            return "scale_factors"
        return "scales" if self.form.group is not None and not self.scales_numbers else None

    @property
    def has_own_min_sums(self) -> bool:
        """Return whether the sums with mins are scaled differently than the others."""
        return self.form.has_mins and self.form.factor_group is not None

    @property
    def number_parts(self) -> tuple[str, ...]:
        """Return the parts that numbers are made with, besides the codes."""
        scales = ("scales",) if self.scales_numbers else ()
        return (*scales, *(name for name in ("zeros", "mins") if name in self.form.parts))

    @property
    def depth_of_tile(self) -> int:
        """Return the inputs of a tile."""
        return piece(self.form) // TILES

    @property
    def unit(self) -> float:
        """Return the number that sums are multiplied by at the end."""
        return 2.0**_SUM_POWER if self.form.values == "e2m1" else 1

    def count(self, name: str) -> int:
        """Return the entries of a part for a piece, at least 1."""
        per_entry = self.form.factor_group if name.endswith("factors") else self.form.group
        return max(1, piece(self.form) // (per_entry or piece(self.form)))

    def entry_bytes(self, name: str) -> int:
        """Return the bytes of an entry of a part."""
        return _ENTRY_BYTES[self.form.dtype(name).name]

    def numbers(
        self, registers: Registers, word: Any, parts: Mapping[str, Words], tile: int, thread: Any = None
    ) -> list[tuple[Any, Any]]:
        """Return operands for each 16 inputs of a tile, each the registers with two times two numbers.

        Args:
          registers: the instructions.
          word: codes.
          parts: the entries of `number_parts` for the piece.
          tile: the tile's number.
          thread: the number of the thread among the four that share a row, if its words are those of one group.
        """
        counts = {name: self.count(name) for name in parts}
        by_thread = TILES if thread is not None else None
        indices = {name: thread if n == by_thread else tile * n // TILES for name, n in counts.items()}
        writer = _Writer(registers, self.form, parts, indices)
        if self.form.values == "e2m1":
            made = writer.e2m1(word)
        elif self.form.values == "e4m3":
            made = writer.e4m3(word)
        else:
            made = writer.integers(word)
        return list(zip(made[::2], made[1::2], strict=True))

    def mins(self, registers: Registers, parts: Mapping[str, Words], column: Any) -> tuple[Any, Any]:
        """Return the operand that multiplies sums: the negative min of a group three times, and what it lacks.

        `column` is the number of the thread among the four that share a row, and of its group.
        """
        writer = _Writer(registers, self.form, parts, {"mins": column})
        zero = registers.constant(0)
        high, low = (zero if x is None else registers.subtract(zero, x) for x in writer.entry("mins"))
        return high, registers.permute(high, low, 0x5410)


class _Writer:
    """The instructions for a tile."""

    def __init__(
        self, registers: Registers, form: WeightFormat, parts: Mapping[str, Words], indices: Mapping[str, Any]
    ) -> None:
        self._registers, self._form, self._parts, self._indices = registers, form, parts, indices

    def integers(self, word: Any) -> list[Any]:
        """Return the numbers of integer codes."""
        registers, form = self._registers, self._form
        if form.bits == 8:
            zero = self._signed(self._byte("zeros")) if form.zero_dtype else None
            return [self._scaled(self._signed(registers.shift_right(word, x)), zero) for x in (0, 8)]
        # They are too large by 128 and their zero at first.
        base = self._byte("zeros") if form.zero_dtype else registers.constant(_MAGIC + form.offset * 0x10001)
        mask, magic = ((1 << form.bits) - 1) * 0x10001, registers.constant(_MAGIC)
        distances = (0, 4, 8, 12) if form.bits == 4 else (0, 8)
        large = [registers.and_or(registers.shift_right(word, x), mask, magic) for x in distances]
        if "scales" in self._parts and form.dtype("scales").itemsize == 1 and not form.offset:
            scale = self.entry("scales")[0]  # 128 times it is exact
            less = registers.multiply(scale, registers.constant(_MINUS_128))
            return [registers.multiply_add(x, scale, less) for x in large]
        return [self._scaled(x, base) for x in large]

    def e4m3(self, word: Any) -> list[Any]:
        """Return the numbers of e4m3 codes."""
        by = self._registers.constant(_power(_E4M3_POWER))
        ordered = (self._registers.shift_left(word, 8), word)
        return [self._scaled(self._small_float(x, *_E4M3, by), None) for x in ordered]

    def e2m1(self, word: Any) -> list[Any]:
        """Return the numbers of e2m1 codes, too small by `_SUM_POWER`."""
        registers, by = self._registers, self._registers.constant(_power(_E2M1_POWER - _SUM_POWER))
        if "scales" in self._parts:
            by = registers.multiply(by, self.entry("scales")[0])
        return [self._small_float(registers.shift_left(word, x), *_E2M1, by) for x in (12, 8, 4, 0)]

    def entry(self, name: str) -> tuple[Any, Any]:
        """Return an entry as bfloat16, twice, and what it lacks, None if nothing."""
        registers, dtype = self._registers, self._form.dtype(name).name
        if dtype == "int8":
            return self._signed(self._byte(name)), None
        if dtype == "uint8":
            return registers.subtract(self._byte(name), registers.constant(_MAGIC)), None
        if dtype == "bfloat16":
            return self._half(name), None
        if dtype == "float16":
            number = registers.from_float16(self._half(name))
        else:
            number = self._parts[name][self._indices[name]]
        rounded = registers.twice(number)
        return rounded, registers.twice(registers.rest(number, rounded))

    def _scaled(self, numbers: Any, base: Any) -> Any:
        """Return numbers less their base, times their scale if they have one; this is rounded once."""
        registers = self._registers
        numbers = numbers if base is None else registers.subtract(numbers, base)
        if "scales" not in self._parts:
            return numbers
        scale, lacks = self.entry("scales")
        if lacks is None:
            return registers.multiply(numbers, scale)
        return registers.multiply_add(numbers, scale, registers.multiply(numbers, lacks))

    def _signed(self, x: Any) -> Any:
        """Return the signed bytes in the lower bits of both halves."""
        registers, magic = self._registers, self._registers.constant(_MAGIC)
        return registers.subtract(registers.and_or(x, _LOW_BITS, magic), registers.and_or(x, _HIGH_BIT, magic))

    def _small_float(self, x: Any, distance: int, mask: int, by: Any) -> Any:
        """Return the small floats in the upper bits of both halves, times what makes up for their exponent."""
        registers = self._registers
        sign = registers.mask(x, _SIGN)
        return registers.enlarge(registers.and_or(registers.shift_right(x, distance), mask, sign), by)

    def _byte(self, name: str) -> Any:
        """Return 128 plus an entry of one byte, below 128, twice."""
        return self._pick(name, self._registers.constant(0x43), 0x4040, 0x0101)

    def _half(self, name: str) -> Any:
        """Return an entry of two bytes twice."""
        return self._pick(name, self._parts[name][-1], 0x1010, 0x2222)

    def _pick(self, name: str, high: Any, selector: int, step: int) -> Any:
        low, index = self._parts[name][0], self._indices[name]
        if isinstance(index, int):
            return self._registers.permute(low, high, selector + index * step)
        return self._registers.permute(low, high, selector, step, index)


def _power(exponent: int) -> int:
    """Return the bits of two bfloat16 powers of two."""
    return (127 + exponent << 7) * 0x10001
