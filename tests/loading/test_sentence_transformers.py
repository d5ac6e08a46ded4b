"""Folders of sentence-transformers are read as they are, and what they ask for that is not there is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm.exceptions import VLLMValidationError
from jaxllm.loading.names import check_names
from jaxllm.loading.open import open_checkpoint
from jaxllm.loading.sentence_transformers import (
    Dense,
    Embedding,
    SentenceFiles,
    Settings,
    read_classifier_tokens,
    read_embedding,
    read_settings,
)
from tests.loading.files import safetensors_bytes, write_folder
from tests.loading.hub_server import COMMIT, serving
from tests.loading.sentence_files import MINILM, modules, write_dense, write_json_files
from tests.loading.test_hub import client, received

A = {"a": np.arange(4, dtype=np.float32)}
POOLING = {"embedding_dimension": 8, "pooling_mode": "mean", "include_prompt": True}
DENSE = {"in_features": 8, "out_features": 4, "bias": True}


def read(folder: Path, files: Mapping[str, Any]) -> SentenceFiles:
    """Write a model with these files beside it, and return what opening finds of them."""
    write_json_files(write_folder(folder, A), files)
    result = open_checkpoint(str(folder), load_format="dummy").sentence_files
    assert result is not None
    return result


def test_a_real_folder(tmp_path: Path):
    files = read(tmp_path, MINILM)
    assert read_embedding(files) == Embedding("MEAN", (), normalizes=True)
    assert read_settings(files) == Settings({}, None, "cosine", 256, lowercases=False)
    assert files.has("Pooling")
    assert read_classifier_tokens(files) is None


def test_a_model_alone_has_none(tmp_path: Path):
    assert open_checkpoint(str(write_folder(tmp_path, A))).sentence_files is None


def test_the_paths_of_newer_versions(tmp_path: Path):
    paths = ("base.modules.transformer.Transformer", "sentence_transformer.modules.pooling.Pooling")
    rows = [
        {"path": path, "type": f"sentence_transformers.{name}"}
        for path, name in zip(("", "1_Pooling"), paths, strict=True)
    ]
    files = read(tmp_path, {"modules.json": rows, "1_Pooling/config.json": POOLING | {"pooling_mode": "lasttoken"}})
    assert read_embedding(files) == Embedding("LAST", (), normalizes=False)


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "CLS"),
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, "LAST"),
        ({"pooling_mode_mean_sqrt_len_tokens": True}, "mean_sqrt_len"),
        ({"pooling_mode_weightedmean_tokens": True}, "weightedmean"),
        ({"pooling_mode_max_tokens": True, "pooling_mode_mean_tokens": True}, "max+mean"),
        ({"pooling_mode": "cls"}, "CLS"),
        ({"pooling_mode": ["mean"]}, "MEAN"),
        ({"pooling_mode": ["cls", "mean"]}, "cls+mean"),
        ({}, "MEAN"),
    ],
)
def test_pooling_modes(tmp_path: Path, config: dict[str, Any], kind: str):
    files = read(tmp_path, {"modules.json": modules("Transformer", "Pooling"), "1_Pooling/config.json": config})
    assert read_embedding(files).kind == kind


def test_dense_modules_are_tensors_of_the_checkpoint(tmp_path: Path):
    files = {
        "modules.json": modules("Transformer", "Pooling", "Dense", "Dense", "Dropout", "Normalize"),
        "1_Pooling/config.json": POOLING,
    }
    write_json_files(write_folder(tmp_path, A), files)
    weights = {
        "2_Dense/linear.weight": write_dense(tmp_path, "2_Dense", 4, 6),
        "3_Dense/linear.weight": write_dense(
            tmp_path, "3_Dense", 6, 2, seed=1, activation_function="torch.nn.modules.activation.Tanh"
        ),
    }
    checkpoint = open_checkpoint(str(tmp_path))
    assert set(checkpoint.tensors) == {"a", *weights}
    for name, weight in (A | weights).items():
        assert checkpoint.tensors[name].shape == weight.shape
        np.testing.assert_array_equal(checkpoint.read(name), weight)
        checkpoint.release(name)
    assert checkpoint.sentence_files is not None
    embedding = read_embedding(checkpoint.sentence_files)
    layers = (Dense("2_Dense", 4, 6, bias=False, act=None), Dense("3_Dense", 6, 2, bias=False, act="tanh"))
    assert embedding == Embedding("MEAN", layers, normalizes=True)
    # A model that only generates does without them, but not with others that it does not know.
    with pytest.raises(VLLMValidationError, match="unexpected: a") as caught:
        check_names({}, checkpoint)
    assert "Dense" not in str(caught.value)


@pytest.mark.parametrize(("limit", "length"), [(100, 100), (10**30, None), (1e30, None), ("x", None), (None, None)])
def test_newer_versions_keep_the_length_with_the_tokenizer(tmp_path: Path, limit: Any, length: int | None):
    files = {"modules.json": modules("Transformer"), "tokenizer_config.json": {"model_max_length": limit}}
    assert read_settings(read(tmp_path, files)).max_length == length
    shortened = {**files, "sentence_bert_config.json": {"max_seq_length": 7}}
    assert read_settings(read(tmp_path, shortened)).max_length == 7
    (tmp_path / "modules.json").unlink()
    (tmp_path / "sentence_bert_config.json").write_text('{"do_lower_case": false}')
    assert read_settings(read(tmp_path, {})).max_length is None


def test_settings(tmp_path: Path):
    prompts = {"query": "query: ", "document": ""}
    settings = {"prompts": prompts, "default_prompt_name": "query", "similarity_fn_name": "dot"}
    files = {
        "config_sentence_transformers.json": settings,
        "sentence_roberta_config.json": {"do_lower_case": True, "max_seq_length": None},
    }
    assert read_settings(read(tmp_path, files)) == Settings(prompts, "query", "dot", None, lowercases=True)


@pytest.mark.parametrize(
    ("config", "tokens"),
    [({"true_token_id": 9, "false_token_id": 4}, [4, 9]), ({"true_token_id": 9, "false_token_id": None}, [9])],
)
def test_a_reranker_made_of_two_tokens(tmp_path: Path, config: dict[str, Any], tokens: list[int]):
    files = {"modules.json": modules("Transformer", "LogitScore"), "1_LogitScore/config.json": config}
    assert read_classifier_tokens(read(tmp_path, files)) == tokens


PLAIN: Mapping[str, Any] = {"modules.json": modules("Transformer", "Pooling"), "1_Pooling/config.json": POOLING}
WITH_DENSE: Mapping[str, Any] = {
    "modules.json": modules("Transformer", "Pooling", "Dense"),
    "1_Pooling/config.json": POOLING,
}


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"modules.json": modules("Transformer", "Pooling", "LSTM")}, "'LSTM', which is not supported"),
        ({"modules.json": modules("Transformer", "Pooling", "Normalize", "Dense")}, "in this order"),
        ({"modules.json": modules("Transformer", "Dense")}, "in this order"),
        ({"modules.json": modules("Transformer")}, "in this order"),
        ({"modules.json": [{"type": "custom_st.Encoder", "path": ""}]}, "'custom_st.Encoder'"),
        (
            {"modules.json": [{**modules("Transformer")[0], "path": "0_T"}, *modules("Transformer", "Pooling")[1:]]},
            "in 0_T, not in the model's folder",
        ),
        ({**PLAIN, "1_Pooling/config.json": {"pooling_mode": 3}}, "1_Pooling/config.json: pooling_mode is 3"),
        ({**PLAIN, "1_Pooling/config.json": {"pooling_mode_mean_tokens": "yes"}}, "pooling_mode_mean_tokens is 'yes'"),
        (
            {
                **PLAIN,
                "1_Pooling/config.json": POOLING | {"include_prompt": False},
                "config_sentence_transformers.json": {"prompts": {"query": "q: "}},
            },
            "include_prompt is false",
        ),
        (
            {**WITH_DENSE, "2_Dense/config.json": DENSE | {"activation_function": "torch.nn.Softplus"}},
            "2_Dense/config.json: activation_function is 'torch.nn.Softplus'",
        ),
        ({**WITH_DENSE, "2_Dense/config.json": DENSE | {"activation_function": "os.system"}}, "activation_function"),
        ({**WITH_DENSE, "2_Dense/config.json": DENSE | {"use_residual": 1}}, "use_residual is 1"),
        ({**WITH_DENSE, "2_Dense/config.json": DENSE | {"module_input_name": "token_embeddings"}}, "module_input_name"),
        ({**WITH_DENSE, "2_Dense/config.json": {"in_features": 8}}, "out_features is missing"),
    ],
)
def test_what_modules_cannot_be(tmp_path: Path, files: Mapping[str, Any], words: str):
    result = read(tmp_path, files)
    with pytest.raises(VLLMValidationError) as caught:
        read_embedding(result)
    assert words in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert caught.value.parameter == "model"


def test_a_prompt_may_be_left_out_of_the_mean_where_there_is_none(tmp_path: Path):
    files = {**PLAIN, "1_Pooling/config.json": POOLING | {"include_prompt": False}}
    assert read_embedding(read(tmp_path, files)).kind == "MEAN"


@pytest.mark.parametrize(
    ("settings", "encoder", "words"),
    [
        ({"prompts": {"query": 3}}, {}, "prompts has others than texts"),
        ({"prompts": ["q: "]}, {}, "prompts is ['q: '], expected an object"),
        ({"prompts": {"a": ""}, "default_prompt_name": "query"}, {}, "default_prompt_name is 'query'"),
        ({"similarity_fn_name": "jaccard"}, {}, "similarity_fn_name is 'jaccard'"),
        ({}, {"max_seq_length": 0}, "max_seq_length is 0"),
        ({}, {"do_lower_case": "no"}, "do_lower_case is 'no'"),
    ],
)
def test_what_settings_cannot_be(tmp_path: Path, settings: dict[str, Any], encoder: dict[str, Any], words: str):
    files = read(
        tmp_path, {"config_sentence_transformers.json": settings, "sentence_bert_config.json": encoder or {"a": 1}}
    )
    with pytest.raises(VLLMValidationError) as caught:
        read_settings(files)
    assert words in str(caught.value)


@pytest.mark.parametrize("path", ["../other", "/etc", "a/b", "{body}", ".hidden", "", 3])
def test_modules_stay_in_their_folder(tmp_path: Path, path: Any):
    write_json_files(
        write_folder(tmp_path, A), {"modules.json": [{"type": "sentence_transformers.models.Dense", "path": path}]}
    )
    with pytest.raises(VLLMValidationError, match="no folder's name"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize("text", ["{}", "[3]", "[", '[{"path": ""}]', "[" + ",".join(["{}"] * 65) + "]"])
def test_a_list_of_modules_that_is_none(tmp_path: Path, text: str):
    (write_folder(tmp_path, A) / "modules.json").write_text(text)
    with pytest.raises(VLLMValidationError, match=r"modules\.json"):
        open_checkpoint(str(tmp_path))


def test_weights_of_a_module_that_are_not_there(tmp_path: Path):
    write_json_files(write_folder(tmp_path, A), {**WITH_DENSE, "2_Dense/config.json": DENSE})
    with pytest.raises(VLLMValidationError, match=r"2_Dense/model\.safetensors is not there"):
        open_checkpoint(str(tmp_path))
    assert open_checkpoint(str(tmp_path), load_format="dummy").sentence_files is not None


def hub_files(folder: Path) -> dict[str, bytes]:
    """Return a repository with one Dense module, and files of other formats."""
    folder.mkdir()
    write_dense(
        write_json_files(folder, {**WITH_DENSE, "config.json": {"architectures": ["LlamaForCausalLM"]}}),
        "2_Dense",
        4,
        2,
    )
    (folder / "model.safetensors").write_bytes(safetensors_bytes(A))
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    clutter = (
        "onnx/model.onnx",
        "openvino/openvino_model.bin",
        "onnx/1_Pooling/config.json",
        "2_Dense/pytorch_model.bin",
    )
    return files | dict.fromkeys(clutter, b"x" * 100)


@pytest.mark.loading
def test_a_repository_of_the_hub(tmp_path: Path):
    files = hub_files(tmp_path / "files")
    broken = {name: data for name, data in files.items() if name != "2_Dense/model.safetensors"}
    with serving({"org/st": files, "org/broken": broken}) as server:
        opened, fetched = client(server, tmp_path, [("org/st", {}, False), ("org/st", {}, True)])
        assert opened["tensors"] == {"a": [[4], "float32", 16], "2_Dense/linear.weight": [[2, 4], "float32", 32]}
        assert set(fetched["sums"]) == {"a", "2_Dense/linear.weight"}
        assert set(received(server)) == {
            *("config.json", "modules.json", "1_Pooling/config.json", "2_Dense/config.json"),
            *("model.safetensors", "2_Dense/model.safetensors"),
        }
        server.requests.clear()
        (config,) = client(server, tmp_path / "other", [("org/st", {"config_only": True}, False)])
        assert config["tensors"] == {}
        assert set(received(server)) == {
            *("config.json", "modules.json", "1_Pooling/config.json", "2_Dense/config.json"),
        }
        (refused,) = client(server, tmp_path, [("org/broken", {}, False)])
        assert "the repository has no 2_Dense/model.safetensors; it has" in refused["error"]
    (offline,) = client(None, tmp_path, [("org/st", {}, True)], HF_HUB_OFFLINE="1")
    assert offline["sums"] == fetched["sums"]
    assert list(tmp_path.rglob(f"{COMMIT}/2_Dense/model.safetensors"))
