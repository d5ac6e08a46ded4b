"""Models in Mistral's own form are HF's to the bit, and tekken.json makes the tokens of mistral-common."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxllm.exceptions import VLLMValidationError
from jaxllm.loading.folder import folder_tokenizer
from jaxllm.loading.open import open_checkpoint, open_config
from jaxllm.models import get_family
from tests.loading.files import safetensors_bytes
from tests.models.tiny import folder, read_hf_config

TEKKEN = Path(__file__).resolve().parents[1] / "data/tekken"
NAMES = (
    ("model.embed_tokens", "tok_embeddings"),
    ("model.layers", "layers"),
    ("model.norm", "norm"),
    ("lm_head", "output"),
    ("self_attn.q_proj", "attention.wq"),
    ("self_attn.k_proj", "attention.wk"),
    ("self_attn.v_proj", "attention.wv"),
    ("self_attn.o_proj", "attention.wo"),
    ("input_layernorm", "attention_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("mlp.gate_proj", "feed_forward.w1"),
    ("mlp.down_proj", "feed_forward.w2"),
    ("mlp.up_proj", "feed_forward.w3"),
    ("block_sparse_moe", "feed_forward"),
)


def write(path: Path, case: str, **changes: Any) -> Path:
    """Write a tiny checkpoint in Mistral's own form."""
    hf, checkpoint = read_hf_config(case), open_checkpoint(str(folder(case)))
    params: dict[str, Any] = {
        "dim": hf["hidden_size"],
        "n_layers": hf["num_hidden_layers"],
        "n_heads": hf["num_attention_heads"],
        "n_kv_heads": hf["num_key_value_heads"],
        "head_dim": hf["head_dim"],
        "hidden_dim": hf["intermediate_size"],
        "norm_eps": hf["rms_norm_eps"],
        "vocab_size": hf["vocab_size"],
        "max_seq_len": hf["max_position_embeddings"],
        "rope_theta": hf["rope_parameters"]["rope_theta"],
        "sliding_window": hf["sliding_window"],
    }
    if case == "mixtral":
        params["moe"] = {
            key: hf[name] for key, name in (("num_experts", "num_local_experts"), 2 * ("num_experts_per_tok",))
        }
    path.mkdir(exist_ok=True)
    (path / "params.json").write_text(json.dumps(params | changes))
    tensors = {}
    for name in checkpoint.tensors:
        array = checkpoint.read(name)
        if "q_proj" in name or "k_proj" in name:  # pairs of rows, where HF has two halves
            first, second = np.split(array.reshape(-1, hf["head_dim"], hf["hidden_size"]), 2, axis=1)
            array = np.stack((first, second), axis=2).reshape(array.shape)
        for theirs, ours in NAMES:
            name = name.replace(theirs, ours)
        tensors[name] = np.ascontiguousarray(array)
    (path / "consolidated.safetensors").write_bytes(safetensors_bytes(tensors))
    return path


@pytest.mark.parametrize("load_format", ["auto", "mistral"])
@pytest.mark.parametrize("case", ["mistral", "mixtral"])
def test_is_the_model_of_hf(tmp_path: Path, case: str, load_format: str):
    expected, got = (
        open_checkpoint(str(folder(case))),
        open_checkpoint(str(write(tmp_path, case)), load_format=load_format),
    )
    assert got.tensors == expected.tensors
    for name in expected.tensors:
        np.testing.assert_array_equal(got.read(name), expected.read(name))
        got.release(name)
    read = get_family(expected.config["architectures"][0]).config_from_hf
    assert read(got.config) == read(expected.config)
    assert (got.dtype, got.text_only) == ("bfloat16", "")
    for config in (open_config(str(tmp_path)).config, open_checkpoint(str(tmp_path), load_format="dummy").config):
        assert config == got.config


