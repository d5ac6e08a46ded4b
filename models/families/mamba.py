"""Tensor names and config fields that the families with layers of Mamba-2 share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..fields import read_bool, read_int
from ..names import Fused, TensorName
from ..state_specs import ScanSpec

PARTS = ("gate", "x", "b", "c", "dt")
_CONVOLVED = ("x", "b", "c")
_OLD_LAYER_TYPES = {"mamba": "linear_attention", "attention": "full_attention"}


def scan_names(mixer: str) -> dict[str, TensorName]:
    """Return the names of a layer's tensors; all begin with `mixer`."""
    fused = {
        "in_proj.weight": ("c d -> c d", PARTS, ""),
        "in_proj.bias": ("c -> c", PARTS, "_bias"),
        "conv1d.weight": ("c u k -> c u k", _CONVOLVED, "_conv"),
        "conv1d.bias": ("c -> c", _CONVOLVED, "_conv_bias"),
    }
    names = {}
    for tensor, (layout, parts, end) in fused.items():
        members = tuple(f"{part}{end}" for part in parts)
        names |= {member: TensorName(mixer + tensor, layout, Fused(members)) for member in members}
    names |= {
        "log_rate": TensorName(mixer + "A_log", "n -> n"),
        "step_bias": TensorName(mixer + "dt_bias", "n -> n"),
        "skip": TensorName(mixer + "D", "n -> n"),
        "norm": TensorName(mixer + "norm.weight", "(n h) -> n h"),
        "o": TensorName(mixer + "out_proj.weight", "d c -> d c"),
        "o_bias": TensorName(mixer + "out_proj.bias", "d -> d"),
    }
    return {f"layers.recurrent.{name}": tensor for name, tensor in names.items()}


def renamed_layer_types(kinds: Any) -> Any:
    """Return layer types by their newer names; a value that is not a list is returned unchanged."""
    if not isinstance(kinds, list | tuple):
        return kinds
    return [_OLD_LAYER_TYPES.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]


def read_time_limits(hf: Mapping[str, Any]) -> tuple[float, float]:
    """Return the least and the greatest time step; by default 0 and infinity."""
    limits = hf.get("time_step_limit")
    if limits is None:
        return 0.0, math.inf
    if not isinstance(limits, list | tuple) or len(limits) != 2:
        raise ValueError(f"time_step_limit is {limits!r}, expected two numbers")
    least, greatest = map(_read_limit, limits)
    return least, greatest


def _read_limit(limit: Any) -> float:
    """Return a number, which HF writes as an object if it is infinite."""
    if limit in ({"__float__": "Infinity"}, "Infinity"):
        return math.inf
    if isinstance(limit, bool) or not isinstance(limit, int | float):
        raise ValueError(f"time_step_limit has {limit!r}, expected a number")
    return float(limit)


def read_scan(hf: Mapping[str, Any], num_inner: int | None = None, **changes: Any) -> ScanSpec:
    """Read the scan of a family with attention beside Mamba-2, by the keys of Bamba and Granite 4.

    `num_inner` is the size of all heads together, by default `mamba_expand` times the hidden size; `changes` are
    further fields of the spec.
    """
    num_heads = read_int(hf, "mamba_n_heads")
    inner = num_inner or read_int(hf, "mamba_expand") * read_int(hf, "hidden_size")
    stored = hf.get("mamba_d_head")
    head_dim = inner // num_heads if stored in (None, "auto") else read_int(hf, "mamba_d_head")
    if num_heads * head_dim != inner:
        raise ValueError(f"mamba_n_heads is {num_heads}, of {head_dim} numbers each (mamba_d_head), expected {inner}")
    fields: dict[str, Any] = {
        "num_heads": num_heads,
        "head_dim": head_dim,
        "num_groups": read_int(hf, "mamba_n_groups"),
        "state_dim": read_int(hf, "mamba_d_state"),
        "conv_size": read_int(hf, "mamba_d_conv"),
        "conv_bias": read_bool(hf, "mamba_conv_bias"),
        "bias": read_bool(hf, "mamba_proj_bias"),
        "dt_limits": read_time_limits(hf),
    }
    return ScanSpec(**fields | changes)


def in_feed_forward(names: Mapping[str, TensorName]) -> dict[str, TensorName]:
    """Return Llama's names as families after Jamba have them: the MLP and the last two norms are named otherwise."""

    def renamed(tensor: TensorName) -> TensorName:
        name = tensor.name.replace(".mlp.", ".feed_forward.").replace("post_attention_layernorm", "pre_ff_layernorm")
        return tensor._replace(name=name)

    final = {"final_norm.scale": TensorName("{body}final_layernorm.weight", "d -> d")}
    return {path: renamed(tensor) for path, tensor in names.items()} | final


def selective_names(mixer: str) -> dict[str, TensorName]:
    """Return the names of the tensors of a layer of Mamba; all begin with `mixer`."""
    parts, biases = Fused(("x", "gate")), Fused(("x_bias", "gate_bias"))
    names = {name: TensorName(mixer + "in_proj.weight", "c d -> c d", parts) for name in parts.members}
    names |= {name: TensorName(mixer + "in_proj.bias", "c -> c", biases) for name in biases.members}
    names |= {
        "conv": TensorName(mixer + "conv1d.weight", "c u k -> c u k"),
        "conv_bias": TensorName(mixer + "conv1d.bias", "c -> c"),
        "mixed": TensorName(mixer + "x_proj.weight", "r c -> r c"),
        "step": TensorName(mixer + "dt_proj.weight", "c l -> c l"),
        "step_bias": TensorName(mixer + "dt_proj.bias", "c -> c"),
        "log_rate": TensorName(mixer + "A_log", "c n -> c n"),
        "skip": TensorName(mixer + "D", "c -> c"),
        "o": TensorName(mixer + "out_proj.weight", "d c -> d c"),
        "o_bias": TensorName(mixer + "out_proj.bias", "d -> d"),
    }
    return {f"layers.recurrent.{name}": tensor for name, tensor in names.items()}
