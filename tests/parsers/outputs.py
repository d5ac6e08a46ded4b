"""What models write in the form of each tool parser."""

from __future__ import annotations

import dataclasses
import gc
import json
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxllm.parsers.function_tool import FunctionTool
from jaxllm.parsers.pieces import CallStart, ParsedOutput, Piece, gather, merge
from jaxllm.parsers.registry import ToolParserManager

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "wet": {"type": "boolean"},
        "at": {"type": "object", "properties": {"x": {"type": "number"}}, "additionalProperties": False},
        "names": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    FunctionTool(name="get_weather", parameters=SCHEMA),
    FunctionTool(name="now", parameters={"type": "object", "properties": {}, "additionalProperties": False}),
]
ARGUMENTS: list[dict[str, Any]] = [
    {"city": "Ulm"},
    {"city": 'a "b" \\ </x> \n{}[]\u00e4\U0001f600', "days": 3, "wet": True},
    {"city": "", "at": {"x": -1.5e3}, "names": ["a", "b, c", "d)"]},
    {"city": "12", "days": 0, "wet": False, "names": []},
]
"""Arguments of `get_weather`."""

type Call = tuple[str, dict[str, Any]]


class Form(NamedTuple):
    """How calls are written for a parser."""

    parser: str
    write: Callable[[list[Call]], str]
    takes_text_before: bool = True
    """False where calls are the whole answer."""


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _hermes(calls: list[Call]) -> str:
    bodies = [f'{{"name": "{name}", "arguments": {_json(arguments)}}}' for name, arguments in calls]
    return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


def _llama3(calls: list[Call]) -> str:
    return "; ".join(f'{{"name": "{name}", "parameters": {_json(arguments)}}}' for name, arguments in calls)


def _pythonic(calls: list[Call]) -> str:
    def shown(arguments: dict[str, Any]) -> str:
        return ", ".join(f"{key}={value!r}" for key, value in arguments.items())

    return f"[{', '.join(f'{name}({shown(arguments)})' for name, arguments in calls)}]"


def _mistral_list(calls: list[Call]) -> str:
    return f"[TOOL_CALLS] {_json([{'name': name, 'arguments': arguments} for name, arguments in calls])}"


