"""Every field of every request has the effect that it is there for, or is refused by name: none is ignored in silence.

What a field does shows in what the engine is asked, or in the answer.
"""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.server.http.decoding import HARMLESS
from tests.async_engine.support import mock_llm, tiny_args
from tests.server.pooled_support import CLASSIFY, EMBED, PooledEngine
from tests.server.request_fields import ROUTES, Effect, Nothing, Refusal
from tests.server.support import Answer, Served, served
from tests.server.tool_support import REPLIES

pytestmark = pytest.mark.server

TEMPLATE = (
    "{% if tools %}<tools>{{ tools | length }}</tools>{% endif %}{{ documents }}{{ reasoning_effort }}{{ flavour }}"
    "{{ enable_thinking }}{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<end>{% endfor %}{% if add_generation_prompt %}<assistant>{{ '<think>' if thinks }}{% endif %}"
)
"""It shows all that a request can tell a template, and tells of the marks of calls and of reasoning."""
CHANGING = re.compile(
    r"[0-9a-f]{24,32}|\d{4}-\d\d-\d\dT[\d:.]+Z?|\"(created|created_at|completed_at|\w+_duration|argmax_is_label)\":[^,}]+"
)
"""What no two answers have in common."""
CASES = [(path, name) for path, each in ROUTES.items() for name in each.fields]
GONE = [(path, name) for path, each in ROUTES.items() for name in each.refused]


@pytest.fixture(scope="module")
def llm(tokenizer: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLM]:
    path = tmp_path_factory.mktemp("replies") / "replies.json"
    replies = [{"prompt": part, "reply": reply} for part, reply in reversed(REPLIES.items())]
    path.write_text(json.dumps(replies), encoding="utf-8")
    overrides = {"max_position_embeddings": 4096}
    args = tiny_args(tokenizer, chat_template=TEMPLATE, scheduling_policy="priority", hf_overrides=overrides)
    with mock_llm(args, tokens_per_second=20_000, replies=str(path)) as llm:
        yield llm


@pytest.fixture(scope="module")
def generating(llm: AsyncLLM) -> Iterator[Served]:
    with served(llm, "--trust-request-chat-template") as server:
        yield server


@pytest.fixture(scope="module")
def embedding(llm: AsyncLLM) -> Iterator[Served]:
    engine: Any = PooledEngine(llm, EMBED)
    with served(engine, "--trust-request-chat-template") as server:
        yield server


@pytest.fixture(scope="module")
def classifying(llm: AsyncLLM) -> Iterator[Served]:
    engine: Any = PooledEngine(llm, CLASSIFY)
    with served(engine, "--trust-request-chat-template") as server:
        yield server


@pytest.fixture
def server(request: pytest.FixtureRequest, path: str) -> Served:
    if path == "/classify":
        return request.getfixturevalue("classifying")
    pools = path in ("/v1/embeddings", "/pooling", "/score", "/rerank", "/v2/embed", "/api/embed", "/api/embeddings")
    return request.getfixturevalue("embedding" if pools else "generating")


class Watch:
    """This sends requests to a route, and sees what the engine is asked meanwhile."""

    def __init__(self, server: Served, path: str, patch: pytest.MonkeyPatch) -> None:
        self._server, self._path = server, path
        self._asked: list[str] = []
        for name in ("add_request", "beam_search", "encode", "decide"):
            if hasattr(server.llm, name):
                patch.setattr(server.llm, name, self._noting(getattr(server.llm, name)))
        if path == "/tokenize":
            tokenizer = server.llm.front.require_tokenizer()
            patch.setattr(tokenizer, "encode", self._noting(tokenizer.encode))

    def _noting(self, method: Any) -> Any:
        def note(*args: Any, **kwargs: Any) -> Any:
            shown = [each for each in (*args, *kwargs.values()) if not isinstance(each, str)]  # ids are strings
            self._asked.append(CHANGING.sub("", repr(shown)))
            return method(*args, **kwargs)

        return note

    def send(self, **fields: Any) -> tuple[Answer, list[str]]:
        """Return the answer to a request, and what the engine was asked; fields that are None are left out."""
        self._asked.clear()
        body = {name: value for name, value in (dict(ROUTES[self._path].good) | fields).items() if value is not None}
        answer = self._server.post(self._path, body)
        return answer, list(self._asked)

    def see(self, **fields: Any) -> tuple[int, str, list[str]]:
        """Return what can be seen of a request, but for what changes each time."""
        answer, asked = self.send(**fields)
        return answer.status, look_of(answer), asked


