"""The requests of a server's soak: random requests with known answers, invalid ones, and calls of other routes."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
WORDS = (
    *("the", "a", "sea", "wind", "river", "stone", "light", "of", "in", "on", "under", "over"),
    *("runs", "sings", "falls", "and", "but", "new", "old", "green"),
)
JSON_SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
GRAMMARS: tuple[dict[str, Any], ...] = (
    {"structured_outputs": {"regex": "[a-z]{3,9} [0-9]{2}"}},
    {"structured_outputs": {"choice": ["yes", "no", "perhaps"]}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": JSON_SCHEMA}}},
)
_USER = [{"role": "user", "content": "sea"}]
BAD: tuple[tuple[str, Any, int], ...] = (
    (COMPLETIONS, {"prompt": "sea", "max_tokens": -1}, 400),
    (COMPLETIONS, {"prompt": "sea", "temperature": "hot"}, 400),
    (COMPLETIONS, {"prompt": "sea", "n": 0}, 400),
    (COMPLETIONS, {"prompt": []}, 400),
    (COMPLETIONS, {"prompt": [1 << 30]}, 400),
    (COMPLETIONS, {"prompt": [9] * 100_000}, 400),
    (COMPLETIONS, {"prompt": "sea", "logprobs": 1000}, 400),
    (COMPLETIONS, {"prompt": "sea", "best_of": 2}, 400),
    (COMPLETIONS, {"prompt": "sea", "stop_token_ids": [1 << 30]}, 400),
    (COMPLETIONS, {"prompt": "sea", "structured_outputs": {"regex": "(unclosed"}}, 400),
    (COMPLETIONS, {"prompt": "sea", "model": "another"}, 404),
    (COMPLETIONS, {"max_tokens": 1}, 400),
    (CHAT, {"messages": _USER, "top_logprobs": 2}, 400),
    (CHAT, {"messages": _USER, "chat_template": "{{ messages }}"}, 400),
    (CHAT, {"messages": _USER, "stream_options": {"include_usage": True}}, 400),
    (CHAT, {"messages": _USER, "response_format": {"type": "poem"}}, 400),
    (CHAT, {"messages": "sea"}, 400),
    ("/tokenize", {}, 400),
    ("/detokenize", {"tokens": [-1]}, 400),
    ("/v1/poems", {}, 404),
)
"""Invalid requests, each with the status of its refusal."""
LOOKS: tuple[tuple[str, Any], ...] = (
    *((path, None) for path in ("/health", "/livez", "/ping", "/version", "/metrics", "/load", "/v1/models")),
    ("/tokenize", {"prompt": "the sea sings", "return_token_strs": True}),
    ("/tokenize", {"messages": _USER}),
    ("/detokenize", {"tokens": list(range(20, 40))}),
)
"""Requests that the engine does not see; without a body they are GET."""
STEADY = frozenset({"/version", "/tokenize", "/detokenize"})
"""The paths that always give the same answer to a request."""


@dataclass(frozen=True, eq=False)
class Ask:
    """A request whose answer does not depend on chance."""

    path: str
    body: dict[str, Any]
    may_stream: bool
    has_media: bool = False

    @property
    def num_items(self) -> int:
        """Return the number of pictures and videos."""
        contents = [message["content"] for message in self.body["messages"]] if self.has_media else []
        return sum(part["type"] != "text" for parts in contents if isinstance(parts, list) for part in parts)

    def unshared(self, source: random.Random) -> dict[str, Any]:
        """Return fields with which the request finds nothing of others in any cache; its answer must be the same.

        A prefix has its own salt, and an item its own name.
        """
        fields: dict[str, Any] = {"cache_salt": str(source.random())}
        if self.has_media:
            fields["messages"] = [_renamed(message, source) for message in self.body["messages"]]
        return fields


@dataclass(frozen=True)
class Lengths:
    """The lengths of prompts and answers."""

    words: int
    long_words: int
    """The number of words of prompts that are computed in chunks."""
    max_tokens: int


def _renamed(message: dict[str, Any], source: random.Random) -> dict[str, Any]:
    """Return a message with a new name for each of its items."""
    if isinstance(message["content"], str):
        return message
    parts = [part if part["type"] == "text" else part | {"uuid": str(source.random())} for part in message["content"]]
    return message | {"content": parts}


def make_asks(source: random.Random, num: int, lengths: Lengths) -> list[Ask]:
    """Return random requests, chats and completions in turns."""
    makers = (_make_chat, _make_completion)
    return [makers[i % 2](source, lengths) for i in range(num)]


def some_words(source: random.Random, num: int) -> str:
    """Return a random text of a number of words."""
    return " ".join(source.choices(WORDS, k=num))


def _make_chat(source: random.Random, lengths: Lengths) -> Ask:
    messages = [{"role": "user", "content": _prompt(source, lengths)}]
    if source.random() < 0.4:
        messages.insert(0, {"role": "system", "content": _shared_text(lengths)})
    if source.random() < 0.3:
        more = [("assistant", some_words(source, 3)), ("user", some_words(source, 2))]
        messages += [{"role": role, "content": text} for role, text in more]
    body = {"messages": messages} | chat_options(source, lengths)
    return _with_prompt_logprobs(source, Ask(CHAT, body, may_stream=True))


def chat_options(source: random.Random, lengths: Lengths) -> dict[str, Any]:
    """Return random options of a chat."""
    options = _options(source, lengths)
    if source.random() < 0.3:
        options |= {"logprobs": True, "top_logprobs": source.randint(0, 5)}
    return options


def _make_completion(source: random.Random, lengths: Lengths) -> Ask:
    prompt: Any = _prompt(source, lengths)
    kind = source.random()
    if kind < 0.2:
        prompt = [source.randrange(20, 250) for _ in range(source.randint(1, 2 * lengths.words))]
    elif kind < 0.3:
        prompt = [some_words(source, 2), some_words(source, 3)]
    elif kind < 0.5:
        prompt = f"{_shared_text(lengths)} {some_words(source, 2)}"
    body = {"prompt": prompt} | _options(source, lengths)
    if source.random() < 0.3:
        body["logprobs"] = source.randint(0, 5)
    if source.random() < 0.2:
        body["echo"] = True
        if source.random() < 0.5:
            body["max_tokens"] = 0
            body.pop("min_tokens", None)
    return _with_prompt_logprobs(source, Ask(COMPLETIONS, body, may_stream=True))


def _prompt(source: random.Random, lengths: Lengths) -> str:
    is_long = source.random() < 0.2
    return some_words(source, lengths.long_words if is_long else source.randint(1, lengths.words))


def _shared_text(lengths: Lengths) -> str:
    """Return the text that several prompts begin with."""
    return some_words(random.Random(0), lengths.long_words // 2)


def _options(source: random.Random, lengths: Lengths) -> dict[str, Any]:
    options: dict[str, Any] = {"max_tokens": source.randint(2, lengths.max_tokens), "temperature": 0.0}
    if source.random() < 0.5:
        options |= {"temperature": 1.0, "seed": source.randrange(2**31), "n": source.choice((1, 1, 1, 2, 4))}
        options |= source.choice(({}, {"top_p": 0.8}, {"top_k": 20}, {"min_p": 0.05}, {"presence_penalty": 0.5}))
    kind = source.random()
    if kind < 0.25:
        options |= source.choice(GRAMMARS)
    elif kind < 0.4:
        options |= {"stop": [source.choice("etaoin ") for _ in range(2)], "include_stop_str_in_output": kind < 0.3}
    elif kind < 0.6:
        options["ignore_eos"] = True
    elif kind < 0.7:
        options["min_tokens"] = 2
    elif kind < 0.8:
        options["logit_bias"] = {"30": 2.0, "40": -5.0}
    return options


def _with_prompt_logprobs(source: random.Random, ask: Ask) -> Ask:
    """Return the request, now and then with the prompt's log-probabilities, which cannot be streamed."""
    if source.random() < 0.15:
        return Ask(ask.path, ask.body | {"prompt_logprobs": source.randint(0, 3)}, may_stream=False)
    return ask
