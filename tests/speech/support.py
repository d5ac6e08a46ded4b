"""A tokenizer with a Whisper's special tokens, sounds, and an engine that answers by a script."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from jaxllm.core_messages import Alignment
from jaxllm.logprobs import Logprob
from jaxllm.outputs import CompletionOutput, RequestOutput
from jaxllm.sampling_params import SamplingParams
from jaxllm.speech.sound import Sound
from jaxllm.speech.tokens import SpeechTokens
from jaxllm.speech.transcription import AlignAsk, Ask, SpeechOptions, Transcript, Transcription
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.text.tokenizer_parts import TokenizerParts

RATE = 16_000
MAX_LEN = 448
MULTILINGUAL, ENGLISH = 51_865, 51_864
SPECIALS = (
    *("<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|ja|>", "<|translate|>", "<|transcribe|>"),
    *("<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"),
)


def make_tokenizer() -> Tokenizer:
    """Return a tokenizer of 256 bytes and a Whisper's special tokens, which begin at 256."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    return Tokenizer(TokenizerParts(backend.to_str().encode(), eos_token_id=256), lambda: None)  # type: ignore[arg-type, return-value]


def make_tokens(vocab_size: int = MULTILINGUAL) -> SpeechTokens:
    """Return what that tokenizer says."""
    return SpeechTokens.of(make_tokenizer(), vocab_size)


def spell(tokens: SpeechTokens, *parts: str | float) -> list[int]:
    """Return token ids: those of texts, and timestamps of numbers."""
    ids: list[int] = []
    for part in parts:
        if isinstance(part, str):
            ids += tokens.tokenizer.encode([part], add_special_tokens=False)[0]
        else:
            ids.append(tokens.first_timestamp + round(part / 0.02))
    return ids


def noise(seconds: float) -> np.ndarray:
    """Return random samples, float32 [n]."""
    return np.random.default_rng().uniform(-0.5, 0.5, round(seconds * RATE)).astype(np.float32)


class Said(NamedTuple):
    """What a model makes of a clip."""

    ids: Sequence[int]
    mean: float = -0.2
    """The mean log-probability of its tokens."""
    no_speech: float = 0.1
    ends: bool = True
    """Whether the end's token comes last."""


type Script = Callable[[int, float], Said]
"""What a model makes of a clip, by its number and the temperature."""


class FakeEngine:
    """Answers requests in random order, some at a time, and looks at each."""

    def __init__(self, tokens: SpeechTokens, script: Script, language: str = "en") -> None:
        self.tokens, self.script, self.language = tokens, script, language
        self.asked: list[Ask | AlignAsk] = []
        self.tried: list[tuple[int, float]] = []
        """The clip and the temperature of each request but that for the language."""
        self.most = random.randint(1, 6)

    def run(self, sound: Sound, options: SpeechOptions) -> Transcript:
        """Transcribe a sound."""
        clips = [sound.clip(i)[0].tobytes() for i in range(len(sound))]
        transcription = Transcription(sound, self.tokens, options, MAX_LEN)
        waiting: list[Ask | AlignAsk] = []
        while not transcription.is_done:
            while len(waiting) < self.most and (ask := transcription.next_ask()) is not None:
                waiting.append(ask)
            ask = waiting.pop(random.randrange(len(waiting)))
            self.asked.append(ask)
            samples, rate = ask.prompt["multi_modal_data"]["audio"]
            assert rate == RATE
            clip = clips.index(samples.tobytes())
            if isinstance(ask, AlignAsk):
                assert ask.prompt["prompt_token_ids"][0] == self.tokens.start
                transcription.take(ask.number, make_alignment(len(ask.token_ids)))
            else:
                transcription.take(ask.number, self._answer(ask, clip))
        assert not waiting
        assert transcription.next_ask() is None
        assert transcription.seconds_done == sum(sound.lengths)
        return transcription.transcript()

    def _answer(self, ask: Ask, clip: int) -> RequestOutput:
        ids, params = ask.prompt["prompt_token_ids"], ask.params
        if params.allowed_token_ids is not None:
            assert ids == [self.tokens.start]
            assert params.max_tokens == 1
            assert sorted(params.allowed_token_ids) == sorted(self.tokens.languages.values())
            return make_output([self.tokens.languages[self.language]], 0.0, None)
        assert params.temperature is not None
        self.tried.append((clip, params.temperature))
        said = self.script(clip, params.temperature)
        scored = self._scored(ids, params, said.no_speech)
        return make_output([*said.ids, *([self.tokens.end] if said.ends else [])], said.mean, scored)

    def _scored(self, ids: Sequence[int], params: SamplingParams, no_speech: float) -> np.ndarray | None:
        """Return the scores that the engine would give: a row for each token after `prompt_logprob_start`."""
        rows = params.prompt_logprob_token_ids
        if rows is None:
            return None
        start = params.prompt_logprob_start or 0
        assert ids[start] == self.tokens.start
        assert len(rows) == len(ids) - 1 - start
        assert rows[0] == [self.tokens.no_speech]
        return np.array([[np.log(no_speech)], *[[-np.inf]] * (len(rows) - 1)], np.float32)


def make_alignment(num_tokens: int) -> Alignment:
    """Return what says that each token is heard for a tenth of a second, and has a probability of a half."""
    heard = np.repeat(np.eye(num_tokens, dtype=np.float32), 5, axis=1)
    return Alignment(heard.tobytes(), [float(np.log(0.5))] * num_tokens)


def make_output(ids: list[int], mean: float, scored: np.ndarray | None) -> RequestOutput:
    """Return a finished output of tokens with a mean log-probability."""
    completion: Any = CompletionOutput(0, "", ids, mean * len(ids), [{i: Logprob(mean)} for i in ids], "stop")
    output = RequestOutput("", None, [], None, [completion], True)
    output.prompt_token_id_logprobs = scored
    return output
