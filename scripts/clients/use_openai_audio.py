"""Run the audio calls of the openai package, and curl, against a server of Whisper, with a file of English speech."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import openai

MODEL = "whisper"
FORMATS = ("json", "text", "srt", "vtt", "verbose_json")
STARTS = {
    "srt": re.compile(r"1\n00:00:0\d,\d{3} --> 00:00:\d\d,\d{3}\n"),
    "vtt": re.compile(r"WEBVTT\n\n00:0\d\.\d{3} --> 00:\d\d\.\d{3}\n"),
}
SAID = re.compile(r"quick.*fox.*lazy dog.*phone number", re.IGNORECASE | re.DOTALL)
SECONDS = 7.653
"""The length of the file."""


def text_of(events: Iterable[Any]) -> str:
    """Return the text of a stream's events, which are vLLM's."""
    return "".join(choice["delta"]["content"] for event in events for choice in event.choices)


def words_of(subtitles: str) -> str:
    """Return the text of subtitles without numbers and times."""
    lines = [line for line in subtitles.splitlines() if line and not line.isdigit() and "-->" not in line]
    return " ".join(lines).removeprefix("WEBVTT ")


def check_formats(calls: Any, file: Path, whole: str) -> None:
    """Check the answers in each format of `calls`, the client's transcriptions or translations."""
    request = {"model": MODEL, "file": file}
    assert calls.create(**request, response_format="json").text == whole
    assert calls.create(**request, response_format="text") == whole + "\n"
    for form, start in STARTS.items():
        subtitles = calls.create(**request, response_format=form)
        assert start.match(subtitles), subtitles
        assert SAID.search(words_of(subtitles)), subtitles
    verbose = calls.create(**request, response_format="verbose_json")
    assert verbose.language == "en"
    assert abs(float(verbose.duration) - SECONDS) < 0.01
    assert verbose.segments
    assert "".join(each.text for each in verbose.segments).strip() == verbose.text
    assert SAID.search(verbose.text)
    assert 0 <= verbose.segments[0].start < verbose.segments[-1].end <= float(verbose.duration) + 0.001


def check_times(client: openai.OpenAI, file: Path) -> None:
    request: dict[str, Any] = {"model": MODEL, "file": file, "response_format": "verbose_json", "temperature": 0}
    both = client.audio.transcriptions.create(**request, timestamp_granularities=["word", "segment"])
    assert both.segments
    assert both.words
    assert "".join(each.word for each in both.words).strip() == both.text
    assert "fox" in [each.word.strip().lower() for each in both.words]
    times = [time for each in both.words for time in (each.start, each.end)]
    assert times == sorted(times)
    words = client.audio.transcriptions.create(**request, timestamp_granularities=["word"])
    assert (words.words, words.segments) == (both.words, None)
    segments = client.audio.transcriptions.create(**request, timestamp_granularities=["segment"])
    assert (segments.words, segments.segments) == (None, both.segments)


def check_streams(client: openai.OpenAI, file: Path, whole: str) -> None:
    usage = {"stream_include_usage": True}
    stream = client.audio.transcriptions.create(model=MODEL, file=file, stream=True, extra_body=usage)
    *events, last = list(stream)
    assert len(events) > 10
    assert text_of(events) == whole
    assert [each.choices[0]["finish_reason"] for each in events] == [None] * (len(events) - 1) + ["stop"]
    assert last.choices == []
    assert last.usage["completion_tokens"] >= len(events)
    with client.audio.transcriptions.with_streaming_response.create(
        model=MODEL, file=file, response_format="text", stream=True
    ) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert "".join(each["choices"][0]["delta"]["content"] for each in chunks) == whole


def check_fields(client: openai.OpenAI, file: Path, whole: str) -> None:
    request = {"model": MODEL, "file": file}
    transcribe = client.audio.transcriptions.create
    assert transcribe(**request, language="en").text == whole
    prompted = transcribe(**request, language="en", prompt="555-1234", temperature=0).text
    assert SAID.search(prompted)
    assert prompted != whole, "the prompt has had no effect"
    sampled = {"temperature": 0.4, "extra_body": {"seed": 7, "top_p": 0.9}}
    assert transcribe(**request, **sampled).text == transcribe(**request, **sampled).text
    assert transcribe(**request, chunking_strategy="auto").text == whole
    named = ("talk.ogg", file.read_bytes(), "audio/ogg")
    assert transcribe(model=MODEL, file=named).text == whole
    with file.open("rb") as opened:
        assert transcribe(model=MODEL, file=opened).text == whole
    usage = transcribe(**request).usage
    assert usage is not None
    assert (usage.type, usage.seconds) == ("duration", 8)
    translated = client.audio.translations.create(**request, prompt="", temperature=0, extra_body={"language": "en"})
    assert SAID.search(translated.text)


