"""Templates that would take a process's time or memory are refused within their limits, and harm nobody else."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jaxllm.exceptions import VLLMValidationError
from jaxllm.text.chat import ChatRenderer
from jaxllm.text.template_limits import MAX_SOURCE, MAX_TEXT, TemplateLimitError, value_size
from jaxllm.text.templates import ChatTemplates
from tests.engine.support import byte_level

SECONDS = 0.3
USER = [{"role": "user", "content": "hi"}]
LOOPS, ENDS = "{% for i in range(100000) %}{% for j in range(100000) %}", "{% endfor %}{% endfor %}"
NS, AGAIN, END = "{% set ns = namespace(x=", ") %}{% for i in range(100) %}{% set ns.x = ", " %}{% endfor %}{{ ns.x }}"
MILLION = "('a' * 1000000)"

ENDLESS = {
    "loops": LOOPS + ENDS,
    "loops that set": LOOPS + "{% set x = j %}" + ENDS,
    "a loop that skips all": "{% for i in range(100000) %}"
    "{% for j in range(100000) if false %}{% endfor %}{% endfor %}",
    "a loop in a block of its own": "{% for i in range(100000) %}{% block x scoped %}{% for j in range(100000) %}"
    "{% endfor %}{% endblock %}{% endfor %}",
    "a marked loop": "{% generation %}" + LOOPS + ENDS + "{% endgeneration %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(100) }}",
    "comparing": "{% set a = 'a' * 16000000 %}{% set b = 'a' * 15999999 ~ 'a' %}{{ [" + "a == b, " * 5000 + "] }}",
    "searching": "{% set a = range(100000) | list %}{% for i in range(100000) if -1 in a %}{% endfor %}",
    "selecting": "{% set a = range(100000) | list %}{{ range(100000) | map('string') | select('in', a) | list }}",
}
HUGE = {
    "output": "{% for i in range(100000) %}{{ 'a' * 1000 }}{% endfor %}",
    "fixed output": "{% for i in range(100000) %}" + "a" * 1000 + "{% endfor %}",
    "output that is kept": "{% set x %}" + LOOPS + "a" * 1000 + ENDS + "{% endset %}",
    "a product": "{{ 'a' * 10 ** 10 }}",
    "a list's product": "{% set x = 10 ** 9 * [0] %}",
    "a power": "{{ 10 ** 1000000000 }}",
    "squares": NS + "7" + AGAIN + "ns.x * ns.x" + END,
    "doubled text": NS + "'aa'" + AGAIN + "ns.x ~ ns.x" + END,
    "doubled sum": NS + "'aa'" + AGAIN + "ns.x + ns.x" + END,
    "doubled list": NS + "[1]" + AGAIN + "ns.x + ns.x" + END,
    "lists of the same list": NS + "[1]" + AGAIN + "[ns.x, ns.x]" + END,
    "dicts of the same dict": NS + "{}" + AGAIN + "{'a': ns.x, 'b': ns.x}" + END,
    "made dicts": NS + "{}" + AGAIN + "dict(a=ns.x, b=ns.x)" + END,
    "tuples": NS + "(1,)" + AGAIN + "(ns.x, ns.x)" + END,
    "views": NS + "{}" + AGAIN + "{'a': ns.x.items(), 'b': ns.x}" + END,
    "nested namespaces": "{% set a = namespace() %}{% set a.x = a %}{{ a }}",
    "listed namespaces": "{% set a = namespace() %}{% set a.x = [a] %}{{ a }}",
    "passed namespaces": "{% set a = namespace() %}{% set b = namespace(x=a) %}{{ b }}",
    "sums with literals": NS + "'a'" + AGAIN + "('b' + ns.x) + (ns.x + 'c')" + END,
    "many texts": "{% set ns = namespace(l=[]) %}{% for i in range(100000) %}"
    "{% set ns.l = ns.l + ['a' * 1000000 ~ i] %}{% endfor %}",
    "held texts": "{% macro f(n) %}{% set x = 'a' * 16000000 ~ n %}{{ f(n + 1) }}{{ x }}{% endmacro %}{{ f(0) }}",
    "held parts": "{% set x = 'a' * 16000000 %}"
    "{% macro f(n) %}{% set y = x[n:] %}{{ f(n + 1) }}{{ y }}{% endmacro %}{{ f(0) }}",
    "center": "{{ 'a' | center(10 ** 9) }}",
    "center, a method": "{{ 'a'.center(10 ** 9) }}",
    "zfill": "{{ 'a'.zfill(10 ** 9) }}",
    "a width": "{{ '%1000000000d' % 1 }}",
    "a filter's width": "{{ '%1000000000d' | format(1) }}",
    "a given width": "{{ '%*d' % (10 ** 9, 1) }}",
    "a method's width": "{{ '{:>1000000000}'.format(1) }}",
    "a method's given width": "{{ '{:>{}}'.format(1, 10 ** 9) }}",
    "a mapping's width": "{{ '{a:>1000000000}'.format_map({'a': 1}) }}",
    "fields": "{{ ('{0}' * 100000).format(" + MILLION + ") }}",
    "replace": "{{ " + MILLION + ".replace('a', " + MILLION + ") }}",
    "a filter's replace": "{{ " + MILLION + " | replace('a', " + MILLION + ") }}",
    "join": "{{ " + MILLION + ".join(range(100000) | map('string')) }}",
    "a filter's join": "{{ range(100000) | join(" + MILLION + ") }}",
    "indent": "{{ ('\\n' * 1000000) | indent(60000) }}",
    "indent by a text": "{{ ('\\n' * 1000000) | indent(" + MILLION + ") }}",
    "JSON's indent": "{{ [1] | tojson(indent=10 ** 9) }}",
    "JSON's separators": "{{ (range(100000) | list) | tojson(separators=(" + MILLION + ", ':')) }}",
    "mapped": "{{ range(100000) | map('center', 60000) | list }}",
    "batch": "{{ [1] | batch(10 ** 9, 0) | list }}",
    "slice": "{{ [1] | slice(10 ** 9) | list }}",
    "characters": "{{ ('ab' * 8000000) | list }}",
    "selected characters": "{{ ('ab' * 8000000) | select | list }}",
    "sum of lists": "{{ ([[1]] * 100000) | sum(start=[]) }}",
    "tags": "{{ ('<a' * 5000000) | striptags }}",
    "links": "{{ ('a.com ' * 1000000) | urlize }}",
    "rounding": "{{ 1.5 | round(10 ** 9, 'ceil') }}",
    "a long number": "{{ ('f' * 16000000) | int(0, 16) % 7 }}",
    "a search from the end": "{{ ('a' * 16000000).rfind('b' ~ 'a' * 8000000) }}",
    "strip": "{{ ('a' * 8000000).strip('b' * 8000000 ~ 'a') }}",
    "trim": "{{ ('a' * 8000000) | trim('b' * 8000000 ~ 'a') }}",
    "a date": "{{ strftime_now('%c' * 1000000) }}",
}
REFUSED = {
    "a macro that calls itself": "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "a block that shows itself": "{% block x %}{{ self.x() }}{% endblock %}",
    "bytes": "{{ 'a'.encode() }}",
    "a number's bytes": "{{ (1).to_bytes(10 ** 9) }}",
    "translate": "{{ 'a'.translate({97: 'b'}) }}",
    "expandtabs": "{{ 'a'.expandtabs(10 ** 9) }}",
    "lipsum": "{{ lipsum(10 ** 9) }}",
    "range": "{{ range(10 ** 9) | list }}",
    "deep lists": "{% set x = " + "[" * 200 + "]" * 200 + " %}",
}


@pytest.fixture(scope="module")
def compiled() -> ChatTemplates:
    return ChatTemplates(SECONDS)


@pytest.mark.texts
@pytest.mark.parametrize("name", ENDLESS)
def test_time(compiled: ChatTemplates, name: str) -> None:
    template = compiled.get(ENDLESS[name])
    start = time.perf_counter()
    with pytest.raises(TemplateLimitError, match=r"it takes longer than 0\.3 s"):
        template.render(USER)
    assert time.perf_counter() - start < SECONDS + 5


@pytest.mark.texts
@pytest.mark.parametrize("name", HUGE)
def test_size(name: str) -> None:
    """What would be too large is refused before the 10 seconds, and before it is made."""
    with pytest.raises(TemplateLimitError, match=r"it (makes|puts|gives|formats|searches)"):
        ChatTemplates().get(HUGE[name]).render(USER)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    """What may not be done is refused before the 10 seconds."""
    with pytest.raises(Exception, match=r"recursion|unsafe|undefined|too big|too many"):
        ChatTemplates().get(REFUSED[name]).render(USER)


@pytest.mark.texts
def test_memory_stays_small(repository: Path) -> None:
    """All of these in one process whose address space has 2 GB."""
    code = f"""
