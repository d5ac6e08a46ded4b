"""The bounds' arithmetic equals that by hand for small models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

import jax
import pytest
from lib.shapes import MODELS

from jaxllm.check.bounds import ExpertWork, LayerWork, Work, count_work
from jaxllm.execution.mesh import make_mesh
from jaxllm.models import LayerLoop, ModelSpecs, get_family
from jaxllm.models.config import ModelConfig
from jaxllm.models.params import ParamSpec
from tests.models.tiny import read_hf_config

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


def test_latents_are_read_once_and_by_every_device():
    config = get_family("DeepseekV3ForCausalLM").read_config(read_hf_config("deepseek_v3"))
    mesh = make_mesh(jax.devices()[:1])
    specs = ModelSpecs(config, "bfloat16").param_specs()
    figures = {"max_num_batched_tokens": 16, "bytes_per_second": 1.0, "flops_per_second": 1.0}
    work = count_work(config, specs, mesh, kv_itemsize=2, **figures)
    # Two heads; a score is a sum of 32 + 16 products, and 32 numbers of the output are one.
    assert {(layer.kv_bytes, layer.pair_flops) for layer in work.layers} == {(2 * 48, 2 * 2 * (48 + 32))}


def test_indexers_score_all_tokens_on_every_device_and_attention_reads_those_they_choose():
    config = get_family("GlmMoeDsaForCausalLM").read_config(read_hf_config("glm_moe_dsa"))
    mesh = make_mesh(jax.devices()[:1])
    figures = {"max_num_batched_tokens": 16, "bytes_per_second": 1.0, "flops_per_second": 1.0}
    work = count_work(config, ModelSpecs(config, "bfloat16").param_specs(), mesh, kv_itemsize=1, **figures)
    attention, indexers = work.layers[:5], work.layers[5:]
    assert {(layer.kv_bytes, layer.num_keys(40), layer.num_keys(7)) for layer in attention} == {(48, 12, 7)}
    # 16 heads of 32; the keys are not rounded with the latents.
    assert [(layer.kv_bytes, layer.pair_flops, layer.num_keys(40)) for layer in indexers] == [(64, 2 * 16 * 32, 40)] * 3


@pytest.mark.parametrize("window", [None, 1, 4, 9, 30])
def test_an_encoder_sees_ahead_as_far_as_back(window: int | None):
    layer = LayerWork(window, kv_bytes=2.0, pair_flops=10, causal=False)
    for length in (1, 5, 9, 20):
        pairs = [(query, key) for query in range(length) for key in range(length)]
        assert layer.num_pairs(length) == sum(abs(query - key) < (window or length) for query, key in pairs)


def test_texts_are_read_together():
    work = replace(WORK, flops_per_second=1e9)
    assert work.pool(3, 8).tokens_per_second == pytest.approx(24 / 0.8)  # 24 tokens take two steps of 16
    assert work.pool(2, 8).tokens_per_second == pytest.approx(16 / 0.4)


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


def test_a_step_reads_the_experts_that_its_tokens_choose():
    """One of four experts for each token: 3 tokens choose 1 + 3/4 + 9/16 of them, 4 tokens 27/64 of one more."""
    work = replace(WORK, max_num_batched_tokens=4, layers=(), experts=(ExpertWork(4, 1, 800),))
    assert work.decode(1, 20).tokens_per_second == pytest.approx(1 / 0.6)  # 400 bytes, and 200 of an expert
    assert work.decode(3, 20).tokens_per_second == pytest.approx(3 / (0.4 + 0.2 * 37 / 16))
    slow = replace(work, flops_per_second=1e9)
    assert slow.prefill(7).tokens_per_second == pytest.approx(7 / (2 * 0.4 + 0.2 * 175 / 64 + 0.2 * 37 / 16))
    assert slow.prefill(8).tokens_per_second == pytest.approx(8 / (2 * 0.4 + 2 * 0.2 * 175 / 64))


def test_a_pair_of_experts_is_read_with_the_chance_that_one_chooses_it():
    """A token of two chooses a given one of four experts with 1/2, and neither does with 1/4."""
    assert ExpertWork(4, 2, 1000).expected_bytes(2) == pytest.approx(750)


@pytest.mark.parametrize("loop", [LayerLoop.SCAN, LayerLoop.UNROLL])
def test_a_token_is_multiplied_by_its_own_experts(loop: LayerLoop):
    """gpt-oss-20b has 3.6 billion parameters at work for a token, as published, and Mixtral 12.9: 2 of 8 experts."""
    assert _active("gpt-oss-20b", loop) == pytest.approx(
        24 * (2880 * (2 * 64 + 2 * 8) * 64 + 32 * 2880 + 4 * 3 * 2880**2) + 201_088 * 2880
    )
    mixtral = 32 * (4096 * (2 * 32 + 2 * 8) * 128 + 8 * 4096 + 2 * 3 * 4096 * 14_336) + 32_000 * 4096
    assert _active("mixtral-8x7b", loop) == pytest.approx(mixtral)


def _active(name: str, loop: LayerLoop) -> float:
    """Return how many numbers a token is multiplied by."""
    config = _read(name)
    work = _count(config, ModelSpecs(config, "bfloat16", loop).param_specs())
    return (work.token_flops + work.head_flops) / 2


@pytest.mark.parametrize(
    ("name", "billions", "expert_billions"),
    [
        ("qwen3-30b-a3b", 30.5321, 48 * 128 * 3 * 768 * 2048 / 1e9),
        ("mixtral-8x7b", 46.7028, 32 * 8 * 3 * 14_336 * 4096 / 1e9),
        ("gpt-oss-20b", 20.9148, 24 * 32 * (3 * 2880**2 + 3 * 2880) / 1e9),
        ("gemma-4-26b", 25.2331, 30 * 128 * 3 * 704 * 2816 / 1e9),
    ],
)
def test_experts_are_read_apart(name: str, billions: float, expert_billions: float):
    """Parameters are as published; those of all experts are as many as layers, experts and their sizes make."""
    config = _read(name)
    specs = ModelSpecs(config, "bfloat16").param_specs()
    table = 0 if config.tie_word_embeddings else prod(specs["embed.table"].shape) / 1e9
    assert sum(prod(spec.shape) for spec in specs.values()) / 1e9 == pytest.approx(billions, abs=1e-3)
    work = _count(config, specs)
    assert sum(each.bytes for each in work.experts) / 2e9 == pytest.approx(expert_billions, rel=1e-6)
    router = sum(prod(spec.shape) for path, spec in specs.items() if "router" in path) / 1e9  # in float32
    rest = billions - expert_billions - table + router
    assert work.param_bytes / 2e9 == pytest.approx(rest, abs=1e-3)


@pytest.mark.parametrize(
    ("name", "billions", "read_billions"),
    [("llama-3.2-1b", 1.2358, 1.2358), ("qwen3-8b", 8.1907, 7.5684), ("llama-3.3-70b", 70.5537, 69.503)],
)
def test_real_models(name: str, billions: float, read_billions: float):
    """Parameters are as published; a table of embeddings that are only looked up (151,936 x 4096, ...) is not read."""
    config = _read(name)
    specs, layer = ModelSpecs(config, "bfloat16").param_specs(), config.layers[0]
    assert sum(prod(spec.shape) for spec in specs.values()) / 1e9 == pytest.approx(billions, abs=1e-3)
    work = _count(config, specs)
    assert work.param_bytes / 2e9 == pytest.approx(read_billions, abs=1e-3)
    assert (work.token_flops + work.head_flops) / 2e9 == pytest.approx(read_billions, rel=1e-4)  # norms aside
    assert work.layers[0].kv_bytes == 4 * layer.num_kv_heads * layer.head_dim


def _read(name: str) -> ModelConfig:
    hf = MODELS[name]
    return get_family(hf["architectures"][0]).read_config(hf)


def _count(config: ModelConfig, specs: Mapping[str, ParamSpec]) -> Work:
    return count_work(
        config,
        specs,
        make_mesh(jax.devices()[:1]),
        kv_itemsize=2,
        max_num_batched_tokens=2048,
        bytes_per_second=1.0,
        flops_per_second=1.0,
    )
