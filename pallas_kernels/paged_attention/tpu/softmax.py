"""One step of the online softmax: query rows against one KV tile.

Scores are in base 2 (one multiplication gives both `scale` and log2 e). A row's maximum is kept in all 128 lanes, its
sum as 128 partial sums, which are added up once at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from . import float8
from .options import LANES, Options

_LOG2_E = 1.4426950408889634
_NOTHING_SEEN = -1e30
"""A row's maximum before its first score; finite, so that exp2(-inf - maximum) is 0."""


class State(NamedTuple):
    """The state of r query rows in float32, arrays or refs: [.., 128], [.., 128] and [.., v]; r is all axes but one."""

    maxima: Any
    sums: Any
    values: Any

    def at(self, *index: Any) -> State:
        """Return the state of some of the rows."""
        return State(*(ref.at[*index] for ref in self))


class Operands(NamedTuple):
    """The operands of a kv head, or of two.

    A matrix unit of 256 x 256 multiplies few rows by heads of 128 at half its rate, since a head's keys fill half of it
    and its values the other way round. Two heads fill it: (q0 | 0) and (0 | q1) times (K0 | K1)^T are both heads'
    scores, and p0 and p1 times (V0 | V1) have both heads' results, each in its columns.
    """

    q_rc: Array
    """The rows of the first head, `split` of them, and those of the second."""
    kv: tuple[Array, ...]
    """Rows of the pool [t, c] of each head, with the columns of keys and those of values."""
    keep_rt: Array | None
    """True for each row and each position that counts; None: all do. Values must be finite where it is False."""
    split: int = 0


def start(state: State, sinks: Array | None) -> None:
    """Begin with nothing seen except the sinks, in the shape of the maxima."""
    for ref, value in zip(state, unseen(state.values.shape, sinks), strict=True):
        ref[...] = value


def unseen(shape: tuple[int, ...], sinks: Array | None) -> State:
    """Return the state, with values of a shape, of rows that have seen nothing except the sinks [.., 128]."""
    values, rows = jnp.zeros(shape, jnp.float32), (*shape[:-1], LANES)
    if sinks is None:
        return State(jnp.full(rows, _NOTHING_SEEN), jnp.zeros(rows, jnp.float32), values)
    lane = lax.broadcasted_iota(jnp.int32, rows, len(rows) - 1)
    return State(sinks * _LOG2_E, jnp.where(lane == 0, 1.0, 0.0), values)


def attend(state: State, heads: Sequence[Operands], options: Options) -> None:
    """Take one tile into account; the rows of the state are those of the heads, one after the other."""
    before = State(*(ref[...].reshape(-1, ref.shape[-1]) for ref in state))
    for ref, value in zip(state, add(before, heads, options), strict=True):
        ref[...] = value.reshape(ref.shape)


def add(state: State, heads: Sequence[Operands], options: Options) -> State:
    """Return the state of r rows with one tile taken into account.

    The heads' matmuls are independent, so the more of them, the better they hide each other's latency.
    """
    dtype = heads[0].q_rc.dtype
    unpack = float8.unpack if options.unpacks_float8 else lax.convert_element_type
    all_kv = [[unpack(kv_tc, dtype) for kv_tc in head.kv] for head in heads]
    keys = [_join([kv_tc[:, options.keys] for kv_tc in kv]) for kv in all_kv]
    values = [_join([kv_tc[:, options.values] for kv_tc in kv]) for kv in all_kv]
    scores = _scores([_spread(head) for head in heads], keys, options)
    scores_rt = _stack([_mask(_scale(x_rt, options), head.keep_rt) for x_rt, head in zip(scores, heads, strict=True)])
    maxima_rx, sums_rx, values_rv = state
    new_maxima_rx = jnp.maximum(maxima_rx, scores_rt.max(axis=1, keepdims=True))
    decay_rx = jnp.exp2(maxima_rx - new_maxima_rx)
    weights_rt = jnp.exp2(scores_rt - _widen(new_maxima_rx, scores_rt.shape[1]))
    sums_rx = sums_rx * decay_rx + _fold(weights_rt)
    rows = scores_rt.shape[0] // len(heads)
    parts = [weights_rt[i * rows : (i + 1) * rows].astype(dtype) for i in range(len(heads))]
    products = [_dot(part, v_tc, 0) for part, v_tc in zip(parts, values, strict=True)]
    new_values_rv = _stack([_narrow(product, head) for product, head in zip(products, heads, strict=True)])
    values_rv = values_rv * _widen(decay_rx, values_rv.shape[1]) + new_values_rv
    return State(new_maxima_rx, sums_rx, values_rv)


