"""What answers say of tokens: those of reasoning, those that the cache has and keeps, and the server's own bound."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.outputs import EmbeddingRequestOutput, PlaceholderRange, PoolingOutput, PoolingRequestOutput
from jaxllm.server.pooling.requests import usage_of
from tests.async_engine.support import mock_llm, tiny_args
from tests.server.support import TEMPLATE, Served, served
from tests.server.tool_support import tool_served

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
BLOCK = 8
WORDS = ("--enable-prompt-tokens-details", "--enable-force-include-usage")


@pytest.fixture(scope="module")
def server(tokenizer: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with tool_served(tokenizer, tmp_path_factory.mktemp("replies"), *WORDS) as server:
        yield server


@pytest.fixture(scope="module")
def bounded_server(tokenizer: str) -> Iterator[Served]:
    args = tiny_args(tokenizer, chat_template=TEMPLATE, override_generation_config={"max_new_tokens": 3})
    with mock_llm(args) as llm, served(llm) as server:
        yield server


def ask(content: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 400, **fields}


def num_tokens(server: Served, text: str) -> int:
    return server.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json["count"]


def test_chats_count_the_tokens_of_reasoning(server: Served) -> None:
    expected = num_tokens(server, "Hm, two.")
    for shows in (True, False):
        body = ask("think?", include_reasoning=shows)
        usage = server.post(CHAT, body).json["usage"]
        assert usage["completion_tokens_details"] == {"reasoning_tokens": expected}
        assert usage["completion_tokens"] > expected > 0
        [*_, last] = server.post(CHAT, body | {"stream": True}).events
        assert last["usage"]["completion_tokens_details"] == {"reasoning_tokens": expected}
    two = server.post(CHAT, ask("think?", n=2)).json["usage"]
    assert two["completion_tokens_details"] == {"reasoning_tokens": 2 * expected}
    none = server.post(CHAT, ask("21 degrees")).json["usage"]
    assert none["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_pooled_prompts_count_the_tokens_of_pictures() -> None:
    """All prompts of a request count; outputs of one task become those of another with what they say of pictures."""
    of_picture = {"image": [PlaceholderRange(1, 3), PlaceholderRange(5, 2)]}
    outputs = [
        PoolingRequestOutput("0", PoolingOutput(np.zeros(2)), [0] * 9, 4, True, multi_modal_placeholders=of_picture),
        PoolingRequestOutput("1", PoolingOutput(np.zeros(2)), [0] * 3, 1, True),
    ]
    for shown in (outputs, [EmbeddingRequestOutput.from_base(output) for output in outputs]):
        usage = msgspec.to_builtins(usage_of(shown, tells_cached=True))
        assert usage["prompt_tokens_details"] == {
            "cached_tokens": 5,
            "created_cache_tokens": None,
            "multimodal_tokens": 5,
        }
        assert usage["prompt_tokens"] == 12


def test_without_marks_of_reasoning_nothing_is_said_of_it(mock_server: Served) -> None:
    usage = mock_server.post(CHAT, ask("a", max_tokens=2)).json["usage"]
    assert (usage["completion_tokens_details"], usage["prompt_tokens_details"]) == (None, None)


@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": False}}])
def test_where_usage_is_forced_every_event_has_it(server: Served, options: dict[str, Any]) -> None:
    for path, prompt in ((CHAT, ask("21 degrees")), ("/v1/completions", {"prompt": "21 degrees"})):
        events = server.post(path, {**prompt, "max_tokens": 5, "stream": True, **options}).events
        counts = [each["usage"]["completion_tokens"] for each in events]
        assert counts == sorted(counts)
        assert (counts[-1], events[-1]["choices"]) == (5, [])
        assert counts[0] < 5


def test_the_cache_s_tokens_are_counted_in_every_form(tokenizer: str) -> None:
    args = tiny_args(tokenizer, chat_template=TEMPLATE)
    with (
        AsyncLLM.from_engine_args(args, disable_frontend_multiprocessing=True) as llm,
        served(llm, "--enable-prompt-tokens-details") as server,
    ):
        check_cache(server)


def check_cache(server: Served) -> None:
    text = "this text is found in no other prompt, and is long enough"
    first = server.post(CHAT, ask(text, max_tokens=3)).json["usage"]
    whole_blocks = first["prompt_tokens"] // BLOCK * BLOCK
    assert first["prompt_tokens_details"] == {
        "cached_tokens": 0,
        "created_cache_tokens": whole_blocks,
    }
    [*_, last] = server.post(CHAT, ask(text, stream=True, stream_options={"include_usage": True}, max_tokens=3)).events
    cached = last["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0
    assert last["usage"]["prompt_tokens_details"]["created_cache_tokens"] == whole_blocks - cached

    told = server.post(MESSAGES, ask(text + " once more, and longer", max_tokens=3)).json["usage"]
    assert told["cache_read_input_tokens"] > 0
    assert told["cache_creation_input_tokens"] > 0
    parts = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    assert sum(told[name] for name in parts) == first["prompt_tokens"] + num_tokens(server, " once more, and longer")
    assert 0 <= told["input_tokens"] < BLOCK

    response = server.post("/v1/responses", {"input": text + " and a third time", "max_output_tokens": 5}).json["usage"]
    details = response["input_tokens_details"]
    assert details["cached_tokens"] > 0
    assert details["cached_tokens"] + details["cache_write_tokens"] == response["input_tokens"] // BLOCK * BLOCK

    both = server.post("/v1/completions", {"prompt": ["the cat sat on", "a mat, and why not"], "max_tokens": 1}).json
    counted = both["usage"]["prompt_tokens_details"]
    assert counted["created_cache_tokens"] + counted["cached_tokens"] > 0


@pytest.mark.parametrize(("asked", "made"), [(None, 3), (2, 2), (10, 3)])
def test_the_server_s_own_max_new_tokens_bounds_every_request(
    bounded_server: Served, asked: int | None, made: int
) -> None:
    messages = [{"role": "user", "content": "a"}]
    for path in (CHAT, "/v1/completions"):
        prompt = {"prompt": "a"} if path == "/v1/completions" else {"messages": messages}
        answer = bounded_server.post(path, prompt | {"max_tokens": asked, "ignore_eos": True}).json
        assert answer["usage"]["completion_tokens"] == made
    body = {"input": "a", "max_output_tokens": asked, "ignore_eos": True}
    assert bounded_server.post("/v1/responses", body).json["usage"]["output_tokens"] == made
    line = {"model": "tiny", "prompt": "a", "stream": False, "options": {"num_predict": asked}}
    assert bounded_server.post("/api/generate", line).json["eval_count"] <= made


def test_a_level_of_sleep_is_a_gauge_of_its_own(tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    states = ("awake", "weights_offloaded", "discard_all")
    with mock_llm(tiny_args(tokenizer)) as llm, served(llm) as server:

        def shown() -> list[str]:
            lines = [each for each in server.get("/metrics").body.decode().splitlines() if "sleep_state{" in each]
            [active] = [[state for state in states if f'"{state}"' in each] for each in lines if each.endswith(" 1.0")]
            return active

        assert shown() == ["awake"]
        for level, state in ((1, "weights_offloaded"), (2, "discard_all")):
            assert server.post(f"/sleep?level={level}", {}).status == 200
            assert shown() == [state]
            assert server.post("/wake_up", {}).status == 200
            assert shown() == ["awake"]
