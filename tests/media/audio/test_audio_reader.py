"""A prompt's sounds become the items and the token ids that HF's processors make, or are refused by position."""

from __future__ import annotations

import base64
from functools import cache
from typing import Any

import numpy as np
import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2AudioProcessor, WhisperFeatureExtractor

from jaxllm.core_messages import MediaItem
from jaxllm.exceptions import VLLMValidationError
from jaxllm.media.audio.processor import WhisperProcessor
from jaxllm.media.content_parts import read_media_part
from jaxllm.media.errors import MediaError
from jaxllm.media.items import MediaPart, MediaSettings
from jaxllm.media.reader import MediaReader
from jaxllm.media.rules import Clips, find_rule
from tests.media.sounds import encode, film, tones, wav
from tests.media.support import DATA, ByteTokenizer

RATE = 16_000
MARK = "<|AUDIO|>"
EXTRACTOR = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 128, "chunk_length": 4}
TEXT = f"What is <|audio_bos|>{MARK}<|audio_eos|>?"


@cache
def backend() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer.from_file(str(DATA / "tokenizer.json"))
    made.add_special_tokens([MARK, "<|audio_bos|>", "<|audio_eos|>"])
    return made


def make_reader(**others: Any) -> MediaReader:
    tokenizer = ByteTokenizer()
    tokenizer.backend = backend()
    settings = MediaSettings(
        audio_placeholder=MARK, audio_processor=EXTRACTOR, config={"model_type": "qwen2_audio"}, **others
    )
    return MediaReader(settings, tokenizer)


@cache
def reader() -> MediaReader:
    return make_reader()


def part(source: Any, number: int = 0, uuid: str | None = None) -> MediaPart:
    return MediaPart("audio", source, uuid, f"multi_modal_data['audio'][{number}]")


def read(*sources: Any) -> tuple[list[int], list[MediaItem]]:
    parts = [part(source, number) for number, source in enumerate(sources)]
    ids, media = reader().read(TEXT * len(parts), parts)
    return ids, media.items


def sound(num_samples: int) -> np.ndarray:
    return np.random.default_rng().standard_normal(num_samples).astype(np.float32)


