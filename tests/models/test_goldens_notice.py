"""Goldens notice the absence of every feature that their case tests.

`scripts/test.sh` runs these when goldens have changed (scripts/guarded.py): each compiles a model of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.models import LayerSpec, Model, ModelConfig, ModelSpecs, RopeConfig
from jaxllm.models.config import Factors
from tests.models.dense import dense_attention
from tests.models.running import Runner, build_model, load
from tests.models.tiny import read_goldens, read_tensors

pytestmark = pytest.mark.goldens_notice

TOLERANCE = 1e-4
NOTICED = 1e-2

Change = Callable[[ModelConfig], ModelConfig]


def without_windows(cfg: ModelConfig) -> ModelConfig:
    return cfg.with_layers(window=None)


def with_longer_windows(cfg: ModelConfig) -> ModelConfig:
    return replace(cfg, layers=tuple(replace(each, window=each.window and each.window + 1) for each in cfg.layers))


def with_longer_chunks(cfg: ModelConfig) -> ModelConfig:
    layers = (replace(each, attention_chunk=each.attention_chunk and 2 * each.attention_chunk) for each in cfg.layers)
    return replace(cfg, layers=tuple(layers))


def with_plain_rope(cfg: ModelConfig) -> ModelConfig:
    return replace(cfg, ropes=tuple(RopeConfig(theta=rope.theta) for rope in cfg.ropes))


def without_attention_factor(cfg: ModelConfig) -> ModelConfig:
    return replace(cfg, ropes=tuple(replace(rope, attention_factor=1.0) for rope in cfg.ropes))


def with_rope(cfg: ModelConfig, **fields: object) -> ModelConfig:
    return replace(cfg, ropes=tuple(replace(rope, **fields) for rope in cfg.ropes))


def with_one_rope(cfg: ModelConfig) -> ModelConfig:
    assert len(cfg.ropes) == 2
    return replace(cfg.with_layers(rope=0), ropes=cfg.ropes[:1])


def without(**fields: object) -> Change:
    def change(cfg: ModelConfig) -> ModelConfig:
        for name, off in fields.items():
            assert getattr(cfg, name) != off, f"{name} is off already"
        return replace(cfg, **fields)

    return change


def layers_without(**fields: object) -> Change:
    def change(cfg: ModelConfig) -> ModelConfig:
        changed = cfg.with_layers(**fields)
        assert changed != cfg, f"{', '.join(fields)} is off already"
        return changed

    return change


def part_without(part: str, **fields: object) -> Change:
    def change(cfg: ModelConfig) -> ModelConfig:
        specs = (getattr(each, part) for each in cfg.layers)
        changed_specs = (spec and replace(spec, **fields) for spec in specs)
        layers = (replace(each, **{part: spec}) for each, spec in zip(cfg.layers, changed_specs, strict=True))
        changed = replace(cfg, layers=tuple(layers))
        assert changed != cfg, f"{', '.join(fields)} is off already"
        return changed

    return change


experts_without = partial(part_without, "moe")
states_without = partial(part_without, "state")
indexers_without = partial(part_without, "indexer")
latents_without = partial(part_without, "latent")


def counted_from_0(layer: LayerSpec) -> LayerSpec:
    return replace(layer, query_scaling=layer.query_scaling and replace(layer.query_scaling, first=0))


FEATURES: dict[tuple[str, str], Change] = {
    ("llama2", "untied"): without(tie_word_embeddings=True),
    ("llama4", "chunks"): layers_without(attention_chunk=None),
    ("llama4", "exact chunks"): with_longer_chunks,
    ("llama4", "query scaling"): layers_without(query_scaling=None),
    ("llama4", "first position is 1"): lambda cfg: replace(cfg, layers=tuple(map(counted_from_0, cfg.layers))),
    ("llama4", "qk norm"): layers_without(qk_unit_norm=None),
    ("llama4", "layers without positions"): layers_without(rope=0),
    ("llama4", "neighbours are pairs"): lambda cfg: with_rope(cfg, interleaved=False),
    ("llama4", "rope"): lambda cfg: with_rope(cfg, rope_type="default"),
    ("llama4", "weights of inputs"): experts_without(scales_inputs=False),
    ("llama4", "sigmoid"): experts_without(sigmoid=False),
    ("llama4", "shared expert"): experts_without(shared_size=None),
    ("llama4_multimodal", "untied"): without(tie_word_embeddings=True),
    ("llama4_multimodal", "no qk norm"): layers_without(qk_unit_norm=1e-5),
    ("llama_bias", "qkv bias"): layers_without(qkv_bias=False),
    ("llama_bias", "o bias"): layers_without(o_bias=False),
    ("llama_bias", "mlp bias"): layers_without(mlp_bias=False),
    ("llama_rope_linear", "rope"): with_plain_rope,
    ("llama_rope_dynamic", "rope"): with_plain_rope,
    ("llama_rope_yarn", "rope"): with_plain_rope,
    ("llama_rope_yarn", "attention factor"): lambda cfg: replace(
        cfg, ropes=(replace(cfg.ropes[0], attention_factor=1.0),)
    ),
    ("llama_rope_llama3", "rope"): with_plain_rope,
    ("mistral", "window"): without_windows,
    ("mistral", "exact window"): with_longer_windows,
    ("mistral3", "untied"): without(tie_word_embeddings=True),
    ("qwen2", "window"): without_windows,
    ("qwen2", "bias"): layers_without(qkv_bias=False),
    ("qwen3", "qk norm"): layers_without(qk_norm=False),
    ("mixtral", "normalized"): experts_without(normalizes=False),
    ("mixtral", "two experts"): experts_without(top_k=1),
    ("qwen2_moe", "not normalized"): experts_without(normalizes=True),
    ("qwen2_moe", "gate of the shared expert"): experts_without(shared_gate=False),
    ("qwen2_moe", "shared expert"): experts_without(shared_size=None, shared_gate=False),
    ("qwen3_moe", "normalized"): experts_without(normalizes=False),
    ("gpt_oss", "sinks"): layers_without(sinks=False),
    ("gpt_oss", "window"): without_windows,
    ("gpt_oss", "bound of the gates"): experts_without(swiglu_limit=100.0),
    ("gpt_oss", "biases of experts"): experts_without(expert_bias=False),
    ("gpt_oss", "bias of the router"): experts_without(router_bias=False),
    ("glm4_moe", "correction"): experts_without(correction_bias=False),
    ("glm4_moe", "groups"): experts_without(num_groups=1, top_groups=1),
    ("glm4_moe", "scale"): experts_without(routed_scale=1.0),
    ("glm4_moe", "sigmoid"): experts_without(sigmoid=False),
    ("glm4_moe", "rotated part"): lambda cfg: with_rope(cfg, rotated=1.0),
    ("glm4_moe", "shared expert"): experts_without(shared_size=None),
    ("deepseek_v2_lite", "factor on scores"): layers_without(scale=32**-0.5),
    ("deepseek_v2_lite", "neighbours are pairs"): lambda cfg: with_rope(cfg, interleaved=False),
    ("deepseek_v2", "groups"): experts_without(num_groups=1, top_groups=1),
    ("deepseek_v2", "best of a group"): experts_without(group_best=2),
    ("deepseek_v2", "scale"): experts_without(routed_scale=1.0),
    ("deepseek_v2", "attention factor"): without_attention_factor,
    ("deepseek_v2", "biases"): layers_without(qkv_bias=False, o_bias=False),
    ("deepseek_v3", "correction"): experts_without(correction_bias=False),
    ("deepseek_v3", "groups"): experts_without(num_groups=1, top_groups=1),
    ("deepseek_v3", "normalized"): experts_without(normalizes=False),
    ("deepseek_v3", "sigmoid"): experts_without(sigmoid=False),
    ("deepseek_v3", "factor on scores"): layers_without(scale=32**-0.5),
    ("kimi_k2", "rope"): with_plain_rope,
    ("kimi_k2", "scale"): experts_without(routed_scale=2.5),
    ("glm4_moe_lite", "halves are pairs"): lambda cfg: with_rope(cfg, interleaved=True),
    ("glm4_moe_lite", "scale"): experts_without(routed_scale=1.0),
    ("mistral4", "softmax"): experts_without(sigmoid=True),
    ("mistral4", "groups"): experts_without(num_groups=1, top_groups=1),
    ("mistral4", "query scaling"): layers_without(query_scaling=None),
    ("minimax_m2", "correction"): experts_without(correction_bias=False),
    ("minimax_m2", "norms over all heads"): layers_without(qk_norm=False),
    ("minimax_m2", "rotated part"): lambda cfg: with_rope(cfg, rotated=1.0),
    ("bamba", "rotated part"): lambda cfg: with_rope(cfg, rotated=1.0),
    ("bamba", "layers without positions"): layers_without(rope=None),
    ("falcon_h1", "scale of scores"): layers_without(scale=16**-0.5),
    ("falcon_h1", "scales of attention"): layers_without(attention_factors=Factors()),
    ("falcon_h1", "scales of states"): layers_without(state_factors=Factors()),
    ("falcon_h1", "scales of the MLP"): layers_without(mlp_factors=Factors()),
    ("falcon_h1", "scales of projections"): states_without(factors=(1.0,) * 5),
    ("falcon_h1", "scale of embeddings"): without(embed_scale=1.0),
    ("falcon_h1", "scale of logits"): without(logits_divisor=1.0),
    ("falcon_h1", "rope"): layers_without(rope=None),
    ("falcon_h1", "attention beside states"): layers_without(attends_too=False),
    ("falcon_h1_norm", "norm"): states_without(has_norm=False),
    ("falcon_h1_norm", "norm before the gate"): states_without(norms_before_gate=False),
    ("falcon_h1_norm", "biases of projections"): states_without(bias=False),
    ("jamba", "norms of projections"): states_without(norm_eps=None, norm_scales=False),
    ("jamba", "scales of norms"): states_without(norm_scales=False),
    ("jamba", "bias of the convolution"): states_without(conv_bias=False),
    ("jamba", "layers without positions"): layers_without(rope=0),
    ("mamba", "bias of the convolution"): states_without(conv_bias=False),
    ("falcon_mamba", "norms of projections"): states_without(norm_eps=None),
    ("falcon_mamba", "biases of projections"): states_without(bias=False),
    ("mamba2", "bias of the convolution"): states_without(conv_bias=False),
    ("mamba2", "norm after the gate"): states_without(norms_before_gate=True),
    ("mamba2", "no limit of time steps"): states_without(dt_limits=(0.0, 0.5)),
    ("mamba2", "untied"): without(tie_word_embeddings=True),
    ("jamba", "not normalized"): experts_without(normalizes=True),
    ("lfm3", "gate of heads"): layers_without(output_gate=False),
    ("lfm3", "post norms"): layers_without(post_norms=False),
    ("lfm3", "window"): without_windows,
    ("lfm3", "proportional rope"): with_plain_rope,
    ("lfm3", "global rope"): with_one_rope,
    ("granite4", "scale of scores"): layers_without(scale=16**-0.5),
    ("granite4", "scale of what is added"): layers_without(residual_scale=1.0),
    ("granite4", "scale of embeddings"): without(embed_scale=1.0),
    ("granite4", "scale of logits"): without(logits_divisor=1.0),
    ("granite4", "shared expert"): experts_without(shared_size=None),
    ("granite4", "layers without positions"): layers_without(rope=0),
    ("granite4", "bias of the convolution"): states_without(conv_bias=False),
    ("granite4", "no limit of time steps"): states_without(dt_limits=(0.0, 0.5)),
    ("granite4_dense", "rope"): layers_without(rope=None),
    ("granite4_dense", "biases of projections"): states_without(bias=False),
    ("granite4_dense", "bias"): layers_without(qkv_bias=False, o_bias=False),
    ("nemotron_h", "biases of projections"): states_without(bias=False),
    ("nemotron_h", "mlp bias"): layers_without(mlp_bias=False),
    ("nemotron_h", "squares"): layers_without(hidden_act="relu"),
    ("nemotron3", "scale"): experts_without(routed_scale=1.0),
    ("nemotron3", "correction"): experts_without(correction_bias=False),
    ("nemotron3", "squares"): layers_without(hidden_act="relu"),
    ("nemotron3", "layers without positions"): layers_without(rope=0),
    ("opt", "untied"): without(tie_word_embeddings=True),
    ("opt", "final norm"): without(final_norm=False),
    ("opt", "qkv bias"): layers_without(qkv_bias=False),
    ("opt", "o bias"): layers_without(o_bias=False),
    ("opt", "mlp bias"): layers_without(mlp_bias=False),
    ("opt", "relu"): layers_without(hidden_act="gelu"),
    ("opt_350m", "norms of the stream"): layers_without(norms_stream=False),
    ("gpt2", "scales of scores"): layers_without(scale=16**-0.5),
    ("gpt2", "tanh"): layers_without(hidden_act="relu"),
    ("ministral3", "query scaling"): layers_without(query_scaling=None),
    ("qwen2_5_vl", "bias"): layers_without(qkv_bias=False),
    ("qwen3_vl", "qk norm"): layers_without(qk_norm=False),
    ("smollm3", "layers without positions"): layers_without(rope=0),
    ("smollm3", "window"): without_windows,
    ("phi3", "long factors"): lambda cfg: with_rope(cfg, long_factors=cfg.ropes[0].short_factors),
    ("phi3", "attention factor"): without_attention_factor,
    ("phi3", "rotated part"): lambda cfg: with_rope(cfg, rope_type="default", rotated=1.0),
    ("phi3", "window"): without_windows,
    ("olmo2", "bias"): layers_without(qkv_bias=False, o_bias=False),
    ("olmo2", "post norms"): layers_without(post_norms=False),
    ("olmo3", "window"): without_windows,
    ("olmo3", "qk norm"): layers_without(qk_norm=False),
    ("olmo3", "scaling on global layers only"): with_one_rope,
    ("olmo3", "attention factor"): without_attention_factor,
    ("gemma2", "window"): without_windows,
    ("gemma2", "attention soft cap"): layers_without(soft_cap=None),
    ("gemma2", "final soft cap"): without(final_soft_cap=None),
    ("gemma2", "post norms"): layers_without(post_norms=False),
    ("gemma2", "embed scale"): without(embed_scale=1.0),
    ("gemma2", "norm offset"): without(norm_offset=0.0),
    ("gemma2", "query scalar"): layers_without(scale=16**-0.5),
    ("gemma3", "window"): without_windows,
    ("gemma3", "qk norm"): layers_without(qk_norm=False),
    ("gemma3", "global rope scaling"): with_plain_rope,
    ("gemma3", "local rope"): with_one_rope,
    ("gemma4_dense", "window"): without_windows,
    ("gemma4_dense", "v norm"): layers_without(v_norm=False),
    ("gemma4_dense", "proportional rope"): with_plain_rope,
    ("gemma4_dense", "local rope"): with_one_rope,
    ("gemma4_dense", "final soft cap"): without(final_soft_cap=None),
    ("gemma4_dense", "embed scale"): without(embed_scale=1.0),
    ("gemma4_moe", "experts"): layers_without(moe=None),
    ("gemma4_e2b", "layer input"): layers_without(input_size=None),
    ("seed_oss", "bias"): layers_without(qkv_bias=False),
    ("gemma", "embed scale"): without(embed_scale=1.0),
    ("gemma", "norm offset"): without(norm_offset=0.0),
    ("gemma", "tanh"): layers_without(hidden_act="silu"),
    ("phi", "side by side"): layers_without(parallel=False),
    ("phi", "norms with means"): without(layer_norms=False),
    ("phi", "biases of norms"): without(norm_bias=False),
    ("phi", "bias of the head"): without(head_bias=False),
    ("phi", "qk norm"): layers_without(qk_norm=False),
    ("phi", "rotated part"): lambda cfg: with_rope(cfg, rotated=1.0),
    ("stablelm", "norms with means"): without(layer_norms=False),
    ("stablelm", "bias"): layers_without(qkv_bias=False),
    ("stablelm", "rotated part"): lambda cfg: with_rope(cfg, rotated=1.0),
    ("stablelm_parallel", "side by side"): layers_without(parallel=False),
    ("gpt_neox", "side by side"): layers_without(parallel=False),
    ("gpt_neox", "two norms"): layers_without(shares_norm=True),
    ("gpt_neox", "biases"): layers_without(qkv_bias=False, o_bias=False),
    ("gpt_neox", "mlp bias"): layers_without(mlp_bias=False),
    ("gpt_neox", "rotated part"): lambda cfg: with_rope(cfg, rotated=1.0),
    ("gpt_neox_sequential", "one after the other"): layers_without(parallel=True),
    ("starcoder2", "window"): without_windows,
    ("starcoder2", "biases"): layers_without(qkv_bias=False, o_bias=False),
    ("starcoder2", "mlp bias"): layers_without(mlp_bias=False),
    ("glm", "neighbours are pairs"): lambda cfg: with_rope(cfg, interleaved=False),
    ("glm4", "post norms"): layers_without(post_norms=False),
    ("glm4", "bias"): layers_without(qkv_bias=False),
    ("glm4", "rotated part"): lambda cfg: with_rope(cfg, rotated=1.0),
    ("glm4", "neighbours are pairs"): lambda cfg: with_rope(cfg, interleaved=False),
    ("exaone4", "window"): without_windows,
    ("exaone4", "layers without positions"): layers_without(rope=0),
    ("exaone4", "qk norm"): layers_without(qk_norm=False),
    ("exaone4", "post norms"): layers_without(post_norms=False),
    ("cohere", "norms of heads"): layers_without(qk_norm=False),
    ("cohere", "scale of logits"): without(logits_divisor=1.0),
    ("cohere", "bias"): layers_without(qkv_bias=False, o_bias=False),
    ("cohere", "side by side"): layers_without(parallel=False),
    ("cohere2", "window"): without_windows,
    ("cohere2", "layers without positions"): layers_without(rope=0),
    ("cohere2", "neighbours are pairs"): lambda cfg: with_rope(cfg, interleaved=False),
    ("apertus", "rope"): with_plain_rope,
    ("apertus", "qk norm"): layers_without(qk_norm=False),
    ("arcee", "squares"): layers_without(hidden_act="relu"),
    ("arcee", "mlp bias"): layers_without(mlp_bias=False),
    ("olmoe", "norms over all heads"): layers_without(qk_norm=False),
    ("olmoe", "not normalized"): experts_without(normalizes=True),
    ("ernie4_5", "neighbours are pairs"): lambda cfg: with_rope(cfg, interleaved=False),
    ("ernie4_5", "biases"): layers_without(qkv_bias=False, o_bias=False),
    ("ernie4_5", "mlp bias"): layers_without(mlp_bias=False),
    ("ernie4_5_moe", "correction"): experts_without(correction_bias=False),
    ("ernie4_5_moe", "normalized"): experts_without(normalizes=False),
    ("ernie4_5_moe", "shared expert"): experts_without(shared_size=None),
    ("internlm3", "biases"): layers_without(qkv_bias=False, o_bias=False),
    ("internlm3", "mlp bias"): layers_without(mlp_bias=False),
    ("hunyuan", "norms after rope"): layers_without(rotated_norm=None),
    ("hunyuan", "rope"): lambda cfg: with_rope(cfg, theta=10_000.0),
    ("hunyuan_moe", "rope"): with_plain_rope,
    ("hunyuan_moe", "normalized"): experts_without(normalizes=False),
    ("hunyuan_moe", "shared expert"): experts_without(shared_size=None),
    ("hunyuan_moe", "bias"): layers_without(qkv_bias=False, o_bias=False),
    ("afmoe", "window"): without_windows,
    ("afmoe", "layers without positions"): layers_without(rope=0),
    ("afmoe", "gate"): layers_without(output_gate=False),
    ("afmoe", "embed scale"): without(embed_scale=1.0),
    ("afmoe", "correction"): experts_without(correction_bias=False),
    ("afmoe", "scale"): experts_without(routed_scale=1.0),
    ("afmoe", "shared expert"): experts_without(shared_size=None),
    ("hy_v3", "qk norm"): layers_without(qk_norm=False),
    ("hy_v3", "biases"): layers_without(qkv_bias=False, o_bias=False),
    ("hy_v3", "correction"): experts_without(correction_bias=False),
    ("hy_v3", "scale"): experts_without(routed_scale=1.0),
    ("hy_v3", "shared expert"): experts_without(shared_size=None),
    ("mimo_v2", "window"): without_windows,
    ("mimo_v2", "exact window"): with_longer_windows,
    ("mimo_v2", "sinks"): layers_without(sinks=False),
    ("mimo_v2", "scale of values"): layers_without(v_scale=1.0),
    ("mimo_v2", "two ropes"): with_one_rope,
    ("mimo_v2", "rotated part"): lambda cfg: with_rope(cfg, rotated=1.0),
    ("mimo_v2", "correction"): experts_without(correction_bias=False),
    ("cohere2_moe", "window"): without_windows,
    ("cohere2_moe", "layers without positions"): layers_without(rope=0),
    ("cohere2_moe", "dense layers with positions"): lambda cfg: replace(
        cfg, layers=tuple(replace(each, rope=each.rope if each.moe else None) for each in cfg.layers)
    ),
    ("cohere2_moe", "normalized"): experts_without(normalizes=False),
    ("cohere2_moe", "average"): experts_without(routed_scale=1.0, shared_scale=1.0),
    ("cohere2_moe", "factor on the shared expert"): experts_without(shared_scale=1.0),
    ("cohere2_moe", "norms with means"): without(layer_norms=False),
    ("north", "norms without means"): without(layer_norms=True),
    ("north", "sigmoid"): experts_without(sigmoid=False),
    ("north", "not normalized"): experts_without(normalizes=True),
    ("step3p5", "window"): without_windows,
    ("step3p5", "gates of heads"): layers_without(output_gate=False, gate_by_head=False),
    ("step3p5", "bounds of experts"): experts_without(act_limit=None),
    ("step3p5", "bounds of the shared expert and MLP"): layers_without(mlp_limit=None),
    ("step3p5", "scaled rope of global layers"): lambda cfg: with_rope(cfg, rope_type="default"),
    ("step3p5", "rotated part"): lambda cfg: with_rope(cfg, rotated=1.0),
    ("step3p5", "correction"): experts_without(correction_bias=False),
    ("step3p5", "scale"): experts_without(routed_scale=1.0),
    ("step3p5", "qk norm"): layers_without(qk_norm=False),
    ("bailing_moe_v2", "qk norm"): layers_without(qk_norm=False),
    ("bailing_moe_v2", "groups"): experts_without(num_groups=1, top_groups=1),
    ("bailing_moe_v2", "correction"): experts_without(correction_bias=False),
    ("bailing_moe_v2", "scale"): experts_without(routed_scale=1.0),
    ("bailing_moe_v2", "rotated part"): lambda cfg: with_rope(cfg, rotated=1.0),
    ("stablelm_12b", "norms of heads"): layers_without(qk_norm=False, qk_norm_by_head=False, qk_norms_apart=False),
    ("stablelm_12b", "side by side"): layers_without(parallel=False),
    ("olmoe_clipped", "bound of queries, keys and values"): layers_without(qkv_limit=None),
    ("bailing_hybrid", "bound of decays"): states_without(least_log_decay=None),
    ("bailing_hybrid", "exact bound"): states_without(least_log_decay=-5.0),
    ("bailing_hybrid", "gates of heads"): layers_without(output_gate=False, gate_by_head=False),
    ("bailing_hybrid", "rope"): layers_without(rope=None),
    ("bailing_hybrid", "neighbours are pairs"): lambda cfg: with_rope(cfg, interleaved=False),
    ("bailing_hybrid", "groups"): experts_without(num_groups=1, top_groups=1),
    ("bailing_hybrid", "correction"): experts_without(correction_bias=False),
    ("bailing_hybrid", "normalized"): experts_without(normalizes=False),
    ("bailing_hybrid", "scale"): experts_without(routed_scale=1.0),
    ("bailing_hybrid", "shared expert"): experts_without(shared_size=None),
    ("deepseek_v32", "choice of tokens"): indexers_without(top_k=60),
    ("deepseek_v32", "neighbours are no pairs in indexers"): indexers_without(interleaved=True),
    ("glm_moe_dsa", "neighbours are pairs in indexers"): indexers_without(interleaved=False),
    ("dots3_note", "windows"): without_windows,
    ("dots3_note", "latents that grow"): latents_without(grows=False),
    ("dots3_note", "gates"): layers_without(output_gate=False),
    ("dots3_note", "choice of tokens"): indexers_without(top_k=60),
    ("dots3_note", "norms of keys"): latents_without(norms_rotated=False),
    ("glm_moe_dsa", "choice of tokens"): indexers_without(top_k=60),
    ("glm_moe_dsa", "number of tokens"): indexers_without(top_k=13),
    ("kimi_linear", "latents without RoPE"): layers_without(rope=0),
    ("kimi_linear", "correction"): experts_without(correction_bias=False),
    ("kimi_linear", "scale"): experts_without(routed_scale=1.0),
    ("kimi_linear", "shared expert"): experts_without(shared_size=None),
    ("granite", "scale of scores"): layers_without(scale=16**-0.5),
    ("granite", "scale of what is added"): layers_without(residual_scale=1.0),
    ("granite", "scale of embeddings"): without(embed_scale=1.0),
    ("granite", "scale of logits"): without(logits_divisor=1.0),
    ("granite", "mlp bias"): layers_without(mlp_bias=False),
    ("granite_moe", "normalized"): experts_without(normalizes=False),
}


# Parameters that are always present: a checkpoint with ones in their place must be noticed.
SCALES = {
    "gemma4_dense": ("layer_scalar",),
    "gemma4_moe": ("router.scale", "router.per_expert_scale"),
    "apertus": ("alpha_p", "alpha_n", "beta"),
    "hunyuan": ("query_layernorm.weight", "key_layernorm.weight"),
}


def run(model: Model, case: str) -> Runner:
    stand_in = None if model.config.layers[0].latent else dense_attention
    return Runner(model, load(model, read_tensors(case)), stand_in)


def difference(runner: Runner, case: str) -> float:
    """Return the largest difference between log-probabilities and those of the case's last golden."""
    golden = read_goldens(case)[-1]
    return np.abs(runner.whole(golden)[len(golden.prompt) - 1 :] - golden.logprobs).max()


@cache
def whole_model(case: str) -> Runner:
    """Return the model with all its features, which agrees with the golden: a wrong one would differ without them."""
    runner = run(build_model(case), case)
    np.testing.assert_allclose(difference(runner, case), 0, atol=TOLERANCE)
    return runner


@pytest.mark.parametrize("case", SCALES)
def test_missing_scale_is_noticed(case: str) -> None:
    tensors, runner = read_tensors(case), whole_model(case)
    complete = runner.params
    for scale in SCALES[case]:
        ones = {name: np.ones_like(held) if name.endswith(scale) else held for name, held in tensors.items()}
        runner.params = load(runner.model, ones)
        moved = difference(runner, case)
        assert moved > NOTICED, f"{case} without {scale} moves log-probabilities by {moved:.1e} only"
    runner.params = complete


@pytest.mark.parametrize(("case", "feature"), FEATURES)
def test_missing_feature_is_noticed(case: str, feature: str) -> None:
    config = whole_model(case).model.config
    moved = difference(run(Model(ModelSpecs(FEATURES[case, feature](config), jnp.float32)), case), case)
    assert moved > NOTICED, f"{case} without {feature} moves log-probabilities by {moved:.1e} only"
