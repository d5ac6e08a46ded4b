"""Prompts of embeddings through `LLM`: log-probabilities equal HF's `inputs_embeds`, and those of the same tokens.

In float32 on a CPU a request computes alike to the bit in every step, so that prompts of embeddings, which the model's
own embedding layer would give, are held to prompts of token ids exactly.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jaxllm import LLM, RequestOutput, SamplingParams
from jaxllm.engine.front.metrics import Counter
from jaxllm.exceptions import VLLMValidationError
from jaxllm.inputs import PromptType
from jaxllm.sampling_params import BeamSearchParams
from tests.e2e.embeds_goldens import CASES, read_golden
from tests.e2e.tiny_engine import RecordingScheduler, tiny_llm
from tests.models.tiny import BLOCK_SIZE, read_tensors

pytestmark = [pytest.mark.families, pytest.mark.usefixtures("quick_compile")]

TOLERANCE = 1e-4


def engine(case: str, **arguments: Any) -> Any:
    sizes: dict[str, Any] = {"max_num_batched_tokens": 8, "max_num_seqs": 8, "num_gpu_blocks_override": 40}
    return tiny_llm(case, **(sizes | {"max_logprobs": -1, "enable_prompt_embeds": True} | arguments))


def run(llm: LLM, prompts: Sequence[dict[str, Any]], **fields: Any) -> list[RequestOutput]:
    params: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "logprobs": -1, "ignore_eos": True}
    params |= {"detokenize": False} | fields
    return llm.generate(cast("list[PromptType]", list(prompts)), SamplingParams(**params), use_tqdm=False)


def logprobs_of(output: RequestOutput) -> np.ndarray:
    rows = output.outputs[0].logprobs
    assert rows is not None
    return np.array([[row[token].logprob for token in range(len(row))] for row in rows])


def assert_same(got: RequestOutput, expected: RequestOutput) -> None:
    assert got.outputs[0].token_ids == expected.outputs[0].token_ids
    np.testing.assert_array_equal(logprobs_of(got), logprobs_of(expected))


@pytest.mark.parametrize("case", CASES)
def test_generates_what_hf_does_of_inputs_embeds(case: str) -> None:
    golden = read_golden(case)
    with engine(case) as (llm, _):
        random, known, ids = run(
            llm,
            [{"prompt_embeds": golden.embeds}, {"prompt_embeds": golden.embedded}, {"prompt_token_ids": golden.ids}],
        )
    assert list(random.outputs[0].token_ids) == golden.tokens.tolist()
    np.testing.assert_allclose(logprobs_of(random), golden.logprobs, rtol=0, atol=TOLERANCE)
    assert_same(known, ids)


@pytest.mark.parametrize("case", ["granite", "gemma3"])
def test_factors_are_rounded_as_those_of_tokens_are(case: str) -> None:
    """In bfloat16, where Granite's embeddings come without their factor, and Gemma's with it."""
    golden = read_golden(case)
    tensors = read_tensors(case)
    [table] = [tensor for name, tensor in tensors.items() if name.endswith("embed_tokens.weight")]
    rows = table[golden.ids]
    if case == "gemma3":
        rows = rows * np.asarray(rows.shape[1] ** 0.5, rows.dtype)
    with engine(case, dtype="bfloat16") as (llm, _):
        outputs = [run(llm, [prompt])[0] for prompt in ({"prompt_embeds": rows}, {"prompt_token_ids": golden.ids})]
    assert_same(*outputs)


@pytest.fixture(scope="module")
def llama() -> Iterator[tuple[LLM, RecordingScheduler]]:
    """An engine whose steps have 8 tokens, whose cache has room for two prompts of the longest kind."""
    with engine("llama3_tied", num_gpu_blocks_override=9, disable_log_stats=False) as started:
        yield started


@pytest.fixture(scope="module")
def table() -> np.ndarray:
    """The embeddings of all tokens of the Llama."""
    return read_tensors("llama3_tied")["model.embed_tokens.weight"].astype(np.float32)


def draw(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 256, length).tolist()


def count(llm: LLM, name: str) -> int:
    [value] = [each.value for each in llm.get_metrics() if isinstance(each, Counter) and each.name == name]
    return value


def test_a_batch_with_prompts_of_text_preempted_and_in_chunks(
    llama: tuple[LLM, RecordingScheduler], table: np.ndarray
) -> None:
    llm, scheduler = llama
    prompts = [draw(seed, length) for seed, length in enumerate((60, 1, 33, 47, 50, 16))]
    as_ids = [{"prompt_token_ids": ids} for ids in prompts]
    mixed = [{"prompt_embeds": table[ids]} if i % 2 == 0 else as_ids[i] for i, ids in enumerate(prompts)]
    expected = []
    for prompt in as_ids:
        assert llm.reset_prefix_cache()
        expected += run(llm, [prompt], max_tokens=30)
    assert llm.reset_prefix_cache()
    before = count(llm, "vllm:num_preemptions")
    got = run(llm, mixed, max_tokens=30)
    assert count(llm, "vllm:num_preemptions") > before
    assert scheduler.num_prompt_chunks(got[0].request_id) > 3
    for one, other in zip(got, expected, strict=True):
        assert_same(one, other)
    assert got[0].prompt_token_ids == [0] * 60
    assert got[0].prompt is None
    assert got[0].multi_modal_placeholders is None
    assert got[0].metrics is None or got[0].finished


def test_the_prefix_cache_knows_embeddings(llama: tuple[LLM, RecordingScheduler], table: np.ndarray) -> None:
    llm, _ = llama
    ids = draw(9, 60)
    assert llm.reset_prefix_cache()
    prompt = {"prompt_embeds": table[ids]}
    [first], [again] = run(llm, [prompt]), run(llm, [prompt])
    assert first.num_cached_tokens == 0
    assert again.num_cached_tokens == 60 // BLOCK_SIZE * BLOCK_SIZE
    assert_same(again, first)
    changed = table[ids].copy()
    changed[0, 0] += 0.25  # the same but for one number
    [other] = run(llm, [{"prompt_embeds": changed}])
    assert other.num_cached_tokens == 0
    assert not np.array_equal(logprobs_of(other), logprobs_of(first))
    [text], [zeros] = run(llm, [{"prompt_token_ids": ids}]), run(llm, [{"prompt_token_ids": [0] * 60}])
    assert text.num_cached_tokens == zeros.num_cached_tokens == 0
    [salted] = run(llm, [prompt | {"cache_salt": "a"}])
    assert salted.num_cached_tokens == 0


def test_a_long_prompt_shares_the_parts_that_are_alike(table: np.ndarray) -> None:
    ids = draw(5, 300)
    other = [*ids[:290], *draw(6, 10)]
    arguments = {"max_num_batched_tokens": 64, "num_gpu_blocks_override": 70}
    with engine("llama3_tied", **arguments) as (llm, _):
        expected = run(llm, [{"prompt_token_ids": ids}, {"prompt_token_ids": other}])
        [first] = run(llm, [{"prompt_embeds": table[ids]}])
        [second] = run(llm, [{"prompt_embeds": table[other]}])
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == 256  # one part of a prompt
    for got, wanted in zip((first, second), expected, strict=True):
        assert_same(got, wanted)


def test_several_answers_to_one_prompt(llama: tuple[LLM, RecordingScheduler], table: np.ndarray) -> None:
    llm, _ = llama
    ids = draw(2, 37)
    sampled = {"temperature": 1.0, "seed": 3, "n": 3, "max_tokens": 5}
    [expected] = run(llm, [{"prompt_token_ids": ids}], **sampled)
    [got] = run(llm, [{"prompt_embeds": table[ids]}], **sampled)
    assert [each.token_ids for each in got.outputs] == [each.token_ids for each in expected.outputs]
    assert len({tuple(each.token_ids) for each in got.outputs}) > 1


def test_a_repetition_penalty_counts_outputs_alone(llama: tuple[LLM, RecordingScheduler], table: np.ndarray) -> None:
    """As in HF, where a prompt of inputs_embeds has no tokens to penalize."""
    llm, _ = llama
    prompts = [draw(seed, 60) for seed in range(12)]
    greedy = [list(output.outputs[0].token_ids) for output in run(llm, [{"prompt_token_ids": ids} for ids in prompts])]
    repeats = [i for i, ids in enumerate(prompts) if greedy[i][0] in ids]
    assert repeats
    got = run(llm, [{"prompt_embeds": table[prompts[i]]} for i in repeats], repetition_penalty=1000.0)
    of_ids = run(llm, [{"prompt_token_ids": prompts[i]} for i in repeats], repetition_penalty=1000.0)
    for i, output, penalized in zip(repeats, got, of_ids, strict=True):
        tokens = list(output.outputs[0].token_ids)
        assert tokens[0] == greedy[i][0] != penalized.outputs[0].token_ids[0]
        assert len(set(tokens)) == len(tokens)


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_guesses_ahead_without_a_draft_model(table: np.ndarray, method: str) -> None:
    speculative = {"method": method, "num_speculative_tokens": 3}
    prompts = [draw(seed, 30) for seed in range(3)]
    with engine("llama3_tied", speculative_config=speculative) as (llm, _):
        expected = run(llm, [{"prompt_token_ids": ids} for ids in prompts], max_tokens=40)
        got = run(llm, [{"prompt_embeds": table[ids]} for ids in prompts], max_tokens=40)
    for one, other in zip(got, expected, strict=True):
        assert_same(one, other)
    assert any(len(set(one.outputs[0].token_ids)) < 40 for one in got)  # something repeats


def test_a_beam_search_begins_with_embeddings(llama: tuple[LLM, RecordingScheduler], table: np.ndarray) -> None:
    ids, params = draw(3, 20), BeamSearchParams(beam_width=3, max_tokens=5)
    prompts: Any = [{"prompt_token_ids": ids}, {"prompt_embeds": table[ids]}]
    expected, got = llama[0].beam_search(prompts, params)
    for one, other in zip(got.sequences, expected.sequences, strict=True):
        assert one.tokens[20:] == other.tokens[20:]
        assert one.cum_logprob == other.cum_logprob


def test_arrays_of_all_kinds_and_files_in_base64(llama: tuple[LLM, RecordingScheduler], table: np.ndarray) -> None:
    llm, _ = llama
    ids = draw(8, 20)
    rows = table[ids]
    stream = io.BytesIO()
    np.save(stream, rows)
    forms = [
        rows,
        jnp.asarray(rows),
        jnp.asarray(rows, jnp.bfloat16),  # which all of the table's numbers are
        rows.astype(np.float64),
        np.asfortranarray(rows),
        rows[None],
        base64.b64encode(stream.getvalue()).decode(),
        base64.b64encode(safetensors.numpy.save({"a": rows})).decode(),
    ]
    expected, *got = run(llm, [{"prompt_token_ids": ids}, *({"prompt_embeds": form} for form in forms)])
    for output in got:
        assert_same(output, expected)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"prompt_embeds": np.zeros((2, 47), np.float32)}, r"must have the shape \[rows, 48\], got \[2, 47\]"),
        ({"prompt_embeds": np.zeros((0, 48), np.float32)}, r"got \[0, 48\]"),
        ({"prompt_embeds": np.zeros((128, 48), np.float32)}, "128 rows, and .* 127 at most"),
        ({"prompt_embeds": np.zeros((2, 48), np.int32)}, "must be floats, not int32"),
        ({"prompt_embeds": np.full((2, 48), np.nan, np.float32)}, "no finite numbers"),
        ({"prompt_embeds": [[0.0] * 48]}, "must be an array"),
        ({"prompt_embeds": np.zeros((2, 48), np.float32), "prompt_token_ids": [5, 6]}, "leave 'prompt_token_ids' out"),
    ],
)
def test_refuses_other_arrays_by_name(
    llama: tuple[LLM, RecordingScheduler], prompt: dict[str, Any], message: str
) -> None:
    with pytest.raises(VLLMValidationError, match=f"^prompts\\[1\\].*{message}") as caught:
        run(llama[0], [{"prompt_token_ids": [5]}, prompt])
    assert caught.value.parameter in ("prompt_embeds", "prompt_token_ids")


def test_refuses_to_score_prompts_of_embeddings(llama: tuple[LLM, RecordingScheduler], table: np.ndarray) -> None:
    with pytest.raises(VLLMValidationError, match="no tokens to score") as caught:
        run(llama[0], [{"prompt_embeds": table[[5, 6]]}], prompt_logprobs=1)
    assert caught.value.parameter == "prompt_logprobs"


def test_an_engine_without_the_option_refuses_them(table: np.ndarray) -> None:
    with (
        engine("llama3_tied", enable_prompt_embeds=False) as (llm, _),
        pytest.raises(VLLMValidationError, match="enable_prompt_embeds=True") as caught,
    ):
        run(llm, [{"prompt_embeds": table[[5, 6]]}])
    assert caught.value.parameter == "prompt_embeds"
