"""scripts/lib/shapes.py: each config.json can be read, also with only its first layers."""

from __future__ import annotations

import pytest
from lib.shapes import HUB_IDS, MODELS, with_layers

from jaxllm.models import get_family
from jaxllm.models.config import ModelConfig

pytestmark = pytest.mark.scripts


def read(name: str, num_layers: int | None = None) -> ModelConfig:
    hf = with_layers(MODELS[name], num_layers)
    return get_family(hf["architectures"][0]).read_config(hf)


@pytest.mark.parametrize("name", MODELS)
def test_first_layers(name: str) -> None:
    whole, few = read(name), read(name, 6)
    assert few.layers == whole.layers[:6]
    assert read(name).num_layers >= 6


def test_layers_of_gemma_and_gpt_oss_differ() -> None:
    assert [layer.window for layer in read("gpt-oss-20b", 4).layers] == [128, None, 128, None]
    heads = [(layer.head_dim, layer.num_kv_heads, layer.window) for layer in read("gemma-4-26b", 6).layers]
    assert heads == [(256, 8, 1024)] * 5 + [(512, 2, None)]


def test_hub_ids_are_of_models() -> None:
    assert not HUB_IDS.keys() - MODELS.keys()
