"""Run Ollama's own package against a server of embeddings, by both of its routes."""

from __future__ import annotations

import sys

import ollama
from sentences import BEST, DOCUMENTS, MODEL, QUERY, check_vectors


def main(url: str, key: str) -> None:
    client = ollama.Client(host=url, headers={"Authorization": f"Bearer {key}"})
    query = client.embed(MODEL, QUERY)
    documents = client.embed(MODEL, DOCUMENTS)
    check_vectors(list(query.embeddings[0]), [list(each) for each in documents.embeddings])
    assert query.prompt_eval_count
    assert len(client.embed(MODEL, QUERY, dimensions=64).embeddings[0]) == 64
    older = client.embeddings(MODEL, DOCUMENTS[BEST]).embedding
    assert len(older) == len(query.embeddings[0])
    try:
        client.embed("other", QUERY)
    except ollama.ResponseError as error:
        status = error.status_code
    else:
        status = 200
    assert status == 404


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
