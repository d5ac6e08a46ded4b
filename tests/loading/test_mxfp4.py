"""Weights stored in MXFP4 are widened to the bit, and a model answers as with the same weights stored widened."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.exceptions import VLLMValidationError
from jaxllm.loading.load import load_params
from jaxllm.loading.names import check_names
from jaxllm.loading.open import open_checkpoint, open_config
from jaxllm.loading.quantized.mxfp4 import CHUNK_BYTES, widen
from jaxllm.models import Model, ModelSpecs, get_family
from tests.loading.files import write_folder
from tests.loading.gguf_moe_files import moe_gguf, mxfp4, stacked
from tests.loading.mxfp4_files import GPT_OSS, QUANTIZED, oracle, quantized, read_tensors

pytestmark = pytest.mark.loading

EXPERTS = "model.layers.0.mlp.experts.gate_up_proj"


def random_pair(rng: np.random.Generator, *shape: int) -> tuple[np.ndarray, np.ndarray]:
    """Return blocks and scales of any value but the one that is no number."""
    return rng.integers(0, 256, (*shape, 16), np.uint8), rng.integers(0, 255, shape, np.uint8)


def test_every_byte_under_every_scale():
    blocks = np.tile(np.arange(256, dtype=np.uint8).reshape(1, 16, 16), (255, 1, 1))
    scales = np.repeat(np.arange(255, dtype=np.uint8)[:, None], 16, axis=1)
    result = widen(blocks, scales)
    assert result.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(result.view(np.uint16), oracle(blocks, scales).view(np.uint16))
    assert np.isnan(widen(blocks[:1], np.full((1, 16), 255, np.uint8)).astype(np.float32)).all()


def test_more_than_one_chunk():
    blocks, scales = random_pair(np.random.default_rng(0), CHUNK_BYTES // 32 + 1, 3)
    np.testing.assert_array_equal(widen(blocks, scales).view(np.uint16), oracle(blocks, scales).view(np.uint16))


def test_a_pair_is_one_tensor(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    blocks, scales = random_pair(np.random.default_rng(1), 3, 6, 2)
    other = np.ones(4, np.float32)
    hf = {f"{EXPERTS}_blocks": blocks, f"{EXPERTS}_scales": scales, f"{EXPERTS}_bias": other}
    with caplog.at_level(logging.INFO, "jaxllm"):
        checkpoint = open_checkpoint(str(write_folder(tmp_path, hf, QUANTIZED)))
    assert "4.25 bits a number" in caplog.text
    info = checkpoint.tensors[EXPERTS]
    assert set(checkpoint.tensors) == {EXPERTS, f"{EXPERTS}_bias"}
    assert (info.shape, info.dtype, info.num_bytes) == ((3, 64, 6), "bfloat16", blocks.nbytes + scales.nbytes)
    assert (checkpoint.dtype, checkpoint.is_gguf) == ("bfloat16", False)
    expected = oracle(blocks, scales).swapaxes(1, 2)
    checkpoint.fetch()
    for _ in range(2):
        np.testing.assert_array_equal(checkpoint.read(EXPERTS), expected)
        np.testing.assert_array_equal(checkpoint.read(EXPERTS, 2), expected[2])
        np.testing.assert_array_equal(checkpoint.read(f"{EXPERTS}_bias"), other)
        checkpoint.release(EXPERTS)
        checkpoint.release(f"{EXPERTS}_bias")


@pytest.mark.parametrize("fault", ["no scales", "another shape", "another dtype", "no experts"])
def test_pairs_that_do_not_fit_are_named(tmp_path: Path, fault: str):
    blocks, scales = random_pair(np.random.default_rng(2), 3, 6, 2)
    hf = {f"{EXPERTS}_blocks": blocks, f"{EXPERTS}_scales": scales}
    match fault:
        case "no scales":
            del hf[f"{EXPERTS}_scales"]
        case "another shape":
            hf[f"{EXPERTS}_scales"] = scales[:2]
        case "another dtype":
            hf[f"{EXPERTS}_scales"] = scales.astype(np.int8)
        case _:
            hf = {name: tensor[0] for name, tensor in hf.items()}
    with pytest.raises(VLLMValidationError, match=r"gate_up_proj_(scales|blocks)"):
        open_checkpoint(str(write_folder(tmp_path, hf, QUANTIZED)))


def test_blocks_that_the_config_denies_are_left_to_be_reported(tmp_path: Path):
    blocks, scales = random_pair(np.random.default_rng(2), 3, 6, 2)
    hf = {f"{EXPERTS}_blocks": blocks, f"{EXPERTS}_scales": scales}
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.0"]}
    checkpoint = open_checkpoint(str(write_folder(tmp_path, hf, QUANTIZED | {"quantization_config": quantization})))
    assert set(checkpoint.tensors) == set(hf)
    with pytest.raises(VLLMValidationError, match=r"gate_up_proj_blocks"):
        check_names({}, checkpoint)


def test_other_methods_are_left_as_they_are(tmp_path: Path):
    blocks, scales = random_pair(np.random.default_rng(3), 3, 6, 2)
    hf = {f"{EXPERTS}_blocks": blocks, f"{EXPERTS}_scales": scales}
    config = QUANTIZED | {"quantization_config": {"quant_method": "awq"}}
    assert set(open_checkpoint(str(write_folder(tmp_path, hf, config))).tensors) == set(hf)


def test_config_without_weights(tmp_path: Path):
    """A hub's gpt-oss states no dtype."""
    config = json.loads((GPT_OSS / "config.json").read_text()) | QUANTIZED
    del config["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name in ("config.json", ""):
        opened = open_config(str(tmp_path / name))
        assert opened.dtype == "bfloat16"
        assert get_family("GptOssForCausalLM").read_config(opened.config).num_layers == 4


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write the tiny gpt-oss with its experts rounded to MXFP4, stored so and stored widened."""
    config = json.loads((GPT_OSS / "config.json").read_text())
    stored, widened = quantized(read_tensors(GPT_OSS))
    root = tmp_path_factory.mktemp("mxfp4")
    return {
        "stored": write_folder(root / "stored", stored, config | QUANTIZED),
        "widened": write_folder(root / "widened", widened, config),
    }


def test_each_expert_is_widened_once(folders: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch):
    reads: list[tuple[str, int | None, int]] = []
    checkpoint = open_checkpoint(str(folders["stored"]))
    read = checkpoint.read

    def counted(name: str, index: int | None = None) -> np.ndarray:
        tensor = read(name, index)
        reads.append((name, index, tensor.size))
        return tensor

    monkeypatch.setattr(checkpoint, "read", counted)
    model = Model(ModelSpecs(get_family("GptOssForCausalLM").read_config(checkpoint.config), "float32"))
    load_params(model.specs.param_specs(checkpoint.tensors), checkpoint, progress=False)
    experts = [size for name, _, size in reads if name == EXPERTS]
    assert (len(experts), sum(experts)) == (6, np.prod(checkpoint.tensors[EXPERTS].shape))
    # The embedding and the head are read once more, to find out whether they are one table.
    others = [(name, index) for name, index, _ in reads if name not in ("model.embed_tokens.weight", "lm_head.weight")]
    assert len(set(others)) == len(others)


def test_answers_are_those_of_widened_weights(folders: Mapping[str, Path], tmp_path: Path):
    widened = answer(folders["widened"])
    assert answer(folders["stored"]) == widened
    assert len({logprob for _, logprob in widened}) == 2
    experts = {name: tensor for name, tensor in stacked("gpt_oss").items() if name.endswith("_exps.weight")}
    gguf = tmp_path / "x.gguf"
    gguf.write_bytes(moe_gguf("gpt_oss", extra={name: mxfp4(tensor) for name, tensor in experts.items()}))
    # The limit of a GGUF file is that of the real models, and it holds float32.
    assert answer(gguf, swiglu_limit=1.5, rms_norm_eps=1e-5) == widened


def answer(model: Path, **overrides: Any) -> list[Any]:
    """Return greedy tokens, and their log-probabilities."""
    with LLM(
        str(model),
        dtype="float32",
        hf_overrides=overrides,
        skip_tokenizer_init=True,
        block_size=16,
        max_num_batched_tokens=8,
        max_num_seqs=8,
        max_logprobs=-1,
        enforce_eager=True,
    ) as llm:
        params = SamplingParams(temperature=0, max_tokens=6, logprobs=1, ignore_eos=True, detokenize=False)
        prompts: list[Any] = [{"prompt_token_ids": [3, 5, 7, 11, 13]}, {"prompt_token_ids": list(range(40, 60))}]
        outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    return [(output.token_ids, output.cumulative_logprob) for output in outputs]