@pytest.mark.parametrize("num_samples", [481, 641, 800, 16_000, 33_333, 64_000])
def test_items_and_ids_are_those_of_the_models_processor(num_samples: int):
    extractor = WhisperFeatureExtractor(feature_size=128, chunk_length=4)
    processor: Any = Qwen2AudioProcessor(extractor, PreTrainedTokenizerFast(tokenizer_object=backend()))
    samples = sound(num_samples)
    expected = processor(text=[TEXT], audio=[samples], sampling_rate=RATE, return_tensors="np")
    ids, [item] = read((samples, RATE))
    assert ids == expected["input_ids"][0].tolist()
    frames = min(200, -(-num_samples // 320) + 1)
    assert (item.modality, item.grids, item.size) == ("audio", [(1, 1, frames)], (1, num_samples))
    columns = np.frombuffer(item.patches, np.float32).reshape(2 * frames, 128)
    np.testing.assert_allclose(columns, expected["input_features"][0].T[: 2 * frames], rtol=0, atol=1e-6)
    [span] = item.spans
    row = backend().token_to_id(MARK)
    assert row is not None
    assert ids[span.offset :][: span.num_rows] == [row] * span.num_rows
    assert ids.count(row) == span.num_rows


@pytest.mark.parametrize("seconds", [0.001, 1, 3.99999, 4, 4.0001, 9.3])
def test_clips_are_those_of_voxtrals_processor(seconds: float):
    """It makes features of a sound that silence fills up to whole clips, and cuts these apart; the first is loudest."""
    samples = sound(int(seconds * RATE))
    samples[4 * RATE :] /= 1000
    extractor = WhisperFeatureExtractor(feature_size=128, chunk_length=4)
    settings: Any = {"padding": True, "truncation": False, "pad_to_multiple_of": 4 * RATE, "return_tensors": "np"}
    expected = extractor(samples, sampling_rate=RATE, **settings)["input_features"][0]
    item = WhisperProcessor(EXTRACTOR, Clips(are_several=True, are_whole=True)).process(samples)
    assert (item.grids, item.size) == (((1, 1, 200),) * (expected.shape[1] // 400), (1, len(samples)))
    np.testing.assert_allclose(item.patches.reshape(-1, 128), expected.T, rtol=0, atol=1e-6)


ENDS = {"qwen3_asr": ({}, 8000, [100, 104]), "ultravox": ({"pad_to_multiple_of": 160}, 320, [400, 400])}
"""How HF's processors fill up sounds, their least samples, and the columns that become whole frames, with padding."""


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("num_samples", [100, 5000, 8000, 16_000, 33_333, 64_000, 130_123])
def test_columns_are_followed_by_zeros(name: str, num_samples: int):
    """They are those of HF's extractor, of the sound alone."""
    settings, least, (columns, padded) = ENDS[name]
    samples, config = sound(num_samples), {"model_type": name, "audio_config": {"n_window_infer": 100}}
    filled = np.pad(samples, (0, max(0, least - num_samples)))
    extractor = WhisperFeatureExtractor(feature_size=128)
    options: Any = {"padding": "longest", "truncation": False, "return_tensors": "np", **settings}
    expected = extractor(filled, sampling_rate=RATE, **options)["input_features"][0].T
    item = WhisperProcessor(EXTRACTOR, find_rule(config).clips).process(samples)
    frame = 8 if name == "qwen3_asr" else 2
    parts = [expected[start : start + columns] for start in range(0, len(expected), columns)]
    parts = [np.pad(part, ((0, min(padded - len(part), -len(part) % frame)), (0, 0))) for part in parts]
    np.testing.assert_allclose(item.patches.reshape(-1, 128), np.concatenate(parts), rtol=0, atol=1e-6)
    assert {grid[2] for grid in item.grids[:-1]} <= {52 if name == "qwen3_asr" else 200}


def test_a_sound_may_grow_by_a_sample_when_it_is_resampled():
    _, [item] = read((np.full(4 * 44_099, 0.1), 44_099))
    assert item.size == (1, 4 * RATE)


def test_one_sound_in_many_forms_is_one_item():
    samples = tones(0.5, RATE)
    data = encode(samples, RATE, "WAV", "FLOAT")
    form = {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": "wav"}}
    url = {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{base64.b64encode(data).decode()}"}}
    parts = [read_media_part(each, "messages[0]['content'][0]") for each in (form, url)]
    _, items = read(samples[:, 0], (samples.T, RATE), data, *(each.source for each in parts))
    assert len({item.key for item in items}) == 1
    assert len({item.patches for item in items}) == 1


def test_a_sound_that_is_known_by_its_name_comes_once():
    made = make_reader()
    first, again = (made.read(TEXT, [part(source, uuid="bee")])[1].items for source in (sound(4000), None))
    assert first[0].key == again[0].key
    with pytest.raises(MediaError, match="no item is cached under the uuid 'wasp'"):
        made.read(TEXT, [part(None, uuid="wasp")])


LONG = (np.zeros((4 * RATE + 1,)), RATE)
REFUSED = {
    "a text": (b"a text, renamed to a.wav", "is not a WAV, FLAC, Ogg"),
    "a picture": (b"\x89PNG\r\n\x1a\n", "is not a WAV, FLAC, Ogg"),
    "an ended file": (encode(tones(0.5, RATE), RATE)[:-100], "ends before its header says"),
    "no samples": (wav(b""), "has no samples"),
    "no numbers": (np.full(1000, np.nan), "infinite or not a number"),
    "integers": (np.zeros(1000, np.int16), "must be floats from -1 to 1, not int16"),
    "nine channels": ((np.zeros((9, 1000)), RATE), "at most 8 channels"),
    "a rate of none": ((np.zeros(1000), 0), "has 0 samples a second"),
    "more than the clip": (LONG, "is longer than 4 s"),
    "hours in little": (encode(np.zeros((3600 * 8000, 1), np.int16), 8000, "FLAC"), "is longer than 4 s"),
    "one sample": (sound(1), "has 1 samples, which are too few for a token"),
    "a film without sound": (film(), "the file has no audio in it"),
    "a URL that is none": ("data:audio;base64,???", "does not hold valid base64"),
    "26 MB": ("data:audio;base64," + "A" * (35 << 20), "larger than|more than"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_is_named_by_its_position(case: str):
    source, message = REFUSED[case]
    with pytest.raises(MediaError, match=message) as caught:
        read((sound(4000), RATE), source)
    assert str(caught.value).startswith("multi_modal_data['audio'][1]: ")
    assert caught.value.parameter == "multi_modal_data"


def test_tokens_are_counted_before_features_exist(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(WhisperProcessor, "process", None)
    parts = [part(sound(4 * RATE))]
    with pytest.raises(MediaError, match="take 100 tokens or more, and max_model_len is 99"):
        make_reader(max_model_len=99).read(TEXT, parts)
    with pytest.raises(MediaError, match=r"the audio takes 100 tokens.* at most 99 at once: send a shorter one"):
        make_reader(most_rows=99).read(TEXT, parts)


def test_sounds_have_no_options():
    with pytest.raises(VLLMValidationError, match="mm_processor_kwargs are options of images and videos") as caught:
        reader().read(TEXT, [part(sound(4000))], {"max_pixels": 3})
    assert caught.value.parameter == "mm_processor_kwargs"


@pytest.mark.parametrize("prompt", ["a", TEXT * 2, [1, 2]])
def test_placeholders_are_counted(prompt: Any):
    with pytest.raises(VLLMValidationError, match=r"placeholders .* for audios, but multi_modal_data has 1"):
        reader().read(prompt, [part(sound(4000))])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"feature_extractor_type": "Gemma4AudioFeatureExtractor"}, "'Gemma4AudioFeatureExtractor'"),
        ({"feature_extractor_type": None}, "None"),
        ({"sampling_rate": 24_000}, "with sampling_rate 24000"),
        ({"hop_length": 128}, "with hop_length 128"),
        ({"dither": 0.1}, "with dither 0.1"),
    ],
)
def test_other_feature_extractors_are_refused(change: dict[str, Any], match: str):
    with pytest.raises(VLLMValidationError, match=f"feature_extractor_type is .*{match}.*Whisper's and"):
        WhisperProcessor({**EXTRACTOR, **change}, Clips())
