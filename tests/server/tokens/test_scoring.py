"""Scores of items: the probability of a label after the query and the item, from the whole distribution."""

from __future__ import annotations

import math
from typing import Any

import pytest

from jaxllm import LLM, SamplingParams, TokensPrompt
from tests.server.support import Served

pytestmark = pytest.mark.server

PATH = "/generative_scoring"
QUERY, ITEMS, LABELS = "is it good?", ["yes it is", "no", "maybe so"], [40, 41, 42]


def encoded(server: Served, text: str, *, special: bool) -> list[int]:
    return server.llm.front.require_tokenizer().encode([text], add_special_tokens=special)[0]


def probabilities(offline: LLM, prompt: list[int]) -> list[float]:
    """Return the probability of each label after a prompt, by scoring the whole of both."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    texts = [TokensPrompt(prompt_token_ids=[*prompt, label]) for label in LABELS]
    values = []
    for label, output in zip(LABELS, offline.generate(texts, params, use_tqdm=False), strict=True):
        assert output.prompt_logprobs is not None
        last = output.prompt_logprobs[-1]
        assert last is not None
        values.append(math.exp(last[label].logprob))
    return values


@pytest.mark.parametrize("item_first", [False, True])
@pytest.mark.parametrize("apply_softmax", [False, True])
@pytest.mark.parametrize("as_ids", [False, True])
def test_scores_are_those_of_the_whole_distribution(
    offline: LLM, tiny_server: Served, item_first: bool, apply_softmax: bool, as_ids: bool
) -> None:
    query = encoded(tiny_server, QUERY, special=True)
    items = [encoded(tiny_server, item, special=False) for item in ITEMS]
    body: dict[str, Any] = {"query": query, "items": items} if as_ids else {"query": QUERY, "items": ITEMS}
    body |= {"label_token_ids": LABELS, "item_first": item_first, "apply_softmax": apply_softmax}
    answer = tiny_server.post(PATH, body).json
    prompts = [[*item, *query] if item_first else [*query, *item] for item in items]
    for i, (prompt, result) in enumerate(zip(prompts, answer["data"], strict=True)):
        labels = probabilities(offline, prompt)
        expected = labels[0] / sum(labels) if apply_softmax else labels[0]
        assert (result["index"], result["object"]) == (i, "score")
        assert math.isclose(result["score"], expected, rel_tol=1e-5)
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"label_token_ids": []}, "label_token_ids"),
        ({"label_token_ids": [256]}, "label_token_ids"),
        ({"label_token_ids": [-1]}, "label_token_ids"),
        ({"label_token_ids": [5] * 129}, "label_token_ids"),
        ({"items": []}, "items"),
        ({"items": ["a", [5]]}, "items"),
        ({"items": "a"}, "items"),
        ({"items": ["a"] * 1025}, "items"),
        ({"items": ["a " * 600]}, "items"),
        ({"items": [[256]]}, "items"),
        ({"query": 5}, "query"),
    ],
)
def test_bad_fields_are_refused_by_name(tiny_server: Served, fields: dict[str, Any], name: str) -> None:
    answer = tiny_server.post(PATH, {"query": "a", "items": ["b"], "label_token_ids": [5], **fields})
    assert (answer.status, answer.json["error"]["param"]) == (400, name), answer.body


@pytest.mark.parametrize("adds", [False, True])
def test_special_tokens_come_with_the_query(tiny_server: Served, monkeypatch: pytest.MonkeyPatch, adds: bool) -> None:
    tokenizer, prompts = tiny_server.llm.front.require_tokenizer(), []
    encode, add_request = tokenizer.encode, tiny_server.llm.add_request

    def with_bos(texts: list[str], *, add_special_tokens: bool, **how: Any) -> list[list[int]]:
        return [[1] * add_special_tokens + ids for ids in encode(texts, add_special_tokens=False, **how)]

    def note(request_id: str, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        prompts.append(prompt["prompt_token_ids"])
        return add_request(request_id, prompt, *args, **kwargs)

    monkeypatch.setattr(tokenizer, "encode", with_bos)
    monkeypatch.setattr(tiny_server.llm, "add_request", note)
    body = {"query": QUERY, "items": ITEMS, "label_token_ids": LABELS, "add_special_tokens": adds}
    assert tiny_server.post(PATH, body).status == 200
    query = encode([QUERY], add_special_tokens=False)[0]
    items = encode(ITEMS, add_special_tokens=False)
    assert prompts == [[1] * adds + query + item for item in items]
