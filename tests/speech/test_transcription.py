"""A transcription asks for the right requests, and makes the right of their outputs, in whatever order they come."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest

from jaxllm.exceptions import VLLMValidationError
from jaxllm.media.audio.blocks import AudioLimits
from jaxllm.media.errors import MediaError
from jaxllm.media.items import ClipInput
from jaxllm.speech.sound import Sound, read_sound
from jaxllm.speech.transcription import AlignAsk, Ask, SpeechOptions, Transcription
from tests.media.sounds import encode
from tests.speech.support import (
    ENGLISH,
    MAX_LEN,
    RATE,
    FakeEngine,
    Said,
    Script,
    make_tokens,
    noise,
    spell,
)

TOKENS = make_tokens()
ENGLISH_TOKENS = make_tokens(ENGLISH)
TIMED = SpeechOptions(language="en", has_timestamps=True)
PLAIN = SpeechOptions(language="en")


def says(*texts: str) -> Script:
    """Return the script of a model that hears these texts in the clips."""
    return lambda clip, temperature: Said(spell(TOKENS, f" {texts[clip]}"))


def long_sound(num_clips: int) -> Sound:
    """Return a sound that is cut into a number of clips of random lengths."""
    sound = Sound(noise(29.5 * num_clips - random.uniform(1, 10)), 30)
    assert len(sound) == num_clips
    return sound


def test_texts_come_in_the_clips_order() -> None:
    texts = [f"clip {i} is {random.random()}" for i in range(random.randint(2, 7))]
    sound = long_sound(len(texts))
    transcript = FakeEngine(TOKENS, says(*texts)).run(sound, PLAIN)
    assert transcript.text == " ".join(texts)
    assert [segment.text for segment in transcript.segments] == [f" {text}" for text in texts]
    assert [segment.start for segment in transcript.segments] == sound.starts
    assert transcript.segments[-1].end == pytest.approx(sound.seconds)
    assert transcript.seconds == sound.seconds


def test_words_have_times_of_the_whole_sound() -> None:
    """A token is a letter, and is heard for a tenth of a second."""
    parts = [(0.0, " Ab c.", 2.0, 2.0, " de", 4.0), (0.0, " f", 1.0)]
    sound = long_sound(len(parts))
    options = dataclasses.replace(TIMED, has_words=True)
    engine = FakeEngine(TOKENS, lambda clip, temperature: Said(spell(TOKENS, *parts[clip])))
    transcript = engine.run(sound, options)
    words = [word for segment in transcript.segments for word in segment.words or []]
    assert [word.word for word in words] == [" Ab", " c.", " de", " f"]
    second = sound.starts[1]
    times = [(0.0, 0.3), (0.3, 0.6), (0.8, 1.1), (second, second + 0.2)]
    of_words = [time for word in words for time in (word.start, word.end)]
    assert of_words == pytest.approx([time for pair in times for time in pair], abs=0.021)
    assert {round(word.probability, 6) for word in words} == {0.5}


def test_words_of_texts_without_speech_are_not_asked_for() -> None:
    options = dataclasses.replace(TIMED, has_words=True)
    engine = FakeEngine(TOKENS, lambda clip, temperature: Said(spell(TOKENS, 0.0, " hm", 1.0), -2.0, 0.9))
    assert engine.run(Sound(noise(5), 30), options).segments == []
    assert not any(isinstance(ask, AlignAsk) for ask in engine.asked)


def test_clips_are_all_of_the_sound() -> None:
    samples = np.round(noise(random.uniform(40, 100)) * 32_767) / 32_768  # what a file of 16 bits has
    sound = Sound(samples.astype(np.float32), 30)
    np.testing.assert_array_equal(np.concatenate([sound.clip(i)[0] for i in range(len(sound))]), samples)
    assert sound.starts == pytest.approx(np.cumsum([0, *sound.lengths])[:-1])


def test_loud_sounds_keep_their_form() -> None:
    samples = 7 * noise(3)
    np.testing.assert_allclose(Sound(samples, 30).clip(0)[0], samples, rtol=0, atol=7 / 32_768)


def test_a_last_clip_may_be_short() -> None:
    for extra in (1, 100, 1_600, 16_000):
        sound = Sound(noise(30 + extra / RATE), 30)
        assert len(sound) == 2
        assert sound.lengths[-1] > 0.2
    assert len(Sound(noise(30), 30)) == 1


def test_a_language_is_asked_for_first_and_once() -> None:
    engine = FakeEngine(TOKENS, says("a", "b", "c"), language="de")
    transcript = engine.run(long_sound(3), SpeechOptions())
    assert transcript.language == "de"
    first, *others = engine.asked
    assert first.prompt["prompt_token_ids"] == [TOKENS.start]
    expected = [TOKENS.start, TOKENS.languages["de"], TOKENS.tasks["transcribe"], TOKENS.no_timestamps]
    assert [ask.prompt["prompt_token_ids"] for ask in others] == [expected] * 3


def test_nothing_else_is_asked_before_the_language_is_known() -> None:
    transcription = Transcription(long_sound(2), TOKENS, SpeechOptions(), MAX_LEN)
    assert transcription.next_ask() is not None
    assert transcription.next_ask() is None


@pytest.mark.parametrize("timed", [False, True])
def test_prompts_have_text_language_task_and_timestamps(timed: bool) -> None:
    engine = FakeEngine(TOKENS, says("a"))
    options = SpeechOptions("de", "translate", has_timestamps=timed, prompt="  Jax and Flax ")
    engine.run(Sound(noise(2), 30), options)
    [ask] = engine.asked
    before = [TOKENS.previous, *spell(TOKENS, " Jax and Flax")]
    expected = [*before, TOKENS.start, TOKENS.languages["de"], TOKENS.tasks["translate"]]
    assert ask.prompt["prompt_token_ids"] == (expected if timed else [*expected, TOKENS.no_timestamps])


def test_of_a_long_prompt_the_end_counts() -> None:
    text = "".join(random.choices("abc ", k=3_000)) + "end"
    engine = FakeEngine(TOKENS, says("a"))
    engine.run(Sound(noise(2), 30), dataclasses.replace(PLAIN, prompt=text))
    ids = engine.asked[0].prompt["prompt_token_ids"]
    assert ids[: MAX_LEN // 2] == [TOKENS.previous, *spell(TOKENS, text)[-(MAX_LEN // 2 - 1) :]]
    assert ids[MAX_LEN // 2] == TOKENS.start


def test_an_english_model_gets_neither_language_nor_task() -> None:
    engine = FakeEngine(ENGLISH_TOKENS, says("a"))
    transcript = engine.run(Sound(noise(2), 30), SpeechOptions())
    assert transcript.language == "en"
    assert [ask.prompt["prompt_token_ids"] for ask in engine.asked] == [[TOKENS.start, TOKENS.no_timestamps]]
    engine = FakeEngine(ENGLISH_TOKENS, lambda clip, temperature: Said(spell(TOKENS, 0.0, " a", 1.0)))
    assert engine.run(Sound(noise(2), 30), TIMED).segments[0].no_speech_prob is None


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (SpeechOptions("xx"), "language must be one of de, en, ja, got 'xx'"),
        (SpeechOptions("en", prompt="a <|startoftranscript|> b"), "prompt must be text without special tokens"),
    ],
)
def test_wrong_options_are_refused(options: SpeechOptions, named: str) -> None:
    with pytest.raises(VLLMValidationError, match=named):
        Transcription(Sound(noise(1), 30), TOKENS, options, MAX_LEN)


def test_an_english_model_refuses_other_languages_and_translations() -> None:
    for options in (SpeechOptions("de"), SpeechOptions(task="translate")):
        with pytest.raises(VLLMValidationError):
            Transcription(Sound(noise(1), 30), ENGLISH_TOKENS, options, MAX_LEN)


def test_bad_text_is_tried_again_at_higher_temperatures() -> None:
    """One clip repeats itself up to 0.4, and the other is unlikely up to 0.2."""
    repeated, good = spell(TOKENS, " no" * 100), spell(TOKENS, " The quick brown fox.")

    def script(clip: int, temperature: float) -> Said:
        if clip == 0:
            return Said(repeated if temperature <= 0.4 else good)
        return Said(good, mean=-1.2 if temperature <= 0.2 else -0.9)

    engine = FakeEngine(TOKENS, script)
    transcript = engine.run(long_sound(2), PLAIN)
    assert sorted(engine.tried) == [(0, 0.0), (0, 0.2), (0, 0.4), (0, 0.6), (1, 0.0), (1, 0.2), (1, 0.4)]
    assert [segment.temperature for segment in transcript.segments] == [0.6, 0.4]
    assert transcript.text == "The quick brown fox. The quick brown fox."


def test_the_last_try_counts_whatever_it_says() -> None:
    engine = FakeEngine(TOKENS, lambda clip, temperature: Said(spell(TOKENS, " oh"), mean=-3 + temperature))
    transcript = engine.run(Sound(noise(2), 30), PLAIN)
    assert [temperature for _, temperature in engine.tried] == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert (transcript.text, transcript.segments[0].avg_logprob) == ("oh", pytest.approx(-2))


def test_a_given_temperature_is_the_only_one() -> None:
    engine = FakeEngine(TOKENS, lambda clip, temperature: Said(spell(TOKENS, " oh"), mean=-3))
    assert engine.run(Sound(noise(2), 30), dataclasses.replace(PLAIN, temperature=0.3)).text == "oh"
    assert engine.tried == [(0, 0.3)]


def test_a_clip_without_speech_has_no_text_and_is_not_tried_again() -> None:
    """Its text is unlikely, and no speech is likely: both have to be."""

    def script(clip: int, temperature: float) -> Said:
        return Said(spell(TOKENS, f" {clip}"), mean=(-1.5, -1.5, -0.5)[clip], no_speech=(0.7, 0.5, 0.9)[clip])

    engine = FakeEngine(TOKENS, script)
    transcript = engine.run(long_sound(3), PLAIN)
    assert transcript.text == "1 2"
    assert sorted(clip for clip, _ in engine.tried) == [0, 1, 1, 1, 1, 1, 1, 2]
    assert transcript.segments[-1].no_speech_prob == pytest.approx(0.9)


def test_silence_makes_an_empty_transcript() -> None:
    engine = FakeEngine(TOKENS, lambda clip, temperature: Said([], mean=-0.1))
    transcript = engine.run(long_sound(2), TIMED)
    assert (transcript.text, transcript.segments) == ("", [])


def test_timestamps_divide_clips_into_segments() -> None:
    def script(clip: int, temperature: float) -> Said:
        ids = spell(TOKENS, 0.0, f" one {clip}.", 2.5, 3.0, " two.", 7.48)
        return Said(ids)

    sound = long_sound(2)
    transcript = FakeEngine(TOKENS, script).run(sound, TIMED)
    pieces = [(segment.start, segment.end, segment.text) for segment in transcript.segments]
    second = sound.starts[1]
    assert pieces == [
        (0.0, 2.5, " one 0."),
        (3.0, 7.48, " two."),
        (second, second + 2.5, " one 1."),
        (second + 3.0, second + 7.48, " two."),
    ]
    assert transcript.segments[1].token_ids == spell(TOKENS, 3.0, " two.", 7.48)
    assert {segment.clip_start for segment in transcript.segments} == {0.0, second}
    assert transcript.text == "one 0. two. one 1. two."


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ((0.0, " a", 2.0, 2.0, " b"), [(0, 2, " a"), (2, 10, " b")]),  # cut off before the last timestamp
        ((" a", 2.0, " b", 4.0), [(0, 2, " a"), (2, 4, " b")]),  # no timestamp at the beginning of either
        ((1.0, 3.0, " a", 4.0), [(3, 4, " a")]),
        ((0.0, " a", 4.0, 9.0), [(0, 4, " a")]),
        ((0.0, " a", 4.0, 4.0, " ", 6.0), [(0, 4, " a")]),  # no text
        ((0.0, " a", 4.0, 10.5, " b", 29.98), [(0, 4, " a")]),  # in the silence after the clip
        ((0.0, " a", 29.98), [(0, 10, " a")]),
        ((5.0, " a", 5.0, 6.0, " b", 7.0), [(6, 7, " b")]),  # lasts no time
        ((), []),
        ((0.0,), []),
    ],
)
def test_ragged_timestamps(parts: tuple[str | float, ...], expected: list[tuple[float, float, str]]) -> None:
    """A clip of 10 s; the end's token may be missing."""
    ids = spell(TOKENS, *parts)
    engine = FakeEngine(TOKENS, lambda clip, temperature: Said(ids, ends=random.random() < 0.5))
    transcript = engine.run(Sound(noise(10), 30), TIMED)
    assert [(segment.start, segment.end, segment.text) for segment in transcript.segments] == expected


