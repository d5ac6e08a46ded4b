"""Named formats of real checkpoints, shared by tests and compile checks."""

from __future__ import annotations

from pallas_kernels.weights import WeightFormat

FORMATS: dict[str, WeightFormat] = {
    "awq": WeightFormat(4, 128, zero_dtype="uint8"),
    "gptq": WeightFormat(4, 128, offset=8),
    "int4-g64": WeightFormat(4, 64, offset=8, scale_dtype="bfloat16"),
    "q4_0": WeightFormat(4, 32, offset=8),
    "q4_1": WeightFormat(4, 32, has_mins=True),
    "q4_k": WeightFormat(4, 32, scale_dtype="uint8", has_mins=True, factor_group=256),
    "q6_k": WeightFormat(6, 16, offset=32, scale_dtype="int8", factor_group=256),
    "q8_0": WeightFormat(8, 32),
    "mxfp4": WeightFormat(4, 32, values="e2m1", scale_dtype="bfloat16"),
    "fp8-block": WeightFormat(8, 128, values="e4m3", scale_dtype="float32"),
    "int8": WeightFormat(8, scale_dtype="float32"),
    "fp8": WeightFormat(8, values="e4m3", scale_dtype="float32"),
}
"""The formats, named by their makers; "gptq" has no zeros, "int8" and "fp8" have a scale for each output."""

RARE: dict[str, WeightFormat] = {
    "q5_0": WeightFormat(5, 32, offset=16),
    "q5_1": WeightFormat(5, 32, has_mins=True),
    "q5_k": WeightFormat(5, 32, scale_dtype="uint8", has_mins=True, factor_group=256),
    "q3_k": WeightFormat(3, 16, offset=4, scale_dtype="int8", factor_group=256),
    "q2_k": WeightFormat(2, 16, scale_dtype="uint8", has_mins=True, factor_group=256),
    "gptq-3": WeightFormat(3, 128, zero_dtype="uint8"),
    "gptq-8": WeightFormat(8, 128, zero_dtype="int8"),
    "nvfp4": WeightFormat(4, 16, values="e2m1", scale_dtype="float8_e4m3fn", factor_group=4096, factor_dtype="float32"),
    "mxfp8": WeightFormat(8, 32, values="e4m3", scale_dtype="bfloat16"),
    "nf4": WeightFormat(4, 64, values="nf4", scale_dtype="float32"),
}
"""Formats that are compiled but not tested in the interpreters; formats that a platform's kernels refuse may be widened
there. A TPU or GPU holds codes of 2 bits as it holds those of 3 bits. nvfp4's rows have 4,096 numbers."""
