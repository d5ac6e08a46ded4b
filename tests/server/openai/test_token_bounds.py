"""R21: token ids that the model does not have are refused, and those that it has reach no other request's logits."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.server.support import Answer, Served

VOCAB_SIZE = 256
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BAD_IDS = (VOCAB_SIZE, VOCAB_SIZE + 1, 2**31 - 1, 2**31, 2**32, 2**63, 2**64, -1, -(2**31), -(2**63))
FIELDS = ("allowed_token_ids", "stop_token_ids", "logit_bias", "logprob_token_ids")
NEIGHBOUR = {
    "prompt": [40],
    "max_tokens": 12,
    "temperature": 0.7,
    "seed": 3,
    "ignore_eos": True,
    "logprobs": 5,
    "return_token_ids": True,
}


def given(name: str, token_id: int) -> dict[str, Any]:
    value = {str(token_id): 5.0} if name == "logit_bias" else [5, token_id]
    return {name: value}


def ask(server: Served, path: str, fields: dict[str, Any]) -> Answer:
    base: dict[str, Any] = {"max_tokens": 3, "ignore_eos": True}
    prompt = {"messages": [{"role": "user", "content": "a"}]} if path == CHAT else {"prompt": [30]}
    if path == CHAT and "logprob_token_ids" in fields:
        base["logprobs"] = True
    return server.post(path, base | prompt | fields)


@pytest.mark.server
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("name", FIELDS)
def test_r21_ids_past_the_vocabulary_are_refused_by_name(tiny_server: Served, path: str, name: str) -> None:
    for token_id in BAD_IDS:
        answer = ask(tiny_server, path, given(name, token_id))
        assert (answer.status, answer.json["error"]["param"]) == (400, name), (token_id, answer.body)
    for token_id in (0, VOCAB_SIZE - 1):
        assert ask(tiny_server, path, given(name, token_id)).status == 200, token_id


@pytest.mark.server
def test_r21_prompts_have_ids_of_the_vocabulary(tiny_server: Served) -> None:
    for token_id in BAD_IDS:
        for prompt in ([token_id], [[5], [5, token_id]]):
            answer = tiny_server.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 1})
            assert (answer.status, answer.json["error"]["param"]) == (400, "prompt"), (token_id, answer.body)
        answer = tiny_server.post("/detokenize", {"tokens": [5, token_id]})
        assert (answer.status, answer.json["error"]["param"]) == (400, "tokens"), token_id
    assert tiny_server.post(COMPLETIONS, {"prompt": [0, VOCAB_SIZE - 1], "max_tokens": 1}).status == 200


@pytest.mark.server
def test_r21_bad_words_have_bounds(tiny_server: Served) -> None:
    for words in (["a" * 4097], [str(number) for number in range(129)], ["é" * 2000], [""], [" "], ["\ud800"]):
        answer = ask(tiny_server, COMPLETIONS, {"bad_words": words})
        assert answer.status == 400
        assert answer.json["error"]["param"] in ("bad_words", None), answer.body  # a lone surrogate is no JSON
    assert ask(tiny_server, COMPLETIONS, {"bad_words": ["a", "é", "😀"]}).status == 200


@pytest.mark.server
def test_r21_special_tokens_in_a_text_are_those_of_the_vocabulary(tiny_server: Served) -> None:
    text = "<s></s><pad><think></think><tool><call>" * 10
    answer = tiny_server.post(COMPLETIONS, {"prompt": text, "max_tokens": 2, "return_token_ids": True}).json
    assert max(answer["choices"][0]["prompt_token_ids"]) < VOCAB_SIZE


@pytest.mark.server
def test_r21_neighbours_have_the_same_logits_to_the_bit(tiny_server: Served) -> None:
    """While ids at the edge of the vocabulary, and past it, are asked for beside them."""

    def neighbour() -> tuple[list[int], list[float], list[Any]]:
        [choice] = tiny_server.post(COMPLETIONS, NEIGHBOUR).json["choices"]
        return choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"]

    expected = neighbour()
    with ThreadPoolExecutor(8) as pool:
        edges = [
            pool.submit(ask, tiny_server, COMPLETIONS, given(name, token_id))
            for _ in range(3)
            for name in FIELDS
            for token_id in (0, VOCAB_SIZE - 1, VOCAB_SIZE, -1)
        ]
        neighbours = [pool.submit(neighbour) for _ in range(8)]
        assert [each.result() for each in neighbours] == [expected] * 8
        assert {each.result().status for each in edges} == {200, 400}
