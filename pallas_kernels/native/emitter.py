"""Write LLVM IR: loops, variables and vectors of float32, on top of llvmlite's builder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()
POINTER, VOID = ir.PointerType(), ir.VoidType()
NULL = ir.Constant(POINTER, None)


class _BFloat(ir.Type):
    """The type bfloat, which llvmlite does not have."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


BF16 = _BFloat()
LANES = 16
"""The number of float32 in a vector of 512 bits. A processor with shorter registers takes several for each."""
CACHE_LINE = 64
"""The number of bytes that a processor reads from memory at once."""
_LOG2_E = 1.4426950408889634
# exp(x) = 2**n * exp(r), r = x - n * ln 2 in [-ln 2 / 2, ln 2 / 2]: ln 2 in two parts, Cephes' polynomial for exp(r).
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
_EXP_COEFFICIENTS = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)
_EXP_LEAST = -87.3
"""Below this number exp is set to 0."""


def vector(element: ir.Type, lanes: int = LANES) -> ir.VectorType:
    """Return the type of a vector."""
    return ir.VectorType(element, lanes)


class Variable:
    """A variable on the stack; LLVM keeps it in a register where it can."""

    def __init__(self, emitter: Emitter, kind: ir.Type) -> None:
        self.emitter, self.kind = emitter, kind
        with emitter.ir.goto_entry_block():
            self.address = emitter.ir.alloca(kind)

    @property
    def value(self) -> Any:
        return self.emitter.ir.load(self.address, typ=self.kind)

    @value.setter
    def value(self, value: ir.Value) -> None:
        self.emitter.ir.store(value, self.address)


