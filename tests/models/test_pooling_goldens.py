"""Models that pool equal HF in float32, texts of different lengths in one step; and goldens notice every feature."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatch
from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.models import LayerLoop, Model, ModelConfig, ModelSpecs, get_family
from jaxllm.models.mixer_specs import RelativeSpec
from tests.models.pooled import Outputs, PooledGolden, read_pooled_goldens, run_pooled
from tests.models.running import build_model, load
from tests.models.tiny import CASES, POOLING_CASES, read_goldens, read_hf_config, read_tensors

TOLERANCE = 1e-4
NOTICED = 1e-2

Change = Callable[[ModelConfig], ModelConfig]


@cache
def params_of(case: str) -> dict[str, Any]:
    return load(build_model(case), read_tensors(case))


def with_kind(model: Model, kind: str) -> Model:
    assert model.config.pooling is not None
    return Model(ModelSpecs(replace(model.config, pooling=replace(model.config.pooling, kind=kind)), jnp.float32))


def stands_for(states_td: np.ndarray, kind: str) -> np.ndarray:
    """Return the state [d] that represents a text."""
    return {"CLS": states_td[0], "LAST": states_td[-1], "MEAN": states_td.mean(0)}[kind]


def output_of(model: Model, outputs: Outputs, index: int) -> np.ndarray:
    """Return the same output for a text as HF's golden has."""
    assert model.config.pooling is not None
    tasks = model.config.pooling.tasks
    return (outputs.of_texts if "classify" in tasks else outputs.of_tokens)[index]


@pytest.mark.models
@pytest.mark.parametrize("case", POOLING_CASES)
def test_outputs_match_hf(case: str) -> None:
    model, goldens = build_model(case), read_pooled_goldens(case)
    outputs = run_pooled(model, params_of(case), goldens)
    for index, golden in enumerate(goldens):
        output = output_of(model, outputs, index)
        assert output.dtype == np.float32
        np.testing.assert_allclose(output, golden.output, rtol=0, atol=TOLERANCE)


@pytest.mark.models
@pytest.mark.parametrize("kind", ["CLS", "LAST", "MEAN"])
@pytest.mark.parametrize("case", ["bert", "embedding_gemma", "qwen3_embedder"])
def test_what_stands_for_a_text(case: str, kind: str) -> None:
    goldens = read_pooled_goldens(case)
    outputs = run_pooled(with_kind(build_model(case), kind), params_of(case), goldens)
    for output, golden in zip(outputs.of_texts, goldens, strict=True):
        np.testing.assert_allclose(output, stands_for(golden.output, kind), rtol=0, atol=TOLERANCE)


@pytest.mark.models
@pytest.mark.parametrize("loop", [LayerLoop.UNROLL, LayerLoop.SWITCH, LayerLoop.IN_PLACE])
@pytest.mark.parametrize("case", ["bert_pairs", "modernbert_classifier", "deberta_pairs", "gte_pairs"])
def test_all_loops_match_hf(case: str, loop: LayerLoop) -> None:
    model, goldens = build_model(case, loop=loop), read_pooled_goldens(case)
    outputs = run_pooled(model, load(model, read_tensors(case)), goldens)
    for output, golden in zip(outputs.of_texts, goldens, strict=True):
        np.testing.assert_allclose(output, golden.output, rtol=0, atol=TOLERANCE)


@pytest.mark.models
@pytest.mark.parametrize("ids", [(17, 200), (200, 17), (3, 2)])
@pytest.mark.parametrize("method", ["from_2_way_softmax", "no_post_processing"])
@pytest.mark.parametrize("case", ["qwen3", "llama2"])
def test_scores_are_logits_of_tokens(case: str, method: str, ids: tuple[int, int]) -> None:
    """In one case the embedding is also the output head, in the other it is not."""
    hf = read_hf_config(case) | {"classifier_from_token": list(ids), "method": method}
    architecture = hf["architectures"][0].replace("CausalLM", "SequenceClassification")
    model, tensors = Model(ModelSpecs(get_family(architecture).read_config(hf), jnp.float32)), read_tensors(case)
    golden = read_goldens(case)[0]
    text = PooledGolden(golden.prompt, 0 * golden.prompt, golden.logprobs[0])
    [scores] = run_pooled(model, load(model, tensors), [text]).of_texts
    first, second = golden.logprobs[0][list(ids)]
    if method == "from_2_way_softmax":
        np.testing.assert_allclose(scores, [second - first], rtol=0, atol=TOLERANCE)
    else:
        np.testing.assert_allclose(scores[1] - scores[0], second - first, rtol=0, atol=TOLERANCE)


