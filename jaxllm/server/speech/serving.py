"""Serve transcriptions and translations: a file is decoded, cut into clips, and each clip is a request."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from msgspec import UNSET

from jaxllm.config.environment import audio_limits
from jaxllm.config.server_arguments import ServerArgs
from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.engine.online.prompt_encoding import in_media_thread
from jaxllm.media.fetching.connector import MediaConnector
from jaxllm.server.http.caller import Caller
from jaxllm.server.http.errors import RequestFailedError
from jaxllm.server.http.sse import EventStream, event
from jaxllm.server.openai.prompt_fields import renamed
from jaxllm.server.openai.serving_chat import OpenAIServingChat
from jaxllm.server.openai.serving_models import OpenAIServingModels
from jaxllm.server.openai.usage import UsageInfo, make_usage
from jaxllm.server.speech.protocol import (
    BatchTranscriptionRequest,
    TranscriptionDelta,
    TranscriptionRequest,
    TranscriptionResponse,
    TranscriptionResponseVerbose,
    TranscriptionSegment,
    TranscriptionStreamChoice,
    TranscriptionStreamResponse,
    TranscriptionUsageAudio,
    TranscriptionWord,
)
from jaxllm.server.speech.requests import SpeechRequests
from jaxllm.speech.formats import FORMATS, segment_records
from jaxllm.speech.tokens import SpeechTokens, Task
from jaxllm.speech.transcription import Ask, Transcript, Transcription

if TYPE_CHECKING:
    from jaxllm.speech.sound import Sound

_OF_SAMPLING = {"max_tokens": "max_completion_tokens", "extra_args": "vllm_xargs"}


class PlainText(NamedTuple):
    """An answer that is text and no JSON."""

    text: str


type SpeechAnswer = TranscriptionResponse | TranscriptionResponseVerbose | PlainText


class OpenAIServingTranscription:
    """Answers transcriptions and translations with a model that has both tasks."""

    def __init__(self, engine_client: AsyncLLM, models: OpenAIServingModels, args: ServerArgs) -> None:
        """Read the tokenizer. Raises VLLMValidationError if it is not a Whisper's, or without one."""
        ready = engine_client.front.ready
        self.engine_client, self.models, self._args = engine_client, models, args
        media = ready.media
        assert media is not None
        assert media.clips is not None
        self._takes = media.clips
        self._tokens = SpeechTokens.of(engine_client.front.require_tokenizer(), ready.vocab_size)
        self._max_file, seconds, num_bytes = audio_limits()
        self._limits = seconds, num_bytes
        self._connector = MediaConnector(
            allowed_local_media_path=media.allowed_local_media_path,
            allowed_media_domains=media.allowed_media_domains,
        )

    @classmethod
    def of(cls, chat: OpenAIServingChat) -> Self | None:
        """Make one for the model behind `chat`; None if it does not transcribe, or has no tokenizer."""
        front = chat.engine_client.front
        if not front.ready.transcribes or front.tokenizer is None:
            return None
        return cls(chat.engine_client, chat.models, chat.args)

    async def answer(
        self, task: Task, data: bytes, request: TranscriptionRequest, caller: Caller
    ) -> EventStream | SpeechAnswer:
        """Answer a request for the sound in a file's bytes. A stream is returned once its first request is admitted.

        Raises exceptions that `error_response` handles.
        """
        self.models.check(request.model)
        request.check(task)
        options = request.options(self.engine_client.front.ready, task)
        self._tokens.check_language(options.language)
        if len(data) > self._max_file:
            message = f"file: Maximum file size exceeded: {len(data)} bytes, and {self._max_file} are allowed."
            raise RequestFailedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message, param="file")
        sound = await in_media_thread(self._read, data)
        transcription = Transcription(sound, self._tokens, options, self.engine_client.front.ready.max_model_len)
        requests = SpeechRequests(self.engine_client, caller)
        with renamed(_OF_SAMPLING):
            if request.stream:
                return await self._stream(request, task, transcription, requests, caller)
            await requests.finish(transcription)
        return _whole(request, transcription.transcript())

    async def answer_url(
        self, task: Task, request: BatchTranscriptionRequest, caller: Caller
    ) -> EventStream | SpeechAnswer:
        """Answer a request for the sound at its URL. Raises as `answer` does, and for what cannot be fetched."""
        self.models.check(request.model)
        request.check(task)
        data = await in_media_thread(self._connector.fetch, request.file_url, "audio")
        return await self.answer(task, data, request, caller)

    def _read(self, data: bytes) -> Sound:
        from jaxllm.media.audio.blocks import AudioLimits  # this and the next load numpy
        from jaxllm.speech.sound import read_sound

        return read_sound(data, self._takes, AudioLimits(*self._limits))

    async def _stream(
        self,
        request: TranscriptionRequest,
        task: Task,
        transcription: Transcription,
        requests: SpeechRequests,
        caller: Caller,
    ) -> EventStream:
        await requests.find_language(transcription)
        ask = transcription.next_ask()
        assert isinstance(ask, Ask)
        opening = asyncio.create_task(requests.open(ask))
        first = await opening
        chunks = _Chunks(
            caller.shown_id("trsc" if task == "transcribe" else "trsl", None),
            "transcription.chunk" if task == "transcribe" else "translation.chunk",
            self.models.shown(request.model),
            transcription.separator,
            *request.tells_usage(forced=self._args.enable_force_include_usage),
        )

        async def frames() -> AsyncGenerator[bytes, None]:
            async for ping in first.pings(self._args.sse_ping_interval):
                yield ping
            async for output in requests.stream(opening, transcription):
                if frame := chunks.of(output):
                    yield frame
            if end := chunks.end():
                yield end

        return EventStream(frames(), first)


