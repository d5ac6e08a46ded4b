"""Adapters as PEFT saves them: what is not applied is refused by name, and bad files are told from good ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm.exceptions import VLLMValidationError
from jaxllm.lora.adapter_weights import load_adapter
from jaxllm.lora.peft import REFUSED, Matrices, PeftAdapter, find_adapter
from jaxllm.models.adapters import AdapterShape
from jaxllm.models.params import array_specs
from tests.e2e.adapter_data import ADAPTERS
from tests.loading.files import safetensors_bytes
from tests.models.running import build_model

Q = "base_model.model.model.layers.0.self_attn.q_proj"
CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}


def save(folder: Path, tensors: Mapping[str, np.ndarray] | None = None, **config: Any) -> Path:
    """Write an adapter, by default of one module."""
    if tensors is None:
        tensors = {f"{Q}.lora_A.weight": np.ones((4, 6), np.float32), f"{Q}.lora_B.weight": np.ones((5, 4), np.float32)}
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    (folder / "adapter_model.safetensors").write_bytes(safetensors_bytes(tensors))
    return folder


def test_b_is_scaled(tmp_path: Path):
    cases: tuple[tuple[dict[str, Any], float], ...] = (
        ({}, 2),
        ({"use_rslora": True}, 4),
        ({"alpha_pattern": {"q_proj": 1}}, 1 / 4),
        ({"alpha_pattern": {"k_proj": 1}}, 2),
        ({"r": 2, "rank_pattern": {r"layers\.\d+\.self_attn\.q_proj": 4}}, 2),
    )
    for config, scale in cases:
        adapter = PeftAdapter(save(tmp_path, **config), 8)
        (module,) = adapter.modules
        assert module == "model.layers.0.self_attn.q_proj"
        down, up = adapter.read(module).down, adapter.read(module).up
        np.testing.assert_array_equal(down, np.ones((4, 6)))
        np.testing.assert_array_equal(up, np.full((5, 4), scale))


@pytest.mark.parametrize("key", REFUSED)
def test_what_is_not_applied_is_refused_by_name(tmp_path: Path, key: str):
    config: dict[str, Any] = {key: ["something"]}
    with pytest.raises(VLLMValidationError, match=key):
        PeftAdapter(save(tmp_path, **config), 8)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "LOHA"}, "peft_type='LOHA'"),
        ({"bias": "all"}, "biases"),
        ({"r": 0}, "r=0"),
        ({"r": True}, "r=True"),
        ({"lora_alpha": None}, "lora_alpha=None"),
        ({"r": 3}, "has rank 4, and adapter_config.json says 3"),
        ({"rank_pattern": {"(q_proj": 4}}, r"rank_pattern of adapter_config.json has '\(q_proj', no regular"),
        ({"rank_pattern": {"q{99999999999}": 4}}, r"has 'q\{99999999999\}', no regular expression"),
        ({"rank_pattern": ["q_proj"]}, "a number for each pattern"),
        ({"rank_pattern": {"q_proj": "4"}}, "a number for each pattern"),
    ],
)
def test_bad_settings(tmp_path: Path, config: dict[str, Any], message: str):
    with pytest.raises(VLLMValidationError, match=message):
        PeftAdapter(save(tmp_path, **config), 8)


def test_a_rank_above_the_largest(tmp_path: Path):
    with pytest.raises(VLLMValidationError, match="rank 4, more than max_lora_rank=2"):
        PeftAdapter(save(tmp_path), 2)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "it has no tensors"),
        ({f"{Q}.lora_A.weight": (4, 6)}, "has only lora_A"),
        ({f"{Q}.lora_A.weight": (4, 6), f"{Q}.lora_B.weight": (5, 3)}, r"\[4, 6\] and lora_B \[5, 3\]"),
        ({f"{Q}.lora_A.weight": (4, 6, 1), f"{Q}.lora_B.weight": (5, 4)}, "do not fit each other"),
        ({"base_model.model.lm_head.weight": (4, 6)}, "only lora_A and lora_B of linear layers are"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": (4, 6)}, "lora_embedding_A, which is not applied"),
        ({f"{Q}.lora_magnitude_vector": (4,)}, "lora_magnitude_vector, which is not applied"),
    ],
)
def test_tensors_that_make_no_adapter(tmp_path: Path, tensors: dict[str, tuple[int, ...]], message: str):
    made = {name: np.zeros(shape, np.float32) for name, shape in tensors.items()}
    with pytest.raises(VLLMValidationError, match=message):
        PeftAdapter(save(tmp_path, made), 8)


def test_numbers_that_are_none(tmp_path: Path):
    """They would reach others' rows: zero times infinity is no zero."""
    matrices = {f"{Q}.lora_A.weight": np.full((4, 6), np.inf), f"{Q}.lora_B.weight": np.ones((5, 4))}
    adapter = PeftAdapter(save(tmp_path, {name: array.astype(np.float32) for name, array in matrices.items()}), 8)
    with pytest.raises(VLLMValidationError, match="not finite"):
        adapter.read(adapter.modules[0])


@pytest.mark.parametrize(
    "module", ["model.lm_head", "vision_tower.encoder.layers.0.self_attn.q_proj", "model.layers.9.self_attn.q_proj"]
)
def test_modules_that_the_model_has_no_linear_layer_for(tmp_path: Path, module: str):
    model = build_model("llama3_tied")
    size = model.config.hidden_size
    name = f"base_model.model.{module}"
    matrices = {f"{name}.lora_A.weight": (4, size), f"{name}.lora_B.weight": (size, 4)}
    folder = save(tmp_path, {name: np.zeros(shape, np.float32) for name, shape in matrices.items()})
    arrays, slot = array_specs(model.specs.param_specs()), model.adapter_specs(AdapterShape(1, 8))
    with pytest.raises(VLLMValidationError, match=f"it is for {module}, and this model has no linear layer"):
        load_adapter(PeftAdapter(folder, 8), arrays, slot)


def test_a_fused_module_is_read_once(monkeypatch: pytest.MonkeyPatch):
    """Phi-3 has queries, keys and values, and gate and up, in one matrix each, which is a part of several of ours."""
    model, read = build_model("phi3"), PeftAdapter.read
    modules: list[str] = []

    def noted(adapter: PeftAdapter, module: str) -> Matrices:
        modules.append(module)
        return read(adapter, module)

    monkeypatch.setattr(PeftAdapter, "read", noted)
    adapter = PeftAdapter(ADAPTERS / "phi3" / "all", 8)
    load_adapter(adapter, array_specs(model.specs.param_specs()), model.adapter_specs(AdapterShape(1, 8)))
    assert sorted(modules) == sorted(adapter.modules)


def test_places(tmp_path: Path):
    assert find_adapter(str(tmp_path)) == tmp_path
    for path in (tmp_path / "none", Path(__file__)):
        with pytest.raises(VLLMValidationError, match="there is no such folder") as refusal:
            find_adapter(str(path))
        assert refusal.value.parameter == "lora_path"