@pytest.mark.models
def test_jina_s_checkpoints_with_adapters_are_read_without() -> None:
    hf = read_hf_config("jina_v3") | {"position_embedding_type": "rotary", "rotary_emb_base": 20_000.0}
    theta = hf.pop("rope_parameters")["rope_theta"]
    assert theta == 20_000.0
    stored = {}
    for name, tensor in read_tensors("jina_v3").items():
        end = ".parametrizations.weight.original" if tensor.ndim > 1 and name.endswith(".weight") else ""
        stored[f"roberta.{name.removesuffix('.weight') + end if end else name}"] = tensor
    config = get_family("XLMRobertaModel").read_config(hf, stored)
    assert config == build_model("jina_v3").config
    model, goldens = Model(ModelSpecs(config, jnp.float32)), read_pooled_goldens("jina_v3")
    outputs = run_pooled(model, load(model, stored), goldens)
    for output, golden in zip(outputs.of_tokens, goldens, strict=True):
        np.testing.assert_allclose(output, golden.output, rtol=0, atol=TOLERANCE)
    adapters = "roberta.encoder.layers.1.mixer.Wqkv.parametrizations.weight.0.lora_A"
    assert any(fnmatch(adapters, pattern) for pattern in model.specs.ignored_tensors)


@pytest.mark.models
def test_jina_s_reranker_is_an_xlm_roberta_by_other_names() -> None:
    renamed = (
        ("encoder.layer.", "encoder.layers."),
        ("embeddings.LayerNorm", "emb_ln"),
        ("attention.output.dense", "mixer.out_proj"),
        ("attention.output.LayerNorm", "norm1"),
        ("intermediate.dense", "mlp.fc1"),
        ("output.dense", "mlp.fc2"),
        ("output.LayerNorm", "norm2"),
    )
    stored: dict[str, np.ndarray] = {}
    tensors = read_tensors("xlm_roberta_classifier")
    for name, tensor in tensors.items():
        if match := re.fullmatch(r"(.*)attention\.self\.query\.(.*)", name):
            parts = [tensors[f"{match[1]}attention.self.{part}.{match[2]}"] for part in ("query", "key", "value")]
            name, tensor = f"{match[1]}mixer.Wqkv.{match[2]}", np.concatenate(parts)
        for theirs, jinas in renamed:
            name = name.replace(theirs, jinas)
        if "attention.self" not in name:
            stored[name] = tensor
    model, goldens = build_model("xlm_roberta_classifier"), read_pooled_goldens("xlm_roberta_classifier")
    outputs = run_pooled(model, load(model, stored), goldens)
    for output, golden in zip(outputs.of_texts, goldens, strict=True):
        np.testing.assert_allclose(output, golden.output, rtol=0, atol=TOLERANCE)


def layers_without(**fields: object) -> Change:
    return lambda cfg: cfg.with_layers(**fields)


def without(**fields: object) -> Change:
    return lambda cfg: replace(cfg, **fields)


def with_windows(change: int) -> Change:
    def widen(cfg: ModelConfig) -> ModelConfig:
        layers = (replace(each, window=each.window and each.window + change) for each in cfg.layers)
        return replace(cfg, layers=tuple(layers))

    return widen


def with_one_rope(cfg: ModelConfig) -> ModelConfig:
    assert len(cfg.ropes) == 2
    return replace(cfg.with_layers(rope=0), ropes=cfg.ropes[:1])


def with_head(**fields: object) -> Change:
    """Return a function that changes fields of the head's first layer."""

    def change(cfg: ModelConfig) -> ModelConfig:
        assert cfg.pooling is not None
        first, *others = cfg.pooling.head
        return replace(cfg, pooling=replace(cfg.pooling, head=(replace(first, **fields), *others)))

    return change


def with_pooling(**fields: Any) -> Change:
    return lambda cfg: replace(cfg, pooling=cfg.pooling and replace(cfg.pooling, **fields))


