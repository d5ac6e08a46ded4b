"""Run the openai package's embeddings against a server, synchronous and asynchronous."""

from __future__ import annotations

import asyncio
import sys

import openai
from sentences import DOCUMENTS, MODEL, QUERY, check_vectors, cosine


def main(url: str, key: str) -> None:
    client = openai.OpenAI(base_url=url, api_key=key, max_retries=0)
    answer = client.embeddings.create(model=MODEL, input=[QUERY, *DOCUMENTS])  # in base64, which the client decodes
    query, *documents = [each.embedding for each in answer.data]
    check_vectors(query, documents)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens > 0
    floats = client.embeddings.create(model=MODEL, input=QUERY, encoding_format="float").data[0].embedding
    assert cosine(query, floats) > 1 - 1e-6
    ids = client.post("/../tokenize", body={"prompt": QUERY}, cast_to=dict)["tokens"]
    by_ids = client.embeddings.create(model=MODEL, input=[ids, ids[:3]]).data
    assert cosine(query, by_ids[0].embedding) > 1 - 1e-6
    cut = client.embeddings.create(model=MODEL, input="a " * 2000, extra_body={"truncate_prompt_tokens": 16})
    assert cut.usage.prompt_tokens == 16
    for call, kind in (
        (lambda: client.embeddings.create(model=MODEL, input=[]), openai.BadRequestError),
        (lambda: client.embeddings.create(model=MODEL, input="a " * 2000), openai.BadRequestError),
        (lambda: client.embeddings.create(model="other", input="a"), openai.NotFoundError),
        (lambda: client.completions.create(model=MODEL, prompt="a"), openai.BadRequestError),
    ):
        try:
            call()
        except kind:
            pass
        else:
            raise AssertionError(f"no {kind.__name__}")
    asyncio.run(many(url, key, query))


async def many(url: str, key: str, expected: list[float]) -> None:
    """Ask many times at once."""
    async with openai.AsyncOpenAI(base_url=url, api_key=key) as client:
        calls = (client.embeddings.create(model=MODEL, input=[QUERY, *DOCUMENTS]) for _ in range(32))
        answers = await asyncio.gather(*calls)
    assert all(cosine(each.data[0].embedding, expected) > 1 - 1e-5 for each in answers)


if __name__ == "__main__":
    main(sys.argv[1] + "/v1", sys.argv[2])
