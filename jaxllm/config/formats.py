"""The formats that arguments name: of weights, of keys and values, and of messages' content."""

from __future__ import annotations

from collections.abc import Mapping

KV_CACHE_DTYPES: Mapping[str, str] = {
    "bfloat16": "bfloat16",
    "float16": "float16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
"""vLLM's names of KV cache dtypes, with JAX's."""
QUANTIZATIONS: Mapping[str, str] = {
    "int8": "int8",
    "int8_per_channel_weight_only": "int8",
    "int4": "int4",
    "fp8": "fp8",
    "bitsandbytes": "bitsandbytes",
}
"""jaxllm's and vLLM's names of ways to round weights when they are loaded, with jaxllm's."""
CHECKPOINT_QUANTIZATIONS = (
    "awq",
    "compressed-tensors",
    "fbgemm_fp8",
    "gguf",
    "gptq",
    "modelopt",
    "modelopt_fp4",
    "mxfp4",
)
"""The other quantization methods of checkpoints that are supported, by vLLM's names."""
CONTENT_FORMATS = ("auto", "string", "openai")
"""The forms in which a chat template may get a message's content; "auto" takes the one that it expects."""
