"""GGUF metadata becomes an HF config: families, names, RoPE scaling, and values brought back to HF's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxllm.exceptions import VLLMValidationError
from jaxllm.loading.gguf.checkpoint import GGUFCheckpoint
from jaxllm.loading.names import check_names
from jaxllm.models import ModelSpecs, QueryScaling, get_family
from tests.loading.files import F16, gguf_bytes, gguf_f32, llama_metadata

EMBED = {"token_embd.weight": np.ones((6, 8))}
LAYER = "model.layers.0."


def open_gguf(
    folder: Path, metadata: Mapping[str, Any], tensors: Mapping[str, np.ndarray] | None = None, **raw: Any
) -> GGUFCheckpoint:
    path = folder / "x.gguf"
    path.write_bytes(gguf_bytes(metadata, gguf_f32(EMBED | dict(tensors or {})) | raw.get("raw", {})))
    return GGUFCheckpoint(path)


def test_llama(tmp_path: Path):
    config = open_gguf(tmp_path, llama_metadata()).config
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["vocab_size"], config["hidden_size"], config["head_dim"]) == (6, 8, 4)
    assert config["tie_word_embeddings"] is True
    assert config["attention_bias"] is False


def test_head_size_defaults(tmp_path: Path):
    metadata = llama_metadata()
    del metadata["llama.attention.key_length"]
    assert open_gguf(tmp_path, metadata).config["head_dim"] == 4
    assert open_gguf(tmp_path, metadata | {"llama.rope.dimension_count": 6}).config["head_dim"] == 6


def test_untied_embeddings_and_biases(tmp_path: Path):
    tensors = {"output.weight": np.ones((6, 8)), "blk.0.attn_q.bias": np.ones(8), "blk.0.ffn_up.bias": np.ones(12)}
    checkpoint = open_gguf(tmp_path, llama_metadata(), tensors)
    assert checkpoint.config["tie_word_embeddings"] is False
    assert checkpoint.config["attention_bias"] is True
    assert checkpoint.config["mlp_bias"] is True
    assert set(checkpoint.tensors) == {
        "model.embed_tokens.weight",
        "lm_head.weight",
        LAYER + "self_attn.q_proj.bias",
        LAYER + "mlp.up_proj.bias",
    }


def test_what_most_weights_are_stored_as(tmp_path: Path):
    checkpoint = open_gguf(tmp_path, llama_metadata())
    assert (checkpoint.weight_type, checkpoint.num_bytes) == ("F32", EMBED["token_embd.weight"].size * 4)


MATRICES = {
    "attn_q": (8, 8), "attn_k": (4, 8), "attn_v": (4, 8), "attn_output": (8, 8),
    "ffn_gate": (12, 8), "ffn_up": (12, 8), "ffn_down": (8, 12),
}  # fmt: skip


@pytest.mark.parametrize(
    ("arch", "biased", "zeros"),
    [
        ("llama", ("attn_q", "attn_k", "attn_v"), {"self_attn.o_proj": 8}),
        ("llama", ("attn_v",), {"self_attn.q_proj": 8, "self_attn.k_proj": 4, "self_attn.o_proj": 8}),
        ("llama", ("ffn_down",), {"mlp.gate_proj": 12, "mlp.up_proj": 12}),
        ("smollm3", ("attn_q", "attn_k", "attn_v"), {"self_attn.o_proj": 8}),
        ("qwen2", (), {"self_attn.q_proj": 8, "self_attn.k_proj": 4, "self_attn.v_proj": 4}),
        ("qwen2", ("attn_q", "attn_k", "attn_v"), {}),
    ],
)
def test_biases_that_a_file_leaves_out_are_zeros(
    tmp_path: Path, arch: str, biased: tuple[str, ...], zeros: Mapping[str, int]
):
    """The second of two layers has no bias at all."""
    tensors: dict[str, np.ndarray] = {"output_norm.weight": np.ones(8)}
    for layer in (0, 1):
        tensors |= {f"blk.{layer}.{stem}.weight": np.ones(shape) for stem, shape in MATRICES.items()}
        tensors |= {f"blk.{layer}.{stem}.weight": np.ones(8) for stem in ("attn_norm", "ffn_norm")}
    tensors |= {f"blk.0.{stem}.bias": np.ones(MATRICES[stem][0]) for stem in biased}
    checkpoint = open_gguf(tmp_path, llama_metadata(arch, {"block_count": 2}), tensors)
    config = get_family(checkpoint.config["architectures"][0]).read_config(checkpoint.config)
    check_names(ModelSpecs(config, "float32").param_specs(checkpoint.tensors), checkpoint)
    for name, length in zeros.items():
        bias = checkpoint.read(f"{LAYER}{name}.bias")
        assert (bias.dtype, bias.tolist()) == (np.float32, [0.0] * length)
        checkpoint.release(f"{LAYER}{name}.bias")
    ours = {"attn_q": "self_attn.q_proj", "attn_v": "self_attn.v_proj", "ffn_down": "mlp.down_proj"}
    for stem in set(biased) & ours.keys():
        assert checkpoint.read(f"{LAYER}{ours[stem]}.bias").tolist() == [1.0] * MATRICES[stem][0]
        assert not checkpoint.read(f"model.layers.1.{ours[stem]}.bias").any()


def test_a_window_makes_it_mistral(tmp_path: Path):
    config = open_gguf(tmp_path, llama_metadata(more={"attention.sliding_window": 16})).config
    assert (config["architectures"], config["sliding_window"]) == (["MistralForCausalLM"], 16)


@pytest.mark.parametrize(("arch", "name"), [("qwen2", "Qwen2ForCausalLM"), ("qwen3", "Qwen3ForCausalLM")])
def test_qwen(tmp_path: Path, arch: str, name: str):
    rows = np.arange(64.0).reshape(8, 8)
    tensors = {"blk.0.attn_q.weight": rows, "blk.0.attn_q_norm.weight": np.ones(4)}
    checkpoint = open_gguf(tmp_path, llama_metadata(arch), tensors)
    assert checkpoint.config["architectures"] == [name]
    # Only Llama's converter interleaves, and only Gemma's adds one.
    np.testing.assert_array_equal(checkpoint.read(LAYER + "self_attn.q_proj.weight"), rows)
    np.testing.assert_array_equal(checkpoint.read(LAYER + "self_attn.q_norm.weight"), np.ones(4))


@pytest.mark.parametrize(("arch", "name"), [("qwen2vl", "Qwen2ForCausalLM"), ("qwen3vl", "Qwen3ForCausalLM")])
def test_the_text_part_of_qwen_vl(tmp_path: Path, arch: str, name: str):
    metadata = llama_metadata(arch, {"rope.dimension_sections": [1, 1, 0, 0]})
    assert open_gguf(tmp_path, metadata).config["architectures"] == [name]


def test_smollm3(tmp_path: Path):
    rows = np.arange(64.0).reshape(8, 8)
    interleaved = rows.reshape(2, 2, 2, -1).swapaxes(1, 2).reshape(8, 8)
    checkpoint = open_gguf(tmp_path, llama_metadata("smollm3"), {"blk.0.attn_q.weight": interleaved})
    assert checkpoint.config["architectures"] == ["SmolLM3ForCausalLM"]
    np.testing.assert_array_equal(checkpoint.read(LAYER + "self_attn.q_proj.weight"), rows)


def test_phi3(tmp_path: Path):
    more = {
        "attention.sliding_window": 0, "rope.dimension_count": 2, "rope.scaling.original_context_length": 16,
        "rope.scaling.attn_factor": 1.5,
    }  # fmt: skip
    qkv, factors = np.arange(128.0).reshape(16, 8), {"short": [1.0], "long": [2.0]}
    tensors = {f"rope_factors_{name}.weight": np.array(each) for name, each in factors.items()}
    tensors |= {"blk.0.attn_qkv.weight": qkv, "blk.0.ffn_up.weight": np.ones((24, 8))}
    checkpoint = open_gguf(tmp_path, llama_metadata("phi3", more), tensors)
    assert set(checkpoint.tensors) == {
        "model.embed_tokens.weight",
        LAYER + "self_attn.qkv_proj.weight",
        LAYER + "mlp.gate_up_proj.weight",
    }
    np.testing.assert_array_equal(checkpoint.read(LAYER + "self_attn.qkv_proj.weight"), qkv)
    (rope,) = get_family("Phi3ForCausalLM").read_config(checkpoint.config).ropes
    assert (rope.rope_type, rope.short_factors, rope.long_factors) == ("longrope", (1.0,), (2.0,))
    assert (rope.rotated, rope.attention_factor, rope.original_max_position_embeddings) == (0.5, 1.5, 16)
    plain = get_family("Phi3ForCausalLM").read_config(open_gguf(tmp_path, llama_metadata("phi3")).config)
    assert (plain.ropes[0].rope_type, plain.ropes[0].rotated, plain.layers[0].window) == ("default", 1.0, None)


def test_mistral3(tmp_path: Path):
    more = {
        "attention.temperature_scale": 0.25, "rope.scaling.type": "yarn", "rope.scaling.factor": 16.0,
        "rope.scaling.original_context_length": 32, "rope.scaling.yarn_log_multiplier": 1.0,
    }  # fmt: skip
    interleaved = np.arange(64.0).reshape(2, 2, 2, 8).swapaxes(1, 2).reshape(8, 8)
    checkpoint = open_gguf(tmp_path, llama_metadata("mistral3", more), {"blk.0.attn_q.weight": interleaved})
    np.testing.assert_array_equal(checkpoint.read(LAYER + "self_attn.q_proj.weight"), np.arange(64.0).reshape(8, 8))
    config = get_family(checkpoint.config["architectures"][0]).read_config(checkpoint.config)
    assert config.architecture == "Ministral3ForCausalLM"
    assert config.layers[0].query_scaling == QueryScaling(0.25, 32)
    assert (config.ropes[0].rope_type, config.ropes[0].attention_factor) == ("yarn", 1.0)
    assert open_gguf(tmp_path, llama_metadata("mistral3")).config["architectures"] == ["MistralForCausalLM"]


def test_olmo(tmp_path: Path):
    tensors = {"blk.0.post_attention_norm.weight": np.ones(8), "blk.0.post_ffw_norm.weight": np.full(8, 2.0)}
    olmo2 = open_gguf(tmp_path, llama_metadata("olmo2"), tensors)
    assert olmo2.config["architectures"] == ["Olmo2ForCausalLM"]
    assert olmo2.read(LAYER + "post_attention_layernorm.weight").tolist() == [1.0] * 8
    assert olmo2.read(LAYER + "post_feedforward_layernorm.weight").tolist() == [2.0] * 8
    more = {
        "attention.sliding_window": 16, "attention.sliding_window_pattern": [True], "rope.scaling.type": "yarn",
        "rope.scaling.factor": 8.0, "rope.scaling.attn_factor": 1.25, "rope.scaling.original_context_length": 8,
    }  # fmt: skip
    config = open_gguf(tmp_path, llama_metadata("olmo2", more), tensors).config
    assert (config["architectures"], config["layer_types"]) == (["Olmo3ForCausalLM"], ["sliding_attention"])
    full = get_family("Olmo3ForCausalLM").read_config(config | {"layer_types": ["full_attention"]})
    assert (full.ropes[0].rope_type, full.ropes[0].factor, full.ropes[0].attention_factor) == ("yarn", 8.0, 1.25)
    assert get_family("Olmo3ForCausalLM").read_config(config).ropes[0].rope_type == "default"


def test_gemma2(tmp_path: Path):
    tensors = {
        "blk.0.ffn_norm.weight": np.full(8, 1.5),
        "blk.0.post_attention_norm.weight": np.full(8, 0.5),
        "blk.0.post_ffw_norm.weight": np.ones(8),
        "output_norm.weight": np.full(8, 3.0),
    }
    checkpoint = open_gguf(tmp_path, llama_metadata("gemma2", {"attention.sliding_window": 16}), tensors)
    assert checkpoint.read(LAYER + "pre_feedforward_layernorm.weight").tolist() == [0.5] * 8
    assert checkpoint.read(LAYER + "post_attention_layernorm.weight").tolist() == [-0.5] * 8
    assert checkpoint.read(LAYER + "post_feedforward_layernorm.weight").tolist() == [0.0] * 8
    assert checkpoint.read("model.norm.weight").tolist() == [2.0] * 8
    config = checkpoint.config
    assert (config["attn_logit_softcapping"], config["final_logit_softcapping"]) == (50, 30)
    assert (config["sliding_window"], config["layer_types"]) == (16, ["sliding_attention"])
    assert config["query_pre_attn_scalar"] == 4


@pytest.mark.parametrize("values", [np.arange(64.0).reshape(8, 8), np.arange(8.0)], ids=["weight", "bias"])
def test_queries_are_brought_back_from_interleaving(tmp_path: Path, values: np.ndarray):
    """The converter takes HF's rows (head, half, i) to (head, i, half)."""
    interleaved = values.reshape(2, 2, 2, -1).swapaxes(1, 2).reshape(values.shape)
    assert not np.array_equal(interleaved, values)
    kind = "weight" if values.ndim == 2 else "bias"
    checkpoint = open_gguf(tmp_path, llama_metadata(), {f"blk.0.attn_q.{kind}": interleaved})
    np.testing.assert_array_equal(checkpoint.read(f"{LAYER}self_attn.q_proj.{kind}"), values)


