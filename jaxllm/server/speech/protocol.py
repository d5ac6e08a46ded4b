"""The types of transcriptions and translations: the form, the answers, and the events of a stream."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from jaxllm.engine.transport.engine_ready import EngineReady
from jaxllm.exceptions import VLLMValidationError
from jaxllm.params.checks import INT32_MAX, check_float, check_int, shown
from jaxllm.server.openai.usage import UsageInfo
from jaxllm.speech.tokens import Task
from jaxllm.speech.transcription import SpeechOptions

GRANULARITIES = "timestamp_granularities[]"
_NO_BEAMS = "the text is found by sampling; leave it out"
_NO_SPEAKERS = "speakers are not told apart; leave it out"
SPEECH_REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("use_beam_search", "n", "length_penalty"), _NO_BEAMS),
    "include_stop_str_in_output": "no text ends at a stop string; leave it out",
    "hotwords": "put words that are hard to spell into prompt",
    "include[]": "use response_format=verbose_json, whose segments have avg_logprob",
    "chunking_strategy": "long sounds are always cut at quiet places; leave it out",
    **dict.fromkeys(("known_speaker_names[]", "known_speaker_references[]"), _NO_SPEAKERS),
    "watermarking": "outputs have no watermarks; leave it out",
}
"""Fields that are refused: they would change the answer and are not supported."""
BATCH_REFUSED: Mapping[str, str] = {
    **SPEECH_REFUSED,
    "file": "use file_url",
    "timestamp_granularities": f"its name is {GRANULARITIES}",
}
"""The same for a batch file."""
_PLAIN = ("top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
"""The fields that are passed to the engine as they are."""


class TranscriptionRequest(msgspec.Struct, kw_only=True):
    """The fields of `/v1/audio/transcriptions` and `/v1/audio/translations`, besides the file: OpenAI's and vLLM's."""

    model: str | None = None
    language: str | None = None
    """The code of the language that is spoken, such as "en"; by default it is found out."""
    prompt: str = ""
    """The text before the sound, for its style and the spelling of names."""
    response_format: Literal["json", "text", "srt", "vtt", "verbose_json"] = "json"
    timestamp_granularities: list[Literal["word", "segment"]] = msgspec.field(name=GRANULARITIES, default_factory=list)
    """What verbose_json has times of; segments by default."""
    temperature: float = 0.0
    """With 0, parts whose text is bad are tried again at higher temperatures, unless they are streamed."""
    stream: bool = False
    stream_include_usage: bool = False
    stream_continuous_usage_stats: bool = False
    max_completion_tokens: int | None = None
    """The most tokens for 30 seconds."""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    to_language: str | None = None
    """The language of the answer: a translation's is always "en"."""
    vllm_xargs: dict[str, Any] | None = None
    user: str | None = None
    """It has no effect on the answer."""

    def check(self, task: Task) -> None:
        """Check the fields before any work is done. Raises VLLMValidationError."""
        check_float("temperature", self.temperature, 0.0, 2.0)
        if self.max_completion_tokens is not None:
            check_int("max_completion_tokens", self.max_completion_tokens, 1, INT32_MAX)
        for name in ("stream_include_usage", "stream_continuous_usage_stats"):
            if getattr(self, name) and not self.stream:
                raise VLLMValidationError(f"{name} can only be true when stream is true.", parameter=name, value=True)
        if self.stream and self.response_format not in ("json", "text"):
            message = f"response_format={self.response_format} is not streamed: use json or text, or leave stream out."
            raise VLLMValidationError(message, parameter="response_format", value=self.response_format)
        if self.timestamp_granularities and self.response_format != "verbose_json":
            message = f"{GRANULARITIES} needs response_format=verbose_json."
            raise VLLMValidationError(message, parameter=GRANULARITIES, value=self.timestamp_granularities)
        self._check_target(task)

    def options(self, ready: EngineReady, task: Task) -> SpeechOptions:
        """Return how the sound is transcribed, with sampling defaults from `ready`."""
        sampling = {name: value for name, value in ready.default_sampling_params.items() if name in _PLAIN}
        sampling |= {name: getattr(self, name) for name in _PLAIN if getattr(self, name) is not None}
        bounds = [each for each in (self.max_completion_tokens, ready.max_output_tokens) if each is not None]
        return SpeechOptions(
            language=self.language,
            task=task,
            has_timestamps=self.response_format in ("srt", "vtt", "verbose_json"),
            has_words="word" in self.timestamp_granularities,
            prompt=self.prompt,
            temperature=self.temperature,
            is_streamed=self.stream,
            sampling={
                **sampling,
                "seed": self.seed,
                "max_tokens": min(bounds, default=None),
                "extra_args": self.vllm_xargs,
            },
        )

    def tells_usage(self, *, forced: bool) -> tuple[bool, bool]:
        """Return whether a stream ends with the usage, and whether all events have it."""
        is_last = forced or self.stream_include_usage
        return is_last, is_last and self.stream_continuous_usage_stats

    def _check_target(self, task: Task) -> None:
        target = self.to_language
        if task == "transcribe" and target not in (None, "", self.language):
            message = "to_language: a transcription has the sound's language; /v1/audio/translations is for English."
            raise VLLMValidationError(message, parameter="to_language", value=shown(target))
        if task == "translate" and target not in (None, "", "en"):
            message = f"to_language must be 'en', got {shown(target)}: Whisper translates to English alone."
            raise VLLMValidationError(message, parameter="to_language", value=shown(target))


