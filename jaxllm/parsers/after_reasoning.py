"""Let a constraint on an answer begin once the model has done reasoning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxllm.parsers import formats
from jaxllm.parsers.reasoning import HARMONY, marks_of
from jaxllm.parsers.tools.openai import after_analysis, final_message

_GAP = formats.either(*map(formats.text, ("\n\n", "\n", "")))
"""The whitespace that models write between reasoning and answer."""


def after_reasoning(form: dict[str, Any], parser: str, prompt: str, call_marks: Sequence[str] = ()) -> dict[str, Any]:
    """Return the format of outputs that match `form` after the reasoning that `parser` reads.

    `prompt` may already have begun the reasoning, or ended it. The reasoning contains none of the `call_marks`: a call
    in it would end it without matching its schema.
    """
    if parser == HARMONY:
        return after_analysis(final_message(form))
    marks, thoughts = marks_of(parser), formats.any_text(*call_marks)
    has_begun = marks.has_begun(prompt)
    if has_begun is False:
        return form
    if has_begun:
        return formats.sequence(formats.tag("", thoughts, marks.end), _GAP, form)
    before = formats.sequence(formats.tag(marks.start, thoughts, marks.end), _GAP)
    return formats.sequence(formats.optional(before), form)


def opened(prompt: str, parser: str | None) -> str:
    """Return a prompt with the start of reasoning at its end, if a parser assumes it, as vLLM's does.

    It assumes so unless the prompt's last turn has begun or ended reasoning.
    """
    if parser is None or parser == HARMONY:
        return prompt
    marks = marks_of(parser)
    return prompt + marks.start if marks.is_implied and marks.has_begun(prompt) is None else prompt
