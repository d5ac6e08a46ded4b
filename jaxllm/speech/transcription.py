"""Transcribe one sound: which requests a model is to run, and what their outputs make up. There is no I/O here.

A caller takes requests from `next_ask`, as many at once as it likes, runs them on an engine, and gives the output of
each to `take`, in any order, until `is_done`. For the times of words an engine is also asked for alignments.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxllm.core_messages import Alignment
from jaxllm.outputs import RequestOutput
from jaxllm.sampling_params import RequestOutputKind, SamplingParams
from jaxllm.speech.segments import Segment, Span, Word, compression_ratio, read_spans
from jaxllm.speech.tokens import SpeechTokens, Task

if TYPE_CHECKING:  # it loads numpy
    from jaxllm.speech.sound import Sound

_TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
"""What a clip is tried at, one after another, until its text is good. These and the next three are OpenAI's."""
_MAX_COMPRESSION = 2.4
_MIN_LOGPROB = -1.0
_MAX_NO_SPEECH = 0.6
_UNSPACED = frozenset(("ja", "yue", "zh"))
"""The languages that are written without spaces between sentences."""


@dataclass(frozen=True, slots=True)
class SpeechOptions:
    """How a sound is transcribed."""

    language: str | None = None
    """The code of the language that is spoken; None to find it out from the first clip."""
    task: Task = "transcribe"
    has_timestamps: bool = False
    """Whether the model divides a clip into segments with times; without, each clip is one."""
    has_words: bool = False
    """Whether words have times too."""
    prompt: str = ""
    """The text before each clip, for its style and the spelling of names."""
    temperature: float = 0.0
    """With 0, a clip whose text is bad is tried again at higher temperatures."""
    is_streamed: bool = False
    """Whether outputs come in pieces with their text. No clip is tried again then, and none is silent."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Other keywords of SamplingParams."""


class Ask(NamedTuple):
    """A request for an engine."""

    number: int
    """Its number among those of the sound."""
    prompt: dict[str, Any]
    params: SamplingParams


class AlignAsk(NamedTuple):
    """What an engine's `align` is to be called with."""

    number: int
    """Its number among the requests of the sound."""
    prompt: dict[str, Any]
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class Transcript:
    """What is said in a sound."""

    language: str
    task: Task
    seconds: float
    segments: list[Segment]
    text: str


@dataclass(frozen=True, slots=True)
class _Try:
    """A request that is to run, or runs."""

    clip: int
    level: int = 0
    """The number of times that the clip has been tried before."""
    finds_language: bool = False


@dataclass(frozen=True, slots=True)
class _Heard:
    """What a request has made of a clip."""

    ids: list[int]
    spans: list[Span]
    text: str
    avg_logprob: float
    no_speech_prob: float | None

    @property
    def is_silent(self) -> bool:
        """Return whether nobody speaks: the model expects that, and is unsure of its text."""
        return (self.no_speech_prob or 0.0) > _MAX_NO_SPEECH and self.avg_logprob <= _MIN_LOGPROB

    @property
    def is_good(self) -> bool:
        """Return whether the text is likely, and does not repeat itself."""
        return compression_ratio(self.text) <= _MAX_COMPRESSION and self.avg_logprob >= _MIN_LOGPROB


@dataclass(frozen=True, slots=True)
class _ToAlign:
    """A clip with its text, whose words are to get their times."""

    attempt: _Try
    heard: _Heard


