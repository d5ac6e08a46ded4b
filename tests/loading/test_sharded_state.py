"""vLLM's sharded state is joined to HF's tensors, to the bit. The writer cuts them as vLLM's parallel layers do."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxllm.exceptions import VLLMValidationError
from jaxllm.llm import LLM
from jaxllm.loading.open import open_checkpoint
from jaxllm.sampling_params import SamplingParams
from tests.loading.files import safetensors_bytes
from tests.models.tiny import folder, read_goldens, read_hf_config

VOCABULARY = 250
"""Not a multiple of 64: vLLM pads the rows."""


def plain(case: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the config and the tensors of a tiny model, with a vocabulary of an odd size."""
    checkpoint = open_checkpoint(str(folder(case)))
    tensors = {name: checkpoint.read(name) for name in checkpoint.tensors}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in tensors:
            tensors[name] = tensors[name][:VOCABULARY]
    return read_hf_config(case) | {"vocab_size": VOCABULARY}, tensors


def cut(tensor: np.ndarray, num_ranks: int, rank: int, axis: int = 0) -> np.ndarray:
    return np.split(tensor, num_ranks, axis)[rank]


def padded(table: np.ndarray) -> np.ndarray:
    """Fill a table up to vLLM's number of rows; the rows that are added are poisoned."""
    rows = (len(table) + 63) // 64 * 64
    return np.concatenate((table, np.full((rows - len(table), table.shape[1]), np.nan, table.dtype)))


def kv_heads(tensor: np.ndarray, heads: int, num_ranks: int, rank: int) -> np.ndarray:
    """Return the rows of a rank's KV heads; with more ranks than heads, consecutive ranks have the same head."""
    by_head = tensor.reshape(heads, -1, *tensor.shape[1:])
    if num_ranks > heads:
        return by_head[rank // (num_ranks // heads)]
    return cut(tensor, num_ranks, rank)


def rank_state(
    config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], num_ranks: int, rank: int
) -> dict[str, np.ndarray]:
    """Return the state dict of one rank's model in vLLM."""
    state: dict[str, np.ndarray] = {}
    for name, tensor in tensors.items():
        *before, module, end = name.split(".")
        stem = ".".join(before)
        if module in ("embed_tokens", "lm_head"):
            state[name] = cut(padded(tensor), num_ranks, rank)
        elif module == "q_proj":
            parts = [cut(tensor, num_ranks, rank)]
            for other in ("k_proj", "v_proj"):
                parts += [kv_heads(tensors[f"{stem}.{other}.{end}"], config["num_key_value_heads"], num_ranks, rank)]
            state[f"{stem}.qkv_proj.{end}"] = np.concatenate(parts)
            state[f"{stem}.attn._k_scale"] = np.ones((), np.float32)
        elif module == "qkv_proj":
            heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
            size = len(tensor) // (heads + 2 * kv)
            queries, keys, values = np.split(tensor, [heads * size, (heads + kv) * size])
            parts = [cut(queries, num_ranks, rank), *(kv_heads(part, kv, num_ranks, rank) for part in (keys, values))]
            state[name] = np.concatenate(parts)
        elif module == "gate_proj":
            both = (tensor, tensors[f"{stem}.up_proj.{end}"])
            state[f"{stem}.gate_up_proj.{end}"] = np.concatenate([cut(part, num_ranks, rank) for part in both])
        elif module == "gate_up_proj":
            state[name] = np.concatenate([cut(part, num_ranks, rank) for part in np.split(tensor, 2)])
        elif module in ("o_proj", "down_proj") and end == "weight":
            state[name] = np.ascontiguousarray(cut(tensor, num_ranks, rank, axis=1))
        elif module == "up_proj" and f"{stem}.gate_proj.{end}" not in tensors:
            state[name] = cut(tensor, num_ranks, rank)
        elif module.endswith("norm") or (end == "bias" and module in ("o_proj", "down_proj")):
            state[name] = tensor
    return state


def write(path: Path, case: str, num_ranks: int, *, tied: bool = False, **changes: Any) -> dict[str, np.ndarray]:
    """Write a model's sharded state in two parts per rank; return HF's tensors."""
    config, tensors = plain(case)
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config | changes))
    (path / "model.safetensors.index.json").write_text("{}")  # vLLM's example copies such files
    for rank in range(num_ranks):
        state = rank_state(config, tensors, num_ranks, rank)
        if tied:  # of two names of one tensor, vLLM writes the first
            state["lm_head.weight"] = state.pop("model.embed_tokens.weight")
        names = sorted(state)
        for part, chosen in enumerate((names[::2], names[1::2])):
            data = safetensors_bytes({name: state[name] for name in chosen})
            (path / f"model-rank-{rank}-part-{part}.safetensors").write_bytes(data)
    return tensors


