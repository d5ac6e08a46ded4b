"""16 rows of quantized weights side by side, four codes of each, as `byte_products` takes them.

The rows are transposed when they are multiplied, 32 bits at a time. Codes are integers that are not negative, see
`rounding`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from llvmlite import ir

from pallas_kernels.native import processor
from pallas_kernels.native.emitter import CACHE_LINE, F32, I8, I32, I64, LANES, POINTER, Emitter, vector
from pallas_kernels.weights import CODEBOOKS, WeightFormat
from pallas_kernels.weights.format import CHUNK, PLANES

from .byte_products import BYTES, in_registers
from .operands import Operands, Range
from .rounding import INPUT_GROUP, SIGN, integers_of
from .unpack import Row, Unpacker

PIECE = 2048
"""The number of codes of a longer row that are multiplied at a time, rounded up to whole groups: 16 rows take 32 KiB.
"""
STEPS = CHUNK // 4
"""The number of vectors of 64 codes of 16 rows."""
_GROUPS = 8
"""The number of groups whose scales are transposed at a time."""


class Codes(NamedTuple):
    """The address of the codes of 16 rows, from some of their inputs on."""

    base: Any
    """The address of the first row's codes."""
    stride: Any
    """The distance in bytes from one row to the next."""
    following: Any
    """The address of memory that is fetched meanwhile."""
    fetched: Any
    """The number of its bytes that are fetched with each 64 inputs."""


CODES_TYPES = (POINTER, I64, POINTER, I64)  # as arguments of a function


class Scales(NamedTuple):
    """The addresses of vectors of 16 rows' scales and negative mins, one for each group of inputs."""

    scales: Any
    mins: Any


