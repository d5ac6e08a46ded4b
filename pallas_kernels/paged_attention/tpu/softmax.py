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
    """The state of r query rows: float32 refs [.., 128], [.., 128] and [.., v]; all but the last axis make r."""

    maxima: Any
    sums: Any
    values: Any

    def at(self, *index: Any) -> State:
        """Return the state of some of the rows."""
        return State(*(ref.at[*index] for ref in self))


class Operands(NamedTuple):
    """The operands of one kv head."""

    q_rc: Array
    kv_tc: Array
    """Rows of the pool, with the columns of keys and those of values."""


def start(state: State, sinks: Array | None) -> None:
    """Begin with nothing seen except the sinks, in the shape of the maxima."""
    state.values[...] = jnp.zeros(state.values.shape, jnp.float32)
    if sinks is None:
        state.maxima[...] = jnp.full(state.maxima.shape, _NOTHING_SEEN)
        state.sums[...] = jnp.zeros(state.sums.shape, jnp.float32)
    else:
        state.maxima[...] = sinks * _LOG2_E
        lane = lax.broadcasted_iota(jnp.int32, state.sums.shape, state.sums.ndim - 1)
        state.sums[...] = jnp.where(lane == 0, 1.0, 0.0)


def attend(state: State, heads: Sequence[Operands], keep_rt: Array | None, options: Options) -> None:
    """Take one tile into account; the rows of the state are those of the heads, one after the other.

    `keep_rt` is True for each row of any head and each position that counts; None: all do. V must be finite where it is
    False. The heads' matmuls are independent, so the more of them, the better they hide each other's latency.
    """
    dtype = heads[0].q_rc.dtype
    unpack = float8.unpack if options.unpacks_float8 else lax.convert_element_type
    all_kv = [unpack(kv_tc, dtype) for _, kv_tc in heads]
    keys = [kv_tc[:, options.keys] for kv_tc in all_kv]
    values = [kv_tc[:, options.values] for kv_tc in all_kv]
    scores = [_scale(_dot(q_rc, k_tc, 1), options) for (q_rc, _), k_tc in zip(heads, keys, strict=True)]
    scores_rt = _stack(scores if keep_rt is None else [jnp.where(keep_rt, x_rt, -jnp.inf) for x_rt in scores])
    maxima_rx, sums_rx, values_rv = (ref[...].reshape(-1, ref.shape[-1]) for ref in state)
    new_maxima_rx = jnp.maximum(maxima_rx, scores_rt.max(axis=1, keepdims=True))
    decay_rx = jnp.exp2(maxima_rx - new_maxima_rx)
    weights_rt = jnp.exp2(scores_rt - _widen(new_maxima_rx, scores_rt.shape[1]))
    sums_rx = sums_rx * decay_rx + _fold(weights_rt)
    rows = scores_rt.shape[0] // len(heads)
    parts = [weights_rt[i * rows : (i + 1) * rows].astype(dtype) for i in range(len(heads))]
    new_values_rv = _stack([_dot(part, v_tc, 0) for part, v_tc in zip(parts, values, strict=True)])
    values_rv = values_rv * _widen(decay_rx, values_rv.shape[1]) + new_values_rv
    for ref, value in zip(state, (new_maxima_rx, sums_rx, values_rv), strict=True):
        ref[...] = value.reshape(ref.shape)


def result(state: State, options: Options) -> Array:
    """Return the attention's output [.., v]; zeros for rows that have seen nothing."""
    total_r1 = state.sums[...].sum(axis=-1, keepdims=True)
    values_rv = state.values[...] / jnp.maximum(total_r1, 1e-30)
    return values_rv * float8.FACTOR if options.unpacks_float8 else values_rv


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
