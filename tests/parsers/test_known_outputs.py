"""Outputs as models and the parsers' documentation show them, each read whole and letter by letter."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest

from jaxllm.parsers.function_tool import FunctionTool
from jaxllm.parsers.pieces import ParsedOutput, gather
from jaxllm.parsers.registry import ToolParserManager
from tests.parsers.outputs import Call, Form, read

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


class Held(NamedTuple):
    """What an output says where calls are held, and malformed ones are text."""

    calls: Sequence[tuple[str, Any]]
    text: str = ""


class Known(NamedTuple):
    """An output and what it says; arguments that are no JSON are a text."""

    output: str
    calls: Sequence[tuple[str, Any]]
    text: str = ""
    reasoning: str = ""
    held: Held | None = None
    """None if it says the same."""


ONE = '{"name": "forecast", "parameters": {"town": "Oslo"}}'
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
        Known('<tool_call>{"name": "forecast"}</tool_call>', [], '<tool_call>{"name": "forecast"}</tool_call>'),
        Known('<tool_call>{"name": "forecast", "arguments": [1, 2]}</tool_call>', [("forecast", [1, 2])]),
        Known('<tool_call>{"name": "forecast", "why": [0], "arguments": {"town": "Oslo"}}</tool_call>', [OSLO]),
        *(
            Known(
                f'I look.<tool_call>{{"name": "forecast", "arguments": {written}}}\n</tool_call>So.',
                [("forecast", written)],
                "I look.So.",
                held=Held([], f'I look.<tool_call>{{"name": "forecast", "arguments": {written}}}\n</tool_call>So.'),
            )
            for written in ('{"town": "Oslo",}', '{"town": True}', "{'town': 'Oslo'}", '{"town": "Os\\lo"}', "[1,]")
        ),
        Known(
            '<tool_call>{"name": "forecast", "arguments": {"town": "Oslo"}</tool_call>',
            [OSLO],
            held=Held([], '<tool_call>{"name": "forecast", "arguments": {"town": "Oslo"}</tool_call>'),
        ),
        Known(
            '<tool_call>{"name": "forecast", "arguments": {"town": "Os',
            [("forecast", '{"town": "Os')],
            held=Held([], '<tool_call>{"name": "forecast", "arguments": {"town": "Os'),
        ),
        Known(
            '<tool_call>{"name": "forecast", "arguments": {"town": "Oslo"}}</tool_call>\n'
            '<tool_call>{"name": "forecast", "arguments": {"town": Rome}}</tool_call>',
            [OSLO, ("forecast", '{"town": Rome}')],
            held=Held([OSLO], '\n<tool_call>{"name": "forecast", "arguments": {"town": Rome}}</tool_call>'),
        ),
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
        Known('{"name": "forecast"}', [], '{"name": "forecast"}'),
        Known('I look: {"name": "forecast", "parameters": {"town": "Oslo"}} So.', [OSLO], "I look:  So."),
        *(
            Known(f"{before}{body}{after}", calls, f"{text}")
            for before, after, text in (
                ("", "", ""),
                ("```json\n", "\n```", ""),
                ("```", "```", ""),
                ("I look.\n```json\n", "\n```\n", "I look.\n"),
                ("<|python_tag|>", "", ""),
            )
            for body, calls in (
                (ONE, [OSLO]),
                (f"[{ONE}]", [OSLO]),
                (
                    f"[{', '.join(ONE.replace('Oslo', town) for town in ('Oslo', 'Rome'))}]",
                    [OSLO, ROME],
                ),
            )
        ),
        *(
            Known(text, [], text)
            for text in (
                '{"calls": [{"name": "forecast", "parameters": {"town": "Oslo"}}]}',
                '[{"a": 1}, {"name": "forecast", "parameters": {"town": "Oslo"}}]',
                '```json\n{"a": {"name": "forecast", "parameters": {}}}\n```',
                '[{"name": "else", "parameters": {}}]',
                "```python\nx = {'a': [1]}\n```",
                "[{[{ ```{` {it}",
            )
        ),
        Known(
            'Well: {"name": "forecast", "parameters": {"town": Oslo}} or not',
            [("forecast", '{"town": Oslo}} or not')],
            "Well: ",
            held=Held([], 'Well: {"name": "forecast", "parameters": {"town": Oslo}} or not'),
        ),
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
        *(
            Known(f"[forecast({arguments})]", [], f"[forecast({arguments})]")
            for arguments in (
                "town=__import__('os')",
                "1e999",
                "town=1e999",
                "'Oslo'",
                "town=b'Oslo'",
                "town='Os\nlo'",
                "n=1]",
            )
        ),
        Known('[forecast(town="""Os"l\no\\t""", n=\'\'\'\'\'\')]', [("forecast", {"town": 'Os"l\no\t', "n": ""})]),
        Known(
            "[forecast(town=f'Oslo', n=+1, s={'a'}, t=(null, [true, None]))]",
            [("forecast", {"town": "Oslo", "n": 1, "s": ["a"], "t": [None, [True, None]]})],
        ),
        Known(
            "[forecast(town='Oslo', days=soon)]",
            [("forecast", '{"town": "Oslo"')],
            " days=soon)]",
            held=Held([], "[forecast(town='Oslo', days=soon)]"),
        ),
        Known("[forecast(b'x'), forecast(town='Oslo')]", [OSLO], "[forecast(b'x')"),
        *(
            Known(text, [], text)
            for text in (
                "[forecast('a')] I mean: run forecast(town='Oslo') now",
                "[forecast('a, forecast(town=1)')]",
                "[forecast(town='a\n, forecast(town=1)')]",
                "[forecast(('a'), b), forecast)]",
            )
        ),
        Known("[forecast(town='Oslo'), so, forecast(town='Rome')]", [OSLO], ", so, forecast(town='Rome')]"),
        Known(
            "[forecast(town='Oslo'), unknown(), forecast(town='Rome')]<|python_end|>",
            [OSLO, ROME],
            ", unknown()",
        ),
        Known("[forecast(town='Oslo'), forecast('Rome')]", [OSLO], ", forecast('Rome')]"),
        Known("[forecast(town='Os", [("forecast", '{"town": "Os')], held=Held([], "[forecast(town='Os")),
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
            held=Held([OSLO, ROME], "Well"),
        ),
        Known('[TOOL_CALLS] {"name": "forecast", "arguments": {"town": "Oslo"}}', [OSLO]),
        Known('[TOOL_CALLS][TOOL_CALLS] [{"name": "forecast", "arguments": {"town": "Oslo"}}]', [OSLO]),
        Known('[TOOL_CALLS]\n[TOOL_CALLS]forecast[ARGS]{"town": "Oslo"}', [OSLO]),
        Known('[TOOL_CALLS] [{"name": "forecast"}]', [NONE]),
        Known("[TOOL_CALLS]forecast", [NONE]),
        Known('[TOOL_CALLS]forecast[TOOL_CALLS]forecast[ARGS]{"town": "Oslo"}', [NONE, OSLO]),
        Known("[TOOL_CALLS]forecast[ARGS]", [NONE]),
        Known("[TOOL_CALLS]forec", [], "[TOOL_CALLS]forec"),
        Known('[TOOL_CALLS]forecast[TOOL_CALLS]{"town": "Oslo"}', [OSLO]),
        Known('I look: forecast[TOOL_CALLS]{"town": "Oslo"}', [OSLO], "I look: "),
        Known('A forecast[TOOL_CALLS] {"name": "forecast", "arguments": {"town": "Oslo"}}', [OSLO], "A forecast"),
        Known('A forecast[TOOL_CALLS]forecast[ARGS]{"town": "Oslo"}', [OSLO], "A forecast"),
        Known('[TOOL_CALLS] x [{ "name": "forecast", "arguments": {} }]', [NONE], "[TOOL_CALLS] x "),
        Known('[TOOL_CALLS]forecast[ARGS]{"town": "Os', [("forecast", '{"town": "Os')]),
        Known('[TOOL_CALLS]forecast{"town": Oslo}', [("forecast", '{"town": Oslo}')]),
        Known('[TOOL_CALLS]forecast{"town": "Oslo"} So.', [OSLO], " So.", held=Held([OSLO])),
        Known(
            'Well [TOOL_CALLS] see: [{"name": "forecast", "arguments": {"town": "Oslo"}}]',
            [OSLO],
            "Well [TOOL_CALLS] see: ",
        ),
        Known(
            'Well[TOOL_CALLS] [{"name": "forecast", "arguments": {"town": "Oslo"}, ',
            [OSLO],
            "Well",
            held=Held([], 'Well[TOOL_CALLS] [{"name": "forecast", "arguments": {"town": "Oslo"}, '),
        ),
        Known('[TOOL_CALLS] [{"arguments": {"town": "Oslo"}}]', [], '[TOOL_CALLS] [{"arguments": {"town": "Oslo"}}]'),
        Known('[TOOL_CALLS] [{"name": "forecast", "x": {}}]', [], '[TOOL_CALLS] [{"name": "forecast", "x": {}}]'),
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
            held=Held([NONE], "\n <｜tool▁call▁begin｜>?"),
        ),
        Known(
            "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>forecast\n```json\n"
            '{"town": "Oslo",}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜> So.',
            [("forecast", '{"town": "Oslo",}')],
            "I look. So.",
            held=Held([("forecast", '{"town": "Oslo",}')], "I look."),
        ),
        Known(
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>forecast\n```json\n{"town": "Os',
            [("forecast", '{"town": "Os')],
            held=Held(
                [],
                '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>forecast\n```json\n{"town": "Os',
            ),
        ),
    ],
    "deepseek_v31": [
        Known(
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>forecast<｜tool▁sep｜>{"town": "Oslo"}<｜tool▁call▁end｜>'
            '<｜tool▁call▁begin｜>forecast<｜tool▁sep｜>{"town": "Rome"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
            [OSLO, ROME],
        ),
        Known(
            "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>forecast<｜tool▁sep｜>"
            '{"town": "Oslo"}<｜tool▁call▁end｜><｜tool▁calls▁end｜> So.',
            [OSLO],
            "I look. So.",
            held=Held([OSLO], "I look."),
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
        Known("<|channel|>commentary to=functions.forecast <|constrain|>json<|message|><|call|>", [("forecast", "")]),
        *(
            Known(f'{head}<|message|>{{"town": "Oslo"}}<|call|>', [OSLO])
            for head in (
                "<|channel|>commentary to=forecast <|constrain|>json",
                "<|channel|>analysis to=forecast",
                " to=forecast<|channel|>commentary <|constrain|>json",
                "<|start|>assistant to=functions.forecast<|channel|>final",
            )
        ),
        Known('<|channel|>commentary to=math.sum<|message|>{"a": 2}<|call|>', [("math.sum", {"a": 2})]),
        Known("<|channel|>commentary to=functions.forecast<|message|>Oslo<|call|>", [("forecast", "Oslo")]),
        Known(
            '<|channel|>commentary to=functions.forecast<|message|>{"town": "Oslo",}<|call|>',
            [("forecast", '{"town": "Oslo",}')],
        ),
        Known('<|channel|>commentary to=functions.forecast<|message|>{"town', [("forecast", '{"town')]),
        *(
            Known(
                f"<|channel|>commentary to={to}<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>Hi",
                [],
                "Hi",
            )
            for to in ("assistant", "browser", "browser.search", "python", "container.exec")
        ),
        Known("<|channel|>analysis to=python<|message|>1 + 1<|call|>", [], reasoning="1 + 1"),
        Known(
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>final<|message|>So.<|return|>",
            [],
            "I look.\nSo.",
        ),
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
        Known(
            '<|channel|>final<|message|>So.<|end|><|start|>assistant<|channel|>final {"a": 1}<|return|>',
            [],
            'So.\n<|start|>assistant<|channel|>final {"a": 1}',
        ),
    ],
    "granite": [
        *(
            Known(f'{mark}{space}[{{"name": "forecast", "arguments": {{"town": "Oslo"}}}}]', [OSLO])
            for mark in ("<|tool_call|>", "<tool_call>")
            for space in ("", " ", "\n")
        ),
        Known('I look.<|tool_call|>{"name": "forecast", "arguments": {"town": "Oslo"}}', [OSLO], "I look."),
        Known("<|tool_call|>[]", [], "<|tool_call|>[]"),
    ],
    "jamba": [
        Known(
            ' <tool_calls>[\n    {"name": "forecast", "arguments": {"town": "Oslo"}},\n'
            '    {"name": "forecast", "arguments": {"town": "Rome"}}\n]</tool_calls>',
            [OSLO, ROME],
        ),
        Known("<tool_calls>[1]</tool_calls>", [], "<tool_calls>[1]</tool_calls>"),
    ],
    "phi4_mini_json": [
        Known('functools[{"name": "forecast", "arguments": {"town": "Oslo"}}]', [OSLO]),
        Known('<|tool_call|>[{"name": "forecast", "arguments": {"town": "Oslo"}}]<|/tool_call|>', [OSLO]),
        Known("Use functools.partial.", [], "Use functools.partial."),
    ],
    "internlm": [
        Known(
            'I look.<|action_start|><|plugin|>\n{"name": "forecast", "parameters": {"town": "Oslo"}}<|action_end|>\n',
            [OSLO],
            "I look.",
        ),
    ],
    "apertus": [
        Known(
            'I look. <|tools_prefix|>[{"forecast": {"town": "Oslo"}}, {"forecast": {}}]<|tools_suffix|>',
            [OSLO, NONE],
            "I look. ",
        ),
        Known('<|tools_prefix|>[{"forecast": {"town": "Oslo"}}', [OSLO]),
        Known('<|tools_prefix|>["forecast"]<|tools_suffix|>', [], '<|tools_prefix|>["forecast"]<|tools_suffix|>'),
    ],
    "cohere_command3": [
        Known(
            "<|START_ACTION|>[\n"
            '    {"tool_call_id": "0", "tool_name": "forecast", "parameters": {"town": "Oslo"}},\n'
            '    {"tool_call_id": "1", "tool_name": "forecast", "parameters": {}}\n]<|END_ACTION|>',
            [OSLO, NONE],
        ),
        Known("<|START_RESPONSE|>Hello.<|END_RESPONSE|>", [], "Hello."),
    ],
    "xlam": [
        *(
            Known(f'{before}[{{"name": "forecast", "arguments": {{"town": "Oslo"}}}}]{after}', [OSLO])
            for before, after in (
                ("", ""),
                ("```json\n", "\n```"),
                ("<tool_call>", "</tool_call>"),
                ("[TOOL_CALLS]", ""),
            )
        ),
        Known('<tool_call>[{"name": "new", "arguments": {}}]</tool_call>', [("new", {})]),
        Known('[{"name": "new", "arguments": {}}]', [], '[{"name": "new", "arguments": {}}]'),
    ],
    "kimi_k2": [
        Known(
            "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.forecast:0<|tool_call_argument_begin|>"
            '{"town": "Oslo"}<|tool_call_end|><|tool_call_begin|>functions.mcp-set.all:1<|tool_call_argument_begin|>'
            f"{_JSON}<|tool_call_end|><|tool_calls_section_end|>",
            [OSLO, ALL],
            "I look.",
        ),
        Known(
            '<|tool_call_begin|>forecast <|tool_call_argument_begin|> {"town": "Oslo"} <|tool_call_end|>',
            [OSLO],
        ),
    ],
    "mimo": [
        Known("<tool_call>\n<function=forecast>\n<parameter=town>Oslo</parameter>\n</function>\n</tool_call>", [OSLO]),
    ],
    "seed_oss": [
        Known(
            "<seed:tool_call>\n<function=mcp-set.all>\n"
            + "".join(f"<parameter={key}>{text}</parameter>\n" for key, text in _TEXTS.items())
            + "</function>\n</seed:tool_call>",
            [ALL],
        ),
    ],
    "minimax_m2": [
        Known(
            '<minimax:tool_call>\n<invoke name="forecast">\n<parameter name="town">Oslo</parameter>\n</invoke>\n'
            '<invoke name="forecast">\n</invoke>\n</minimax:tool_call>',
            [OSLO, NONE],
        ),
        *(
            Known(
                f"<minimax:tool_call><invoke name={quote}forecast{quote}><parameter name={quote}town{quote}>Oslo"
                "</parameter></invoke></minimax:tool_call>",
                [OSLO],
            )
            for quote in ("'", "")
        ),
    ],
    "deepseek_v32": [
        Known(
            '<｜DSML｜function_calls>\n<｜DSML｜invoke name="mcp-set.all">\n'
            + "".join(
                f'<｜DSML｜parameter name="{key}" string="{"true" if key == "word" else "false"}">{text}'
                "</｜DSML｜parameter>\n"
                for key, text in _TEXTS.items()
            )
            + "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
            [ALL],
        ),
        Known(
            '<｜DSML｜invoke name="new">\n<｜DSML｜parameter name="a" string="false">[1]</｜DSML｜parameter>\n'
            '<｜DSML｜parameter name="b" string="true">[1]</｜DSML｜parameter>\n'
            '<｜DSML｜parameter name="c">[1]</｜DSML｜parameter>\n</｜DSML｜invoke>',
            [("new", {"a": [1], "b": "[1]", "c": [1]})],
        ),
    ],
    "hy_v3": [
        Known(
            "<tool_calls>\n<tool_call>forecast<tool_sep>\n<arg_key>town</arg_key>\n<arg_value>Oslo</arg_value>\n"
            "</tool_call>\n<tool_call>forecast<tool_sep>\n</tool_call>\n</tool_calls>",
            [OSLO, NONE],
        ),
        Known("<tool_calls><tool_call>forecast<tool_sep></tool_call></tool_calls>", [NONE]),
        Known("Use <tool_calls> for calls.", [], "Use <tool_calls> for calls."),
    ],
    "lfm2": [
        Known('<|tool_call_start|>[forecast(town="Oslo")]<|tool_call_end|>I look.', [OSLO], "I look."),
        Known(
            "I look.<|tool_call_start|>[forecast(town='Oslo'), forecast()]<|tool_call_end|>", [OSLO, NONE], "I look."
        ),
        Known(
            '<|tool_call_start|>[{"name": "forecast", "arguments": {"town": "Oslo"}, "id": "0"}]<|tool_call_end|>',
            [OSLO],
        ),
        Known("<|tool_call_start|>[1]<|tool_call_end|>", [], "<|tool_call_start|>[1]<|tool_call_end|>"),
    ],
    "olmo3": [
        Known("<function_calls>\nforecast(town='Oslo')\nforecast(town=\"Rome\")\n</function_calls>", [OSLO, ROME]),
        Known(
            "<function_calls>\nmcp-set.all(word='hello', whole=42, real=3.14, yes=true, nothing=null, "
            'list=["a", "b"], map={"x": {"y": []}})\n</function_calls>',
            [ALL],
        ),
        Known("Well.<function_calls>forecast()</function_calls>So.", [NONE], "Well.So."),
    ],
    "gemma4": [
        Known('<|tool_call>call:forecast{town:<|"|>Oslo<|"|>}<tool_call|>', [OSLO]),
        Known('<|tool_call>call:forecast{}<tool_call|><|tool_call>call:forecast{town:<|"|>Rome<|"|>}', [NONE, ROME]),
        Known(
            '<|tool_call>call:mcp-set.all{word:<|"|>hello<|"|>,whole:42,real:3.14,yes:true,nothing:null,'
            'list:[<|"|>a<|"|>,<|"|>b<|"|>],map:{x:{y:[]}}}<tool_call|>',
            [ALL],
        ),
        Known('<|tool_call>:forecast{ <|"|>town<|"|> : "Oslo", }<tool_call|>', [OSLO]),
        Known('<|tool_call>call:forecast{town:<|"|>a "b"\n{}<|"|>}<tool_call|>', [("forecast", {"town": 'a "b"\n{}'})]),
        Known("<|tool_call>forecast{}<tool_call|>", [], "<|tool_call>forecast{}<tool_call|>"),
    ],
}
CASES = [(name, known) for name, all_known in KNOWN.items() for known in all_known]


