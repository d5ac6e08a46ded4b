"""Build the grammar that an answer must match: tool calls and response formats, after any reasoning."""

from __future__ import annotations

from typing import Any

from jaxllm.exceptions import VLLMValidationError
from jaxllm.params.structured_outputs import StructuredOutputsParams
from jaxllm.parsers import formats
from jaxllm.parsers.after_reasoning import after_reasoning
from jaxllm.parsers.reasoning import HARMONY
from jaxllm.parsers.tool_parser import ToolParser
from jaxllm.server.openai.tools import ToolUse


def answer_grammar(
    asked: StructuredOutputsParams | None,
    use: ToolUse,
    parser: type[ToolParser] | None,
    reasoning: str | None,
    prompt: str,
) -> StructuredOutputsParams | None:
    """Return the constraint on a whole output. `asked` applies to the answer if no tool has to be called.

    `parser` reads the calls. `reasoning` names the reasoning parser; `prompt` may already have begun the reasoning.
    Raises VLLMValidationError for settings that conflict.
    """
    if parser is None and (asked is None or reasoning is None):
        return asked
    form = None if asked is None else formats.as_format(asked)
    knows_channels = parser is not None and reasoning == HARMONY
    if form is not None and knows_channels:
        form = after_reasoning(form, HARMONY, prompt)
    if parser is not None and use.needs_grammar:
        form = _calls(asked, form, use, parser)
    elif parser is not None and form is not None:
        form = formats.either(_calls(asked, form, use._replace(is_required=True), parser), form)
    if form is None:
        return asked
    if reasoning is not None and not knows_channels:
        form = after_reasoning(form, reasoning, prompt, () if parser is None else parser.marks[:1])
    return formats.from_format(form, asked)


def _calls(
    asked: StructuredOutputsParams | None, form: dict[str, Any] | None, use: ToolUse, parser: type[ToolParser]
) -> dict[str, Any]:
    """Return the format of an answer that may or must call tools."""
    if asked is not None and form is None:
        message = "what it asks for cannot be joined with tools: use a JSON schema, or a structural tag with 'format'."
        raise VLLMValidationError(message, parameter="structured_outputs")
    at_least_one = use.is_required or form is not None
    calls = parser.grammar(use.enforced, at_least_one=at_least_one, parallel=use.is_parallel)
    return calls if form is None or use.is_required else formats.either(calls, form)
