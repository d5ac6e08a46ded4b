"""Embeddings: of each form of input, in each form of answer, OpenAI's and Cohere's."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from jaxllm.engine.online.admission import Admission
from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.pooling_params import PoolingParams
from jaxllm.server.pooling.vectors import packed
from tests.server.pooled_support import EMBED, SIZE, PooledEngine, output_of
from tests.server.support import Answer, Served, served

PATH = "/v1/embeddings"
MESSAGES = [{"role": "user", "content": "ab"}]


def embed(server: Served, **fields: Any) -> Answer:
    return server.post(PATH, {"model": "tiny", **fields})


def vectors(answer: Answer) -> list[list[float]]:
    assert answer.status == 200, answer.body
    assert [each["index"] for each in answer.json["data"]] == list(range(len(answer.json["data"])))
    return [each["embedding"] for each in answer.json["data"]]


def expected(embedder: PooledEngine, *prompts: str | list[int], **params: Any) -> list[list[float]]:
    """Return the embeddings that the engine has for prompts."""
    ids = [embedder.front.inputs.encode(each).token_ids for each in prompts]
    return [output_of(EMBED, PoolingParams(task="embed", **params), each).tolist() for each in ids]


@pytest.mark.parametrize(
    ("inputs", "prompts"),
    [
        ("ab c", ["ab c"]),
        (["ab c", "d"], ["ab c", "d"]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6, 7], [8]], [[5, 6, 7], [8]]),
        (["a", [5]], ["a", [5]]),
    ],
)
def test_each_form_of_input_has_its_embeddings(
    embedding_server: Served, embedder: PooledEngine, inputs: Any, prompts: list[Any]
) -> None:
    answer = embed(embedding_server, input=inputs)
    assert vectors(answer) == expected(embedder, *prompts)
    num_tokens = sum(len(embedder.front.inputs.encode(each).token_ids) for each in prompts)
    assert (answer.json["usage"]["prompt_tokens"], answer.json["usage"]["total_tokens"]) == (num_tokens, num_tokens)
    assert (answer.json["object"], answer.json["model"]) == ("list", "tiny")
    assert answer.json["id"].startswith("embd-")


@pytest.mark.parametrize(
    "fields",
    [{"messages": MESSAGES}, {"input": MESSAGES}, {"messages": [MESSAGES] * 2}, {"input": [MESSAGES] * 2}],
)
def test_conversations_are_rendered(embedding_server: Served, embedder: PooledEngine, fields: dict[str, Any]) -> None:
    ids = embedding_server.post("/tokenize", {"messages": MESSAGES, "add_generation_prompt": False}).json["tokens"]
    embeddings = vectors(embed(embedding_server, **fields))
    assert embeddings == expected(embedder, ids) * len(embeddings)
    longer = vectors(embed(embedding_server, **fields, add_generation_prompt=True))
    assert longer[0] != embeddings[0]


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({}, "<f4"),
        ({"endianness": "big"}, ">f4"),
        ({"endianness": "little", "embed_dtype": "float16"}, "<f2"),
    ],
)
def test_base64_has_the_bytes(
    embedding_server: Served, embedder: PooledEngine, fields: dict[str, Any], kind: str
) -> None:
    shown: Any = vectors(embed(embedding_server, input="ab", encoding_format="base64", **fields))[0]
    [values] = expected(embedder, "ab")
    assert base64.b64decode(shown) == np.asarray(values, np.float32).astype(kind).tobytes()


NUMBERS = np.array([1.0, -0.1, 0.3333, 500.0, -1e9, 1e-3, 0.0], np.float32)
TORCH_BYTES = {
    "float16": "003c66ae5535d05f00fc19140000",
    "bfloat16": "803fcdbdab3efa436ece833a0000",
    "fp8_e4m3": "389d2b7efe0100",
    "fp8_e5m2": "3cae3560fc1400",
}
"""The bytes that PyTorch makes of the numbers."""


@pytest.mark.parametrize("dtype", TORCH_BYTES)
def test_bytes_are_those_of_torch(dtype: str) -> None:
    expected = bytes.fromhex(TORCH_BYTES[dtype])
    assert packed(NUMBERS, dtype, "little") == packed(NUMBERS, dtype, "native") == expected
    size = len(expected) // NUMBERS.size
    assert packed(NUMBERS, dtype, "big") == np.frombuffer(expected, f"<u{size}").byteswap().tobytes()


@pytest.mark.parametrize(("path", "kind"), [(PATH, "embd"), ("/pooling", "pooling")])
def test_answers_that_are_bytes(embedding_server: Served, embedder: PooledEngine, path: str, kind: str) -> None:
    body = {"input": ["ab", "c"], "encoding_format": "bytes", "embed_dtype": "bfloat16", "endianness": "big"}
    answer = embedding_server.post(path, body | {"request_id": "mine"})
    assert (answer.status, answer.headers["content-type"]) == (200, "application/octet-stream")
    told = json.loads(answer.headers["metadata"])
    count = told["usage"]["prompt_tokens"]
    assert (told["id"], told["model"], told["usage"]["total_tokens"]) == (f"{kind}-mine", "tiny", count)
    shared = {"embed_dtype": "bfloat16", "endianness": "big", "shape": [SIZE]}
    assert told["data"] == [{"index": i, "start": 32 * i, "end": 32 * (i + 1), **shared} for i in range(2)]
    arrays = [np.asarray(expected(embedder, text)[0], np.float32) for text in ("ab", "c")]
    assert answer.body == b"".join(packed(each, "bfloat16", "big") for each in arrays)
    only = embedding_server.post(path, body | {"encoding_format": "bytes_only"})
    assert only.body == answer.body
    assert "metadata" not in only.headers


def test_what_a_request_says_of_its_vectors_reaches_the_engine(
    embedding_server: Served, embedder: PooledEngine
) -> None:
    params: dict[str, Any] = {"dimensions": 4, "use_activation": False}
    assert vectors(embed(embedding_server, input="ab", **params)) == expected(embedder, "ab", **params)
    cut = vectors(embed(embedding_server, input="ab c d e", truncate_prompt_tokens=2, add_special_tokens=False))
    ids = embedding_server.post("/tokenize", {"prompt": "ab c d e", "add_special_tokens": False}).json["tokens"]
    assert cut == expected(embedder, ids[:2])
    left = {"truncate_prompt_tokens": 2, "add_special_tokens": False, "truncation_side": "left"}
    assert vectors(embed(embedding_server, input="ab c d e", **left)) == expected(embedder, ids[-2:])
    assert embed(embedding_server, input="ab", cache_salt="s").status == 200
    assert embedder.prompts[-1]["cache_salt"] == "s"


def test_ids_of_requests_are_echoed(embedding_server: Served) -> None:
    assert embed(embedding_server, input="a", request_id="mine").json["id"] == "embd-mine"
    named = embedding_server.post(PATH, {"input": "a"}, headers={"x-request-id": "header"})
    assert named.json["id"] == "embd-header"


def test_as_many_inputs_as_openai_takes(embedding_server: Served) -> None:
    assert len(vectors(embed(embedding_server, input=["a"] * 2048))) == 2048
    answer = embed(embedding_server, input=["a"] * 2049)
    assert (answer.status, answer.json["error"]["param"]) == (400, "input")


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({}, "input"),
        ({"input": "a", "messages": MESSAGES}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [1, "a"]}, "input"),
        ({"input": [[1, {"role": "user"}]]}, "input"),
        ({"input": [256]}, "input"),
        ({"input": {"a": 1}}, "input"),
        ({"input": "a b " * 2000}, "input"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "a"}]}, "messages"),
        ({"messages": MESSAGES, "chat_template": "x"}, "chat_template"),
        ({"input": "a", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ({"input": "a", "encoding_format": "numbers"}, "encoding_format"),
        ({"input": "a", "encoding_format": "bytes", "embed_dtype": "float8"}, "embed_dtype"),
        ({"input": "a", "embed_dtype": "float16"}, "embed_dtype"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "priority": 1}, "priority"),
        ({"input": "a", "truncate_prompt_tokens": 10**6}, "truncate_prompt_tokens"),
        ({"input": "a", "normalize": True}, "normalize"),
        ({"input": "a", "padding": "max_length"}, "padding"),
    ],
)
def test_r13_bad_requests_name_the_field(embedding_server: Served, fields: dict[str, Any], parameter: str) -> None:
    answer = embed(embedding_server, **fields)
    assert (answer.status, answer.json["error"]["param"]) == (400, parameter), answer.body


def test_another_model_is_not_here(embedding_server: Served) -> None:
    assert embed(embedding_server, model="other", input="a").status == 404


def test_one_bad_input_ends_the_others(embedding_server: Served, embedder: PooledEngine) -> None:
    embedder.is_held = True
    try:
        assert embed(embedding_server, input=["a", "b", "", "c"]).status == 400
        assert not embedder.running
        assert {each.rpartition("-")[2] for each in embedder.aborted[-2:]} == {"0", "1"}
    finally:
        embedder.is_held = False


@pytest.fixture(scope="module")
def bounded(mock: AsyncLLM) -> Iterator[tuple[Served, PooledEngine]]:
    engine = PooledEngine(mock, EMBED, Admission(4, None))
    with served(engine) as server:  # type: ignore[arg-type]
        yield server, engine


def test_each_input_counts_as_a_request(bounded: tuple[Served, PooledEngine]) -> None:
    server, engine = bounded
    engine.is_held = True
    engine.admission.reserve_reqs(1)
    try:
        answer = embed(server, input=["a"] * 4)
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert not engine.running
    finally:
        engine.is_held = False
        engine.admission.num_reqs -= 1
    assert engine.admission.num_reqs == 0
    assert embed(server, input=["a"] * 4).status == 200


def cohere(server: Served, **fields: Any) -> Answer:
    return server.post("/v2/embed", {"model": "tiny", **fields})


def test_cohere_has_every_type_at_once(embedding_server: Served, embedder: PooledEngine) -> None:
    kinds = ["float", "base64", "binary", "ubinary"]
    answer = cohere(embedding_server, texts=["ab", "c"], embedding_types=kinds)
    assert answer.status == 200, answer.body
    values = expected(embedder, "ab", "c")
    shown = answer.json["embeddings"]
    assert shown.keys() == set(kinds)
    assert shown["float"] == values
    assert base64.b64decode(shown["base64"][1]) == np.asarray(values[1], "<f4").tobytes()
    bits = [[each >= 0 for each in vector] for vector in values]
    octets = [[sum(bit << (7 - i) for i, bit in enumerate(row[at : at + 8])) for at in (0, 8)] for row in bits]
    assert SIZE == 16
    assert shown["ubinary"] == octets
    assert shown["binary"] == [[each - 128 for each in row] for row in octets]
    assert answer.json["texts"] == ["ab", "c"]
    num_tokens = sum(len(embedder.front.inputs.encode(each).token_ids) for each in ("ab", "c"))
    assert answer.json["meta"]["billed_units"] == {"input_tokens": num_tokens}
    assert answer.json["response_type"] == "embeddings_by_type"


@pytest.mark.parametrize(
    ("input_type", "before"), [("search_query", "q: "), ("search_document", ""), ("summary", "s: "), (None, "")]
)
def test_cohere_input_types_are_the_models_prompts(
    embedding_server: Served, embedder: PooledEngine, input_type: str | None, before: str
) -> None:
    answer = cohere(embedding_server, texts=["ab"], input_type=input_type)
    assert answer.json["embeddings"] == {"float": expected(embedder, f"{before}ab")}


def test_cohere_cuts_texts_unless_told_not_to(embedding_server: Served, embedder: PooledEngine) -> None:
    ids = embedding_server.post("/tokenize", {"prompt": "ab c d e"}).json["tokens"]
    end = cohere(embedding_server, texts=["ab c d e"], max_tokens=3, add_special_tokens=False)
    assert end.json["meta"]["billed_units"] == {"input_tokens": 3}
    start = cohere(embedding_server, texts=["ab c d e"], max_tokens=3, truncate="START", add_special_tokens=False)
    assert start.json["embeddings"]["float"] == expected(embedder, ids[-3:])
    assert cohere(embedding_server, texts=["a b " * 1500]).status == 200
    refused = cohere(embedding_server, texts=["ab c d e"], max_tokens=3, truncate="NONE")
    assert (refused.status, refused.json["error"]["param"]) == (400, "max_tokens")


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({}, None),
        ({"texts": []}, "texts"),
        ({"texts": [""]}, "texts"),
        ({"texts": ["a"] * 2049}, "texts"),
        ({"texts": ["a"], "images": ["data:"]}, "images"),
        ({"texts": ["a"], "input_type": "poem"}, "input_type"),
        ({"texts": ["a"], "embedding_types": ["int8"]}, "embedding_types"),
        ({"texts": ["a"], "embedding_types": ["binary"], "output_dimension": 4}, "embedding_types"),
        ({"texts": ["a"], "output_dimension": 0}, "output_dimension"),
        ({"texts": ["a"], "max_tokens": 10**6}, "max_tokens"),
        ({"texts": ["a"], "truncate": "MIDDLE"}, "truncate"),
        ({"texts": ["a"], "truncation_side": "left"}, "truncation_side"),
    ],
)
def test_r13_bad_requests_in_coheres_form_name_the_field(
    embedding_server: Served, fields: dict[str, Any], parameter: str | None
) -> None:
    answer = cohere(embedding_server, **fields)
    assert (answer.status, answer.json["error"]["param"]) == (400, parameter), answer.body
