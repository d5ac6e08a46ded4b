"""Decisions of SmolLM2 equal the log-probabilities of whole texts scored as prompts, and do not depend on the batch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.decisions import read_questions
from jaxllm.engine.decisions.prompts import Template, ask
from tests.e2e.inside import assert_nothing_left, scheduler_of

pytestmark = pytest.mark.device

STATE = "My card was charged twice for one order, and nobody has answered my three letters. " * 5
WORDS = ["billing", "billing and refunds", "shipping", "not sure", "no", "nothing", "account access", "déjà vu", "你好"]


@pytest.fixture(scope="module")
def llm(smollm2_path: str) -> Iterator[LLM]:
    shapes: dict[str, Any] = {"max_num_batched_tokens": 512, "max_num_seqs": 64, "cudagraph_capture_sizes": [8, 64]}
    with LLM(smollm2_path, dtype="float32", enforce_eager=True, block_size=16, max_model_len=2048, **shapes) as llm:
        yield llm


def questions_of(seed: int) -> dict[str, Any]:
    chance = random.Random(seed)
    return {
        f"q{i}": {
            "type": "choice",
            "instructions": f"Question {i}: which one fits?",
            "criteria": dict.fromkeys(chance.sample(WORDS, chance.randint(2, len(WORDS)))),
        }
        for i in range(3)
    }


@pytest.mark.parametrize("seed", range(3))
def test_options_equal_whole_texts(llm: LLM, seed: int) -> None:
    front = llm.llm_engine.front
    tokenizer, end_id = front.require_tokenizer(), Template().end_id(front)
    asked = questions_of(seed)
    [output] = llm.decide(STATE, asked)
    for name, question in read_questions(asked).items():
        prompt = Template().render(front, ask(STATE, None, question, range(len(question.options))))
        before = front.inputs.encode(prompt).token_ids
        encoded = tokenizer.encode([each.name for each in question.options], add_special_tokens=False)
        is_ended = any(a is not b and b[: len(a)] == a for a in encoded for b in encoded)
        for option, tokens in zip(question.options, encoded, strict=True):
            whole = [*before, *tokens, *([end_id] if is_ended and end_id is not None else [])]
            params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
            [scored] = llm.generate({"prompt_token_ids": whole}, params, use_tqdm=False)
            positions = list(scored.prompt_logprobs or [])[len(before) :]
            pairs = zip(positions, whole[len(before) :], strict=True)
            expected = sum((position or {})[each].logprob for position, each in pairs)
            assert output.answers[name].logprobs[option.name] == pytest.approx(expected, abs=1e-5)


def test_answers_do_not_depend_on_the_batch(llm: LLM) -> None:
    asked = questions_of(7)
    [alone] = llm.decide(STATE, asked)
    together = llm.decide([STATE, "Another state.", STATE + "!"], asked)
    llm.reset_prefix_cache()
    [anew] = llm.decide(STATE, {name: asked[name] for name in reversed(asked)})
    for name, answer in alone.answers.items():
        assert together[0].answers[name] == answer
        assert anew.answers[name] == answer
    assert_nothing_left(scheduler_of(llm))
