"""Look up parsers by vLLM's names, or by the marks in a chat template."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from jaxllm.exceptions import VLLMValidationError
from jaxllm.parsers.mark_suffix import without_suffix
from jaxllm.parsers.reasoning import HARMONY
from jaxllm.parsers.tool_parser import ToolParser

_FORMS = {
    "marked_json.HermesParser": ("hermes", "qwen3_json", "granite4", "exaone4", "ernie45"),
    "marked_json.GraniteParser": ("granite",),
    "marked_json.JambaParser": ("jamba", "hunyuan_a13b"),
    "marked_json.Phi4MiniParser": ("phi4_mini_json",),
    "marked_json.InternLMParser": ("internlm",),
    "marked_json.CohereParser": ("cohere_command3", "cohere_command4"),
    "marked_json.ApertusParser": ("apertus",),
    "llama3_json.Llama3JsonParser": ("llama3_json", "llama4_json"),
    "llama3_json.XLAMParser": ("xlam",),
    "pythonic.PythonicParser": ("pythonic", "llama4_pythonic"),
    "pythonic.Lfm2Parser": ("lfm2",),
    "pythonic.Olmo3Parser": ("olmo3",),
    "mistral.MistralParser": ("mistral",),
    "qwen3_xml.Qwen3XmlParser": ("qwen3_xml", "qwen3_coder", "nemotron_v3", "step3p5"),
    "qwen3_xml.MiMoParser": ("mimo",),
    "qwen3_xml.SeedOSSParser": ("seed_oss",),
    "qwen3_xml.MiniMaxM2Parser": ("minimax_m2",),
    "qwen3_xml.DeepSeekV32Parser": ("deepseek_v32",),
    "qwen3_xml.DeepSeekV4Parser": ("deepseek_v4",),
    "deepseek_v3.DeepSeekV3Parser": ("deepseek_v3",),
    "deepseek_v3.DeepSeekV31Parser": ("deepseek_v31",),
    "deepseek_v3.KimiK2Parser": ("kimi_k2",),
    "glm45.Glm45Parser": ("glm45", "glm47"),
    "glm45.HunyuanV3Parser": ("hy_v3",),
    "gemma4.Gemma4Parser": ("gemma4",),
    "openai.OpenAIParser": ("openai",),
}
"""The names of each built-in tool parser, by its module in `tools` and its class."""
_OWN = {name: form for form, names in _FORMS.items() for name in names}


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
        module, kind = _OWN[name].split(".")
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


_OWN_MARKS = (
    *(("<|channel|>", "openai"), ("[TOOL_CALLS]", "mistral"), ("｜DSML｜", "deepseek_v32")),
    *(("<｜tool▁sep｜>", "deepseek_v31"), ("<seed:tool_call>", "seed_oss")),
    *(("<minimax:tool_call>", "minimax_m2"), ("<|tool_calls_section_begin|>", "kimi_k2")),
    *(("<|tool_call_start|>", "lfm2"), ("<|tool_list_start|>", "lfm2"), ("<|tool_call>", "gemma4")),
    *(("<|START_ACTION|>", "cohere_command3"), ("<function_calls>", "olmo3"), ("<tool_sep>", "hy_v3")),
    *(("<|action_start|>", "internlm"), ("functools[", "phi4_mini_json"), ("<|/tool|>", "phi4_mini_json")),
    *(("<|python_start|>", "pythonic"), ("[func_name1(", "pythonic"), ("<|tools_prefix|>", "apertus")),
)
"""Marks that only one form of calls has. The first of two forms that share one is meant."""
_SHARED_MARKS = (
    *(("<arg_key>", "glm45"), ("<tool_calls>", "jamba"), ("<function=", "qwen3_xml"), ("<|tool_call|>", "granite")),
    *(("<tool_call>", "hermes"), ("<|python_tag|>", "llama3_json")),
    ('"parameters": dictionary of argument name', "llama3_json"),
    ('[{"name": "tool_call_name"', "xlam"),
)
"""Marks that tell the form if none of the others is there, the first one first."""
_ON_ONE_LINE = re.compile(r"<parameter=\w+>[^<>\\\n]+</parameter>")
"""A value on the line of its tags, as in MiMo's example of a call; those of Qwen 3 have lines of their own."""


def find_tool_parsers(template: str) -> list[str]:
    """Return the names of the tool parsers for the marks in a chat template, the likeliest first.

    More than one is ambiguous.
    """
    template = without_suffix(template)
    names = list(dict.fromkeys(name for mark, name in _OWN_MARKS if mark in template))
    older = {"deepseek_v31": ("deepseek_v3", "```json" in template)}
    older["deepseek_v32"] = ("deepseek_v4", "function_calls" not in template)
    names = [older[name][0] if name in older and older[name][1] else name for name in names]
    names = names or [name for mark, name in _SHARED_MARKS if mark in template][:1]
    return ["mimo"] if names == ["qwen3_xml"] and _ON_ONE_LINE.search(template) else names


def find_reasoning_parser(template: str) -> str | None:
    """Return the name of the reasoning parser for the marks in a chat template, or None."""
    tells = (
        *(("<|channel|>", HARMONY), ("[THINK]", "mistral"), ("<seed:think>", "seed_oss"), ("<|channel>", "gemma4")),
        *(("<|START_THINKING|>", "cohere_command3"), ("my thought process:", "granite")),
    )
    template = without_suffix(template)
    name = next((name for mark, name in tells if mark in template), None)
    if name is not None or ("<think>" not in template and "</think>" not in template):
        return name
    if "<arg_key>" in template:
        return "glm45"
    if "</answer>" in template or "</response>" in template:
        return "hunyuan_a13b" if "</answer>" in template else "ernie45"
    return "deepseek_r1" if "<｜" in template else "qwen3"
