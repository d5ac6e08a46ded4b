"""Scores and reranking: pairs one to one, one to many and many to many, whichever way the model scores them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.pooling_params import PoolingParams
from tests.server.pooled_support import CROSS, EMBED, LATE, PooledEngine, output_of
from tests.server.support import Answer, Served, served

TEXTS = ["ab", "c", "d e"]


@pytest.fixture(scope="module")
def late(mock: AsyncLLM) -> Iterator[Served]:
    with served(PooledEngine(mock, LATE)) as server:  # type: ignore[arg-type]
        yield server


def scores(answer: Answer) -> list[float]:
    assert answer.status == 200, answer.body
    return [each["score"] for each in answer.json["data"]]


def ids_of(server: Served, text: str) -> list[int]:
    return list(server.llm.front.inputs.encode(text).token_ids)


def cross_score(server: Served, one: str, two: str) -> float:
    return float(output_of(CROSS, PoolingParams(task="classify"), ids_of(server, one) + ids_of(server, two))[0])


@pytest.mark.parametrize(
    ("one", "two", "pairs"),
    [
        ("ab", "c", [("ab", "c")]),
        ("ab", TEXTS, [("ab", text) for text in TEXTS]),
        (["ab"], TEXTS, [("ab", text) for text in TEXTS]),
        (TEXTS, TEXTS[::-1], [*zip(TEXTS, TEXTS[::-1], strict=True)]),
        ({"text": "ab"}, [{"text": "c"}, "ab"], [("ab", "c"), ("ab", "ab")]),
    ],
)
@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2")])
def test_pairs_are_scored_in_order(
    cross_server: Served, one: Any, two: Any, pairs: list[tuple[str, str]], names: tuple[str, str]
) -> None:
    answer = cross_server.post("/score", {"model": "tiny", names[0]: one, names[1]: two})
    assert scores(answer) == [cross_score(cross_server, *pair) for pair in pairs]
    num_tokens = sum(len(ids_of(cross_server, text)) for pair in pairs for text in pair)
    assert answer.json["usage"]["prompt_tokens"] == num_tokens
    assert answer.json["id"].startswith("score-")


def test_embeddings_are_compared_and_each_text_is_run_once(embedding_server: Served, embedder: PooledEngine) -> None:
    embedder.prompts.clear()
    similarities = scores(embedding_server.post("/v1/score", {"text_1": "ab", "text_2": [*TEXTS, "c"]}))
    assert sorted(each["prompt"] for each in embedder.prompts) == sorted(TEXTS)
    vectors = [output_of(EMBED, PoolingParams(task="embed"), ids_of(embedding_server, text)) for text in TEXTS]
    expected = [float(np.dot(vectors[0], each)) for each in vectors]
    assert similarities == pytest.approx([*expected, expected[1]], abs=1e-6)
    assert similarities[0] == pytest.approx(1.0)


def test_tokens_are_compared_with_their_best(late: Served) -> None:
    [score] = scores(late.post("/score", {"text_1": "ab", "text_2": "d e"}))
    one, two = (output_of(LATE, PoolingParams(task="token_embed"), ids_of(late, text)) for text in ("ab", "d e"))
    assert score == pytest.approx(float((one @ two.T).max(axis=1).sum()), rel=1e-6)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_are_in_the_order_of_their_scores(cross_server: Served, path: str) -> None:
    body = {"query": "ab", "documents": ["x", {"text": "y"}, "z", "w"]}
    answer = cross_server.post(path, body)
    assert answer.status == 200, answer.body
    expected = [cross_score(cross_server, "ab", text) for text in "xyzw"]
    order = sorted(range(4), key=lambda i: -expected[i])
    shown = answer.json["results"]
    assert [each["index"] for each in shown] == order
    assert [each["relevance_score"] for each in shown] == [expected[i] for i in order]
    assert [each["document"] for each in shown] == [{"text": "xyzw"[i]} for i in order]
    assert answer.json["usage"]["total_tokens"] > 0
    best = cross_server.post(path, {**body, "top_n": 2, "return_documents": False}).json["results"]
    assert best == [{"index": i, "relevance_score": expected[i]} for i in order[:2]]
    assert len(cross_server.post(path, {**body, "top_n": 0}).json["results"]) == 4
    assert len(cross_server.post(path, {**body, "top_n": 9}).json["results"]) == 4


def test_texts_are_cut_to_their_maximum(cross_server: Served) -> None:
    body = {"text_1": "ab c d", "text_2": "e f g h", "max_tokens_per_query": 2, "max_tokens_per_doc": 1}
    ids = [
        cross_server.post("/tokenize", {"prompt": body[name], "add_special_tokens": False}).json["tokens"]
        for name in ("text_1", "text_2")
    ]
    cut = [
        cross_server.post("/detokenize", {"tokens": each[:most]}).json["prompt"]
        for each, most in zip(ids, (2, 1), strict=True)
    ]
    assert scores(cross_server.post("/score", body)) == scores(
        cross_server.post("/score", {"text_1": cut[0], "text_2": cut[1]})
    )


def test_whether_there_is_an_activation_reaches_the_engine(cross_server: Served) -> None:
    raw = scores(cross_server.post("/score", {"text_1": "ab", "text_2": "c", "use_activation": False}))
    assert scores(cross_server.post("/score", {"text_1": "ab", "text_2": "c"})) == pytest.approx(
        [1 / (1 + np.exp(-each)) for each in raw]
    )


def test_a_template_of_the_server_makes_the_prompt_of_a_pair(mock: AsyncLLM) -> None:
    template = "{{ instruction }}{% for each in messages %}<{{ each.role }}>{{ each.content }}{% endfor %}"
    engine = PooledEngine(mock, CROSS, chat_template=template)
    engine.front.__dict__.pop("chat_renderer", None)
    with served(engine) as server:  # type: ignore[arg-type]
        for more in ({"instruction": "x"}, {"chat_template_kwargs": {"instruction": "x"}}):
            assert scores(server.post("/score", {"text_1": "ab", "text_2": "c", **more}))
            assert engine.prompts[-1].text == "x<query>ab<document>c"
            assert not engine.prompts[-1].is_templated
        long = server.post("/score", {"text_1": "ab" * 2000, "text_2": "c"})  # which is rendered in a thread
        assert (long.status, long.json["error"]["param"]) == (400, "text_2")


def test_a_decoder_reads_on_from_one_text_to_the_other(mock: AsyncLLM) -> None:
    engine = PooledEngine(mock, msgspec.structs.replace(CROSS, runs_whole_tasks=()), chat_template=None)
    with served(engine) as server:  # type: ignore[arg-type]
        assert scores(server.post("/score", {"text_1": "ab", "text_2": "c"}))
    assert engine.prompts == [{"prompt": "abc"}]


@pytest.mark.parametrize(
    ("path", "body", "parameter", "words"),
    [
        ("/score", {}, "text_1", "give two fields that belong together"),
        ("/score", {"text_1": "a"}, "text_1", "give two fields that belong together"),
        ("/score", {"text_1": "a", "documents": "b"}, "text_1", "give two fields that belong together"),
        ("/score", {"text_1": [], "text_2": "b"}, "text_1", "At least one text element must be given"),
        ("/score", {"text_1": "a", "text_2": []}, "text_2", "At least one text_pair element must be given"),
        ("/score", {"text_1": ["a", "b"], "text_2": "c"}, "text_1", "Input lengths must be either 1:1, 1:N or N:N"),
        ("/score", {"text_1": "a", "text_2": ["b"] * 2049}, "text_2", "at most 2048"),
        ("/score", {"text_1": 1, "text_2": "b"}, "text_1", ""),
        ("/score", {"text_1": {"content": []}, "text_2": "b"}, "text_1", "MultiModalParam is not supported"),
        ("/score", {"text_1": "a", "text_2": "b", "max_tokens_per_doc": -1}, "max_tokens_per_doc", ""),
        ("/score", {"text_1": "a", "text_2": "b", "max_tokens_per_query": 512}, "max_tokens_per_query", ""),
        ("/score", {"text_1": "a", "text_2": "b " * 1000}, "text_2", ""),
        ("/score", {"text_1": "a", "text_2": "b", "instruction": "x"}, "instruction", "template"),
        ("/rerank", {"query": "a"}, None, "documents"),
        ("/rerank", {"query": "a", "documents": []}, "documents", "At least one text_pair element must be given"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", ""),
        ("/rerank", {"query": "a", "documents": [{"title": "b"}]}, "documents", ""),
        ("/rerank", {"query": "a", "documents": ["b"], "rank_fields": ["title"]}, "rank_fields", ""),
        ("/rerank", {"query": "a", "documents": ["b"] * 2049}, "documents", "at most 2048"),
    ],
)
def test_r13_bad_requests_name_the_field(
    embedding_server: Served, path: str, body: dict[str, Any], parameter: str | None, words: str
) -> None:
    answer = embedding_server.post(path, body)
    assert (answer.status, answer.json["error"]["param"]) == (400, parameter), answer.body
    assert words in answer.json["error"]["message"]
