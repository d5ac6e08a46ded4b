"""Each of several devices encodes with the whole tower, in the kernel of its platform."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from jaxllm.execution.encoders.patches import EncoderShape, batch_spec, run_encoder
from jaxllm.execution.programs.compiler import PLATFORMS as JAX_NAMES
from jaxllm.models.params import MESH_AXES, array_specs, unflatten
from jaxllm.models.towers.tower import Tower
from pallas_kernels.segment_attention import SegmentAttention
from tests.models.test_towers import read_case


@pytest.mark.parametrize(("platform", "kernel"), [("tpu", "@tpu_custom_call"), ("gpu", "@mosaic_gpu_v2")])
def test_a_kernel_is_run_on_each_device(platform: str, kernel: str) -> None:
    # XLA does not share out kernels of TPUs, and lowering fails for one outside of what each device does by itself.
    specs = read_case("qwen3_vl").make_tower(dtype=jnp.bfloat16).specs
    tower = Tower(specs, attention=SegmentAttention(platform))
    mesh = AbstractMesh((1, 2), MESH_AXES)
    params = {
        path: jax.ShapeDtypeStruct(array.shape, array.dtype) for path, array in array_specs(specs.param_specs()).items()
    }
    batch = batch_spec(tower, EncoderShape(256))
    features = jax.ShapeDtypeStruct((64, tower.settings.output_size), jnp.bfloat16)
    slots = jax.ShapeDtypeStruct(batch.places_qk.shape[:1], np.int32)
    everywhere = NamedSharding(mesh, PartitionSpec())
    program = jax.jit(partial(run_encoder, tower=tower, mesh=mesh), in_shardings=everywhere, out_shardings=everywhere)
    traced = program.trace(unflatten(params), features, batch, slots)
    text = traced.lower(lowering_platforms=(JAX_NAMES[platform],)).as_text()
    assert kernel in text
    assert text.count("sdy.manual_computation") == 1