class Emitter:
    """Appends instructions to one function. `ir` is llvmlite's builder, for instructions without a method here."""

    def __init__(self, function: ir.Function) -> None:
        self.function, self.module = function, function.module
        self.ir: Any = ir.IRBuilder(function.append_basic_block())

    def i64(self, value: Any) -> Any:
        """Return a constant, or an integer of another width, as 64 bits."""
        if isinstance(value, int):
            return I64(value)
        return value if value.type == I64 else self.ir.sext(value, I64)

    def sum(self, *values: Any) -> Any:
        """Add integers."""
        total = self.i64(values[0])
        for value in values[1:]:
            total = self.ir.add(total, self.i64(value))
        return total

    def product(self, *values: Any) -> Any:
        """Multiply integers."""
        result = self.i64(values[0])
        for value in values[1:]:
            result = self.ir.mul(result, self.i64(value))
        return result

    def least(self, a: Any, b: Any) -> Any:
        """Return the smaller integer."""
        a, b = self.i64(a), self.i64(b)
        return self.ir.select(self.ir.icmp_signed("<", a, b), a, b)

    def most(self, a: Any, b: Any) -> Any:
        """Return the larger integer."""
        a, b = self.i64(a), self.i64(b)
        return self.ir.select(self.ir.icmp_signed(">", a, b), a, b)

    def ceil_div(self, a: Any, b: Any) -> Any:
        """Divide an integer, rounding up."""
        b = self.i64(b)
        return self.ir.sdiv(self.ir.sub(self.sum(a, b), I64(1)), b)

    def variable(self, kind: ir.Type, value: Any = None) -> Variable:
        """Make a variable."""
        made = Variable(self, kind)
        if value is not None:
            made.value = value
        return made

    def array(self, element: ir.Type, size: int) -> Any:
        """Return the address of an uninitialized array on the stack, aligned for vectors."""
        with self.ir.goto_entry_block():
            address = self.ir.alloca(ir.ArrayType(element, size))
            address.align = 64
        address.type = POINTER  # to any type that is stored
        return address

    @contextmanager
    def range(self, start: Any, stop: Any, step: Any = 1) -> Iterator[Any]:
        """Loop over a 64-bit index."""
        index = self.variable(I64, self.i64(start))
        stop = self.i64(stop)
        test, body, after = (self.function.append_basic_block() for _ in range(3))
        self.ir.branch(test)
        self.ir.position_at_end(test)
        at = index.value
        self.ir.cbranch(self.ir.icmp_signed("<", at, stop), body, after)
        self.ir.position_at_end(body)
        yield at
        index.value = self.sum(at, step)
        self.ir.branch(test)
        self.ir.position_at_end(after)

    def at(self, base: Any, element: ir.Type, *index: Any) -> Any:
        """Return the address of an element; the index is the sum of the given ones."""
        return self.ir.gep(base, [self.sum(0, *index)], source_etype=element)

    def load(self, base: Any, element: ir.Type, *index: Any) -> Any:
        """Load an element."""
        return self.ir.load(self.at(base, element, *index), typ=element)

    def load_int(self, base: Any, *index: Any) -> Any:
        """Load an int32, as 64 bits."""
        return self.i64(self.load(base, I32, *index))

    def store(self, value: Any, base: Any, *index: Any) -> None:
        """Store an element."""
        self.ir.store(value, self.at(base, value.type, *index))

    def load_vector(self, base: Any, element: ir.Type, *index: Any, lanes: int = LANES) -> Any:
        """Load elements that lie side by side, wherever they start."""
        return self.ir.load(self.at(base, element, *index), typ=vector(element, lanes), align=1)

    def store_vector(self, value: Any, base: Any, *index: Any) -> None:
        """Store elements side by side."""
        self.ir.store(value, self.at(base, value.type.element, *index), align=1)

    def clear(self, base: Any, num_bytes: Any) -> None:
        """Fill memory with zero bytes, which are 0 in every dtype."""
        self.call_named("llvm.memset.p0.i64", base, I8(0), self.i64(num_bytes), I1(0), result=VOID)

    def constant(self, value: float, like: Any) -> Any:
        """Return a number as the type of another value."""
        kind = like.type
        if isinstance(kind, ir.VectorType):
            return ir.Constant(kind, [value] * kind.count)
        return ir.Constant(kind, value)

    def splat(self, value: Any, lanes: int = LANES) -> Any:
        """Return a vector of one value."""
        kind = vector(value.type, lanes)
        first = self.ir.insert_element(ir.Constant(kind, ir.Undefined), value, I32(0))
        return self.ir.shuffle_vector(first, first, ir.Constant(vector(I32, lanes), [0] * lanes))

    def prefetch(self, base: Any, element: ir.Type, *index: Any, cache: int = 2) -> None:
        """Begin to read the cache line of an element into the first or the second cache. The element need not exist."""
        how = I32(0), I32(4 - cache), I32(1)  # to read, how near, data
        self.call_named("llvm.prefetch.p0", self.at(base, element, *index), *how, result=VOID)

    def shuffle(self, a: Any, b: Any, lanes: Iterable[int]) -> Any:
        """Return a vector of selected lanes of two vectors, whose lanes are numbered one after the other."""
        lanes = list(lanes)
        return self.ir.shuffle_vector(a, b, ir.Constant(vector(I32, len(lanes)), lanes))

    def join(self, vectors: Sequence[Any]) -> Any:
        """Return one vector with the lanes of all vectors in order; the number of vectors is a power of two."""
        vectors = list(vectors)
        while len(vectors) > 1:
            lanes = range(2 * vectors[0].type.count)
            vectors = [self.shuffle(a, b, lanes) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
        return vectors[0]

    def transpose(self, rows: Sequence[Any]) -> list[Any]:
        """Return the columns of matrices that lie side by side in vectors of 16, with a number of every row in each."""
        rows = list(rows)
        size = len(rows) // 2
        while size:
            low = [lane if lane & size == 0 else LANES + lane - size for lane in range(LANES)]
            high = [lane + size for lane in low]
            for first in range(len(rows)):
                if first & size == 0:
                    a, b = rows[first], rows[first + size]
                    rows[first], rows[first + size] = self.shuffle(a, b, low), self.shuffle(a, b, high)
            size //= 2
        return rows

    def load_columns(self, rows: Sequence[Any], count: int) -> list[Any]:
        """Return the first `count` columns of a matrix of 32-bit integers with 16 rows, which may lie anywhere."""
        loaded = [self.load_vector(row, I32, 0, lanes=count) for row in rows]
        return self.transpose([self.join(loaded[first::count]) for first in range(count)])

    def call(self, name: str, *arguments: Any) -> Any:
        """Call an intrinsic that is overloaded for the type of its first argument, and returns that type."""
        kind = arguments[0].type
        suffix = f"v{kind.count}f32" if isinstance(kind, ir.VectorType) else "f32"
        return self.call_named(f"llvm.{name}.{suffix}", *arguments)

    def call_named(self, name: str, *arguments: Any, result: ir.Type | None = None) -> Any:
        """Call an intrinsic that returns the type of its first argument, or another one."""
        function = self.module.globals.get(name)
        if function is None:
            kind = ir.FunctionType(result or arguments[0].type, [x.type for x in arguments])
            function = ir.Function(self.module, kind, name)
        return self.ir.call(function, arguments)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        """Return a * b + c, rounded once."""
        return self.call("fma", a, b, c)

    def reduce(self, combine: Any, values: Any) -> Any:
        """Combine a vector's halves until one element is left."""
        lanes = values.type.count
        while lanes > 1:
            lanes //= 2
            values = combine(*(self.shuffle(values, values, range(first, first + lanes)) for first in (0, lanes)))
        return self.ir.extract_element(values, I32(0))

    def larger(self, a: Any, b: Any) -> Any:
        """Return the larger float of each pair; b where one is NaN."""
        return self.ir.select(self.ir.fcmp_ordered(">", a, b), a, b)

    def exp(self, x: Any) -> Any:
        """Return exp of float32 numbers of at most 88, to 2 units in the last place."""
        kind = x.type
        ints = ir.VectorType(I32, kind.count) if isinstance(kind, ir.VectorType) else I32
        is_tiny = self.ir.fcmp_ordered("<", x, self.constant(_EXP_LEAST, x))
        x = self.larger(x, self.constant(_EXP_LEAST, x))
        whole = self.call("rint", self.ir.fmul(x, self.constant(_LOG2_E, x)))
        rest = self.fma(whole, self.constant(-_LN2_HIGH, x), x)
        rest = self.fma(whole, self.constant(-_LN2_LOW, x), rest)
        series = self.constant(_EXP_COEFFICIENTS[0], x)
        for coefficient in _EXP_COEFFICIENTS[1:]:
            series = self.fma(series, rest, self.constant(coefficient, x))
        series = self.fma(series, self.ir.fmul(rest, rest), self.ir.fadd(rest, self.constant(1.0, x)))
        exponent = self.ir.fptosi(whole, ints)
        exponent = self.ir.shl(exponent, self.constant(23, exponent))
        result = self.ir.bitcast(self.ir.add(self.ir.bitcast(series, ints), exponent), kind)
        return self.ir.select(is_tiny, self.constant(0.0, x), result)

    def tanh(self, x: Any) -> Any:
        """Return tanh, within 1e-6."""
        x = self.larger(
            self.constant(-20.0, x),
            self.ir.select(self.ir.fcmp_ordered("<", x, self.constant(20.0, x)), x, self.constant(20.0, x)),
        )
        grown = self.exp(self.ir.fadd(x, x))
        one, two = self.constant(1.0, x), self.constant(2.0, x)
        return self.ir.fsub(one, self.ir.fdiv(two, self.ir.fadd(grown, one)))


def add_function(module: ir.Module, name: str, result: ir.Type, *arguments: ir.Type) -> tuple[Emitter, Sequence[Any]]:
    """Begin a function that only its module calls; return its emitter and its arguments."""
    function = ir.Function(module, ir.FunctionType(result, arguments), name)
    function.linkage = "internal"
    return Emitter(function), function.args