class _Chunks:
    """Makes the events of a stream from the outputs of its clips in order."""

    def __init__(
        self, answer_id: str, kind: str, model: str, separator: str, ends_in_usage: bool, has_usage: bool
    ) -> None:
        self._fixed = {"id": answer_id, "object": kind, "created": int(time.time()), "model": model}
        self._separator, self._ends_in_usage, self._has_usage = separator, ends_in_usage, has_usage
        self._num_prompt_tokens = self._num_tokens = 0
        self._has_text = self._clip_has_text = self._in_clip = False

    def of(self, output: Any) -> bytes:
        """Return the event of an output; b"" for one without text that is not a clip's last."""
        [completion] = output.outputs
        if not self._in_clip:
            self._in_clip, self._clip_has_text = True, False
            self._num_prompt_tokens += len(output.prompt_token_ids or ())
        self._num_tokens += len(completion.token_ids)
        self._in_clip = not output.finished
        text = self._spaced(completion.text)
        if not text and not output.finished:
            return b""
        choice = TranscriptionStreamChoice(
            delta=TranscriptionDelta(content=text),
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
        )
        usage = self._usage() if self._has_usage else UNSET
        return event(TranscriptionStreamResponse(choices=[choice], usage=usage, **self._fixed))

    def end(self) -> bytes:
        """Return the last event, which has the usage; b"" if none is asked for."""
        if not self._ends_in_usage:
            return b""
        return event(TranscriptionStreamResponse(choices=[], usage=self._usage(), **self._fixed))

    def _spaced(self, text: str) -> str:
        """Return new text of a clip, whose first begins with what separates clips in place of white space."""
        if not self._clip_has_text:
            text = text.lstrip()
            if not text:
                return ""
            text = (self._separator if self._has_text else "") + text
            self._has_text = self._clip_has_text = True
        return text

    def _usage(self) -> UsageInfo:
        return make_usage(self._num_prompt_tokens, self._num_tokens)


def _whole(request: TranscriptionRequest, transcript: Transcript) -> SpeechAnswer:
    """Return the answer in the format that is asked for."""
    usage = UNSET
    if transcript.task == "transcribe":
        usage = TranscriptionUsageAudio(seconds=math.ceil(transcript.seconds))
    if request.response_format == "json":
        return TranscriptionResponse(text=transcript.text, usage=usage)
    if request.response_format == "text":
        return PlainText(transcript.text + "\n")
    if request.response_format != "verbose_json":
        return PlainText(FORMATS[request.response_format](transcript))
    segments, words = list[TranscriptionSegment](), list[TranscriptionWord]()
    for record in segment_records(transcript.segments):
        of_segment = record.pop("words", ())
        words += [TranscriptionWord(word=each["word"], start=each["start"], end=each["end"]) for each in of_segment]
        segments.append(TranscriptionSegment(**record))
    asked = request.timestamp_granularities or ["segment"]
    return TranscriptionResponseVerbose(
        task=transcript.task,
        language=transcript.language,
        duration=transcript.seconds,
        text=transcript.text,
        segments=segments if "segment" in asked else None,
        words=words if "word" in asked else None,
        usage=usage,
    )
