"""Transcriptions over HTTP with Whisper base: each format, streams, long sounds, and requests that are refused."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import soundfile

from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.sampling_params import SamplingParams
from jaxllm.server.app import build_app
from tests.media.sounds import encode
from tests.server.speech.support import DATA, SAID, TRANSCRIPTIONS, TRANSLATIONS, make_form, send
from tests.server.support import Served, command_line, served
from tests.server.test_conformance import check_answer, operation_of

pytestmark = pytest.mark.server

RATE = 16_000
ONCE = {"language": "en", "temperature": "0.01", "seed": "7"}
"""A repeated text is compressed well: at temperature 0 it would be tried again, as if the model repeated itself."""


def speech() -> np.ndarray:
    """Return the samples of the speech, float32 [n]."""
    return soundfile.read(io.BytesIO(DATA), dtype="float32")[0]


def long_speech(times: int) -> tuple[bytes, float]:
    """Return a file with the speech several times, a second of silence after each, and its length."""
    samples = np.tile(np.concatenate([speech(), np.zeros(RATE, np.float32)]), times)
    return encode(samples[:, None], RATE, "FLAC"), len(samples) / RATE


def generated(server: Served, text: str) -> str:
    """Return what the engine makes of the speech by itself after a decoder's prompt."""

    async def generate() -> str:
        prompt = {"prompt": text, "multi_modal_data": {"audio": (speech(), RATE)}}
        last = ""
        async for output in server.llm.generate(prompt, SamplingParams(temperature=0, max_tokens=400), "mine"):
            last = output.outputs[0].text
        return last.strip()

    return asyncio.run_coroutine_threadsafe(generate(), server.loop).result(60)


def test_the_text_is_what_the_model_generates(server: Served) -> None:
    expected = generated(server, "<|startoftranscript|><|en|><|transcribe|><|notimestamps|>")
    assert SAID.search(expected)
    answer = send(server, DATA, language="en", model="tiny")
    assert answer.status == 200, answer.body
    assert answer.json == {"text": expected, "usage": {"type": "duration", "seconds": 8}}
    assert send(server, DATA).json == answer.json, "the language is not found out"
    plain = send(server, DATA, language="EN", response_format="text")
    assert (plain.body.decode(), plain.headers["content-type"]) == (expected + "\n", "text/plain; charset=utf-8")


def test_a_prompt_and_a_task_reach_the_model(server: Served) -> None:
    tokens = "<|startofprev|> five five five<|startoftranscript|><|en|><|transcribe|><|notimestamps|>"
    answer = send(server, DATA, language="en", prompt="five five five")
    assert answer.status == 200, answer.body
    assert answer.json["text"] == generated(server, tokens)
    tokens = "<|startoftranscript|><|de|><|translate|><|notimestamps|>"
    assert send(server, DATA, TRANSLATIONS, language="de", to_language="en").json == {"text": generated(server, tokens)}


def test_verbose_json_has_segments(server: Served) -> None:
    answer = send(server, DATA, response_format="verbose_json", times=["segment"], temperature="0.0").json
    assert (answer["task"], answer["language"], answer["usage"]["seconds"]) == ("transcribe", "en", 8)
    assert answer["duration"] == pytest.approx(7.653, abs=0.01)
    assert SAID.search(answer["text"])
    assert "".join(segment["text"] for segment in answer["segments"]).strip() == answer["text"]
    times = [time for segment in answer["segments"] for time in (segment["start"], segment["end"])]
    assert times == sorted(times)
    assert times[-1] <= answer["duration"] + 0.001
    for segment in answer["segments"]:
        assert segment["avg_logprob"] > -1
        assert 0 <= segment["no_speech_prob"] < 0.6
        assert segment["tokens"]
        assert (segment["temperature"], segment["seek"]) == (0, 0)


