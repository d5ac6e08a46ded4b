"""The supported quantization methods of checkpoints, and the reader of each one's settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jaxllm.loading.quantized import awq, bitsandbytes, compressed_tensors, fp8, gptq, modelopt, mxfp4
from jaxllm.loading.quantized.scheme import SCALE_DTYPES, Scheme
from jaxllm.params.checks import shown

METHODS: Mapping[str, Callable[[Mapping[str, Any], str], Scheme]] = {
    "awq": awq.read,
    "gptq": gptq.read,
    "compressed-tensors": compressed_tensors.read,
    "fp8": fp8.read,
    "fbgemm_fp8": fp8.read_fbgemm,
    "modelopt": modelopt.read,
    "mxfp4": mxfp4.read,
    "bitsandbytes": bitsandbytes.read,
}
"""The function that reads a quantization_config, by its quant_method; its second argument is the dtype of scales."""
ALIASES: Mapping[str, str] = {
    "auto_awq": "awq",
    "auto_gptq": "gptq",
    "modelopt_fp4": "modelopt",
    "modelopt_mxfp8": "modelopt",
    "modelopt_mixed": "modelopt",
    "gpt_oss_mxfp4": "mxfp4",
}
_WAY_OUT = "use the original checkpoint, a GGUF file, or one quantized with one of those"


def read_scheme(quantization: Any, dtype: str | None = None) -> Scheme:
    """Read a config.json's quantization_config; `dtype` is the model's, if it states one.

    Raises ValueError, naming the key, for a malformed or unsupported setting.
    """
    if not isinstance(quantization, Mapping):
        raise ValueError(f"quantization_config is {shown(quantization)}, expected an object")
    method = quantization.get("quant_method")
    read = METHODS.get(ALIASES.get(method, method)) if isinstance(method, str) else None
    if read is None:
        known = ", ".join(METHODS)
        raise ValueError(
            f"quantization_config: its weights are quantized with {shown(method)} (quant_method), which is not "
            f"supported, only {known}; {_WAY_OUT}"
        )
    return read(quantization, dtype if dtype in SCALE_DTYPES else "float16")