def result(state: State, options: Options) -> Array:
    """Return the attention's output [.., v]; zeros for rows that have seen nothing."""
    total_r1 = state.sums[...].sum(axis=-1, keepdims=True)
    values_rv = state.values[...] / jnp.maximum(total_r1, 1e-30)
    return values_rv * float8.FACTOR if options.unpacks_float8 else values_rv


def _spread(head: Operands) -> Array:
    """Return the rows of two heads, each with zeros in the other's columns."""
    if len(head.kv) == 1:
        return head.q_rc
    is_first, zero = _is_first(head, head.q_rc), jnp.zeros_like(head.q_rc)
    return jnp.concatenate([jnp.where(is_first, head.q_rc, zero), jnp.where(is_first, zero, head.q_rc)], axis=1)


def _narrow(values_rv: Array, head: Operands) -> Array:
    """Return of two heads' results each row's columns."""
    if len(head.kv) == 1:
        return values_rv
    half = values_rv.shape[1] // 2
    first, second = values_rv[:, :half], values_rv[:, half:]
    return jnp.where(_is_first(head, first), first, second)


def _is_first(head: Operands, like: Array) -> Array:
    return lax.broadcasted_iota(jnp.int32, like.shape, 0) < head.split


def _scores(queries: list[Array], keys: list[Array], options: Options) -> list[Array]:
    """Multiply queries by keys; of few tokens two at a time, to fill the matrix unit, and drop the other products."""
    tokens = keys[0].shape[0]
    if not options.has_pairs or tokens > LANES or len(keys) % 2:
        return [_dot(q_rc, k_tc, 1) for q_rc, k_tc in zip(queries, keys, strict=True)]
    scores: list[Array] = []
    for i in range(0, len(keys), 2):
        rows = queries[i].shape[0]
        both = _dot(_stack(queries[i : i + 2]), _stack(keys[i : i + 2]), 1)
        scores += [both[:rows, :tokens], both[rows:, tokens:]]
    return scores


def _join(arrays: list[Array]) -> Array:
    return arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays, axis=1)


def _mask(scores_rt: Array, keep_rt: Array | None) -> Array:
    return scores_rt if keep_rt is None else jnp.where(keep_rt, scores_rt, -jnp.inf)


def _scale(scores_rt: Array, options: Options) -> Array:
    scale = options.scale * (float8.FACTOR if options.unpacks_float8 else 1)
    if options.soft_cap is None:
        return scores_rt * (scale * _LOG2_E)
    return jnp.tanh(scores_rt * (scale / options.soft_cap)) * (options.soft_cap * _LOG2_E)


def _dot(a: Array, b: Array, b_axis: int) -> Array:
    """Contract a's last axis with one of b's, in float32."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dimensions = (((1,), (b_axis,)), ((), ()))
    return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)


def _stack(arrays: list[Array]) -> Array:
    return arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays, axis=0)


def _widen(x_rx: Array, width: int) -> Array:
    """Return rows whose lanes are all equal with `width` lanes."""
    if width <= LANES:
        return x_rx[:, :width]
    return jnp.concatenate([x_rx] * (width // LANES), axis=1)


def _fold(x_rt: Array) -> Array:
    """Add up the columns 128 apart."""
    parts = [x_rt[:, i : i + LANES] for i in range(0, x_rt.shape[1], LANES)]
    return sum(parts[1:], start=parts[0])
