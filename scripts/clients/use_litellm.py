"""Run LiteLLM against a server, as its hosted_vllm provider."""

from __future__ import annotations

import asyncio
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise it would fetch prices

import litellm

MESSAGES = [{"role": "user", "content": "Name a colour."}]


def main(url: str, key: str) -> None:
    request = {"model": "hosted_vllm/smollm2", "api_base": url, "api_key": key, "messages": MESSAGES}
    answer = litellm.completion(**request, max_tokens=16, temperature=0)
    text = answer.choices[0].message.content
    assert text
    assert answer.usage.completion_tokens > 0
    stream = litellm.completion(**request, max_tokens=16, temperature=0, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text
    assert asyncio.run(litellm.acompletion(**request, max_tokens=16, temperature=0)).choices[0].message.content == text
    completed = litellm.text_completion(
        model="hosted_vllm/smollm2", api_base=url, api_key=key, prompt="One, two,", max_tokens=8, temperature=0
    )
    assert completed.choices[0].text
    message = ""
    try:
        litellm.completion(**request, temperature=-1)
    except litellm.BadRequestError as error:
        message = str(error)
    assert "temperature" in message


if __name__ == "__main__":
    main(sys.argv[1] + "/v1", sys.argv[2])
