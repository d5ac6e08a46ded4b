"""FP8 as transformers, DeepSeek and FBGEMM store it: E4M3 with one scale, one per row, or one per block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxllm.loading.quantized.bytes8 import ByteLayout
from jaxllm.loading.quantized.fields import read_choice, read_names
from jaxllm.loading.quantized.patterns import SkipList
from jaxllm.loading.quantized.scheme import Scheme
from jaxllm.params.checks import shown
from pallas_kernels.weights import WeightFormat

ROUNDED_INPUTS = "the method rounds the inputs of matmuls too; here they keep the model's dtype"
_MAX_BLOCK = 4096
WHOLE = WeightFormat(8, None, values="e4m3", scale_dtype="float32")


def blocks_of(shape: Any, key: str, scale_dtype: str = "float32") -> tuple[WeightFormat, int]:
    """Return the format of blocks and their number of rows. Raises ValueError if the value is not a pair of numbers."""
    is_pair = isinstance(shape, list | tuple) and len(shape) == 2
    if not is_pair or not all(type(size) is int and 0 < size <= _MAX_BLOCK for size in shape):
        raise ValueError(f"quantization_config: {key} is {shown(shape)}, expected numbers of rows and columns")
    return WeightFormat(8, shape[1], values="e4m3", scale_dtype=scale_dtype), shape[0]


def read(config: Mapping[str, Any], dtype: str) -> Scheme:
    """Read a quantization_config of transformers' or vLLM's "fp8"."""
    del dtype
    read_choice(config, "fmt", ("e4m3",), "e4m3")
    read_choice(config, "expert_dtype", ("fp8",), "fp8")
    read_choice(config, "activation_scheme", ("dynamic", "static"), "dynamic")
    skipped = SkipList(read_names(config, "modules_to_not_convert", "ignored_layers"), "modules_to_not_convert")
    skipped.check()
    key = "weight_block_size"
    form, rows = (WHOLE, 1) if config.get(key) is None else blocks_of(config[key], key)
    layout = ByteLayout(form, block_rows=rows, scale_ends=(".weight_scale_inv", ".weight_scale"))
    size = "" if form.group is None else f" in blocks of {rows} x {form.group}"
    return Scheme(f"FP8{size}", lambda module: None if module in skipped else layout, (ROUNDED_INPUTS,))


def read_fbgemm(config: Mapping[str, Any], dtype: str) -> Scheme:
    """Read a quantization_config of "fbgemm_fp8", which has a scale per row."""
    del dtype
    skipped = SkipList(read_names(config, "modules_to_not_convert"), "modules_to_not_convert")
    skipped.check()
    layout = ByteLayout(WHOLE)
    return Scheme("FP8 by rows", lambda module: None if module in skipped else layout, (ROUNDED_INPUTS,))
