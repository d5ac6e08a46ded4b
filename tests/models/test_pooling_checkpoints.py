"""Checkpoints of models that pool are read under all their names, and unsupported ones are refused."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.loading.load import check_names, load_params
from jaxllm.loading.open import open_checkpoint
from jaxllm.models import LayerLoop, Model, ModelConfig, ModelSpecs, get_family, pooling
from jaxllm.models.adapters import AdapterShape
from jaxllm.models.config import HeadLayer, Pooling
from jaxllm.models.mixer_specs import RelativeSpec
from jaxllm.models.rope import frequencies
from tests.models.dense import dense_attention
from tests.models.running import build_model, load
from tests.models.test_model import forward_args
from tests.models.tiny import POOLING_CASES, folder, read_hf_config, read_tensors

pytestmark = pytest.mark.models

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}

DEBERTA = {
    "relative_attention": True,
    "position_biased_input": False,
    "pos_att_type": "p2c|c2p",
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "position_buckets": 32,
}


def read(architecture: str, **hf: Any) -> ModelConfig:
    return get_family(architecture).read_config({**SIZES, **hf})


def assert_loads(model: Model, path: Path) -> None:
    """Check that the loader accepts a folder, and reads the same values as the tests' own reader."""
    checkpoint = open_checkpoint(str(path))
    specs = model.specs.param_specs(checkpoint.tensors)
    check_names(specs, checkpoint, ignored=model.specs.ignored_tensors)
    expected = load(model, {name: np.asarray(checkpoint.read(name)) for name in checkpoint.tensors})
    jax.tree.map(np.testing.assert_array_equal, load_params(specs, checkpoint, progress=False), expected)


@pytest.mark.parametrize("case", POOLING_CASES)
def test_folders_load(case: str) -> None:
    assert_loads(build_model(case), folder(case))


@pytest.mark.parametrize("ids", [[17, 200], [200, 17], [1, 0], [255]])
@pytest.mark.parametrize("case", ["qwen3", "llama2"])
def test_rows_of_an_output_head_load(case: str, ids: list[int]) -> None:
    hf = read_hf_config(case) | {"classifier_from_token": ids, "method": "no_post_processing"}
    family = get_family(hf["architectures"][0])
    model = Model(ModelSpecs(pooling.classification(family.read_config(hf), hf, family), jnp.float32))
    assert_loads(model, folder(case))
    tensors = read_tensors(case)
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    np.testing.assert_array_equal(load(model, tensors)["head"]["dense0"]["weight"], head[ids].astype(np.float32))


def old_norms(name: str) -> str:
    return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")


def old_bert(name: str) -> str:
    return f"bert.{old_norms(name)}"


@pytest.mark.parametrize(
    ("case", "architecture", "rename", "unused"),
    [
        ("bert", "BertForMaskedLM", old_bert, ["cls.predictions.bias", "bert.embeddings.position_ids"]),
        ("bert", "BertForMaskedLM", "bert.{}".format, ["bert.pooler.dense.weight", "cls.seq_relationship.bias"]),
        ("roberta", "XLMRobertaForMaskedLM", "roberta.{}".format, ["lm_head.dense.weight", "lm_head.bias"]),
        ("roberta", "CamembertModel", str, ["embeddings.position_ids"]),
        ("roberta", "XLMRobertaModel", old_norms, ["embeddings.position_ids"]),
        ("deberta", "DebertaV2Model", old_norms, ["mask_predictions.x"]),
        ("modernbert", "ModernBertForMaskedLM", "model.{}".format, ["head.dense.weight", "decoder.bias"]),
        ("gte", "NewForMaskedLM", "new.{}".format, ["new.pooler.dense.weight", "lm_head.decoder.weight"]),
        ("gte", "NewModel", str, ["classifier.weight", "classifier.bias"]),
        ("nomic", "NomicBertForPreTraining", "bert.{}".format, ["bert.pooler.dense.weight", "cls.predictions.bias"]),
        ("deberta", "DebertaV2ForMaskedLM", "deberta.{}".format, ["cls.predictions.bias", "mask_predictions.x"]),
        ("qwen3_embedder", "Qwen3Model", "model.{}".format, ["lm_head.weight"]),
        ("embedding_gemma2", "EmbeddingGemma2Model", "model.{}".format, ["model.vision_tower.patch_embedder.x"]),
    ],
)
def test_other_names_are_read(case: str, architecture: str, rename: Callable[[str], str], unused: list[str]) -> None:
    model = Model(ModelSpecs(get_family(architecture).read_config(read_hf_config(case)), jnp.float32))
    tensors = {rename(name): tensor for name, tensor in read_tensors(case).items() if "pooler" not in name}
    used = {source for spec in model.specs.param_specs(tensors).values() for source in spec.sources}
    assert used == set(tensors)
    ignored = {name for name in (*tensors, *unused) if any(fnmatch(name, each) for each in model.specs.ignored_tensors)}
    assert ignored == set(unused)


