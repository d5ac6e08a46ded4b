"""The questions of decisions, and their answers.

Questions have the wire form of vLLM's `/v1/systemone` (docs/serving/online_serving/structured_decisions of vLLM 0.32):
`{"type": "choice" | "score" | "noul", "instructions": ..., "criteria": ...}`. docs/decisions.md has what the
probabilities mean.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from jaxllm.exceptions import VLLMValidationError
from jaxllm.params.checks import is_unicode, shown

MAX_QUESTIONS = 200
MAX_OPTIONS = 255
MAX_LEVELS = 255
MAX_ORDERS = 255
MAX_ROWS = 16_384
"""The most rows of log-probabilities that the questions about one state may take."""
MAX_OPTION_LENGTH = 4_096
"""The most characters of an option."""
MAX_TEXT_LENGTH = 2**20
"""The most characters of instructions and of a description."""

type QuestionType = Literal["choice", "score", "noul"]

_FIELDS = frozenset({"type", "instructions", "criteria"})


@dataclass(frozen=True, slots=True)
class Option:
    """One of a question's answers."""

    name: str
    """What the answer's probabilities call it."""
    spellings: tuple[str, ...]
    """The texts that give this answer; the prompt names the first."""
    description: str | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """A question, checked."""

    type: QuestionType
    instructions: str
    """The question's text, which may be empty."""
    options: tuple[Option, ...]
    """The options; of a score its levels, the lowest first; of a noul yes and no."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The probabilities of a question's options."""

    type: QuestionType
    probabilities: dict[str, float]
    """The probability of each option, which sum to 1: an option's share of `label_mass`, calibrated if that was asked
    for. Levels are named "0", "1", and so on; the options of a noul are "yes" and "no"."""
    logprobs: dict[str, float]
    """The natural logarithm of each option's probability among all texts, before it is calibrated."""
    label_mass: float
    """The probability that the model answers with one of the options: the sum over `logprobs`."""
    argmax_is_label: bool
    """Whether the most likely first token of the answer begins an option, in each order that was asked."""
    legend: dict[str, str] | None = None
    """The texts of a score's levels."""

    @property
    def choice(self) -> str:
        """Return the most likely option; the first of them if several are."""
        return max(self.probabilities, key=self.probabilities.__getitem__)

    @property
    def confidence(self) -> float:
        """Return the most likely option's probability times `label_mass`, as vLLM does."""
        return self.probabilities[self.choice] * self.label_mass

    @property
    def score(self) -> float:
        """Return a score's expected level, from 0. Raises VLLMValidationError for other questions."""
        self._check_type("score")
        return math.fsum(level * p for level, p in enumerate(self.probabilities.values()))

    @property
    def noul(self) -> float:
        """Return a noul's probability of yes. Raises VLLMValidationError for other questions."""
        self._check_type("noul")
        return self.probabilities["yes"]

    def _check_type(self, wanted: str) -> None:
        if self.type != wanted:
            raise VLLMValidationError(f"a {self.type} has no {wanted}.", parameter="type", value=self.type)


@dataclass(frozen=True, slots=True)
class DecisionOutput:
    """The answers to the questions about one state."""

    answers: dict[str, Answer]
    """By the ids of the questions, in their order."""
    num_input_tokens: int
    """The tokens of all prompts, shared ones counted in each."""
    num_cached_tokens: int
    """The tokens among them that were not computed: they were shared with other questions or in the prefix cache."""
    num_cache_creation_tokens: int
    """The tokens of the prompts that were added to the prefix cache."""
    num_rows: int
    """The rows of log-probabilities that were computed."""


def read_questions(questions: Any, label: str = "questions") -> dict[str, Question]:
    """Return checked questions by id, of `Question`s or of dicts in vLLM's form. Errors name the question."""
    if not isinstance(questions, Mapping) or not 1 <= len(questions) <= MAX_QUESTIONS:
        message = f"{label} must be a dict from id to question with 1 to {MAX_QUESTIONS} of them, got "
        raise _refusal(message + (shown(questions) if not isinstance(questions, Mapping) else f"{len(questions)}."))
    return {
        _checked_id(name, label): read_question(each, f"{label}[{shown(name)}]") for name, each in questions.items()
    }


