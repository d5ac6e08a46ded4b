"""The GPU's persistent kernels have a thread block for each multiprocessor, and divide work alike on all GPUs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import grouped_matmul, latent_attention, linear, paged_attention
from pallas_kernels.grouped_matmul import Groups, MatmulShape
from pallas_kernels.latent_attention import LatentShape
from pallas_kernels.linear.cases import FORMATS
from pallas_kernels.paged_attention import NO_WINDOW, AttentionBatch, AttentionShape
from tests.pallas_kernels.gpu import traced
from tests.pallas_kernels.quantized_linear import random_weights

GPUS = {"H100": {"num_cores": 132}, "H100 PCIe": {"num_cores": 114}, "not known": {}}
"""Facts about GPUs, as `pick` takes them."""
BFLOAT16 = jnp.dtype(jnp.bfloat16)


def spec(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def decodes() -> AttentionBatch:
    """Return the specs of a step of 8 decodes."""
    numbers, number, none = spec(8, dtype=jnp.int32), spec(dtype=jnp.int32), spec(0, dtype=jnp.int32)
    fields = dict.fromkeys(AttentionBatch._fields, numbers)
    fields |= {"block_tables_sm": spec(8, 8, dtype=jnp.int32), "num_decodes": number, "num_tiles": number}
    return AttentionBatch(**fields | {"tile_seqs_i": none, "tile_rows_i": none, "row_ends_t": None})  # pyright: ignore[reportArgumentType]


def attend(**device: Any) -> str:
    op, _ = paged_attention.pick(AttentionShape(8, 2, 64, 16, BFLOAT16, BFLOAT16), "gpu", architecture="9.0", **device)
    settings: dict[str, Any] = {"layer": 0, "num_layers": 1, "window": NO_WINDOW, "scale": 1.0}
    rows = spec(8, 8, 64), spec(8, 2, 64), spec(8, 2, 64)
    return traced(jax.jit(lambda *x: op(*x, **settings)), *rows, op.pool_spec(1, 9), decodes())


def attend_latents(**device: Any) -> str:
    op, _ = latent_attention.pick(LatentShape(16, 512, 64, 16, BFLOAT16, BFLOAT16), "gpu", architecture="9.0", **device)
    settings: dict[str, Any] = {"layer": 0, "num_layers": 1, "scale": 1.0}
    return traced(jax.jit(lambda *x: op(*x, **settings)), spec(8, 16, 576), spec(8, 576), op.pool_spec(1, 9), decodes())


def multiply(**device: Any) -> str:
    op, _ = linear.pick("gpu", architecture="9.0", **device)
    weight, _ = random_weights(FORMATS["awq"], (1, 256, 512))
    return traced(jax.jit(lambda x, w: op(x, w, 0)), spec(8, 512), weight)


def multiply_experts(**device: Any) -> str:
    op, _ = grouped_matmul.pick(
        [MatmulShape(8, 256, 128, BFLOAT16, None, BFLOAT16)], "gpu", architecture="9.0", **device
    )
    groups = [spec(8, dtype=jnp.int32)] * 2
    return traced(
        jax.jit(lambda x, w, starts, counts: op(x, w, 0, Groups(starts, counts))),
        spec(256, 128),
        spec(1, 8, 256, 128),
        *groups,
    )


@pytest.mark.parametrize("trace", [attend, attend_latents, multiply, multiply_experts])
def test_the_grid_is_the_devices_and_nothing_else_is(trace: Any) -> None:
    programs = {name: trace(**facts) for name, facts in GPUS.items()}
    assert programs["not known"] == programs["H100"]
    assert programs["H100 PCIe"] != programs["H100"]
    assert programs["H100 PCIe"].replace("114", "132").replace("113:", "131:") == programs["H100"]
