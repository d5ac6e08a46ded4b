"""GGUF files of encoders with rotary positions: config, tensors and states are those of HF."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.exceptions import VLLMValidationError
from jaxllm.loading.gguf.checkpoint import GGUFCheckpoint
from jaxllm.loading.names import check_names
from jaxllm.models import Model, ModelSpecs, get_family
from tests.loading.files import gguf_bytes, gguf_f32
from tests.models.pooled import read_pooled_goldens, run_pooled
from tests.models.running import load
from tests.models.tiny import read_hf_config, read_tensors

ARCHITECTURES = {"nomic": "nomic-bert", "jina_v3": "jina-bert-v3"}
NAMES = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.token_type_embeddings": "token_types",
    "emb_ln": "token_embd_norm",
    "attn.Wqkv": "attn_qkv",
    "mixer.Wqkv": "attn_qkv",
    "attn.out_proj": "attn_output",
    "mixer.out_proj": "attn_output",
    "norm1": "attn_output_norm",
    "mlp.fc11": "ffn_up",
    "mlp.fc12": "ffn_gate",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
    "norm2": "layer_output_norm",
}
"""The names that gguf's `TensorNameMap` gives the tensors of both."""


def metadata(case: str, **more: Any) -> dict[str, Any]:
    """Return what llama.cpp's converter writes of the config.json of a case, and more under its prefix."""
    hf, name = read_hf_config(case), ARCHITECTURES[case]
    keys = {
        "block_count": hf["num_hidden_layers"],
        "context_length": hf["max_position_embeddings"],
        "embedding_length": hf["hidden_size"],
        "feed_forward_length": hf["intermediate_size"],
        "attention.head_count": hf["num_attention_heads"],
        "attention.layer_norm_epsilon": hf["layer_norm_eps"],
        "attention.causal": False,
        "pooling_type": 1,
        "rope.freq_base": hf["rope_parameters"]["rope_theta"],
    }
    return {"general.architecture": name} | {f"{name}.{key}": value for key, value in (keys | more).items()}


def stored(case: str) -> dict[str, np.ndarray]:
    """Return a case's tensors as the converter names them."""
    named: dict[str, np.ndarray] = {}
    for name, tensor in read_tensors(case).items():
        layer = re.fullmatch(r"encoder\.layers\.(\d+)\.(.*)", name)
        prefix, suffix = (f"blk.{layer[1]}.", layer[2]) if layer else ("", name)
        stem, _, kind = suffix.rpartition(".")
        if stem in NAMES:
            named[f"{prefix}{NAMES[stem]}.{kind}"] = tensor.astype(np.float32)
    return named


@pytest.mark.models
@pytest.mark.parametrize("case", ARCHITECTURES)
def test_states_are_hf(tmp_path: Path, case: str):
    (tmp_path / "x.gguf").write_bytes(gguf_bytes(metadata(case), gguf_f32(stored(case))))
    checkpoint, hf, expected = GGUFCheckpoint(tmp_path / "x.gguf"), read_hf_config(case), read_tensors(case)
    family = get_family(hf["architectures"][0])
    config = family.read_config(checkpoint.config, checkpoint.tensors)
    assert config == family.read_config(hf | {"layer_norm_eps": float(np.float32(hf["layer_norm_eps"]))})
    model, goldens = Model(ModelSpecs(config, jnp.float32)), read_pooled_goldens(case)
    check_names(model.specs.param_specs(checkpoint.tensors), checkpoint)
    tensors = {name: checkpoint.read(name) for name in checkpoint.tensors}
    assert set(tensors) == {name for name in expected if "pooler" not in name}
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(tensor, expected[name].astype(np.float32), err_msg=name)
    outputs = run_pooled(model, load(model, tensors), goldens)
    for output, golden in zip(outputs.of_tokens, goldens, strict=True):
        np.testing.assert_allclose(output, golden.output, rtol=0, atol=1e-4)


def test_experts_are_refused_by_name(tmp_path: Path):
    data = metadata("nomic") | {"general.architecture": "nomic-bert-moe"}
    (tmp_path / "x.gguf").write_bytes(gguf_bytes(data, gguf_f32(stored("nomic"))))
    with pytest.raises(VLLMValidationError, match=r"'nomic-bert-moe' is not supported; supported: .*nomic-bert"):
        GGUFCheckpoint(tmp_path / "x.gguf")