def test_verbose_json_has_words(server: Served) -> None:
    answer = send(server, DATA, response_format="verbose_json", times=["word", "segment"], temperature="0.0").json
    assert "".join(word["word"] for word in answer["words"]).strip() == answer["text"]
    times = [time for word in answer["words"] for time in (word["start"], word["end"])]
    assert times == sorted(times)
    assert 0 <= times[0] < times[-1] <= answer["duration"] + 0.03
    assert "".join(segment["text"] for segment in answer["segments"]).strip() == answer["text"]
    alone = send(server, DATA, response_format="verbose_json", times=["word"], temperature="0.0").json
    assert (alone["words"], alone["segments"]) == (answer["words"], None)


def test_subtitles_have_the_segments_times(server: Served) -> None:
    segments = send(server, DATA, language="en", response_format="verbose_json").json["segments"]
    srt = send(server, DATA, language="en", response_format="srt")
    vtt = send(server, DATA, language="en", response_format="vtt").body.decode()
    assert srt.headers["content-type"] == "text/plain; charset=utf-8"
    for text, head, mark in ((srt.body.decode(), "1\n00:", ","), (vtt, "WEBVTT\n\n00:", ".")):
        assert text.startswith(head)
        assert text.count(" --> ") == len(segments)
        for segment in segments:
            assert f"{segment['end']:06.3f}".replace(".", mark) in text
            assert segment["text"].strip() in text


def test_long_sounds_are_whole_and_in_order(server: Served) -> None:
    data, seconds = long_speech(9)
    answer = send(server, data, **ONCE, response_format="verbose_json").json
    assert answer["duration"] == pytest.approx(seconds)
    assert len(re.findall(r"lazy dog", answer["text"], re.IGNORECASE)) >= 7
    assert len({segment["seek"] for segment in answer["segments"]}) == 3
    starts = [segment["start"] for segment in answer["segments"]]
    assert starts == sorted(starts)
    assert starts[-1] > 55
    assert [segment["id"] for segment in answer["segments"]] == list(range(len(starts)))
    streamed = send(server, data, **ONCE, stream="true")
    text = "".join(event["choices"][0]["delta"]["content"] for event in streamed.events)
    assert text == send(server, data, **ONCE).json["text"]
    assert [event["choices"][0]["finish_reason"] for event in streamed.events].count("stop") == 3


DESCRIBED: dict[str, tuple[dict[str, Any], int]] = {
    "json": ({"language": "en"}, 200),
    "verbose_json": ({"response_format": "verbose_json"}, 200),
    "times of words": ({"response_format": "verbose_json", "times": ["word", "segment"]}, 200),
    "subtitles": ({"response_format": "srt"}, 200),
    "a stream": ({"language": "en", "stream": "true"}, 200),
    "a stream with usage": (
        {"stream": "true", "stream_include_usage": "true", "stream_continuous_usage_stats": "true"},
        200,
    ),
    "a field that is refused": ({"n": "2"}, 400),
    "another model": ({"model": "other"}, 404),
}
"""Fields, and the status of the answer."""


@pytest.fixture(scope="module")
def document(server: Served) -> dict[str, Any]:
    return server.get("/openapi.json").json


def test_a_stream_has_vllms_events(server: Served) -> None:
    answer = send(server, DATA, stream="true", stream_include_usage="true", response_format="json")
    *events, last = answer.events
    assert {event["object"] for event in answer.events} == {"transcription.chunk"}
    assert len({event["id"] for event in answer.events}) == 1
    assert events[0]["id"].startswith("trsc-")
    text = "".join(event["choices"][0]["delta"]["content"] for event in events)
    assert text == send(server, DATA).json["text"]
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * (len(events) - 1) + ["stop"]
    assert last["choices"] == []
    usage = last["usage"]
    assert (usage["prompt_tokens"], usage["total_tokens"]) == (4, 4 + usage["completion_tokens"])
    assert usage["completion_tokens"] >= len(events)
    assert not any("usage" in event for event in events)
    fields = {"stream": "true", "stream_include_usage": "true", "stream_continuous_usage_stats": "true"}
    translated = send(server, DATA, TRANSLATIONS, **fields).events
    assert {event["object"] for event in translated} == {"translation.chunk"}
    counts = [event["usage"]["completion_tokens"] for event in translated]
    assert counts == sorted(counts)


