"""Chat templates that read lists of parts are told from those that read strings alone."""

from __future__ import annotations

import pytest

from jaxllm.text.templates import ChatTemplates

READS_PARTS = {
    "a loop": "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}",
    "by subscript": "{% for m in messages %}{% for part in m['content'] %}{{ part.text }}{% endfor %}{% endfor %}",
    "an alias": "{% set all = messages[1:] %}{% for m in all or [] %}{% set c = m.content %}"
    "{% for part in c | list %}{{ part.text }}{% endfor %}{% endfor %}",
    "a namespace": "{% set ns = namespace(rest=messages) %}{% set ns.rest = messages[1:] if x else ns.rest %}"
    "{% for m in ns.rest %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}",
    "a macro": "{% macro show(c) %}{% if c is string %}{{ c }}{% else %}{% for part in c %}{{ part.text }}{% endfor %}"
    "{% endif %}{% endmacro %}{% for m in messages %}{{ show(m.content) }}{% endfor %}",
    "a macro by keyword": "{% macro show(role, c) %}{% for part in c %}{{ part.text }}{% endfor %}{% endmacro %}"
    "{% for m in messages %}{{ show('user', c=m.content) }}{% endfor %}",
    "by index": "{% for i in range(messages | length) %}{% set content = messages[i].content %}"
    "{% for part in content %}{{ part.text }}{% endfor %}{% endfor %}",
}
READS_STRINGS = {
    "plain": "{% for m in messages %}{{ m.content | trim }}{% endfor %}",
    "calls": "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls %}{{ call }}{% endfor %}{% endfor %}",
    "a macro for tools": "{% macro show(content) %}{% for each in content %}{{ each }}{% endfor %}{% endmacro %}"
    "{{ show(tools) }}{% for m in messages %}{{ m.content }}{% endfor %}",
    "another's content": "{% for d in documents %}{% for part in d.content %}{{ part }}{% endfor %}{% endfor %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}",
}
STRINGS_TOO = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% endif %}{% endfor %}"


@pytest.mark.parametrize("name", READS_PARTS)
def test_parts_are_read(name: str) -> None:
    templates = ChatTemplates()
    assert templates.get(READS_PARTS[name] + STRINGS_TOO).content_format == "given"
    if name != "a macro":  # which shows strings itself
        assert templates.get(READS_PARTS[name]).content_format == "openai"


@pytest.mark.parametrize("name", READS_STRINGS)
def test_strings_are_read(name: str) -> None:
    assert ChatTemplates().get(READS_STRINGS[name]).content_format == "string"


def test_a_template_that_fails_without_parts_reads_parts() -> None:
    source = "{% for m in messages %}{% for part in m.content %}{{ part.text + '' }}{% endfor %}{% endfor %}"
    assert ChatTemplates().get(source).content_format == "openai"
    assert ChatTemplates().get("{{ raise_exception('always') }}").content_format == "string"


def test_long_chains_of_assignments_take_little_work() -> None:
    chain = "".join(f"{{% set a{i} = a{i + 1} %}}" for i in range(3000))
    source = chain + "{% set a3000 = messages %}{% for m in messages %}{{ m.content }}{% endfor %}"
    assert ChatTemplates().get(source).content_format == "string"
