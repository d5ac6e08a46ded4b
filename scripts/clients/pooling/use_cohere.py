"""Run Cohere's package against a server, with both versions of its API: embeddings and reranking."""

from __future__ import annotations

import asyncio
import sys

import cohere
from sentences import BEST, DOCUMENTS, MODEL, QUERY, check_vectors


def check_rerank(results: list, *, texts: bool = True) -> None:
    """Check that the right document is the first of two."""
    assert len(results) == 2
    assert results[0].index == BEST
    assert results[0].relevance_score > results[1].relevance_score
    if texts:
        assert results[0].document.text == DOCUMENTS[BEST]


def main(url: str, key: str) -> None:
    client = cohere.ClientV2(api_key=key, base_url=url)
    query = client.embed(model=MODEL, texts=[QUERY], input_type="search_query", embedding_types=["float"])
    documents = client.embed(model=MODEL, texts=DOCUMENTS, input_type="search_document", embedding_types=["float"])
    assert query.embeddings.float_ is not None
    assert documents.embeddings.float_ is not None
    check_vectors(query.embeddings.float_[0], documents.embeddings.float_)
    assert query.meta is not None
    assert query.meta.billed_units is not None
    assert query.meta.billed_units.input_tokens
    bits = client.embed(model=MODEL, texts=[QUERY], input_type="clustering", embedding_types=["ubinary", "base64"])
    assert bits.embeddings.ubinary is not None
    assert len(bits.embeddings.ubinary[0]) == len(query.embeddings.float_[0]) // 8
    check_rerank(client.rerank(model=MODEL, query=QUERY, documents=DOCUMENTS, top_n=2).results, texts=False)
    older = cohere.Client(api_key=key, base_url=url)
    check_rerank(older.rerank(model=MODEL, query=QUERY, documents=DOCUMENTS, top_n=2, return_documents=True).results)
    asyncio.run(rerank(url, key))
    try:
        client.rerank(model="other", query=QUERY, documents=DOCUMENTS)
    except cohere.NotFoundError:
        pass
    else:
        raise AssertionError("no NotFoundError")


async def rerank(url: str, key: str) -> None:
    """Rerank many times at once."""
    client = cohere.AsyncClientV2(api_key=key, base_url=url)
    calls = (client.rerank(model=MODEL, query=QUERY, documents=DOCUMENTS, top_n=2) for _ in range(8))
    for answer in await asyncio.gather(*calls):
        check_rerank(answer.results, texts=False)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
