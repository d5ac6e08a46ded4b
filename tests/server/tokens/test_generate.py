"""Ids in, ids out: what `LLM.generate` makes of the same prompt and params, whole and streamed."""

from __future__ import annotations

from typing import Any

import pytest

from jaxllm import LLM, SamplingParams, TokensPrompt
from jaxllm.params.structured_outputs import StructuredOutputsParams
from tests.server.request_bounds import SAMPLING
from tests.server.support import Served

pytestmark = pytest.mark.server

PATH = "/inference/v1/generate"
IDS = list(range(30, 42))
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0, "max_tokens": 8, "logprobs": 2},
    {"temperature": 0.9, "seed": 7, "max_tokens": 8, "n": 2, "logit_bias": {"5": 1.5}},
    {"temperature": 0.9, "seed": 7, "max_tokens": 8, "stop": ["e", "a"]},
    {"temperature": 0.0, "max_tokens": 6, "structured_outputs": {"regex": "[0-9]{3}"}},
    {"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": 1, "logprob_token_ids": [5, 6]},
]


def params_of(fields: dict[str, Any]) -> SamplingParams:
    """Return the params that a program makes of the same fields."""
    made = dict(fields)
    if "logit_bias" in made:
        made["logit_bias"] = {int(name): value for name, value in made["logit_bias"].items()}
    if "structured_outputs" in made:
        made["structured_outputs"] = StructuredOutputsParams(**made["structured_outputs"])
    return SamplingParams(**made)


@pytest.mark.parametrize("fields", KINDS)
def test_ids_are_what_the_program_generates(offline: LLM, tiny_server: Served, fields: dict[str, Any]) -> None:
    [expected] = offline.generate(TokensPrompt(prompt_token_ids=IDS), params_of(fields), use_tqdm=False)
    answer = tiny_server.post(PATH, {"token_ids": IDS, "sampling_params": fields}).json
    for choice, output in zip(answer["choices"], expected.outputs, strict=True):
        assert choice["token_ids"] == list(output.token_ids)
        assert (choice["finish_reason"], choice["stop_reason"]) == (output.finish_reason, output.stop_reason)
        if output.logprobs is None:
            assert choice["logprobs"] is None
            continue
        pairs = zip(choice["logprobs"]["content"], output.token_ids, output.logprobs, strict=True)
        for shown, token_id, position in pairs:
            assert (shown["token"], shown["logprob"]) == (f"token_id:{token_id}", position[token_id].logprob)
            tops = {each["token"]: each["logprob"] for each in shown["top_logprobs"]}
            kept = {f"token_id:{name}": entry.logprob for name, entry in position.items()}
            assert tops.items() <= kept.items()
    num_tokens = sum(len(output.token_ids) for output in expected.outputs)
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (len(IDS), num_tokens)
    if expected.prompt_logprobs is not None:
        shown = answer["prompt_logprobs"][1:]
        values = [position[str(token_id)]["logprob"] for token_id, position in zip(IDS[1:], shown, strict=True)]
        known = zip(IDS[1:], expected.prompt_logprobs[1:], strict=True)
        assert values == [position[token_id].logprob for token_id, position in known if position]


@pytest.mark.parametrize("fields", KINDS[:4])
def test_a_stream_has_the_same_ids(tiny_server: Served, fields: dict[str, Any]) -> None:
    body = {"token_ids": IDS, "sampling_params": fields, "cache_salt": "a"}
    whole = tiny_server.post(PATH, body).json
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = tiny_server.post(PATH, body | {"stream": True, "stream_options": options}).events
    assert events[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        pieces = [each for event in events for each in event["choices"] if each["index"] == choice["index"]]
        assert [token for piece in pieces for token in piece["token_ids"]] == choice["token_ids"]
        assert pieces[-1]["finish_reason"] == choice["finish_reason"]
        if choice["logprobs"] is not None:
            content = [token for piece in pieces for token in piece["logprobs"]["content"]]
            assert content == choice["logprobs"]["content"]
    tokens = [event["usage"]["completion_tokens"] for event in events]
    assert tokens == sorted(tokens)


def test_without_max_tokens_an_answer_may_fill_the_context(tiny_server: Served) -> None:
    fields = {"temperature": 0.0, "ignore_eos": True}
    answer = tiny_server.post(PATH, {"token_ids": IDS, "sampling_params": fields}).json
    longest = tiny_server.llm.model_config.max_model_len
    assert len(answer["choices"][0]["token_ids"]) == longest - len(IDS)


@pytest.mark.parametrize("name", sorted(SAMPLING.keys() & set(SamplingParams.__struct_fields__)))
def test_sampling_params_have_the_bounds_of_the_other_routes(mock_server: Served, name: str) -> None:
    bound = SAMPLING[name]
    for value in bound.beyond:
        body = f'{{"token_ids":[5],"sampling_params":{{"max_tokens":5,"{name}":{value}}}}}'
        answer = mock_server.ask("POST", PATH, body.encode())
        assert (answer.status, answer.json["error"]["param"]) == (400, "sampling_params"), (value, answer.body)
        assert "sampling_params" in answer.json["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"sampling_params": {"top_q": 1}}, "Did you mean 'top_p'?"),
        ({"sampling_params": {"_eos_token_id": 1}}, "_eos_token_id"),
        ({"sampling_params": {"structured_outputs": 5}}, "must be an object"),
        ({"sampling_params": {"structured_outputs": {"regexp": "a"}}}, "regexp"),
        ({"sampling_params": {"prompt_logprobs": 1}, "stream": True}, "prompt_logprobs"),
        ({"sampling_params": []}, "sampling_params"),
        ({"sampling_params": {"stop": 5}}, "stop"),
    ],
)
def test_bad_params_are_refused_by_name(tiny_server: Served, fields: dict[str, Any], words: str) -> None:
    answer = tiny_server.post(PATH, {"token_ids": IDS, **fields})
    assert (answer.status, answer.json["error"]["param"]) == (400, "sampling_params"), answer.body
    assert words in answer.json["error"]["message"]


@pytest.mark.parametrize("token_ids", [[], [256], [-1], [5] * 600])
def test_bad_prompts_are_refused_by_name(tiny_server: Served, token_ids: list[int]) -> None:
    answer = tiny_server.post(PATH, {"token_ids": token_ids, "sampling_params": {"max_tokens": 1}})
    assert (answer.status, answer.json["error"]["param"]) == (400, "token_ids"), answer.body


def test_what_concerns_python_objects_has_no_effect(tiny_server: Served) -> None:
    """Clients that send all fields of a SamplingParams object send these too."""
    plain = {"temperature": 0.0, "max_tokens": 4}
    more = {"output_kind": 2, "skip_clone": False, "flat_logprobs": True, "detokenize": True}
    answers = [
        tiny_server.post(PATH, {"token_ids": IDS, "sampling_params": fields}).json["choices"]
        for fields in (plain, plain | more)
    ]
    assert answers[0] == answers[1]
