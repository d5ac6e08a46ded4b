"""Hostile requests: thousands from one seed, for each route and field."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tests.server.request_bounds import (
    ANTHROPIC,
    ANYWHERE,
    CHAT,
    COHERE,
    COHERE_CHAT,
    DECISION,
    DETOKENIZE,
    EMBEDDINGS,
    INPUTS,
    POOLING,
    RERANK,
    RESPONSES,
    SAMPLING,
    SCORE,
    SYSTEMONE,
    TOKENIZE,
    Bound,
)

MAX_VALUE = 100_000
"""Longer values are tried where fields are tried one by one."""
CHAT_BODY = {"messages": '[{"role":"user","content":"a"}]', "max_tokens": "2"}
COMPLETION_BODY = {"prompt": '"a"', "max_tokens": "2"}
COMPLETION: dict[str, Bound] = SAMPLING | {
    "prompt": Bound('"a"', ("[]", "[[]]", "[1,[2]]", "[256]", "[-1]", '[""]', "{}", "[[1.5]]", '["a"]')),
    "echo": Bound("true", ("2",)),
    "logprobs": Bound("20", ("21", "-2")),
    "prompt_logprobs": Bound("20", ("21", "-2")),
    "logprob_token_ids": Bound("[5]", ("[256]", "[-1]")),
}
POOLED: list[tuple[str, dict[str, Bound], dict[str, str]]] = [
    ("/v1/embeddings", EMBEDDINGS, {"input": '["a","b"]'}),
    ("/pooling", POOLING, {"input": '["a","b"]'}),
    ("/classify", INPUTS, {"input": '["a","b"]'}),
    ("/score", SCORE, {"text_1": '"a"', "text_2": '["b","c"]'}),
    ("/rerank", RERANK, {"query": '"a"', "documents": '["b","c"]'}),
    ("/v2/embed", COHERE, {"texts": '["a","b"]'}),
]
"""Routes of models that pool, with the bounds of their fields and those of a good request."""
GRAMMARS = (
    {"regex": "(a|b)*a(a|b){30}"},
    {"regex": "(" * 3000 + "a" + ")" * 3000},
    {"regex": "(?=a)b"},
    {"json": {"type": "nonsense"}},
    {"json": {"$ref": "https://json-schema.org/draft/2020-12/schema"}},
    {"json": {"$ref": "#"}},
    {"json": '{"items":' * 5000},
    {"json": {"oneOf": [{"minimum": number} for number in range(500)]}},
    {"grammar": "start: start"},
    {"grammar": 'start: "' + '\\"' * 5000},
    {"choice": []},
    {"structural_tag": "{"},
)
MESSAGES: tuple[Any, ...] = (
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/"}}]}],
    [{"role": "user", "content": "a", "tool_calls": [{"function": {"arguments": "[" * 5000}}]}],
    [{"role": "{{ 1 }}", "content": "{% for i in range(10) %}"}],
    [{"role": "user", "content": "<s></s><tool><think>" * 20}],
    [{"role": "user", "content": "\ud800"}],
    [{"content": None}],
    [[]],
)

ITEMS: tuple[Any, ...] = (
    [{"type": "item_reference", "id": "\ud800"}, {"id": None}],
    [{"role": "user", "content": "\ud800"}],
    [{"type": "function_call", "call_id": "", "name": "", "arguments": "[" * 5000}],
    [{"type": "function_call_output", "call_id": "x", "output": [{"type": "input_image", "image_url": "file:///"}]}],
    [{"type": "reasoning", "summary": {}, "content": {"a": 1}}, {"type": "message", "role": "assistant"}],
    [{"type": {"a": 1}, "role": ["user"]}, {"role": "user", "content": [{"type": ["text"]}]}],
    [{"role": "{{ 1 }}"}, {"role": "assistant", "content": [[]]}, {}],
)


class Hostile(NamedTuple):
    """One request."""

    method: str
    target: str
    body: bytes
    headers: tuple[str, ...] = ("content-type: application/json",)

    @property
    def data(self) -> bytes:
        """Return the bytes to send."""
        lines = [
            f"{self.method} {self.target} HTTP/1.1",
            "host: localhost",
            *self.headers,
            f"content-length: {len(self.body)}",
        ]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + self.body


def requests(seed: int, count: int) -> Iterator[Hostile]:
    """Yield a number of requests, the same ones for a seed."""
    rng = random.Random(seed)
    kinds: list[Callable[[random.Random], Hostile]] = [*[_field] * 3, _grammar, _message, _items, _mutated, _strange]
    for _ in range(count):
        yield rng.choice(kinds)(rng)


def pooled_requests(seed: int, count: int) -> Iterator[Hostile]:
    """Yield a number of requests to pooling routes, with invalid values of fields."""
    rng = random.Random(seed)
    for _ in range(count):
        path, bounds, base = rng.choice(POOLED)
        fields = dict(base)
        for name in rng.sample(sorted(bounds), rng.choice([1, 1, 2, 3])):
            values = [bounds[name].most, *bounds[name].beyond, *ANYWHERE]
            fields |= bounds[name].beside
            fields[name] = rng.choice([value for value in values if len(value) < MAX_VALUE])
        yield Hostile("POST", path, _body(fields))


def _body(fields: dict[str, str]) -> bytes:
    return ("{" + ",".join(f'"{name}":{value}' for name, value in fields.items()) + "}").encode()


def _field(rng: random.Random) -> Hostile:
    """Set a field to a value that is invalid or barely valid."""
    path, bounds, base = rng.choice(
        [
            ("/v1/chat/completions", CHAT, CHAT_BODY),
            ("/v1/responses", RESPONSES, {"input": '"a"', "max_output_tokens": "2"}),
            ("/v1/completions", COMPLETION, COMPLETION_BODY),
            ("/v1/messages", ANTHROPIC, CHAT_BODY),
            ("/v2/chat", COHERE_CHAT, CHAT_BODY),
            ("/tokenize", TOKENIZE, {}),
            ("/detokenize", DETOKENIZE, {}),
            ("/v1/systemone", SYSTEMONE, {"state": '"a"', "questions": '{"a":{"type":"noul"}}'}),
            ("/v1/decisions", DECISION, {"input": '"a"', "questions": '[{"type":"predicate","instructions":"a"}]'}),
        ]
    )
    name = rng.choice(sorted(bounds))
    values = [value for value in (*bounds[name].beyond, *ANYWHERE) if len(value) < MAX_VALUE]
    streams = {"stream": "true"} if path.startswith(("/v1", "/v2/chat")) and rng.random() < 0.3 else {}
    return Hostile("POST", path, _body({**base, **streams, **bounds[name].beside, name: rng.choice(values)}))


def _grammar(rng: random.Random) -> Hostile:
    grammar = json.dumps(rng.choice(GRAMMARS))
    return Hostile("POST", "/v1/chat/completions", _body({**CHAT_BODY, "structured_outputs": grammar}))


def _message(rng: random.Random) -> Hostile:
    path = rng.choice(["/v1/chat/completions", "/tokenize"])
    return Hostile("POST", path, _body({"messages": json.dumps(rng.choice(MESSAGES)), "max_tokens": "2"}))


def _items(rng: random.Random) -> Hostile:
    return Hostile("POST", "/v1/responses", _body({"input": json.dumps(rng.choice(ITEMS)), "max_output_tokens": "2"}))


def _mutated(rng: random.Random) -> Hostile:
    """Change bytes of a good body."""
    path, base = rng.choice([("/v1/chat/completions", CHAT_BODY), ("/v1/completions", COMPLETION_BODY)])
    body = bytearray(_body({**base, "temperature": "0.5", "stop": '["x"]', "logit_bias": '{"5":1}'}))
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(body))
        match rng.randrange(4):
            case 0:
                body[at] = rng.randrange(256)
            case 1:
                del body[at:]
                body += b" "
            case 2:
                body[at:at] = rng.choice([b"[", b"{", b'"', b"\\u0000", b"\xff", b"1e999", b"null"])
            case _:
                body[at : at + rng.randint(1, 9)] = b""
                body += b" "
    return Hostile("POST", path, bytes(body))


def _strange(rng: random.Random) -> Hostile:
    """Ask for a missing path, or with a bad method or header."""
    path = rng.choice(["/", "//v1/models", "/v1/models/%00", "/v1/models/" + "x" * 3000, "/metrics", "/docs", "/.."])
    header = rng.choice(["content-type: text/plain", "x-request-id: a b", "authorization: Bearer x", "expect: x"])
    return Hostile(rng.choice(["GET", "POST", "PUT", "DELETE", "OPTIONS"]), path, b"{}", (header,))
