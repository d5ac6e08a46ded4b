"""Render chat templates in a sandbox, since they are untrusted Jinja programs, with the same result as transformers."""

from __future__ import annotations

import dataclasses
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import cached_property
from threading import Lock
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.utils import Namespace

from jaxllm.text.template_content import loops_over_content
from jaxllm.text.template_limits import (
    MAX_SECONDS,
    MAX_SOURCE,
    LimitedEnvironment,
    TemplateLimitError,
    check_size,
    limited,
    value_size,
)

MAX_TEMPLATES = 32
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""The names of a message's reasoning; the first one present counts."""
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marks the end of the final message, so that the text after it can be cut off."""
_PROBE = "jaxllm-probe-7f3a"


class _ChatTemplate:
    """A compiled template, which renders any number of conversations in any thread."""

    def __init__(self, source: str, environment: LimitedEnvironment) -> None:
        """Compile the template. Raises jinja2's TemplateError for an invalid or too long template."""
        if len(source) > MAX_SOURCE:
            raise TemplateLimitError(f"the template is longer than {MAX_SOURCE} characters")
        self._source, self._environment = source, environment
        self._template = environment.from_string(source)
        self._template.globals = dict(self._template.globals)  # jinja2's chain of dicts takes 20 us to copy each time

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """Return the conversation's text; the template gets the `variables` by name.

        A template may raise any Exception; TemplateLimitError if it takes too much time or memory.
        """
        if not all(isinstance(document, Mapping) for document in documents or []):
            raise TypeError("documents must be a list of dicts with 'title' and 'text'")
        seen = plain({**variables, "tools": tools, "documents": documents})
        seen |= {"messages": _with_reasoning(plain(messages)), "add_generation_prompt": add_generation_prompt}
        if continue_final_message:
            return self._render_open(seen)
        return self._run(seen)

    def _run(self, variables: dict[str, Any]) -> str:
        pieces, length = [], 0
        for piece in self._template.generate(variables):
            length += len(piece)
            check_size(length)
            pieces.append(piece)
        return "".join(pieces)

    def _render_open(self, variables: dict[str, Any]) -> str:
        """Render with the final message left open: nothing follows its content."""
        final = variables["messages"][-1]
        content = final.get("content")
        if content is None or "content" not in self._source:
            raise ValueError("continue_final_message is set, but there is no content that the template shows")
        if isinstance(content, str):
            final["content"], text = content + _TAG, content
        else:
            block = next((block for block in reversed(content) if "text" in block), None)
            if block is None:
                raise ValueError("continue_final_message is set, but the final message has no text to continue")
            block["text"], text = block["text"] + _TAG, block["text"]
        rendered = self._run(variables)
        if text.strip() not in rendered or _TAG.strip() not in rendered:
            raise ValueError("continue_final_message is set, but the template does not show the whole final message")
        end = rendered.rindex(_TAG.strip())
        # A template that trims the content has removed the tag's space too.
        return rendered[:end] if rendered.startswith(_TAG, end) else rendered[:end].rstrip()

    @cached_property
    def content_format(self) -> str:
        """The form of content that the template reads: "string", "openai" (a list of parts), or "given" (both)."""
        loops = loops_over_content(self._environment.parse(self._source))
        try:
            shown = _PROBE in self.render([{"role": "user", "content": _PROBE}], add_generation_prompt=True)
        except TemplateLimitError:
            raise
        except Exception:  # noqa: BLE001 (a template is a program and may fail in any way)
            return "openai" if loops else "string"
        if not shown:
            return "openai"
        return "given" if loops else "string"

    @cached_property
    def names_developer(self) -> bool:
        """Whether the template handles the role "developer"."""
        return '"developer"' in self._source or "'developer'" in self._source


class ChatTemplates:
    """A thread-safe cache of compiled templates, least recently used first out."""

    def __init__(self, seconds: float = MAX_SECONDS) -> None:
        """Limit each render to `seconds`."""
        self._environment = _make_environment(seconds)
        self._compiled: OrderedDict[str, _ChatTemplate] = OrderedDict()
        self._lock = Lock()

    def get(self, source: str) -> _ChatTemplate:
        """Return a compiled template. Raises jinja2's TemplateError, or what compiling raises."""
        with self._lock:
            template = self._compiled.get(source)
        if template is None:
            template = _ChatTemplate(source, self._environment)
        with self._lock:
            self._compiled[source] = template
            self._compiled.move_to_end(source)
            if len(self._compiled) > MAX_TEMPLATES:
                self._compiled.popitem(last=False)
        return template


def plain(value: Any) -> Any:
    """Return a copy with plain data only; other objects become their type's name, as "<Image>"."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # subclasses may have their own methods
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, (dict, Mapping)):  # a dict is checked faster
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple(plain(item) for item in value)
    if hasattr(type(value), "__dataclass_fields__"):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if callable(getattr(value, "model_dump", None)):  # pydantic's
        return plain(value.model_dump())
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return plain(value.item())
    return f"<{type(value).__name__}>"


def _with_reasoning(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with their reasoning under the names that templates read."""
    told = []
    for message in messages:
        reasoning = next((message[name] for name in REASONING_FIELDS if message.get(name) is not None), None)
        told.append(
            message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}
        )
    return told


class _Generation(Extension):
    """The statement {% generation %}, which marks the assistant's text for training."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse the marked text as plain template content."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_shown"), [], [], body).set_lineno(line)

    def _shown(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """Makes dicts for templates, without access to the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """Jinja's `namespace` for templates: no names with a leading underscore, and no namespaces as values."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that a variable may be named `self`
        self, *rest = args
        Namespace.__init__(self)
        for name, value in dict(*rest, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace has no {name!r}: names that begin with an underscore are not allowed")
        if isinstance(value, Namespace):
            raise TemplateLimitError("it puts a namespace into another value")
        Namespace.__setitem__(self, name, value)


def _raise_exception(message: Any) -> None:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:  # noqa: A002 (templates may name it)
    check_size(len(format) * 2**8)
    return datetime.now().strftime(format)


def _tojson(
    x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Write plain JSON: Jinja's own filter escapes characters for HTML."""
    check_size(value_size(indent))
    value_size(
        x, per_level=(indent if isinstance(indent, int) else len(indent or "")) + sum(map(len, separators or ""))
    )
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _make_environment(seconds: float) -> LimitedEnvironment:
    """Make a sandbox with the functions that templates may use."""
    environment = LimitedEnvironment(
        seconds, trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = limited("tojson", _tojson)
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment
