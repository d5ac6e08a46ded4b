"""The formats of weights, keys and values that engine arguments name."""

from __future__ import annotations

from collections.abc import Mapping

KV_CACHE_DTYPES: Mapping[str, str] = {
    "bfloat16": "bfloat16",
    "float16": "float16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
"""This maps vLLM's name of a KV cache's dtype to JAX's."""
QUANTIZATIONS: Mapping[str, str] = {
    "int8": "int8",
    "int8_per_channel_weight_only": "int8",
    "int4": "int4",
    "fp8": "fp8",
}
"""This maps our name of a way to round weights when they are loaded, and vLLM's, to ours."""
CHECKPOINT_QUANTIZATIONS = (
    "awq",
    "bitsandbytes",
    "compressed-tensors",
    "fbgemm_fp8",
    "gguf",
    "gptq",
    "modelopt",
    "modelopt_fp4",
    "mxfp4",
)
"""What a checkpoint may be quantized with, by vLLM's names."""
