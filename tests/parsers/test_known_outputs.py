"""Outputs as models and the parsers' documentation show them, each read whole and letter by letter."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from jaxllm.parsers.function_tool import FunctionTool
from jaxllm.parsers.pieces import gather
from jaxllm.parsers.registry import ToolParserManager
from tests.parsers.outputs import Call, Form, calls_of, read

VALUES: dict[str, Any] = {
    "word": "hello",
    "whole": 42,
    "real": 3.14,
    "yes": True,
    "nothing": None,
    "list": ["a", "b"],
    "map": {"x": {"y": []}},
}
TYPES = {"word": "string", "whole": "integer", "real": "number", "yes": "boolean", "nothing": "null"}
TYPES |= {"list": "array", "map": "object"}
TOOLS = [
    FunctionTool(name="forecast", parameters={"type": "object", "properties": {"town": {"type": "string"}}}),
    FunctionTool(name="mcp-set.all", parameters={"properties": {key: {"type": kind} for key, kind in TYPES.items()}}),
    FunctionTool(
        name="register",
        parameters={
            "properties": {
                "first name": {"type": "string"},
                "größe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                "max-n": {"type": ["number", "null"]},
            }
        },
    ),
]
OSLO: Call = ("forecast", {"town": "Oslo"})
ROME: Call = ("forecast", {"town": "Rome"})
NONE: Call = ("forecast", {})
ALL: Call = ("mcp-set.all", VALUES)


class Known(NamedTuple):
    """An output and what it says."""

    output: str
    calls: list[Call]
    text: str = ""
    reasoning: str = ""


_JSON = (
    '{"word": "hello", "whole": 42, "real": 3.14, "yes": true, "nothing": null, "list": ["a", "b"], '
    '"map": {"x": {"y": []}}}'
)
_TEXTS = {
    "word": "hello",
    "whole": "42",
    "real": "3.14",
    "yes": "true",
    "nothing": "null",
    "list": '["a", "b"]',
    "map": '{"x": {"y": []}}',
}

KNOWN: dict[str, list[Known]] = {
    "hermes": [
        Known('<tool_call>\n{"name": "forecast", "arguments": {"town": "Oslo"}}\n</tool_call>', [OSLO]),
        Known(f'<tool_call>{{"name": "mcp-set.all", "arguments": {_JSON}}}</tool_call>', [ALL]),
        Known('I look.<tool_call>{"name": "forecast", "arguments": {"town": "Oslo"}}</tool_call>', [OSLO], "I look."),
        Known('<tool_call>\n{"name": "forecast", "arguments": {"town": "Oslo"}}', [OSLO]),
        Known('<tool_call>{"arguments": {"town": "Oslo"}, "name": "forecast"}</tool_call>', [OSLO]),
        Known('<tool_call>{"name": "forecast", "arguments": "{\\"town\\": \\"Oslo\\"}"}</tool_call>', [OSLO]),
        Known('<tool_call>{"name": "forecast", "parameters": {"town": "Oslo"}}</tool_call>', [OSLO]),
        Known('<tool_call>{"name": "forecast"}</tool_call>', [NONE]),
        Known('<tool_call>{"name": "forecast", "arguments": null}</tool_call>', [NONE]),
        Known("<tool_call>no JSON</tool_call>", [], "<tool_call>no JSON</tool_call>"),
        Known("Use <tool_call> for calls.", [], "Use <tool_call> for calls."),
    ],
    "llama3_json": [
        Known('{"name": "forecast", "parameters": {"town": "Oslo"}}', [OSLO]),
        Known('<|python_tag|>{"name": "forecast", "parameters": {"town": "Oslo"}}', [OSLO]),
        Known('{"type": "function", "name": "forecast", "arguments": {"town": "Oslo"}}', [OSLO]),
        *(
            Known(
                f'{{"name": "forecast", "parameters": {{"town": "Oslo"}}}}{separator}'
                '{"name": "forecast", "parameters": {"town": "Rome"}}',
                [OSLO, ROME],
            )
            for separator in ("; ", ";", " ; ", ";\n", "\n", "")
        ),
        Known(f'{{"name": "mcp-set.all", "parameters": {_JSON}}}', [ALL]),
        Known('{"name": "forecast", "parameters": {}} I used {it}.', [NONE], " I used {it}."),
        Known('<|python_tag|>{"name": "forecast", "parameters": {}}; and {"a": 1}', [NONE], '; and {"a": 1}'),
        Known('{"parameters": {}}', [], '{"parameters": {}}'),
        Known('{"name": "forecast too", "parameters": {}}', [], '{"name": "forecast too", "parameters": {}}'),
        Known("<|python_tag|>print(1)", [], "<|python_tag|>print(1)"),
    ],
    "pythonic": [
        Known("[forecast(town='Oslo')]", [OSLO]),
        Known('<|python_start|>[forecast(town="Oslo"), forecast(town="Rome")]<|python_end|>', [OSLO, ROME]),
        Known(
            "[mcp-set.all(word='hello', whole=42, real=3.14, yes=True, nothing=None, list=['a', 'b'], "
            "map={'x': {'y': []}}), forecast()]",
            [ALL, NONE],
        ),
        Known("[forecast(town='St. John\\'s \\\"\\n')]", [("forecast", {"town": "St. John's \"\n"})]),
        Known("[register(größe=-3, max-n=1e3)]", [("register", {"größe": -3, "max-n": 1000.0})]),
        Known("[forecast(town='Oslo'), unknown(town='Rome')]", [OSLO], ", unknown(town='Rome')]"),
        Known("[forecast(town=__import__('os'))]", [NONE], "town=__import__('os'))]"),
        Known("[forecast(1e999)]", [NONE], "1e999)]"),
        Known("[1, 2]", [], "[1, 2]"),
    ],
    "mistral": [
        Known('[TOOL_CALLS][{"name": "forecast", "arguments":{"town": "Oslo"}}]', [OSLO]),
        Known('[TOOL_CALLS] [{"arguments": {"town": "Oslo"}, "name": "forecast"}]', [OSLO]),
        Known('[TOOL_CALLS] [{"name": "forecast", "arguments": {"name": "x"}}]', [("forecast", {"name": "x"})]),
        Known(
            'Well[TOOL_CALLS] [{"name": "forecast", "arguments": {"town": "Oslo"}, "id": "a1b2c3d4e"}, '
            '{"name": "forecast", "arguments": {"town": "Rome"}}]\nSo.',
            [OSLO, ROME],
            "Well\nSo.",
        ),
        Known('[TOOL_CALLS]forecast[ARGS]{"town": "Oslo"}', [OSLO]),
        Known('[TOOL_CALLS]forecast[CALL_ID]a1b2c3d4e[ARGS]{"town": "Oslo"}', [OSLO]),
        Known('[TOOL_CALLS]forecast{"town": "Oslo"}[TOOL_CALLS]forecast{"town": "Rome"}', [OSLO, ROME]),
        Known(f"[TOOL_CALLS]mcp-set.all[ARGS]{_JSON}", [ALL]),
        Known("[TOOL_CALLS] no JSON at all", [], "[TOOL_CALLS] no JSON at all"),
    ],
    "qwen3_xml": [
        Known(
            "<tool_call>\n<function=forecast>\n<parameter=town>\nOslo\n</parameter>\n</function>\n</tool_call>", [OSLO]
        ),
        Known("<tool_call>\n<function=forecast>\n<parameter=town>Oslo</parameter>\n</function>\n</tool_call>", [OSLO]),
        Known("<function=forecast>\n<parameter=town>\nOslo\n</parameter>\n</function>", [OSLO]),
        Known("<tool_call>\n<function=forecast>\n</function>\n</tool_call>", [NONE]),
        Known(
            "<tool_call>\n<function=mcp-set.all>\n"
            + "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in _TEXTS.items())
            + "</function>\n</tool_call>",
            [ALL],
        ),
        Known(
            "So.<tool_call>\n<function=register>\n<parameter=first name>\n 12\nb \n</parameter>\n"
            "<parameter=größe>\nNone\n</parameter>\n<parameter=max-n>\n2\n</parameter>\n</function>\n</tool_call>\n\nNow.",
            [("register", {"first name": " 12\nb ", "größe": None, "max-n": 2})],
            "So.\n\nNow.",
        ),
        Known("<tool_call><function=></function>", [], "<tool_call><function=></function>"),
    ],
    "deepseek_v3": [
        Known(
            "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>forecast\n```json\n"
            '{"town": "Oslo"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>forecast\n```json\n'
            '{"town": "Rome"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
            [OSLO, ROME],
            "I look.",
        ),
        Known(
            f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>mcp-set.all\n```json\n{_JSON}\n```"
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            [ALL],
        ),
        Known(
            "<｜tool▁calls▁begin｜>function<｜tool▁sep｜>forecast\n",
            [],
            "<｜tool▁calls▁begin｜>function<｜tool▁sep｜>forecast\n",
        ),
        Known(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>forecast\n```json\n{}\n```<｜tool▁call▁end｜>\n "
            "<｜tool▁call▁begin｜>?",
            [NONE],
            "\n <｜tool▁call▁begin｜>?",
        ),
    ],
    "deepseek_v31": [
        Known(
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>forecast<｜tool▁sep｜>{"town": "Oslo"}<｜tool▁call▁end｜>'
            '<｜tool▁call▁begin｜>forecast<｜tool▁sep｜>{"town": "Rome"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
            [OSLO, ROME],
        ),
    ],
    "glm45": [
        Known("<tool_call>forecast\n<arg_key>town</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>", [OSLO]),
        Known("<tool_call>forecast<arg_key>town</arg_key><arg_value>Oslo</arg_value></tool_call>", [OSLO]),
        Known("<tool_call>forecast\n</tool_call>", [NONE]),
        Known(
            "So. <tool_call>mcp-set.all\n"
            + "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in _TEXTS.items())
            + "</tool_call>\n\nNow, <tool_call>register\n<arg_key>first name</arg_key>\n<arg_value>李</arg_value>\n"
            "</tool_call>",
            [ALL, ("register", {"first name": "李"})],
            "So. \n\nNow, ",
        ),
    ],
    "openai": [
        Known(
            "<|channel|>analysis<|message|>I need it.<|end|><|start|>assistant<|channel|>commentary "
            'to=functions.forecast <|constrain|>json<|message|>{\n"town": "Oslo"\n}<|call|>',
            [OSLO],
            reasoning="I need it.",
        ),
        Known(
            "<|channel|>analysis<|message|>So<|start|>assistant to=functions.forecast<|channel|>commentary "
            '<|constrain|>json<|message|>{"town": "Oslo"}<|call|>',
            [OSLO],
            reasoning="So",
        ),
        Known(' to=functions.forecast<|channel|>commentary json<|message|>{"town": "Oslo"}<|call|>', [OSLO]),
        Known(
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary "
            "to=functions.mcp-set.all<|message|>" + _JSON + "<|call|>",
            [ALL],
            "I look.",
        ),
        Known("<|channel|>commentary to=functions.forecast <|constrain|>json<|message|><|call|>", [NONE]),
        Known(
            '<|channel|>commentary to=functions.forecast<|message|>{"town": "Oslo"}<|call|><|start|>assistant'
            '<|channel|>commentary to=functions.forecast<|message|>{"town": "Rome"}<|call|><|start|>assistant'
            "<|channel|>final<|message|>Both.<|return|>",
            [OSLO, ROME],
            "Both.",
        ),
        Known("<|channel|>final <|constrain|>json<|message|>{}<|return|>", [], "{}"),
        Known("<|channel|>analysis<|message|>cut sho", [], reasoning="cut sho"),
        Known("no harmony to=all", [], "no harmony to=all"),
    ],
}
CASES = [(name, known) for name, all_known in KNOWN.items() for known in all_known]


@pytest.mark.parametrize(("name", "known"), CASES, ids=[f"{name}-{known.output[:40]}" for name, known in CASES])
def test_a_known_output_is_read(name: str, known: Known) -> None:
    form = Form(name, str)
    for texts in ([known.output], list(known.output)):
        parsed = gather(read(form, *texts, tools=TOOLS))
        assert (calls_of(parsed), parsed.text, parsed.reasoning) == (known.calls, known.text, known.reasoning)


@pytest.mark.parametrize("output", [known.output for known in KNOWN["mistral"] if known.calls])
def test_calls_of_mistral_have_ids_that_its_templates_take(output: str) -> None:
    parser = ToolParserManager.get_tool_parser("mistral")(TOOLS)
    ids = [call.id for call in gather(parser.feed(output) + parser.finish()).calls]
    assert all(len(each) == 9 and each.isalnum() for each in ids)
    assert len(set(ids)) == len(ids)
    if "[CALL_ID]" in output:
        assert ids == ["a1b2c3d4e"]


def test_arguments_that_are_a_string_are_json() -> None:
    parser = ToolParserManager.get_tool_parser("hermes")(TOOLS)
    output = '<tool_call>{"name": "forecast", "arguments": "say \\"hi\\""}</tool_call>'
    [call] = gather(parser.feed(output) + parser.finish()).calls
    assert call.arguments == '"say \\"hi\\""'
