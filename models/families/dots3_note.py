"""dots3: two kinds of attention over latents, with an indexer or a window; experts as in DeepSeek V3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from ..config import ModelConfig, RopeConfig
from ..family import Family
from ..fields import read_bool, read_choice, read_float, read_int, read_mapping, require
from ..mixer_specs import LatentSpec
from ..names import TensorName
from ..reading import read_decoder, read_layer_types, read_num_layers, read_rope, read_sparse_layers, read_text_config
from .deepseek import V3_DEFAULTS, read_latent
from .deepseek_v32 import SPARSE_NAMES, read_indexer
from .glm4_moe import read_sigmoid_experts

_ATTENTION = "{body}layers.{l}.self_attn."
_DOTS3_NAMES = MappingProxyType(
    {
        **SPARSE_NAMES,
        "layers.attn.k_rope_norm.scale": TensorName(_ATTENTION + "k_rope_only_layernorm.weight", "r -> r"),
        "layers.attn.gate": TensorName(_ATTENTION + "g_proj.weight", "n d -> n d"),
    }
)

# HF's values for keys that a config.json leaves out.
DEFAULTS: dict[str, Any] = V3_DEFAULTS | {
    "q_lora_rank": 1024,
    "max_position_embeddings": 524_288,
    "rms_norm_eps": 1e-5,
    "moe_intermediate_size": 1536,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_n_heads": 64,
}
_SLIDING_DEFAULTS: dict[str, Any] = {
    "num_attention_heads": 64,
    "q_lora_rank": 1024,
    "kv_lora_rank": 1024,
    "head_dim": 256,
    "qk_nope_head_dim": 192,
    "v_head_dim": 128,
}
_INDEXED, _FULL, _SLIDING = _KINDS = "indexed_attention", "full_attention", "sliding_attention"
_THETA = 80_000_000.0
_THETAS = {_INDEXED: ("rope_theta", _THETA), _FULL: ("rope_theta", _THETA), _SLIDING: ("swa_rope_theta", 50_000.0)}


def _dots3_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a dots3 config.json, or its text part."""
    hf = DEFAULTS | dict(read_text_config(hf, "dots3_note_text") if hf.get("text_config") else hf)
    require(hf, mlp_bias=False, attention_bias=False)
    kinds = _read_kinds(hf)
    used = [kind for kind in _KINDS if kind in kinds]
    of_kind = {kind: _read_sliding(hf, kinds) if kind == _SLIDING else hf for kind in used}
    latents = {kind: _read_latent(each) for kind, each in of_kind.items()}
    window = read_int(hf, "sliding_window", read_int(hf, "sliding_window_size", 512))
    shared = read_int(hf, "moe_shared_expert_intermediate_size", read_int(hf, "shared_experts_intermediate_size", 1536))
    moe = replace(read_sigmoid_experts(hf), shared_size=shared * read_int(hf, "n_shared_experts"))
    return read_decoder(
        hf,
        architecture="Dots3NoteForCausalLM",
        num_kv_heads=1,
        output_gate=True,
        gate_by_head=True,
        ropes=tuple(_read_rope(hf, kind) for kind in used),
        layers={
            "num_heads": [read_int(of_kind[kind], "num_attention_heads") for kind in kinds],
            "head_dim": [latents[kind].key_dim for kind in kinds],
            "scale": [(latents[kind].nope_dim + latents[kind].rope_dim) ** -0.5 for kind in kinds],
            "latent": [latents[kind] for kind in kinds],
            "indexer": [read_indexer(hf, interleaved=True) if kind == _INDEXED else None for kind in kinds],
            "window": [window if kind == _SLIDING else None for kind in kinds],
            "rope": [used.index(kind) for kind in kinds],
            "moe": [moe if is_sparse else None for is_sparse in read_sparse_layers(hf)],
        },
    )


def _read_kinds(hf: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the kind of attention of each layer.

    Published files call layers with an indexer full_attention, and have `use_dsa`; HF's have `per_layer_config`.
    """
    slides = read_bool(hf, "use_sliding_window", True)
    has_indexers = read_bool(hf, "use_dsa", True)
    renames = "per_layer_config" not in hf or "use_dsa" in hf
    default = tuple(
        _SLIDING if slides and layer >= 2 and layer % 4 != 1 else _INDEXED for layer in range(read_num_layers(hf))
    )
    kinds = read_layer_types(hf, default, _KINDS)
    names = {_FULL: _INDEXED} if has_indexers else {_INDEXED: _FULL}
    return tuple(names.get(kind, kind) if renames else kind for kind in kinds)


def _read_sliding(hf: Mapping[str, Any], kinds: tuple[str, ...]) -> dict[str, Any]:
    """Return the settings of layers with a window, which are apart: in published files under keys with `swa_`."""
    listed = read_mapping(hf, "per_layer_config")
    if listed:
        return {**hf, **read_mapping(listed, str(kinds.index(_SLIDING)))}
    apart = {name: hf.get(f"swa_{name}", default) for name, default in _SLIDING_DEFAULTS.items()}
    apart["qk_rope_head_dim"] = hf.get("swa_qk_rope_head_dim", apart["head_dim"] - apart["qk_nope_head_dim"])
    return {**hf, **apart}


def _read_latent(hf: Mapping[str, Any]) -> LatentSpec:
    if hf["q_lora_rank"] is None:
        raise ValueError("q_lora_rank is None, which is not supported in this architecture")
    return read_latent(hf, norm_eps=read_float(hf, "rms_norm_eps"), grows=True, norms_rotated=True)


def _read_rope(hf: Mapping[str, Any], kind: str) -> RopeConfig:
    """Return the RoPE table of a kind of attention. The rotated part has its own size, and all of it is rotated."""
    parameters, (theta_key, theta) = read_mapping(hf, "rope_parameters"), _THETAS[kind]
    settings = read_mapping(parameters, kind) if set(parameters) & set(_KINDS) else dict(parameters)
    settings = {"rope_theta": read_float(hf, theta_key, theta)} | settings
    read_choice(settings, "rope_type", ("default",), "default")
    return replace(read_rope(hf, settings, rotates_part=True), rotated=1.0, interleaved=True)


_DOTS3 = Family(
    config_from_hf=_dots3_config,
    names=_DOTS3_NAMES,
    is_wrapper=True,
    # The multi-token-prediction layer, which comes last, or has a name of its own.
    leaves_out=("*layers.{after}.*", "*.mtp.*"),
)
FAMILIES = {"Dots3NoteForCausalLM": _DOTS3, "Dots3NoteForConditionalGeneration": _DOTS3}
