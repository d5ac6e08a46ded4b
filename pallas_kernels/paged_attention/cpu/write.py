"""The part of the CPU's attention kernel that writes K and V to the pool, with rotated keys."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from pallas_kernels.native.emitter import I1, I32, I64, LANES, POINTER, VOID, Emitter, add_function, vector

from ..layout import AttentionShape
from .buffers import Call


class Writer(Call):
    """Writes the functions that store new keys and values in the pool."""

    def __init__(self, shape: AttentionShape, module: ir.Module) -> None:
        super().__init__(shape)
        self.module = module

    def begins_run(self, e: Emitter, slots: Any, token: Any, num_tokens: Any) -> Any:
        """Return whether a token and those after it fill `LANES` slots side by side, from a multiple of `LANES` on."""
        is_run, slot = e.variable(I1, I1(0)), e.load(slots, I32, token)
        is_aligned = e.ir.icmp_signed("==", e.ir.srem(slot, I32(LANES)), I32(0))
        is_within = e.ir.icmp_signed("<=", e.sum(token, LANES), num_tokens)
        with e.ir.if_then(e.ir.and_(is_aligned, is_within)):
            wanted = e.ir.add(e.splat(slot), ir.Constant(vector(I32), list(range(LANES))))
            differing = e.reduce(e.ir.or_, e.ir.xor(e.load_vector(slots, I32, token), wanted))
            is_run.value = e.ir.icmp_signed("==", differing, I32(0))
        return is_run.value

    def add(self, count: int) -> ir.Function:
        """Write some heads' keys, rotated, and values of a token, or of `LANES` for slots side by side."""
        k, h, o, storage = self.shape.num_kv_heads, self.shape.head_dim, self.shape.block_size, self.kv_format.storage
        e, (buffers, dims, first, first_head, num_heads) = add_function(
            self.module, f"write_{count}", VOID, *[POINTER] * 2, *[I64] * 3
        )
        of = self.buffers(e, buffers)
        slot = e.load_int(of["slots"], first)
        block, offset = e.ir.sdiv(slot, I64(o)), e.ir.srem(slot, I64(o))
        target = e.product(e.sum(e.load_int(of["first_block"], 0), block), k * h * o)
        rotated, has_rope = e.array(storage, count * h), self.has_rope(e, dims)
        with e.range(first_head, e.sum(first_head, num_heads)) as head:
            index = e.product(e.sum(e.product(first, k), head), h)
            keys, values = (e.at(of[name], storage, index) for name in ("k", "v"))
            apart = I64(k * h)
            if self.kv_format.narrow:  # otherwise they come rotated
                with e.ir.if_then(has_rope), e.range(0, count) as which:
                    head_keys, angles = (
                        e.at(keys, storage, e.product(which, apart)),
                        e.product(e.sum(first, which), h // 2),
                    )
                    for some, i in self.rotate(e, of, self.kv_format, head_keys, angles):
                        e.store_vector(self.kv_format.narrow(e, some), rotated, e.product(which, h), i)
                keys, apart = e.ir.select(has_rope, rotated, keys), e.ir.select(has_rope, I64(h), apart)
            matrix = e.sum(target, e.product(head, h * o))
            if count == 1:
                self._write(e, of, keys, values, matrix, offset)
            else:
                self._write_run(e, of, keys, apart, values, matrix, offset)
        e.ir.ret_void()
        return e.function

    def _write(self, e: Emitter, of: dict[str, Any], keys: Any, values: Any, target: Any, offset: Any) -> None:
        """Write a token's keys and values of one head."""
        h, o, storage = self.shape.head_dim, self.shape.block_size, self.kv_format.storage
        if self.width == 2:
            self._write_pairs(e, of, keys, values, target, offset)
            return
        with e.range(0, h) as i:
            e.store(e.load(keys, storage, i), of["pool_k"], target, e.product(i, o), offset)
        with e.range(0, h, LANES) as i:
            numbers = e.load_vector(values, storage, i)
            e.store_vector(numbers, of["pool_v"], target, e.product(offset, h), i)

    def _write_pairs(self, e: Emitter, of: dict[str, Any], keys: Any, values: Any, target: Any, offset: Any) -> None:
        """Write pairs of a key's numbers, and a value's as halves of pairs with another token's."""
        h, o, storage = self.shape.head_dim, self.shape.block_size, self.kv_format.storage
        pool_k, pool_v = (e.at(of[name], storage, target) for name in ("pool_k", "pool_v"))
        with e.range(0, h // 2) as i:
            e.store(e.load(keys, I32, i), pool_k, e.product(i, o), offset)
        index = e.product(e.ir.sdiv(offset, I64(2)), h)
        shift = e.splat(e.ir.trunc(e.product(e.ir.srem(offset, I64(2)), 16), I32))
        with e.range(0, h, LANES) as i:
            before = e.load_vector(pool_v, I32, index, i)
            other = e.ir.and_(before, e.ir.not_(e.ir.shl(e.constant(0xFFFF, before), shift)))
            value = e.ir.shl(e.ir.zext(e.load_vector(values, storage, i), vector(I32)), shift)
            e.store_vector(e.ir.or_(other, value), pool_v, index, i)

    def _write_run(
        self, e: Emitter, of: dict[str, Any], keys: Any, apart: Any, values: Any, target: Any, offset: Any
    ) -> None:
        """Write `LANES` tokens, with keys that are `apart` apart: 32 bits at a time, transposed in registers."""
        k, h, o, storage = self.shape.num_kv_heads, self.shape.head_dim, self.shape.block_size, self.kv_format.storage
        pool_k, pool_v = (e.at(of[name], storage, target) for name in ("pool_k", "pool_v"))
        words = h // self.width
        lanes = LANES if words % LANES == 0 else LANES // 2
        starts = [e.at(keys, storage, e.product(apart, token)) for token in range(LANES)]
        with e.range(0, words, lanes) as i:
            for column, tokens in enumerate(e.load_columns([e.at(start, I32, i) for start in starts], lanes)):
                e.store_vector(tokens, pool_k, e.product(e.sum(i, column), o), offset)
        with e.range(0, h, LANES) as i:
            for token in range(0, LANES, self.width):
                value = e.load_vector(values, storage, token * k * h, i)
                if self.width == 2:
                    other = e.load_vector(values, storage, (token + 1) * k * h, i)
                    value, other = (e.ir.zext(x, vector(I32)) for x in (value, other))
                    value = e.ir.or_(value, e.ir.shl(other, e.constant(16, other)))
                e.store_vector(value, pool_v, e.product(e.ir.sdiv(e.sum(offset, token), I64(self.width)), h), i)