def test_unquantized_files_keep_their_dtype(tmp_path: Path):
    half = np.arange(32, dtype=np.float16).reshape(4, 8)
    brain = half.astype(ml_dtypes.bfloat16)
    raw = {
        "blk.0.attn_v.weight": (F16, (4, 8), half.tobytes()),
        "blk.0.ffn_up.weight": (30, (4, 8), brain.tobytes()),
        "blk.0.ffn_gate.weight": (30, (4, 8), brain.tobytes()),
    }
    checkpoint = open_gguf(tmp_path, llama_metadata(), raw=raw)
    assert (checkpoint.is_gguf, checkpoint.dtype) == (True, "bfloat16")
    assert checkpoint.read(LAYER + "self_attn.v_proj.weight").tobytes() == half.tobytes()
    assert checkpoint.read(LAYER + "mlp.up_proj.weight").dtype == ml_dtypes.bfloat16


def llama3_factors(head_dim: int, theta: float, scaling: Mapping[str, float]) -> np.ndarray:
    """Return rope_freqs.weight as the converter makes it."""
    factors = []
    for frequency in 1 / theta ** (np.arange(0, head_dim, 2) / head_dim):
        wavelength = 2 * np.pi / frequency
        if wavelength < scaling["context"] / scaling["high"]:
            factors.append(1.0)
        elif wavelength > scaling["context"] / scaling["low"]:
            factors.append(scaling["factor"])
        else:
            smooth = (scaling["context"] / wavelength - scaling["low"]) / (scaling["high"] - scaling["low"])
            factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return np.array(factors, np.float32)


