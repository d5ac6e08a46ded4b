"""The functions that a model may call, as requests describe them in OpenAI's form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from jaxllm.exceptions import VLLMValidationError
from jaxllm.params.checks import shown


class FunctionTool(msgspec.Struct, frozen=True, kw_only=True):
    """A function that a model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """The JSON schema of its arguments, an object; None takes any arguments."""
    strict: bool | None = None
    """Whether arguments must match the schema even if calls are optional."""

    @property
    def schema(self) -> dict[str, Any]:
        """Return the JSON schema of the arguments."""
        return self.parameters or {"type": "object"}

    def described(self) -> dict[str, Any]:
        """Return the tool as chat templates expect it."""
        function = {"name": self.name, "description": self.description or "", "parameters": self.schema}
        return {"type": "function", "function": function}


def read_tools(tools: Sequence[Any] | None, parameter: str = "tools") -> list[FunctionTool]:
    """Return the functions of OpenAI's `tools`. Raises VLLMValidationError for a bad one, naming its position."""
    return [_read(tool, f"{parameter}[{i}]", parameter) for i, tool in enumerate(tools or ())]


def _read(tool: Any, label: str, parameter: str) -> FunctionTool:
    kind = tool.get("type", "function") if isinstance(tool, Mapping) else None
    if kind != "function":
        message = f"{label}: only tools of type 'function' are called, got {shown(kind if kind else tool)}."
        raise VLLMValidationError(message, parameter=parameter, value=kind)
    try:
        read = msgspec.convert(tool.get("function"), FunctionTool, strict=False)
    except msgspec.ValidationError as error:
        raise VLLMValidationError(f"{label}.function: {error}.", parameter=parameter) from None
    if not read.name:
        raise VLLMValidationError(f"{label}.function: needs a name.", parameter=parameter, value=read.name)
    return read