def read_question(question: Any, label: str) -> Question:
    """Return a checked question, of a `Question` or a dict in vLLM's form. Errors begin with `label`."""
    if isinstance(question, Question):
        return question
    if not isinstance(question, Mapping):
        raise _refusal(f"{label} must be a dict with type, instructions and criteria, got {shown(question)}.")
    if unknown := sorted(map(str, question.keys() - _FIELDS)):
        raise _refusal(f"{label} has the unknown field {shown(unknown[0])}: it takes type, instructions and criteria.")
    kind, criteria = question.get("type"), question.get("criteria")
    reader = _READERS.get(kind) if isinstance(kind, str) else None
    if reader is None:
        raise _refusal(f"{label}: type must be 'choice', 'score' or 'noul', got {shown(kind)}.")
    asked = question.get("instructions")
    instructions = "" if asked is None else text_of(asked, f"{label}: instructions", MAX_TEXT_LENGTH)
    return Question(cast(QuestionType, kind), instructions, reader(criteria, f"{label}: criteria"))


def make_option(text: Any, description: str | None, label: str, name: str | None = None) -> Option:
    """Return an option that the prompt calls `text`, and the answer `name`, by default the same. Raises
    VLLMValidationError for a text that cannot be an answer.
    """
    if not isinstance(text, str) or not text.strip() or len(text) > MAX_OPTION_LENGTH or not is_unicode(text):
        message = f"{label}: an option must be a text of 1 to {MAX_OPTION_LENGTH} characters, not all spaces; got "
        raise _refusal(f"{message}{shown(text)}.")
    return Option(text if name is None else name, (text,), description)


def text_of(value: Any, label: str, most: int | None = None) -> str:
    """Return a text, or a JSON value as JSON. Raises VLLMValidationError for other values, and for more than `most`
    characters.
    """
    parameter = label if label.isidentifier() else "questions"
    if not isinstance(value, str):
        try:
            value = json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise _refusal(f"{label} must be a text or a JSON value, got {shown(value)}.", parameter) from error
    if most is not None and len(value) > most:
        raise _refusal(f"{label} must have at most {most} characters, got {len(value)}.", parameter)
    if not is_unicode(value):
        raise _refusal(f"{label} has lone surrogates, which are not Unicode.", parameter)
    return value


def _checked_id(name: Any, label: str) -> str:
    if not isinstance(name, str) or not name or not is_unicode(name):
        raise _refusal(f"{label}: an id must be a non-empty string, got {shown(name)}.")
    return name


def _read_choice(criteria: Any, label: str) -> tuple[Option, ...]:
    if not isinstance(criteria, Mapping) or not 1 <= len(criteria) <= MAX_OPTIONS:
        raise _refusal(f"{label} must be a dict from option to description with 1 to {MAX_OPTIONS} options.")
    return tuple(make_option(name, _description(each, label), label) for name, each in criteria.items())


def _read_score(criteria: Any, label: str) -> tuple[Option, ...]:
    if not isinstance(criteria, Sequence) or isinstance(criteria, str) or not 2 <= len(criteria) <= MAX_LEVELS:
        raise _refusal(f"{label} must be a list of 2 to {MAX_LEVELS} levels, the lowest first.")
    levels = [text_of(each, f"{label}: a level", MAX_TEXT_LENGTH) for each in criteria]
    return tuple(Option(str(i), (str(i),), level) for i, level in enumerate(levels))


def _read_noul(criteria: Any, label: str) -> tuple[Option, ...]:
    described = {} if criteria is None else criteria
    if not isinstance(described, Mapping) or not described.keys() <= {"true", "false"}:
        raise _refusal(f"{label} must be null, or an object with descriptions of true and false.")
    yes, no = (_description(described.get(name), label) for name in ("true", "false"))
    return Option("yes", ("yes", "Yes"), yes), Option("no", ("no", "No"), no)


_READERS = {"choice": _read_choice, "score": _read_score, "noul": _read_noul}


def _description(description: Any, label: str) -> str | None:
    return None if description is None else text_of(description, f"{label}: a description", MAX_TEXT_LENGTH)


def _refusal(message: str, parameter: str = "questions") -> VLLMValidationError:
    return VLLMValidationError(message, parameter=parameter)