import resource
resource.setrlimit(resource.RLIMIT_AS, ({2 * 2**30}, {2 * 2**30}))
from jaxllm.text.template_limits import TemplateLimitError
from jaxllm.text.templates import ChatTemplates
for source in {list(HUGE.values())!r}:
    try:
        ChatTemplates().get(source).render({USER!r})
    except TemplateLimitError:
        continue
    raise AssertionError(source[:100])
"""
    subprocess.run([sys.executable, "-c", code], cwd=repository, check=True)


def test_what_is_within_the_limits(compiled: ChatTemplates) -> None:
    long = [{"role": "user", "content": "é" * (MAX_TEXT - 1)}]
    assert len(compiled.get("{{ messages[0].content }}!").render(long)) == MAX_TEXT
    with pytest.raises(TemplateLimitError):
        compiled.get("{{ messages[0].content }}!!").render(long)
    turns = [{"role": "user", "content": "a" * 1000}] * 5000
    assert len(compiled.get("{% for m in messages %}{{ m.role ~ m.content }}{% endfor %}").render(turns)) == 5020000
    assert compiled.get("{#" + "a" * (MAX_SOURCE - 4) + "#}").render(USER) == ""
    with pytest.raises(TemplateLimitError, match="the template is longer"):
        compiled.get("{#" + "a" * MAX_SOURCE + "#}")


def test_sizes_of_values() -> None:
    small = {"a": ["bc", 1], "d": {"e": None}}
    assert value_size(small) < value_size(small, per_level=4) < value_size([small, small], per_level=4)
    assert value_size("abc") == value_size(b"") + 3
    with pytest.raises(TemplateLimitError):
        value_size(small, per_level=MAX_TEXT)


def test_others_go_on_meanwhile_and_afterwards(compiled: ChatTemplates) -> None:
    hello = compiled.get("{{ messages[0].content }}")
    ended: list[Exception] = []

    def run() -> None:
        try:
            compiled.get(ENDLESS["loops"]).render(USER)
        except TemplateLimitError as error:
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert hello.render(USER) == "hi"
    thread.join()
    assert len(ended) == 1
    assert hello.render(USER) == "hi"


def test_the_callers_error() -> None:
    renderer = ChatRenderer(byte_level(), None)
    with pytest.raises(VLLMValidationError, match=r"messages: rendering .* was stopped: it makes more than") as error:
        renderer.render(USER, "messages", chat_template=HUGE["a product"])
    assert error.value.parameter == "chat_template"
    assert renderer.render(USER, "messages").text