@pytest.mark.parametrize(
    "scaling",
    [
        {"factor": 8.0, "low": 1.0, "high": 4.0, "context": 8192},
        {"factor": 32.0, "low": 1.0, "high": 4.0, "context": 8192},
        {"factor": 5.0, "low": 2.0, "high": 3.5, "context": 512},
    ],
)
def test_llama3_rope_scaling_is_recovered(tmp_path: Path, scaling: Mapping[str, float]):
    factors = llama3_factors(128, 500000.0, scaling)
    metadata = llama_metadata(more={"rope.freq_base": 500000.0, "attention.key_length": 128})
    checkpoint = open_gguf(tmp_path, metadata, {"rope_freqs.weight": factors})
    assert "rope_freqs.weight" not in checkpoint.tensors
    rope = checkpoint.config["rope_scaling"]
    assert rope["rope_type"] == "llama3"
    assert rope["factor"] == scaling["factor"]
    again = {
        "factor": rope["factor"],
        "low": rope["low_freq_factor"],
        "high": rope["high_freq_factor"],
        "context": rope["original_max_position_embeddings"],
    }
    np.testing.assert_allclose(llama3_factors(128, 500000.0, again), factors, rtol=1e-4)
    if scaling["context"] == 8192:
        assert again == scaling


def test_other_rope_factors_are_refused(tmp_path: Path):
    with pytest.raises(VLLMValidationError, match="rope_freqs"):
        open_gguf(tmp_path, llama_metadata(), {"rope_freqs.weight": np.array([3.0, 2.0])})


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"rope.scaling.type": "none"}, None),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 32,
                "rope.scaling.yarn_beta_fast": 16.0,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16.0},
        ),
    ],
)
def test_rope_scaling(tmp_path: Path, keys: Mapping[str, Any], expected: Mapping[str, Any] | None):
    assert open_gguf(tmp_path, llama_metadata(more=keys)).config["rope_scaling"] == expected


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "rwkv7"}, "'rwkv7' is not supported; supported: llama"),
        ({}, "'' is not supported"),
        (llama_metadata(more={"block_count": 0}), "llama.block_count"),
        (llama_metadata(more={"attention.head_count_kv": [1, 2]}), "differs between layers"),
        (llama_metadata(more={"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0}), "longrope"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, metadata: Mapping[str, Any], message: str):
    with pytest.raises(VLLMValidationError, match=message) as error:
        open_gguf(tmp_path, metadata)
    assert error.value.parameter == "model"
    assert "x.gguf" in str(error.value)


def test_unknown_tensors_keep_their_name_to_be_reported(tmp_path: Path):
    checkpoint = open_gguf(tmp_path, llama_metadata(), {"blk.0.ssm_a.weight": np.ones(8), "odd": np.ones(8)})
    assert {"blk.0.ssm_a.weight", "odd"} <= set(checkpoint.tensors)


GGUF_NAMES = ("llama", "gemma2", "gemma3", "mistral3", "olmo2", "phi3", "qwen2", "qwen3", "smollm3")
WITH_EXPERTS = ("qwen3moe", "glm4moe", "gpt-oss")


@pytest.mark.parametrize("arch", [*GGUF_NAMES, *WITH_EXPERTS])
def test_a_file_cannot_claim_layers_that_it_does_not_have(tmp_path: Path, arch: str):
    """Lists of what each layer is would fill the memory."""
    claimed = llama_metadata(arch, {"block_count": 2**31 - 1, "attention.sliding_window": 8})
    with pytest.raises(VLLMValidationError, match=r"claims 2147483647 layers and has 1 tensors"):
        open_gguf(tmp_path, claimed)


def test_counts_are_integers(tmp_path: Path):
    with pytest.raises(VLLMValidationError, match=r"attention\.head_count_kv.*not integers"):
        open_gguf(tmp_path, llama_metadata(more={"attention.head_count_kv": [float("inf")]}))
