"""GGUF files of models with states and latents: tensors, config and log-probabilities are those of HF."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.loading.gguf.checkpoint import GGUFCheckpoint
from jaxllm.loading.names import check_names
from jaxllm.models import Model, ModelSpecs, get_family
from tests.loading.gguf_layer_files import ARCHITECTURES, hf_config, hf_tensors, layer_gguf
from tests.models.running import Runner, load
from tests.models.tiny import read_goldens

TOLERANCE = 1e-4


def open_gguf(path: Path, data: bytes) -> GGUFCheckpoint:
    (path / "x.gguf").write_bytes(data)
    return GGUFCheckpoint(path / "x.gguf")


@pytest.mark.parametrize("case", ARCHITECTURES)
def test_config_and_tensors_are_hf(tmp_path: Path, case: str):
    checkpoint, hf, expected = open_gguf(tmp_path, layer_gguf(case)), hf_config(case), hf_tensors(case)
    architecture = hf["architectures"][0].replace("ConditionalGeneration", "CausalLM")
    assert checkpoint.config["architectures"] == [architecture]
    family = get_family(architecture)
    if case in ("qwen3_5_moe", "nemotron3"):  # no layer has this width
        hf["intermediate_size"] = hf["moe_intermediate_size"]
    rounded = {key: float(np.float32(value)) if isinstance(value, float) else value for key, value in hf.items()}
    config = family.read_config(checkpoint.config)
    assert config == family.read_config(rounded)
    check_names(ModelSpecs(config, "float32").param_specs(checkpoint.tensors), checkpoint)
    if case == "qwen3_next":  # a file has the projections of Qwen3.5
        projections = {name for name in expected if name.endswith("in_proj_qkvz.weight")}
        split = {name.replace("qkvz", part) for name in projections for part in ("qkv", "z")}
        assert set(checkpoint.tensors) == set(expected) - projections | split
        expected = {name: tensor for name, tensor in expected.items() if name not in projections}
    else:
        assert set(checkpoint.tensors) == set(expected)
    for name, tensor in expected.items():
        info, result = checkpoint.tensors[name], checkpoint.read(name)
        assert (info.shape, result.shape, info.dtype) == (tensor.shape, tensor.shape, "float32"), name
        np.testing.assert_allclose(result, tensor, rtol=0, atol=1e-6, err_msg=name)
        np.testing.assert_array_equal(checkpoint.read(name, len(tensor) - 1), result[-1], err_msg=name)
        checkpoint.release(name)


@pytest.mark.models
@pytest.mark.parametrize("case", ARCHITECTURES)
def test_greedy_decoding_matches_hf(tmp_path: Path, case: str):
    checkpoint = open_gguf(tmp_path, layer_gguf(case))
    tensors = {name: checkpoint.read(name) for name in checkpoint.tensors}
    config = get_family(checkpoint.config["architectures"][0]).read_config(checkpoint.config, tensors)
    model = Model(ModelSpecs(config, jnp.float32))
    golden = read_goldens(case)[0]
    logprobs, tokens = Runner(model, load(model, tensors)).incremental(golden, 64)
    np.testing.assert_array_equal(tokens, golden.tokens)
    np.testing.assert_allclose(logprobs, golden.logprobs, rtol=0, atol=TOLERANCE)
