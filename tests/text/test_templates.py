"""Chat templates give the text that transformers gives, and refuse what it refuses."""

from __future__ import annotations

import threading
from collections import UserDict
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import pytest
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError

from jaxllm.text import templates
from jaxllm.text.templates import ChatTemplates, plain
from jaxllm.text.tokenizer import Tokenizer
from tests.engine.support import byte_level

CHATML = (
    "{%- set ns = namespace(last=messages|length - 1, found=false) %}"
    "{%- for m in messages[::-1] %}{%- if not ns.found and m.role == 'user' %}{%- set ns.found = true %}"
    "{%- set ns.last = messages|length - 1 - loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n' }}{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}"
    "{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}"
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}"
    "{%- if m.reasoning_content is string and loop.index0 > ns.last %}"
    "{{- '<think>\\n' + m.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}{%- endif %}"
    "{%- set text = m.content %}"
    "{%- if text is string and '</think>' in text %}"
    "{%- set text = text.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
    "{{- text }}"
    "{%- for call in m.tool_calls or [] %}{%- set call = call.function %}"
    '{{- \'<tool_call>\\n{"name": "\' ~ call.name ~ \'", "arguments": \' }}'
    "{{- call.arguments if call.arguments is string else call.arguments | tojson }}{{- '}\\n</tool_call>' }}"
    "{%- endfor %}{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}"
)
ALTERNATING = (
    "{% if messages[0]['role'] == 'system' %}"
    "{% set system = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + (system if loop.first else '') + "
    "message['content']|trim + ' [/INST]' }}{% else %}{{ ' ' + message['content'] + ' ' + eos_token }}"
    "{% endif %}{% endfor %}"
)
HEADERS = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") if strftime_now is defined else "26 Jul 2024" %}
{%- endif %}
{#- a comment #}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday: " + date_string }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' or "ipython" in message.role %}
        {{- "<|python|>" }}
        {%- if message.content is mapping or message.content is iterable and message.content is not string %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("Only one call at once!") }}
        {%- endif %}
        {%- for name, value in message.tool_calls[0].function.arguments.items() %}
            {{- name ~ '="' ~ value ~ '"' }}{{ ", " if not loop.last }}
        {%- endfor %}
    {%- else %}
  <|{{ message['role'] }}|>
  {{ message['content'] | trim }}
    {%- endif %}
{%- endfor %}
{% if add_generation_prompt %}
<|assistant|>
{% endif %}
"""
PARTS = """{% macro show(content, depth=0) -%}
{%- if content is string -%}{{ content | e | safe }}
{%- elif content is mapping -%}
{% for key, value in content | dictsort %}{{ '  ' * depth }}{{ key | upper }}: {{ show(value, depth + 1) }}
{% endfor %}
{%- elif content is sequence -%}{% for part in content %}{{ show(part, depth + 1) }}{% endfor %}
{%- else -%}{{ content | string | default('none', true) }}{%- endif -%}
{%- endmacro -%}
{% for m in messages %}
{%- if m.role == 'skip' %}{% continue %}{% endif %}
{%- if loop.index > 4 %}{% break %}{% endif %}
{% if m.role == 'assistant' %}{% generation %}{{ show(m.content) }}{{ eos_token }}
{% endgeneration %}{% else %}{{ m.role | title }}> {{ show(m.content) }}
{% endif %}
{%- endfor %}
{% for d in documents or [] %}Document {{ loop.index }}: {{ d.title }} {{ d['text'] | replace('\\n', ' ') }}
{% endfor %}
{%- set groups = messages | groupby('role') %}{% for role, of in groups %}{{ role }}={{ of | length }};{% endfor %}
{{ messages | map(attribute='role') | unique | join(',') }}
{{ messages | selectattr('role', 'equalto', 'user') | list | length }}
{{ "%s has %5.2f and %-3d|" | format('x', 1.5, 7) }}{{ '{:>5}|{}'.format('ab', messages | length) }}{{ 'a%sb' % 'X' }}
{{ [1, 2] + [3] }}{{ (1, 'a') }}{{ {'k': none, 'b': true} }}{{ 'ab' * 3 ~ 2 ** 5 // 3 }}
{{ [3, 1] | sort | batch(1) | list }}
{{ dict(a=1) | tojson }}{{ dict.fromkeys(['x'], 2) }}{{ cycler('a', 'b').next() }}
{{ 'x'.center(7, '.') }}{{ '7'.zfill(3) }}
{{ 'l1\\nl2' | indent(3, true) }}{{ [1.0, 2] | sum }}{{ missing }}
{{ range(3) | list }}{{ tools | length if tools else 'no tools' }}
{% block tail scoped %}{{ add_generation_prompt }}{% endblock %}{% filter upper %}done{% endfilter %}
{% set x %}a{{ 1 }}{% endset %}{{ x }}
{% call(y) show2() %}<{{ y }}>{% endcall %}
"""
PARTS = "{% macro show2() %}{{ caller('é') }}{% endmacro %}" + PARTS
TEMPLATES = {
    "chatml": CHATML,
    "alternating": ALTERNATING,
    "headers": HEADERS,
    "parts": PARTS,
    "tojson": "{{ messages | tojson }}|{{ tools | tojson(indent=2) }}|{{ messages | tojson(separators=(',', ':')) }}|"
    "{{ messages | tojson(ensure_ascii=true, sort_keys=true) }}|{{ messages | tojson(indent='\t') }}",
    "reasoning": "{% for m in messages %}{{ m.thinking }}/{{ m.reasoning_content }}/"
    "{{ m.reasoning }}/{{ m.content }};{% endfor %}",
    "no content": "{% for m in messages %}{{ m.role }}{% endfor %}",
    "trims": "{% for m in messages %}[{{ m['content'] | trim }}]{% endfor %}",
    "drops": "{% for m in messages[:-1] %}{{ m['content'] }}{% endfor %}",
    "syntax error": "{% for m in messages %}{{ m.content }}",
    "unknown filter": "{{ messages | nothing }}",
    "undefined": "{{ nothing.at.all }}",
    "private": "{{ ''.__class__ }}{{ messages.__class__.__mro__ }}",
    "changes its input": "{{ messages.append(1) }}",
    "private variable": "{% set ns = namespace(_x=1) %}{{ ns._x }}",
    "variables": "{% set ns = namespace(self=1) %}{% set ns.b = 2 %}{{ ns.self }}"
    "{{ ns.b }}{{ ns }}{{ bos_token }}{{ pad_token }}",
}
CALL = {
    "type": "function",
    "id": "c1",
    "function": {"name": "weather", "arguments": {"city": "Zürich", "days": 3, "x": None}},
}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'The weather of a <city> & "more" — it\'s 你好',
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
SYSTEM = {"role": "system", "content": "Be <brief> & 'kind'.\n"}
USER = {"role": "user", "content": "  Hello 🎉 你好 </s>\n"}
ANSWER = {"role": "assistant", "content": "Hi! \n"}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one message": [USER],
    "system": [SYSTEM, USER],
    "turns": [SYSTEM, USER, ANSWER, USER, {"role": "skip", "content": "x"}, ANSWER, USER],
    "last is the assistant's": [USER, ANSWER],
    "reasoning": [
        USER,
        {"role": "assistant", "content": "42", "reasoning": "\nhm\n"},
        USER,
        ANSWER | {"thinking": "so"},
    ],
    "thoughts in the content": [USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\n42"}, USER],
    "tool calls": [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "sun"},
    ],
    "two calls": [USER, {"role": "assistant", "tool_calls": [CALL, CALL]}],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b "}]}],
    "image": [{"role": "user", "content": [{"type": "image"}]}],
    "twice the same role": [USER, USER],
    "empty content": [{"role": "user", "content": ""}],
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"add_generation_prompt": True, "enable_thinking": False, "date_string": "1 May 2026"},
    {"continue_final_message": True},
    {"tools": [TOOL, TOOL], "add_generation_prompt": True},
    {"tools": [], "documents": [{"title": "T", "text": "a\nb"}], "bos_token": "<other>"},
    {"documents": ["not a dict"]},
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    hf: Any = byte_level(bos=True).hf
    hf.add_special_tokens({"bos_token": "<s>", "pad_token": "<|im_end|>", "extra_special_tokens": ["<|im_start|>"]})
    return Tokenizer.of(hf)


@pytest.fixture(scope="module")
def compiled() -> ChatTemplates:
    return ChatTemplates()


def result_of(render: Any) -> tuple[str | None, type | None]:
    """Return the text, or the kind of error."""
    try:
        return render(), None
    except Exception as error:  # noqa: BLE001 (a template is a program)
        return None, type(error)


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_same_text_as_transformers(tokenizer: Tokenizer, compiled: ChatTemplates, name: str) -> None:
    source = TEMPLATES[name]
    for messages in CONVERSATIONS.values():
        for options in OPTIONS:
            expected = result_of(
                lambda: tokenizer.hf.apply_chat_template(messages, chat_template=source, tokenize=False, **options)  # noqa: B023
            )
            variables = {**tokenizer.parts.special_tokens, **options}
            assert result_of(lambda: compiled.get(source).render(messages, **variables)) == expected  # noqa: B023


def test_the_comparison_compares_texts(tokenizer: Tokenizer) -> None:
    """Nearly all that templates are given above must be rendered: where both refuse, little is compared."""
    texts = [
        result_of(lambda: tokenizer.hf.apply_chat_template(messages, chat_template=source, tokenize=False))[0]  # noqa: B023
        for source in (CHATML, HEADERS, PARTS)
        for messages in CONVERSATIONS.values()
    ]
    assert sum(text is not None for text in texts) >= 28


def test_the_date(tokenizer: Tokenizer, compiled: ChatTemplates, monkeypatch: pytest.MonkeyPatch) -> None:
    from datetime import datetime

    class OneDay(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> OneDay:
            return cls(2026, 2, 3, 4, 5, 6)

    monkeypatch.setattr(templates, "datetime", OneDay)
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", OneDay)
    source = "{{ strftime_now('%Y-%m-%d %H:%M:%S %A') }} {{ strftime_now(format='%d %b') }}"
    text = compiled.get(source).render([USER])
    assert text == "2026-02-03 04:05:06 Tuesday 03 Feb"
    assert text == tokenizer.hf.apply_chat_template([USER], chat_template=source, tokenize=False)


def test_what_is_refused_says_why(compiled: ChatTemplates) -> None:
    with pytest.raises(TemplateSyntaxError, match="endfor"):
        compiled.get(TEMPLATES["syntax error"])
    with pytest.raises(TemplateError, match="must alternate"):
        compiled.get(ALTERNATING).render([USER, USER], bos_token="<s>")
    with pytest.raises(SecurityError, match="unsafe"):
        compiled.get(TEMPLATES["private"]).render([USER])
    with pytest.raises(TypeError, match="documents must be a list of dicts"):
        compiled.get(CHATML).render([USER], documents=["x"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="does not show the whole final message"):
        compiled.get(TEMPLATES["drops"]).render([USER, ANSWER], continue_final_message=True)


def test_the_callers_messages_stay_as_they_are(compiled: ChatTemplates) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    compiled.get(PARTS).render(messages, continue_final_message=True)
    assert messages == [{"role": "user", "content": [{"type": "text", "text": "a"}]}]


def test_templates_see_plain_data() -> None:
    class Color(StrEnum):
        RED = "red"

    class Number(int):
        pass

    @dataclass
    class Point:
        x: Any

    class Image:
        def save(self) -> None:
            raise AssertionError

    class Model:
        def model_dump(self) -> dict[str, Any]:
            return {"a": (1,)}

    variables = {
        "a": Color.RED, "b": Number(3), "c": Point([Image()]), "d": Model(), "e": np.float32(1.5), "f": np.bool_(False),
        "g": np.zeros(3), "h": UserDict({"x": b"y"}), "i": None, "j": (True, 2.5),
    }  # fmt: skip
    seen = plain(variables)
    assert seen == {
        "a": "red", "b": 3, "c": {"x": ["<Image>"]}, "d": {"a": (1,)}, "e": 1.5, "f": False,
        "g": "<ndarray>", "h": {"x": "<bytes>"}, "i": None, "j": (True, 2.5),
    }  # fmt: skip
    assert [type(seen[name]) for name in "abe"] == [str, int, float]


def test_each_template_is_compiled_once_and_few_are_kept(
    compiled: ChatTemplates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(templates, "MAX_TEMPLATES", 3)
    few = ChatTemplates()
    first = few.get("{{ 0 }}")
    others = [few.get(f"{{{{ {i} }}}}") for i in (1, 2)]
    assert few.get("{{ 0 }}") is first
    few.get("{{ 3 }}")  # in place of the one used least lately
    assert few.get("{{ 0 }}") is first
    assert few.get("{{ 2 }}") is others[1]
    assert few.get("{{ 1 }}") is not others[0]


def test_threads_render_at_once(compiled: ChatTemplates) -> None:
    template = compiled.get(PARTS)
    expected = {str(i): template.render([{"role": "user", "content": str(i) * 50}]) for i in range(8)}
    kinds: dict[str, set[str]] = {}

    def run(name: str) -> None:
        kinds[name] = {template.render([{"role": "user", "content": name * 50}]) for _ in range(20)}

    threads = [threading.Thread(target=run, args=(name,)) for name in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert kinds == {name: {text} for name, text in expected.items()}