CASES = [
    *((case, ranks) for case in ("llama2", "llama_bias", "qwen2", "phi3", "qwen3", "gemma2") for ranks in (1, 2, 4)),
    *((case, 2) for case in ("arcee", "exaone4", "gemma", "gemma3", "glm", "glm4", "granite", "olmo2", "olmo3")),
    *((case, 2) for case in ("seed_oss", "mistral", "llama3_tied")),
]


@pytest.mark.parametrize(("case", "num_ranks"), CASES)
def test_is_the_model_of_hf(tmp_path: Path, case: str, num_ranks: int):
    tied = read_hf_config(case)["tie_word_embeddings"] and not case.startswith("gemma")
    expected = write(tmp_path, case, num_ranks, tied=tied)
    checkpoint = open_checkpoint(str(tmp_path), load_format="sharded_state")
    assert set(checkpoint.tensors) == set(expected)
    for name, array in expected.items():
        read, info = checkpoint.read(name), checkpoint.tensors[name]
        assert (info.shape, info.dtype, info.num_bytes) == (array.shape, array.dtype.name, array.nbytes)
        assert read.dtype == array.dtype
        np.testing.assert_array_equal(read, array)
        checkpoint.release(name)
        np.testing.assert_array_equal(checkpoint.read(name), array)


@pytest.mark.loading
def test_tokens_are_those_of_the_plain_checkpoint(tmp_path: Path):
    """Four ranks with two KV heads, on one device."""
    tensors = write(tmp_path / "sharded", "qwen2", 4)
    whole = tmp_path / "plain"
    whole.mkdir()
    (whole / "config.json").write_text((tmp_path / "sharded/config.json").read_text())
    (whole / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    prompt = [int(token) % VOCABULARY for token in read_goldens("qwen2")[0].prompt]
    options: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": 64, "enforce_eager": True}
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    tokens = [
        LLM(str(path), load_format=form, **options).generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids
        for path, form in ((whole, "auto"), (tmp_path / "sharded", "sharded_state"))
    ]
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) == 8


def refused(path: Path, words: str) -> None:
    with pytest.raises(VLLMValidationError, match=words):
        open_checkpoint(str(path), load_format="sharded_state")


def test_other_models_are_refused(tmp_path: Path):
    write(tmp_path, "llama2", 2, architectures=["MixtralForCausalLM"])
    refused(tmp_path, r"layers of MixtralForCausalLM\. Give the checkpoint that it was saved from, or one of ArceeFor")
    for names in ("x", [], [{}], None):
        write(tmp_path, "llama2", 1, architectures=names, model_type="llama")
        if names:
            refused(tmp_path, "is not supported for this model")
    write(tmp_path, "llama2", 2, quantization_config={"quant_method": "gptq"})
    refused(tmp_path, "repacked its quantized weights")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_attention_heads": 3}, r"qkv_proj\.(weight|bias) has \d+ rows on each of 2 ranks.*num_attention_heads 3"),
        ({"num_attention_heads": 0}, "num_attention_heads 0"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"num_key_value_heads": "2"}, "num_key_value_heads 2"),
        ({"vocab_size": 300}, "has 256 rows on all ranks, which are not vocab_size 300"),
        ({"vocab_size": None}, "not vocab_size None"),
    ],
)
def test_a_config_that_does_not_fit(tmp_path: Path, changes: dict[str, Any], words: str):
    write(tmp_path, "qwen2", 2, **changes)
    refused(tmp_path, words)


def test_files_that_do_not_fit(tmp_path: Path):
    write(tmp_path, "qwen2", 2)
    with pytest.raises(VLLMValidationError):
        open_checkpoint(str(tmp_path))
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(VLLMValidationError, match=re.escape('for load_format="sharded_state"')):
        open_checkpoint(str(tmp_path))
    first = tmp_path / "model-rank-0-part-0.safetensors"
    last = tmp_path / "model-rank-1-part-1.safetensors"
    content = last.read_bytes()
    last.unlink()
    refused(tmp_path, "is not of one shape on ranks 0 and 1")
    last.write_bytes(content)
    for part in (0, 1):
        (tmp_path / f"model-rank-0-part-{part}.safetensors").rename(tmp_path / f"model-rank-2-part-{part}.safetensors")
    refused(tmp_path, "rank 2 has files, and rank 0 has none")
    for path in tmp_path.glob("model-rank*"):
        path.unlink()
    refused(tmp_path, r"there are no model-rank-\.safetensors files")
    for name, shape, words in (
        (
            "model.layers.0.mlp.experts.w13_weight",
            (3, 2),
            "rule for the slices of .*experts.w13_weight",
        ),
        ("model.layers.0.self_attn.qkv_proj.bias", (), r"qkv_proj\.bias has shape \[\]"),
        ("model.layers.0.mlp.down_proj.weight", (3,), r"down_proj\.weight has shape \[3\]"),
    ):
        first.write_bytes(safetensors_bytes({name: np.ones(shape, ml_dtypes.bfloat16)}))
        refused(tmp_path, words)
