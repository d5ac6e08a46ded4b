"""A mesh spreads a model over devices, each with its part of each parameter, or refuses one that does not divide."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import cast

import jax
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jaxllm.exceptions import VLLMValidationError
from jaxllm.execution.mesh import (
    RULES,
    deal_experts,
    make_mesh,
    param_format,
    param_sharding,
    refusal,
    resolve_mesh,
    spread,
)
from jaxllm.models import ModelConfig, ModelSpecs
from jaxllm.models.params import MESH_AXES, array_specs
from jaxllm.models.registry import get_family, supported_architectures
from tests.execution.support import model_config
from tests.models.tiny import CASES, read_hf_config


def config(**sizes: int) -> ModelConfig:
    """Return a config of layers of 8 query heads, 2 kv heads and an MLP of 48, but for `sizes`."""
    return model_config().with_layers(**{"num_heads": 8, "num_kv_heads": 2, "intermediate_size": 48} | sizes)


@pytest.mark.parametrize(("num_devices", "kv_heads", "kv_repeats"), [(1, 2, 1), (2, 2, 1), (4, 4, 2), (8, 8, 4)])
def test_each_device_has_a_kv_head(num_devices: int, kv_heads: int, kv_repeats: int) -> None:
    layer = spread(config(), num_devices).layers[0]
    assert (layer.num_kv_heads, layer.kv_repeats) == (kv_heads, kv_repeats)
    # Query head i and the kv head that serves it are on one device, and it is the same head as before.
    for head in range(8):
        served_by = head // (8 // kv_heads)
        assert served_by // (kv_heads // num_devices) == head // (8 // num_devices)
        assert served_by // kv_repeats == head // 4


def test_latents_are_not_repeated() -> None:
    latents = get_family("DeepseekV3ForCausalLM").read_config(read_hf_config("deepseek_v3"))
    config_per_device = spread(latents, 2)
    assert config_per_device.num_shards == 2
    assert config_per_device.layers == latents.layers
    specs, mesh = ModelSpecs(config_per_device, "float32").param_specs(), cast(Mesh, AbstractMesh((1, 2), MESH_AXES))
    heads = {name: param_sharding(mesh, specs[f"layers.0.attn.{name}"]).spec for name in ("q_b", "up_k", "up_v")}
    assert heads == dict.fromkeys(heads, PartitionSpec(None, MESH_AXES, None, None))
    assert param_sharding(mesh, specs["layers.0.attn.kv_a"]).is_fully_replicated


@pytest.mark.parametrize(
    ("sizes", "num_devices", "reason", "runs_on"),
    [
        ({}, 3, "8 query heads do not divide", "1, 2, 4, 8"),
        ({}, 16, "8 query heads do not divide", "1, 2, 4, 8"),
        ({"num_heads": 9, "num_kv_heads": 3, "intermediate_size": 1536}, 2, "9 query heads do not divide", "1, 3"),
        ({"num_heads": 12, "num_kv_heads": 3}, 2, "3 kv heads neither divide nor are divided", "1, 3, 6, 12"),
        ({"intermediate_size": 50}, 4, "MLP width of 50 does not divide", "1, 2"),
    ],
)
def test_sizes_that_do_not_divide(sizes: dict[str, int], num_devices: int, reason: str, runs_on: str) -> None:
    with pytest.raises(VLLMValidationError, match=re.escape(f"{reason}. It runs on {runs_on}.")) as caught:
        spread(config(**sizes), num_devices)
    assert (caught.value.parameter, caught.value.value) == ("tensor_parallel_size", num_devices)


def test_the_named_sizes_work() -> None:
    for heads in range(1, 25):
        for kv_heads in (count for count in range(1, heads + 1) if heads % count == 0):
            sizes = config(num_heads=heads, num_kv_heads=kv_heads, intermediate_size=24)
            for count in (count for count in range(1, heads + 1) if refusal(sizes, count) is None):
                assert spread(sizes, count).layers[0].num_kv_heads % count == 0


@pytest.mark.parametrize("case", CASES)
def test_every_logical_axis_has_a_rule(case: str) -> None:
    hf = read_hf_config(case)
    specs = ModelSpecs(get_family(hf["architectures"][0]).read_config(hf), "float32").param_specs()
    assert {axis for spec in specs.values() for axis in spec.axes} <= RULES.keys()
    assert len(supported_architectures()) > 5


def test_parts_of_parameters() -> None:
    mesh = AbstractMesh((1, 4), MESH_AXES)
    specs = ModelSpecs(spread(replace(config(), vocab_size=302), 4), "float32").param_specs()
    parts = {path: param_sharding(mesh, spec).spec for path, spec in specs.items()}  # type: ignore[arg-type]
    assert parts["layers.0.attn.k"] == PartitionSpec(None, MESH_AXES, None, None)
    assert parts["layers.0.attn.o"] == PartitionSpec(None, None, MESH_AXES)
    assert parts["layers.0.mlp.down"] == PartitionSpec(None, None, MESH_AXES)
    assert parts["embed.table"] == PartitionSpec(None, None), "302 ids do not divide"


def test_experts_are_dealt_out_and_each_is_cut() -> None:
    experts = get_family("Qwen3MoeForCausalLM").read_config(read_hf_config("qwen3_moe"))
    sizes = experts.with_layers(num_heads=8, num_kv_heads=8)
    specs, mesh = ModelSpecs(spread(sizes, 8, 4), "float32").param_specs(), cast(Mesh, AbstractMesh((4, 2), MESH_AXES))
    parts = {path: param_sharding(mesh, array).spec for path, array in array_specs(specs).items()}
    assert parts["layers.0.mlp.experts.gate_up"] == PartitionSpec(None, ("expert",), ("model",), None, None)
    assert parts["layers.0.mlp.experts.down"] == PartitionSpec(None, ("expert",), None, ("model",))
    assert parts["layers.0.attn.o"] == PartitionSpec(None, None, MESH_AXES)
    assert refusal(sizes, 8, 4) is None
    with pytest.raises(VLLMValidationError, match="16 experts are not to be dealt out among the 3 devices") as caught:
        spread(sizes.with_layers(num_heads=6, num_kv_heads=6), 6, 3)
    assert caught.value.parameter == "mesh"


def test_whole_experts_as_far_as_their_number_divides() -> None:
    devices = [jax.devices()[0]] * 12
    of_16 = get_family("Qwen3MoeForCausalLM").read_config(read_hf_config("qwen3_moe"))
    assert deal_experts(make_mesh(devices), of_16).shape == {"expert": 4, "model": 3}
    assert deal_experts(make_mesh(devices, 2), of_16).shape == {"expert": 2, "model": 6}, "a user's mesh stays"
    with pytest.raises(VLLMValidationError, match="has no experts") as caught:
        deal_experts(make_mesh(devices), config())
    assert caught.value.parameter == "enable_expert_parallel"


def test_tpus_hold_tables_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = make_mesh(jax.devices()[:1])
    specs = ModelSpecs(config(), "float32").param_specs()
    assert param_format(mesh, specs["embed.table"]) == param_sharding(mesh, specs["embed.table"])
    monkeypatch.setattr("jaxllm.execution.mesh.LAID_OUT", ("cpu",))
    formats = {path: param_format(mesh, spec) for path, spec in specs.items()}
    laid_out = {path: given.layout for path, given in formats.items() if isinstance(given, Format)}
    assert laid_out == dict.fromkeys({"embed.table", "lm_head.table"} & specs.keys(), Layout(major_to_minor=(0, 1)))


def test_a_mesh_of_ones_own() -> None:
    device = jax.devices()[0]
    own_mesh = jax.make_mesh((1, 1), ("data", "model"))
    assert resolve_mesh(1, own_mesh) == make_mesh([device])
    for tensor_parallel_size, mesh, parameter in (
        (2, None, "tensor_parallel_size"),
        (2, own_mesh, "tensor_parallel_size"),
        (1, jax.make_mesh((1,), ("x",)), "mesh"),
    ):
        with pytest.raises(VLLMValidationError) as caught:
            resolve_mesh(tensor_parallel_size, mesh)
        assert caught.value.parameter == parameter
