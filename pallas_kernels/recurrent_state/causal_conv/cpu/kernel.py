"""The kernel in LLVM IR: a few rows at a time, so that weights and inputs are taken once for all of them.

A unit of work has some channels of one sequence. It first copies them from the state, so that the state can be written
to the slot that it was read from. A row's sum has the same order in a chunk of any size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from pallas_kernels.linear.cpu.activations import ACTIVATIONS
from pallas_kernels.native.compiling import num_registers
from pallas_kernels.native.emitter import CACHE_LINE, I32, I64, LANES, POINTER, VOID, Emitter, add_function
from pallas_kernels.native.number_formats import FORMATS
from pallas_kernels.recurrent_state.cpu.units import StateKernel, States

from ..shape import ConvShape

_CHANNELS = 512
"""The number of channels of a unit; the last unit of a sequence may have fewer."""
_MAX_ROWS = 8
"""The most rows that are computed at a time."""


class Kernel(StateKernel):
    """Writes the functions of one kernel."""

    def __init__(self, shape: ConvShape) -> None:
        self.shape, self.format = shape, FORMATS[shape.dtype]
        self.kept = shape.kernel_size - 1
        """The number of inputs of a state."""
        # Weights, a row's sum and its inputs are in registers.
        self.num_rows = max(1, min(_MAX_ROWS, num_registers() - 2 * shape.kernel_size))
        super().__init__(
            ("x", "weight", "bias", "has_silu"),
            out_format=self.format,
            row_size=shape.num_channels,
            pool_type=self.format.storage,
            slot_size=self.kept * shape.num_channels,
            parts=-(-shape.num_channels // _CHANNELS),
        )

    def add_part(self) -> ir.Function:
        """Define the function that computes some channels of all rows of a sequence, and their state."""
        e, (buffers, seq, part, has_next) = add_function(self.module, "part", VOID, POINTER, *[I64] * 3)
        of, storage, num_channels = self.of(e, buffers), self.format.storage, self.shape.num_channels
        states = self.states(e, of, seq)
        channel = e.product(part, _CHANNELS)
        width = e.least(e.ir.sub(I64(num_channels), channel), _CHANNELS)
        kept = e.array(storage, max(1, self.kept) * _CHANNELS)
        with e.ir.if_else(states.begins) as (begins, goes_on):
            with begins:
                e.clear(kept, self.kept * _CHANNELS * self.format.num_bytes)
            with goes_on:
                self._copy(
                    e, states.before, channel, width, lambda j: e.at(kept, storage, j * _CHANNELS), is_source=True
                )
        with e.ir.if_then(e.ir.icmp_signed("!=", has_next, I64(0))):
            self._fetch(e, states.before, e.sum(channel, _CHANNELS))

        def address_of(row: Any) -> Any:
            """Return the address of these channels of a row, which may be before the first."""
            back = e.ir.sub(row, states.start)
            new = e.at(of["x"], storage, e.product(row, num_channels), channel)
            old = e.at(kept, storage, e.product(e.sum(back, self.kept), _CHANNELS))
            return e.ir.select(e.ir.icmp_signed("<", back, I64(0)), old, new)

        has_silu = e.ir.icmp_signed("!=", e.load(of["has_silu"], I32, 0), I32(0))
        with e.ir.if_else(has_silu) as branches:
            for branch, activation in zip(branches, (ACTIVATIONS["silu"], None), strict=True):
                with branch:
                    self._add_rows(e, of, states, channel, width, address_of, activation)
        with e.ir.if_then(states.is_saved):
            self._keep(e, states.saved, states.save_end, channel, width, address_of)
        with e.range(states.start, states.end) as row, self.slot_of_row(e, of, row) as slot:
            self._keep(e, slot, e.sum(row, 1), channel, width, address_of)
        self._keep(e, states.after, states.end, channel, width, address_of)
        e.ir.ret_void()
        return e.function

    def _add_rows(
        self,
        e: Emitter,
        of: dict[str, Any],
        states: States,
        channel: Any,
        width: Any,
        address_of: Callable[[Any], Any],
        activation: Callable[[Emitter, Any], Any] | None,
    ) -> None:
        """Compute all rows: several at a time while there are enough, then one by one."""
        next_row = e.variable(I64, states.start)
        for count in (self.num_rows, 1):
            with e.range(next_row.value, e.sum(states.end, 1 - count), count) as row:
                self._add_sums(e, of, row, count, channel, width, address_of, activation)
                next_row.value = e.sum(row, count)

    def _add_sums(
        self,
        e: Emitter,
        of: dict[str, Any],
        row: Any,
        count: int,
        channel: Any,
        width: Any,
        address_of: Callable[[Any], Any],
        activation: Callable[[Emitter, Any], Any] | None,
    ) -> None:
        storage, num_channels, taps = self.format.storage, self.shape.num_channels, self.shape.kernel_size
        sources = [address_of(e.sum(row, j - self.kept)) for j in range(count + self.kept)]
        targets = [e.at(of["out"], storage, e.product(e.sum(row, j), num_channels), channel) for j in range(count)]
        weights = [e.at(of["weight"], storage, j * num_channels, channel) for j in range(taps)]
        bias = e.at(of["bias"], storage, channel)
        assert self.format.narrow is not None
        with e.range(0, width, LANES) as i:
            factors = [self._load(e, each, i) for each in weights]
            first = self._load(e, bias, i)
            inputs = [self._load(e, each, i) for each in sources]
            for j, target in enumerate(targets):
                total = first
                for number, factor in zip(inputs[j : j + taps], factors, strict=True):
                    total = e.fma(number, factor, total)
                result = total if activation is None else activation(e, total)
                e.store_vector(self.format.narrow(e, result), target, i)

    def _load(self, e: Emitter, base: Any, i: Any) -> Any:
        return self.format.widen(e, e.load_vector(base, self.format.storage, i))

    def _keep(
        self, e: Emitter, state: Any, end: Any, channel: Any, width: Any, address_of: Callable[[Any], Any]
    ) -> None:
        """Write a state: the last inputs before a row."""
        self._copy(e, state, channel, width, lambda j: address_of(e.sum(end, j - self.kept)), is_source=False)

    def _copy(
        self, e: Emitter, state: Any, channel: Any, width: Any, other: Callable[[int], Any], *, is_source: bool
    ) -> None:
        """Copy these channels out of a state, or into it."""
        storage = self.format.storage
        for j in range(self.kept):
            here, other_address = e.at(state, storage, j * self.shape.num_channels, channel), other(j)
            source, target = (here, other_address) if is_source else (other_address, here)
            with e.range(0, width, LANES) as i:
                e.store_vector(e.load_vector(source, storage, i), target, i)

    def _fetch(self, e: Emitter, state: Any, channel: Any) -> None:
        """Begin to read the state's next channels. Beyond the last there is nothing, which does no harm."""
        for j in range(self.kept):
            with e.range(0, _CHANNELS, CACHE_LINE // self.format.num_bytes) as i:
                e.prefetch(state, self.format.storage, j * self.shape.num_channels, channel, i)