def test_japanese_is_joined_without_spaces_but_its_translation_is() -> None:
    for task, expected in (("transcribe", "今日は。元気。"), ("translate", "今日は。 元気。")):
        engine = FakeEngine(TOKENS, says("今日は。", "元気。"))
        assert engine.run(long_sound(2), SpeechOptions("ja", task)).text == expected  # type: ignore[arg-type]


def test_sampling_reaches_the_engine() -> None:
    engine = FakeEngine(TOKENS, says("a"))
    options = dataclasses.replace(PLAIN, temperature=0.5, sampling={"top_k": 7, "seed": 3, "max_tokens": 11})
    engine.run(Sound(noise(1), 30), options)
    [ask] = engine.asked
    assert isinstance(ask, Ask)
    params = ask.params
    assert (params.top_k, params.seed, params.max_tokens) == (7, 3, 11)


def test_a_file_is_decoded_at_any_rate() -> None:
    samples = noise(2)[:, None]
    sound = read_sound(
        encode(samples, 8_000), ClipInput(num_mels=80, num_frames=1_500, start_token_id=1), AudioLimits()
    )
    assert (len(sound), sound.seconds) == (1, pytest.approx(4, abs=0.01))


@pytest.mark.parametrize(
    ("data", "limits", "named"),
    [
        (b"", AudioLimits(), "file: the audio is not a WAV"),
        (b"RIFF", AudioLimits(), "file: the audio cannot be decoded"),
        (encode(noise(0.005)[:, None], RATE), AudioLimits(), "file: the audio has less than 0.01 s"),
        (encode(noise(2)[:, None], RATE), AudioLimits(1), "file: the audio is longer than 1 s"),
    ],
)
def test_files_that_cannot_be_read_are_refused(data: bytes, limits: AudioLimits, named: str) -> None:
    with pytest.raises(MediaError, match=named) as caught:
        read_sound(data, ClipInput(num_mels=80, num_frames=1_500, start_token_id=1), limits)
    assert caught.value.parameter == "file"
