"""Which parsers a server takes its answers apart with, and what those take for granted."""

from __future__ import annotations

from typing import Any

import pytest

from jaxllm.config.server_arguments import ServerArgs
from jaxllm.parsers.pieces import gather
from jaxllm.server.openai.output_parsers import OutputParsers, check_parsers

TEMPLATE = "{{ '<think>' }}"
"""It tells of <think> without a start of reasoning in its prompts."""


def split(named: str, prompt: str, output: str, **variables: Any) -> tuple[str, str]:
    """Return the reasoning and the text of an output after a prompt."""
    parsers = OutputParsers(ServerArgs(), named, TEMPLATE)
    make = parsers.maker(None, [], parsers.opened(prompt, variables), holds_calls=False)
    assert make is not None
    parser = make()
    parsed = gather(parser.feed(output) + parser.finish())
    return parsed.reasoning, parsed.text


@pytest.mark.parametrize(
    ("named", "prompt", "output", "expected"),
    [
        *(
            (name, "user", output, expected)
            for name in ("qwen3", "deepseek_r1", "glm45")
            for output, expected in [
                ("I think</think>Yes", ("I think", "Yes")),
                ("<think>I think</think>Yes", ("I think", "Yes")),
                ("I <think>think</think>Yes.", ("I think", "Yes.")),
                ("I think", ("I think", "")),
            ]
        ),
        ("qwen3", "user<think></think>", "Yes", ("", "Yes")),
        ("qwen3", "user<think>", "I think</think>Yes", ("I think", "Yes")),
        *(
            (name, f"<|im_start|>user\n<think></think><|im_end|>\n<|im_start|>assistant\n{turn}", output, expected)
            for name in ("", "qwen3")
            for turn, output, expected in [
                ("<think>I", " think</think>Yes", ("think", "Yes")),
                ("<think>I think</think>Y", "es", ("", "es")),
            ]
        ),
        ("", "<|im_start|>user\n<think><|im_end|>\n<|im_start|>assistant\n", "Yes", ("", "Yes")),
        ("qwen3", "<|im_start|>user\n</think><|im_end|>\n<|im_start|>assistant\n", "So</think>Yes", ("So", "Yes")),
        ("mistral", "user", "Yes", ("", "Yes")),
        ("", "user", "Yes", ("", "Yes")),
        ("", "user", "<think>I think</think>Yes", ("I think", "Yes")),
        ("", "user<think>", "I think</think>Yes", ("I think", "Yes")),
    ],
)
def test_a_named_parser_takes_reasoning_for_granted_as_vllms(
    named: str, prompt: str, output: str, expected: tuple[str, str]
) -> None:
    assert split(named, prompt, output) == expected


def test_a_variable_of_the_template_turns_reasoning_off() -> None:
    assert split("qwen3", "user", "Yes", enable_thinking=False) == ("", "Yes")
    assert split("glm45", "user", "Yes", thinking=False) == ("", "Yes")
    assert split("qwen3", "user", "Yes", enable_thinking=True) == ("Yes", "")


@pytest.mark.parametrize(
    ("named", "reasoning", "template", "expected"),
    [
        (
            None,
            "",
            "tools <tool_call> <think>",
            "as hermes, as the chat template shows; reasoning is read as qwen3, as",
        ),
        ("auto", "auto", "tools [TOOL_CALLS]", "as mistral, as the chat template shows; no reasoning is split off."),
        ("mistral", "qwen3", "tools", "as mistral, as named; reasoning is read as qwen3, as named."),
        (
            None,
            "",
            "tools [TOOL_CALLS] <|tool_call_start|>",
            "marks of lfm2 too: --tool-call-parser names the right one",
        ),
        (None, "", "tools", "The chat template shows no known form of tool calls: --tool-call-parser names one"),
        ("hermes", "", "tools", "as hermes, as named"),
        (None, "", "", "as hermes, since the chat template knows no tools; no reasoning is split off."),
    ],
)
def test_the_log_says_which_parsers_and_why(named: str | None, reasoning: str, template: str, expected: str) -> None:
    parsers = OutputParsers(ServerArgs(tool_call_parser=named), reasoning, template)
    assert expected in parsers.described()


def test_auto_is_what_no_name_is() -> None:
    check_parsers(ServerArgs(tool_call_parser="auto"))
    for template in (TEMPLATE, "tools <seed:tool_call> <seed:think>", "tools"):
        auto = OutputParsers(ServerArgs(tool_call_parser="auto"), "auto", template)
        default = OutputParsers(ServerArgs(), "", template)
        assert (auto.tool_parser_name, auto.reasoning) == (default.tool_parser_name, default.reasoning)
        assert auto.opened("user", {}) == "user"
