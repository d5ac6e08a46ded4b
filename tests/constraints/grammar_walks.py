"""Random outputs of a grammar: at each step any allowed token, leaning towards those that bring an end near."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxllm.constraints.bits import num_words
from jaxllm.constraints.compiler import GrammarCompiler
from jaxllm.constraints.matcher import Matcher
from jaxllm.engine.tokenizer import Tokenizer
from jaxllm.structured_outputs import StructuredOutputsParams

CLOSERS = ('"', "}", "]", '"}', '"]', "}}", "]}", "0", "1", ",", ":", '":')
VOCAB_SIZE = 49_152


class Walk(NamedTuple):
    text: str
    token_ids: list[int]
    ended: bool
    """Whether the grammar let it end; otherwise it was cut off."""


@functools.cache
def smollm2_tokenizer(path: str) -> Tokenizer:
    from jaxllm.loading.checkpoint import open_checkpoint

    return Tokenizer(open_checkpoint(path).tokenizer())


@functools.cache
def closers(tokenizer: Tokenizer) -> frozenset[int]:
    ids = (tokenizer.backend.token_to_id(text) for text in CLOSERS)
    return frozenset(token_id for token_id in ids if token_id is not None)


def make_compiler(path: str, **options: float) -> GrammarCompiler:
    return GrammarCompiler(smollm2_tokenizer(path), VOCAB_SIZE, [2], **options)  # type: ignore[arg-type]


def allowed(matcher: Matcher, vocab_size: int = VOCAB_SIZE) -> list[int]:
    bits_w = np.full(num_words(vocab_size), -1, np.int32)
    matcher.fill(bits_w)
    return np.flatnonzero(np.unpackbits(bits_w.view(np.uint8), bitorder="little")).tolist()


def random_walk(
    matcher: Matcher, tokenizer: Tokenizer, seed: int, *, max_tokens: int = 200, eos_ids: Sequence[int] = (2,)
) -> Walk:
    """Walk until the end is drawn or forced; run it on the matchers' thread."""
    rng = random.Random(seed)
    taken: list[int] = []
    ended = False
    while len(taken) < max_tokens and not ended:
        ids = allowed(matcher)
        assert matcher.error is None, (matcher.error, tokenizer.backend.decode(taken))
        going_on = [token_id for token_id in ids if token_id not in eos_ids]
        assert matcher.may_end == (len(going_on) < len(ids)) or matcher.is_complete
        if len(going_on) < len(ids) and (not going_on or rng.random() < 0.5):
            ended = True
            break
        closing = [token_id for token_id in going_on if token_id in closers(tokenizer)]
        token_id = rng.choice(closing if closing and rng.random() < 0.6 else going_on)
        assert matcher.accept(token_id)
        taken.append(token_id)
    return Walk(tokenizer.backend.decode(taken, skip_special_tokens=False), taken, ended)


def walk_all(
    compiler: GrammarCompiler, tokenizer: Tokenizer, params: StructuredOutputsParams, num_walks: int, **options: int
) -> list[Walk]:
    """Compile and walk `num_walks` times with seeds 0, 1, ..."""
    grammar = compiler.start(params).result()
    return compiler.submit(
        lambda: [random_walk(grammar.matcher(), tokenizer, seed, **options) for seed in range(num_walks)]
    ).result()