@pytest.mark.parametrize("path", [TRANSCRIPTIONS, TRANSLATIONS])
@pytest.mark.parametrize("name", DESCRIBED)
def test_answers_are_as_described(server: Served, document: dict[str, Any], path: str, name: str) -> None:
    fields, status = DESCRIBED[name]
    answer = send(server, DATA, path, **fields)
    assert answer.status == status, answer.body
    check_answer(document, operation_of(document, "post", path), answer)


def test_in_silence_no_speech_is_likely(server: Served) -> None:
    """The model may make up a word all the same."""
    data = encode(np.zeros((3 * RATE, 1), np.float32), RATE)
    answer = send(server, data, language="en", response_format="verbose_json").json
    assert len(answer["text"]) < 20
    assert all(segment["no_speech_prob"] > 0.3 for segment in answer["segments"])


REFUSED: dict[str, tuple[dict[str, Any], int, str]] = {
    "another model": ({"model": "other"}, 404, "model"),
    "another language": ({"language": "xx"}, 400, "language"),
    "times of words in text": ({"times": ["word"]}, 400, "timestamp_granularities[]"),
    "times of text": ({"times": ["segment"]}, 400, "timestamp_granularities[]"),
    "a kind of times": ({"times": ["hour"], "response_format": "verbose_json"}, 400, "timestamp_granularities"),
    "a format": ({"response_format": "diarized_json"}, 400, "response_format"),
    "a stream of subtitles": ({"stream": "true", "response_format": "srt"}, 400, "response_format"),
    "usage without a stream": ({"stream_include_usage": "true"}, 400, "stream_include_usage"),
    "no number": ({"temperature": "warm"}, 400, "temperature"),
    "no finite number": ({"temperature": "nan"}, 400, "temperature"),
    "a number out of bounds": ({"temperature": "-1"}, 400, "temperature"),
    "no tokens": ({"max_completion_tokens": "0"}, 400, "max_completion_tokens"),
    "top_p": ({"top_p": "7", "temperature": "1"}, 400, "top_p"),
    "no switch": ({"stream": "maybe"}, 400, "stream"),
    "beams": ({"use_beam_search": "true"}, 400, "use_beam_search"),
    "answers": ({"n": "2"}, 400, "n"),
    "hot words": ({"hotwords": "fox"}, 400, "hotwords"),
    "speakers": ({"known_speaker_names[]": ["me"]}, 400, "known_speaker_names[]"),
    "a special token": ({"prompt": "a <|nospeech|> b"}, 400, "prompt"),
    "a target": ({"to_language": "fr"}, 400, "to_language"),
    "arguments": ({"vllm_xargs": "{"}, 400, "vllm_xargs"),
}
HARMLESS: dict[str, str] = {
    "use_beam_search": "False",
    "n": "1",
    "length_penalty": "1.0",
    "language": "",
    "seed": "7",
    "hotwords": "",
    "chunking_strategy": "auto",
    "unknown": "x",
    "max_completion_tokens": "400",
    "user": "me",
    "top_k": "0",
}
SOUNDS: dict[str, bytes | None] = {
    "none": None,
    "empty": b"",
    "text": b"hello",
    "short": encode(np.zeros((20, 1), np.float32), RATE),
    "cut off": encode(np.zeros((RATE, 1), np.float32), RATE)[:-1000],
    "not finite": encode(np.full((RATE, 1), np.inf, np.float32), RATE, "WAV", "FLOAT"),
    "noise": np.random.default_rng().bytes(100_000),
}