def _mistral(calls: list[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{_json(arguments)}" for name, arguments in calls)


def _qwen3(calls: list[Call]) -> str:
    def shown(arguments: dict[str, Any]) -> str:
        return "".join(f"<parameter={key}>\n{_text(value)}\n</parameter>\n" for key, value in arguments.items())

    return "\n".join(
        f"<tool_call>\n<function={name}>\n{shown(arguments)}</function>\n</tool_call>" for name, arguments in calls
    )


def _deepseek(calls: list[Call]) -> str:
    bodies = [f"function<｜tool▁sep｜>{name}\n```json\n{_json(arguments)}\n```" for name, arguments in calls]
    shown = "\n".join(f"<｜tool▁call▁begin｜>{body}<｜tool▁call▁end｜>" for body in bodies)
    return f"<｜tool▁calls▁begin｜>{shown}<｜tool▁calls▁end｜>"


def _deepseek31(calls: list[Call]) -> str:
    bodies = [f"{name}<｜tool▁sep｜>{_json(arguments)}" for name, arguments in calls]
    shown = "".join(f"<｜tool▁call▁begin｜>{body}<｜tool▁call▁end｜>" for body in bodies)
    return f"<｜tool▁calls▁begin｜>{shown}<｜tool▁calls▁end｜>"


def _glm(calls: list[Call]) -> str:
    def shown(arguments: dict[str, Any]) -> str:
        pairs = [(key, _text(value)) for key, value in arguments.items()]
        return "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in pairs)

    return "\n".join(f"<tool_call>{name}\n{shown(arguments)}</tool_call>" for name, arguments in calls)


def _harmony(calls: list[Call]) -> str:
    heads = [f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>" for name, _ in calls]
    bodies = [f"{head}{_json(arguments)}<|call|>" for head, (_, arguments) in zip(heads, calls, strict=True)]
    return "<|start|>assistant".join(bodies)


def _objects(calls: list[Call], name_key: str = "name", arguments_key: str = "arguments") -> str:
    return _json([{name_key: name, arguments_key: arguments} for name, arguments in calls])


def _kimi(calls: list[Call]) -> str:
    bodies = [
        f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{_json(arguments)}<|tool_call_end|>"
        for i, (name, arguments) in enumerate(calls)
    ]
    return f"<|tool_calls_section_begin|>{''.join(bodies)}<|tool_calls_section_end|>"


def _internlm(calls: list[Call]) -> str:
    bodies = [f'{{"name": "{name}", "parameters": {_json(arguments)}}}' for name, arguments in calls]
    return "\n".join(f"<|action_start|><|plugin|>\n{body}\n<|action_end|>" for body in bodies)


def _inline(start: str, end: str) -> Callable[[list[Call]], str]:
    """Return what writes calls as in `_qwen3` between other tags, with values on the lines of theirs."""

    def shown(arguments: dict[str, Any]) -> str:
        return "".join(f"<parameter={key}>{_text(value)}</parameter>\n" for key, value in arguments.items())

    return lambda calls: "\n".join(
        f"{start}\n<function={name}>\n{shown(arguments)}</function>\n{end}" for name, arguments in calls
    )


def _invoked(mark: str, section: str, *, tells_strings: bool) -> Callable[[list[Call]], str]:
    """Return what writes calls as MiniMax and DeepSeek do, with a mark at the beginning of each tag."""

    def head(key: str, value: Any) -> str:
        told = f' string="{_json(isinstance(value, str))}"' if tells_strings else ""
        return f'<{mark}parameter name="{key}"{told}>'

    def shown(arguments: dict[str, Any]) -> str:
        pairs = arguments.items()
        return "".join(f"{head(key, value)}{_text(value)}</{mark}parameter>\n" for key, value in pairs)

    def write(calls: list[Call]) -> str:
        bodies = [f'<{mark}invoke name="{name}">\n{shown(arguments)}</{mark}invoke>' for name, arguments in calls]
        lines = "\n".join(bodies)
        return f"<{section}>\n{lines}\n</{section}>"

    return write


def _hunyuan(calls: list[Call]) -> str:
    bodies = _glm(calls)
    for name, _ in calls:
        bodies = bodies.replace(f"<tool_call>{name}\n", f"<tool_call>{name}<tool_sep>\n")
    return f"<tool_calls>\n{bodies}\n</tool_calls>"


def _olmo(calls: list[Call]) -> str:
    lines = [_pythonic([call])[1:-1] for call in calls]
    return "\n".join(["<function_calls>", *lines, "</function_calls>"])


def _gemma(calls: list[Call]) -> str:
    def shown(value: Any) -> str:
        match value:
            case str():
                return f'<|"|>{value}<|"|>'
            case dict():
                return f"{{{','.join(f'{key}:{shown(each)}' for key, each in value.items())}}}"
            case list():
                return f"[{','.join(map(shown, value))}]"
            case _:
                return _json(value)

    return "".join(f"<|tool_call>call:{name}{shown(arguments)}<tool_call|>" for name, arguments in calls)


FORMS = {
    "hermes": Form("hermes", _hermes),
    "llama3_json": Form("llama3_json", _llama3),
    "pythonic": Form("pythonic", _pythonic, takes_text_before=False),
    "mistral": Form("mistral", _mistral),
    "mistral, listed": Form("mistral", _mistral_list),
    "qwen3_xml": Form("qwen3_xml", _qwen3),
    "deepseek_v3": Form("deepseek_v3", _deepseek),
    "deepseek_v31": Form("deepseek_v31", _deepseek31),
    "glm45": Form("glm45", _glm),
    "openai": Form("openai", _harmony, takes_text_before=False),
    "granite": Form("granite", lambda calls: f"<|tool_call|>{_objects(calls)}"),
    "jamba": Form("jamba", lambda calls: f"<tool_calls>\n{_objects(calls)}\n</tool_calls>"),
    "phi4_mini": Form("phi4_mini_json", lambda calls: f"functools{_objects(calls)}"),
    "internlm": Form("internlm", _internlm),
    "cohere": Form(
        "cohere_command3",
        lambda calls: f"<|START_ACTION|>{_objects(calls, 'tool_name', 'parameters')}<|END_ACTION|>",
    ),
    "apertus": Form(
        "apertus",
        lambda calls: f"<|tools_prefix|>{_json([{name: arguments} for name, arguments in calls])}<|tools_suffix|>",
    ),
    "xlam": Form("xlam", _objects),
    "kimi_k2": Form("kimi_k2", _kimi),
    "mimo": Form("mimo", _inline("<tool_call>", "</tool_call>")),
    "seed_oss": Form("seed_oss", _inline("<seed:tool_call>", "</seed:tool_call>")),
    "minimax_m2": Form("minimax_m2", _invoked("", "minimax:tool_call", tells_strings=False)),
    "deepseek_v32": Form("deepseek_v32", _invoked("｜DSML｜", "｜DSML｜function_calls", tells_strings=True)),
    "deepseek_v4": Form("deepseek_v4", _invoked("｜DSML｜", "｜DSML｜tool_calls", tells_strings=True)),
    "hy_v3": Form("hy_v3", _hunyuan),
    "lfm2": Form("lfm2", lambda calls: f"<|tool_call_start|>{_pythonic(calls)}<|tool_call_end|>"),
    "olmo3": Form("olmo3", _olmo),
    "gemma4": Form("gemma4", _gemma),
}


def read(form: Form, *texts: str, tools: Sequence[FunctionTool] = TOOLS, holds_calls: bool = False) -> list[Piece]:
    """Return the pieces of an output that comes in these texts, without the ids of calls."""
    parser, pieces = ToolParserManager.get_tool_parser(form.parser)(tools), list[Piece]()
    parser.holds_calls = holds_calls
    for text in texts:
        pieces += parser.feed(text)
    pieces = merge(pieces + parser.finish())
    return [dataclasses.replace(piece, id="") if isinstance(piece, CallStart) else piece for piece in pieces]


def whole(form: Form, text: str, tools: Sequence[FunctionTool] = TOOLS) -> ParsedOutput:
    """Return what is read of a whole output."""
    return gather(read(form, text, tools=tools))


def calls_of(parsed: ParsedOutput) -> list[Call]:
    return [(call.name, json.loads(call.arguments)) for call in parsed.calls]


def is_linear(make: Callable[[int], list[str]], read: Callable[[list[str]], object]) -> bool:
    """Return whether reading ten times as many characters takes ten times as long, and not a hundred times.

    The processor's time counts, without the collection of garbage, which in a large process takes a second by itself.
    """

    def seconds(length: int) -> float:
        texts = make(length)
        was_on = gc.isenabled()
        gc.disable()
        try:
            start = time.thread_time()
            read(texts)
            return time.thread_time() - start
        finally:
            if was_on:
                gc.enable()

    short = min(seconds(10_000) for _ in range(3))
    return any(seconds(100_000) < 30 * short + 0.2 for _ in range(3))