def test_a_decoder_converts_under_any_prefix() -> None:
    """Qwen3-Embedding's config.json names the decoder, and its files have no prefix."""
    family, tensors = get_family("Qwen3ForCausalLM"), read_tensors("qwen3_embedder")
    model = Model(ModelSpecs(pooling.embedding(family.read_config(read_hf_config("qwen3_embedder"))), jnp.float32))
    assert {source for spec in model.specs.param_specs(tensors).values() for source in spec.sources} == set(tensors)


@pytest.mark.parametrize("loop", LayerLoop)
@pytest.mark.parametrize("case", ["bert_pairs", "modernbert_classifier", "gte", "nomic", "deberta", "embedding_gemma"])
def test_bfloat16_stays_bfloat16_until_the_outputs(case: str, loop: LayerLoop) -> None:
    model = build_model(case, dtype=jnp.bfloat16, loop=loop)
    args = forward_args(model)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        hidden, _, _ = jax.eval_shape(
            lambda *args: model.forward(*args, attention=[dense_attention] * len(args[1])), *args
        )
        of_texts = jax.eval_shape(model.pool, args[0], hidden, args[3][0])
        of_tokens = jax.eval_shape(model.pool_tokens, args[0], hidden)
    assert model.config.pooling is not None
    size = model.config.pooling.size(model.config.hidden_size)
    assert hidden.dtype == jnp.bfloat16
    assert {of_texts.dtype, of_tokens.dtype} == {jnp.dtype(jnp.float32)}
    assert of_texts.shape == (len(args[3][0].query_ends_s), size)
    assert of_tokens.shape == (hidden.shape[0], size)


def test_defaults_are_hf_s() -> None:
    bert = get_family("BertModel").read_config({})
    assert (bert.num_layers, bert.norm_eps, bert.num_token_types) == (12, 1e-12, 2)
    assert (bert.layers[0].hidden_act, bert.layers[0].causal) == ("gelu", False)
    roberta = get_family("RobertaModel").read_config({"max_position_embeddings": 514})
    assert (roberta.max_position_embeddings, roberta.position_offset) == (512, 2)
    modern = get_family("ModernBertModel").read_config({})
    assert [rope.theta for rope in modern.ropes] == [160_000, 10_000]
    assert [layer.window for layer in modern.layers[:4]] == [None, 65, 65, None]
    assert [layer.norms_attention for layer in modern.layers[:3]] == [False, True, True]
    assert modern.pooling == Pooling(tasks=("embed", "token_embed"), kind="CLS")


def test_modernbert_takes_old_keys() -> None:
    keys = {"global_rope_theta": 3e5, "local_rope_theta": 2e4, "global_attn_every_n_layers": 2}
    config = read("ModernBertModel", **keys)
    assert [rope.theta for rope in config.ropes] == [3e5, 2e4]
    assert [layer.rope for layer in config.layers] == [0, 1, 0, 1]


def test_distances_of_deberta() -> None:
    config = read("DebertaV2Model", **DEBERTA)
    assert {layer.relative for layer in config.layers} == {RelativeSpec(num_buckets=32, max_distance=128)}
    assert config.layers[0].scale == pytest.approx(48**-0.5)
    plain = read("DebertaV2Model", **DEBERTA | {"position_buckets": -1, "max_relative_positions": 50})
    assert plain.layers[0].relative == RelativeSpec(num_buckets=50, max_distance=None)


