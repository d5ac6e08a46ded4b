"""The types of `/v1/systemone`, in the form of vLLM, which has the one of TypeSafe's System One."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from jaxllm.decisions import Answer, DecisionOutput
from jaxllm.server.decisions.fields import SHARED_REFUSED, DecisionFields

SYSTEMONE_REFUSED: Mapping[str, str] = {
    **SHARED_REFUSED,
    "decision_template": "prompts have one form; put what it says into instructions",
    "seed": "options have no labels to draw: use num_orders to average over their order",
    "assets": "send images",
}


class QuestionSpec(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A question. Unknown fields are refused, as in vLLM: one might change the answer."""

    type: Literal["choice", "score", "noul"]
    instructions: Any = None
    """The question's text, or JSON that is sent as text."""
    criteria: Any = None
    """A choice has an object from option to description or null, a score the list of its levels, the lowest first, and
    a noul null or descriptions of true and false."""


class InlineImage(msgspec.Struct, kw_only=True):
    """An image in the request."""

    content_type: str
    """Such as image/png."""
    base64: str

    @property
    def url(self) -> str:
        """Return the image as a data URL."""
        return f"data:{self.content_type};base64,{self.base64}"


class SystemOneRequest(DecisionFields, kw_only=True):
    """The request of `/v1/systemone`."""

    state: str | dict[str, Any] | list[Any]
    """What the questions are about: a text, or JSON that is sent as text."""
    questions: dict[str, QuestionSpec]
    images: list[str | InlineImage] = msgspec.field(default_factory=list)
    """Images, which come before the state; a text is a URL."""

    def questions_asked(self) -> dict[str, dict[str, Any]]:
        """Return the questions as the engine reads them."""
        return {name: msgspec.structs.asdict(spec) for name, spec in self.questions.items()}

    def image_parts(self) -> list[dict[str, Any]]:
        """Return the images as content parts of chat."""
        urls = [each if isinstance(each, str) else each.url for each in self.images]
        return [{"type": "image_url", "image_url": {"url": url}} for url in urls]


class SystemOneChoice(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="choice"):
    """The most likely option, and the probabilities of all."""

    choice: str
    probabilities: dict[str, float]
    confidence: float
    """The probability of the choice among all texts."""


class SystemOneScore(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="score"):
    """The expected level, from 0, and the probabilities of all levels."""

    score: float
    legend: dict[str, str]
    """The levels' texts by their numbers."""
    probabilities: dict[str, float]
    confidence: float


class NoulAnswer(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="noul"):
    """The probability of yes."""

    noul: float
    probabilities: dict[str, float]
    """The probabilities of "yes" and "no"."""
    confidence: float


class SystemOneUsage(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of all prompts, and one token for each row of log-probabilities."""

    input_tokens: int
    output_tokens: int


class QuestionDiagnostics(msgspec.Struct, frozen=True, kw_only=True):
    """What the model would have said without the question's options."""

    label_mass: float
    """The probability of all options among all texts."""
    argmax_is_label: bool
    """Whether the most likely first token begins an option."""


class SystemOneResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/v1/systemone`."""

    id: str
    object: str = "structured_decision"
    created: int = msgspec.field(default_factory=lambda: int(time.time()))
    model: str
    answers: dict[str, SystemOneChoice | SystemOneScore | NoulAnswer]
    usage: SystemOneUsage
    diagnostics: dict[str, QuestionDiagnostics]

    @classmethod
    def of(cls, output: DecisionOutput, answer_id: str, model: str) -> SystemOneResponse:
        """Return the answer for a decision."""
        return cls(
            id=answer_id,
            model=model,
            answers={name: _shown(answer) for name, answer in output.answers.items()},
            usage=SystemOneUsage(input_tokens=output.num_input_tokens, output_tokens=output.num_rows),
            diagnostics={
                name: QuestionDiagnostics(label_mass=answer.label_mass, argmax_is_label=answer.argmax_is_label)
                for name, answer in output.answers.items()
            },
        )


def _shown(answer: Answer) -> SystemOneChoice | SystemOneScore | NoulAnswer:
    shared: dict[str, Any] = {"probabilities": answer.probabilities, "confidence": answer.confidence}
    if answer.type == "choice":
        return SystemOneChoice(choice=answer.choice, **shared)
    if answer.type == "score":
        return SystemOneScore(score=answer.score, legend=answer.legend or {}, **shared)
    return NoulAnswer(noul=answer.noul, **shared)