class Panels(Unpacker):
    """Writes the code that transposes 16 rows of a format."""

    def __init__(self, form: WeightFormat) -> None:
        super().__init__(jnp.float32, form)
        self.group = min(form.group or INPUT_GROUP, INPUT_GROUP)
        """The number of products that are added up as integers."""
        self.num_groups = CHUNK // self.group
        self.integers = integers_of(form)
        self.folds_offset = False  # it is subtracted from sums of integers
        self.has_mins = form.has_mins or form.zero_dtype is not None
        whole = max(self.whole, CHUNK)
        self.piece = -(-PIECE // whole) * whole
        self._block_bytes = CHUNK * form.bits // 8
        """The number of bytes of 64 codes."""

    def make_scales(self, e: Emitter) -> Scales:
        """Return room on the stack for a piece's scales."""
        if self.form.group is None:
            return Scales(None, None)
        size = (self.piece // self.form.group + _GROUPS) * LANES
        return Scales(e.array(F32, size), e.array(F32, size) if self.has_mins else None)

    def write_scales(self, e: Emitter, of: Operands, first: Any, piece: Range, to: Scales) -> None:
        """Write the scales of a piece of 16 rows, from row `first` on, unless whole rows share one."""
        group = self.form.group
        if group is None:
            return
        room = -(-self.piece // group // LANES) * LANES + LANES
        count = e.ir.udiv(e.ir.sub(piece.stop, piece.start), I64(group))
        rows = [None if target is None else e.array(F32, room * LANES) for target in to]
        with e.range(0, LANES) as lane:
            start = e.product(lane, room)
            held = Row(of.w, *(None if base is None else e.at(base, F32, start) for base in rows))
            self.prepare(e, held, of.parts, e.sum(first, lane), of.k, piece)
        for source, target in zip(rows, to, strict=True):
            if source is not None:
                with e.range(0, count, _GROUPS) as start:
                    places = [e.at(source, F32, start, lane * room) for lane in range(LANES)]
                    for group, scales in enumerate(e.load_columns(places, _GROUPS)):
                        e.store_vector(scales, target, e.product(start, LANES), group * LANES)

    def codes(self, e: Emitter, of: Operands, first: Any, start: Any) -> Codes:
        """Return 16 rows from row `first` on, from input `start` on; the next 16 are fetched meanwhile."""
        offset, size = e.product(e.ir.udiv(start, I64(CHUNK)), self._block_bytes), LANES * self._block_bytes
        base, following = (self.at(e, of.w, e.sum(first, row), of.k) for row in (0, LANES))
        following = e.at(following, I8, e.product(offset, LANES))
        return Codes(e.at(base, I8, offset), self.width(e, of.k), following, I64(size))

    def write_codes(self, e: Emitter, codes: Codes, num_blocks: Any, target: Any) -> None:
        """Write the vectors of `num_blocks` times 64 inputs."""
        with e.range(0, num_blocks) as block:
            vector_of = self.vectors(e, codes, block)
            address = e.at(target, I8, e.product(block, STEPS * BYTES))
            for step in range(STEPS):
                e.store_vector(vector_of(step), address, step * BYTES)

    def share(self, e: Emitter, codes: Codes, num_blocks: Any, index: Any, count: Any) -> Codes:
        """Return codes that fetch one of `count` shares of the memory to fetch with `num_blocks` blocks."""
        fetched = e.product(e.ceil_div(codes.fetched, e.product(count, CACHE_LINE)), CACHE_LINE)
        following = e.at(codes.following, I8, e.product(index, num_blocks, fetched))
        return codes._replace(following=following, fetched=fetched)

    def fetch_next(self, e: Emitter, codes: Codes, block: Any) -> None:
        """Begin to read the memory that is fetched with a block of 64 inputs."""
        start = e.product(block, codes.fetched)
        with e.range(0, codes.fetched, CACHE_LINE) as line:
            e.prefetch(codes.following, I8, start, line, cache=1)

    def vectors(self, e: Emitter, codes: Codes, block: Any) -> Callable[[int], Any]:
        """Return a function that returns a vector of a block of 64 inputs by its number: four codes of each row."""
        start = e.product(block, self._block_bytes)
        rows = [e.at(codes.base, I8, start, e.product(codes.stride, row)) for row in range(LANES)]
        planes, offset = [], 0
        for width in PLANES[self.form.bits]:
            planes.append(e.load_columns([e.at(row, I8, offset) for row in rows], 2 * width))
            offset += CHUNK * width // 8
        return lambda step: self._vector(e, planes, step)

    def _vector(self, e: Emitter, planes: Sequence[Sequence[Any]], step: int) -> Any:
        """Return four codes of each row."""
        codes, low = None, 0
        for words, width in zip(planes, PLANES[self.form.bits], strict=True):
            bits = _bits(e, words, width, step)
            codes = bits if codes is None else e.ir.or_(codes, e.ir.shl(bits, _bytes(low)))
            low += width
        if self.form.values in CODEBOOKS:
            _, offset, unit = self.integers
            return _look_up(e, [round(value / unit) + offset for value in self.form.table()], codes)
        return e.ir.xor(codes, _bytes(SIGN)) if self.form.bits == 8 else codes


def _bits(e: Emitter, words: Sequence[Any], width: int, step: int) -> Any:
    """Return the bits of a plane that belong to four codes of each row, in a byte each."""
    if width == 8:
        return e.ir.bitcast(words[step], vector(I8, BYTES))
    if width == 1:
        return _single_bits(e, words[step // 8], step % 8)
    later, index = divmod(step, len(words))
    word = e.ir.lshr(words[index], e.splat(I32(later * width)))
    return e.ir.and_(e.ir.bitcast(word, vector(I8, BYTES)), _bytes(2**width - 1))


def _single_bits(e: Emitter, words: Any, index: int) -> Any:
    """Return four bits of each word, from bit `place` times four on, in a byte each."""
    some = e.ir.bitcast(words, vector(I8, BYTES))
    spread = e.shuffle(some, some, [lane // 4 * 4 + index // 2 for lane in range(BYTES)])
    masks = [1 << (index % 2 * 4 + lane % 4) for lane in range(BYTES)]
    is_set = e.ir.icmp_unsigned("!=", e.ir.and_(spread, _bytes(*masks)), _bytes(0))
    return e.ir.zext(is_set, some.type)


def _look_up(e: Emitter, table: Sequence[int], index: Any) -> Any:
    """Return the entries of a table of 16 bytes."""
    present, tables = processor.current(), _bytes(*list(table) * (BYTES // len(table)))
    if present.has_avx512:
        return e.call_named("llvm.x86.avx512.pshuf.b.512", tables, index)
    name = "llvm.aarch64.neon.tbl1.v16i8" if present.is_aarch64 else "llvm.x86.avx2.pshuf.b"
    return in_registers(e, name, (tables, index))


def _bytes(*values: int) -> Any:
    """Return a vector of one byte, or of each of 64."""
    signed = [value - 256 if value > 127 else value for value in values]
    return ir.Constant(vector(I8, BYTES), signed if len(signed) > 1 else signed * BYTES)