def check_errors(client: openai.OpenAI, file: Path) -> None:
    transcribe = client.audio.transcriptions.create
    form = {"headers": {"Content-Type": "multipart/form-data"}}
    refused: dict[str, tuple[Any, type[openai.APIStatusError], str]] = {
        "text": (lambda: transcribe(model=MODEL, file=("a.wav", b"hello")), openai.BadRequestError, "file"),
        "empty": (lambda: transcribe(model=MODEL, file=("a.wav", b"")), openai.BadRequestError, "file"),
        "cut": (lambda: transcribe(model=MODEL, file=file.read_bytes()[:60]), openai.BadRequestError, "file"),
        "no file": (
            lambda: client.post("/audio/transcriptions", cast_to=object, body={"model": MODEL}, options=form),
            openai.BadRequestError,
            "file",
        ),
        "model": (lambda: transcribe(model="whisper-1", file=file), openai.NotFoundError, "model"),
        "language": (lambda: transcribe(model=MODEL, file=file, language="xx"), openai.BadRequestError, "language"),
        "temperature": (
            lambda: client.audio.translations.create(model=MODEL, file=file, temperature=-1),
            openai.BadRequestError,
            "temperature",
        ),
        "speakers": (
            lambda: transcribe(model=MODEL, file=file, response_format="diarized_json"),
            openai.BadRequestError,
            "response_format",
        ),
        "times": (
            lambda: transcribe(model=MODEL, file=file, timestamp_granularities=["word"]),
            openai.BadRequestError,
            "timestamp_granularities[]",
        ),
    }
    for name, (call, kind, parameter) in refused.items():
        shown: str | None = None
        try:
            call()
        except kind as error:
            shown = error.param
        assert shown == parameter, f"{name}: {shown}"
    unknown = client.with_options(api_key="wrong").audio.transcriptions.create
    try:
        unknown(model=MODEL, file=file)
    except openai.AuthenticationError:
        return
    raise AssertionError("a wrong key is taken")


async def check_async(url: str, key: str, file: Path, whole: str) -> None:
    """Check that calls at once have the answers that they have one by one."""
    async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:

        async def one(number: int) -> Any:
            request: dict[str, Any] = {"model": MODEL, "file": file}
            match number % 4:
                case 0:
                    return (await client.audio.transcriptions.create(**request)).text
                case 1:
                    events = await client.audio.transcriptions.create(**request, language="en", stream=True)
                    return "".join([text_of([event]) async for event in events])
                case 2:
                    return await client.audio.translations.create(**request, response_format="vtt")
                case _:
                    prompt = f"Call {number}."
                    return (await client.audio.transcriptions.create(**request, language="en", prompt=prompt)).text

        alone = [await one(number) for number in range(8)]
        assert alone[0] == alone[1] == whole
        assert await asyncio.gather(*(one(number) for number in range(8))) == alone
        cut = await client.audio.transcriptions.create(model=MODEL, file=file, stream=True)
        async for _ in cut:
            break
        await cut.close()
        assert await one(0) == whole


def check_curl(client: openai.OpenAI, url: str, key: str, file: Path) -> None:
    """Check that `curl -F` gets what the package gets."""
    command = ["curl", "-sS", "-H", f"Authorization: Bearer {key}", "-F", f"file=@{file}"]
    for path, calls in (("transcriptions", client.audio.transcriptions), ("translations", client.audio.translations)):
        for form in FORMATS:
            fields = ["-F", f"model={MODEL}", "-F", f"response_format={form}"]
            sent = subprocess.run([*command, *fields, f"{url}/audio/{path}"], capture_output=True, check=True)
            answer = sent.stdout.decode()
            expected = calls.create(model=MODEL, file=file, response_format=form)
            if isinstance(expected, str):
                assert answer == expected
            else:
                assert json.loads(answer) == json.loads(expected.model_dump_json(exclude_unset=True))
    transcriptions = f"{url}/audio/transcriptions"
    words = ["-F", "response_format=verbose_json", "-F", "timestamp_granularities[]=word", transcriptions]
    sent = subprocess.run([*command, *words], capture_output=True, check=True)
    assert json.loads(sent.stdout)["words"]
    for field, code in (("model=other", b"404"), ("language=xx", b"400"), ("stream=1", b"200")):
        status = ["-o", "/dev/null", "-w", "%{http_code}", "-F", field, transcriptions]
        sent = subprocess.run([*command, *status], capture_output=True, check=True)
        assert sent.stdout == code, (field, sent.stdout)


def main(url: str, key: str, name: str) -> None:
    warnings.simplefilter("ignore", DeprecationWarning)  # openai has no newer call for translations
    client = openai.OpenAI(base_url=url, api_key=key, max_retries=0)
    file = Path(name)
    whole = client.audio.transcriptions.create(model=MODEL, file=file).text
    assert SAID.search(whole), whole
    check_formats(client.audio.transcriptions, file, whole)
    translated = client.audio.translations.create(model=MODEL, file=file).text
    check_formats(client.audio.translations, file, translated)
    check_times(client, file)
    check_streams(client, file, whole)
    check_fields(client, file, whole)
    check_errors(client, file)
    asyncio.run(check_async(url, key, file, whole))
    check_curl(client, url, key, file)


if __name__ == "__main__":
    main(sys.argv[1] + "/v1", *sys.argv[2:])
