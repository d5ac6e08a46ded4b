"""Run LlamaIndex's embeddings for OpenAI-like servers: one by one, in batches and in an index."""

from __future__ import annotations

import asyncio
import sys

from llama_index.core import Document, VectorStoreIndex
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from sentences import BEST, DOCUMENTS, MODEL, QUERY, check_vectors


def main(url: str, key: str) -> None:
    embedding = OpenAILikeEmbedding(model_name=MODEL, api_base=url, api_key=key, embed_batch_size=3, max_retries=0)
    check_vectors(embedding.get_query_embedding(QUERY), embedding.get_text_embedding_batch(DOCUMENTS))
    check_vectors(embedding.get_text_embedding(QUERY), asyncio.run(embedding.aget_text_embedding_batch(DOCUMENTS)))
    index = VectorStoreIndex.from_documents([Document(text=each) for each in DOCUMENTS], embed_model=embedding)
    [best] = index.as_retriever(similarity_top_k=1).retrieve(QUERY)
    assert best.node.get_content() == DOCUMENTS[BEST]


if __name__ == "__main__":
    main(sys.argv[1] + "/v1", sys.argv[2])
