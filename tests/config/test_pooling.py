"""Runner, convert, pooler_config and the checkpoint's files settle what an engine does, and how outputs are made."""

from __future__ import annotations

import argparse
import json
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from jaxllm.config import PoolerConfig
from jaxllm.engine.transport.engine_ready import EngineReady
from jaxllm.exceptions import VLLMValidationError
from jaxllm.loading.names import check_names
from jaxllm.models import Model, ModelSpecs
from jaxllm.models.config import HeadLayer, Pooling
from jaxllm.resolve.engine_args import EngineArgs
from jaxllm.resolve.engine_config import EngineConfig
from jaxllm.resolve.pooling_settings import PoolingSettings
from jaxllm.resolve.vllm_config import vllm_config
from tests.config.test_engine_config import LLAMA
from tests.engine.support import byte_level, make_ready
from tests.loading.sentence_files import MINILM, modules, write_dense, write_json_files
from tests.models.tiny import folder, read_hf_config

BERT = read_hf_config("bert") | {"max_position_embeddings": 512, "dtype": "float32"}
QWEN3 = read_hf_config("qwen3_embedder") | {"architectures": ["Qwen3ForCausalLM"]}
CLASSIFIER = read_hf_config("llama_classifier")
POOLING_MODE = {"embedding_dimension": 32, "pooling_mode": "lasttoken", "include_prompt": True}


def resolve(path: Path, hf: Mapping[str, Any], files: Mapping[str, Any] | None = None, **fields: Any) -> EngineConfig:
    """Write a model with these files beside its config.json, and settle an engine for it, with random weights."""
    write_json_files(path, {"config.json": hf, **(files or {})})
    return EngineArgs(model=str(path), load_format="dummy", **fields).create_engine_config()


def pooling_of(config: EngineConfig) -> tuple[PoolingSettings, Pooling]:
    assert config.pooling is not None
    assert config.model_config.pooling is not None
    return config.pooling, config.model_config.pooling


def refused(path: Path, hf: Mapping[str, Any], files: Mapping[str, Any] | None = None, **fields: Any) -> str:
    """Return the error of an engine that there cannot be, in the form "parameter: message"."""
    with pytest.raises(VLLMValidationError) as caught:
        resolve(path, hf, files, **fields)
    return f"{caught.value.parameter}: {caught.value}"


def test_an_embedder_of_sentence_transformers(tmp_path: Path):
    config = resolve(tmp_path, BERT, MINILM, served_model_name="minilm")
    settings, pooling = pooling_of(config)
    assert pooling == Pooling(tasks=("embed", "token_embed"), kind="MEAN")
    assert settings == PoolingSettings(
        model="minilm",
        tasks=("embed", "token_embed"),
        activation="normalize",
        use_activation=True,
        dimensions=None,
        step_tag_id=None,
        returned_token_ids=None,
        is_step=False,
        logit_mean=0.0,
        logit_sigma=1.0,
        has_linear_head=True,
        output_size=32,
        num_labels=None,
        id2label={},
        is_matryoshka=False,
        matryoshka_dimensions=None,
        prompts={},
        default_prompt_name=None,
        similarity="cosine",
        score_type="bi-encoder",
        has_token_types=True,
        runs_whole_tasks=("embed", "token_embed"),
        lowercases=False,
    )
    assert (config.runner_type, config.convert_type) == ("pooling", "none")
    assert config.pooler_config == PoolerConfig(seq_pooling_type="MEAN", tok_pooling_type="ALL", use_activation=True)
    assert (config.max_model_len, config.max_model_len_can_shrink) == (256, True)
    assert (config.max_num_batched_tokens, config.enable_prefix_caching, config.enable_chunked_prefill) == (
        *(512, False),
        False,
    )


def test_an_embedder_alone(tmp_path: Path):
    settings, pooling = pooling_of(resolve(tmp_path, BERT))
    assert (pooling.kind, settings.use_activation) == ("CLS", True)


def test_without_a_normalize_module_embeddings_are_as_they_are(tmp_path: Path):
    files = {**MINILM, "modules.json": MINILM["modules.json"][:2]}
    assert pooling_of(resolve(tmp_path, BERT, files))[0].use_activation is False
    assert pooling_of(resolve(tmp_path, BERT, files, pooler_config={"use_activation": True}))[0].use_activation