def test_queries_of_distances_take_no_adapters() -> None:
    """They come from the weights of queries and keys, and all sequences of a step share them."""
    shape = AdapterShape(num_slots=2, rank=4)
    names = {path.partition(".")[2].partition(".")[2] for path in build_model("deberta").adapter_specs(shape)}
    assert names == {"attn.o", "mlp.up", "mlp.down"}
    assert any(path.endswith("attn.qkv") for path in build_model("bert").adapter_specs(shape))


def test_nomic_s_own_keys_are_hf_s() -> None:
    nomic = {"n_embd": 32, "n_inner": 48, "n_layer": 4, "n_head": 2, "n_positions": 512, "layer_norm_epsilon": 1e-6}
    theirs = {"max_position_embeddings": 512, "layer_norm_eps": 1e-6, "hidden_act": "gelu"}
    for base, name in ((2500, "swiglu"), (1000.0, "geglu")):
        keys = {"rotary_emb_base": base, "rotary_emb_fraction": 1.0, "activation_function": name, "vocab_size": 64}
        rope = {"rope_parameters": {"rope_theta": base}, "hidden_act": {"swiglu": "silu", "geglu": "gelu"}[name]}
        assert get_family("NomicBertModel").read_config(nomic | keys) == read("NomicBertModel", **theirs | rope)
    scaled = read("NomicBertModel", n_embd=32, n_positions=8192, rotary_scaling_factor=2, max_trained_positions=1024)
    [rope] = scaled.ropes
    assert (rope.rope_type, rope.factor, rope.max_position_embeddings) == ("dynamic", 2, 1024)
    assert scaled.max_position_embeddings == 8192


@pytest.mark.parametrize("factor", [2.0, 8.0])
def test_gte_s_ntk_scaling(factor: float) -> None:
    """The formula is that of the checkpoints' own code."""
    config = read(
        "NewModel", rope_theta=20_000, rope_scaling={"type": "ntk", "factor": factor}, position_embedding_type="rope"
    )
    exponents = np.arange(0, 16, 2) / 16
    expected = (20_000 * factor) ** -exponents / factor ** (2 / 16)
    np.testing.assert_allclose(frequencies(config.ropes[0], 16), expected, rtol=1e-6)


def test_gemma3_embeds_both_ways() -> None:
    causal, both = read("Gemma3TextModel"), read("Gemma3TextModel", use_bidirectional_attention=True)
    assert causal.pooling is not None
    assert both.pooling is not None
    assert (causal.layers[0].causal, causal.layers[0].window, causal.pooling.kind) == (True, 4096, "LAST")
    assert (both.layers[0].causal, both.layers[0].window, both.pooling.kind) == (False, 2049, "MEAN")


@pytest.mark.parametrize(
    ("hf", "expected"), [({}, 2), ({"id2label": {"0": "a", "1": "b", "2": "c"}}, 3), ({"num_labels": 4}, 4)]
)
@pytest.mark.parametrize(
    "architecture",
    ["BertForSequenceClassification", "RobertaForTokenClassification", "LlamaForSequenceClassification"],
)
def test_number_of_labels(architecture: str, hf: dict[str, Any], expected: int) -> None:
    config = read(architecture, **hf)
    assert config.pooling is not None
    assert config.pooling.size(config.hidden_size) == expected


def test_reward_models_score_tokens() -> None:
    for architecture, size in (("Qwen2ForRewardModel", 1), ("Qwen2ForProcessRewardModel", 2)):
        config = read(architecture)
        assert config.pooling == Pooling(
            tasks=("token_classify",),
            kind="LAST",
            head=(HeadLayer(source="score.0", size=32, act="relu"), HeadLayer(source="score.2", size=size)),
        )
        sources = {source for spec in ModelSpecs(config, jnp.float32).param_specs().values() for source in spec.sources}
        assert {"score.0.weight", "score.0.bias", "score.2.weight", "score.2.bias"} <= sources
        assert "lm_head.weight" not in sources


