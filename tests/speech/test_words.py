"""Words of transcripts: the cheapest way by brute force, and HF's splitting into words."""

# ruff: noqa: RUF001 - marks of Chinese and dashes are meant

from __future__ import annotations

import string

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers.models.whisper.tokenization_whisper import _combine_tokens_into_words

from jaxllm.core_messages import Alignment
from jaxllm.speech.words import TimedToken, find_words, time_tokens, warp

TEXTS = {
    "english": "He said: \"It's well-known\" (isn't it?), and paid $4.50 -- {twice} [sic]!",
    "german": "»Größe«, sagte er, „ist nicht alles“ – oder doch? Übrigens: ja.",
    "french": "« L'été », dit-il ; c'est fini… Où ça ? À l'hôtel !",
    "spanish": "¿Qué pasa? ¡Nada! El niño comió una manzana.",
    "russian": "Привет, как дела? Всё хорошо — спасибо!",
    "arabic": "مرحبا، كيف حالك؟ أنا بخير.",
    "hindi": "नमस्ते, आप कैसे हैं? मैं ठीक हूँ।",
    "chinese": "你好，世界！今天天气很好：我们去公园。“真的？”（是）、是。",
    "japanese": "こんにちは、世界。「元気ですか？」はい！",
    "thai": "สวัสดีครับ วันนี้อากาศดี",
}
MARKS = " \"'“¿([{-.。,，!！?？:：”)]}、—\n"


class Oracle:
    """A tokenizer as HF's functions take one."""

    eos_token_id = 1 << 30

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def decode(self, token_ids: list[int], decode_with_timestamps: bool = False) -> str:
        return self.tokenizer.decode(token_ids)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Return a tokenizer of bytes that has joined some, so that characters are cut."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), ByteDecoder()
    trainer = BpeTrainer(vocab_size=420, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(TEXTS.values(), trainer)
    return tokenizer


def check_words(tokenizer: Tokenizer, token_ids: list[int], language: str) -> int:
    """Compare words, their tokens and their times with HF's; return the number of words."""
    tokens = [TimedToken(token_id, float(i), i + 1.0, i / 1000) for i, token_id in enumerate(token_ids)]
    words, _, places = _combine_tokens_into_words(Oracle(tokenizer), list(token_ids), language)
    ours = find_words(tokens, tokenizer.decode, language)
    assert [(word.word, word.start, word.end) for word in ours] == [
        (text, float(of_word[0]), of_word[-1] + 1.0) for text, of_word in zip(words, places, strict=True)
    ]
    for word, of_word in zip(ours, places, strict=True):
        assert word.probability == pytest.approx(np.mean(of_word) / 1000)
    return len(ours)


@pytest.mark.parametrize("language", TEXTS)
def test_texts_have_the_words_of_hf(tokenizer: Tokenizer, language: str) -> None:
    random = np.random.default_rng()
    assert check_words(tokenizer, tokenizer.encode(" " + TEXTS[language]).ids, language) > 3
    words = TEXTS[language].split()
    for _ in range(30):
        some = [str(random.choice(words)) + str(random.choice(list(MARKS))) for _ in range(20)]
        text = "".join(str(random.choice([" ", ""], p=[0.8, 0.2])) + word for word in some)
        check_words(tokenizer, tokenizer.encode(text).ids, language)


@pytest.mark.parametrize("language", ["english", "chinese"])
def test_any_tokens_have_the_words_of_hf(tokenizer: Tokenizer, language: str) -> None:
    """Most of these are bytes of no characters."""
    random = np.random.default_rng()
    for _ in range(50):
        check_words(tokenizer, random.integers(0, 420, random.integers(1, 40)).tolist(), language)
    check_words(tokenizer, [], language)


def test_words_of_languages_by_code(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode(TEXTS["chinese"]).ids
    tokens = [TimedToken(token_id, 0.0, 0.0, 1.0) for token_id in token_ids]
    for code, name in (("zh", "chinese"), ("en", "english")):
        assert find_words(tokens, tokenizer.decode, code) == find_words(tokens, tokenizer.decode, name)
    assert find_words(tokens, tokenizer.decode, None) == find_words(tokens, tokenizer.decode, "english")


def brute_force(costs: np.ndarray) -> list[int]:
    """Return the first frame of each token, cell by cell."""
    num_tokens, num_frames = costs.shape
    sums = np.full((num_tokens + 1, num_frames + 1), np.inf, np.float32)
    sums[0, 0] = 0
    came_from = {}
    for frame in range(num_frames):
        for token in range(num_tokens):
            both, one_token, one_frame = sums[token, frame], sums[token, frame + 1], sums[token + 1, frame]
            if both < min(one_token, one_frame):
                least, came_from[token, frame] = both, (token - 1, frame - 1)
            elif one_token < min(both, one_frame):
                least, came_from[token, frame] = one_token, (token - 1, frame)
            else:
                least, came_from[token, frame] = one_frame, (token, frame - 1)
            sums[token + 1, frame + 1] = least + costs[token, frame]
    cell, firsts = (num_tokens - 1, num_frames - 1), [0] * num_tokens
    while cell[0] >= 0:
        firsts[cell[0]] = cell[1]
        cell = came_from[cell]
    return firsts


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (9, 1), (7, 7), (5, 40), (40, 5), (33, 60)])
def test_the_cheapest_way_is_that_of_brute_force(shape: tuple[int, int]) -> None:
    random = np.random.default_rng()
    for _ in range(5):
        costs = random.standard_normal(shape).astype(np.float32)
        assert warp(costs).tolist() == brute_force(costs)
        ties = random.integers(-2, 3, shape).astype(np.float32)  # many ways are equally cheap
        assert warp(ties).tolist() == brute_force(ties)


def test_a_clear_way_is_found() -> None:
    firsts = np.sort(np.random.default_rng().choice(np.arange(1, 1500), 447, replace=False))
    bounds = [0, *firsts.tolist(), 1500]
    costs = np.ones((448, 1500), np.float32)
    for token in range(448):
        costs[token, bounds[token] : bounds[token + 1]] = -1
    assert warp(costs).tolist() == bounds[:-1]


def test_tokens_have_times_and_probabilities() -> None:
    heard = np.full((3, 10), -1, np.float32)
    for token, frames in enumerate((slice(0, 2), slice(2, 7), slice(7, 10))):
        heard[token, frames] = 1
    tokens = time_tokens([5, 6, 7], Alignment(heard.tobytes(), [0.0, np.log(0.5), -np.inf]))
    assert [token.token_id for token in tokens] == [5, 6, 7]
    assert [(token.start, token.end) for token in tokens] == [(0.0, 0.0), (0.0, 0.04), (0.04, 0.14)]
    assert [token.probability for token in tokens] == pytest.approx([1.0, 0.5, 0.0])


def test_marks_are_those_of_all_scripts(tokenizer: Tokenizer) -> None:
    for mark in string.punctuation:
        check_words(tokenizer, tokenizer.encode(f" a{mark} b {mark}c{mark}{mark} d {mark} e").ids, "english")
