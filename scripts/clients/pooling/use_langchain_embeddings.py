"""Run LangChain's OpenAIEmbeddings against a server, without its count of tokens, which is for OpenAI's models."""

from __future__ import annotations

import asyncio
import sys

from langchain_openai import OpenAIEmbeddings
from sentences import DOCUMENTS, MODEL, QUERY, check_vectors


def main(url: str, key: str) -> None:
    settings = {"base_url": url, "api_key": key, "model": MODEL, "max_retries": 0}
    embeddings = OpenAIEmbeddings(**settings, check_embedding_ctx_length=False)
    check_vectors(embeddings.embed_query(QUERY), embeddings.embed_documents(DOCUMENTS))
    check_vectors(*asyncio.run(both(embeddings)))


async def both(embeddings: OpenAIEmbeddings) -> tuple[list[float], list[list[float]]]:
    """Return the embeddings of the query and of the documents."""
    return await embeddings.aembed_query(QUERY), await embeddings.aembed_documents(DOCUMENTS)


if __name__ == "__main__":
    main(sys.argv[1] + "/v1", sys.argv[2])
