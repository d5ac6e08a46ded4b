"""Mamba, Falcon Mamba and Mamba-2, without attention; names and fields that hybrids of these share with them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from ..config import ModelConfig
from ..family import Family
from ..fields import read_bool, read_float, read_int, require
from ..mixer_specs import ScanSpec, SelectiveSpec, StateSpec
from ..names import NO_PREFIXES, Fused, Prefixes, TensorName
from ..reading import read_decoder, read_num_layers

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


_MIXER = "{body}layers.{l}.mixer."
_AROUND = {
    "embed.table": TensorName("{body}embeddings.weight", "v d -> v d"),
    "final_norm.scale": TensorName("{body}norm_f.weight", "d -> d"),
    "lm_head.table": TensorName("{head}lm_head.weight", "v d -> v d"),
    "layers.attn_norm.scale": TensorName("{body}layers.{l}.norm.weight", "d -> d"),
}
_OLD_EMBEDDING = {"embed.table": TensorName("{body}embedding.weight", "v d -> v d")}
"""The name in checkpoints of the first code of Mamba, which HF's classes read too."""

# HF's values for keys that a config.json leaves out.
MAMBA_DEFAULTS: dict[str, Any] = {
    "vocab_size": 50_280,
    "hidden_size": 768,
    "state_size": 16,
    "num_hidden_layers": 32,
    "layer_norm_epsilon": 1e-5,
    "expand": 2,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "mixer_rms_eps": 1e-6,
    "tie_word_embeddings": True,
}
MAMBA2_DEFAULTS: dict[str, Any] = {
    "vocab_size": 32_768,
    "hidden_size": 4096,
    "state_size": 128,
    "num_hidden_layers": 64,
    "layer_norm_epsilon": 1e-5,
    "num_heads": 128,
    "head_dim": 64,
    "expand": 2,
    "conv_kernel": 4,
    "n_groups": 8,
    "use_conv_bias": True,
}


def _mamba_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Mamba config.json."""
    hf = MAMBA_DEFAULTS | dict(hf)
    return _read_stateful(hf, "MambaForCausalLM", _read_selective(hf))


def _falcon_mamba_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Falcon Mamba config.json, where time steps' latents, b and c are normed, without scales."""
    hf = MAMBA_DEFAULTS | dict(hf)
    scan = replace(_read_selective(hf), norm_eps=read_float(hf, "mixer_rms_eps"))
    return _read_stateful(hf, "FalconMambaForCausalLM", scan)


def _read_selective(hf: Mapping[str, Any]) -> SelectiveSpec:
    hidden_size, rank = read_int(hf, "hidden_size"), hf.get("time_step_rank")
    return SelectiveSpec(
        num_channels=read_int(hf, "intermediate_size", read_int(hf, "expand") * hidden_size),
        state_dim=read_int(hf, "state_size"),
        dt_rank=math.ceil(hidden_size / 16) if rank in (None, "auto") else read_int(hf, "time_step_rank"),
        conv_size=read_int(hf, "conv_kernel"),
        conv_bias=read_bool(hf, "use_conv_bias"),
        bias=read_bool(hf, "use_bias"),
    )


def _mamba2_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Mamba-2 config.json."""
    hf = MAMBA2_DEFAULTS | dict(hf)
    scan = ScanSpec(
        num_heads=read_int(hf, "num_heads"),
        head_dim=read_int(hf, "head_dim"),
        num_groups=read_int(hf, "n_groups"),
        state_dim=read_int(hf, "state_size"),
        conv_size=read_int(hf, "conv_kernel"),
        conv_bias=read_bool(hf, "use_conv_bias"),
        bias=read_bool(hf, "use_bias"),
        dt_limits=read_time_limits(hf),
    )
    inner = read_int(hf, "expand") * read_int(hf, "hidden_size")
    if scan.num_inner != inner:
        raise ValueError(f"num_heads is {scan.num_heads}, of {scan.head_dim} numbers each (head_dim), expected {inner}")
    return _read_stateful(hf, "Mamba2ForCausalLM", scan)


# A layer that does not attend has no use for these.
_NO_ATTENTION = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2, "intermediate_size": 1}


def _read_stateful(hf: Mapping[str, Any], architecture: str, state: StateSpec) -> ModelConfig:
    """Read what the models without attention share. Few name a length, and none needs one."""
    require(hf, hidden_act="silu")
    return read_decoder(
        {**hf, **_NO_ATTENTION},
        architecture=architecture,
        norm_eps=read_float(hf, "layer_norm_epsilon"),
        ropes=(),
        rope=None,
        has_mlp=False,
        layers={"state": [state] * read_num_layers(hf)},
    )


_MAMBA = Family(
    config_from_hf=_mamba_config,
    names=MappingProxyType({**_AROUND, **selective_names(_MIXER)}),
    other_names=(_OLD_EMBEDDING,),
    prefixes=(Prefixes("backbone.", ""), NO_PREFIXES),
)
FAMILIES = {
    "MambaForCausalLM": _MAMBA,
    "FalconMambaForCausalLM": replace(_MAMBA, config_from_hf=_falcon_mamba_config),
    "Mamba2ForCausalLM": replace(
        _MAMBA,
        config_from_hf=_mamba2_config,
        names=MappingProxyType({**_AROUND, **scan_names(_MIXER)}),
    ),
}