def test_a_decoder_in_a_folder_of_sentence_transformers(tmp_path: Path):
    """Qwen3-Embedding is of a class that generates."""
    prompts = {"query": "Instruct: find\nQuery:", "document": ""}
    files = {
        "modules.json": modules("Transformer", "Pooling", "Normalize"),
        "1_Pooling/config.json": POOLING_MODE,
        "config_sentence_transformers.json": {"prompts": prompts, "similarity_fn_name": "dot"},
    }
    config = resolve(tmp_path, QWEN3, files)
    settings, pooling = pooling_of(config)
    assert (config.runner_type, config.convert_type, pooling.kind) == ("pooling", "embed", "LAST")
    assert (settings.prompts, settings.similarity, settings.runs_whole_tasks) == (prompts, "dot", ())
    assert (config.enable_prefix_caching, config.enable_chunked_prefill, config.max_model_len) == (True, True, 256)
    both = resolve(tmp_path, QWEN3, files, runner="generate", convert="embed")
    assert pooling_of(both)[0].prompts == prompts
    alone = resolve(tmp_path, QWEN3, files, runner="generate")
    assert (alone.pooling, alone.model_config.pooling, alone.pooler_config) == (None, None, None)


@pytest.mark.parametrize(
    ("arguments", "runner", "convert", "tasks"),
    [
        ({}, "generate", "none", ()),
        ({"convert": "none"}, "generate", "none", ()),
        ({"runner": "generate"}, "generate", "none", ()),
        ({"runner": "pooling"}, "pooling", "embed", ("embed", "token_embed")),
        ({"convert": "embed"}, "pooling", "embed", ("embed", "token_embed")),
        ({"convert": "classify"}, "pooling", "classify", ("classify", "token_classify")),
        ({"runner": "pooling", "convert": "classify"}, "pooling", "classify", ("classify", "token_classify")),
        ({"runner": "generate", "convert": "embed"}, "generate", "embed", ("embed", "token_embed")),
        ({"convert": "embed", "pooler_config": {"task": "embed"}}, "pooling", "embed", ("embed",)),
    ],
)
def test_what_a_decoder_does(
    tmp_path: Path, arguments: dict[str, Any], runner: str, convert: str, tasks: tuple[str, ...]
):
    config = resolve(tmp_path, LLAMA | {"tie_word_embeddings": False}, **arguments)
    assert (config.runner_type, config.convert_type) == (runner, convert)
    assert (config.pooling.tasks if config.pooling else ()) == tasks
    # Only an engine that generates loads an output head.
    assert config.model_config.tie_word_embeddings is (runner == "pooling")


def test_engines_that_there_cannot_be(tmp_path: Path):
    assert refused(tmp_path, BERT, runner="generate") == (
        "runner: Embedding models do not support `--runner generate`. Use `--runner pooling` or `--runner auto` for "
        "embedding models."
    )
    assert refused(tmp_path, LLAMA, runner="pooling", convert="none").startswith(
        "convert: This model does not support `--runner pooling`. You can pass `--convert <embed|classify> to adapt it"
    )
    assert "BertModel has embed, token_embed" in refused(tmp_path, BERT, convert="classify")
    assert "has classify, token_classify" in refused(tmp_path, CLASSIFIER, convert="embed")
    assert refused(tmp_path, LLAMA, pooler_config={"pooling_type": "MEAN"}).startswith(
        "pooler_config: pooler_config is"
    )
    assert refused(tmp_path, BERT, kv_cache_dtype="fp8").startswith("kv_cache_dtype: kv_cache_dtype='fp8' is for")
    assert refused(tmp_path, BERT, pooler_config={"task": "classify"}) == (
        "pooler_config: Unsupported task: 'classify' Supported tasks: ('embed', 'token_embed')"
    )
    opt = read_hf_config("opt_350m")
    assert refused(tmp_path, opt, convert="embed").startswith("convert: convert='embed': word_embed_proj_dim is")


def test_modes_of_pooling(tmp_path: Path):
    files = {**MINILM, "1_Pooling/config.json": {"pooling_mode": "weightedmean"}}
    assert "has the mode 'weightedmean', which is not supported; pooler_config=" in refused(tmp_path, BERT, files)
    config = resolve(tmp_path, BERT, files, pooler_config={"pooling_type": "LAST"})
    assert pooling_of(config)[1].kind == "LAST"
    # What modules say is nothing to an engine that generates.
    lstm = {"modules.json": modules("Transformer", "Pooling", "LSTM")}
    assert resolve(tmp_path, LLAMA, lstm, runner="generate").pooling is None
    assert "'LSTM', which is not supported" in refused(tmp_path, LLAMA, lstm)


