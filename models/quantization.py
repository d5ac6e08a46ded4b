"""Round weights to fewer bits when they are loaded; activations are not quantized."""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
from jax import Array

from pallas_kernels.weights import CODEBOOKS, INT8, WeightFormat
from pallas_kernels.weights.held import Quantized, pack_nibbles

NF4 = WeightFormat(4, group=64, values="nf4", scale_dtype="float32")
"""The format of bitsandbytes, which leaves embedding and head unchanged."""
METHODS: Mapping[str, WeightFormat] = {
    "int8": INT8,
    "fp8": WeightFormat(8, values="e4m3", scale_dtype="float32"),
    "int4": WeightFormat(4, group=32, zero_dtype="uint8"),
    "bitsandbytes": NF4,
}
"""The format that each method rounds weights to."""
_LARGEST = {"integer": 127.0, "e4m3": 448.0}
"""The largest code of 8 bits; the smallest is its negative."""
_LEAST_SCALE = 2.0**-24
"""The smallest scale, which is the smallest float16."""


def quantize(weight: Array, num_inputs: int, form: WeightFormat, *, is_packed: bool = False) -> Quantized:
    """Round a weight [*out, *in], summed over its last `num_inputs` axes, to a format of `METHODS`.

    With 8 bits the scale of an output makes its largest magnitude the largest code. With 4 bits the scale and zero of a
    group map its range, extended to include 0, to 0 to 15. With NF4 the scale of a group is its largest magnitude.
    """
    weight = weight.astype(jnp.float32).reshape(*weight.shape[: weight.ndim - num_inputs], -1)
    if form.group is None:
        largest = _LARGEST[form.values]
        scales = jnp.max(jnp.abs(weight), axis=-1, keepdims=True) / largest
        scaled = weight / jnp.where(scales == 0, 1, scales)
        codes = (jnp.round(scaled) if form.values == "integer" else scaled).astype(form.code_dtype)
        return Quantized({"codes": codes, "scales": scales}, form, is_packed)
    grouped = weight.reshape(*weight.shape[:-1], -1, form.group)
    if form.values == "nf4":
        scales = jnp.max(jnp.abs(grouped), axis=-1)
        table = jnp.asarray(CODEBOOKS["nf4"], jnp.float32)
        scaled = grouped / jnp.where(scales == 0, 1, scales)[..., None]
        codes = jnp.searchsorted((table[1:] + table[:-1]) / 2, scaled, method="compare_all")
        codes = _held_codes(codes.reshape(weight.shape), form, is_packed=is_packed)
        return Quantized({"codes": codes, "scales": scales}, form, is_packed)
    least, most = (jnp.minimum(grouped.min(axis=-1), 0), jnp.maximum(grouped.max(axis=-1), 0))
    top = 2**form.bits - 1
    scales = jnp.maximum((most - least) / top, _LEAST_SCALE).astype(jnp.float16)
    wide = scales.astype(jnp.float32)
    zeros = jnp.clip(jnp.round(-least / wide), 0, top)
    codes = jnp.clip(jnp.round(grouped / wide[..., None]) + zeros[..., None], 0, top)
    codes = _held_codes(codes.reshape(weight.shape), form, is_packed=is_packed)
    return Quantized({"codes": codes, "scales": scales, "zeros": zeros.astype(jnp.uint8)}, form, is_packed)


def _held_codes(codes: Array, form: WeightFormat, *, is_packed: bool) -> Array:
    """Return codes of 4 bits in the dtype, or the bytes, that a device holds."""
    codes = codes.astype(jnp.uint8)
    return pack_nibbles(codes) if is_packed else codes.astype(form.device_dtype("codes", packed=False))
