"""Data sets have the prompts, of the lengths, that the flags say."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest

from jaxllm.cli.bench.datasets import Sample, add_dataset_flags, make_samples
from jaxllm.exceptions import VLLMValidationError
from jaxllm.text.tokenizer import Tokenizer, load_named_tokenizer
from jaxllm.utils.argparse_utils import FlexibleArgumentParser


@pytest.fixture(scope="module")
def tiny(tokenizer: str, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_named_tokenizer(tokenizer, str(tmp_path_factory.mktemp("cache")))


def flags(*words: str, seed: int = 0) -> Namespace:
    parser = FlexibleArgumentParser()
    add_dataset_flags(parser)
    return parser.parse_args(words, Namespace(seed=seed))


def num_tokens(tokenizer: Tokenizer, sample: Sample) -> int:
    return len(tokenizer.encode([sample.prompt], add_special_tokens=False)[0])


def test_random_prompts_have_their_length(tiny: Tokenizer):
    args = flags("--random-input-len", "20", "--random-output-len", "7", "--num-prompts", "30")
    samples = make_samples(args, tiny)
    assert len({each.prompt for each in samples}) == 30
    assert all(each.prompt_len == num_tokens(tiny, each) for each in samples)
    assert sum(each.prompt_len == 20 for each in samples) >= 29
    assert {each.output_len for each in samples} == {7}
    assert samples == make_samples(args, tiny)
    assert samples != make_samples(Namespace(**{**vars(args), "seed": 1}), tiny)


def test_random_lengths_differ_by_their_ratio(tiny: Tokenizer):
    args = flags("--input-len", "20", "--output-len", "10", "--random-range-ratio", "0.5", "--num-prompts", "60")
    outputs = {each.output_len for each in make_samples(args, tiny)}
    assert min(outputs) >= 5
    assert max(outputs) <= 15
    assert len(outputs) > 5


def test_prefixes_repeat(tiny: Tokenizer):
    words = ("--prefix-len", "12"), ("--suffix-len", "4"), ("--num-prefixes", "2"), ("--output-len", "3")
    arguments = [each for name, value in words for each in ("--prefix-repetition" + name[1:], value)]
    samples = make_samples(flags("--dataset-name", "prefix_repetition", "--num-prompts", "8", *arguments), tiny)
    assert len({each.prompt for each in samples}) == 8
    assert len({each.prompt[:6] for each in samples}) == 2
    assert {each.output_len for each in samples} == {3}


def test_sharegpt(tiny: Tokenizer, tmp_path: Path):
    path = tmp_path / "chats.json"
    turns = [{"from": "human", "value": "how are you today?"}, {"from": "gpt", "value": "I am well, thank you."}]
    path.write_text(json.dumps([{"conversations": turns}, {"conversations": turns[:1]}, {"conversations": []}]))
    words = ("--dataset-name", "sharegpt", "--dataset-path", str(path), "--num-prompts", "3")
    samples = make_samples(flags(*words), tiny)
    answer_len = len(tiny.encode([turns[1]["value"]])[0])
    assert [(each.prompt, each.output_len) for each in samples] == [(turns[0]["value"], answer_len)] * 3
    assert len(make_samples(flags(*words, "--no-oversample"), tiny)) == 1
    assert make_samples(flags(*words, "--sharegpt-output-len", "5"), tiny)[0].output_len == 5


def test_custom(tiny: Tokenizer, tmp_path: Path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one", "output_tokens": 4}\n\n{"prompt": "two", "output_tokens": 9}\n')
    words = ("--dataset-name", "custom", "--dataset-path", str(path), "--num-prompts", "2", "--disable-shuffle")
    samples = make_samples(flags(*words, "--custom-output-len", "-1", "--skip-chat-template"), tiny)
    assert [(each.prompt, each.output_len) for each in samples] == [("one", 4), ("two", 9)]
    assert [each.output_len for each in make_samples(flags(*words), tiny)] == [256, 256]


@pytest.mark.parametrize("content", ["", "no JSON\n", "[1]\n", '{"prompt": 5}\n'])
def test_files_that_cannot_be_used(tiny: Tokenizer, tmp_path: Path, content: str):
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    for name in ("custom", "sharegpt"):
        with pytest.raises(VLLMValidationError, match="--dataset-path"):
            make_samples(flags("--dataset-name", name, "--dataset-path", str(path)), tiny)
    with pytest.raises(VLLMValidationError, match="say --dataset-path FILE"):
        make_samples(flags("--dataset-name", "custom"), tiny)
