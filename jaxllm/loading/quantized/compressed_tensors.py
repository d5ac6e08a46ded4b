"""compressed-tensors, the format of llm-compressor: groups of modules, each with its own format."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxllm.loading.quantized.bytes8 import ByteLayout
from jaxllm.loading.quantized.fields import read_bool, read_choice, read_int, read_names, read_object, refuse
from jaxllm.loading.quantized.float4 import MXFP4, NVFP4, Float4Layout
from jaxllm.loading.quantized.fp8 import ROUNDED_INPUTS, WHOLE, blocks_of
from jaxllm.loading.quantized.packed import PackedLayout
from jaxllm.loading.quantized.patterns import compiled
from jaxllm.loading.quantized.scheme import Layout, Scheme
from pallas_kernels.weights import WeightFormat

FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
)
_BITS = (2, 3, 4, 5, 6, 8)
_ORDERS = ("", "weight", "static", "group", "dynamic")
_BYTES = FORMATS[1:4]
_LINEAR = ("Linear", "LinearBase")


@dataclass(frozen=True)
class _Targets:
    """A set of modules: by name, by regular expression, or all matmuls."""

    names: frozenset[str]
    patterns: tuple[re.Pattern[str], ...]
    are_all: bool

    def rank(self, module: str) -> int:
        """Return 3 if the module is named, 2 if a pattern matches, 1 if all modules are meant, 0 if none of these."""
        if module in self.names:
            return 3
        return 2 if any(pattern.match(module) for pattern in self.patterns) else int(self.are_all)


def read(config: Mapping[str, Any], dtype: str) -> Scheme:
    """Read a quantization_config of compressed-tensors."""
    refuse(config, "transform_config", "use a checkpoint without rotations")
    sparsity = read_object(config, "sparsity_config")
    read_choice(sparsity, "format", ("dense",), "dense")
    ignored = _targets(config, "ignore")
    named = read_object(config, "config_groups")
    group_configs = [read_object(named, name) for name in named]
    if not group_configs:
        raise ValueError("quantization_config: config_groups is missing")
    groups = [(_targets(group, "targets"), _layout(group, config, dtype)) for group in group_configs]

    def layout_of(module: str) -> Layout | None:
        if ignored.rank(module):
            return None
        rank, layout = max(((targets.rank(module), layout) for targets, layout in groups), key=lambda pair: pair[0])
        return layout if rank else None

    kinds = sorted({_kind(group, config) for group in group_configs if group.get("weights")})
    rounds_inputs = any(group.get("input_activations") for group in group_configs)
    return Scheme(
        f"compressed-tensors ({', '.join(kinds)})",
        layout_of,
        (ROUNDED_INPUTS,) if rounds_inputs else (),
        has_head=layout_of("lm_head") is not None,
    )


def _kind(group: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Return the format of a group, or the format that all groups share."""
    return read_choice(group if group.get("format") is not None else config, "format", FORMATS, "")


def _targets(config: Mapping[str, Any], key: str) -> _Targets:
    entries = read_names(config, key)
    patterns = tuple(compiled(name[3:], key) for name in entries if name.startswith("re:"))
    names = frozenset(name for name in entries if not name.startswith("re:") and name not in _LINEAR)
    classes = sorted(name for name in names if name[:1].isupper() and "." not in name)
    if classes and key == "targets":
        raise ValueError(f"quantization_config: targets has {classes[0]}, which is not supported, only Linear")
    return _Targets(names, patterns, any(name in _LINEAR for name in entries))


def _layout(group: Mapping[str, Any], config: Mapping[str, Any], dtype: str) -> Layout | None:
    """Return the layout of a group's modules; None if only their inputs are rounded."""
    weights = read_object(group, "weights")
    if not weights:
        return None
    refuse(group, "output_activations", "use a checkpoint that leaves the outputs of matmuls as they are")
    refuse(weights, "dynamic", "use a checkpoint whose weights are rounded already")
    kind = _kind(group, config)
    return _READERS[kind](kind, weights, dtype)


def _packed(kind: str, weights: Mapping[str, Any], dtype: str) -> Layout:
    del kind
    _check_type(weights, "int")
    bits, group, is_even = read_choice(weights, "num_bits", _BITS, 8), _group(weights), _is_symmetric(weights)
    order = weights.get("actorder")
    order = ("group" if order else None) if isinstance(order, bool) else order
    is_ordered = read_choice({"actorder": order}, "actorder", _ORDERS, "") in ("group", "dynamic")
    if bits == 8 and group == 0 and is_even:
        return PackedLayout(WeightFormat(8, None, scale_dtype="float32"))
    offset = 1 << (bits - 1) if is_even and bits < 8 else 0
    zeros = None if is_even else "int8" if bits == 8 else "uint8"
    form = WeightFormat(bits, group, offset=offset, scale_dtype=dtype, zero_dtype=zeros)
    return PackedLayout(form, is_ordered=is_ordered)


def _bytes(kind: str, weights: Mapping[str, Any], dtype: str) -> Layout:
    types = {"int-quantized": ("int",), "float-quantized": ("float",)}.get(kind, ("int", "float"))
    if _check_type(weights, *types) == "float":
        read_choice(weights, "num_bits", (8,), 8)
        if not _is_symmetric(weights):
            raise ValueError("quantization_config: symmetric is false, which is not supported for type float")
        if weights.get("strategy") == "block":
            form, rows = blocks_of(weights.get("block_structure"), "block_structure", dtype)
            return ByteLayout(form, block_rows=rows)
        group = _group(weights)
        return ByteLayout(WeightFormat(8, group, values="e4m3", scale_dtype=dtype) if group else WHOLE)
    read_choice(weights, "num_bits", _BITS, 8)
    group, is_even = _group(weights), _is_symmetric(weights)
    if group == 0 and is_even:
        return ByteLayout(WeightFormat(8, None, scale_dtype="float32"))
    form = WeightFormat(8, group, scale_dtype=dtype, zero_dtype=None if is_even else "int8")
    return ByteLayout(form, has_zeros=not is_even)


def _floats(kind: str, weights: Mapping[str, Any], dtype: str) -> Layout:
    del dtype
    _check_type(weights, "float")
    if kind == "mxfp8-quantized":
        read_choice(weights, "num_bits", (8,), 8)
        return ByteLayout(WeightFormat(8, 32, values="e4m3", scale_dtype="bfloat16"))
    read_choice(weights, "num_bits", (4,), 4)
    if kind == "mxfp4-pack-quantized":
        read_choice(weights, "group_size", (32,), 32)
        return Float4Layout(MXFP4)
    read_choice(weights, "group_size", (16,), 16)
    return Float4Layout(NVFP4, factor_end=".weight_global_scale", is_divided=True)


def _check_type(weights: Mapping[str, Any], *types: str) -> str:
    return read_choice(weights, "type", types, "int")


def _is_symmetric(weights: Mapping[str, Any]) -> bool:
    return read_bool(weights, "symmetric", True)


def _group(weights: Mapping[str, Any]) -> int:
    """Return the number of inputs that share a scale; 0 for a whole row."""
    strategy = read_choice(weights, "strategy", ("tensor", "channel", "group"), "group")
    if strategy != "group":
        return 0
    group = read_int(weights, "group_size")
    if group == 0:
        raise ValueError("quantization_config: group_size is 0")
    return max(group, 0)


_READERS: Mapping[str, Callable[[str, Mapping[str, Any], str], Layout]] = {
    "pack-quantized": _packed,
    **dict.fromkeys(_BYTES, _bytes),
    **dict.fromkeys(("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"), _floats),
}
