"""Log-probabilities of prompt and output tokens on SmolLM2 equal HF's in float32, however the prompt is computed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from jaxllm import LLM, RequestOutput, SamplingParams
from jaxllm.logprobs import Logprob
from tests.e2e.goldens import FLOAT32, FOLDER, TOLERANCE
from tests.e2e.inside import scheduler_of

ROWS: list[dict[str, Any]] = json.loads((FOLDER / "smollm2-135m-instruct-q4_1-logprobs.json").read_text())["rows"]
TOP = 5
CHUNKED: dict[str, Any] = {
    "max_num_batched_tokens": 64,
    "max_num_seqs": 32,
    "block_size": 16,
    "num_gpu_blocks_override": 34,
}
SAMPLING = SamplingParams(
    temperature=0, max_tokens=16, ignore_eos=True, logprobs=TOP, prompt_logprobs=TOP, detokenize=False
)


def test_the_goldens_cover_what_they_should() -> None:
    lengths = [len(row["prompt_ids"]) for row in ROWS]
    assert len(lengths) == 16
    assert min(lengths) == 3
    assert max(lengths) == 390
    ranks = [rank for row in ROWS for rank in row["prompt_ranks"]]
    assert max(worst for _, worst in ranks) > 10_000
    assert sum(best == worst == 1 for best, worst in ranks) > 200
    # Where HF's own float32 is further than the tolerance from its float64, that error is added to the tolerance.
    assert sum(len(row["prompt_errors"]) for row in ROWS) <= 1


def test_whole_prompts_equal_hf(smollm2_path: str) -> None:
    with LLM(smollm2_path, **FLOAT32) as llm:
        assert_equal(llm.generate([row["prompt_ids"] for row in ROWS], SAMPLING, use_tqdm=False), ROWS)
        assert scheduler_of(llm).stats().num_preemptions == 0


def test_chunked_preempted_and_cached_prompts_equal_hf(smollm2_path: str) -> None:
    with LLM(smollm2_path, dtype="float32", enforce_eager=True, max_model_len=512, **CHUNKED) as llm:
        assert_equal(llm.generate([row["prompt_ids"] for row in ROWS], SAMPLING, use_tqdm=False), ROWS)
        assert scheduler_of(llm).stats().num_preemptions > 0
        rows = ROWS[-2:-1] * 2  # the second time all of it is cached, and still every position comes
        for row in rows:
            assert_equal(llm.generate([row["prompt_ids"]], SAMPLING, use_tqdm=False), [row])
        plain = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
        [output] = llm.generate([rows[0]["prompt_ids"]], plain, use_tqdm=False)
        assert (output.num_cached_tokens or 0) > 100
        assert scheduler_of(llm).stats().num_blocks_in_use == 0


def assert_equal(outputs: Sequence[RequestOutput], rows: list[dict[str, Any]]) -> None:
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
        own, tolerance = position[token_id], TOLERANCE + row["prompt_errors"].get(str(index), 0)
        assert next(iter(position)) == token_id
        assert own.logprob == pytest.approx(row["prompt_logprobs"][index], abs=tolerance), f"{where}, {index}"
        best, worst = row["prompt_ranks"][index]  # others within the tolerance may come before it or after
        assert own.rank is not None
        assert best <= own.rank <= worst, f"{where}, {index}"
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
