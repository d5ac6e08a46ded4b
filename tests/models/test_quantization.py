"""Weights in int8 are as near as 8 bits allow, and only weights of matmuls are quantized."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.loading.open import open_checkpoint
from jaxllm.models import LayerLoop, Model, ModelSpecs, get_family
from jaxllm.models.params import array_specs, stored
from jaxllm.models.quantization import METHODS, NF4, quantize
from pallas_kernels.weights import CODEBOOKS, WeightFormat
from pallas_kernels.weights.held import Quantized
from tests.models.running import Runner, build_model, load
from tests.models.tiny import CASES, read_goldens, read_tensors

pytestmark = pytest.mark.device

QUANTIZED = Path(__file__).parents[1] / "data/quantized"
INT8: WeightFormat = METHODS["int8"]


def rounded(weight: np.ndarray) -> np.ndarray:
    """Return an HF matrix [out, in] as rounded to int8; HF's other tensors have one dimension."""
    if weight.ndim < 2:
        return weight
    held = quantize(jnp.asarray(weight), 1, INT8)
    return np.asarray(held.codes) * np.asarray(held.scales)


@pytest.mark.parametrize("num_inputs", [1, 2])
def test_is_the_nearest(num_inputs: int) -> None:
    weight = np.random.default_rng(0).standard_normal((6, 5, 64)).astype(np.float32)
    weight[2] = 0
    weight[3, 2] *= 1e-30
    held = quantize(jnp.asarray(weight), num_inputs, INT8)
    values, scales = np.asarray(held.codes), np.asarray(held.scales)
    weight = weight.reshape(held.shape)
    assert values.dtype == np.int8
    assert (scales.dtype, scales.shape) == (np.float32, (*weight.shape[:-1], 1))
    assert (abs(values * scales - weight) <= 0.5001 * scales).all()
    largest = abs(values.astype(int)).max(axis=-1)
    assert set(np.unique(largest)) == {0, 127}
    assert values.min() >= -127


@pytest.mark.parametrize("is_packed", [False, True])
def test_nf4_is_the_nearest_code_of_each_block_of_64(is_packed: bool) -> None:
    weight = np.random.default_rng().standard_normal((6, 2, 128)).astype(np.float32)
    weight[3] = 0
    held = quantize(jnp.asarray(weight), 1, NF4, is_packed=is_packed)
    blocks = weight.reshape(-1, 64)
    largest = abs(blocks).max(axis=-1, keepdims=True)
    table = np.array(CODEBOOKS["nf4"], np.float32)
    nearest = abs(blocks[..., None] / np.where(largest == 0, 1, largest)[..., None] - table).argmin(axis=-1)
    np.testing.assert_array_equal(held.parts["scales"], largest.reshape(6, 2, 2))
    numbers = (table[nearest] * largest).reshape(weight.shape)
    np.testing.assert_array_equal(held.numbers().reshape(weight.shape), numbers)
    # Rounding what was rounded changes nothing.
    again = quantize(jnp.asarray(numbers), 1, NF4, is_packed=is_packed)
    np.testing.assert_array_equal(again.numbers().reshape(weight.shape), numbers)


def test_nf4_makes_what_bitsandbytes_made() -> None:
    checkpoint = open_checkpoint(str(QUANTIZED / "bnb_nf4"))
    names = [name for name in checkpoint.tensors if checkpoint.format_of(name) is not None]
    assert names
    for name in names:
        held = quantize(jnp.asarray(checkpoint.read(name)), 1, NF4)
        for part in NF4.parts:
            np.testing.assert_array_equal(np.asarray(held.parts[part], np.float32), checkpoint.read_part(name, part))


def test_nf4_leaves_embedding_and_head() -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 96,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
    specs = ModelSpecs(get_family("LlamaForCausalLM").config_from_hf(config), jnp.bfloat16, quantization="bitsandbytes")
    rounded = {path.split(".", 2)[-1] for path, spec in specs.param_specs().items() if spec.format == NF4}
    assert rounded == {"attn.q", "attn.k", "attn.v", "attn.o", "mlp.gate", "mlp.up", "mlp.down"}


@pytest.mark.parametrize("loop", [LayerLoop.SCAN, LayerLoop.IN_PLACE])
@pytest.mark.parametrize("case", ["llama_bias", "qwen3", "gemma3", "opt_350m"])
def test_computes_with_the_rounded_weights(case: str, loop: LayerLoop) -> None:
    tensors = read_tensors(case)
    quantized, plain = build_model(case, loop=loop, quantization="int8"), build_model(case)
    golden = read_goldens(case)[0]
    got = Runner(quantized, load(quantized, tensors)).whole(golden)
    added = {name: each for name, each in tensors.items() if "embed_positions" in name}
    weights = {name: rounded(each) for name, each in tensors.items()} | added
    expected = Runner(plain, load(plain, weights)).whole(golden)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4)
    unrounded = Runner(plain, load(plain, tensors)).whole(golden)
    assert 1e-3 < abs(got - unrounded).max() < 1, "it is another model, but near"


@pytest.mark.parametrize("case", CASES)
def test_only_matrices_are_quantized(case: str) -> None:
    model = build_model(case, dtype=jnp.bfloat16, quantization="int8")
    for path, spec in model.specs.param_specs(read_tensors(case)).items():
        first = spec.hf_shape[0] if spec.hf_shape else 0
        num_axes = len(spec.hf_shape) - (spec.num_experts == first and len(spec.sources) < first)
        is_exact = (
            path == "positions" or "norm" in path or path.endswith("bias") or "router" in path or "shared_gate" in path
        )
        is_exact |= path.endswith(("attn.up_k", "attn.up_v"))  # each head has its own matrix
        is_exact |= path.endswith("attn.indexer.weight")  # one number for each of the indexer's heads, as a router's
        is_exact |= path.endswith(("recurrent.log_rate", "recurrent.mixed", "recurrent.step"))  # inside Mamba's scan
        assert (spec.format is not None) == (num_axes == 2 and not is_exact), path
    for array in array_specs(model.specs.param_specs()).values():
        leaves = jax.tree.leaves(stored(array))
        if array.format is not None:
            assert [leaf.dtype for leaf in leaves] == [np.int8, np.float32]
            assert leaves[1].shape == (*array.shape[: -array.num_inputs], 1)
            assert len(leaves[1].axes) == len(leaves[1].shape)
        else:
            assert leaves == [array]


def test_other_methods_are_refused() -> None:
    config: Any = build_model("qwen3").config
    with pytest.raises(ValueError, match="quantization='int3' is not one of int8"):
        Model(ModelSpecs(config, jnp.bfloat16, quantization="int3"))


def test_is_a_pytree_of_what_is_held() -> None:
    held = Quantized({"codes": np.ones((2, 3)), "scales": np.ones((2, 1))}, INT8)
    doubled = jax.tree.map(lambda x: 2 * x, held)
    assert isinstance(doubled, Quantized)
    assert (doubled.shape, doubled.ndim) == ((2, 3), 2)