@pytest.mark.parametrize("name", REFUSED)
def test_fields_are_refused_by_name(server: Served, name: str) -> None:
    fields, status, parameter = REFUSED[name]
    answer = send(server, DATA, **{"language": "en", **fields})
    assert (answer.status, answer.json["error"]["param"]) == (status, parameter), answer.body


def test_fields_that_ask_for_nothing_are_taken(server: Served) -> None:
    answer = send(server, DATA, **HARMLESS)
    assert answer.status == 200, answer.body
    assert SAID.search(answer.json["text"])


@pytest.mark.parametrize("name", SOUNDS)
def test_bad_sounds_are_refused(server: Served, name: str) -> None:
    answer = send(server, SOUNDS[name])
    assert (answer.status, answer.json["error"]["param"]) == (400, "file"), answer.body


def test_a_bad_request_hurts_nobody_else(server: Served) -> None:
    expected = send(server, DATA, language="en").json
    with ThreadPoolExecutor(8) as threads:
        good = [threads.submit(send, server, DATA, language="en") for _ in range(4)]
        bad = [threads.submit(send, server, data, language="en") for data in SOUNDS.values()]
        bad += [threads.submit(send, server, DATA, prompt="<|endoftext|>")]
        assert [each.result().json for each in good] == [expected] * 4
        assert [each.result().status for each in bad] == [400] * len(bad)


def test_a_file_as_text_or_a_field_as_file_is_refused(server: Served) -> None:
    for fields, files, name in (({"file": "a"}, {}, "file"), ({}, {"file": DATA, "prompt": b"a"}, "prompt")):
        body, kind = make_form(fields, files)
        answer = server.ask("POST", "/v1/audio/transcriptions", body, {"content-type": kind})
        assert (answer.status, answer.json["error"]["param"]) == (400, name)
    assert server.post("/v1/audio/transcriptions", {"file": "x"}).status == 415
    assert server.ask("POST", "/v1/audio/transcriptions", b"", {"content-type": "multipart/form-data"}).status == 400


def test_too_large_files_are_refused_before_they_have_come(server: Served) -> None:
    """The server answers while most of the body is unsent."""
    head = (
        "POST /v1/audio/transcriptions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: multipart/form-data; boundary=b\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as client:
        client.sendall(f"{head}content-length: {27 << 20}\r\n\r\n".encode())
        start = client.recv(10_000)
        while b"JAXLLM_MAX_AUDIO_CLIP_FILESIZE_MB" not in start:
            start += client.recv(10_000) or pytest.fail(f"{start!r}")
    assert start.startswith(b"HTTP/1.1 413")
    answer = send(server, bytes(25 * 2**20 + 1))
    assert (answer.status, answer.json["error"]["param"]) == (413, "file")


def test_clients_that_leave_end_their_requests(server: Served) -> None:
    data, _ = long_speech(8)
    for fields in (ONCE, {**ONCE, "stream": "true"}):
        body, kind = make_form(fields, {"file": data})
        head = f"POST /v1/audio/transcriptions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: {kind}\r\n"
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as client:
            client.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            _wait(lambda: server.llm.front.outputs.num_unfinished_requests > 0)
        _wait(lambda: server.llm.front.outputs.num_unfinished_requests == 0, seconds=2)
    assert server.get("/load").json == {"server_load": 0}


def _wait(is_so: Any, seconds: float = 20) -> None:
    until = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.002)


def test_a_full_engine_refuses_sounds_that_have_not_begun(server: Served) -> None:
    """A sound that has begun takes turns with others within the bound."""
    admission = server.llm.admission
    data, _ = long_speech(7)
    expected = send(server, data, **ONCE).json
    bound, admission._max_num_reqs = admission._max_num_reqs, 1
    try:
        assert send(server, data, **ONCE).json == expected
        reserved = threading.Event()
        server.loop.call_soon_threadsafe(lambda: (admission.reserve_reqs(1), reserved.set()))
        assert reserved.wait(10)
        answer = send(server, DATA, language="en")
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        server.loop.call_soon_threadsafe(lambda: admission.release_reqs(1))
    finally:
        admission._max_num_reqs = bound
    assert send(server, data, **ONCE).json == expected


