"""A model without an engine equals HF in float32; tests/e2e/test_families.py runs every family in `LLM`."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.models import LayerLoop, Model, ModelSpecs
from tests.models.dense import dense_attention
from tests.models.running import Runner, build_model, empty_pools, load
from tests.models.tiny import read_goldens, read_tensors

pytestmark = pytest.mark.models

TOLERANCE = 1e-4
NOTICED = 1e-2
FEW = ["gemma3", "llama3_tied", "llama_rope_dynamic", "llama4"]
OF_LATENTS = [
    "deepseek_v2",
    "deepseek_v2_lite",
    "deepseek_v3",
    "deepseek_v32",
    "dots3_note",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "kimi_k2",
    "mistral4",
    "mistral_large4",
]
OF_STATES = [
    "bamba",
    "falcon_h1",
    "falcon_h1_norm",
    "granite4",
    "granite4_dense",
    "falcon_mamba",
    "jamba",
    "mamba",
    "mamba2",
    "lfm2",
    "lfm2_moe",
    "lfm3",
    "nemotron3",
    "nemotron_h",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
    "kimi_linear",
    "bailing_hybrid",
]
"""Cases with recurrent state, which is carried from chunk to chunk."""


@cache
def runner(case: str) -> Runner:
    model = build_model(case)
    return Runner(model, load(model, read_tensors(case)))


@pytest.mark.parametrize("case", FEW + OF_LATENTS + OF_STATES)
def test_whole_sequences_match_hf(case: str) -> None:
    for golden in read_goldens(case):
        logprobs = runner(case).whole(golden)
        prompt_len = len(golden.prompt)
        np.testing.assert_allclose(logprobs[prompt_len - 1 :], golden.logprobs, rtol=0, atol=TOLERANCE)
        if golden.prompt_logprobs is not None:
            np.testing.assert_allclose(logprobs[:prompt_len], golden.prompt_logprobs, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("case", "chunk"),
    [(case, n) for case in FEW for n in (64, 7)] + [(case, n) for case in OF_LATENTS + OF_STATES for n in (64, 7, 1)],
)
def test_greedy_decoding_matches_hf(case: str, chunk: int) -> None:
    for golden in read_goldens(case):
        logprobs, tokens = runner(case).incremental(golden, chunk)
        np.testing.assert_array_equal(tokens, golden.tokens)
        np.testing.assert_allclose(logprobs, golden.logprobs, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("case", FEW[:2])
def test_stand_in_matches_hf(case: str) -> None:
    golden = read_goldens(case)[-1]
    model = build_model(case)
    logprobs = Runner(model, load(model, read_tensors(case)), dense_attention).whole(golden)
    np.testing.assert_allclose(logprobs[len(golden.prompt) - 1 :], golden.logprobs, rtol=0, atol=TOLERANCE)


def test_layer_norms_add_an_offset_to_their_scales() -> None:
    golden, norms = read_goldens("gpt2")[-1], ("ln_1.weight", "ln_2.weight", "ln_f.weight")
    tensors = {name: held.astype(np.float32) - name.endswith(norms) for name, held in read_tensors("gpt2").items()}
    model = Model(ModelSpecs(replace(build_model("gpt2").config, norm_offset=1.0), jnp.float32))
    logprobs = Runner(model, load(model, tensors), dense_attention).whole(golden)
    np.testing.assert_allclose(logprobs[len(golden.prompt) - 1 :], golden.logprobs, rtol=0, atol=TOLERANCE)


def test_dynamic_rope_depends_on_the_prompt_length() -> None:
    golden = read_goldens("llama_rope_dynamic")[-1]
    run = runner("llama_rope_dynamic")
    tokens, batches = run.inputs(golden.sequence, 0, len(golden.prompt))
    tokens = tokens._replace(rope_lengths_t=tokens.positions_t + 1)
    logprobs, _ = run.step(run.params, empty_pools(run.model.config), tokens, batches)
    last = np.asarray(logprobs)[len(golden.sequence) - 1]
    assert np.abs(last - golden.logprobs[-1]).max() > NOTICED


@pytest.mark.parametrize("loop", [LayerLoop.UNROLL, LayerLoop.SWITCH, LayerLoop.IN_PLACE])
@pytest.mark.parametrize(
    "case",
    [
        "llama3_tied",
        "gemma3",
        "gemma4_e2b",
        "deepseek_v3",
        "glm_moe_dsa",
        "qwen3_next",
        "lfm2",
        "granite4",
        "nemotron3",
        "jamba",
        "mamba2",
        "falcon_h1",
    ],
)
def test_other_loops_equal_the_scan(case: str, loop: LayerLoop) -> None:
    golden = read_goldens(case)[-1]
    model = build_model(case, loop=loop)
    params = load(model, read_tensors(case))
    assert len(params["layers"]) == len(model.plan.kinds if loop.stacked else model.plan.layers)
    stand_in = None if case in OF_LATENTS else dense_attention
    logprobs = Runner(model, params, stand_in).whole(golden)
    np.testing.assert_allclose(logprobs, runner(case).whole(golden), rtol=0, atol=TOLERANCE)