def look_of(answer: Answer) -> str:
    """Return the text of an answer without what changes each time; of a stream, which fields its events have: how much
    text is in one of them is a matter of time.
    """
    lines = [line.removeprefix("data: ") for line in answer.body.decode().splitlines()]
    events = [json.loads(line) for line in lines if line.startswith("{")]
    if len(events) == 1:
        return CHANGING.sub("", lines[0])
    return "\n".join(sorted({",".join(sorted(fields_of(event))) for event in events}))


def fields_of(value: Any, name: str = "") -> Iterator[str]:
    """Yield the names of what an event has, the outer ones before the inner."""
    if isinstance(value, list):
        for item in value:
            yield from fields_of(item, f"{name}[]")
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from fields_of(part, f"{name}.{key}")
    elif value is not None:
        yield name if name not in (".type", ".event") else f"{name}={value}"


@pytest.fixture
def watch(server: Served, path: str, monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(server, path, monkeypatch)


def names_of(kind: Any, before: str = "") -> set[str]:
    """Return the names of a request's fields, and behind a dot those of its parts that have fields of their own."""
    names = set[str]()
    hints = typing.get_type_hints(kind)
    for field in msgspec.structs.fields(kind):
        names.add(before + field.encode_name)
        for part in typing.get_args(hints[field.name]):
            if isinstance(part, type) and issubclass(part, msgspec.Struct):
                names |= names_of(part, f"{before}{field.encode_name}.")
    return names


def nested(name: str, value: Any, beside: Any) -> dict[str, Any]:
    """Return a field by its name; parts of a dotted name are nested, unless the value already is."""
    outer, *inner = name.split(".")
    wrapped = value
    for part in reversed(inner):
        if outer not in beside:
            wrapped = {part: wrapped}
    if len(inner) == 2 and outer in beside:
        wrapped = {inner[0]: value}
    return {outer: wrapped}


@pytest.mark.parametrize("path", ROUTES)
def test_every_field_has_its_entry(path: str) -> None:
    requests = ROUTES[path]
    assert requests.fields.keys() == names_of(requests.kind)
    assert set(requests.vllm.split()) <= requests.fields.keys() | requests.refused.keys()
    assert not requests.fields.keys() & requests.refused.keys()


@pytest.mark.parametrize(("path", "name"), CASES)
def test_a_field_has_its_effect_or_is_refused_by_name(watch: Watch, path: str, name: str) -> None:
    entry = ROUTES[path].fields[name]
    beside = dict(entry.beside)
    before = watch.see(**beside)
    assert watch.see(**beside) == before, "the same request looks the same"
    fields = beside | nested(name, entry.value, beside)
    answer, asked = watch.send(**fields)
    match entry:
        case Effect():
            assert before[0] == 200 or before[2], before
            assert answer.status == 200 or asked != before[2], answer.body
            assert watch.see(**fields) != before
        case Refusal():
            assert before[0] == 200, before
            assert answer.status in (400, 404), answer.body
            assert name.partition(".")[0] in str(answer.json) or answer.status == 404, answer.body
        case Nothing():
            assert before[0] == 200, before
            assert watch.see(**fields) == before


@pytest.mark.parametrize(("path", "name"), GONE)
def test_fields_without_meaning_are_refused_unless_they_ask_for_nothing(watch: Watch, path: str, name: str) -> None:
    answer, asked = watch.send(**{name: {"a": 1}})
    assert (answer.status, asked) == (400, []), answer.body
    error = answer.json.get("error", answer.json)
    message = error if isinstance(error, str) else error["message"]
    assert message == f"{name} is not supported: {ROUTES[path].refused[name]}."
    before = watch.see()
    for value in HARMLESS.get(name, ()):
        assert watch.see(**{name: value}) == before
