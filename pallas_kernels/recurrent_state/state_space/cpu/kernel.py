"""The kernel in LLVM IR: the recurrence token by token, all in float32.

A state's keys are b's and c's numbers, its values x's. A token passes by a part of a state once:

    S [keys, columns] = S * exp(dt * a) + b outer (dt * x);  y += c [keys] @ S

So decodes wait for memory: they read a state and write it, once, and begin to read the part that follows.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from pallas_kernels.native.emitter import F32, I64, LANES, POINTER, VOID, Emitter, add_function
from pallas_kernels.native.number_formats import FORMATS
from pallas_kernels.recurrent_state.cpu.matrices import MatrixKernel

from ..shape import StateSpaceShape


class Kernel(MatrixKernel):
    """Writes the functions of one kernel."""

    def __init__(self, shape: StateSpaceShape) -> None:
        self.shape = shape
        super().__init__(
            ("x", "dt", "a", "b", "c", "d"),
            "x",
            number_format=FORMATS[shape.dtype],
            heads=shape.num_heads,
            keys=shape.state_dim,
            values=shape.head_dim,
            num_operands=2 * shape.state_dim,
            num_scalars=3,
        )

    def add_operands(self, e: Emitter, of: dict[str, Any], row: Any, head: Any, operands: Any, scalars: Any) -> None:
        """Write b and c in float32; dt, the state's decay, and d."""
        group = e.ir.sdiv(head, I64(self.shape.group))
        index = e.product(e.sum(e.product(row, self.shape.num_groups), group), self.keys)
        for which, name in enumerate(("b", "c")):
            source = e.at(of[name], self.format.storage, index)
            with e.range(0, self.keys, LANES) as i:
                e.store_vector(self.widened(e, source, i), operands, which * self.keys, i)
        dt = e.load(of["dt"], F32, e.product(row, self.heads), head)
        decay = e.exp(e.ir.fmul(dt, e.load(of["a"], F32, head)))
        for index, number in enumerate((dt, decay, e.load(of["d"], F32, head))):
            e.store(number, scalars, index)

    def fetch_operands(self, e: Emitter, of: dict[str, Any], row: Any, head: Any) -> None:
        """Begin to read the inputs of `add_operands`."""
        group = e.ir.sdiv(head, I64(self.shape.group))
        start = e.product(e.sum(e.product(row, self.shape.num_groups), group), self.keys)
        for name in ("b", "c"):
            self.fetch_numbers(e, of[name], start, self.keys, self.format)

    def add_token(self, fetches: bool) -> ir.Function:
        """Define the function that updates a part of a state by one token."""
        name = "fetching_token" if fetches else "token"
        e, arguments = add_function(self.module, name, VOID, *[POINTER] * 7)
        before, after, following, operands, scalars, values, out = arguments
        spans = range(0, self.columns, LANES)
        dt, decay, through = (e.splat(e.load(scalars, F32, each)) for each in range(3))
        x = [self.widened(e, values, span) for span in spans]
        added = [e.ir.fmul(each, dt) for each in x]
        read = self.chains(e)
        with e.range(0, self.keys, self.num_chains) as first:
            if fetches:
                self.fetch(e, following, first)
            for chain, sums in enumerate(read):
                key = e.sum(first, chain)
                b, c = (e.splat(e.load(operands, F32, each * self.keys, key)) for each in range(2))
                row = e.product(key, self.columns)
                for total, change, span in zip(sums, added, spans, strict=True):
                    state = e.fma(b, change, e.ir.fmul(e.load_vector(before, F32, row, span), decay))
                    e.store_vector(state, after, row, span)
                    total.value = e.fma(c, state, total.value)
        for summed, x_vector, span in zip(self.add_up(e, read), x, spans, strict=True):
            self.store(e, e.fma(through, x_vector, summed), out, span)
        e.ir.ret_void()
        return e.function
