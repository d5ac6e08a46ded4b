"""Run the openai package against a server as its users do, synchronous and asynchronous.

After the server and its key, `pictures FILE` sends a picture to a model that sees, and nothing else.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from pathlib import Path

import openai

MODEL = "smollm2"
MESSAGES = [{"role": "user", "content": "Name three colours."}]


def check_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_completion_tokens=24, temperature=0, logprobs=True, top_logprobs=3, n=2
    )
    assert len(answer.choices) == 2
    first = answer.choices[0]
    assert first.message.role == "assistant"
    assert first.message.content
    assert first.logprobs is not None
    assert first.logprobs.content is not None
    assert len(first.logprobs.content[0].top_logprobs) == 3
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert "".join(each.token for each in first.logprobs.content).startswith(first.message.content[:5])


def check_stream(client: openai.OpenAI) -> None:
    request = {"model": MODEL, "messages": MESSAGES, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**request).choices[0].message.content
    stream = client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True})
    pieces, usage = [], None
    for chunk in stream:
        pieces += [each.delta.content or "" for each in chunk.choices]
        usage = chunk.usage or usage
    assert "".join(pieces) == whole
    assert usage is not None
    assert usage.completion_tokens > 0
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, max_tokens=8, temperature=0) as events:
        kinds = {event.type for event in events}
    assert {"chunk", "content.delta", "content.done"} <= kinds


def check_parse(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "people": {"type": "integer"}},
        "required": ["city", "people"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Name a city and how many people live there."}],
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}},
        max_tokens=80,
        temperature=0,
    )
    parsed = json.loads(answer.choices[0].message.content or "")
    assert parsed.keys() == {"city", "people"}


def check_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=["One, two,", "Red, green,"], max_tokens=8, temperature=0, logprobs=2
    )
    assert [each.index for each in answer.choices] == [0, 1]
    assert answer.choices[0].logprobs is not None
    echoed = client.completions.create(model=MODEL, prompt="One, two,", max_tokens=0, echo=True, logprobs=1)
    assert echoed.choices[0].text == "One, two,"
    assert echoed.choices[0].logprobs is not None
    assert echoed.choices[0].logprobs.token_logprobs is not None
    assert echoed.choices[0].logprobs.token_logprobs[0] is None
    pieces = client.completions.create(model=MODEL, prompt="One, two,", max_tokens=8, temperature=0, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == answer.choices[0].text


def check_extra_fields(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=12,
        extra_body={
            "top_k": 5,
            "min_p": 0.05,
            "repetition_penalty": 1.1,
            "structured_outputs": {"choice": ["red", "blue"]},
        },
    )
    assert answer.choices[0].message.content in {"red", "blue"}


def check_responses(client: openai.OpenAI) -> None:
    request = {"model": MODEL, "input": "Name three colours.", "max_output_tokens": 24, "temperature": 0}
    scored = client.responses.create(**request, include=["message.output_text.logprobs"], top_logprobs=2)
    part = scored.output[0].content[0]
    assert part.text == scored.output_text
    assert {len(each.top_logprobs) for each in part.logprobs} == {2}
    assert b"".join(bytes(each.bytes) for each in part.logprobs).decode() == part.text.replace("\ufffd", "")
    stream = client.responses.create(**request, background=True, stream=True)
    events = [next(stream) for _ in range(4)]
    stream.close()
    response_id = events[0].response.id
    events += client.responses.retrieve(response_id, stream=True, starting_after=events[-1].sequence_number)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == part.text
    assert events[-1].response == client.responses.retrieve(response_id)
    follow_up = client.responses.create(**{**request, "input": "And one more."}, previous_response_id=response_id)
    items = list(client.responses.input_items.list(follow_up.id, limit=1, order="asc"))
    assert [item.role for item in items] == ["user", "assistant", "user"]
    assert items[1].content[0].text == part.text


def check_errors(url: str, client: openai.OpenAI) -> None:
    refusal: tuple[int, str | None] | None = None
    try:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=-1)
    except openai.BadRequestError as error:
        refusal = (error.status_code, error.param)
    assert refusal == (400, "temperature")
    for call, kind in (
        (lambda: client.chat.completions.create(model="other", messages=MESSAGES), openai.NotFoundError),
        (openai.OpenAI(base_url=url, api_key="wrong").models.list, openai.AuthenticationError),
        (lambda: client.completions.create(model=MODEL, prompt="a", suffix="b"), openai.BadRequestError),
    ):
        try:
            call()
        except kind:
            pass
        else:
            raise AssertionError(f"no {kind.__name__}")


async def check_async(url: str, key: str) -> None:
    async with openai.AsyncOpenAI(base_url=url, api_key=key) as client:
        assert [each.id async for each in client.models.list()] == [MODEL]

        async def one(index: int) -> str:
            stream = await client.chat.completions.create(
                model=MODEL, messages=MESSAGES, max_tokens=16, seed=index, temperature=1, stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        texts = await asyncio.gather(*(one(index % 4) for index in range(16)))
        assert len(set(texts)) <= 4, "the same seed has given another text among others"
        cut = await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=400, stream=True)
        async for _ in cut:
            break
        await cut.close()


def check_picture(client: openai.OpenAI, file: str) -> None:
    url = "data:image/png;base64," + base64.b64encode(Path(file).read_bytes()).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]
    messages = [{"role": "user", "content": content}]
    request = {"model": "tiny", "max_tokens": 8, "temperature": 0, "extra_body": {"ignore_eos": True}}
    answer = client.chat.completions.create(messages=messages, **request)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    assert answer.usage.prompt_tokens_details is not None
    of_picture = (answer.usage.prompt_tokens_details.model_extra or {})["multimodal_tokens"]
    assert 0 < of_picture < answer.usage.prompt_tokens
    stream = client.chat.completions.create(messages=messages, stream=True, **request)
    assert "".join(each.choices[0].delta.content or "" for each in stream) == answer.choices[0].message.content
    said = [{"role": "user", "content": [{"type": "input_image", "image_url": url, "detail": "auto"}]}]
    response = client.responses.create(model="tiny", input=said, max_output_tokens=8)
    assert response.usage is not None
    assert response.usage.input_tokens > of_picture
    refused = [{"role": "user", "content": [{**content[0], "image_url": "a"}]}]
    parameter: str | None = None
    try:
        client.chat.completions.create(messages=refused, **request)
    except openai.BadRequestError as error:
        parameter = error.param
    assert parameter == "messages"


def main(url: str, key: str, *pictures: str) -> None:
    client = openai.OpenAI(base_url=url, api_key=key, max_retries=0)
    if pictures:
        check_picture(client, pictures[1])
        return
    assert client.models.retrieve(MODEL).id == MODEL
    for check in (check_chat, check_stream, check_parse, check_completions, check_responses, check_extra_fields):
        check(client)
    check_errors(url, client)
    asyncio.run(check_async(url, key))


if __name__ == "__main__":
    main(sys.argv[1] + "/v1", *sys.argv[2:])
