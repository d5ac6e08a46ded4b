"""Run the openai package against a server with LoRA adapters: each named model must answer as HF's merged one."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import openai

BASE, ADAPTERS = "tiny", Path("tests/data/adapters/llama3_tied").resolve()
FROM_THE_START = ("all", "mlp")
LATER = "attention"


def options(expected: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a request for as many tokens as the golden has."""
    request = {"model": name, "prompt": expected["prompt"], "max_tokens": len(expected["tokens"]["all"])}
    return request | {"temperature": 0, "extra_body": {"ignore_eos": True, "return_token_ids": True}}


def ids(answer: Any) -> list[int]:
    return answer.choices[0].model_extra["token_ids"]


def check_models(client: openai.OpenAI) -> None:
    cards = {card.id: card for card in client.models.list()}
    assert cards.keys() == {BASE, *FROM_THE_START}, cards
    assert cards["all"].model_extra["parent"] == BASE
    assert client.models.retrieve("mlp").id == "mlp"


def check_answers(client: openai.OpenAI, expected: dict[str, Any]) -> None:
    for name in FROM_THE_START:
        assert ids(client.completions.create(**options(expected, name))) == expected["tokens"][name], name
    base = ids(client.completions.create(**options(expected, BASE)))
    assert base not in list(expected["tokens"].values())
    streamed: list[int] = []
    for chunk in client.completions.create(**options(expected, "all"), stream=True):
        streamed += chunk.choices[0].model_extra.get("token_ids") or []
    assert streamed == expected["tokens"]["all"]


async def check_together(url: str, key: str, expected: dict[str, Any]) -> None:
    """Ask for both adapters and the model alone at once."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key) as client:
        names = [*FROM_THE_START, BASE] * 8
        answers = await asyncio.gather(*(client.completions.create(**options(expected, name)) for name in names))
    for name, answer in zip(names, answers, strict=True):
        assert answer.model == name
        assert name == BASE or ids(answer) == expected["tokens"][name], name


def check_while_it_runs(client: openai.OpenAI, expected: dict[str, Any]) -> None:
    """Load an adapter, use it, and unload it."""
    error = None
    try:
        client.completions.create(**options(expected, LATER))
    except openai.NotFoundError as refusal:
        error = refusal
    assert LATER in str(error), "a name that nobody has loaded is answered"
    body = {"lora_name": LATER, "lora_path": str(ADAPTERS / LATER)}
    client.post("/load_lora_adapter", cast_to=str, body=body)
    assert ids(client.completions.create(**options(expected, LATER))) == expected["tokens"][LATER]
    client.post("/unload_lora_adapter", cast_to=str, body={"lora_name": LATER})
    assert LATER not in {card.id for card in client.models.list()}


def main(url: str, key: str, goldens: str) -> None:
    expected = json.loads(Path(goldens).read_text())
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key) as client:
        check_models(client)
        check_answers(client, expected)
        asyncio.run(check_together(url, key, expected))
        check_while_it_runs(client, expected)
    print(
        f"openai {openai.__version__}: adapters by name, streamed, together, loaded and unloaded: all as they should be"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
