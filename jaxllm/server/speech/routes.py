"""OpenAI's routes for speech: transcriptions in the language that is spoken, and translations to English."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from starlette.routing import Route

from jaxllm.config.environment import audio_limits
from jaxllm.exceptions import VLLMValidationError
from jaxllm.server.http.decoding import LONG_BODY, decode
from jaxllm.server.http.endpoint import EVENT_STREAM, BodyLimit, Call, ModelEndpoint, Reply, Types
from jaxllm.server.http.forms import Form, read_form
from jaxllm.server.http.model_names import name_in_form
from jaxllm.server.http.sse import EventStream
from jaxllm.server.openai.model_tasks import supported
from jaxllm.server.speech.paths import SPEECH_TASKS
from jaxllm.server.speech.protocol import (
    GRANULARITIES,
    SPEECH_REFUSED,
    TranscriptionForm,
    TranscriptionRequest,
    TranscriptionResponse,
    TranscriptionResponseVerbose,
    TranscriptionStreamResponse,
)
from jaxllm.server.speech.serving import OpenAIServingTranscription, PlainText
from jaxllm.speech.tokens import Task

type Serving = OpenAIServingTranscription | None

_FIELDS_BYTES = 1 << 20
"""The most bytes of a form besides its file."""
_TEXT = b"text/plain; charset=utf-8"


def routes(pick: Callable[[Any], Serving]) -> list[Route]:
    """Return the routes, which any model has: one that does not transcribe refuses their requests. `pick` returns what
    answers for a model.
    """
    form = BodyLimit(audio_limits()[0] + _FIELDS_BYTES, "JAXLLM_MAX_AUDIO_CLIP_FILESIZE_MB")
    answers = TranscriptionResponse, TranscriptionResponseVerbose
    types = Types(answers, TranscriptionForm, TranscriptionStreamResponse, has_text=True)
    options: dict[str, Any] = {"runs_model": True, "names": name_in_form}
    handlers = {"transcribe": answer_transcription, "translate": answer_translation}
    return [
        Route(path, ModelEndpoint(handlers[task], pick, types, form=form, **options), methods=["POST"])
        for path, task in SPEECH_TASKS.items()
    ]


async def answer_transcription(serving: Serving, call: Call) -> Reply:
    """Write what is said in a sound, in its language."""
    return await _answer(supported(serving, "Transcriptions"), call, "transcribe")


async def answer_translation(serving: Serving, call: Call) -> Reply:
    """Write what is said in a sound, in English."""
    return await _answer(supported(serving, "Translations"), call, "translate")


async def _answer(serving: OpenAIServingTranscription, call: Call, task: Task) -> Reply:
    kind = call.headers.get(b"content-type", b"")
    if len(call.body) > LONG_BODY:
        data, request = await asyncio.to_thread(_read, call.body, kind)
    else:
        data, request = _read(call.body, kind)
    answer = await serving.answer(task, data, request, call.caller)
    if isinstance(answer, EventStream):
        return Reply(answer, content_type=EVENT_STREAM)
    return Reply(answer.text.encode(), content_type=_TEXT) if isinstance(answer, PlainText) else Reply.json(answer)


def _read(body: bytes, content_type: bytes) -> tuple[bytes, TranscriptionRequest]:
    """Return the file of a form, and its other fields. Raises VLLMValidationError."""
    form = read_form(body, content_type)
    if "file" not in form.files:
        state = "is text" if "file" in form.fields else "is missing"
        raise VLLMValidationError(f"file {state}: send the sound as a file of the form.", parameter="file")
    if others := form.files.keys() - {"file"}:
        name = min(others)
        raise VLLMValidationError(f"{name[:40]} must not be a file.", parameter=name[:40])
    return form.files["file"], decode(msgspec.json.encode(_values(form)), TranscriptionRequest, SPEECH_REFUSED)


def _values(form: Form) -> Mapping[str, Any]:
    """Return the fields of a form as the values of a JSON object. An empty text counts as left out."""
    values: dict[str, Any] = {name: value for name, value in form.fields.items() if value}
    plain = GRANULARITIES.removesuffix("[]")
    if plain in values:
        values.setdefault(GRANULARITIES, [values.pop(plain)])
    if (arguments := values.get("vllm_xargs")) is not None:
        try:
            values["vllm_xargs"] = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, RecursionError) as error:
            raise VLLMValidationError(f"vllm_xargs must be JSON: {error}.", parameter="vllm_xargs") from error
    return values