FEATURES: dict[tuple[str, str], Change] = {
    ("bert", "norms of the stream"): layers_without(norms_stream=False),
    ("bert", "attention to what follows"): layers_without(causal=True),
    ("bert", "token types"): without(num_token_types=0),
    ("bert", "biases"): layers_without(qkv_bias=False),
    ("bert", "exact gelu"): layers_without(hidden_act="relu"),
    ("bert_tokens", "relu"): layers_without(hidden_act="gelu"),
    ("bert_pairs", "activation of the head"): with_head(act=None),
    ("roberta", "offset of positions"): without(position_offset=3, max_position_embeddings=61),
    ("xlm_roberta_classifier", "attention to what follows"): layers_without(causal=True),
    ("xlm_roberta_classifier", "activation of the head"): with_head(act=None),
    ("xlm_roberta_classifier", "first token"): with_pooling(kind="LAST"),
    ("modernbert", "window"): layers_without(window=None),
    ("modernbert", "window is no longer"): with_windows(1),
    ("modernbert", "window is no shorter"): with_windows(-1),
    ("modernbert", "attention to what follows"): layers_without(causal=True),
    ("modernbert", "local rope"): with_one_rope,
    ("modernbert", "final norm"): without(final_norm=False),
    ("modernbert_classifier", "biases of norms"): without(norm_bias=False),
    ("modernbert_classifier", "biases of attention"): layers_without(qkv_bias=False),
    ("modernbert_classifier", "biases of the mlp"): layers_without(mlp_bias=False),
    ("modernbert_classifier", "mean"): with_pooling(kind="CLS"),
    ("modernbert_classifier", "bias of the head"): with_head(bias=False),
    ("modernbert_tokens", "norm of the head"): with_head(norm=None),
    ("modernbert_tokens", "activation of the head"): with_head(act="relu"),
    ("nomic", "norms of the stream"): layers_without(norms_stream=False),
    ("nomic", "attention to what follows"): layers_without(causal=True),
    ("nomic", "gate"): layers_without(hidden_act="gelu"),
    ("nomic", "rope"): layers_without(rope=None),
    ("nomic_classifier", "token types"): without(num_token_types=0),
    ("nomic_classifier", "activation of the head"): with_head(act=None),
    ("gte", "biases of attention"): layers_without(qkv_bias=False),
    ("gte", "bias of the mlp"): layers_without(mlp_bias=False),
    ("gte", "rope"): layers_without(rope=None),
    ("gte_pairs", "token types"): without(num_token_types=0),
    ("gte_pairs", "attention to what follows"): layers_without(causal=True),
    ("jina_v3", "biases"): layers_without(o_bias=False),
    ("jina_v3", "rope"): layers_without(rope=None),
    ("jina_v3_classifier", "token types"): without(num_token_types=0),
    ("jina_v3_classifier", "activation of the head"): with_head(act=None),
    ("deberta", "a row for each distance"): layers_without(relative=RelativeSpec(num_buckets=64, max_distance=63)),
    ("deberta_pairs", "rows of far distances"): layers_without(relative=RelativeSpec(num_buckets=8, max_distance=None)),
    ("deberta_pairs", "token types"): without(num_token_types=0),
    ("deberta_pairs", "activation of the head"): with_head(act="tanh"),
    ("deberta_tokens", "scale of three products"): layers_without(scale=0.25),
    ("deberta_tokens", "biases"): layers_without(qkv_bias=False),
    ("embedding_gemma", "attention to what follows"): layers_without(causal=True),
    ("embedding_gemma", "window"): layers_without(window=None),
    ("embedding_gemma", "window is no longer"): with_windows(1),
    ("embedding_gemma2", "attention to what follows"): layers_without(causal=True),
    ("embedding_gemma2", "window"): layers_without(window=None),
    ("embedding_gemma2", "window is no shorter"): with_windows(-1),
    ("embedding_gemma2", "window is no longer"): with_windows(1),
    ("embedding_gemma2", "norm of values"): layers_without(v_norm=False),
    ("qwen3_embedder", "final norm"): without(norm_offset=1.0),
    ("llama_classifier", "last token"): with_pooling(kind="CLS"),
    ("llama_tokens", "bias"): with_head(bias=False),
}


@pytest.mark.goldens_notice
@pytest.mark.parametrize(("case", "feature"), FEATURES)
def test_missing_feature_is_noticed(case: str, feature: str) -> None:
    golden, config = read_pooled_goldens(case)[-1], build_model(case).config
    changed = FEATURES[case, feature](config)
    assert changed != config, f"{feature} is off already"
    model = Model(ModelSpecs(changed, jnp.float32))
    output = output_of(model, run_pooled(model, load(model, read_tensors(case)), [golden]), 0)
    difference = np.abs(output - golden.output).max()
    assert difference > NOTICED, f"{case} without {feature} moves outputs by {difference:.1e} only"


def test_tables_of_cases_name_cases() -> None:
    assert {case for case, _ in FEATURES} <= set(POOLING_CASES)
    assert not set(CASES) & set(POOLING_CASES), "a name would stand for two folders"
