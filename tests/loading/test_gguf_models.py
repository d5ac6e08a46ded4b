"""Real GGUF files equal goldens that transformers and the gguf package made (scripts/make.py gguf_goldens)."""

from __future__ import annotations

import copy
import hashlib
import json
import pickle
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm.loading.checkpoint import Checkpoint
from jaxllm.loading.open import open_checkpoint

pytestmark = pytest.mark.loading

MAX_SECONDS = 3
"""How much processor time SmolLM2's 135 million numbers may take; wall time depends on what else the machine does."""


class Case:
    """One model with what is expected of it."""

    def __init__(self, path: str, repository: Path) -> None:
        self.checkpoint: Checkpoint = open_checkpoint(path)
        self.goldens: dict[str, Any] = json.loads((repository / f"tests/data/gguf/{Path(path).stem}.json").read_text())
        self.tokenizer = self.checkpoint.tokenizer()


@pytest.fixture(scope="module", params=["smollm2_path", "gemma_path"])
def case(request: pytest.FixtureRequest, repository: Path) -> Case:
    return Case(request.getfixturevalue(request.param), repository)


def test_every_tensor_is_bitwise_hf(case: Case):
    expected = case.goldens["weights"]
    assert set(case.checkpoint.tensors) == set(expected)
    seconds = 0.0
    for name, digest in expected.items():
        started = time.process_time()
        tensor = np.ascontiguousarray(case.checkpoint.read(name))
        seconds += time.process_time() - started
        assert (tensor.shape, tensor.dtype) == (case.checkpoint.tensors[name].shape, np.float32)
        assert hashlib.sha256(tensor.data).hexdigest()[:16] == digest, name
    print(f"dequantized {case.checkpoint.source} in {seconds:.2f} s")
    assert seconds < MAX_SECONDS or case.checkpoint.config["model_type"] != "llama"


def test_ids_and_texts_are_hf(case: Case):
    goldens, tokenizer = case.goldens["tokenizer"], case.tokenizer
    for number, text in enumerate(goldens["texts"]):
        ids = tokenizer(text)["input_ids"]
        assert ids == goldens["ids"][number], text
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == goldens["bare_ids"][number], text
        assert tokenizer.decode(ids) == goldens["decoded"][number], text
        assert tokenizer.decode(ids, skip_special_tokens=True) == goldens["decoded_without_special"][number], text


def test_the_chat_template_comes_from_the_file(case: Case):
    goldens = case.goldens["tokenizer"]
    if goldens["chat_ids"] is None:
        assert case.tokenizer.chat_template is None
        return
    ids = case.tokenizer.apply_chat_template(goldens["chat"], add_generation_prompt=True, return_dict=False)
    assert ids == goldens["chat_ids"]


def test_the_tokenizer_can_be_copied(smollm2_path: str):
    tokenizer = open_checkpoint(smollm2_path).tokenizer()
    text = "Hello, world! 123"
    ids = tokenizer(text)["input_ids"]
    assert copy.deepcopy(tokenizer)(text)["input_ids"] == ids
    assert pickle.loads(pickle.dumps(tokenizer))(text)["input_ids"] == ids  # noqa: S301


def test_smollm2_says_what_it_is(smollm2_path: str):
    checkpoint = open_checkpoint(smollm2_path)
    config = checkpoint.config
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["hidden_size"], config["num_hidden_layers"], config["head_dim"]) == (576, 30, 64)
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (9, 3)
    assert (config["vocab_size"], config["tie_word_embeddings"], config["rope_scaling"]) == (49152, True, None)
    assert config["rope_theta"] == 100000
    assert checkpoint.generation_config == {"bos_token_id": 1, "eos_token_id": [2, 0, 4]}


def test_gemma_says_what_it_is(gemma_path: str):
    config = open_checkpoint(gemma_path).config
    assert config["architectures"] == ["Gemma3ForCausalLM"]
    assert (config["vocab_size"], config["head_dim"], config["query_pre_attn_scalar"]) == (262144, 256, 256)
    assert (config["rope_theta"], config["rope_local_base_freq"], config["sliding_window"]) == (1e6, 1e4, 512)
    assert [kind == "full_attention" for kind in config["layer_types"]] == ([False] * 5 + [True]) * 3
