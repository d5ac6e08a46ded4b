"""Log-probabilities in the forms that clients read."""

from __future__ import annotations

import math

import msgspec

from jaxllm.logprobs import Logprob
from jaxllm.server.openai.logprobs import LEAST, chat_logprobs, completion_logprobs, prompt_logprobs

# The sampled token 7 is the third likeliest, and reads as token 5 does.
POSITION = {7: Logprob(-3.25, 3, "é"), 5: Logprob(-0.5, 1, "é"), 6: Logprob(-math.inf, 2, "b")}


def test_chats_list_the_likeliest_in_order_and_the_token_with_the_same_value() -> None:
    [shown] = chat_logprobs([7], [POSITION], 3).content
    assert (shown.token, shown.logprob, shown.bytes) == ("é", -3.25, [0xC3, 0xA9])
    assert [(each.token, each.logprob) for each in shown.top_logprobs] == [("é", -0.5), ("b", LEAST), ("é", -3.25)]
    for num_top, listed in ((1, [("é", -3.25)]), (2, [("é", -0.5), ("é", -3.25)])):
        [shown] = chat_logprobs([7], [POSITION], num_top).content
        assert [(each.token, each.logprob) for each in shown.top_logprobs] == listed
    assert chat_logprobs([7], [POSITION], 0).content[0].top_logprobs == []


def test_tokens_as_ids() -> None:
    [shown] = chat_logprobs([7], [POSITION], 2, as_token_ids=True).content
    assert shown.token == "token_id:7"
    assert [each.token for each in shown.top_logprobs] == ["token_id:5", "token_id:7"]
    completion = completion_logprobs([7], [POSITION], as_token_ids=True)
    assert completion.tokens == ["token_id:7"]
    assert completion.top_logprobs == [{"token_id:7": -3.25, "token_id:5": -0.5, "token_id:6": LEAST}]


def test_completions_show_the_tokens_own_value_even_if_another_reads_the_same() -> None:
    shown = completion_logprobs([3, 7, 7], [None, POSITION, POSITION], text_offset=4)
    assert shown.token_logprobs == [None, -3.25, -3.25]
    assert shown.top_logprobs == [None, {"é": -3.25, "b": LEAST}, {"é": -3.25, "b": LEAST}]
    assert shown.text_offset == [4, 4 + len("token_id:3"), 5 + len("token_id:3")]


def test_prompts_are_dicts_by_id_and_json_holds_them() -> None:
    assert prompt_logprobs(None) is None
    shown = msgspec.json.decode(msgspec.json.encode(prompt_logprobs([None, POSITION])))
    assert shown[0] is None
    assert shown[1]["5"] == {"logprob": -0.5, "rank": 1, "decoded_token": "é"}
    assert shown[1]["6"]["logprob"] == LEAST