def test_other_routes_refuse_a_whisper(server: Served) -> None:
    messages = [{"role": "user", "content": "a"}]
    for path, body, api in (
        ("/v1/chat/completions", {"messages": messages}, "Chat Completions"),
        ("/v1/completions", {"prompt": "a"}, "Completions"),
        ("/v1/responses", {"input": "a"}, "Responses"),
        ("/v1/embeddings", {"input": "a"}, "Embeddings"),
    ):
        answer = server.post(path, body)
        assert (answer.status, answer.json["error"]["message"]) == (400, f"The model does not support {api} API")
    assert server.llm.front.supported_tasks == ("transcription",)


def test_metrics_count_the_routes(server: Served) -> None:
    send(server, DATA, language="en")
    shown = server.get("/metrics").body.decode()
    assert re.search(r'http_requests_total\{.*handler="/v1/audio/transcriptions".*\} [1-9]', shown)


def test_keys_are_asked_for(whisper: AsyncLLM, server: Served) -> None:
    with served(whisper, "--api-key", "secret") as closed:
        assert send(closed, DATA).status == 401


def test_the_form_is_described() -> None:
    document = build_app(command_line()).openapi()
    content = document["paths"]["/v1/audio/transcriptions"]["post"]["requestBody"]["content"]
    [(kind, described)] = content.items()
    schema = document["components"]["schemas"][described["schema"]["$ref"].rpartition("/")[2]]
    assert kind == "multipart/form-data"
    assert schema["properties"]["file"]["format"] == "binary"
    assert schema["required"] == ["file"]
    assert {"timestamp_granularities[]", "language", "stream"} <= schema["properties"].keys()


def test_a_batch_names_sounds_by_url(whisper: AsyncLLM, server: Served, tmp_path: Any) -> None:
    from jaxllm.cli.batch.jobs import Job
    from jaxllm.cli.batch.run_batch import Answers

    url = f"data:audio/ogg;base64,{base64.b64encode(DATA).decode()}"
    bodies: list[tuple[dict[str, Any], int]] = [
        ({"file_url": url, "language": "en"}, 200),
        ({"file_url": url, "language": "en", "response_format": "srt"}, 200),
        ({"file_url": "http://127.0.0.1/x.wav"}, 400),
        ({"file_url": "file:///etc/passwd"}, 400),
        ({"file_url": url, "file": "x"}, 400),
        ({"file_url": url, "stream": True}, 400),
        ({}, 400),
    ]

    async def answer() -> list[dict[str, Any]]:
        answers = Answers(whisper, server.app.state.server_args, ["tiny"], "")
        path = "/v1/audio/transcriptions"
        lines = [json.dumps({"custom_id": "a", "url": path, "body": body}).encode() for body, _ in bodies]
        return [(await answers.record(Job(i, line, True), f"batch-{i}"))[0] for i, line in enumerate(lines)]

    records = asyncio.run_coroutine_threadsafe(answer(), server.loop).result(60)
    assert [record["response"]["status_code"] for record in records] == [status for _, status in bodies]
    assert records[0]["response"]["body"].text == send(server, DATA, language="en").json["text"]
    assert records[1]["response"]["body"] == send(server, DATA, language="en", response_format="srt").body.decode()


def test_models_without_speech_refuse_sounds(mock_server: Served) -> None:
    for path, api in (("/v1/audio/transcriptions", "Transcriptions"), (TRANSLATIONS, "Translations")):
        answer = send(mock_server, DATA, path)
        assert (answer.status, answer.json["error"]["message"]) == (400, f"The model does not support {api} API")
