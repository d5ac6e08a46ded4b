"""Run Ollama's own package against a server: chats, streams, tools and formats."""

from __future__ import annotations

import json
import sys

import ollama
from weather import ANSWER, QUESTION, check_called, get_weather


def main() -> None:
    url, key, mode = sys.argv[1:]
    client = ollama.Client(host=url, headers={"Authorization": f"Bearer {key}"})
    [model] = client.list().models
    assert model.model is not None
    assert client.show(model.model).capabilities
    options = {"num_predict": 100, "temperature": 0}
    hello = [{"role": "user", "content": "Hello."}]
    whole = client.chat(model.model, hello, options=options).message.content
    assert whole == "".join(
        part.message.content or "" for part in client.chat(model.model, hello, options=options, stream=True)
    )
    assert client.generate(model.model, "Hello.", options=options).response == whole
    *parts, last = client.chat(model.model, hello, options=options, stream=True)
    assert (last.done, last.message.content, last.message.tool_calls) == (True, "", None), last
    assert last.done_reason in ("stop", "length"), last
    assert all((last.eval_count, last.prompt_eval_count, last.total_duration)), last
    assert not any(part.done for part in parts)
    if mode == "replayed":
        messages: list[object] = [{"role": "user", "content": QUESTION}]
        answer = client.chat(model.model, messages, tools=[get_weather], options=options)
        messages.append(answer.message)
        for call in answer.message.tool_calls or ():
            result = get_weather(**call.function.arguments)
            messages.append({"role": "tool", "tool_name": call.function.name, "content": result})
        check_called(mode)
        assert client.chat(model.model, messages, tools=[get_weather], options=options).message.content == ANSWER
        return
    scored = client.chat(model.model, hello, options=options, logprobs=True, top_logprobs=2)
    assert scored.logprobs is not None
    assert len(scored.logprobs) == scored.eval_count
    assert all(each.logprob <= 0 and len(each.top_logprobs or ()) == 2 for each in scored.logprobs)
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    text = client.chat(model.model, hello, format=schema, options=options).message.content
    assert json.loads(text or "")["n"] in (1, 2)


if __name__ == "__main__":
    main()
