"""Choose the parsers of a model's outputs, by the server's flags or by the chat template."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jaxllm.config.server_arguments import ServerArgs
from jaxllm.exceptions import VLLMValidationError
from jaxllm.parsers.after_reasoning import opened
from jaxllm.parsers.function_tool import FunctionTool
from jaxllm.parsers.mark_suffix import find_suffix
from jaxllm.parsers.output_parser import OutputParser
from jaxllm.parsers.reasoning import AUTO, HARMONY, MARKS, marks_of
from jaxllm.parsers.registry import ToolParserManager, find_reasoning_parser, find_tool_parsers
from jaxllm.parsers.tool_parser import ToolParser
from jaxllm.parsers.tools.openai import OpenAIParser
from jaxllm.server.openai.tools import ToolUse
from jaxllm.text.tool_prompt import PARSER as TOLD_PARSER
from jaxllm.text.tool_prompt import knows_tools


def check_parsers(args: ServerArgs) -> None:
    """Load the plugin named in `args`, and refuse unknown parsers. Raises VLLMValidationError."""
    if args.tool_parser_plugin:
        ToolParserManager.import_tool_parser(args.tool_parser_plugin)
    if args.tool_call_parser not in (None, AUTO):
        ToolParserManager.get_tool_parser(args.tool_call_parser)


class OutputParsers:
    """Makes the parsers of a server's answers."""

    def __init__(self, args: ServerArgs, reasoning_parser: str, template: str | Mapping[str, str] | None) -> None:
        """Use the parsers named, else, as for the name "auto", those that the model's chat template implies."""
        text = template if isinstance(template, str) else "\n".join((template or {}).values())
        named = None if args.tool_call_parser == AUTO else args.tool_call_parser
        self._candidates = find_tool_parsers(text) if knows_tools(text) else [TOLD_PARSER]
        by_template = "as the chat template shows" if knows_tools(text) else "since the chat template knows no tools"
        self._why_tools = by_template if named is None else "as named"
        self._is_named = named is not None
        self.tool_parser_name = named or next(iter(self._candidates), None)
        """None if the form of the model's calls is unknown."""
        name = self.tool_parser_name
        suffix = find_suffix(text)
        self._tool_parser = None if name is None else ToolParserManager.get_tool_parser(name).with_suffix(suffix)
        self._is_reasoning_named = reasoning_parser not in ("", AUTO)
        reasoning = reasoning_parser if self._is_reasoning_named else find_reasoning_parser(text)
        self.reasoning = f"{reasoning}{suffix}" if reasoning in MARKS else reasoning

    def described(self) -> str:
        """Return a line for the log: the parsers, why these, and the flag that chooses another if that is in doubt."""
        if self.tool_parser_name is None:
            calls = "The chat template shows no known form of tool calls: --tool-call-parser names one"
        else:
            calls = f"Tool calls are read as {self.tool_parser_name}, {self._why_tools}"
        if not self._is_named and len(self._candidates) > 1:
            others = " and ".join(self._candidates[1:])
            calls += f", which has marks of {others} too: --tool-call-parser names the right one"
        if self.reasoning is None:
            return f"{calls}; no reasoning is split off."
        why = "as named" if self._is_reasoning_named else "as the chat template shows"
        return f"{calls}; reasoning is read as {self.reasoning}, {why}."

    def tool_parser(self, use: ToolUse) -> type[ToolParser] | None:
        """Return the parser class for an answer's calls; None if it may call nothing.

        Raises VLLMValidationError if the form of the model's calls is unknown, unless a call is required: then a
        grammar sets the form.
        """
        if not use.tools:
            return None
        if self._tool_parser is not None:
            return self._tool_parser
        if use.is_required:
            return ToolParserManager.get_tool_parser(TOLD_PARSER)
        message = (
            "tools with tool_choice='auto' need to know how the model writes calls, and its chat template does not "
            "tell: start the server with --tool-call-parser, or ask with tool_choice='required'."
        )
        raise VLLMValidationError(message, parameter="tool_choice", value="auto")

    def opened(self, prompt: str, variables: Mapping[str, Any]) -> str:
        """Return a prompt with the start of reasoning at its end, if the named parser assumes it.

        vLLM's parsers do so unless the prompt has ended the reasoning, or a variable of the chat template turns it off.
        A parser that was found from the template does not assume it.
        """
        is_off = any(variables.get(name) is False for name in ("enable_thinking", "thinking"))
        return opened(prompt, self.reasoning) if self._is_reasoning_named and not is_off else prompt

    def maker(
        self, parser: type[ToolParser] | None, tools: list[FunctionTool], prompt: str, *, holds_calls: bool
    ) -> Callable[[], OutputParser] | None:
        """Return a function that makes the parser of an answer to `prompt`; None if there is nothing to parse.

        With `holds_calls` the parser shows a call only once it is whole.
        """
        name = self.reasoning
        if parser is None and name is None:
            return None

        def make() -> OutputParser:
            reading = parser and parser(tools)
            if reading is not None:
                reading.holds_calls = holds_calls
            if name == HARMONY:
                return OutputParser(None, reading or OpenAIParser())
            return OutputParser(None if name is None else marks_of(name), reading, prompt)

        return make

    def marks(self, parser: type[ToolParser] | None) -> tuple[str, ...]:
        """Return the marker texts of the parsers."""
        name = self.reasoning
        marks = () if parser is None else parser.marks
        if name == HARMONY:
            return (*marks, *OpenAIParser.marks)
        return marks if name is None else (*marks, marks_of(name).start, marks_of(name).end)
