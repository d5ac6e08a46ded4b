"""The conversations that ask the questions of a decision.

A prompt has the state first, then what differs between questions: they share all tokens before that. The answer begins
after the template's generation prompt.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxllm.decisions import Option, Question
from jaxllm.engine.front.front_end import FrontEnd
from jaxllm.exceptions import VLLMValidationError
from jaxllm.text.prompts import ParsedPrompt

NULL_STATE = "N/A"
"""The state of the prompts that calibrate: it says nothing."""

_MARKER = "jaxllm-answer"
_OPEN, _CLOSE = "<think>", "</think>"
_TASKS = {
    "choice": "Answer with exactly one of these options, word for word, and nothing else:",
    "score": "Answer with exactly one of these levels, as a number, and nothing else:",
    "noul": "Answer with yes or no, and nothing else:",
}


@dataclass(frozen=True, slots=True)
class Template:
    """How conversations become prompts."""

    chat_template: str | None = None
    kwargs: Mapping[str, Any] | None = None
    """Variables of the template; enable_thinking is False unless they name it."""
    cache_salt: str | None = None
    images: Sequence[Any] = ()
    """Content parts of images, which come before the state."""
    content_format: str = "auto"
    """Whether messages have texts or lists of parts, as the renderer reads it."""

    def render(self, front: FrontEnd, text: str) -> ParsedPrompt:
        """Return the prompt that asks for an answer to a text. A block of reasoning that the template opens is closed,
        unless the template's variables turn thinking on.
        """
        message = {"role": "user", "content": [*self.images, {"type": "text", "text": text}] if self.images else text}
        prompt = self._render(front, [message], "images" if self.images else "state")
        rendered = prompt.text or ""
        if not self._variables["enable_thinking"] and rendered.rstrip().endswith(_OPEN):
            rendered = f"{rendered.rstrip()}\n\n{_CLOSE}\n\n"
        return dataclasses.replace(prompt, text=rendered, salt=self.cache_salt)

    def end_id(self, front: FrontEnd) -> int | None:
        """Return the token that the template puts after an answer, or else the end of sequence; None without both."""
        tokenizer = front.require_tokenizer()
        eos = front.ready.generation_config.get("eos_token_id")
        ends = {tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])} - {None}
        after = self._after_answer(front)
        ids = tokenizer.encode([after], add_special_tokens=False)[0] if after else []
        candidates = ids if tokenizer.eos_token_id is None else [*ids, tokenizer.eos_token_id]
        return next((each for each in candidates if each in ends and each < front.ready.vocab_size), None)

    def _after_answer(self, front: FrontEnd) -> str:
        """Return the template's text after an answer; none if it refuses conversations that end with one."""
        conversation = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARKER}]
        try:
            rendered = self._render(front, conversation, "state", add_generation_prompt=False)
        except VLLMValidationError:
            return ""
        _, marker, after = (rendered.text or "").rpartition(_MARKER)
        return after if marker else ""

    @property
    def _variables(self) -> dict[str, Any]:
        return {"enable_thinking": False, **(self.kwargs or {})}

    def _render(
        self, front: FrontEnd, conversation: list[Any], label: str, *, add_generation_prompt: bool = True
    ) -> ParsedPrompt:
        return front.chat_renderer.render(
            conversation,
            label,
            chat_template=self.chat_template,
            content_format=self.content_format,
            add_generation_prompt=add_generation_prompt,
            chat_template_kwargs=self._variables,
        )


def ask(state: str, instructions: str | None, question: Question, order: Sequence[int]) -> str:
    """Return the message that asks a question, its options in an order of their indices."""
    listed = "\n".join(_listed(question.options[i]) for i in order)
    parts = state, instructions, question.instructions, f"{_TASKS[question.type]}\n{listed}"
    return "\n\n".join(part for part in parts if part)


def orders(question: Question, count: int) -> list[range | list[int]]:
    """Return at most `count` orders of a question's options, the first as listed, the others rotated by even steps.

    The levels of a score have an order of their own, so they have only that one.
    """
    size = len(question.options)
    if question.type == "score":
        return [range(size)]
    starts = dict.fromkeys(i * size // min(count, size) for i in range(min(count, size)))
    return [[*range(start, size), *range(start)] for start in starts]


def _listed(option: Option) -> str:
    return f"- {option.spellings[0]}" + (f": {option.description}" if option.description else "")