class Transcription:
    """One sound on its way to text."""

    def __init__(self, sound: Sound, tokens: SpeechTokens, options: SpeechOptions, max_model_len: int) -> None:
        """Begin. Raises VLLMValidationError for options that the model does not have."""
        tokens.check_task(options.task)
        self.language = tokens.check_language(options.language)
        """The language that is spoken; None until it is found out."""
        self._sound, self._tokens, self._options = sound, tokens, options
        self._before = tokens.text_before(options.prompt, max_model_len // 2 - 1)
        self._temperatures = (options.temperature,)
        if options.temperature == 0 and not options.is_streamed:
            self._temperatures = _TEMPERATURES
        first = [_Try(clip) for clip in range(len(sound))] if self.language else [_Try(0, finds_language=True)]
        self._waiting = deque[_Try | _ToAlign](first)
        self._running: dict[int, _Try | _ToAlign] = {}
        self._num_asked = 0
        self._segments: list[list[Segment] | None] = [None] * len(sound)

    @property
    def seconds(self) -> float:
        """Return the length of the sound."""
        return self._sound.seconds

    @property
    def seconds_done(self) -> float:
        """Return the length of the clips that are done."""
        return sum(
            length for length, segments in zip(self._sound.lengths, self._segments, strict=True) if segments is not None
        )

    @property
    def is_done(self) -> bool:
        """Return whether all clips are done."""
        return None not in self._segments

    @property
    def separator(self) -> str:
        """Return what stands between the texts of two clips."""
        return "" if self._options.task == "transcribe" and self.language in _UNSPACED else " "

    def next_ask(self) -> Ask | AlignAsk | None:
        """Return the next request to run; None if there is none before another output is taken."""
        if not self._waiting:
            return None
        work = self._waiting.popleft()
        number = self._num_asked
        self._num_asked += 1
        self._running[number] = work
        if isinstance(work, _ToAlign):
            return AlignAsk(number, self._prompt(work.attempt.clip, self._prompt_ids()), work.heard.ids)
        if work.finds_language:
            return Ask(number, self._prompt(0, [self._tokens.start]), self._language_params())
        ids = self._prompt_ids()
        return Ask(number, self._prompt(work.clip, ids), self._params(work, len(ids)))

    def take(self, number: int, output: RequestOutput | Alignment) -> None:
        """Take the output of a request that has ended well, or what an engine's `align` has returned."""
        attempt = self._running.pop(number)
        if isinstance(attempt, _ToAlign):
            assert isinstance(output, Alignment)
            self._end(attempt.attempt, self._made(attempt.attempt, attempt.heard, self._words(attempt.heard, output)))
            return
        assert isinstance(output, RequestOutput)
        if attempt.finds_language:
            self.language = self._tokens.language_of(output.outputs[0].token_ids[0])
            self._waiting.extend(_Try(clip) for clip in range(len(self._sound)))
            return
        heard = self._read(attempt.clip, output)
        if not (heard.is_good or heard.is_silent or attempt.level + 1 == len(self._temperatures)):
            self._waiting.appendleft(_Try(attempt.clip, attempt.level + 1))
        elif self._options.has_words and heard.spans and not heard.is_silent:
            self._waiting.appendleft(_ToAlign(attempt, heard))
        else:
            self._end(attempt, self._made(attempt, heard, [None] * len(heard.spans)))

    def _end(self, attempt: _Try, segments: list[Segment]) -> None:
        self._segments[attempt.clip] = segments
        self._sound.forget(attempt.clip)

    def transcript(self) -> Transcript:
        """Return the result, once all is done."""
        of_clips = [segments or [] for segments in self._segments]
        texts = ["".join(segment.text for segment in segments).strip() for segments in of_clips]
        return Transcript(
            self.language or "",
            self._options.task,
            self._sound.seconds,
            [segment for segments in of_clips for segment in segments],
            self.separator.join(filter(None, texts)),
        )

    def _prompt_ids(self) -> list[int]:
        """Return the decoder's prompt of a clip."""
        assert self.language is not None
        timed = self._options.has_timestamps
        return self._tokens.prompt(self.language, self._options.task, has_timestamps=timed, before=self._before)

    def _prompt(self, clip: int, ids: list[int]) -> dict[str, Any]:
        return {"prompt_token_ids": ids, "multi_modal_data": {"audio": self._sound.clip(clip)}}

    def _language_params(self) -> SamplingParams:
        ids = list(self._tokens.languages.values())
        return SamplingParams(temperature=0, max_tokens=1, allowed_token_ids=ids, detokenize=False)

    def _params(self, attempt: _Try, num_prompt_tokens: int) -> SamplingParams:
        if self._options.is_streamed:
            kind: dict[str, Any] = {"output_kind": RequestOutputKind.DELTA}
        else:
            # The first token after the start's would be <|nospeech|>.
            start = len(self._before)
            num_rows = num_prompt_tokens - 1 - start
            scored = [[self._tokens.no_speech], *[[-1]] * (num_rows - 1)]
            kind = {"output_kind": RequestOutputKind.FINAL_ONLY, "detokenize": False, "logprobs": 0}
            if num_rows:
                kind |= {"prompt_logprob_token_ids": scored, "prompt_logprob_start": start}
        temperature = self._temperatures[attempt.level]
        return SamplingParams(**{"max_tokens": None, **self._options.sampling, "temperature": temperature, **kind})

    def _read(self, clip: int, output: RequestOutput) -> _Heard:
        [completion] = output.outputs
        ids = list(completion.token_ids)
        mean = (completion.cumulative_logprob or 0.0) / max(1, len(ids))
        if ids and ids[-1] == self._tokens.end:
            ids.pop()
        scored = output.prompt_token_id_logprobs
        no_speech = None if scored is None else math.exp(float(scored[0][0]))
        return _Heard(ids, self._spans(clip, ids), self._tokens.text(ids).strip(), mean, no_speech)

    def _spans(self, clip: int, ids: list[int]) -> list[Span]:
        length = self._sound.lengths[clip]
        if self._options.has_timestamps:
            return read_spans(ids, self._tokens, length)
        return [Span(0.0, length, ids, 0)] if self._tokens.text(ids).strip() else []

    def _words(self, heard: _Heard, alignment: Alignment) -> list[list[Word] | None]:
        """Return the words of each piece of a clip, with times from the clip's beginning."""
        from jaxllm.speech.words import find_words, time_tokens  # which loads numpy

        timed = time_tokens(heard.ids, alignment)
        language = "en" if self._options.task == "translate" else self.language
        words = list[list[Word] | None]()
        for span in heard.spans:
            tokens = [token for token in timed[span.first :][: len(span.ids)] if token.token_id < self._tokens.end]
            words.append(find_words(tokens, self._tokens.text, language))
        return words

    def _made(self, attempt: _Try, heard: _Heard, words: list[list[Word] | None]) -> list[Segment]:
        """Return the segments of a clip, with their words if there are some; no segments if it is silent."""
        if heard.is_silent:
            return []
        start = self._sound.starts[attempt.clip]
        return [
            Segment(
                start=start + span.start,
                end=start + span.end,
                text=self._tokens.text(span.ids),
                token_ids=span.ids,
                clip_start=start,
                temperature=self._temperatures[attempt.level],
                avg_logprob=heard.avg_logprob,
                compression_ratio=compression_ratio(heard.text),
                no_speech_prob=heard.no_speech_prob,
                words=of_span and [word._replace(start=start + word.start, end=start + word.end) for word in of_span],
            )
            for span, of_span in zip(heard.spans, words, strict=True)
        ]
