"""Structured outputs of a model that reasons first: the constraint holds after the reasoning."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Self

from jaxllm.engine.front.front_end import FrontEnd
from jaxllm.exceptions import VLLMValidationError
from jaxllm.parsers import formats
from jaxllm.parsers.after_reasoning import after_reasoning, opened
from jaxllm.parsers.mark_suffix import find_suffix
from jaxllm.parsers.reasoning import AUTO, MARKS
from jaxllm.parsers.registry import find_reasoning_parser
from jaxllm.sampling_params import SamplingParams
from jaxllm.text.prompts import parse_prompt

_TAIL = 4096
"""The tokens at a prompt's end whose text may show where its reasoning begins."""


class ReasoningGrammar:
    """Moves the structured outputs of requests behind the reasoning that a parser reads."""

    @classmethod
    def of(cls, parser: str, front: FrontEnd) -> Self | None:
        """Return one for an engine with a parser; None without, and where constraints hold in reasoning too.

        Raises VLLMValidationError for an engine without a tokenizer.
        """
        if not parser or front.ready.vllm_config.structured_outputs_config.enable_in_reasoning:
            return None
        return cls(parser, front)

    def __init__(self, parser: str, front: FrontEnd) -> None:
        """Use a parser by its name, or with "auto" the one that the chat template implies, if any."""
        tokenizer = front.require_tokenizer()
        template = front.ready.chat_template or tokenizer.parts.chat_template or ""
        text = "\n".join(template.values()) if isinstance(template, Mapping) else template
        name = find_reasoning_parser(text) if parser == AUTO else parser
        self._parser = f"{name}{find_suffix(text)}" if name in MARKS else name
        self._is_named = parser != AUTO
        self._tokenizer, self._media = tokenizer, front.ready.media

    def behind_reasoning(self, prompts: Sequence[Any], params: Sequence[Any]) -> list[Any]:
        """Return the params of each prompt, those with structured outputs changed; prompts that allow it share them.

        Raises VLLMValidationError for a constraint that nothing can stand before.
        """
        made: dict[tuple[int, str], Any] = {}
        changed: list[Any] = []
        for i, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
            if self._parser is None or not isinstance(one, SamplingParams) or one.structured_outputs is None:
                changed.append(one)
                continue
            form = formats.as_format(one.structured_outputs)
            if form is None:
                message = f"prompts[{i}]: structured_outputs cannot stand after reasoning: use a JSON schema, a regex, "
                message += "choices, a grammar, or a structural tag with 'format'."
                raise VLLMValidationError(message, parameter="structured_outputs")
            whole = formats.from_format(after_reasoning(form, self._parser, self._text(prompt)), one.structured_outputs)
            key = id(one), str(whole.structural_tag)
            if key not in made:
                made[key] = copy.copy(one)
                made[key].structured_outputs = whole
            changed.append(made[key])
        return changed

    def _text(self, prompt: Any) -> str:
        """Return the text of a prompt's end, with the start of reasoning if the parser assumes it."""
        parsed = parse_prompt(prompt, "prompt", self._media)
        text = parsed.text
        if text is None:
            text = self._tokenizer.decode(list(parsed.token_ids or ())[-_TAIL:], skip_special_tokens=False)
        return opened(text, self._parser) if self._is_named else text
