"""HunYuan: Llama whose norms of q and k come after RoPE; the larger ones have experts and a shared one."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ..config import ModelConfig, MoESpec
from ..family import Family
from ..fields import read_bool, read_float, read_int, require
from ..names import TensorName
from ..reading import read_decoder, read_num_layers, read_rope, read_rope_settings, read_rope_type
from .llama import LLAMA_NAMES
from .qwen_moe import MOE_NAMES

_ATTENTION, _MLP = "{body}layers.{l}.self_attn.", "{body}layers.{l}.mlp."
_NORMS = {
    "layers.attn.q_norm.scale": TensorName(_ATTENTION + "query_layernorm.weight", "h -> h"),
    "layers.attn.k_norm.scale": TensorName(_ATTENTION + "key_layernorm.weight", "h -> h"),
}
_HUNYUAN_NAMES = MappingProxyType({**LLAMA_NAMES, **_NORMS})
_HUNYUAN_MOE_NAMES = MappingProxyType(
    {
        **MOE_NAMES,
        **_NORMS,
        "layers.mlp.router.weight": TensorName(_MLP + "gate.wg.weight", "e d -> e d"),
        "layers.mlp.shared.gate": TensorName(_MLP + "shared_mlp.gate_proj.weight", "f d -> f d"),
        "layers.mlp.shared.up": TensorName(_MLP + "shared_mlp.up_proj.weight", "f d -> f d"),
        "layers.mlp.shared.down": TensorName(_MLP + "shared_mlp.down_proj.weight", "d f -> d f"),
    }
)

# HF's values for keys that a config.json leaves out.
DEFAULTS = {"rms_norm_eps": 1e-5, "num_experts": 1, "moe_topk": 1}


def _hunyuan_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a HunYuan config.json."""
    return _read("HunYuanDenseV1ForCausalLM", DEFAULTS | dict(hf))


def _hunyuan_moe_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the config.json of a HunYuan with experts; some numbers in it may differ from layer to layer."""
    hf = DEFAULTS | dict(hf)
    width = read_int(hf, "intermediate_size")
    for key, expected in ("moe_intermediate_size", width), ("num_shared_expert", 1):
        if hf.get(key) is not None and set(_read_by_layer(hf, key)) != {expected}:
            raise ValueError(f"{key} is {hf[key]}; only {expected} is supported in this architecture")
    experts = zip(_read_by_layer(hf, "num_experts"), _read_by_layer(hf, "moe_topk"), strict=True)
    moe = [
        MoESpec(num_experts=number, top_k=top_k, intermediate_size=width, normalizes=True, shared_size=width)
        for number, top_k in experts
    ]
    return _read("HunYuanMoEV1ForCausalLM", hf, layers={"moe": moe})


def _read_by_layer(hf: Mapping[str, Any], key: str) -> list[int]:
    """Return the number of each layer under a key that may have one for all."""
    values, num_layers = hf[key], read_num_layers(hf)
    if not isinstance(values, list | tuple):
        values = [values] * num_layers
    if len(values) < num_layers:
        raise ValueError(f"{key} has {len(values)} numbers, and there are {num_layers} layers")
    return [read_int({key: value}, key) for value in values[:num_layers]]


def _read(architecture: str, hf: Mapping[str, Any], **fields: Any) -> ModelConfig:
    require(hf, use_qk_norm=True, use_cla=False)
    bias, settings = read_bool(hf, "attention_bias"), read_rope_settings(hf)
    if read_rope_type(settings) == "dynamic" and settings.get("alpha"):
        # The base is fixed, and does not depend on the length, as it does in other dynamic tables.
        head_dim = read_int(hf, "head_dim", read_int(hf, "hidden_size") // read_int(hf, "num_attention_heads"))
        if head_dim < 4:
            raise ValueError(f"head_dim is {head_dim}, expected 4 at least with alpha")
        theta = read_float(settings, "rope_theta", 10_000.0) * read_float(settings, "alpha") ** (
            head_dim / (head_dim - 2)
        )
        settings = {"rope_theta": theta}
    return read_decoder(
        hf,
        architecture=architecture,
        ropes=(read_rope(hf, settings),),
        qk_norm=True,
        rotated_norm=read_float(hf, "rms_norm_eps"),
        qkv_bias=bias,
        o_bias=bias,
        **fields,
    )


FAMILIES = {
    "HunYuanDenseV1ForCausalLM": Family(config_from_hf=_hunyuan_config, names=_HUNYUAN_NAMES),
    "HunYuanMoEV1ForCausalLM": Family(config_from_hf=_hunyuan_moe_config, names=_HUNYUAN_MOE_NAMES),
}