def test_dense_layers_end_the_head(tmp_path: Path):
    path = Path(shutil.copytree(folder("qwen3_embedder"), tmp_path / "model"))
    files = {"modules.json": modules("Transformer", "Pooling", "Dense", "Dense")}
    write_json_files(path, {**files, "1_Pooling/config.json": POOLING_MODE})
    write_dense(path, "2_Dense", 32, 48, activation_function="torch.nn.modules.activation.Tanh")
    write_dense(path, "3_Dense", 48, 24)
    config = EngineArgs(model=str(path)).create_engine_config()
    settings, pooling = pooling_of(config)
    first = HeadLayer(source="2_Dense/linear", size=48, bias=False, act="tanh")
    assert pooling.head == (first, HeadLayer(source="3_Dense/linear", size=24, bias=False))
    assert (settings.output_size, settings.use_activation) == (24, False)
    model = Model(ModelSpecs(config.model_config, "float32"))
    check_names(
        model.specs.param_specs(config.checkpoint.tensors), config.checkpoint, ignored=model.specs.ignored_tensors
    )
    write_dense(path, "3_Dense", 40, 24)
    with pytest.raises(VLLMValidationError, match=r"3_Dense/config\.json: in_features is 40, expected 48"):
        EngineArgs(model=str(path)).create_engine_config()


def test_classes(tmp_path: Path):
    hf = CLASSIFIER | {"id2label": {"0": "bad", "1": "good", "2": "best"}}
    config = resolve(tmp_path, hf, pooler_config={"logit_mean": 1, "logit_scale": 0.5})
    settings, pooling = pooling_of(config)
    assert (settings.num_labels, settings.id2label, settings.activation) == (3, hf["id2label"], "softmax")
    assert (settings.logit_mean, settings.logit_sigma, settings.score_type) == (1.0, 2.0, None)
    assert (pooling.kind, settings.use_activation) == ("LAST", True)
    converted = pooling_of(resolve(tmp_path, LLAMA | {"num_labels": 1}, convert="classify"))[0]
    assert (converted.num_labels, converted.id2label, converted.score_type) == (1, {"0": "LABEL_0"}, "cross-encoder")


