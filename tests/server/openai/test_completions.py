"""Text completions: those of `LLM.generate`, whole and streamed, with their prompts and without."""

from __future__ import annotations

from typing import Any

import pytest

from jaxllm import LLM, SamplingParams, TokensPrompt
from jaxllm.engine.online.async_llm import AsyncLLM
from tests.async_engine.support import metric
from tests.server.support import Answer, Served

PATH = "/v1/completions"
IDS = [list(range(30, 42)), list(range(50, 55))]
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0, "max_tokens": 8},
    {"temperature": 0.9, "seed": 7, "max_tokens": 8, "n": 2},
    {"temperature": 0.9, "seed": 7, "max_tokens": 8, "stop": ["e", "a"]},
]


def complete(server: Served, **fields: Any) -> Answer:
    return server.post(PATH, {"model": "tiny", "temperature": 0, "max_tokens": 4, **fields})


def joined(events: list[Any], index: int) -> str:
    return "".join(each["text"] for event in events for each in event["choices"] if each["index"] == index)


def logprobs_of(events: list[Any], index: int) -> dict[str, list[Any]]:
    """Return the lists of all pieces of a choice, one after the other."""
    logprobs: dict[str, list[Any]] = {}
    for choice in (each for event in events for each in event["choices"] if each["index"] == index):
        for name, values in (choice["logprobs"] or {}).items():
            logprobs.setdefault(name, []).extend(values)
    return logprobs


@pytest.mark.server
@pytest.mark.parametrize("parameters", KINDS)
def test_a_batch_is_what_the_program_generates(offline: LLM, tiny_server: Served, parameters: dict[str, Any]) -> None:
    prompts = [TokensPrompt(prompt_token_ids=each) for each in IDS]
    expected = offline.generate(prompts, SamplingParams(**parameters, logprobs=2), use_tqdm=False)
    body = {"prompt": IDS, **parameters, "logprobs": 2, "return_token_ids": True}
    answer = complete(tiny_server, **body).json
    outputs = [output for request in expected for output in request.outputs]
    assert [each["index"] for each in answer["choices"]] == list(range(len(outputs)))
    for choice, output in zip(answer["choices"], outputs, strict=True):
        assert (choice["text"], choice["token_ids"]) == (output.text, list(output.token_ids))
        assert (choice["finish_reason"], choice["stop_reason"]) == (output.finish_reason, output.stop_reason)
        assert output.logprobs is not None
        values = [position[token].logprob for token, position in zip(output.token_ids, output.logprobs, strict=True)]
        assert choice["logprobs"]["token_logprobs"] == values
    num_tokens = sum(len(output.token_ids) for output in outputs)
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (17, num_tokens)
    events = complete(tiny_server, **body, stream=True, stream_options={"include_usage": True}).events
    assert events[-1]["usage"] == answer["usage"]
    for choice in answer["choices"]:
        assert joined(events, choice["index"]) == choice["text"]
        assert logprobs_of(events, choice["index"]) == choice["logprobs"]


@pytest.mark.server
@pytest.mark.parametrize("max_tokens", [0, 1])
def test_a_prompt_is_scored_as_the_program_scores_it(offline: LLM, tiny_server: Served, max_tokens: int) -> None:
    """What lm-eval's loglikelihood reads: the chosen token's value is among the top ones, to the bit."""
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=1, prompt_logprobs=1)
    [expected] = offline.generate(TokensPrompt(prompt_token_ids=IDS[0]), params, use_tqdm=False)
    assert expected.prompt_logprobs is not None
    answer = complete(tiny_server, prompt=[IDS[0]], max_tokens=max_tokens, logprobs=1, echo=True, seed=1234).json
    [choice] = answer["choices"]
    shown = choice["logprobs"]
    assert (shown["token_logprobs"][0], shown["top_logprobs"][0]) == (None, None)
    scores = [
        position[token].logprob for token, position in zip(IDS[0], expected.prompt_logprobs, strict=True) if position
    ]
    assert shown["token_logprobs"][1 : len(IDS[0])] == scores
    assert len(shown["tokens"]) == len(IDS[0]) + max_tokens
    for value, top in zip(shown["token_logprobs"][1:], shown["top_logprobs"][1:], strict=True):
        assert value in top.values()
        assert max(top.values()) >= value
    ends = [offset + len(token) for offset, token in zip(shown["text_offset"], shown["tokens"], strict=True)]
    assert shown["text_offset"] == [0, *ends[:-1]]
    assert answer["usage"]["completion_tokens"] == max_tokens


def test_echo_begins_each_answer_with_its_prompt(mock_server: Served) -> None:
    alone = complete(mock_server, prompt=["ab", "c"], n=2, seed=3).json["choices"]
    body = {"prompt": ["ab", "c"], "n": 2, "seed": 3, "echo": True, "logprobs": None}
    echoed = complete(mock_server, **body).json["choices"]
    assert [each["text"] for each in echoed] == [
        p + each["text"] for p, each in zip(("ab", "ab", "c", "c"), alone, strict=True)
    ]
    events = complete(mock_server, **body, stream=True).events
    assert [joined(events, i) for i in range(4)] == [each["text"] for each in echoed]
    only = complete(mock_server, prompt="ab", echo=True, max_tokens=0).json["choices"]
    assert [each["text"] for each in only] == ["ab"]


@pytest.mark.server
def test_an_echo_of_ids_has_the_special_tokens_that_offsets_count(tiny_server: Served) -> None:
    special = tiny_server.llm.front.require_tokenizer().eos_token_id
    assert special is not None
    body = {"prompt": [[special, 40, 41]], "echo": True, "logprobs": 0}
    [choice] = complete(tiny_server, **body).json["choices"]
    tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    assert choice["text"].startswith("".join(tokens[:3]))
    assert choice["text"][: offsets[1]] == tokens[0] != ""
    assert joined(complete(tiny_server, **body, stream=True).events, 0) == choice["text"]


def test_continuous_usage_counts_up(mock_server: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = complete(mock_server, prompt=["a", "b"], stream=True, stream_options=options).events
    counts = [each["usage"]["completion_tokens"] for each in events]
    assert counts == sorted(counts)
    assert counts[-1] == 8
    assert {each["id"] for each in events} == {events[0]["id"]}
    assert events[0]["id"].startswith("cmpl-")


def test_what_cannot_be_says_so(mock_server: Served) -> None:
    """tests/server/openai/test_bad_requests.py has the many fields that a good prompt may bring."""
    for fields, status, parameter in (
        ({"prompt": None}, 400, "prompt"),
        ({"model": "other", "prompt": "a"}, 404, "model"),
    ):
        answer = complete(mock_server, **fields)
        assert (answer.status, answer.json["error"]["param"]) == (status, parameter)


def test_r21_one_bad_prompt_ends_its_siblings(mock: AsyncLLM, mock_server: Served) -> None:
    before = metric(mock, "request_success", finished_reason="abort")
    answer = complete(mock_server, prompt=[[30], [31], [10_000]], max_tokens=400, ignore_eos=True)
    assert answer.status == 400
    assert metric(mock, "request_success", finished_reason="abort") == before + 2
    assert mock.front.outputs.num_unfinished_requests == 0