class TranscriptionForm(TranscriptionRequest, kw_only=True):
    """A whole form, as the OpenAPI document has it."""

    file: Annotated[str, msgspec.Meta(extra_json_schema={"format": "binary"})]
    """A WAV, FLAC, Ogg, MP3, MP4, M4A, MOV, WebM or Matroska file."""


class BatchTranscriptionRequest(TranscriptionRequest, kw_only=True):
    """A request in a batch file, as in vLLM."""

    file_url: str
    """The URL of the sound: https:, http:, data: or file:."""


class TranscriptionUsageAudio(msgspec.Struct, frozen=True, kw_only=True):
    """The usage of a transcription."""

    type: Literal["duration"] = "duration"
    seconds: int
    """The sound's length, rounded up."""


class TranscriptionResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The answer in the format json."""

    text: str
    usage: TranscriptionUsageAudio | UnsetType = UNSET
    """A translation has none."""


class TranscriptionWord(msgspec.Struct, frozen=True, kw_only=True):
    """A word with its times in seconds."""

    word: str
    start: float
    end: float


class TranscriptionSegment(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of a transcript with its times in seconds."""

    id: int
    seek: int
    """The beginning of its clip of 30 s, in hundredths of a second."""
    start: float
    end: float
    text: str
    tokens: list[int]
    """The text's tokens, with timestamps around them."""
    temperature: float
    avg_logprob: float
    """The mean log-probability of the tokens of its clip; below -1 the text may be wrong."""
    compression_ratio: float
    """Above 2.4 its clip's text may repeat itself."""
    no_speech_prob: float | None
    """The probability that nobody speaks in its clip."""


class TranscriptionResponseVerbose(msgspec.Struct, frozen=True, kw_only=True):
    """The answer in the format verbose_json."""

    task: Task
    language: str
    duration: float
    text: str
    segments: list[TranscriptionSegment] | None = None
    """None if times of words alone are asked for."""
    words: list[TranscriptionWord] | None = None
    """None unless their times are asked for."""
    usage: TranscriptionUsageAudio | UnsetType = UNSET


class TranscriptionDelta(msgspec.Struct, frozen=True, kw_only=True):
    """New text of a stream."""

    content: str


class TranscriptionStreamChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The new text of an event."""

    delta: TranscriptionDelta
    finish_reason: str | None = None
    """Why the text of a clip has ended."""
    stop_reason: int | str | None = None


class TranscriptionStreamResponse(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a streamed answer."""

    id: str
    object: str
    """"transcription.chunk" or "translation.chunk"."""
    created: int = msgspec.field(default_factory=lambda: int(time.time()))
    model: str
    choices: list[TranscriptionStreamChoice]
    usage: UsageInfo | UnsetType = UNSET
