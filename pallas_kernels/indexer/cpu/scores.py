"""The scores of a row, 16 tokens and 16 or more heads at a time.

A lane of a vector is a head: queries lie as [h, heads], and a number of a key multiplies those of all heads. Where the
processor multiplies pairs of bfloat16, a number is such a pair. Products of heads are summed up over h one after the
other; then their positive parts, times the weights, over vectors of heads and at last over lanes.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import jax.numpy as jnp
from llvmlite import ir

from pallas_kernels.native import pairs, processor
from pallas_kernels.native.compiling import num_registers
from pallas_kernels.native.emitter import F32, I32, I64, LANES, Emitter, vector
from pallas_kernels.native.number_formats import FORMATS

from ..layout import IndexerShape

_TOKENS = 4
"""The tokens that are multiplied at a time."""
_UNROLL = 4
"""The numbers of a key that an iteration of the inner loop multiplies."""


class Scores:
    """Computes scores of one row, as integers of the same order."""

    def __init__(self, shape: IndexerShape) -> None:
        self.shape = shape
        self.format, self.kv_format = FORMATS[shape.dtype], FORMATS[shape.kv_dtype]
        is_bfloat16 = shape.dtype == shape.kv_dtype == jnp.bfloat16
        self.has_pairs = is_bfloat16 and processor.current().has_bfloat16_dot and shape.head_dim % (2 * LANES) == 0
        self.kind: ir.Type = I32 if self.has_pairs else F32
        self.depth = shape.head_dim // (2 if self.has_pairs else 1)
        """The numbers, or pairs, of a key."""
        self.vectors = -(-shape.num_heads // LANES)
        """The vectors of heads. Heads beyond the last one have the weight 0."""
        most = max(1, num_registers() * 3 // 4 // _TOKENS)
        self.at_once = next(count for count in range(most, 0, -1) if self.vectors % count == 0)

    def begin(self, e: Emitter, q: Any, weights: Any, row: Any) -> None:
        """Lay out a row's queries and weights."""
        n, h = self.shape.num_heads, self.shape.head_dim
        self._queries = e.array(self.kind, self.depth * self.vectors * LANES)
        self._weights = e.array(F32, self.vectors * LANES)
        self._sums = e.array(F32, LANES * LANES)
        self._wide = e.array(F32, LANES * h)
        first = e.product(row, n)
        with e.range(0, self.vectors) as group:
            heads = [e.least(e.sum(e.product(group, LANES), r), n - 1) for r in range(LANES)]
            queries = [e.at(q, self.format.storage, e.product(e.sum(first, head), h)) for head in heads]
            with e.range(0, self.depth, LANES) as step:
                for i, column in enumerate(e.transpose([self._query(e, query, step) for query in queries])):
                    at = e.product(e.sum(step, i), self.vectors)
                    e.store_vector(column, self._queries, e.product(e.sum(at, group), LANES))
        with e.range(0, self.vectors * LANES) as head:
            weight = e.load(weights, F32, first, e.least(head, n - 1))
            e.store(e.ir.select(e.ir.icmp_signed("<", head, I64(n)), weight, F32(0.0)), self._weights, head)

    def _query(self, e: Emitter, query: Any, step: Any) -> Any:
        if self.has_pairs:
            return e.load_vector(query, I32, step)
        return self.format.widen(e, e.load_vector(query, self.format.storage, step))

    def add(self, e: Emitter, keys: Any, scores: Any, start: Any) -> None:
        """Store the scores of 16 tokens, whose keys lie at an address, from `start` on."""
        if not self.has_pairs and self.kv_format.storage != F32:
            with e.range(0, LANES * self.shape.head_dim, LANES) as i:
                e.store_vector(self.kv_format.widen(e, e.load_vector(keys, self.kv_format.storage, i)), self._wide, i)
            keys = self._wide
        with e.range(0, LANES, _TOKENS) as token:
            totals = [e.variable(vector(F32), e.splat(F32(0.0))) for _ in range(_TOKENS)]
            with e.range(0, self.vectors, self.at_once) as group:
                sums = self._multiply(e, e.at(keys, self.kind, e.product(token, self.depth)), group)
                for j, row in enumerate(sums):
                    weight = e.load_vector(self._weights, F32, e.product(e.sum(group, j), LANES))
                    for total, products in zip(totals, row, strict=True):
                        total.value = e.fma(e.larger(products, e.splat(F32(0.0))), weight, total.value)
            for i, total in enumerate(totals):
                e.store_vector(total.value, self._sums, e.product(e.sum(token, i), LANES))
        columns = e.transpose([e.load_vector(self._sums, F32, token * LANES) for token in range(LANES)])
        # As sums begin with 0, none is -0.
        bits = e.ir.bitcast(reduce(e.ir.fadd, columns), vector(I32))
        sign = e.ir.ashr(bits, e.constant(31, bits))
        e.store_vector(e.ir.xor(bits, e.ir.or_(sign, e.constant(1 << 31, bits))), scores, start)

    def _multiply(self, e: Emitter, keys: Any, group: Any) -> list[list[Any]]:
        """Return the products of some tokens' keys with some vectors of heads: a vector for each of both."""
        zero = e.splat(F32(0.0))
        sums = [[e.variable(vector(F32), zero) for _ in range(_TOKENS)] for _ in range(self.at_once)]
        with e.range(0, self.depth, _UNROLL) as step:
            for i in range(_UNROLL):
                at = e.sum(e.product(e.sum(step, i), self.vectors), group)
                numbers = [e.splat(e.load(keys, self.kind, step, token * self.depth + i)) for token in range(_TOKENS)]
                for j, row in enumerate(sums):
                    query = e.load_vector(self._queries, self.kind, e.product(e.sum(at, j), LANES))
                    for total, number in zip(row, numbers, strict=True):
                        if self.has_pairs:
                            total.value = pairs.add_products(e, total.value, query, number)
                        else:
                            total.value = e.fma(query, number, total.value)
        return [[each.value for each in row] for row in sums]
