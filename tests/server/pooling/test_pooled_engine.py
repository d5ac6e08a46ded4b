"""Routes of models that pool, in front of tiny models: their values are those of `LLM`, to the bit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import pytest

from jaxllm import LLM
from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.pooling_params import LateChunkingParams, PoolingParams
from jaxllm.resolve.async_engine_args import AsyncEngineArgs
from tests.models.tiny import folder
from tests.server.support import Served, served

TEXTS = ["ab c", "the time", "x", "a b c d e f g"]


@contextmanager
def engines(case: str, tokenizer: str) -> Iterator[tuple[LLM, Served]]:
    """Return a case's model in this thread, and a server of it."""
    args = AsyncEngineArgs(
        model=str(folder(case)),
        tokenizer=tokenizer,
        dtype="float32",
        max_num_batched_tokens=64,
        max_num_seqs=8,
        cudagraph_capture_sizes=[64],
        enforce_eager=True,
        batch_invariant=True,
        disable_log_stats=True,
        use_tqdm_on_load=False,
    )
    with (
        LLM.from_engine_args(args) as llm,
        AsyncLLM.from_engine_args(args, disable_frontend_multiprocessing=True) as async_llm,
        served(async_llm) as server,
    ):
        yield llm, server


def data(server: Served, path: str, **fields: Any) -> list[Any]:
    answer = server.post(path, {"model": "tiny", **fields})
    assert answer.status == 200, answer.body
    return answer.json["data"]


def check_late_chunks(llm: LLM, server: Served) -> None:
    """Compare embeddings of chunks with the means of the tokens' outputs."""
    late = LateChunkingParams(chunk_size=3)
    outputs = llm.encode(TEXTS, PoolingParams(late_chunking_params=late), pooling_task="token_embed", use_tqdm=False)
    raw = llm.encode(TEXTS, PoolingParams(use_activation=False), pooling_task="token_embed", use_tqdm=False)
    for text, output, tokens in zip(TEXTS, outputs, raw, strict=True):
        rows_td, chunks = tokens.outputs.data, output.late_chunking
        assert chunks is not None
        means = np.stack([rows_td[i : i + 3].mean(0) for i in range(0, len(rows_td), 3)])
        lengths = np.linalg.norm(means, axis=1, keepdims=True)
        np.testing.assert_allclose(output.outputs.data, means / lengths, rtol=0, atol=1e-6)
        last = [each.char_range for each in chunks.chunks if each.char_range is not None][-1]
        assert last[1] == len(text)
    body = {"late_chunking_params": {"chunk_size": 3}}
    shown = data(server, "/v1/embeddings", input=TEXTS, **body)
    assert [each["embedding"] for each in shown] == [each.outputs.data.tolist() for each in outputs]
    assert [each["late_chunking"] for each in shown] == [
        json.loads(msgspec.json.encode(each.late_chunking)) for each in outputs
    ]
    for fields in ({"input": [5, 6]}, {"input": "x" * 9, "truncate_prompt_tokens": 5}):
        answer = server.post("/v1/embeddings", body | fields)
        assert (answer.status, answer.json["error"]["param"]) == (400, "late_chunking_params"), answer.body


def test_embeddings_are_those_of_the_program(tokenizer: str) -> None:
    with engines("bert", tokenizer) as (llm, server):
        expected = [each.outputs.embedding for each in llm.embed(TEXTS, use_tqdm=False)]
        assert [each["embedding"] for each in data(server, "/v1/embeddings", input=TEXTS)] == expected
        assert np.linalg.norm(expected[0]) == pytest.approx(1, abs=1e-6)
        tokens = llm.encode(TEXTS, pooling_task="token_embed", use_tqdm=False)
        shown = data(server, "/pooling", input=TEXTS, task="token_embed")
        assert [each["data"] for each in shown] == [each.outputs.data.tolist() for each in tokens]
        scores = [each.outputs.score for each in llm.score(TEXTS[0], TEXTS, use_tqdm=False)]
        assert [each["score"] for each in data(server, "/score", text_1=TEXTS[0], text_2=TEXTS)] == scores
        assert scores[0] == pytest.approx(1)
        assert server.llm.model_config.max_model_len == 64
        cases: list[tuple[dict[str, Any], str]] = [
            ({"input": ["x", ""]}, "input"),
            ({"input": "x" * 100}, "input"),
            ({"input": "x", "dimensions": 8}, "dimensions"),
            ({"input": [[256]]}, "input"),
        ]
        for fields, parameter in cases:
            answer = server.post("/v1/embeddings", fields)
            assert (answer.status, answer.json["error"]["param"]) == (400, parameter), answer.body
        check_late_chunks(llm, server)
        cut = server.post("/v1/embeddings", {"input": "x" * 100, "truncate_prompt_tokens": -1})
        assert cut.json["usage"]["prompt_tokens"] == 64


def test_classes_are_those_of_the_program(tokenizer: str) -> None:
    with engines("xlm_roberta_classifier", tokenizer) as (llm, server):
        expected = [each.outputs.probs for each in llm.classify(TEXTS, use_tqdm=False)]
        shown = data(server, "/classify", input=TEXTS)
        assert [each["probs"] for each in shown] == expected
        assert [each["label"] for each in shown] == [f"LABEL_{int(np.argmax(each))}" for each in expected]
        refused = server.post("/score", {"text_1": "a", "text_2": "b"}).json["error"]["message"]
        assert refused == "The model does not support Score API"


def test_pairs_have_the_scores_of_the_program(tokenizer: str) -> None:
    with engines("bert_pairs", tokenizer) as (llm, server):
        expected = [each.outputs.score for each in llm.score(TEXTS[0], TEXTS[1:], use_tqdm=False)]
        shown = data(server, "/score", text_1=TEXTS[0], text_2=TEXTS[1:])
        assert [each["score"] for each in shown] == expected
        assert len({*expected}) == 3
        ranked = server.post("/rerank", {"query": TEXTS[0], "documents": TEXTS[1:]}).json
        assert [each["relevance_score"] for each in ranked["results"]] == sorted(expected, reverse=True)
        assert ranked["usage"]["prompt_tokens"] > 0
        salted = server.post("/score", {"text_1": TEXTS[0], "text_2": TEXTS[1], "cache_salt": "s"})
        assert salted.json["data"][0]["score"] == expected[0]
