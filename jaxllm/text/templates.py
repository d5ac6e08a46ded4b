"""Chat templates are Jinja programs from strangers: they run here in a sandbox, to the text that transformers makes."""

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
"""A message's reasoning goes by these names; the first that is there counts."""
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
"""It marks where the final message ends, so that what the template writes after it can be cut off."""
_PROBE = "jaxllm-probe-7f3a"


class ChatTemplate:
    """A compiled template renders any number of conversations, in any thread."""

    def __init__(self, source: str, environment: LimitedEnvironment) -> None:
        """Compile the template. Raises jinja2's TemplateError for what is no template, or too long a one."""
        if len(source) > MAX_SOURCE:
            raise TemplateLimitError(f"the template is longer than {MAX_SOURCE} characters")
        self._source, self._environment = source, environment
        self._template = environment.from_string(source)

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
        """Return the conversation's text; the template sees the `variables` by name.

        A template is a program, and may raise any Exception; TemplateLimitError if it takes too long or too much.
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
        """Render with the final message left open: nothing comes after its content."""
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
        # A template that trims the content has taken the tag's space too.
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
        """Whether the template has a place for messages of the role "developer"."""
        return '"developer"' in self._source or "'developer'" in self._source


class ChatTemplates:
    """This compiles each template once and keeps those used last; any thread may ask."""

    def __init__(self, seconds: float = MAX_SECONDS) -> None:
        """Let each render take at most so many seconds."""
        self._environment = _make_environment(seconds)
        self._compiled: OrderedDict[str, ChatTemplate] = OrderedDict()
        self._lock = Lock()

    def get(self, source: str) -> ChatTemplate:
        """Return the template compiled. Raises jinja2's TemplateError, or whatever compiling raises."""
        with self._lock:
            template = self._compiled.get(source)
        if template is None:
            template = ChatTemplate(source, self._environment)
        with self._lock:
            self._compiled[source] = template
            self._compiled.move_to_end(source)
            if len(self._compiled) > MAX_TEMPLATES:
                self._compiled.popitem(last=False)
        return template


def plain(value: Any) -> Any:
    """Return a copy of plain data; what is not data a template sees as its type's name, as "<Image>"."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # others may have methods of their own
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, (dict, Mapping)):  # a dict is told sooner
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
    """The statement {% generation %} marks what the assistant said, which only training asks for."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        """Take the marked text as it is."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_shown"), [], [], body).set_lineno(line)

    def _shown(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """Templates make dicts with this, and see nothing else of the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """Templates keep variables in this: values by names that do not begin with an underscore, no namespaces."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that `self` may be a variable too
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
    """Write JSON as it is: Jinja's own filter escapes what HTML must not have."""
    check_size(value_size(indent))
    value_size(
        x, per_level=(indent if isinstance(indent, int) else len(indent or "")) + sum(map(len, separators or ""))
    )
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _make_environment(seconds: float) -> LimitedEnvironment:
    """Make a sandbox with what templates may use."""
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
