"""Checkpoints that the formats' own tools made: weights are the tool's numbers, and a model's answers are HF's."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm.loading.checkpoint import Checkpoint
from jaxllm.loading.names import check_names
from jaxllm.loading.open import open_checkpoint, open_config
from jaxllm.models import ModelSpecs, get_family
from pallas_kernels.weights import dequantize

pytestmark = pytest.mark.loading

ROOT = Path(__file__).parents[1] / "data" / "quantized"
CASES = sorted(path.name for path in ROOT.iterdir())
CLOSE = {"bnb_nf4_nested": 2**-22, "bnb_int8": 2**-22, "modelopt_nvfp4": 2**-22, "ct_nvfp4": 2**-7}
"""How far relatively numbers may be off where a tool multiplies scales in another order; the last one in bfloat16."""


def read_goldens(case: str) -> dict[str, np.ndarray]:
    with np.load(ROOT / case / "golden.npz") as arrays:
        return dict(arrays)


def from_parts(checkpoint: Checkpoint, name: str) -> np.ndarray:
    """Return the numbers that a matrix's parts stand for, with inputs in HF's order."""
    form = checkpoint.format_of(name)
    assert form is not None
    parts = {part: checkpoint.read_part(name, part) for part in form.parts}
    num_rows, num_inputs = checkpoint.tensors[name].shape
    for part, array in parts.items():
        rows = () if part == "order" else (num_rows,)
        assert (array.dtype, array.shape) == (form.dtype(part), (*rows, form.width(part, num_inputs))), part
        if part != "order":
            np.testing.assert_array_equal(checkpoint.read_part(name, part, 3), array[3])
    numbers, order = dequantize(parts, form), checkpoint.input_order(name)
    return numbers if order is None else numbers[:, np.argsort(order)]


@pytest.mark.parametrize("case", CASES)
def test_weights_are_the_tool_s(case: str):
    checkpoint, goldens = open_checkpoint(str(ROOT / case)), read_goldens(case)
    names = [name for name in goldens if name.endswith(".weight")]
    assert len(names) == (2 if case in CLOSE else 7)
    for name in names:
        result, golden = checkpoint.read(name), goldens[name]
        assert (result.dtype, result.shape) == (np.float32, checkpoint.tensors[name].shape)
        if case in CLOSE:
            np.testing.assert_allclose(result, golden, rtol=CLOSE[case])
        else:
            assert hashlib.sha256((result + np.float32(0)).tobytes()).hexdigest() == str(golden), name
        np.testing.assert_array_equal(checkpoint.read(name, 2), result[2])
        np.testing.assert_array_equal(from_parts(checkpoint, name), result, err_msg=name)
        checkpoint.release(name)


@pytest.mark.parametrize("case", CASES)
def test_the_config_alone_tells_the_same(case: str, tmp_path: Path):
    """Without weights a format is known but for the length of rows."""
    alone, checkpoint = open_config(str(ROOT / case / "config.json")), open_checkpoint(str(ROOT / case))
    assert alone.dtype == checkpoint.dtype
    for name in checkpoint.tensors:
        told, held = alone.format_of(name), checkpoint.format_of(name)
        assert (told is None) == (held is None), name
        if told is not None and held is not None:
            assert told.parts == held.parts
            assert (told.bits, told.values, told.offset) == (held.bits, held.values, held.offset)
            assert told.group in (0, held.group)
    assert alone.format_of("lm_head.weight") is None


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_is_accounted_for(case: str):
    checkpoint = open_checkpoint(str(ROOT / case))
    config = get_family("LlamaForCausalLM").read_config(checkpoint.config, checkpoint.tensors)
    check_names(ModelSpecs(config, "float32").param_specs(checkpoint.tensors), checkpoint)


def test_settings_in_a_file_of_their_own():
    config = json.loads((ROOT / "modelopt_fp8" / "config.json").read_text())
    assert "quantization_config" not in config
    assert open_checkpoint(str(ROOT / "modelopt_fp8")).config["quantization_config"]["quant_method"] == "modelopt"


@pytest.mark.parametrize(
    "case", ["awq", "gptq_4bit_asym_act_order", "ct_w8a8", "bnb_nf4", "fp8_blocks", "modelopt_nvfp4"]
)
def test_answers_are_hf_s(case: str):
    from jaxllm import LLM, SamplingParams

    goldens = read_goldens(case)
    settings: dict[str, Any] = {"enforce_eager": True, "skip_tokenizer_init": True, "max_logprobs": -1}
    with LLM(str(ROOT / case), dtype="float32", block_size=16, max_num_seqs=2, **settings) as llm:
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=-1, detokenize=False)
        [output] = llm.generate([{"prompt_token_ids": goldens["prompt"].tolist()}], params, use_tqdm=False)
    [logprobs] = output.outputs[0].logprobs or []
    result = np.array([logprobs[token].logprob for token in range(len(goldens["logprobs"]))])
    np.testing.assert_allclose(result, goldens["logprobs"], atol=2e-4)
