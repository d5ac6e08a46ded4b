"""RoPE tables and factors on queries, which depend on positions and are computed once per step outside the layers.

The formulas follow `transformers.modeling_rope_utils`, in float32 as there.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jax import Array

from .config import QueryScaling, RopeConfig


def rope_table(
    rope: RopeConfig,
    head_dim: int,
    positions_t: Array,
    rope_lengths_t: Array,
    positions_t3: Array | None = None,
    exponents_h: Array | None = None,
) -> tuple[Array, Array]:
    """Return cos and sin, each float32 [t, head_dim / 2], for the tokens' positions.

    `rope_lengths_t` is each token's sequence length, on which dynamic and longrope scaling depend. `positions_t3` has
    the three positions of multimodal RoPE; without it, all three are `positions_t`. `exponents_h` are learned
    numbers: their exponentials multiply the frequencies, in a table that has them.
    """
    positions_t1, rotary_dim = positions_t.astype(jnp.float32)[:, None], rope.rotary_dim(head_dim)
    if rope.axes and positions_t3 is not None:
        positions_t1 = positions_t3.astype(jnp.float32)[:, np.array(rope.axes)]
    if rope.rope_type == "dynamic":
        angles = positions_t1 * _dynamic_frequencies(rope, rotary_dim, rope_lengths_t)
    elif rope.rope_type == "longrope":
        short, long = (jnp.asarray(each)[None, :] for each in _longrope_frequencies(rope, rotary_dim))
        is_long_t1 = (rope_lengths_t > rope.original_max_position_embeddings)[:, None]
        angles = positions_t1 * jnp.where(is_long_t1, long, short)
    else:
        angles = positions_t1 * jnp.asarray(frequencies(rope, rotary_dim))[None, :]
    if rope.learned and exponents_h is not None:
        angles = angles * jnp.exp(exponents_h.astype(jnp.float32))[None, :]
    cos, sin = jnp.cos(angles) * rope.attention_factor, jnp.sin(angles) * rope.attention_factor
    left = ((0, 0), (0, (head_dim - rotary_dim) // 2))
    return jnp.pad(cos, left, constant_values=1), jnp.pad(sin, left)


def query_scale(scaling: QueryScaling | None, positions_t: Array) -> Array | None:
    """Return the factors on queries at these positions, float32 [t, 1, 1]; None without scaling."""
    if scaling is None:
        return None
    periods_t = jnp.floor((positions_t + scaling.first).astype(jnp.float32) / scaling.length)
    return (1 + scaling.beta * jnp.log1p(periods_t))[:, None, None]


def frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Return the inverse frequencies, float32 [head_dim / 2], of a table that does not depend on the sequence."""
    base = _default_frequencies(rope.theta, head_dim)
    match rope.rope_type:
        case "linear":
            return base / np.float32(rope.factor)
        case "ntk":
            # As in the first GTE's code: the base grows, and all waves become a bit longer.
            return _default_frequencies(rope.theta * rope.factor, head_dim) / np.float32(rope.factor ** (2 / head_dim))
        case "llama3":
            return _llama3_frequencies(rope, base)
        case "yarn":
            return _yarn_frequencies(rope, head_dim)
        case "proportional":
            rotated = np.arange(head_dim // 2) < int(rope.rotated * head_dim // 2)
            return np.where(rotated, base / np.float32(rope.factor), np.float32(0))
        case _:
            return base


def _exponents(head_dim: int) -> np.ndarray:
    return np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)


def _default_frequencies(theta: float, head_dim: int) -> np.ndarray:
    return np.float32(1.0) / _powers(theta, head_dim)


def _powers(theta: float, head_dim: int) -> np.ndarray:
    # numpy's float32 power is off by an ulp here and there, which far positions multiply; torch's is exact.
    return np.power(np.float64(theta), _exponents(head_dim).astype(np.float64)).astype(np.float32)


def _dynamic_frequencies(rope: RopeConfig, head_dim: int, lengths_t: Array) -> Array:
    """Return [t, head_dim / 2]: the base grows once a sequence is longer than the model was trained for."""
    trained = rope.max_position_embeddings
    lengths = jnp.maximum(lengths_t, trained).astype(jnp.float32)
    growth = rope.factor * lengths / trained - (rope.factor - 1.0)
    theta_t1 = (rope.theta * growth ** (head_dim / (head_dim - 2)))[:, None]
    return 1.0 / theta_t1 ** jnp.asarray(_exponents(head_dim))[None, :]


def _longrope_frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the inverse frequencies of short sequences and of long ones, float32 [head_dim / 2] each."""
    powers = _powers(rope.theta, head_dim)
    factors = (np.asarray(each, np.float32) for each in (rope.short_factors, rope.long_factors))
    short, long = (np.float32(1.0) / (each * powers) for each in factors)
    return short, long


def _llama3_frequencies(rope: RopeConfig, base: np.ndarray) -> np.ndarray:
    trained, low, high = rope.original_max_position_embeddings, rope.low_freq_factor, rope.high_freq_factor
    factor = np.float32(rope.factor)
    wavelengths = np.float32(2 * math.pi) / base
    if low == high:
        # In Llama 4 no wave is between the long ones and the short ones.
        return np.where(wavelengths > trained / low, base / factor, base)
    smooth = (np.float32(trained) / wavelengths - np.float32(low)) / np.float32(high - low)
    blended = (1 - smooth) * base / factor + smooth * base
    scaled = np.where(wavelengths > trained / low, base / factor, blended)
    return np.where(wavelengths < trained / high, base, scaled).astype(np.float32)


def _yarn_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    def correction(num_rotations: float) -> float:
        turns = rope.original_max_position_embeddings / (num_rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = correction(rope.beta_fast), correction(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    # Equal ends would divide by zero.
    span = (high - low) or 0.001
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(span), 0, 1)
    base = _default_frequencies(rope.theta, head_dim)
    return (base / np.float32(rope.factor) * ramp + base * (1 - ramp)).astype(np.float32)


def grid_rope_table(rope: RopeConfig, head_dim: int, coordinates_p2: Array, *, alternates: bool) -> tuple[Array, Array]:
    """Return cos and sin, each float32 [p, head_dim / 2], for patches in rows and columns of a grid.

    The first half of the angles is by the row, the second by the column. Both have the same frequencies, or take turns
    with those of a whole head.
    """
    if alternates:
        whole = _default_frequencies(rope.theta, head_dim)
        by_row, by_column = whole[0::2], whole[1::2]
    else:
        by_row = by_column = _default_frequencies(rope.theta, head_dim // 2)
    rows_p1, columns_p1 = jnp.split(coordinates_p2.astype(jnp.float32), 2, axis=1)
    angles = jnp.concatenate((rows_p1 * jnp.asarray(by_row)[None], columns_p1 * jnp.asarray(by_column)[None]), axis=1)
    return jnp.cos(angles), jnp.sin(angles)
