"""Mistral Large 4: DeepSeek V3.2's layers with learned scaling of queries and RoPE, and latents that layers share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from ..config import ModelConfig
from ..family import Family
from ..fields import read_float, read_ints, read_optional_float
from ..names import Fused, TensorName
from ..reading import is_tied_wrapper, read_rotated_layers, read_text_config
from .deepseek import V3_DEFAULTS, read_latent, read_latent_decoder
from .deepseek_v32 import read_indexer
from .glm4_moe import read_experts, read_groups
from .glm_moe_dsa import read_borrowed

_LAYER, _ATTENTION, _INDEXER = "layers.{l}.", "layers.{l}.attention.", "layers.{l}.attention.indexer."
_KV_B = Fused(("up_k", "up_v"), by_head=True)


def _mlp_names(path: str, module: str) -> dict[str, TensorName]:
    parts = ("gate", "w1", "f d -> f d"), ("up", "w3", "f d -> f d"), ("down", "w2", "d f -> d f")
    return {f"{path}.{part}": TensorName(f"{module}.{name}.weight", layout) for part, name, layout in parts}


# Its publisher's names, which HF saves too.
_NAMES = MappingProxyType(
    {
        "embed.table": TensorName("tok_embeddings.weight", "v d -> v d"),
        "final_norm.scale": TensorName("norm.weight", "d -> d"),
        "lm_head.table": TensorName("output.weight", "v d -> v d"),
        "rope_exponents": TensorName("lerope.alpha", "h -> h"),
        "layers.attn_norm.scale": TensorName(_LAYER + "attention_norm.weight", "d -> d"),
        "layers.attn.q": TensorName(_ATTENTION + "wq.weight", "(n h) d -> n h d"),
        "layers.attn.kv_a": TensorName(_ATTENTION + "wkv_a_with_mqa.weight", "h d -> h d"),
        "layers.attn.kv_a_norm.scale": TensorName(_ATTENTION + "kv_a_norm.weight", "l -> l"),
        "layers.attn.up_k": TensorName(_ATTENTION + "wkv_b.weight", "(n h) l -> n l h", _KV_B),
        "layers.attn.up_v": TensorName(_ATTENTION + "wkv_b.weight", "(n h) l -> n h l", _KV_B),
        "layers.attn.scaling.scale": TensorName(_ATTENTION + "ssmax_scaling.s", "n -> n"),
        "layers.attn.scaling.bias": TensorName(_ATTENTION + "ssmax_scaling.b", "n -> n"),
        "layers.attn.o": TensorName(_ATTENTION + "wo.weight", "d c -> d c"),
        "layers.attn.indexer.input_norm.scale": TensorName(_INDEXER + "q_input_norm.weight", "d -> d"),
        "layers.attn.indexer.input_norm.bias": TensorName(_INDEXER + "q_input_norm.bias", "d -> d"),
        "layers.attn.indexer.q": TensorName(_INDEXER + "wq_b.weight", "(n h) d -> n h d"),
        "layers.attn.indexer.k": TensorName(_INDEXER + "wk.weight", "h d -> h d"),
        "layers.attn.indexer.k_norm.scale": TensorName(_INDEXER + "k_norm.weight", "h -> h"),
        "layers.attn.indexer.k_norm.bias": TensorName(_INDEXER + "k_norm.bias", "h -> h"),
        "layers.attn.indexer.weight": TensorName(_INDEXER + "weights_proj.weight", "n d -> n d"),
        "layers.attn.indexer.scaling.scale": TensorName(_INDEXER + "ssmax_scaling.s", "n -> n"),
        "layers.attn.indexer.scaling.bias": TensorName(_INDEXER + "ssmax_scaling.b", "n -> n"),
        "layers.mlp_norm.scale": TensorName(_LAYER + "ffn_norm.weight", "d -> d"),
        **_mlp_names("layers.mlp", _LAYER + "feed_forward"),
        "layers.mlp.router.weight": TensorName(_LAYER + "gate.weight", "e d -> e d"),
        **_mlp_names("layers.mlp.experts", _LAYER + "experts.{e}"),
        **_mlp_names("layers.mlp.shared", _LAYER + "shared_experts"),
    }
)

# HF's values for keys that a config.json leaves out.
DEFAULTS: dict[str, Any] = V3_DEFAULTS | {
    "qk_nope_head_dim": 64,
    "max_position_embeddings": 1_048_576,
    "rms_norm_eps": 1e-5,
    "moe_intermediate_size": 6144,
    "n_routed_experts": 128,
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "final_logit_softcapping": 30.0,
}
_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 2048.0,
    "original_max_position_embeddings": 512,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "attention_factor": 1.0,
}


def _mistral_large4_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the text part of a `mistral_large4` config.json."""
    text = DEFAULTS | dict(read_text_config(hf, "mistral_large4_text")) | {"q_lora_rank": None}
    if not text.get("rope_parameters") and not text.get("rope_scaling"):
        text["rope_parameters"] = _ROPE
    rotates = read_rotated_layers(text)
    rotated = read_latent(text, norm_eps=read_float(text, "rms_norm_eps"))
    # Layers without RoPE have as large heads, and no rotated part.
    plain = replace(rotated, nope_dim=rotated.nope_dim + rotated.rope_dim, rope_dim=0)
    latents = [rotated if each else plain for each in rotates]
    moe = read_experts(text, **read_groups(text), normalizes=True, normalizer_eps=1e-20)
    config = read_latent_decoder(
        text,
        "MistralLarge4ForConditionalGeneration",
        moe,
        log_scaling=True,
        final_soft_cap=read_optional_float(text, "final_logit_softcapping"),
        tie_word_embeddings=is_tied_wrapper(hf, text),
        layers={
            "latent": latents,
            "head_dim": [latent.key_dim for latent in latents],
            "rope": [0 if each else None for each in rotates],
            "indexer": [replace(read_indexer(text, interleaved=True), norms_inputs=True)] * len(rotates),
            "borrows_choice": read_borrowed(text),
            "borrows_kv": _read_sharing(text, rotates),
        },
    )
    return replace(config, ropes=tuple(replace(rope, learned=True) for rope in config.ropes))


def _read_sharing(text: Mapping[str, Any], rotates: Sequence[bool]) -> list[bool]:
    """Return for each layer whether it attends to the latents of an earlier layer, which `kv_source_layers` names."""
    sources = read_ints(text, "kv_source_layers") or tuple(range(len(rotates)))
    if len(sources) != len(rotates):
        raise ValueError(f"kv_source_layers has {len(sources)} numbers, expected one for each of {len(rotates)} layers")
    last: dict[bool, int] = {}
    for layer, (source, has_rope) in enumerate(zip(sources, rotates, strict=True)):
        if source == layer:
            last[has_rope] = layer
        elif source != last.get(has_rope):
            raise ValueError(
                f"kv_source_layers has {source} for layer {layer}, expected the nearest earlier layer with latents of "
                f"its own {'and' if has_rope else 'without'} RoPE, {last.get(has_rope)}"
            )
    return [source != layer for layer, source in enumerate(sources)]


FAMILIES = {
    "MistralLarge4ForConditionalGeneration": Family(
        config_from_hf=_mistral_large4_config,
        names=_NAMES,
        is_wrapper=True,
        leaves_out=("vision_encoder.*", "patch_merger.*", "pre_mm_projector_norm.*", "vision_language_adapter.*"),
    )
}
