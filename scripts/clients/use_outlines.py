"""Run outlines' clients of vLLM and OpenAI against a server: schemas, patterns, choices, grammars, streams."""

from __future__ import annotations

import asyncio
import re
import sys
from typing import Literal

import openai
import outlines
from outlines.exceptions import BadRequestError
from outlines.types import CFG, Regex
from pydantic import BaseModel, Field

MODEL = "smollm2"


class Place(BaseModel):
    """A town."""

    name: str = Field(max_length=30)
    inhabitants: int = Field(ge=0, le=10**8)


def check_vllm(client: openai.OpenAI) -> None:
    """Check outlines' client of vLLM, which sends `structured_outputs`."""
    model = outlines.from_vllm(client, MODEL)
    assert model("Say hello.", max_tokens=8, temperature=0)
    town = Place.model_validate_json(model("Name a town.", Place, max_tokens=200, temperature=1.0))
    assert 0 <= town.inhabitants <= 10**8
    for seed in range(4):
        settings = {"max_tokens": 40, "temperature": 1.5, "seed": seed}
        assert model("Cats or dogs?", Literal["cats", "dogs"], **settings) in {"cats", "dogs"}
        date = model("When was it?", Regex(r"\d{4}-\d{2}-\d{2}"), **settings)
        assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", date), date
        assert str(int(model("How many?", int, **settings)))
    grammar = CFG('start: NUMBER ("+" NUMBER)~1..3\nNUMBER: /[0-9]{1,3}/')
    total = model("Write a sum.", grammar, max_tokens=40, temperature=1.0)
    assert re.fullmatch(r"\d{1,3}(\+\d{1,3}){1,3}", total), total
    pieces = list(model.stream("Cats or dogs?", Literal["cats", "dogs"], max_tokens=8, temperature=0))
    assert "".join(pieces) in {"cats", "dogs"}, pieces
    several = model("Cats or dogs?", Literal["cats", "dogs"], max_tokens=8, n=3)
    assert len(several) == 3
    assert set(several) <= {"cats", "dogs"}


def check_openai(client: openai.OpenAI) -> None:
    """Check outlines' client of OpenAI, which sends a `response_format`."""
    model = outlines.from_openai(client, MODEL)
    Place.model_validate_json(model("Name a town.", Place, max_tokens=200, temperature=1.0))
    pieces = list(model.stream("Name a town.", Place, max_tokens=200, temperature=1.0))
    assert len(pieces) > 3, pieces
    Place.model_validate_json("".join(pieces))


def check_errors(client: openai.OpenAI) -> None:
    """Check that an invalid grammar is an error that names it, and that the next request succeeds."""
    model = outlines.from_vllm(client, MODEL)
    told = ""
    try:
        model("Say something.", CFG("start: undefined_rule"), max_tokens=8)
    except BadRequestError as error:
        told = str(error)
    assert "undefined_rule" in told, told
    assert model("Say hello.", max_tokens=4)


async def check_async(url: str, key: str) -> None:
    async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
        model = outlines.from_vllm(client, MODEL)
        settings = {"max_tokens": 8, "temperature": 1.0}
        answers = await asyncio.gather(*(model("Cats or dogs?", Literal["cats", "dogs"], **settings) for _ in range(8)))
    assert set(answers) <= {"cats", "dogs"}, answers


def main(url: str, key: str) -> None:
    client = openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=300)
    check_vllm(client)
    check_openai(client)
    check_errors(client)
    asyncio.run(check_async(url, key))


if __name__ == "__main__":
    main(sys.argv[1] + "/v1", sys.argv[2])
