"""An architecture from outside jaxllm works end to end: its own config keys, tensor names, layouts and layer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jax import Array

from jaxllm import LLM, SamplingParams, register_model
from jaxllm.models import Family, ModelConfig, TensorName, families, registry
from jaxllm.models.families.llama import LLAMA_NAMES
from jaxllm.models.layers import DecoderLayer
from jaxllm.models.reading import read_decoder
from tests.loading.files import safetensors_bytes
from tests.models.tiny import read_goldens, read_hf_config, read_tensors

pytestmark = pytest.mark.engine

SOURCE = "llama3_tied"
PAGE = Path(__file__).parents[2] / "docs" / "models.md"
KEYS = {
    "n_vocab": "vocab_size",
    "width": "hidden_size",
    "depth": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_width": "head_dim",
    "mlp_width": "intermediate_size",
    "context": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "tied": "tie_word_embeddings",
    "rope": "rope_parameters",
}
# Weights are stored [in, out], so that every layout differs from Llama's.
PARTS: Mapping[str, tuple[str, str, str]] = {
    "layers.attn_norm.scale": ("input_layernorm", "norm_1", "d -> d"),
    "layers.attn.q": ("self_attn.q_proj", "q", "d (n h) -> n h d"),
    "layers.attn.k": ("self_attn.k_proj", "k", "d (k h) -> k h d"),
    "layers.attn.v": ("self_attn.v_proj", "v", "d (k h) -> k h d"),
    "layers.attn.o": ("self_attn.o_proj", "o", "c d -> d c"),
    "layers.mlp_norm.scale": ("post_attention_layernorm", "norm_2", "d -> d"),
    "layers.mlp.gate": ("mlp.gate_proj", "gate", "d f -> f d"),
    "layers.mlp.up": ("mlp.up_proj", "up", "d f -> f d"),
    "layers.mlp.down": ("mlp.down_proj", "down", "f d -> d f"),
}


class TheirLayer(DecoderLayer):
    """Llama's layer, which counts the times that it is traced."""

    num_calls = 0

    def finish(self, x_td: Array, attended_tnh: Array) -> Array:
        TheirLayer.num_calls += 1
        return super().finish(x_td, attended_tnh)


def their_config(hf: Mapping[str, Any]) -> ModelConfig:
    # The name of a built-in architecture, as in a copy of that family's file.
    return read_decoder({KEYS[key]: hf[key] for key in KEYS}, architecture="LlamaForCausalLM")


THEIR_FAMILY = Family(
    config_from_hf=their_config,
    layer=TheirLayer,
    names={
        "embed.table": TensorName("tokens.table", "v d -> v d"),
        "final_norm.scale": TensorName("last_norm", "d -> d"),
        **{path: TensorName(f"layer.{{l}}.{name}", layout) for path, (_, name, layout) in PARTS.items()},
    },
)


def write_their_checkpoint(folder: Path) -> Path:
    """Write the tiny Llama under other names, transposed, with a config.json of other keys."""
    hf, tensors = read_hf_config(SOURCE), read_tensors(SOURCE)
    config = {"architectures": ["TheirForCausalLM"], "model_type": "theirs", "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config | {theirs: hf[ours] for theirs, ours in KEYS.items()}))
    theirs = {"tokens.table": tensors["model.embed_tokens.weight"], "last_norm": tensors["model.norm.weight"]}
    for layer in range(hf["num_hidden_layers"]):
        for ours, name, _ in PARTS.values():
            tensor = tensors[f"model.layers.{layer}.{ours}.weight"]
            theirs[f"layer.{layer}.{name}"] = np.ascontiguousarray(tensor.T)
    (folder / "model.safetensors").write_bytes(safetensors_bytes(theirs))
    return folder


def test_an_architecture_from_outside_generates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry.REGISTRY, "_added", {})
    monkeypatch.setattr(TheirLayer, "num_calls", 0)
    register_model("TheirForCausalLM", THEIR_FAMILY)
    golden = read_goldens(SOURCE)[0]
    with LLM(
        str(write_their_checkpoint(tmp_path)),
        dtype="float32",
        skip_tokenizer_init=True,
        max_num_batched_tokens=8,
        enforce_eager=True,
    ) as llm:
        params = SamplingParams(temperature=0, max_tokens=len(golden.tokens), ignore_eos=True, detokenize=False)
        [output] = llm.generate([{"prompt_token_ids": golden.prompt.tolist()}], params, use_tqdm=False)
    assert output.outputs[0].token_ids == golden.tokens.tolist()
    assert TheirLayer.num_calls > 0


def write_gateless_checkpoint(folder: Path, slope: float | None = None, **config: Any) -> str:
    """Write the tiny Llama without gates, for a family that the page adds."""
    folder.mkdir()
    config = read_hf_config(SOURCE) | config
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor for name, tensor in read_tensors(SOURCE).items() if "gate_proj" not in name}
    for layer in range(0 if slope is None else config["num_hidden_layers"]):
        tensors[f"model.layers.{layer}.mlp.slope"] = np.full(config["intermediate_size"], slope, np.float32)
    (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    return str(folder)


def logprobs_of(model: str, **options: Any) -> list[float]:
    """Return the log-probabilities that a model gives the tokens of a prompt."""
    prompt = read_goldens(SOURCE)[0].prompt.tolist()
    with LLM(
        model, dtype="float32", skip_tokenizer_init=True, max_num_batched_tokens=8, enforce_eager=True, **options
    ) as llm:
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        [output] = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    return [each[token].logprob for token, each in zip(prompt, output.prompt_logprobs, strict=True) if each]


def page_program(start: str) -> str:
    """Return the program on the page that begins like this."""
    [program] = re.findall(rf"```python\n({re.escape(start)}.*?)```", PAGE.read_text(), re.DOTALL)
    return program


def test_the_page_adds_an_activation_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slope of 0 is relu, which is built in; another slope is another model."""
    monkeypatch.setattr(registry.REGISTRY, "_added", {})
    exec(page_program("from jax "), {"__name__": "page"})  # noqa: S102
    config = {"architectures": ["LeakyForCausalLM"], "hidden_act": "leaky"}
    relu, leaky = (write_gateless_checkpoint(tmp_path / str(slope), slope, **config) for slope in (0.0, 0.25))
    logprobs = logprobs_of(relu)
    different = logprobs_of(leaky)
    register_model("LeakyForCausalLM", RELU_FAMILY)
    np.testing.assert_allclose(logprobs, logprobs_of(relu), atol=1e-6)
    assert np.abs(np.subtract(different, logprobs)).max() > 1e-3


def test_the_page_s_example_is_the_whole_file_of_a_family() -> None:
    assert page_program('"""Arcee') == (Path(families.__path__[0]) / "arcee.py").read_text()


RELU_FAMILY = Family(
    config_from_hf=lambda hf: read_decoder({**hf, "hidden_act": "relu"}, architecture="LlamaForCausalLM", gated=False),
    names=LLAMA_NAMES,
    leaves_out=("*.slope",),
)
