"""Tensor names and config fields that the families with layers of Mamba-2 share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..names import Fused, TensorName

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