def seen(parsed: ParsedOutput) -> tuple[list[tuple[str, Any]], str, str]:
    """Return what was read, with arguments as values where they are JSON."""
    calls = list[tuple[str, Any]]()
    for call in parsed.calls:
        try:
            calls.append((call.name, json.loads(call.arguments)))
        except ValueError:
            calls.append((call.name, call.arguments))
    return calls, parsed.text, parsed.reasoning


@pytest.mark.parametrize(("name", "known"), CASES, ids=[f"{name}-{known.output[:40]}" for name, known in CASES])
def test_a_known_output_is_read(name: str, known: Known) -> None:
    form, expected = Form(name, str), (list(known.calls), known.text, known.reasoning)
    held = expected if known.held is None else (list(known.held.calls), known.held.text, known.reasoning)
    for texts in ([known.output], list(known.output)):
        assert seen(gather(read(form, *texts, tools=TOOLS))) == expected
        assert seen(gather(read(form, *texts, tools=TOOLS, holds_calls=True))) == held


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


def test_ids_of_kimi_are_the_models_unless_it_repeats_them() -> None:
    parser = ToolParserManager.get_tool_parser("kimi_k2")(TOOLS)
    call = "<|tool_call_begin|>functions.forecast:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    ids = [each.id for each in gather(parser.feed(call + call) + parser.finish()).calls]
    assert ids[0] == "functions.forecast:0"
    assert len(set(ids)) == 2