@pytest.mark.parametrize(
    ("architecture", "hf", "message"),
    [
        ("BertModel", {"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        ("BertModel", {"is_decoder": True}, "is_decoder is True"),
        ("XLMRobertaModel", {"add_cross_attention": True}, "add_cross_attention is True"),
        ("BertModel", {"hidden_act": "mish"}, "hidden_act is 'mish'"),
        ("BertModel", {"type_vocab_size": 0}, "type_vocab_size is 0"),
        ("BertModel", {"hidden_size": 33}, "33 is not a multiple of 2 heads"),
        ("RobertaModel", {"max_position_embeddings": 2}, "max_position_embeddings is 2"),
        ("NomicBertModel", {"n_embd": 32, "moe_every_n_layers": 2}, "moe_every_n_layers is 2: experts without gates"),
        ("NomicBertModel", {"n_embd": 32, "qkv_proj_bias": True}, "qkv_proj_bias is True"),
        ("NomicBertModel", {"n_embd": 32, "prenorm": True}, "prenorm is True"),
        ("NomicBertModel", {"n_embd": 32, "activation_function": "gelu"}, "activation_function is 'gelu'"),
        ("NomicBertModel", {"n_embd": 32, "rotary_emb_fraction": 0}, "partial_rotary_factor is 0"),
        ("DebertaV2Model", DEBERTA | {"conv_kernel_size": 3}, "conv_kernel_size is 3: .* deberta-v2-xlarge"),
        ("DebertaV2Model", DEBERTA | {"relative_attention": False}, "relative_attention is False"),
        ("DebertaV2Model", DEBERTA | {"position_biased_input": True}, "position_biased_input is True"),
        ("DebertaV2Model", DEBERTA | {"pos_att_type": "p2c"}, r"pos_att_type is \['p2c'\]"),
        ("DebertaV2Model", DEBERTA | {"share_att_key": False}, "share_att_key is False"),
        ("DebertaV2Model", DEBERTA | {"norm_rel_ebd": "none"}, "norm_rel_ebd is 'none'"),
        ("DebertaV2Model", DEBERTA | {"embedding_size": 16}, "embedding_size is 16"),
        ("DebertaV2Model", DEBERTA | {"position_buckets": 128}, "position_buckets is 128, .* less than 128 positions"),
        ("JinaEmbeddingsV3Model", {"position_embedding_type": "absolute"}, "position_embedding_type is 'absolute'"),
        (
            "XLMRobertaForTokenClassification",
            {"position_embedding_type": "rotary"},
            "position_embedding_type is 'rotary'",
        ),
        ("NewModel", {"position_embedding_type": "absolute"}, "position_embedding_type is 'absolute'"),
        ("NewModel", {"layer_norm_type": "rms_norm"}, "layer_norm_type is 'rms_norm'"),
        ("NewModel", {"logn_attention_scale": True}, "logn_attention_scale is True"),
        ("GteNewModel", {"pack_qkv": False}, "pack_qkv is False"),
        ("NewModel", {"rope_scaling": {"type": "ntk", "factor": 8.0, "mixed_b": 0.7}}, "mixed_b is 0.7"),
        ("ModernBertModel", {"rope_scaling": {"factor": 2}}, "rope_scaling is"),
        ("ModernBertModel", {"hidden_activation": "tanh"}, "hidden_activation is 'tanh'"),
        ("ModernBertForSequenceClassification", {"classifier_pooling": "max"}, "classifier_pooling is 'max'"),
        ("ModernBertForTokenClassification", {"classifier_activation": "elu"}, "classifier_activation is 'elu'"),
        ("BertForTokenClassification", {"num_labels": 3, "id2label": {"0": "a"}}, "num_labels is 3, but id2label"),
        ("LlamaForSequenceClassification", {"id2label": [1]}, r"id2label is \[1\], expected an object"),
        ("Qwen3ForSequenceClassification", {"classifier_from_token": ["no", "yes"]}, "classifier_from_token is"),
        ("Qwen3ForSequenceClassification", {"classifier_from_token": [3]}, r"classifier_from_token is \[3\]"),
        ("Qwen3ForSequenceClassification", {"classifier_from_token": [3, 64]}, "classifier_from_token is"),
        (
            "Qwen3ForSequenceClassification",
            {"classifier_from_token": [3, 4], "method": "sum"},
            "method is 'sum', which is not supported",
        ),
        ("OPTModel", {"ffn_dim": 8, "word_embed_proj_dim": 16}, "word_embed_proj_dim is 16"),
    ],
)
def test_what_is_not_supported_is_refused(architecture: str, hf: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(architecture, **hf)


def test_heads_refuse_activations_they_do_not_have() -> None:
    with pytest.raises(ValueError, match="activation 'elu' of a head is not supported"):
        HeadLayer(source="dense", size=1, act="elu")
