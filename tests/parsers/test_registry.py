"""Parsers are found by name, from plugins, and from chat templates."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxllm.exceptions import VLLMValidationError
from jaxllm.parsers.registry import ToolParserManager, find_reasoning_parser, find_tool_parsers
from jaxllm.parsers.tool_parser import ToolParser

PLUGIN = """
from jaxllm.parsers.registry import ToolParserManager
from jaxllm.parsers.tools.marked_json import HermesParser

@ToolParserManager.register_module({names!r})
class Mine(HermesParser):
    pass
"""


@pytest.fixture(autouse=True)
def plugins(monkeypatch: pytest.MonkeyPatch) -> dict[str, type[ToolParser]]:
    """Parsers that a test registers are forgotten after it."""
    known: dict[str, type[ToolParser]] = {}
    monkeypatch.setattr(ToolParserManager, "tool_parsers", known)
    return known


@pytest.mark.parametrize("name", ToolParserManager.names())
def test_every_name_is_of_a_parser(name: str) -> None:
    kind = ToolParserManager.get_tool_parser(name)
    assert issubclass(kind, ToolParser)
    assert kind.marks


def test_an_unknown_name_is_refused_with_all_names() -> None:
    with pytest.raises(VLLMValidationError, match=r"tool_call_parser='nome'.*hermes.*mistral.*qwen3_xml"):
        ToolParserManager.get_tool_parser("nome")


def test_a_plugin_registers_its_parser(tmp_path: Path, plugins: dict[str, type[ToolParser]]) -> None:
    path = tmp_path / "plugin.py"
    path.write_text(PLUGIN.format(names=["mine", "hermes"]))
    ToolParserManager.import_tool_parser(str(path))
    assert plugins.keys() == {"mine", "hermes"}
    for name in plugins:  # a plugin may stand in for a parser of ours
        assert ToolParserManager.get_tool_parser(name).__name__ == "Mine"
    assert "mine" in ToolParserManager.names()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import no_such_module", "no_such_module"),
        ("1 +", "SyntaxError"),
        ("1 / 0", "ZeroDivisionError"),
        (
            "from jaxllm.parsers.registry import ToolParserManager\nToolParserManager.register_module('a', module=int)",
            "int",
        ),
    ],
)
def test_a_plugin_that_fails_is_refused_by_name(tmp_path: Path, source: str, message: str) -> None:
    path = tmp_path / "plugin.py"
    path.write_text(source)
    with pytest.raises(VLLMValidationError, match=message) as caught:
        ToolParserManager.import_tool_parser(str(path))
    assert caught.value.parameter == "tool_parser_plugin"


def test_a_plugin_that_is_not_there_is_refused(tmp_path: Path) -> None:
    for name in ("none.py", "none"):
        with pytest.raises(VLLMValidationError, match=f"tool_parser_plugin.*{name}"):
            ToolParserManager.import_tool_parser(str(tmp_path / name))


def test_a_name_that_is_taken_stays_unless_forced() -> None:
    kind = ToolParserManager.get_tool_parser("mistral")
    with pytest.raises(VLLMValidationError, match="'hermes' already"):
        ToolParserManager.register_module("hermes", force=False, module=kind)
    ToolParserManager.register_module("hermes", module=kind)
    assert ToolParserManager.get_tool_parser("hermes") is kind


@pytest.mark.parametrize(
    ("model", "template", "tools", "reasoning"),
    [
        ("Qwen 2.5", 'return a json object\n<tool_call>\\n{"name": <function-name>', "hermes", None),
        ("Qwen 3", "<tool_call>\\n{\"name\": ... '<think>\\n\\n</think>\\n\\n'", "hermes", "qwen3"),
        ("Qwen 3 Coder", "<tool_call>\\n<function=example_function_name>\\n<parameter=", "qwen3_xml", None),
        ("Qwen 3.5", "<tool_call>\\n<function=example>\\n<parameter= <think>\\n", "qwen3_xml", "qwen3"),
        ("Llama 3.1", "'<|python_tag|>' + tool_call.name", "llama3_json", None),
        (
            "Llama 3.2",
            'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.',
            "llama3_json",
            None,
        ),
        ("Llama 3.2, pythonic", "Respond in the format [func_name1(params_name1=params_value1", "pythonic", None),
        ("Llama 4", "'<|python_start|>' ... <|python_end|>", "pythonic", None),
        ("Mistral", "[TOOL_CALLS] [", "mistral", None),
        ("Magistral", "[THINK]...[/THINK] [TOOL_CALLS]", "mistral", "mistral"),
        (
            "DeepSeek R1",
            "'<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + '\\n' + '```json' '<think>\\n'",
            "deepseek_v3",
            "deepseek_r1",
        ),
        (
            "DeepSeek V3.1",
            "<｜tool▁call▁begin｜>tool_call_name<｜tool▁sep｜>... </think>",
            "deepseek_v31",
            "deepseek_r1",
        ),
        ("GLM 4.5", "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key> <think></think>", "glm45", "glm45"),
        ("gpt-oss", "<|start|>assistant<|channel|>analysis<|message|>", "openai", "openai_gptoss"),
        ("Granite 3", "respond with <|tool_call|> followed by a JSON list", "granite", None),
        ("Granite 4", 'return a json object\n<tool_call>\n{"name": <function-name>', "hermes", None),
        ("Jamba", "'<tool_calls>\n[' + calls + ']\n</tool_calls>'", "jamba", None),
        ("Phi 4 mini", 'formatted as functools[{"name": [function name]', "phi4_mini_json", None),
        ("Phi 4 mini, its own", "'<|tool|>' + message['tools'] + '<|/tool|>'", "phi4_mini_json", None),
        ("InternLM 2.5", "<|action_start|><|plugin|>\n", "internlm", None),
        (
            "Command R7B",
            "<|START_THINKING|>plan<|END_THINKING|><|START_ACTION|>[",
            "cohere_command3",
            "cohere_command3",
        ),
        ("Apertus", "{{- '<|tools_prefix|>[' }} ... <|inner_prefix|>", "apertus", None),
        (
            "HunYuan A13B",
            "'<think>\n' ... '\n</think>\n<answer>\n' ... '\n</answer>' <tool_calls>",
            "jamba",
            "hunyuan_a13b",
        ),
        ("ERNIE 4.5", "</think>\n\n<response>\n ... </response>\n<tool_call>\n", "hermes", "ernie45"),
        ("xLAM", '[{"name": "tool_call_name", "arguments": {"arg1": "value1"}}]', "xlam", None),
        ("Kimi K2", "<|tool_calls_section_begin|><|tool_call_begin|>", "kimi_k2", None),
        ("Kimi K2 Thinking", "<think></think><|tool_calls_section_begin|>", "kimi_k2", "qwen3"),
        ("Seed-OSS", "<seed:tool_call>\n<function= <seed:think>", "seed_oss", "seed_oss"),
        ("MiniMax M2", '<minimax:tool_call>\n<invoke name="a"> <think>\n', "minimax_m2", "qwen3"),
        ("DeepSeek V3.2", "'<｜DSML｜' + 'function_calls>' <think>", "deepseek_v32", "deepseek_r1"),
        ("DeepSeek V4", "<｜DSML｜tool_calls> <think>", "deepseek_v4", "deepseek_r1"),
        ("Hunyuan 3", "<tool_calls><tool_call>f<tool_sep>\n<arg_key> <think>", "hy_v3", "glm45"),
        (
            "Hunyuan 3, released",
            "{%- set HYTK = ':opensource' %}{{ '<tool_calls{}>\n<tool_call{}>f<tool_sep{}>\n<arg_key{}> <think{}>' }}",
            "hy_v3",
            "glm45",
        ),
        ("Hunyuan 3, written out", "<tool_call:x>f<tool_sep:x>\n<arg_key:x> </think:x>", "hy_v3", "glm45"),
        (
            "MiMo V2",
            "<tool_call>\\n<function=example_function_name>\\n<parameter=example_1>value_1</parameter>\\n <think>",
            "mimo",
            "qwen3",
        ),
        ("Qwen 3 Coder's example", "<function=f>\n<parameter=example_1>\nvalue_1\n</parameter>", "qwen3_xml", None),
        ("LFM2", "List of tools: <|tool_list_start|>[", "lfm2", None),
        ("Olmo 3", "a pythonic function call wrapped in <function_calls></function_calls>", "olmo3", None),
        ("Gemma 4", "'<|tool_call>call:' '<|channel>thought\n<channel|>' '<|tool_response>'", "gemma4", "gemma4"),
        ("a template of old", "<|im_start|>user", None, None),
        ("no template", "", None, None),
    ],
)
def test_a_template_tells_its_parsers(model: str, template: str, tools: str | None, reasoning: str | None) -> None:
    names = find_tool_parsers(template)
    assert (names, find_reasoning_parser(template)) == ([] if tools is None else [tools], reasoning), model


def test_a_template_with_marks_of_two_forms_is_ambiguous() -> None:
    assert find_tool_parsers("[TOOL_CALLS] or <seed:tool_call><function=") == ["mistral", "seed_oss"]
