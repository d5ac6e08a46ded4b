"""The types of `/v1/decisions`, in OpenAI's form (types/decision*.py of openai-python)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from jaxllm.decisions import MAX_OPTIONS, Answer, DecisionOutput, Option, Question, make_option, read_question
from jaxllm.exceptions import VLLMValidationError
from jaxllm.params.checks import shown
from jaxllm.server.decisions.fields import SHARED_REFUSED, DecisionFields

DECISIONS_REFUSED: Mapping[str, str] = {**SHARED_REFUSED, "tools": "nothing calls them here; leave them out"}
MAX_MESSAGES = 131_072


class InputText(msgspec.Struct, kw_only=True, tag_field="type", tag="input_text"):
    """A text of a message."""

    text: str


class InputImage(msgspec.Struct, kw_only=True, tag_field="type", tag="input_image"):
    """An image of a message."""

    image_url: str
    detail: str | None = None
    """It has no effect: an image has the size that the model's processor gives it."""


class InputMessage(msgspec.Struct, kw_only=True):
    """A user's message."""

    role: Literal["user"]
    content: str | list[InputText | InputImage]
    type: Literal["message"] = "message"


class Predicate(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="predicate"):
    """A question whose answer is yes or no."""

    instructions: str
    name: str | None = None


class ChoiceOption(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An option of a choice; the text "true" and true are two of them."""

    value: str | bool
    description: str = ""


class Choice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="choice"):
    """A question that has one of some values as its answer."""

    instructions: str
    choices: list[ChoiceOption]
    name: str | None = None


class ScoreLevel(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A level of a score."""

    label: str
    description: str = ""


class Score(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="score"):
    """A question whose answer is one of some levels, the lowest first."""

    instructions: str
    levels: list[ScoreLevel]
    name: str | None = None


class DecisionRequest(DecisionFields, kw_only=True):
    """The request of `/v1/decisions`."""

    input: str | list[InputMessage]
    """What the questions are about."""
    questions: list[Predicate | Choice | Score]
    safety_identifier: str | None = None
    """It has no effect on the answer."""

    def state(self) -> str:
        """Return the text of the input: its messages, and the parts of each, with an empty line between two."""
        if isinstance(self.input, str):
            return self.input
        contents = [each.content if isinstance(each.content, list) else [each] for each in self.input]
        texts = [
            str(part.content) if isinstance(part, InputMessage) else part.text
            for parts in contents
            for part in parts
            if not isinstance(part, InputImage)
        ]
        return "\n\n".join(texts)

    def image_parts(self) -> list[dict[str, Any]]:
        """Return the images of all messages as content parts. Raises VLLMValidationError for too many messages."""
        if isinstance(self.input, str):
            return []
        if not 1 <= len(self.input) <= MAX_MESSAGES:
            message = f"input must be a text, or 1 to {MAX_MESSAGES} messages, got {len(self.input)} of them."
            raise VLLMValidationError(message, parameter="input")
        return [
            {"type": "image_url", "image_url": {"url": part.image_url}}
            for message in self.input
            for part in message.content
            if isinstance(part, InputImage)
        ]

    def questions_asked(self) -> dict[str, Question]:
        """Return the questions by their positions. Raises VLLMValidationError."""
        return {str(i): _question(each, f"questions[{i}]") for i, each in enumerate(self.questions)}


class PredicateAnswer(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="predicate"):
    """The probability of yes."""

    name: str | None
    probability: float


class ChoiceProbability(msgspec.Struct, frozen=True, kw_only=True):
    """The probability of one value."""

    value: str | bool
    probability: float


class ChoiceAnswer(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="choice"):
    """The most likely value, and the probabilities of all."""

    name: str | None
    choice: str | bool
    probabilities: list[ChoiceProbability]
    confidence: float
    """The probability of the choice among all texts."""


class ScoreProbability(msgspec.Struct, frozen=True, kw_only=True):
    """The probability of one level, from 0."""

    value: int
    label: str
    probability: float


class ScoreAnswer(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="score"):
    """The expected level, from 0, and the probabilities of all levels."""

    name: str | None
    score: float
    probabilities: list[ScoreProbability]
    confidence: float


class DecisionInputDetails(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of the prompts that came from the prefix cache, and those that were stored there."""

    cached_tokens: int
    cache_write_tokens: int


class DecisionOutputDetails(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of reasoning: none."""

    reasoning_tokens: int = 0


class DecisionUsage(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of all prompts, and one token for each row of log-probabilities."""

    input_tokens: int
    input_tokens_details: DecisionInputDetails
    output_tokens: int
    output_tokens_details: DecisionOutputDetails
    total_tokens: int


class DecisionResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/v1/decisions`."""

    model: str
    answers: list[PredicateAnswer | ChoiceAnswer | ScoreAnswer]
    """In the order of the questions."""
    usage: DecisionUsage

    @classmethod
    def of(cls, output: DecisionOutput, request: DecisionRequest, model: str) -> DecisionResponse:
        """Return the answer for a decision."""
        num_input, num_output = output.num_input_tokens, output.num_rows
        return cls(
            model=model,
            answers=list(map(_shown, request.questions, output.answers.values())),
            usage=DecisionUsage(
                input_tokens=num_input,
                input_tokens_details=DecisionInputDetails(
                    cached_tokens=output.num_cached_tokens, cache_write_tokens=output.num_cache_creation_tokens
                ),
                output_tokens=num_output,
                output_tokens_details=DecisionOutputDetails(),
                total_tokens=num_input + num_output,
            ),
        )


def _question(question: Predicate | Choice | Score, label: str) -> Question:
    if isinstance(question, Choice):
        if not 2 <= len(question.choices) <= MAX_OPTIONS:
            message = f"{label}: choices must have 2 to {MAX_OPTIONS} values, got {len(question.choices)}."
            raise VLLMValidationError(message, parameter="questions")
        return Question("choice", question.instructions, _options(question.choices, f"{label}: choices"))
    asked: dict[str, Any] = {"type": "noul", "instructions": question.instructions}
    if isinstance(question, Score):
        asked |= {"type": "score", "criteria": [_described(each) for each in question.levels]}
    return read_question(asked, label)


def _options(choices: Sequence[ChoiceOption], label: str) -> tuple[Option, ...]:
    """Return the options, by their values as JSON. The prompt has texts as they are, or as JSON if one of them looks
    like another value.
    """
    names = [json.dumps(each.value) for each in choices]
    if len(set(names)) < len(names):
        message = f"{label} must differ: {shown(Counter(names).most_common(1)[0][0])} comes twice."
        raise VLLMValidationError(message, parameter="questions")
    spelled = [each.value if isinstance(each.value, str) else json.dumps(each.value) for each in choices]
    if len(set(spelled)) < len(spelled):
        spelled = names
    return tuple(
        make_option(text, each.description or None, label, name)
        for name, text, each in zip(names, spelled, choices, strict=True)
    )


def _described(level: ScoreLevel) -> str:
    return f"{level.label}: {level.description}" if level.description else level.label


def _shown(question: Predicate | Choice | Score, answer: Answer) -> PredicateAnswer | ChoiceAnswer | ScoreAnswer:
    probabilities = list(answer.probabilities.values())
    if isinstance(question, Predicate):
        return PredicateAnswer(name=question.name, probability=answer.noul)
    if isinstance(question, Choice):
        pairs = zip(question.choices, probabilities, strict=True)
        return ChoiceAnswer(
            name=question.name,
            choice=json.loads(answer.choice),
            probabilities=[ChoiceProbability(value=each.value, probability=p) for each, p in pairs],
            confidence=answer.confidence,
        )
    return ScoreAnswer(
        name=question.name,
        score=answer.score,
        probabilities=[
            ScoreProbability(value=i, label=level.label, probability=p)
            for i, (level, p) in enumerate(zip(question.levels, probabilities, strict=True))
        ],
        confidence=answer.confidence,
    )
