"""Read which tools an answer may or must call: `tools`, `tool_choice` and `parallel_tool_calls`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from jaxllm.constraints.schemas.loosened import loosened
from jaxllm.exceptions import VLLMValidationError
from jaxllm.params.checks import shown
from jaxllm.parsers.function_tool import FunctionTool, read_tools
from jaxllm.server.http.log_once import LogOnce

LEFT_OUT = LogOnce("tools of these types are left out, since no server here runs them: %s")
_CHOICES = "'auto', 'required', 'none', or {'type': 'function', 'function': {'name': ...}}"


class ToolUse(NamedTuple):
    """The tools that an answer may call."""

    tools: list[FunctionTool]
    """Empty if no tool may be called."""
    is_required: bool = False
    """The answer must be one or more calls and nothing else."""
    is_named: bool = False
    """The request names the function to call."""
    is_parallel: bool = True
    """The answer may have several calls."""

    @property
    def needs_grammar(self) -> bool:
        """Return whether the tools need a grammar: a call is required, or a schema is strict."""
        return bool(self.tools) and (
            self.is_required or not self.is_parallel or any(tool.strict for tool in self.tools)
        )

    @property
    def enforced(self) -> list[FunctionTool]:
        """Return the tools with the schemas for the grammar to enforce: only strict tools' where calls are optional."""
        return [
            msgspec.structs.replace(tool, parameters=loosened(tool.parameters))
            if self.is_required or tool.strict
            else FunctionTool(name=tool.name)
            for tool in self.tools
        ]


def read_tool_use(tools: Sequence[Any] | None, choice: Any, *, parallel: bool | None) -> ToolUse:
    """Return the tool use that a request asks for. Raises VLLMValidationError, naming the field."""
    known = read_tools(tools)
    if len({tool.name for tool in known}) < len(known):
        raise VLLMValidationError("tools: two functions have the same name.", parameter="tools")
    if choice is None or choice in ("auto", "none", "required"):
        if choice == "required" and not known:
            raise VLLMValidationError("tool_choice='required' needs tools.", parameter="tool_choice", value=choice)
        return ToolUse([] if choice == "none" else known, choice == "required", is_parallel=parallel is not False)
    if not isinstance(choice, Mapping):
        raise _refusal(f"must be {_CHOICES}, got {shown(choice)}", choice)
    if choice.get("type") == "allowed_tools":
        return _allowed(known, choice.get("allowed_tools", choice), parallel=parallel)
    return ToolUse(
        [_find({tool.name: tool for tool in known}, choice)], is_required=True, is_named=True, is_parallel=False
    )


def _allowed(known: list[FunctionTool], allowed: Any, *, parallel: bool | None) -> ToolUse:
    """Read OpenAI's `allowed_tools` choice."""
    entries = allowed.get("tools") if isinstance(allowed, Mapping) else None
    mode = allowed.get("mode", "auto") if isinstance(allowed, Mapping) else None
    if not isinstance(entries, list) or not entries or mode not in ("auto", "required"):
        raise _refusal("allowed_tools needs a mode, 'auto' or 'required', and a list of tools", shown(allowed))
    by_name = {tool.name: tool for tool in known}
    tools = list({tool.name: tool for tool in (_find(by_name, each) for each in entries)}.values())
    return ToolUse(tools, mode == "required", is_parallel=parallel is not False)


def _find(known: Mapping[str, FunctionTool], choice: Any) -> FunctionTool:
    """Return the tool named in the form of chat or of Responses."""
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if kind != "function":
        raise _refusal(f"must be {_CHOICES}, got {shown(choice)}", shown(choice))
    function = choice.get("function", choice)
    name = function.get("name") if isinstance(function, Mapping) else None
    if isinstance(name, str) and name in known:
        return known[name]
    raise _refusal(f"names the function {shown(name)}, which is not among the tools", name)


def _refusal(message: str, value: Any) -> VLLMValidationError:
    return VLLMValidationError(f"tool_choice {message}.", parameter="tool_choice", value=value)
