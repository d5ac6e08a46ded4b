"""SmolLM2-135M-Instruct from its GGUF equals HF Transformers in float32: tokens, log-probabilities, beams."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from jaxllm import LLM, RequestOutput, SamplingParams, TokensPrompt
from jaxllm.logprobs import Logprob
from jaxllm.sampling_params import BeamSearchParams, StructuredOutputsParams
from tests.e2e.goldens import FOLDER, TOLERANCE, assert_equal_to_hf, assert_top5_close, generate_rows, load_rows
from tests.e2e.inside import assert_nothing_left, generated, limited, scheduler_of

pytestmark = pytest.mark.device

NAME = "smollm2-135m-instruct-q4_1"
ROWS = load_rows(NAME)
SCORED = load_rows(f"{NAME}-logprobs")
BEAMS: dict[str, Any] = json.loads((FOLDER / f"{NAME}-beams.json").read_text())
TOP = 5
SCORING = SamplingParams(
    temperature=0, max_tokens=16, ignore_eos=True, logprobs=TOP, prompt_logprobs=TOP, detokenize=False
)


@pytest.fixture(scope="module")
def llm(smollm2_path: str) -> Iterator[LLM]:
    """Start one engine in float32 with few programs, which take most of the time."""
    shapes: dict[str, Any] = {"max_num_batched_tokens": 512, "max_num_seqs": 512, "cudagraph_capture_sizes": [8, 64]}
    with LLM(smollm2_path, dtype="float32", enforce_eager=True, block_size=16, **shapes) as llm:
        yield llm


def test_the_goldens_cover_what_they_should() -> None:
    lengths = [len(row["prompt_ids"]) for row in ROWS]
    assert len(ROWS) == 32
    assert min(lengths) <= 3
    assert max(lengths) >= 1490
    assert sum(length > 3 * 128 for length in lengths) >= 10
    assert sum(row["is_chat"] for row in ROWS) == 5


def test_the_log_probabilities_cover_what_they_should() -> None:
    lengths = [len(row["prompt_ids"]) for row in SCORED]
    assert len(lengths) == 16
    assert min(lengths) == 3
    assert max(lengths) == 390
    ranks = [rank for row in SCORED for rank in row["prompt_ranks"]]
    assert max(worst for _, worst in ranks) > 10_000
    assert sum(best == worst == 1 for best, worst in ranks) > 200
    # Where HF's own float32 is further than the tolerance from its float64, that error is added to the tolerance.
    assert sum(len(row["prompt_errors"]) for row in SCORED) <= 1


def test_float32_equals_hf(llm: LLM) -> None:
    assert_equal_to_hf(generate_rows(llm, ROWS), ROWS)


def test_bfloat16_is_close_to_hf(smollm2_path: str) -> None:
    shapes: dict[str, Any] = {"max_num_batched_tokens": 512, "max_num_seqs": 16, "cudagraph_capture_sizes": [16]}
    rows = [row for row in ROWS if len(row["prompt_ids"]) <= 300][::2]
    with LLM(smollm2_path, dtype="bfloat16", enforce_eager=True, **shapes) as llm:
        assert_top5_close(generate_rows(llm, rows, max_tokens=16), rows)


def test_whole_prompts_equal_hf(llm: LLM) -> None:
    before = scheduler_of(llm).stats().num_preemptions
    assert_logprobs_equal(llm.generate([row["prompt_ids"] for row in SCORED], SCORING, use_tqdm=False), SCORED)
    assert scheduler_of(llm).stats().num_preemptions == before


def test_chunked_preempted_and_cached_prompts_equal_hf(llm: LLM) -> None:
    scheduler = scheduler_of(llm)
    before = scheduler.stats().num_preemptions
    assert llm.reset_prefix_cache()
    with limited(scheduler, 64, num_blocks=33):
        assert_logprobs_equal(llm.generate([row["prompt_ids"] for row in SCORED], SCORING, use_tqdm=False), SCORED)
        assert scheduler.stats().num_preemptions > before
        rows = SCORED[-2:-1] * 2  # the second time all of it is cached, and still every position comes
        for row in rows:
            assert_logprobs_equal(llm.generate([row["prompt_ids"]], SCORING, use_tqdm=False), [row])
        plain = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
        [output] = llm.generate([rows[0]["prompt_ids"]], plain, use_tqdm=False)
        assert (output.num_cached_tokens or 0) > 100
    assert_nothing_left(scheduler)


def test_beams_equal_hf(llm: LLM) -> None:
    """vLLM's own tests ask for the same beams as HF's where none ends, and the same again with few prompts at a time.

    Without a length penalty vLLM's rules find short ends that HF does not look at: two of the prompts have none.
    """
    scheduler = scheduler_of(llm)
    with limited(scheduler, 64):
        for search in BEAMS["searches"]:
            width, penalty = search["width"], search["length_penalty"]
            chosen = [0, 1, 2, 3] if penalty else [0, 3]
            prompts = [TokensPrompt(prompt_token_ids=BEAMS["prompts"][i]) for i in chosen]
            num_prompt_tokens = sum(len(BEAMS["prompts"][i]) for i in chosen)
            params = BeamSearchParams(beam_width=width, max_tokens=search["max_tokens"], length_penalty=penalty)
            before = scheduler.stats().num_scheduled_tokens
            outputs = llm.beam_search(prompts, params)
            num_tokens = scheduler.stats().num_scheduled_tokens - before
            for number, output in zip(chosen, outputs, strict=True):
                hf = search["found"][number]
                where = f"prompt {number}, width {width}, length penalty {penalty}"
                assert generated(output) == hf["beams"], where
                # Scores without their length penalty, per token: HF adds up in float32, and the errors add up too.
                for beam, hf_score in zip(output.sequences, hf["scores"], strict=True):
                    length = len(beam.logprobs)
                    expected = hf_score * length ** (penalty - 1)
                    assert beam.cum_logprob / length == pytest.approx(expected, abs=TOLERANCE), where
                assert all(each.finish_reason == "length" for each in output.sequences)
            # The prompts once, then one token per beam and step: nothing is computed twice.
            assert num_tokens <= num_prompt_tokens + len(prompts) * width * (search["max_tokens"] - 1)
            assert (num_tokens - num_prompt_tokens) % width == 0
            if width == 2:
                in_turn = llm.beam_search(prompts, params, concurrency_limit=1)
                assert list(map(generated, in_turn)) == list(map(generated, outputs))
        answers = ["Paris", "London", "Rome", "Berlin"]
        constraint = StructuredOutputsParams(choice=answers)
        params = BeamSearchParams(beam_width=4, max_tokens=20, structured_outputs=constraint)
        [output] = llm.beam_search("The capital of France is the city of ", params)
        texts = [(each.text or "").rpartition("city of ")[2] for each in output.sequences]
        assert texts[0] == "Paris"
        assert set(texts) <= set(answers)
        assert_nothing_left(scheduler)


def assert_logprobs_equal(outputs: Sequence[RequestOutput], rows: list[dict[str, Any]]) -> None:
    for output, row in zip(outputs, rows, strict=True):
        where = f"prompt of {len(row['prompt_ids'])}"
        assert output.prompt_logprobs is not None
        assert_prompt_equal(list(output.prompt_logprobs), row, where)
        completion = output.outputs[0]
        assert list(completion.token_ids) == row["token_ids"], where
        assert completion.logprobs is not None
        for step, position in enumerate(completion.logprobs):
            top_ids, top_logprobs = row["top_ids"][step], row["top_logprobs"][step]
            assert_top_equal(position, top_ids, top_logprobs, TOLERANCE, f"{where}, token {step}")
            assert position[row["token_ids"][step]].rank == 1


def assert_prompt_equal(positions: list[dict[int, Logprob] | None], row: dict[str, Any], where: str) -> None:
    assert len(positions) == len(row["prompt_ids"]), where
    assert positions[0] is None
    for index, (token_id, position) in enumerate(zip(row["prompt_ids"][1:], positions[1:], strict=True)):
        assert position is not None
        entry, tolerance = position[token_id], TOLERANCE + row["prompt_errors"].get(str(index), 0)
        assert next(iter(position)) == token_id
        assert entry.logprob == pytest.approx(row["prompt_logprobs"][index], abs=tolerance), f"{where}, {index}"
        best, worst = row["prompt_ranks"][index]  # others within the tolerance may come before it or after
        assert entry.rank is not None
        assert best <= entry.rank <= worst, f"{where}, {index}"
        top_ids, top_logprobs = row["prompt_top_ids"][index], row["prompt_top_logprobs"][index]
        assert_top_equal(position, top_ids, top_logprobs, tolerance, f"{where}, {index}")


def assert_top_equal(
    position: Mapping[int, Logprob], ids: list[int], logprobs: list[float], tolerance: float, where: str
) -> None:
    """Check the most likely tokens, but for those too close to the last one to tell."""
    assert len(position) in (TOP, TOP + 1), where
    last = min(logprobs)
    for token_id, value in zip(ids, logprobs, strict=True):
        if token_id in position:
            assert position[token_id].logprob == pytest.approx(value, abs=tolerance), where
        else:
            assert value == pytest.approx(last, abs=2 * tolerance), where
