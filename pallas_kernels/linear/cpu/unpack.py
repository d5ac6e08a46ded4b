"""Weights in memory become a kernel's numbers: plain ones, 16-bit ones, or codes of a `WeightFormat`.

The numbers have the same bits as if the weights had been widened when they were loaded: value * scale - min in float32,
then rounded to x's dtype. 64 codes are unpacked at a time. With AVX-512 the numbers of all codes of up to 5 bits are in
one register, a table that is made once for each group, and one instruction looks up the numbers of a whole vector.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from llvmlite import ir

from pallas_kernels.native import pairs, processor
from pallas_kernels.native.emitter import F16, F32, I1, I8, I16, I32, I64, LANES, Emitter, vector
from pallas_kernels.native.number_formats import FORMATS
from pallas_kernels.weights import CODEBOOKS, WeightFormat
from pallas_kernels.weights.format import CHUNK, PLANES

from .kind import STEP_BYTES

_MAX_GROUPS = 512
"""The most groups whose scales and mins are kept on the stack; longer rows are taken in pieces."""
_TABLE_BITS = 5
"""The most bits of codes that are looked up in a register of 32 words."""
_Vectors = list[Any]


class Row(NamedTuple):
    """The addresses of a row's codes, and of its groups' scales and negative mins in float32, from the first group."""

    codes: Any
    scales: Any = None
    mins: Any = None


class Plain:
    """Weights of x's dtype, which are multiplied without a change."""

    scales_sums = False
    """True if sums over a row are multiplied by its scale."""
    parts: Sequence[str] = ()
    """The parts of the weights besides their codes."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = jnp.dtype(dtype)
        self.storage, self.num_bytes = FORMATS[self.dtype].storage, self.dtype.itemsize
        self.bits = 8 * self.dtype.itemsize
        self.cache = 2
        """The cache that weights are fetched into."""
        self.step = STEP_BYTES // self.dtype.itemsize
        """The number of numbers that are loaded at a time."""

    def at(self, e: Emitter, codes: Any, row: Any, k: Any) -> Any:
        """Return the address of a row's codes."""
        return e.at(codes, self.storage, e.product(row, self.width(e, k)))

    def width(self, e: Emitter, k: Any) -> Any:
        """Return the number of `storage` elements of a row of k numbers."""
        del e
        return k

    def parts_at(self, e: Emitter, parts: Sequence[Any], row: Any, k: Any) -> list[Any]:
        """Return the addresses of parts from a row on."""
        del e, row, k
        return list(parts)

    def open(self, e: Emitter, codes: Any, row: Any, k: Any) -> Row:
        """Return a row; `prepare` is called for each of its pieces."""
        return Row(self.at(e, codes, row, k))

    @contextmanager
    def pieces(self, e: Emitter, start: Any, stop: Any) -> Iterator[tuple[Any, Any]]:
        """Divide a stretch of a row into pieces whose scales fit on the stack."""
        del e
        yield start, stop

    def prepare(self, e: Emitter, row: Row, parts: Sequence[Any], index: Any, k: Any, piece: Sequence[Any]) -> Row:
        """Write a piece's scales and mins, and return the row with their addresses."""
        del e, parts, index, k, piece
        return row

    def load(self, e: Emitter, row: Row, step: Any) -> _Vectors:
        """Return a step's numbers, as vectors of float32 or pairs of bfloat16."""
        return [self.load_vector(e, row.codes, e.product(step, self.step), 0, LANES)]

    def load_vector(self, e: Emitter, base: Any, start: Any, begin: int, lanes: int) -> Any:
        """Return a vector of `lanes` numbers or pairs, from the one on that is `begin` behind the number at `start`."""
        kind = F32 if self.dtype == jnp.float32 else I32
        return e.load_vector(e.at(base, self.storage, start), kind, begin, lanes=lanes)

    def fetch(self, e: Emitter, row: Row, step: Any, ahead: Any) -> None:
        """Begin to read the codes that lie `ahead` bytes behind a step's."""
        e.prefetch(row.codes, I8, ahead, e.product(step, self.step * self.bits // 8), cache=self.cache)

    def write(
        self,
        e: Emitter,
        codes: Any,
        parts: Sequence[Any],
        rows: Sequence[Any],
        k: Any,
        target: Any,
        numbers: Sequence[Any] | None = None,
        ahead: Any = None,
    ) -> None:
        """Write the numbers of a range of rows: those of the range `numbers`, or all.

        Meanwhile the memory `ahead` bytes further is fetched.
        """
        storage = FORMATS[self.dtype].storage
        start, stop = numbers or (I64(0), k)
        with e.range(*rows) as index:
            held = self.open(e, codes, index, k)
            row_of_target = e.product(e.ir.sub(index, rows[0]), e.ir.sub(stop, start))
            out = e.at(target, storage, row_of_target, e.product(start, -1))
            with self.pieces(e, start, stop) as piece:
                row = self.prepare(e, held, parts, index, k, piece)
                with e.range(*(e.ir.udiv(values, I64(self.step)) for values in piece)) as step:
                    if ahead is not None:
                        self.fetch(e, row, step, ahead)
                    for number, values in enumerate(self.load(e, row, step)):
                        e.store_vector(values, e.at(out, storage, e.product(step, self.step)), number * LANES)


class Halves(Plain):
    """Weights of 16 bits, which are widened when they are loaded, and multiplied in float32."""

    def __init__(self, form: WeightFormat) -> None:
        super().__init__(jnp.float32)
        self.format, self.bits = FORMATS[form.code_dtype], form.bits
        self.storage, self.num_bytes = self.format.storage, self.format.num_bytes

    def load_vector(self, e: Emitter, base: Any, start: Any, begin: int, lanes: int) -> Any:
        return self.format.widen(e, e.load_vector(base, self.storage, start, begin, lanes=lanes))


class Unpacker(Plain):
    """Weights of a format."""

    def __init__(self, dtype: Any, form: WeightFormat) -> None:
        super().__init__(dtype)
        self.form, self.bits, self.parts = form, form.bits, form.parts[1:]
        self.storage, self.num_bytes, self.cache = I8, 1, 1
        self.scales_sums = form.group is None
        self.whole = 1
        """Rows are divided into pieces of multiples of this."""
        if form.group is not None:
            self.step = CHUNK
            per_factor = math.gcd(form.factor_group // form.group, LANES) if form.factor_group else 1
            self.whole = form.group * per_factor
        dtypes = [form.dtype(part) for part in self.parts]
        is_float32 = any(each == np.float32 for each in dtypes)
        self.rounds_twice = is_float32 and (form.has_mins or form.zero_dtype is not None)
        """True if the product of a value and a scale may have more bits than float32 has."""
        present, is_bfloat16, is_grouped = processor.current(), self.dtype == jnp.bfloat16, form.group is not None
        self.has_words = is_bfloat16 and present.has_bfloat16_dot and present.is_x86
        """True if there are instructions for 32 numbers in bfloat16."""
        has_bytes = (present.has_avx512 or present.name == "avx2") and form.bits == 4
        self.has_bytes = has_bytes and is_bfloat16 and is_grouped and not self.has_words
        """True if the bytes of 32 numbers in bfloat16 are looked up."""
        most = _TABLE_BITS if self.has_words and form.group != LANES else _TABLE_BITS - 1
        can_look_up = self.has_words or (not is_bfloat16 and present.has_avx512)
        self.has_table = self.has_bytes or (can_look_up and is_grouped and form.bits <= most)
        """True if the numbers of all of a group's codes are made first."""
        self.has_offset = not self.has_table and form.values == "integer" and form.offset != 0
        self.folds_offset = self.has_offset and not (is_float32 or form.has_mins or form.zero_dtype)
        """True if the offset of codes is subtracted as a min."""
        self.has_mins = form.has_mins or form.zero_dtype is not None or self.folds_offset

    def width(self, e: Emitter, k: Any) -> Any:
        return e.ir.lshr(e.product(k, self.form.bits), I64(3))

    @contextmanager
    def pieces(self, e: Emitter, start: Any, stop: Any) -> Iterator[tuple[Any, Any]]:
        if self.form.group is None:
            yield start, stop
            return
        size = _MAX_GROUPS * self.form.group
        with e.range(start, stop, size) as first:
            yield first, e.least(e.sum(first, size), stop)

    def parts_at(self, e: Emitter, parts: Sequence[Any], row: Any, k: Any) -> list[Any]:
        addresses = []
        for name, part in zip(self.parts, parts, strict=True):
            per = self.form.factor_group if name.endswith("factors") else self.form.group
            size = e.product(row, e.ir.udiv(k, I64(per))) if per else row
            addresses.append(e.at(part, I8, e.product(size, self.form.dtype(name).itemsize)))
        return addresses

    def open(self, e: Emitter, codes: Any, row: Any, k: Any) -> Row:
        scales, mins = (e.array(F32, _MAX_GROUPS) if has else None for has in (not self.scales_sums, self.has_mins))
        return Row(self.at(e, codes, row, k), scales, mins)

    def prepare(self, e: Emitter, row: Row, parts: Sequence[Any], index: Any, k: Any, piece: Sequence[Any]) -> Row:
        group, factor_group, (start, stop) = self.form.group, self.form.factor_group, piece
        if group is None:
            return row
        named = dict(zip(self.parts, parts, strict=True))
        first, count = e.ir.udiv(start, I64(group)), e.ir.udiv(e.ir.sub(stop, start), I64(group))
        of_row = e.sum(e.product(index, e.ir.udiv(k, I64(group))), first)

        def write(entry: Any, lanes: int) -> None:
            loaded = {
                name: self.load_part(e, name, named[name], e.sum(of_row, entry), lanes)
                for name in ("scales", "mins", "zeros")
                if name in named
            }
            if factor_group:
                of_factors = e.ir.udiv(e.sum(first, entry), I64(factor_group // group))
                of_factors = e.sum(e.product(index, e.ir.udiv(k, I64(factor_group))), of_factors)
                for name, factors in (("scales", "scale_factors"), ("mins", "min_factors")):
                    if name in loaded:
                        factor = self.load_part(e, factors, named[factors], of_factors, 1)
                        loaded[name] = e.ir.fmul(loaded[name], e.shuffle(factor, factor, [0] * lanes))
            scales = loaded["scales"]
            e.store_vector(scales, row.scales, entry)
            if self.has_mins:
                if self.folds_offset:
                    mins = e.ir.fmul(scales, e.constant(float(self.form.offset), scales))
                else:
                    mins = loaded["mins"] if "mins" in loaded else e.ir.fmul(loaded["zeros"], scales)
                e.store_vector(e.ir.fneg(mins), row.mins, entry)

        if factor_group:
            lanes = math.gcd(factor_group // group, LANES)
            with e.range(0, count, lanes) as entry:
                write(entry, lanes)
        else:
            with e.ir.if_else(e.ir.icmp_signed(">=", count, I64(LANES))) as (by_vectors, by_ones):
                with by_vectors, e.range(0, count, LANES) as entry:
                    write(e.least(entry, e.ir.sub(count, I64(LANES))), LANES)
                with by_ones, e.range(0, count) as entry:
                    write(entry, 1)
        before = e.product(first, -1)
        return Row(row.codes, *(None if base is None else e.at(base, F32, before) for base in (row.scales, row.mins)))

    def load_part(self, e: Emitter, name: str, base: Any, index: Any, lanes: int) -> Any:
        """Return a vector of entries of a part in float32."""
        dtype = self.form.dtype(name)
        if dtype == np.float16:
            return e.ir.fpext(e.load_vector(base, F16, index, lanes=lanes), vector(F32, lanes))
        if dtype in (np.uint8, np.int8):
            integers = e.load_vector(base, I8, index, lanes=lanes)
            return (e.ir.uitofp if dtype == np.uint8 else e.ir.sitofp)(integers, vector(F32, lanes))
        form = FORMATS[dtype]
        return form.widen(e, e.load_vector(base, form.storage, index, lanes=lanes))

    def load(self, e: Emitter, row: Row, step: Any) -> _Vectors:
        codes = e.at(row.codes, I8, e.product(step, self.step * self.form.bits // 8))
        per_vector = STEP_BYTES // self.dtype.itemsize
        starts = range(0, self.step, per_vector)
        if self.dtype == jnp.float32:
            return [self._numbers(e, row, codes, step, first, 1) for first in starts]
        if self.has_bytes:
            return [self._look_up_bytes(e, row, codes, step, first) for first in starts]
        if not self.has_words:
            numbers = [[self._numbers(e, row, codes, step, first + odd, 2) for odd in (0, 1)] for first in starts]
            return [self._join(e, *each) for each in numbers]
        if self.has_table:
            return [self._look_up_words(e, row, codes, step, first) for first in starts]
        return [
            pairs.narrow(e, *(self._numbers(e, row, codes, step, first + half, 1) for half in (0, LANES)))
            for first in starts
        ]

    def _numbers(self, e: Emitter, row: Row, codes: Any, step: Any, first: int, stride: int) -> Any:
        """Return the numbers of 16 codes of a step: every `stride`th from code `first` on."""
        if self.has_table:
            table = self._table(e, row, step, first, 0)
            return e.call_named("llvm.x86.avx512.permvar.sf.512", table, self._index(e, codes, first, stride))
        values = self._values(e, codes, first, stride)
        if self.scales_sums:
            return values
        return self._scale(e, values, *(self._spread(e, base, step, first, stride) for base in (row.scales, row.mins)))

    def _scale(self, e: Emitter, values: Any, scales: Any, mins: Any) -> Any:
        """Return value * scale - min; the min is passed negated, or None."""
        if mins is None or self.rounds_twice:
            product = e.ir.fmul(values, scales)
            return product if mins is None else e.ir.fadd(product, mins)
        return e.fma(values, scales, mins)

    def _spread(self, e: Emitter, base: Any, step: Any, first: int, stride: int) -> Any:
        """Return a group's entry in each lane, for the codes that are in the lanes."""
        if base is None:
            return None
        group = self.form.group
        assert group is not None
        if group >= CHUNK:
            return e.splat(e.load(base, F32, e.ir.udiv(step, I64(group // CHUNK))))
        low, high = first // group, (first + stride * (LANES - 1)) // group
        early, late = (e.splat(e.load(base, F32, e.product(step, CHUNK // group), each)) for each in (low, high))
        if low == high:
            return early
        return e.shuffle(
            early, late, [lane + LANES * ((first + stride * lane) // group - low) for lane in range(LANES)]
        )

    def _values(self, e: Emitter, codes: Any, first: int, stride: int) -> Any:
        """Return the values of 16 codes."""
        form = self.form
        if form.bits == 8:
            return self._bytes(e, codes, first, stride)
        index = self._index(e, codes, first, stride)
        if form.values in CODEBOOKS:
            return self._look_up(e, index)
        if self.has_offset and not self.folds_offset:
            index = e.ir.sub(index, e.constant(form.offset, index))
        return e.ir.sitofp(index, vector(F32))

    def _bytes(self, e: Emitter, codes: Any, first: int, stride: int) -> Any:
        """Return the values of 16 codes of 8 bits."""
        low = 8 * (first % stride)
        if stride == 1:
            raw = e.load_vector(codes, I8, first)
        else:
            raw = e.load_vector(e.at(codes, I8, first // stride * stride), I16, 0)
        if self.form.values == "integer":
            raw = e.ir.sext(raw, vector(I32))
            if stride > 1:
                raw = e.ir.ashr(e.ir.shl(raw, e.constant(24 - low, raw)), e.constant(24, raw))
            return e.ir.sitofp(raw, vector(F32))
        if stride > 1:
            raw = e.ir.trunc(e.ir.lshr(raw, e.constant(low, raw)), vector(I8))
        return FORMATS[self.form.code_dtype].widen(e, raw)

    def _index(self, e: Emitter, codes: Any, first: int, stride: int) -> Any:
        """Return 16 codes as integers; in a table's index the higher bits may be anything."""
        index, start, low = None, 0, 0
        for width in PLANES[self.form.bits]:
            plane = self._plane(e, e.at(codes, I8, start), width, first, stride)
            is_last = low + width == self.form.bits
            if not (self.has_table and is_last and low == 0):
                plane = e.ir.and_(plane, e.constant(2**width - 1, plane))
            if low:
                plane = e.ir.or_(index, e.ir.shl(plane, e.constant(low, plane)))
            index, start, low = plane, start + CHUNK * width // 8, low + width
        return index

    def _plane(self, e: Emitter, plane: Any, width: int, first: int, stride: int) -> Any:
        """Return integers with a plane's bits of 16 codes as their lowest bits."""
        numbers = range(first, first + stride * LANES, stride)
        if width == 1:
            bits = e.splat(_load_bits(e, plane, first))
            return e.ir.lshr(bits, ir.Constant(vector(I32), [number % 32 for number in numbers]))
        per_byte = 8 // width
        in_plane = CHUNK // per_byte
        start = first % in_plane // stride * stride
        count = min(LANES, in_plane // stride)
        element = I8 if stride == 1 else I16
        integers = e.load_vector(e.at(plane, I8, start), element, 0, lanes=count)
        if count < LANES:
            integers = e.shuffle(integers, integers, [lane % count for lane in range(LANES)])
        integers = e.ir.zext(integers, vector(I32))
        shifts = [number // in_plane * width + 8 * (number % stride) for number in numbers]
        return e.ir.lshr(integers, ir.Constant(vector(I32), shifts)) if any(shifts) else integers

    def _look_up(self, e: Emitter, index: Any) -> Any:
        """Return the numbers of a codebook."""
        table = self.form.table()
        if processor.current().has_avx512:
            return e.call_named("llvm.x86.avx512.permvar.sf.512", _constants(table), index)
        if processor.current().name == "avx2":
            return _look_up_halves(e, table, index)
        result = e.constant(float(table[0]), e.splat(F32(0.0)))
        for code in range(1, len(table)):
            is_here = e.ir.icmp_signed("==", index, e.constant(code, index))
            result = e.ir.select(is_here, e.constant(float(table[code]), result), result)
        return result

    def _table(self, e: Emitter, row: Row, step: Any, first: int, part: int) -> Any:
        """Return the numbers of 16 codes in the group of a step's code."""
        values = _constants(np.resize(self.form.table(), 2 * LANES)[part * LANES : (part + 1) * LANES])
        return self._scale(e, values, *(self._spread(e, base, step, first, 0) for base in (row.scales, row.mins)))

    def _look_up_words(self, e: Emitter, row: Row, codes: Any, step: Any, first: int) -> Any:
        """Return 32 numbers in bfloat16."""
        is_split = self.form.group == LANES
        early = self._table(e, row, step, first, 0)
        late = self._table(e, row, step, first + LANES, 0) if is_split else self._table(e, row, step, first, 1)
        table = e.ir.bitcast(pairs.narrow(e, early, late), vector(I16, 2 * LANES))
        index = self._words(e, codes, first)
        if is_split:
            index = e.ir.and_(index, e.constant(LANES - 1, index))
            index = e.ir.or_(index, ir.Constant(index.type, [lane // LANES * LANES for lane in range(2 * LANES)]))
        return e.ir.bitcast(e.call_named("llvm.x86.avx512.permvar.hi.512", table, index), pairs.PAIRS)

    def _look_up_bytes(self, e: Emitter, row: Row, codes: Any, step: Any, first: int) -> Any:
        """Return 32 numbers in bfloat16; their low and high bytes are looked up separately, 16 at a time."""
        firsts = (first, first + LANES) if self.form.group == LANES else (first,)
        tables = [e.ir.bitcast(self._table(e, row, step, each, 0), pairs.PAIRS) for each in firsts]
        tables = [e.ir.bitcast(_round(e, table), vector(I8, 4 * LANES)) for table in tables]
        some = e.load_vector(codes, I8, 0, lanes=2 * LANES)
        if first:
            some = e.ir.lshr(some, e.constant(4, some))
        index = e.ir.and_(some, e.constant(15, some))
        low, high = (
            e.call_named(
                "llvm.x86.avx2.pshuf.b", e.shuffle(tables[0], tables[-1], _bytes_of_tables(place, len(tables))), index
            )
            for place in (2, 3)
        )
        lanes = [lane + 2 * LANES * late for lane in range(2 * LANES) for late in (0, 1)]
        return e.ir.bitcast(e.shuffle(low, high, lanes), pairs.PAIRS)

    def _words(self, e: Emitter, codes: Any, first: int) -> Any:
        """Return 32 codes in 16 bits each; bits that the table does not use may be anything."""
        kind = vector(I16, 2 * LANES)
        planes = PLANES[self.form.bits]
        if planes[0] == 4:
            words = e.ir.zext(e.load_vector(codes, I8, 0, lanes=2 * LANES), kind)
            shifts = [4 * (first // 32)] * 32
        else:
            some = e.load_vector(codes, I8, 0)
            words = e.ir.zext(e.shuffle(some, some, [*range(LANES)] * 2), kind)
            shifts = [2 * ((first + lane) // LANES) for lane in range(32)]
        if any(shifts):
            words = e.ir.lshr(words, ir.Constant(kind, shifts))
        if len(planes) > 1:
            words = e.ir.and_(words, e.constant(2 ** planes[0] - 1, words))
            high = _load_bits(e, e.at(codes, I8, CHUNK * planes[0] // 8), first)
            is_high = e.ir.bitcast(high, vector(I1, 2 * LANES))
            words = e.ir.select(is_high, e.ir.add(words, e.constant(2 ** planes[0], words)), words)
        return words

    def _join(self, e: Emitter, even: Any, odd: Any) -> Any:
        """Round to bfloat16, and return pairs."""
        even, odd = (e.ir.bitcast(each, pairs.PAIRS) for each in (even, odd))
        if not self.scales_sums:  # otherwise they are exact
            even, odd = (_round(e, each) for each in (even, odd))
        return e.ir.or_(
            e.ir.lshr(even, e.constant(16, even)), e.ir.and_(odd, ir.Constant(odd.type, [0xFFFF0000] * LANES))
        )


def _look_up_halves(e: Emitter, table: np.ndarray, index: Any) -> Any:
    """Return 16 of a table's 16 numbers: 8 at a time, each from the lower or the upper half of the table."""

    def look_up(half: np.ndarray) -> Any:
        indices = (e.shuffle(index, index, range(start, start + 8)) for start in (0, 8))
        early, late = (e.call_named("llvm.x86.avx2.permps", _constants(half), each) for each in indices)
        return e.shuffle(early, late, range(LANES))

    is_high = e.ir.icmp_signed(">", index, e.constant(7, index))
    return e.ir.select(is_high, look_up(table[8:]), look_up(table[:8]))


def _bytes_of_tables(byte: int, num_tables: int) -> list[int]:
    """Return the indices of one byte of each of 16 float32, in the first of two tables and in the last."""
    return [table * 4 * LANES + 4 * number + byte for table in (0, num_tables - 1) for number in range(LANES)]


def _load_bits(e: Emitter, plane: Any, first: int) -> Any:
    """Return the 32 bits of a plane of single bits that hold a code's bit."""
    return e.ir.load(e.at(plane, I8, first // 32 * 4), typ=I32, align=1)


def _round(e: Emitter, bits: Any) -> Any:
    """Return float32 with its upper half rounded, half to even."""
    is_odd = e.ir.and_(e.ir.lshr(bits, e.constant(16, bits)), e.constant(1, bits))
    return e.ir.add(bits, e.ir.add(is_odd, e.constant(0x7FFF, bits)))


def _constants(numbers: np.ndarray) -> Any:
    return ir.Constant(vector(F32, len(numbers)), [float(number) for number in numbers])
