"""GGUF files of text encoders: tensors, config, states and token ids are those of HF."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.exceptions import VLLMValidationError
from jaxllm.loading.gguf.checkpoint import GGUFCheckpoint
from jaxllm.loading.hf import AutoTokenizer
from jaxllm.loading.sentence_transformers import read_embedding
from jaxllm.models import Model, ModelSpecs, get_family
from tests.loading.files import gguf_bytes, gguf_f32
from tests.models.pooled import read_pooled_goldens, run_pooled
from tests.models.running import load
from tests.models.tiny import read_hf_config, read_tensors

NAMES = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}
NORMAL, CONTROL = 1, 3
TEXTS = [
    "Hello, World!",
    "unaffable  \t caf\u00e9 na\u00efve\u0300 \u00c5ngstr\u00f6m",
    "\u6211\u60f3\u5728apple\u5de5\u4f5c1314151\u5929\uff5e",
    "don't-stop [MASK] at [SEP] 3.14159 \U0001f642 \u0420\u043e\u0441\u0441\u0438\u044f",
    "x" * 120,
    "",
]


def metadata(hf: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """Return what llama.cpp's converter writes of a BERT's config.json, and more under its prefix."""
    keys = {
        "block_count": hf["num_hidden_layers"],
        "context_length": hf["max_position_embeddings"],
        "embedding_length": hf["hidden_size"],
        "feed_forward_length": hf["intermediate_size"],
        "attention.head_count": hf["num_attention_heads"],
        "attention.layer_norm_epsilon": hf["layer_norm_eps"],
        "attention.causal": False,
    }
    return {"general.architecture": "bert"} | {f"bert.{key}": value for key, value in (keys | more).items()}


def stored(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return a BERT's tensors as the converter names them."""
    named: dict[str, np.ndarray] = {}
    for name, tensor in tensors.items():
        layer = re.fullmatch(r"encoder\.layer\.(\d+)\.(.*)", name)
        prefix, suffix = (f"blk.{layer[1]}.", layer[2]) if layer else ("", name)
        stem, _, kind = suffix.rpartition(".")
        if stem in NAMES:
            named[f"{prefix}{NAMES[stem]}.{kind}"] = tensor.astype(np.float32)
    return named


def open_gguf(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, np.ndarray] | None = None
) -> GGUFCheckpoint:
    named = stored(read_tensors("bert")) | dict(tensors or {})
    (path / "x.gguf").write_bytes(gguf_bytes(metadata, gguf_f32(named)))
    return GGUFCheckpoint(path / "x.gguf")


def test_states_are_hf(tmp_path: Path):
    hf, expected = read_hf_config("bert"), read_tensors("bert")
    checkpoint = open_gguf(tmp_path, metadata(hf))
    family = get_family("BertModel")
    config = family.read_config(checkpoint.config)
    assert config == family.read_config(hf | {"layer_norm_eps": float(np.float32(hf["layer_norm_eps"]))})
    tensors = {name: checkpoint.read(name) for name in checkpoint.tensors}
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(tensor, expected[name].astype(np.float32), err_msg=name)
    model, goldens = Model(ModelSpecs(config, jnp.float32)), read_pooled_goldens("bert")
    outputs = run_pooled(model, load(model, tensors), goldens)
    for output, golden in zip(outputs.of_tokens, goldens, strict=True):
        np.testing.assert_allclose(output, golden.output, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("number", "kind"), [(1, "MEAN"), (2, "CLS"), (3, "LAST")])
def test_the_file_says_how_to_pool(tmp_path: Path, number: int, kind: str):
    files = open_gguf(tmp_path, metadata(read_hf_config("bert"), pooling_type=number)).sentence_files
    assert files is not None
    embedding = read_embedding(files)
    assert (embedding.kind, embedding.layers, embedding.normalizes) == (kind, (), True)


def test_without_pooling(tmp_path: Path):
    assert open_gguf(tmp_path, metadata(read_hf_config("bert"), pooling_type=0)).sentence_files is None


def test_classifiers_are_refused(tmp_path: Path):
    with pytest.raises(VLLMValidationError, match=r"x\.gguf: it holds a classifier"):
        open_gguf(tmp_path, metadata(read_hf_config("bert")), {"cls.output.weight": np.ones((2, 32))})


def vocabulary(tokens: list[str], **more: Any) -> dict[str, Any]:
    """Return a WordPiece vocabulary as the converter writes it: pieces that begin a word are marked."""
    types = [CONTROL if re.fullmatch(r"\[(PAD|UNK|CLS|SEP|MASK)\]", token) else NORMAL for token in tokens]
    marked = [
        token if kind == CONTROL else token[2:] if token.startswith("##") else "\u2581" + token
        for token, kind in zip(tokens, types, strict=True)
    ]
    keys = {"model": "bert", "pre": "jina-v2-en", "tokens": marked, "token_type": types, "token_type_count": 2} | more
    return metadata(read_hf_config("bert")) | {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def test_real_ids_and_texts_are_hf(tmp_path: Path, minilm_path: str):
    """The vocabulary is MiniLM's; the ids are those of its own tokenizer, for pairs too."""
    theirs = AutoTokenizer.from_pretrained(minilm_path)
    tokens = sorted(theirs.get_vocab(), key=theirs.get_vocab().get)
    ours = open_gguf(tmp_path, vocabulary(tokens)).tokenizer()
    for text in TEXTS:
        expected = theirs(text, TEXTS[0])
        result = ours(text, TEXTS[0])
        assert result["input_ids"] == expected["input_ids"], text
        assert result["token_type_ids"] == expected["token_type_ids"], text
        ids = ours(text)["input_ids"]
        assert ids == theirs(text)["input_ids"], text
        assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True), text
        assert ours(text, add_special_tokens=False)["input_ids"] == ids[1:-1], text
    names = ("cls_token", "sep_token", "mask_token", "unk_token", "pad_token")
    assert [getattr(ours, name) for name in names] == [getattr(theirs, name) for name in names]


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "The", "caf\u00e9", "cafe", "##s"]
IDS = {"cls_token_id": 2, "seperator_token_id": 3, "mask_token_id": 4, "unknown_token_id": 1, "padding_token_id": 0}


@pytest.mark.parametrize(
    ("words", "more", "expected"),
    [
        (WORDS, {}, ["The", "caf\u00e9", "##s"]),
        ([word for word in WORDS if word != "The"], {}, ["the", "cafe", "##s"]),
        (WORDS, {"normalizer.lowercase": True}, ["the", "cafe", "##s"]),
        (WORDS, {"normalizer.lowercase": True, "normalizer.strip_accents": False}, ["the", "caf\u00e9", "##s"]),
    ],
)
def test_capitals_and_accents(tmp_path: Path, words: list[str], more: Mapping[str, Any], expected: list[str]):
    """Where the file does not say, capitals count if a token has one."""
    tokenizer = open_gguf(tmp_path, vocabulary(words, **IDS, **more)).tokenizer()
    ids = tokenizer("The caf\u00e9s")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["[CLS]", *expected, "[SEP]"]


@pytest.mark.parametrize(
    ("more", "message"), [({}, "unknown_token_id"), ({"unknown_token_id": 1}, r"cls_token_id is 101.*10 tokens")]
)
def test_tokens_that_are_missing(tmp_path: Path, more: Mapping[str, Any], message: str):
    with pytest.raises(VLLMValidationError, match=message):
        open_gguf(tmp_path, vocabulary(WORDS, **more)).tokenizer()
