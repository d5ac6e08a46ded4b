"""NVIDIA's ModelOpt: FP8, NVFP4 and MXFP8, or a mix by layer, from `hf_quant_config.json` or `config.json`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import translate
from typing import Any

from jaxllm.loading.quantized.bytes8 import ByteLayout
from jaxllm.loading.quantized.fields import read_choice, read_int, read_names, read_object
from jaxllm.loading.quantized.float4 import NVFP4, Float4Layout
from jaxllm.loading.quantized.fp8 import ROUNDED_INPUTS, WHOLE
from jaxllm.loading.quantized.patterns import compiled
from jaxllm.loading.quantized.scheme import Layout, Scheme
from jaxllm.params.checks import shown
from pallas_kernels.weights import WeightFormat

MIXED = "mixed_precision"
_NVFP4 = Float4Layout(NVFP4, codes_end=".weight", factor_end=".weight_scale_2")
_BLOCKS = ByteLayout(WeightFormat(8, 128, values="e4m3", scale_dtype="float32"), block_rows=128)
_MXFP8 = ByteLayout(WeightFormat(8, 32, values="e4m3", scale_dtype="bfloat16"))
_LAYOUTS: Mapping[str, Layout] = {
    "fp8": ByteLayout(WHOLE),
    "fp8_per_channel_per_token": ByteLayout(WHOLE),
    "fp8_pb_wo": _BLOCKS,
    "mxfp8": _MXFP8,
    "nvfp4": _NVFP4,
    "w4a16_nvfp4": _NVFP4,
}
"""The layout of a matrix for each quant_algo."""


def read(config: Mapping[str, Any], dtype: str) -> Scheme:
    """Read a quantization_config of ModelOpt, or the contents of hf_quant_config.json."""
    del dtype
    config = {**config, **read_object(config, "quantization")}
    algorithm = read_choice(config, "quant_algo", (*_LAYOUTS, MIXED), "")
    _check_group(config, algorithm)
    is_excluded = _matcher(config, "exclude_modules", "ignore")
    layers = _read_layers(config) if algorithm == MIXED else {}

    def layout_of(module: str) -> Layout | None:
        if is_excluded(module):
            return None
        return layers.get(module) if algorithm == MIXED else _LAYOUTS[algorithm]

    notes = () if algorithm == "w4a16_nvfp4" else (ROUNDED_INPUTS,)
    return Scheme(f"ModelOpt's {algorithm.upper()}", layout_of, notes, has_head=layout_of("lm_head") is not None)


def _check_group(config: Mapping[str, Any], algorithm: str) -> None:
    layout = _LAYOUTS.get(algorithm)
    if isinstance(layout, Float4Layout) and read_int(config, "group_size", layout.form.group) != layout.form.group:
        raise ValueError(f"quantization_config: group_size is {config['group_size']}, expected {layout.form.group}")


def _read_layers(config: Mapping[str, Any]) -> dict[str, Layout]:
    """Return the layout of each layer, where they differ."""
    layouts = {}
    for module, layer in read_object(config, "quantized_layers").items():
        if not isinstance(layer, Mapping):
            raise ValueError(f"quantization_config: quantized_layers has {shown(layer)} for {shown(module)}")
        algorithm = read_choice(layer, "quant_algo", _LAYOUTS, "")
        _check_group(layer, algorithm)
        layouts[module] = _LAYOUTS[algorithm]
    return layouts


def _matcher(config: Mapping[str, Any], *keys: str) -> Callable[[str], bool]:
    """Return a function that tells whether a module, or a parent of it, is in a list of names with asterisks."""
    entries = read_names(config, *keys)
    names = frozenset(entries)
    patterns = [compiled(translate(name.removeprefix("re:")), keys[0]) for name in entries if "*" in name]

    def is_in(module: str) -> bool:
        parts = module.split(".")
        owners = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
        return any(owner in names or any(pattern.match(owner) for pattern in patterns) for owner in owners)

    return is_in