@pytest.mark.parametrize(
    ("num_labels", "hf", "activation"),
    [
        (1, {}, "sigmoid"),
        (2, {}, "softmax"),
        (2, {"problem_type": "regression"}, "none"),
        (2, {"problem_type": "single_label_classification"}, "softmax"),
        (2, {"problem_type": "multi_label_classification"}, "sigmoid"),
        (1, {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, "none"),
        (1, {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}, "sigmoid"),
        (2, {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}, "sigmoid"),
        (2, {"sentence_transformers": {"version": "5"}}, "softmax"),
    ],
)
def test_what_makes_scores_of_classes(tmp_path: Path, num_labels: int, hf: dict[str, Any], activation: str):
    config = resolve(tmp_path, LLAMA | {"num_labels": num_labels} | hf, convert="classify")
    assert pooling_of(config)[0].activation == activation


def test_scores_of_a_cross_encoder(tmp_path: Path):
    """Newer versions of sentence-transformers keep the activation beside config.json."""
    settings = {"activation_fn": "torch.nn.modules.linear.Identity", "model_type": "CrossEncoder"}
    files = {"modules.json": modules("Transformer"), "config_sentence_transformers.json": settings}
    pooling, _ = pooling_of(resolve(tmp_path, CLASSIFIER, files))
    assert (pooling.activation, pooling.tasks) == ("none", ("classify", "token_classify"))


def test_config_json_may_hold_anything(tmp_path: Path):
    classes = LLAMA | {"architectures": ["LlamaForSequenceClassification"]}
    for hf, words in (
        (classes | {"sbert_ce_default_activation_function": "os.system"}, "activation_fn is 'os.system'"),
        (classes | {"sbert_ce_default_activation_function": "torch.nn.modules.activation.Tanh"}, "activation_fn is"),
        (classes | {"id2label": {"0": []}}, "id2label is"),
        (classes | {"id2label": 3}, "id2label is"),
        (classes | {"classifier_from_token": "yes"}, "classifier_from_token is 'yes'"),
        (classes | {"classifier_from_token": [0, 0]}, "classifier_from_token is [0, 0]"),
        (BERT | {"matryoshka_dimensions": "all"}, "matryoshka_dimensions is 'all'"),
        (BERT | {"matryoshka_dimensions": [0]}, "matryoshka_dimensions is [0]"),
        (BERT | {"is_matryoshka": 1}, "is_matryoshka is 1"),
    ):
        assert words in refused(tmp_path, hf)


def test_tokens_for_classes(tmp_path: Path):
    """A reranker that is a decoder gives the logits of two of its tokens, by name or by id."""
    byte_level().hf.save_pretrained(str(tmp_path))
    vocab = byte_level().hf.get_vocab()
    hf = QWEN3 | {"vocab_size": 512}
    overrides = {"classifier_from_token": ["<s>", "<|end|>"], "is_original_qwen3_reranker": True}
    for arguments in (
        {"hf_overrides": overrides | {"architectures": ["Qwen3ForSequenceClassification"]}},
        {"hf_overrides": overrides, "convert": "classify"},
        {"hf_overrides": overrides | {"classifier_from_token": [3, 0]}, "convert": "classify"},
    ):
        config = resolve(tmp_path, hf, **arguments)
        settings, pooling = pooling_of(config)
        assert pooling.head[0].rows == (vocab["<s>"], vocab["<|end|>"]) == (3, 0)
        assert (pooling.is_difference, settings.num_labels) == (True, 1)
        assert (settings.score_type, settings.activation) == ("cross-encoder", "sigmoid")
        assert config.hf_config["classifier_from_token"] == arguments["hf_overrides"]["classifier_from_token"]
    unknown = {"classifier_from_token": ["no such", "token"]}
    assert "'no such' is no token of" in refused(tmp_path, hf, hf_overrides=unknown, convert="classify")


@pytest.mark.parametrize(("tokens", "rows"), [((9, 4), (4, 9)), ((9, None), (9,))])
def test_a_reranker_of_sentence_transformers(tmp_path: Path, tokens: tuple[int, int | None], rows: tuple[int, ...]):
    score = dict(zip(("true_token_id", "false_token_id"), tokens, strict=True))
    files = {"modules.json": modules("Transformer", "LogitScore"), "1_LogitScore/config.json": score}
    config = resolve(tmp_path, QWEN3, files)
    settings, pooling = pooling_of(config)
    assert (config.runner_type, config.convert_type, settings.tasks[0]) == ("pooling", "classify", "classify")
    assert (pooling.head[0].rows, pooling.is_difference, settings.num_labels) == (rows, len(rows) == 2, 1)


def test_dimensions(tmp_path: Path):
    matryoshka = BERT | {"matryoshka_dimensions": [8, 16]}
    settings = pooling_of(resolve(tmp_path, matryoshka, pooler_config={"dimensions": 8}))[0]
    assert (settings.dimensions, settings.is_matryoshka, settings.matryoshka_dimensions) == (8, True, [8, 16])
    assert pooling_of(resolve(tmp_path, BERT, hf_overrides={"is_matryoshka": True}))[0].is_matryoshka
    assert "only supports Matryoshka dimensions [8, 16], got 9" in refused(
        tmp_path, matryoshka, pooler_config={"dimensions": 9}
    )
    assert "does not support Matryoshka embeddings" in refused(tmp_path, BERT, pooler_config={"dimensions": 8})


def test_settings_of_pooling_that_do_nothing(tmp_path: Path):
    for hf, name, words in (
        (CLASSIFIER, "dimensions", "dimensions needs a model that embeds"),
        (BERT, "logit_mean", "logit_mean needs a model that classifies"),
        (CLASSIFIER, "step_tag_id", 'step_tag_id needs tok_pooling_type="STEP"'),
    ):
        assert words in refused(tmp_path, hf, pooler_config={name: 1})
    step = {"pooling_type": "STEP", "step_tag_id": 5, "returned_token_ids": [2, 0]}
    settings = pooling_of(resolve(tmp_path, CLASSIFIER, pooler_config=step))[0]
    assert (settings.is_step, settings.step_tag_id, settings.returned_token_ids) == (True, 5, [2, 0])
    assert "returned_token_ids has 3" in refused(tmp_path, CLASSIFIER, pooler_config=step | {"returned_token_ids": [3]})


def test_lengths(tmp_path: Path):
    assert resolve(tmp_path, BERT, MINILM, max_model_len=512).max_model_len == 512
    assert "context of 512 tokens" in refused(tmp_path, BERT, MINILM, max_model_len=513)
    long = {**MINILM, "sentence_bert_config.json": {"max_seq_length": 1000}}
    assert resolve(tmp_path, BERT, long).max_model_len == 512
    assert resolve(tmp_path, BERT | {"max_position_embeddings": 100}, MINILM).max_model_len == 100
    roberta = read_hf_config("roberta")
    offset = roberta["pad_token_id"] + 1
    assert resolve(tmp_path / "roberta", roberta).max_model_len == roberta["max_position_embeddings"] - offset
    # A limit for texts that are embedded is none for those that are generated.
    limits = {"sentence_bert_config.json": {"max_seq_length": 16}}
    assert resolve(tmp_path / "llama", LLAMA, limits).max_model_len == 4096
    assert resolve(tmp_path / "llama", LLAMA, limits, runner="pooling").max_model_len == 16


def test_whole_prompts_fit_a_step(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    long = BERT | {"max_position_embeddings": 4096}
    assert resolve(tmp_path, long).max_num_batched_tokens == 4096
    assert refused(tmp_path, long, max_num_batched_tokens=4095) == (
        "max_num_batched_tokens: max_num_batched_tokens=4095 must be at least max_model_len=4096 since prompts go "
        "through this model in one step. Leave it out, or set max_model_len=4095."
    )
    assert resolve(tmp_path, long, max_num_batched_tokens=1000, max_model_len=1000).max_num_batched_tokens == 1000
    assert not [each for each in caplog.messages if "has no effect" in each]
    with caplog.at_level(logging.WARNING):
        config = resolve(tmp_path, BERT, enable_prefix_caching=True, enable_chunked_prefill=True)
    assert (config.enable_prefix_caching, config.enable_chunked_prefill) == (False, False)
    assert [each.partition("=")[0] for each in caplog.messages if "has no effect" in each] == [
        "enable_prefix_caching",
        "enable_chunked_prefill",
    ]


def test_a_decoders_mean_needs_whole_prompts(tmp_path: Path):
    config = resolve(tmp_path, LLAMA, runner="pooling", pooler_config={"pooling_type": "MEAN"})
    settings, _ = pooling_of(config)
    assert (settings.runs_whole_tasks, settings.runs_whole) == (("embed",), False)
    assert (config.max_num_batched_tokens, config.enable_chunked_prefill) == (4096, True)
    mean = {"pooling_type": "MEAN", "task": "embed"}
    alone = resolve(tmp_path, LLAMA, runner="pooling", pooler_config=mean)
    assert pooling_of(alone)[0].runs_whole
    assert (alone.enable_chunked_prefill, alone.enable_prefix_caching) == (False, False)


def test_settings_cross_to_another_process(tmp_path: Path):
    config = resolve(tmp_path, BERT | {"matryoshka_dimensions": [8]}, MINILM)
    settled = vllm_config(config, num_blocks=9, max_model_len=64)
    ready = msgspec.structs.replace(make_ready(), vllm_config=settled, pooling=config.pooling)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(ready), type=EngineReady) == ready
    model = settled.model_config
    assert (model.runner_type, model.convert_type, model.embedding_size) == ("pooling", "none", 32)
    assert (model.is_matryoshka, model.matryoshka_dimensions) == (True, [8])
    assert model.pooler_config is not None
    assert model.pooler_config.seq_pooling_type == "MEAN"
    assert make_ready().vllm_config.model_config.runner_type == "generate"


def test_arguments_cross_too_and_come_from_a_command_line():
    step: Any = {"pooling_type": "STEP", "logit_bias": 1.0, "step_tag_id": 3}
    args = EngineArgs(model="m", pooler_config=step)
    assert args.pooler_config is not None
    assert (args.pooler_config.tok_pooling_type, args.pooler_config.logit_mean) == ("STEP", 1.0)
    assert EngineArgs(**msgspec.msgpack.decode(msgspec.msgpack.encode(args.portable()))) == args
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    pooler = json.dumps({"pooling_type": "MEAN", "dimensions": 3})
    words = ["--model", "m", "--runner", "pooling", "--convert", "embed", "--pooler-config", pooler]
    assert EngineArgs.from_cli_args(parser.parse_args(words)) == EngineArgs(
        model="m", runner="pooling", convert="embed", pooler_config=PoolerConfig(pooling_type="MEAN", dimensions=3)
    )
    assert "both" in parser.format_help()
    with pytest.raises(VLLMValidationError, match="has no 'override_pooler_config' any more: see pooler_config"):
        EngineArgs(model="m", override_pooler_config={})  # type: ignore[call-arg]
