"""Each family and RoPE type equals HF in float32, and the absence of each feature would be noticed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.models import LayerLoop, Model, ModelConfig, RopeConfig
from tests.models.dense import dense_attention
from tests.models.running import Runner, build_model, chunk_inputs, empty_pool, load
from tests.models.tiny import CASES, read_goldens, read_tensors

TOLERANCE = 1e-4
NOTICED = 1e-2

Change = Callable[[ModelConfig], ModelConfig]


@cache
def runner(case: str) -> Runner:
    model = build_model(case)
    return Runner(model, load(model, read_tensors(case)))


@pytest.mark.parametrize("case", CASES)
def test_whole_sequences_match_hf(case: str) -> None:
    for golden in read_goldens(case):
        logprobs = runner(case).whole(golden)
        prompt_len = len(golden.prompt)
        np.testing.assert_allclose(logprobs[prompt_len - 1 :], golden.logprobs, rtol=0, atol=TOLERANCE)
        if golden.prompt_logprobs is not None:
            np.testing.assert_allclose(logprobs[:prompt_len], golden.prompt_logprobs, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("chunk", [64, 7])
@pytest.mark.parametrize("case", CASES)
def test_greedy_decoding_matches_hf(case: str, chunk: int) -> None:
    for golden in read_goldens(case):
        logprobs, tokens = runner(case).incremental(golden, chunk)
        np.testing.assert_array_equal(tokens, golden.tokens)
        np.testing.assert_allclose(logprobs, golden.logprobs, rtol=0, atol=TOLERANCE)


def without_windows(cfg: ModelConfig) -> ModelConfig:
    return replace(cfg, layer_windows=(None,) * cfg.num_layers)


def with_longer_windows(cfg: ModelConfig) -> ModelConfig:
    return replace(cfg, layer_windows=tuple(window and window + 1 for window in cfg.layer_windows))


def with_plain_rope(cfg: ModelConfig) -> ModelConfig:
    return replace(cfg, ropes=tuple(RopeConfig(theta=rope.theta) for rope in cfg.ropes))


def without_attention_factor(cfg: ModelConfig) -> ModelConfig:
    return replace(cfg, ropes=tuple(replace(rope, attention_factor=1.0) for rope in cfg.ropes))


def with_one_rope(cfg: ModelConfig) -> ModelConfig:
    assert len(cfg.ropes) == 2
    return replace(cfg, ropes=cfg.ropes[:1], layer_ropes=(0,) * cfg.num_layers)


def without(**fields: object) -> Change:
    def change(cfg: ModelConfig) -> ModelConfig:
        for name, off in fields.items():
            assert getattr(cfg, name) != off, f"{name} is off already"
        return replace(cfg, **fields)

    return change


FEATURES: dict[tuple[str, str], Change] = {
    ("llama2", "untied"): without(tie_word_embeddings=True),
    ("llama_bias", "qkv bias"): without(qkv_bias=False),
    ("llama_bias", "o bias"): without(o_bias=False),
    ("llama_bias", "mlp bias"): without(mlp_bias=False),
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
    ("qwen2", "bias"): without(qkv_bias=False),
    ("qwen3", "qk norm"): without(qk_norm=False),
    ("gemma2", "window"): without_windows,
    ("gemma2", "attention soft cap"): without(attn_soft_cap=None),
    ("gemma2", "final soft cap"): without(final_soft_cap=None),
    ("gemma2", "post norms"): without(post_norms=False),
    ("gemma2", "embed scale"): without(embed_scale=1.0),
    ("gemma2", "norm offset"): without(norm_offset=0.0),
    ("gemma2", "query scalar"): without(scale=16**-0.5),
    ("gemma3", "window"): without_windows,
    ("gemma3", "qk norm"): without(qk_norm=False),
    ("gemma3", "global rope scaling"): with_plain_rope,
    ("gemma3", "local rope"): with_one_rope,
}


@pytest.mark.parametrize(("case", "feature"), FEATURES)
def test_missing_feature_is_noticed(case: str, feature: str) -> None:
    golden = read_goldens(case)[-1]
    model = Model(FEATURES[case, feature](build_model(case).config), jnp.float32)
    logprobs = Runner(model, load(model, read_tensors(case)), dense_attention).whole(golden)
    difference = np.abs(logprobs[len(golden.prompt) - 1 :] - golden.logprobs).max()
    assert difference > NOTICED, f"{case} without {feature} moves log-probabilities by {difference:.1e} only"


@pytest.mark.parametrize("case", ["llama3_tied", "gemma3"])
def test_stand_in_matches_hf(case: str) -> None:
    golden = read_goldens(case)[-1]
    model = build_model(case)
    logprobs = Runner(model, load(model, read_tensors(case)), dense_attention).whole(golden)
    np.testing.assert_allclose(logprobs[len(golden.prompt) - 1 :], golden.logprobs, rtol=0, atol=TOLERANCE)


def test_dynamic_rope_depends_on_the_prompt_length() -> None:
    golden = read_goldens("llama_rope_dynamic")[-1]
    run = runner("llama_rope_dynamic")
    tokens, attention = chunk_inputs(golden.sequence, 0, len(golden.prompt))
    tokens = tokens._replace(rope_lengths_t=tokens.positions_t + 1)
    logprobs, _ = run.step(run.params, empty_pool(run.model.config), tokens, attention)
    last = np.asarray(logprobs)[len(golden.sequence) - 1]
    assert np.abs(last - golden.logprobs[-1]).max() > NOTICED


@pytest.mark.parametrize("loop", [LayerLoop.UNROLL, LayerLoop.SWITCH, LayerLoop.IN_PLACE])
@pytest.mark.parametrize("case", ["llama3_tied", "gemma3"])
def test_other_loops_equal_the_scan(case: str, loop: LayerLoop) -> None:
    golden = read_goldens(case)[-1]
    model = build_model(case, loop=loop)
    params = load(model, read_tensors(case))
    assert isinstance(params["layers"], tuple) is not loop.stacked
    logprobs = Runner(model, params, dense_attention).whole(golden)
    np.testing.assert_allclose(logprobs, runner(case).whole(golden), rtol=0, atol=5e-5)
