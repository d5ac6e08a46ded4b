"""`LLM.decide` over a core without a model: every option's probability equals one computed token by token."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from jaxllm import LLM
from jaxllm.core_messages import EngineCoreOutput, EngineCoreRequest, TokenLogprobs
from jaxllm.decisions import MAX_QUESTIONS, Answer, read_questions
from jaxllm.engine.decisions.token_rows import OptionTokens, option_tokens
from jaxllm.exceptions import VLLMValidationError
from jaxllm.text.tokenizer import Tokenizer
from tests.engine.fake_core import FakeCore
from tests.engine.support import byte_level, make_llm

END = 0  # the tokenizer's end of sequence
QUESTIONS: dict[str, Any] = {
    "team": {
        "type": "choice",
        "instructions": "Which team?",
        "criteria": {"billing": "payments", "bill": None, "security": None},
    },
    "tone": {"type": "score", "instructions": "How upset?", "criteria": ["calm", "annoyed", "furious"]},
    "urgent": {"type": "noul", "instructions": "Is it urgent?", "criteria": {"true": "money is moving"}},
}


class HashedCore(FakeCore):
    """Log-probabilities are numbers that the tokens before them and the token itself make."""

    def __init__(self, first: int = 350) -> None:
        super().__init__(lambda request: [first] * request.max_tokens, max_model_len=8192)

    def _advance(self, request: EngineCoreRequest) -> EngineCoreOutput:
        output, ids = super()._advance(request), request.sampling_params.logprob_token_ids or []
        ids = [*output.new_token_ids, *ids]
        position = TokenLogprobs(ids, [logprob(request.prompt_token_ids, each) for each in ids], 1)
        return msgspec.structs.replace(output, new_logprobs=[position])


def logprob(before: list[int], token_id: int) -> float:
    return -9 * random.Random(repr((before, token_id))).random() - 0.1


@pytest.fixture
def core() -> HashedCore:
    return HashedCore()


@pytest.fixture
def llm(core: HashedCore) -> LLM:
    return make_llm(core, byte_level())


def roots(core: FakeCore) -> list[EngineCoreRequest]:
    return [each for each in core.seen if not each.request_id.endswith(".decision")]


def brute_force(tokenizer: Tokenizer, prompt: list[int], text: str, *, ends: bool) -> float:
    """Return the log-probability of a text after a prompt, with or without the end of sequence after it."""
    tokens = tokenizer.encode([text], add_special_tokens=False)[0] + ([END] if ends else [])
    return sum(logprob(prompt + tokens[:i], token_id) for i, token_id in enumerate(tokens))


def test_probabilities_equal_those_of_whole_texts(llm: LLM, core: HashedCore) -> None:
    tokenizer = byte_level()
    [output] = llm.decide("The card was charged twice.", QUESTIONS)
    prompts = [each.prompt_token_ids for each in roots(core)]
    expected = {
        "team": {name: brute_force(tokenizer, prompts[0], name, ends=True) for name in ("billing", "bill", "security")},
        "tone": {level: brute_force(tokenizer, prompts[1], level, ends=False) for level in "012"},
    }
    for name, values in expected.items():
        answer = output.answers[name]
        assert answer.logprobs == pytest.approx(values, rel=1e-12)
        mass = sum(map(math.exp, values.values()))
        assert answer.label_mass == pytest.approx(mass)
        assert answer.probabilities == pytest.approx({each: math.exp(p) / mass for each, p in values.items()})
    yes, no = (
        sum(math.exp(brute_force(tokenizer, prompts[2], text, ends=False)) for text in texts)
        for texts in (("yes", "Yes"), ("no", "No"))
    )
    assert output.answers["urgent"].noul == pytest.approx(yes / (yes + no))
    assert not any(answer.argmax_is_label for answer in output.answers.values())


def test_prompts_share_the_state_and_rows_share_the_prompt(llm: LLM, core: HashedCore) -> None:
    [output] = llm.decide({"ticket": "charged twice"}, QUESTIONS)
    first, *others = roots(core)
    assert first.fork_of is None
    assert [each.fork_of for each in others] == [first.request_id] * 2
    rows = [each for each in core.seen if each.request_id.endswith(".decision")]
    by_id = {each.request_id: each for each in roots(core)}
    assert rows
    for row in rows:
        root = by_id[row.fork_of or ""]
        assert row.prompt_token_ids[: len(root.prompt_token_ids)] == root.prompt_token_ids
    assert output.num_rows == len(core.seen)
    text = byte_level().decode(first.prompt_token_ids, skip_special_tokens=False)
    assert text.startswith('<|im_start|>user\n{"ticket": "charged twice"}\n\nWhich team?')


def test_scores_are_expected_levels(llm: LLM) -> None:
    answer = llm.decide("state", QUESTIONS)[0].answers["tone"]
    assert answer.score == pytest.approx(answer.probabilities["1"] + 2 * answer.probabilities["2"])
    assert answer.legend == {"0": "calm", "1": "annoyed", "2": "furious"}
    assert answer.confidence == max(answer.probabilities.values()) * answer.label_mass
    with pytest.raises(VLLMValidationError, match="a score has no noul"):
        _ = answer.noul


def test_the_likeliest_token_may_begin_an_option() -> None:
    first = byte_level().encode(["security"], add_special_tokens=False)[0][0]
    answers = make_llm(HashedCore(first), byte_level()).decide("state", QUESTIONS)[0].answers
    assert answers["team"].argmax_is_label
    assert not answers["tone"].argmax_is_label


def test_calibration_divides_by_a_state_that_says_nothing(llm: LLM) -> None:
    [plain], [null] = llm.decide("state", QUESTIONS), llm.decide("N/A", QUESTIONS)
    [calibrated] = llm.decide("state", QUESTIONS, calibrate=True)
    for name, answer in calibrated.answers.items():
        assert answer.logprobs == plain.answers[name].logprobs
        ratios = {each: math.exp(value - null.answers[name].logprobs[each]) for each, value in answer.logprobs.items()}
        total = sum(ratios.values())
        assert answer.probabilities == pytest.approx({each: value / total for each, value in ratios.items()})


def test_orders_are_averaged(llm: LLM) -> None:
    criteria = {"alpha": None, "beta": None, "gamma": None}
    turned = [criteria, dict.fromkeys(("beta", "gamma", "alpha")), dict.fromkeys(("gamma", "alpha", "beta"))]
    single = [llm.decide("state", {"q": QUESTIONS["team"] | {"criteria": each}})[0].answers["q"] for each in turned]
    [averaged] = llm.decide("state", {"q": QUESTIONS["team"] | {"criteria": criteria}}, num_orders=3)
    for name in criteria:
        mean = sum(math.exp(each.logprobs[name]) for each in single) / 3
        assert math.exp(averaged.answers["q"].logprobs[name]) == pytest.approx(mean)


def test_many_states_and_many_options(llm: LLM) -> None:
    criteria = {f"option {i}": None for i in range(255)}
    outputs = llm.decide(["one", "two"], {"q": QUESTIONS["team"] | {"criteria": criteria}})
    assert len(outputs) == 2
    for output in outputs:
        assert len(output.answers["q"].probabilities) == 255
        assert sum(output.answers["q"].probabilities.values()) == pytest.approx(1)


@pytest.mark.parametrize("seed", range(50))
def test_rows_score_random_sequences(seed: int) -> None:
    chance = random.Random(seed)
    options = {tuple(chance.choices(range(4), k=chance.randint(1, 4))) for _ in range(chance.randint(2, 20))}
    scored = option_tokens([[each] for each in sorted(options)], end_id=9)
    assert isinstance(scored, OptionTokens)
    rows = scored.rows()
    assert len({row.path for row in rows}) == len(rows)
    table = {row.path: {each: logprob(list(row.path), each) for each in row.next_ids} for row in rows}
    is_ended = any(a != b and b[: len(a)] == a for a in options for b in options)
    whole = [[*each, 9] if is_ended else list(each) for each in sorted(options)]
    expected = [sum(logprob(ids[:i], token) for i, token in enumerate(ids)) for ids in whole]
    assert scored.logprobs(table) == pytest.approx(expected)


def test_options_that_cannot_be_told_apart() -> None:
    assert option_tokens([[[1, 2]], [[1, 2]]], end_id=9) is None
    assert option_tokens([[[1]], [[1, 2]]], end_id=None) is None
    assert option_tokens([[[]], [[1]]], end_id=9) is None


BAD: list[tuple[Any, str]] = [
    ([], "must be a dict"),
    ({}, "got 0"),
    ({str(i): QUESTIONS["urgent"] for i in range(MAX_QUESTIONS + 1)}, f"got {MAX_QUESTIONS + 1}"),
    ({"": QUESTIONS["urgent"]}, "non-empty"),
    ({"q": "yes?"}, "must be a dict with type"),
    ({"q": {"type": "bool", "instructions": "?"}}, "type must be"),
    ({"q": {"type": ["noul"], "instructions": "?"}}, "type must be"),
    ({"q": {"type": "noul", "instructions": math.nan}}, "a text or a JSON value"),
    ({"q": QUESTIONS["urgent"] | {"weight": 1}}, "unknown field"),
    ({"q": QUESTIONS["urgent"] | {"criteria": {"maybe": "x"}}}, "true and false"),
    ({"q": QUESTIONS["team"] | {"criteria": {}}}, "1 to 255 options"),
    ({"q": QUESTIONS["team"] | {"criteria": {str(i): None for i in range(256)}}}, "1 to 255 options"),
    ({"q": QUESTIONS["team"] | {"criteria": {" ": None, "b": None}}}, "not all spaces"),
    ({"q": QUESTIONS["team"] | {"criteria": {"\ud800": None, "b": None}}}, "an option must be"),
    ({"q": QUESTIONS["tone"] | {"criteria": ["one"]}}, "2 to 255 levels"),
    ({"q": QUESTIONS["tone"] | {"criteria": ["a", math.inf]}}, "a text or a JSON value"),
]


@pytest.mark.parametrize(("questions", "message"), BAD)
def test_bad_questions_are_refused(questions: Any, message: str) -> None:
    with pytest.raises(VLLMValidationError, match=message):
        read_questions(questions)


def test_nothing_runs_if_an_option_does_not_fit(llm: LLM, core: HashedCore) -> None:
    with pytest.raises(VLLMValidationError, match="maximum context length"):
        llm.decide("x " * 8192, QUESTIONS)
    assert not core.seen


def test_engines_of_logits_are_refused() -> None:
    with pytest.raises(VLLMValidationError, match="logprobs_mode"):
        make_llm(HashedCore(), byte_level(), logprobs_mode="raw_logits").decide("state", QUESTIONS)


def answers_of(llm: LLM, states: list[str]) -> Iterator[Answer]:
    for output in llm.decide(states, QUESTIONS):
        yield from output.answers.values()


def test_answers_do_not_depend_on_other_states(llm: LLM) -> None:
    together = list(answers_of(llm, ["one", "two"]))
    assert together == [*answers_of(llm, ["one"]), *answers_of(llm, ["two"])]
