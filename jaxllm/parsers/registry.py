"""Look up parsers by vLLM's names, or by the marks in a chat template."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from jaxllm.exceptions import VLLMValidationError
from jaxllm.parsers.reasoning import HARMONY
from jaxllm.parsers.tool_parser import ToolParser

_OWN = {
    "hermes": ("hermes", "HermesParser"),
    "qwen3_json": ("hermes", "HermesParser"),
    "llama3_json": ("llama3_json", "Llama3JsonParser"),
    "llama4_json": ("llama3_json", "Llama3JsonParser"),
    "pythonic": ("pythonic", "PythonicParser"),
    "llama4_pythonic": ("pythonic", "PythonicParser"),
    "mistral": ("mistral", "MistralParser"),
    "qwen3_xml": ("qwen3_xml", "Qwen3XmlParser"),
    "qwen3_coder": ("qwen3_xml", "Qwen3XmlParser"),
    "deepseek_v3": ("deepseek_v3", "DeepSeekV3Parser"),
    "deepseek_v31": ("deepseek_v3", "DeepSeekV31Parser"),
    "glm45": ("glm45", "Glm45Parser"),
    "glm47": ("glm45", "Glm45Parser"),
    "openai": ("openai", "OpenAIParser"),
}
"""The module and class of each built-in tool parser."""


class ToolParserManager:
    """Looks up tool parsers, including those of plugins."""

    tool_parsers: ClassVar[dict[str, type[ToolParser]]] = {}
    """The tool parsers that plugins have registered."""

    @classmethod
    def names(cls) -> list[str]:
        """Return the names of all tool parsers."""
        return sorted({*_OWN, *cls.tool_parsers})

    @classmethod
    def get_tool_parser(cls, name: str) -> type[ToolParser]:
        """Return a tool parser by name. Raises VLLMValidationError, with all names, for an unknown one."""
        if name in cls.tool_parsers:
            return cls.tool_parsers[name]
        if name not in _OWN:
            message = f"tool_call_parser={name!r} is not known; there are {', '.join(cls.names())}."
            raise VLLMValidationError(message, parameter="tool_call_parser", value=name)
        module, kind = _OWN[name]
        return getattr(importlib.import_module(f"jaxllm.parsers.tools.{module}"), kind)

    @classmethod
    def register_module(
        cls, name: str | list[str], force: bool = True, module: type[ToolParser] | None = None
    ) -> Callable[[type[ToolParser]], type[ToolParser]]:
        """Register a class under one name or several: as a decorator, or `module` at once.

        A name in use is an error unless `force`.
        """

        def register(kind: type[ToolParser]) -> type[ToolParser]:
            if not (isinstance(kind, type) and issubclass(kind, ToolParser)):
                message = f"tool_parser_plugin: {kind!r} is no subclass of jaxllm.parsers.tool_parser.ToolParser."
                raise VLLMValidationError(message, parameter="tool_parser_plugin", value=name)
            for parser_name in [name] if isinstance(name, str) else name:
                if not force and parser_name in cls.names():
                    message = f"tool_parser_plugin: there is a tool parser {parser_name!r} already."
                    raise VLLMValidationError(message, parameter="tool_parser_plugin", value=parser_name)
                cls.tool_parsers[parser_name] = kind
            return kind

        if module is not None:
            register(module)
        return register

    @classmethod
    def import_tool_parser(cls, plugin_path: str) -> None:
        """Run a Python file that registers tool parsers. Raises VLLMValidationError if it fails."""
        try:
            spec = importlib.util.spec_from_file_location(Path(plugin_path).stem, plugin_path)
            if spec is None or spec.loader is None:
                raise ImportError("it is no Python file")
            spec.loader.exec_module(importlib.util.module_from_spec(spec))
        except VLLMValidationError:
            raise
        except Exception as error:  # a plugin may fail in any way
            message = f"tool_parser_plugin={plugin_path!r} cannot be loaded: {error!r}."
            raise VLLMValidationError(message, parameter="tool_parser_plugin", value=plugin_path) from error


def find_tool_parser(template: str) -> str | None:
    """Return the name of the tool parser for the marks in a chat template, or None."""
    tells = (
        ("<|channel|>", "openai"),
        ("<｜tool▁sep｜>", "deepseek_v3" if "```json" in template else "deepseek_v31"),
        ("[TOOL_CALLS]", "mistral"),
        ("<arg_key>", "glm45"),
        ("<function=", "qwen3_xml"),
        ("<tool_call>", "hermes"),
        ("<|python_start|>", "pythonic"),
        ("[func_name1(", "pythonic"),
        ("<|python_tag|>", "llama3_json"),
        ('"parameters": dictionary of argument name', "llama3_json"),
    )
    return next((name for mark, name in tells if mark in template), None)


def find_reasoning_parser(template: str) -> str | None:
    """Return the name of the reasoning parser for the marks in a chat template, or None."""
    if "<|channel|>" in template:
        return HARMONY
    if "[THINK]" in template:
        return "mistral"
    if "<think>" not in template and "</think>" not in template:
        return None
    if "<arg_key>" in template:
        return "glm45"
    return "deepseek_r1" if "<｜" in template else "qwen3"