def test_ministral_with_scaled_queries(tmp_path: Path):
    """The config of Ministral 3 8B, as params.json has it and as config.json does."""
    yarn = {
        "factor": 16.0,
        "original_max_position_embeddings": 16_384,
        "beta": 32.0,
        "alpha": 1.0,
        "apply_scale": False,
    }
    scaling = {"original_max_position_embeddings": 16_384, "beta": 0.1}
    write(tmp_path, "mistral", yarn=yarn, llama_4_scaling=scaling, rope_theta=1e6, sliding_window=None)
    hf = read_hf_config("mistral") | {"sliding_window": None, "architectures": ["Ministral3ForCausalLM"]}
    hf["rope_parameters"] = {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": 16_384,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    }
    read, config = get_family("Ministral3ForCausalLM").config_from_hf, open_config(str(tmp_path)).config
    assert config["architectures"] == hf["architectures"]
    assert read(config) == read(hf)


def test_fp8(tmp_path: Path):
    """The rows of packed matrices are put in HF's order too; scales are for whole matrices."""
    rng = np.random.default_rng()
    write(tmp_path, "mistral", quantization={"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"})
    codes = rng.standard_normal((64, 48)).astype(ml_dtypes.float8_e4m3fn)
    stem = "layers.0.attention.wq."
    tensors = {f"{stem}weight": codes, f"{stem}qscale_weight": np.float32(0.5), f"{stem}qscale_act": np.float32(2)}
    (tmp_path / "consolidated.safetensors").write_bytes(
        safetensors_bytes({name: np.asarray(array) for name, array in tensors.items()})
    )
    checkpoint = open_checkpoint(str(tmp_path))
    assert list(checkpoint.tensors) == ["model.layers.0.self_attn.q_proj.weight"]
    heads = codes.astype(np.float32).reshape(4, 16, 48)
    expected = np.concatenate((heads[:, ::2], heads[:, 1::2]), axis=1).reshape(64, 48) / 2
    np.testing.assert_array_equal(checkpoint.read("model.layers.0.self_attn.q_proj.weight"), expected)


def test_hf_s_form_is_preferred(tmp_path: Path):
    write(tmp_path, "mistral")
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes({"a": np.ones(3, np.float32)}))
    (tmp_path / "config.json").write_text(json.dumps(read_hf_config("mistral")))
    assert set(open_checkpoint(str(tmp_path)).tensors) == {"a"}
    assert "lm_head.weight" in open_checkpoint(str(tmp_path), load_format="mistral").tensors
    (tmp_path / "model.safetensors").unlink()
    assert "lm_head.weight" in open_checkpoint(str(tmp_path)).tensors


def test_a_model_that_sees_is_read_for_text(tmp_path: Path):
    write(tmp_path, "mistral", vision_encoder={"hidden_size": 8})
    path = tmp_path / "consolidated.safetensors"
    plain = open_checkpoint(str(tmp_path))
    path.rename(tmp_path / "consolidated-00001-of-00002.safetensors")
    more = {"vision_encoder.ln_pre.weight": np.ones(3, np.float32)}
    (tmp_path / "consolidated-00002-of-00002.safetensors").write_bytes(safetensors_bytes(more))
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.tensors == plain.tensors
    assert "for text alone" in checkpoint.text_only


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"q_lora_rank": 8}, "latents \\(q_lora_rank\\)"),
        ({"multimodal": {"whisper_model_args": {"a": 1}}}, "hears"),
        ({"model_type": "mamba"}, "model_type 'mamba'"),
        ({"moe": {"num_experts": 8, "num_shared_experts": 1}}, "moe with num_shared_experts"),
        ({"moe": [3]}, "moe list of 1|moe \\[3\\]"),
        ({"yarn": {"gamma": 1}}, "yarn with gamma"),
        ({"sliding_window": [None, 8]}, "several kinds"),
        ({"quantization": {"qformat_weight": "int3"}}, "only fp8_e4m3"),
    ],
)
def test_other_models_are_refused(tmp_path: Path, changes: dict[str, Any], words: str):
    with pytest.raises(VLLMValidationError, match=f"params.json.*(?:{words}).*config.json"):
        open_checkpoint(str(write(tmp_path, "mistral", **changes)))


def test_what_does_not_fit(tmp_path: Path):
    write(tmp_path, "mistral", n_heads=5)
    with pytest.raises(VLLMValidationError, match=r"q_proj\.weight has shape \[64, 48\], which 5 heads do not divide"):
        open_checkpoint(str(tmp_path)).read("model.layers.0.self_attn.q_proj.weight")
    (tmp_path / "consolidated.safetensors").write_bytes(safetensors_bytes({"layers.0.x": np.ones(3, np.float32)}))
    with pytest.raises(VLLMValidationError, match=r"the tensor layers\.0\.x, which no known model"):
        open_checkpoint(str(tmp_path))
    (tmp_path / "params.json").write_text("{}")
    with pytest.raises(VLLMValidationError, match=r"params\.json has no dim"):
        open_checkpoint(str(tmp_path))


def test_tekken_makes_the_tokens_of_mistral_common():
    """The goldens are what mistral-common 1.13.1 made, with bos=True and eos=False."""
    tokenizer = folder_tokenizer(TEKKEN, "model")
    for golden in json.loads((TEKKEN / "golden.json").read_text()):
        assert tokenizer(golden["text"])["input_ids"] == golden["ids"]
        assert tokenizer.decode(golden["ids"], skip_special_tokens=True) == golden["text"]
        assert tokenizer(golden["text"], add_special_tokens=False)["input_ids"] == golden["ids"][1:]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 11)
    assert tokenizer.convert_tokens_to_ids("[INST]") == 3
    assert tokenizer("a[INST]")["input_ids"][-1] == 3
