"""Prompts for benchmarks: random ones of fixed lengths, ShareGPT's, a file's, or ones with shared prefixes."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from jaxllm.cli.flags.numbers import fraction, natural, positive
from jaxllm.exceptions import VLLMValidationError
from jaxllm.text.tokenizer import HALF, Tokenizer

SHORTEST, LONGEST_PROMPT, LONGEST_TOTAL = 4, 1024, 2048
"""The range of prompt and output lengths, in tokens, of ShareGPT conversations that are used."""
_ROUNDS = 8
"""The most attempts to make a random text with the right number of tokens."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """A prompt, its length in tokens, and the number of output tokens to request."""

    prompt: str
    prompt_len: int
    output_len: int


def add_dataset_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that choose the prompts."""
    group = parser.add_argument_group("data set")
    group.add_argument("--dataset-name", choices=tuple(_MAKERS), default="random", help="default: %(default)s")
    group.add_argument("--dataset-path", metavar="FILE", help="ShareGPT's JSON, or JSON lines with a prompt each")
    group.add_argument("--num-prompts", type=positive, default=1000, metavar="N", help="default: %(default)s")
    group.add_argument("--disable-shuffle", action="store_true", help="take the prompts of a file in its order")
    group.add_argument("--no-oversample", action="store_true", help="do not repeat prompts if a file has too few")
    group.add_argument("--input-len", type=positive, metavar="N", help="tokens of a prompt, for each data set that can")
    group.add_argument("--output-len", type=positive, metavar="N", help="tokens of an output, for each data set")
    random = parser.add_argument_group("data set random")
    random.add_argument("--random-input-len", type=positive, default=1024, metavar="N", help="default: %(default)s")
    random.add_argument("--random-output-len", type=positive, default=128, metavar="N", help="default: %(default)s")
    random.add_argument(
        "--random-range-ratio", type=fraction, default=0.0, metavar="X", help="lengths vary by this fraction (0 to 1)"
    )
    random.add_argument("--random-prefix-len", type=natural, default=0, metavar="N", help="tokens of a common prefix")
    files = parser.add_argument_group("data sets sharegpt and custom")
    files.add_argument("--sharegpt-output-len", type=positive, metavar="N", help="default: that of the conversation")
    files.add_argument(
        "--custom-output-len", type=int, default=256, metavar="N", help="default: 256; -1: each line's output_tokens"
    )
    files.add_argument(
        "--skip-chat-template", action="store_true", help="send a file's prompts to completions as they are"
    )
    prefixes = parser.add_argument_group("data set prefix_repetition")
    for name, default in (("prefix-len", 256), ("suffix-len", 256), ("num-prefixes", 10), ("output-len", 128)):
        prefixes.add_argument(
            f"--prefix-repetition-{name}", type=positive, default=default, metavar="N", help="default: %(default)s"
        )


def make_samples(args: argparse.Namespace, tokenizer: Tokenizer, *, is_chat: bool = False) -> list[Sample]:
    """Return the prompts for a command line, the same for the same seed. Raises VLLMValidationError."""
    return _MAKERS[args.dataset_name](args, tokenizer, Random(args.seed), is_chat)


class _TextMaker:
    """Makes texts of random tokens with a fixed number of tokens."""

    def __init__(self, tokenizer: Tokenizer, random: Random) -> None:
        self._tokenizer, self._random = tokenizer, random
        num = tokenizer.backend.get_vocab_size(with_added_tokens=False)
        texts = tokenizer.decoder.decode_batch([[i] for i in range(num)], skip_special_tokens=True)
        # Special tokens have no text here; parts of characters would become other tokens.
        self._vocabulary = [i for i, text in enumerate(texts) if text and HALF not in text]

    def ids(self, num: int) -> list[int]:
        """Return random tokens, without special ones."""
        return self._random.choices(self._vocabulary, k=num)

    def sample(self, token_ids: list[int], output_len: int) -> Sample:
        """Return the text of tokens, changed until it tokenizes to the same number of tokens."""
        num = len(token_ids)
        text, again = self._text(token_ids)
        for _ in range(_ROUNDS):
            if len(again) == num:
                break
            text, again = self._text(again[:num] if len(again) > num else [*again, *self.ids(num - len(again))])
        return Sample(text, len(again), output_len)

    def _text(self, token_ids: list[int]) -> tuple[str, list[int]]:
        """Return the text of tokens, and the tokens of that text when tokenized again."""
        text = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return text, self._tokenizer.encode([text], add_special_tokens=False)[0]


def _random(args: argparse.Namespace, tokenizer: Tokenizer, random: Random, _is_chat: bool) -> list[Sample]:
    maker = _TextMaker(tokenizer, random)
    prefix = maker.ids(args.random_prefix_len)

    def length(mean: int) -> int:
        ratio = args.random_range_ratio
        return random.randint(max(1, round(mean * (1 - ratio))), max(1, round(mean * (1 + ratio))))

    mean_input, mean_output = args.input_len or args.random_input_len, args.output_len or args.random_output_len
    return [
        maker.sample([*prefix, *maker.ids(length(mean_input))], length(mean_output)) for _ in range(args.num_prompts)
    ]


