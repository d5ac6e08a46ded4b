"""The kernel in LLVM IR: the recurrence token by token, all in float32.

A token passes by a part of a state twice, the second time from the first cache:

    seen [columns]       = (k * decay) [keys] @ S [keys, columns]
    delta                = (v - seen) * beta
    S    [keys, columns] = S * decay + k outer delta;  out += q [keys] @ S

So decodes wait for memory: they read a state and write it, once, and fetch the next part during the second pass.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from llvmlite import ir

from pallas_kernels.native.emitter import F32, I64, LANES, POINTER, VOID, Emitter, add_function, vector
from pallas_kernels.native.number_formats import FORMATS
from pallas_kernels.recurrent_state.cpu.matrices import MatrixKernel

from ..reference import NORM_EPS
from ..shape import GatedDeltaShape


class Kernel(MatrixKernel):
    """Writes the functions of one kernel."""

    def __init__(self, shape: GatedDeltaShape) -> None:
        self.shape = shape
        super().__init__(
            ("q", "k", "v", "log_decay", "beta"),
            "v",
            number_format=FORMATS[shape.dtype],
            heads=shape.num_value_heads,
            keys=shape.key_dim,
            values=shape.value_dim,
            # q and k, and with decays of keys also their products with k.
            num_operands=shape.key_dim * (4 if shape.has_key_decay else 2),
            num_scalars=2,
        )

    def add_operands(self, e: Emitter, of: dict[str, Any], row: Any, head: Any, operands: Any, scalars: Any) -> None:
        """Write q and k at length 1, decays, beta, and a head's decay."""
        shape, keys = self.shape, self.keys
        key_head = e.ir.sdiv(head, I64(shape.group))
        index = e.product(e.sum(e.product(row, shape.num_key_heads), key_head), keys)
        for which, (name, scale) in enumerate((("q", keys**-0.5), ("k", 1.0))):
            source = e.at(of[name], self.format.storage, index)
            squares = e.variable(vector(F32), e.splat(F32(0.0)))
            with e.range(0, keys, LANES) as i:
                numbers = self.widened(e, source, i)
                squares.value = e.fma(numbers, numbers, squares.value)
            total = e.ir.fadd(e.reduce(e.ir.fadd, squares.value), F32(NORM_EPS))
            factor = e.splat(e.ir.fdiv(F32(scale), e.call("sqrt", total)))
            with e.range(0, keys, LANES) as i:
                e.store_vector(e.ir.fmul(self.widened(e, source, i), factor), operands, which * keys, i)
        index = e.sum(e.product(row, self.heads), head)
        e.store(e.load(of["beta"], F32, index), scalars, 0)
        if not shape.has_key_decay:
            e.store(e.exp(e.load(of["log_decay"], F32, index)), scalars, 1)
            return
        decays = e.at(of["log_decay"], F32, e.product(index, keys))
        with e.range(0, keys, LANES) as i:
            decay = e.exp(e.load_vector(decays, F32, i))
            e.store_vector(decay, operands, 2 * keys, i)
            e.store_vector(e.ir.fmul(e.load_vector(operands, F32, keys, i), decay), operands, 3 * keys, i)

    def fetch_operands(self, e: Emitter, of: dict[str, Any], row: Any, head: Any) -> None:
        """Begin to read the inputs of `add_operands`."""
        shape, keys = self.shape, self.keys
        start = e.product(e.sum(e.product(row, shape.num_key_heads), e.ir.sdiv(head, I64(shape.group))), keys)
        for name in ("q", "k"):
            self.fetch_numbers(e, of[name], start, keys, self.format)
        if shape.has_key_decay:
            start = e.product(e.sum(e.product(row, self.heads), head), keys)
            self.fetch_numbers(e, of["log_decay"], start, keys, FORMATS[jnp.dtype(jnp.float32)])

    def add_token(self, fetches: bool) -> ir.Function:
        """Define the function that updates a part of a state by one token."""
        name = "fetching_token" if fetches else "token"
        e, arguments = add_function(self.module, name, VOID, *[POINTER] * 7)
        before, after, following, operands, scalars, values, out = arguments
        keys, columns, has_key_decay = self.keys, self.columns, self.shape.has_key_decay
        spans = range(0, columns, LANES)
        beta = e.splat(e.load(scalars, F32, 0))
        head_decay = None if has_key_decay else e.splat(e.load(scalars, F32, 1))

        seen = self.chains(e)
        with e.range(0, keys, self.num_chains) as first:
            if fetches:
                self.fetch(e, following, first, 0, 2)
            for chain, sums in enumerate(seen):
                factor = e.splat(e.load(operands, F32, (3 if has_key_decay else 1) * keys, first, chain))
                row = e.product(e.sum(first, chain), columns)
                for total, span in zip(sums, spans, strict=True):
                    total.value = e.fma(factor, e.load_vector(before, F32, row, span), total.value)
        delta = []
        for summed, span in zip(self.add_up(e, seen), spans, strict=True):
            held = summed if head_decay is None else e.ir.fmul(summed, head_decay)
            delta.append(e.ir.fmul(e.ir.fsub(self.widened(e, values, span), held), beta))

        read = self.chains(e)
        with e.range(0, keys, self.num_chains) as first:
            if fetches:
                self.fetch(e, following, first, 1, 2)
            for chain, sums in enumerate(read):
                key = e.sum(first, chain)
                q, k = (e.splat(e.load(operands, F32, each * keys, key)) for each in range(2))
                decay = e.splat(e.load(operands, F32, 2 * keys, key)) if head_decay is None else head_decay
                row = e.product(key, columns)
                for total, change, span in zip(sums, delta, spans, strict=True):
                    state = e.ir.fmul(e.load_vector(before, F32, row, span), decay)
                    state = e.fma(k, change, state)
                    e.store_vector(state, after, row, span)
                    total.value = e.fma(q, state, total.value)
        for summed, span in zip(self.add_up(e, read), spans, strict=True):
            self.store(e, summed, out, span)
        e.ir.ret_void()
        return e.function
