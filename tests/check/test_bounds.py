"""The bounds' arithmetic equals that by hand for small models."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import jax
import pytest
from shapes import MODELS

from jaxllm.check.bounds import LayerWork, Work, count_work
from jaxllm.execution.mesh import make_mesh
from jaxllm.models import Model, get_family

WORK = Work(
    num_devices=2, bytes_per_second=1000.0, flops_per_second=5000.0, param_bytes=400, token_flops=900, head_flops=100,
    layers=tuple(LayerWork(window, kv_bytes=2.0, pair_flops=10) for window in (None, 8, None)),
    max_num_batched_tokens=16,
)  # fmt: skip


def test_chunks_bound_keys_and_pairs():
    layer = LayerWork(None, kv_bytes=2.0, pair_flops=10, attention_chunk=8)
    for length in (1, 7, 8, 9, 16, 21):
        seen = [position % 8 + 1 for position in range(length)]
        assert (layer.num_keys(length), layer.num_pairs(length)) == (seen[-1], sum(seen))
    work = replace(WORK, layers=(layer, layer))
    assert work.prefill(21).tokens_per_second == pytest.approx(21 / ((21 * 900 + 100 + 2 * 10 * 87) / (2 * 5000.0)))


def test_decode_is_bound_by_what_is_read():
    bound = WORK.decode(4, 20)
    read = 400 + 4 * (20 + 8 + 20) * 2.0  # 784 bytes: 0.784 s
    assert read / 1000.0 > 4 * (900 + 100 + 48 * 10) / (2 * 5000.0)
    assert bound.tokens_per_second == pytest.approx(4 / 0.784)
    assert (bound.phase, bound.batch, bound.length, bound.limited_by) == ("decode", 4, 20, "bandwidth")


def test_decode_is_bound_by_matmuls_where_they_take_longer():
    bound = replace(WORK, bytes_per_second=1e9).decode(4, 20)
    assert bound.tokens_per_second == pytest.approx(4 / (4 * 1480 / 10_000))
    assert bound.limited_by == "matmul"


def test_prefill_counts_each_pair_once():
    pairs = 210 + (36 + 12 * 8) + 210  # of 20 tokens: 20 * 21 / 2 in two layers; 8 * 9 / 2, then 12 times 8
    flops = 20 * 900 + 100 + pairs * 10
    bound = WORK.prefill(20)
    assert bound.tokens_per_second == pytest.approx(20 / (flops / 10_000))
    slow = replace(WORK, bytes_per_second=10.0).prefill(20)
    assert slow.tokens_per_second == pytest.approx(20 / (2 * 400 / 10.0))  # two steps of 16 read all parameters
    assert slow.limited_by == "bandwidth"


@pytest.mark.parametrize(
    ("name", "billions", "read_billions"),
    [("llama-3.2-1b", 1.2358, 1.2358), ("qwen3-8b", 8.1907, 7.5684), ("llama-3.3-70b", 70.5537, 69.503)],
)
def test_real_models(name: str, billions: float, read_billions: float):
    """Parameters are as published; a table of embeddings that are only looked up (151,936 x 4096, ...) is not read."""
    hf = MODELS[name]
    config = get_family(hf["architectures"][0]).read_config(hf)
    specs, layer = Model(config, "bfloat16").param_specs(), config.layers[0]
    assert sum(prod(spec.shape) for spec in specs.values()) / 1e9 == pytest.approx(billions, abs=1e-3)
    work = count_work(
        config,
        specs,
        make_mesh(jax.devices()[:1]),
        kv_itemsize=2,
        max_num_batched_tokens=2048,
        bytes_per_second=1.0,
        flops_per_second=1.0,
    )
    assert work.param_bytes / 2e9 == pytest.approx(read_billions, abs=1e-3)
    assert (work.token_flops + work.head_flops) / 2e9 == pytest.approx(read_billions, rel=1e-4)  # norms aside
    assert work.layers[0].kv_bytes == 4 * layer.num_kv_heads * layer.head_dim