def _prefix_repetition(args: argparse.Namespace, tokenizer: Tokenizer, random: Random, _is_chat: bool) -> list[Sample]:
    maker = _TextMaker(tokenizer, random)
    num = args.prefix_repetition_num_prefixes
    if num > args.num_prompts:
        message = f"prefix_repetition_num_prefixes={num} must be at most num_prompts={args.num_prompts}."
        raise VLLMValidationError(message, parameter="prefix_repetition_num_prefixes", value=num)
    prefixes = [maker.ids(args.prefix_repetition_prefix_len) for _ in range(num)]
    output_len = args.output_len or args.prefix_repetition_output_len
    samples = [
        maker.sample([*prefixes[i % num], *maker.ids(args.prefix_repetition_suffix_len)], output_len)
        for i in range(args.num_prompts)
    ]
    if not args.disable_shuffle:
        random.shuffle(samples)
    return samples


def _sharegpt(args: argparse.Namespace, tokenizer: Tokenizer, random: Random, _is_chat: bool) -> list[Sample]:
    rows = _decode(_content(args), args)
    if not isinstance(rows, list):
        raise _unreadable(args, "it is no list of conversations")
    fixed = args.output_len or args.sharegpt_output_len
    pairs = [pair for row in rows if (pair := _first_turns(row)) is not None]
    if not args.disable_shuffle:
        random.shuffle(pairs)
    samples: list[Sample] = []
    for prompt, answer in pairs:
        if len(samples) == args.num_prompts:
            break
        prompt_ids, answer_ids = tokenizer.encode([prompt, answer])
        output_len = fixed or len(answer_ids)
        if SHORTEST <= len(prompt_ids) <= LONGEST_PROMPT and (
            fixed or SHORTEST <= output_len <= LONGEST_TOTAL - len(prompt_ids)
        ):
            samples.append(Sample(prompt, len(prompt_ids), output_len))
    return _enough(samples, args, random)


def _first_turns(row: Any) -> tuple[str, str] | None:
    """Return the first two turns of a conversation; None if it has fewer."""
    turns = row.get("conversations", row.get("conversation")) if isinstance(row, dict) else None
    if not isinstance(turns, list) or len(turns) < 2:
        return None
    texts = [turn.get("value") if isinstance(turn, dict) else None for turn in turns[:2]]
    return (texts[0], texts[1]) if isinstance(texts[0], str) and isinstance(texts[1], str) else None


def _custom(args: argparse.Namespace, tokenizer: Tokenizer, random: Random, is_chat: bool) -> list[Sample]:
    rows = [_decode(line, args) for line in _content(args).splitlines() if line.strip()]
    if not args.disable_shuffle:
        random.shuffle(rows)
    render = _renderer(tokenizer) if not (args.skip_chat_template or is_chat) else None
    samples: list[Sample] = []
    for row in rows[: args.num_prompts]:
        if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
            raise _unreadable(args, 'each line must be an object with a "prompt"')
        prompt = row["prompt"] if render is None else render(row["prompt"])
        output_len = args.output_len or (
            args.custom_output_len if args.custom_output_len > 0 else row.get("output_tokens")
        )
        if not isinstance(output_len, int) or output_len < 1:
            raise _unreadable(args, 'with --custom-output-len -1 each line needs a number of "output_tokens"')
        samples.append(
            Sample(prompt, len(tokenizer.encode([prompt], add_special_tokens=render is None)[0]), output_len)
        )
    return _enough(samples, args, random)


def _renderer(tokenizer: Tokenizer) -> Callable[[str], str] | None:
    """Return the function that renders a prompt with the tokenizer's chat template; None if it has none."""
    if not tokenizer.parts.chat_template:
        return None
    from jaxllm.text.chat import ChatRenderer

    chat = ChatRenderer(tokenizer, None)
    return lambda prompt: str(chat.render([{"role": "user", "content": prompt}], "messages").text)


def _enough(samples: list[Sample], args: argparse.Namespace, random: Random) -> list[Sample]:
    """Return the requested number of prompts, repeated if there are too few."""
    if not samples:
        raise _unreadable(args, "it has no prompt that can be used")
    if args.no_oversample or len(samples) >= args.num_prompts:
        return samples
    return samples + random.choices(samples, k=args.num_prompts - len(samples))


def _content(args: argparse.Namespace) -> bytes:
    if args.dataset_path is None:
        message = f"--dataset-name {args.dataset_name} needs a file: say --dataset-path FILE."
        raise VLLMValidationError(message, parameter="dataset_path")
    try:
        return Path(args.dataset_path).expanduser().read_bytes()
    except (OSError, RuntimeError, ValueError) as error:
        raise _unreadable(args, str(getattr(error, "strerror", None) or error)) from error


def _decode(text: bytes, args: argparse.Namespace) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _unreadable(args, f"it is not JSON: {error}") from error


def _unreadable(args: argparse.Namespace, why: str) -> VLLMValidationError:
    message = f"--dataset-path {args.dataset_path}: {why}."
    return VLLMValidationError(message, parameter="dataset_path", value=args.dataset_path)


_MAKERS: Mapping[str, Callable[[argparse.Namespace, Tokenizer, Random, bool], list[Sample]]] = {
    "random": _random,
    "sharegpt": _sharegpt,
    "custom": _custom,
    "prefix_repetition": _prefix_repetition,
}
