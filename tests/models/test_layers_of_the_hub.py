"""MiMo V2, Step 3.5 and Ling 3.0, with layers of several shapes, are read from the keys of the hub."""

from __future__ import annotations

from dataclasses import replace

import pytest
from check.architectures import read_cases
from lib.shapes import MODELS

from jaxllm.models import ModelConfig, get_family
from jaxllm.models.mixer_specs import DeltaSpec

pytestmark = pytest.mark.models


def read(name: str) -> ModelConfig:
    [hf] = [case.config for case in read_cases() if case.name == name]
    return get_family(name).read_config(hf)


def test_mimo_v2_flash() -> None:
    config, hf = read("MiMoV2FlashForCausalLM"), MODELS["mimo-v2-flash"]
    first, second = config.layers[:2]
    assert [layer.window is None for layer in config.layers] == [not each for each in hf["hybrid_layer_pattern"]]
    assert (first.num_kv_heads, first.sinks, first.moe) == (4, False, None)
    assert (second.num_kv_heads, second.sinks, second.window, second.v_dim) == (8, True, 129, 128)
    assert [(rope.theta, rope.rotary_dim(192)) for rope in config.ropes] == [(5e6, 64), (1e4, 64)]
    assert config.norm_eps == 1e-5
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    of_hf = {name: hf[name] for name in (*sizes, "max_position_embeddings")}
    assert get_family("MiMoV2FlashForCausalLM").read_config(of_hf) == config  # HF's defaults are this model's


def test_step_3_5_flash() -> None:
    config = read("Step3p5ForCausalLM")
    assert [layer.num_heads for layer in config.layers[:5]] == [64, 96, 96, 96, 64]
    assert [layer.mlp_limit for layer in config.layers[-3:]] == [None, 16.0, 16.0]
    assert [layer.moe and layer.moe.act_limit for layer in config.layers[2:4]] == [None, None]
    assert [layer.moe and layer.moe.act_limit for layer in config.layers[-2:]] == [7.0, 7.0]
    assert [layer.moe is None for layer in config.layers[:4]] == [True, True, True, False]
    ropes = [(rope.rope_type, rope.theta, rope.rotated) for rope in config.ropes]
    assert ropes == [("llama3", 5e6, 0.5), ("default", 1e4, 1.0)]


def test_ling_3_flash() -> None:
    config = read("BailingMoeV3ForCausalLM")
    first, attending = config.layers[0], config.layers[5]
    assert isinstance(first.state, DeltaSpec)
    assert [layer.state is None for layer in config.layers] == [number % 6 == 5 for number in range(42)]
    sizes = first.state.num_key_heads, first.state.key_dim, first.state.gate_rank, first.state.least_log_decay
    assert sizes == (32, 128, None, -5.0)
    assert (attending.latent and attending.latent.key_dim, attending.scale) == (576, 192**-0.5)
    assert [layer.moe is None for layer in config.layers[:3]] == [True, True, False]
    hf = {"architectures": ["BailingMoeV3ForCausalLM"], "head_dim": 128}  # HF's defaults are this model's
    assert get_family("BailingMoeV3ForCausalLM").read_config(hf) == config
    unbounded = get_family("BailingMoeV3ForCausalLM").read_config(hf | {"kda_safe_gate": False})
    assert unbounded.layers[0].state == replace(first.state, least_log_decay=None)
