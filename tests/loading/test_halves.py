"""Matrices of 16 bits stay so where a CPU's own kernels compute in float32: their numbers are the checkpoint's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import EngineArgs
from jaxllm.loading.load import init_dummy, load_params
from jaxllm.models.params import array_specs
from jaxllm.models.specs import ModelSpecs
from jaxllm.resolve.engine_config import EngineConfig
from jaxllm.resolve.model import checked_model
from pallas_kernels.weights import WeightFormat
from pallas_kernels.weights.held import Quantized
from tests.loading.files import safetensors_bytes
from tests.models.tiny import folder, read_tensors


def configured(model: Path, **arguments: Any) -> EngineConfig:
    defaults: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True}
    return EngineArgs(str(model), **(defaults | arguments)).create_engine_config()


def values_of(held: Mapping[str, Any]) -> set[str | None]:
    """Return what the codes of quantized matrices stand for, and None if others are held as they are computed with."""
    specs = array_specs(held).values()
    return {None if spec.format is None else spec.format.values for spec in specs if spec.num_inputs}


def leaves(params: Any) -> list[Any]:
    return jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, Quantized))


def one_by_one(specs: Mapping[str, Any], config: EngineConfig) -> Any:
    """Return the numbers of one parameter, in an array of its own."""
    [(path, spec)] = specs.items()
    [held] = leaves(load_params({path: replace(spec, segment=None)}, config.checkpoint))
    return (held.numbers() if isinstance(held, Quantized) else held).reshape(spec.shape)


@pytest.mark.loading
@pytest.mark.parametrize("case", ["llama3_tied", "qwen2", "qwen3_moe", "gemma4_e2b", "nemotron_h", "deepseek_v3"])
def test_numbers_are_those_of_float32(case: str):
    config = configured(folder(case))
    model, specs = checked_model(config)
    plain = ModelSpecs(config.model_config, jnp.float32, model.specs.loop).param_specs(config.checkpoint.tensors)
    assert values_of(specs) == ({"bfloat16", None} if case == "gemma4_e2b" else {"bfloat16"}), "which has rows of 8"
    pairs = zip(
        leaves(load_params(specs, config.checkpoint)), leaves(load_params(plain, config.checkpoint)), strict=True
    )
    num_halves = 0
    for held, wide in pairs:
        is_half = isinstance(held, Quantized)
        numbers = held.numbers().reshape(wide.shape) if is_half else held
        num_halves += is_half
        assert held.codes.dtype == jnp.bfloat16 if is_half else held.dtype == jnp.float32
        np.testing.assert_array_equal(numbers, wide)
    assert num_halves == sum(spec.format is not None for spec in array_specs(specs).values())


def test_outputs_in_columns_are_turned_and_widened():
    """As GPT-2 has them, whose embedding alone stays as it is."""
    _, specs = checked_model(configured(folder("gpt2")))
    held = {path for path, spec in array_specs(specs).items() if spec.format is not None}
    assert held == {"embed.table"}
    assert values_of(specs) == {"bfloat16", None}


def written(case: str, where: Path, tensors: Mapping[str, np.ndarray]) -> EngineConfig:
    """Write a case's checkpoint with other tensors, and return the configuration of an engine of it."""
    (where / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    text = json.loads((folder(case) / "config.json").read_text())
    (where / "config.json").write_text(json.dumps(text))
    return configured(where)


def test_float16(tmp_path: Path):
    tensors = {name: tensor.astype(np.float16) for name, tensor in read_tensors("qwen3").items()}
    config = written("qwen3", tmp_path, tensors)
    _, specs = checked_model(config)
    assert values_of(specs) == {"float16"}
    table = load_params(specs, config.checkpoint)["embed"]["table"]
    np.testing.assert_array_equal(table.codes, tensors["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    ("case", "wide"), [("qwen3_moe", "experts.1."), ("qwen3", "embed"), ("qwen3", "k_proj"), ("qwen3", "norm")]
)
def test_matrices_in_float32_among_others(tmp_path: Path, case: str, wide: str):
    """They stay exact: experts in several dtypes, a table, a part of a merged array."""
    whole = {name: tensor.astype(np.float32) * 1.001 for name, tensor in read_tensors(case).items() if wide in name}
    config = written(case, tmp_path, read_tensors(case) | whole)
    model, specs = checked_model(config)
    assert specs == model.specs.param_specs(), "a model knows its parameters without the checkpoint"
    plain = ModelSpecs(config.model_config, jnp.float32, model.specs.loop).param_specs(config.checkpoint.tensors)
    held = {path: spec.format for path, spec in specs.items() if spec.num_inputs}
    assert None in held.values() or wide == "norm"
    assert len(set(held.values()) - {None}) == 1
    numbers = {path: one_by_one({path: spec}, config) for path, spec in specs.items()}
    for path, spec in plain.items():
        np.testing.assert_array_equal(numbers[path], one_by_one({path: spec}, config))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"dtype": "bfloat16"}, {None}),
        ({"attention_config": {"backend": "xla"}}, {None}),
        ({"quantization": "int8"}, {"integer"}),
    ],
    ids=str,
)
def test_where_weights_are_held_otherwise(arguments: dict[str, Any], expected: set[str | None]):
    _, specs = checked_model(configured(folder("qwen3"), **arguments))
    assert values_of(specs) == expected


def test_random_weights_are_held_alike_and_small():
    _, specs = checked_model(configured(folder("qwen3"), load_format="dummy"))
    assert values_of(specs) == {"bfloat16"}
    for held in leaves(init_dummy(specs, seed=0)):
        numbers = held.numbers() if isinstance(held, Quantized) else held - jnp.round(held.mean())
        assert 0.01 < numbers.std() < 0.03


def test_rows_that_no_kernel_takes_are_widened():
    """Plain XLA would widen them in every step."""
    form = WeightFormat(16, values="bfloat16")
    assert form.width("codes", 48, packed=True) == 48
    with pytest.raises(ValueError, match="rows of 40 numbers are no multiple of 16"):
        form.width("codes", 40, packed=True)
