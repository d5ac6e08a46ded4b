"""The formats of quantized checkpoints, and random weights of them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np

from pallas_kernels.weights import WeightFormat, pack

K_QUANT = partial(WeightFormat, factor_group=256)
SCALES_AND_MINS = partial(K_QUANT, scale_dtype="uint8", has_mins=True)
FORMATS: Mapping[str, WeightFormat] = {
    "Q4_0": WeightFormat(4, 32, offset=8),
    "Q4_1": WeightFormat(4, 32, has_mins=True),
    "Q5_0": WeightFormat(5, 32, offset=16),
    "Q5_1": WeightFormat(5, 32, has_mins=True),
    "Q8_0": WeightFormat(8, 32),
    "Q4_K": SCALES_AND_MINS(4, 32),
    "Q5_K": SCALES_AND_MINS(5, 32),
    "Q6_K": K_QUANT(6, 16, offset=32, scale_dtype="int8"),
    "Q3_K": K_QUANT(3, 16, offset=4, scale_dtype="int8"),
    "Q2_K": SCALES_AND_MINS(2, 16),
    "IQ4_XS": K_QUANT(8, 32, scale_dtype="int8"),
    "MXFP4": WeightFormat(4, 32, "e2m1", scale_dtype="bfloat16"),
    "NVFP4": WeightFormat(4, 16, "e2m1", scale_dtype="float8_e4m3fn", factor_group=576, factor_dtype="float32"),
    "nf4": WeightFormat(4, 64, "nf4", scale_dtype="float32"),
    "AWQ": WeightFormat(4, 128, zero_dtype="uint8"),
    "AWQ of 64": WeightFormat(4, 64, scale_dtype="bfloat16", zero_dtype="uint8"),
    "GPTQ": WeightFormat(4, 128, offset=8),
    "GPTQ of 8 bits": WeightFormat(8, 32, zero_dtype="int8"),
    "GPTQ of 3 bits": WeightFormat(3, 32, zero_dtype="uint8"),
    "HQQ of 2 bits": WeightFormat(2, 64, zero_dtype="float16"),
    "float32 scales and mins": WeightFormat(4, 32, scale_dtype="float32", has_mins=True),
    "float32 scales and zeros of 6 bits": WeightFormat(6, 32, scale_dtype="float32", zero_dtype="uint8"),
    "5 bits in groups of 16": WeightFormat(5, 16, offset=16),
    "6 bits with mins": WeightFormat(6, 64, scale_dtype="float32", has_mins=True),
    "FP8 in blocks": WeightFormat(8, 128, "e4m3", scale_dtype="float32"),
    "e5m2 in groups": WeightFormat(8, 32, "e5m2", scale_dtype="float32"),
    "int8": WeightFormat(8, scale_dtype="float32"),
    "FP8": WeightFormat(8, None, "e4m3", scale_dtype="float32"),
    "FP8 with bfloat16 scales": WeightFormat(8, None, "e5m2", scale_dtype="bfloat16"),
}
HALVES: Mapping[str, WeightFormat] = {values: WeightFormat(16, values=values) for values in ("bfloat16", "float16")}
"""Formats of 16-bit numbers, which are multiplied in float32."""


def make_parts(
    form: WeightFormat, num_outputs: int, num_inputs: int, seed: int = 0, lead: tuple[int, ...] = ()
) -> dict[str, np.ndarray]:
    """Return parts [*lead, num_outputs, width] with every code, not packed, scales of both signs, and small sums."""
    rng = np.random.default_rng(seed)
    parts = {}
    for part in form.parts:
        shape, dtype = (*lead, num_outputs, form.width(part, num_inputs)), form.dtype(part)
        if part == "codes" and form.is_packed:
            parts[part] = rng.integers(0, 2**form.bits, shape, np.uint8)
        elif part == "codes" and form.values == "integer":
            parts[part] = rng.integers(-128, 128, shape, np.int8)
        elif part == "codes":
            parts[part] = np.clip(rng.standard_normal(shape), -4, 4).astype(dtype)
        elif part == "zeros" and dtype != np.float16:
            parts[part] = rng.integers(0, 2 ** min(form.bits, 7), shape).astype(dtype)
        elif part == "zeros":
            parts[part] = rng.uniform(0, 2**form.bits, shape).astype(dtype)
        elif dtype.kind in "iu" and dtype.itemsize == 1:
            low, high = (0, 64) if dtype == np.uint8 else (-128, 128)
            parts[part] = rng.integers(low, high, shape).astype(dtype)
        else:
            parts[part] = (
                rng.choice([-1, 1], shape) * rng.uniform(0.5, 1, shape) * 2.0 ** (-2 if form.factor_group else -6)
            ).astype(dtype)
    return parts


def packed(parts: Mapping[str, np.ndarray], form: WeightFormat) -> dict[str, np.ndarray]:
    """Return parts with their codes packed."""
    codes = pack(parts["codes"], form.bits) if form.is_packed else parts["codes"]
    return {**parts, "codes": codes}
