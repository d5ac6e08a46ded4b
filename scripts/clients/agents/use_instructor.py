"""Run instructor against a server: typed answers by tools, by JSON schema, and by Anthropic's tools."""

from __future__ import annotations

import sys
from typing import Any

import anthropic
import instructor
import openai
from pydantic import BaseModel, Field


class Place(BaseModel):
    """A town."""

    name: str = Field(max_length=30)
    inhabitants: int = Field(ge=0, le=10**8)


def main() -> None:
    url, key, mode = sys.argv[1:]
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=300)
    arguments: dict[str, Any] = {
        "model": "model",
        "messages": [{"role": "user", "content": "Name a town."}],
        "response_model": Place,
        "max_retries": 0,
        "max_tokens": 400,
    }
    makers = [
        instructor.from_openai(client, mode=each) for each in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA)
    ]
    if mode == "replayed":
        makers = makers[:1]  # the replayed answer is a call
    makers.append(instructor.from_anthropic(anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)))
    for maker in makers:
        town = maker.chat.completions.create(**arguments)
        assert isinstance(town, Place), town
        assert mode != "replayed" or town.model_dump() == {"name": "Ulm", "inhabitants": 126000}, town


if __name__ == "__main__":
    main()
