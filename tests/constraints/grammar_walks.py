"""Random walks write outputs of a grammar: any allowed token at each step, mostly one that brings the end near."""

from __future__ import annotations

import functools
import random
from typing import NamedTuple

import numpy as np

from jaxllm.constraints.bits import num_words
from jaxllm.constraints.compiler import GrammarCompiler
from jaxllm.constraints.matcher import Matcher
from jaxllm.params.structured_outputs import StructuredOutputsParams
from jaxllm.text.tokenizer import Tokenizer

CLOSERS = ('"', "}", "]", '"}', '"]', "}}", "]}", "0", "1", ",", ":", '":')
VOCAB_SIZE = 49_152
EOS = 2


class Walk(NamedTuple):
    text: str
    token_ids: list[int]
    ended: bool
    """True if the grammar let it end; otherwise it was cut off."""


@functools.cache
def smollm2_tokenizer(path: str) -> Tokenizer:
    from jaxllm.loading.open import open_checkpoint

    return Tokenizer.of(open_checkpoint(path).tokenizer())


@functools.cache
def closers(tokenizer: Tokenizer) -> np.ndarray:
    ids = (tokenizer.backend.token_to_id(text) for text in CLOSERS)
    return np.array([token_id for token_id in ids if token_id is not None])


def make_compiler(path: str, **options: float) -> GrammarCompiler:
    return GrammarCompiler(smollm2_tokenizer(path), VOCAB_SIZE, [EOS], **options)  # type: ignore[arg-type]


def allowed(matcher: Matcher, vocab_size: int = VOCAB_SIZE) -> np.ndarray:
    """Return the mask of what may follow, as bool [32 * ceil(v/32)]."""
    bits_w = np.full(num_words(vocab_size), -1, np.int32)
    matcher.fill(bits_w)
    return np.unpackbits(bits_w.view(np.uint8), bitorder="little").astype(bool)


def random_walk(matcher: Matcher, tokenizer: Tokenizer, seed: int, *, max_tokens: int = 100) -> Walk:
    """Walk until the end is drawn or forced; run it on the matchers' thread."""
    rng = random.Random(seed)
    taken: list[int] = []
    ended = False
    while len(taken) < max_tokens:
        may = allowed(matcher)
        assert matcher.error is None, (matcher.error, tokenizer.backend.decode(taken))
        assert matcher.may_end == may[EOS]
        may[EOS] = False
        going_on = np.flatnonzero(may)
        if matcher.may_end and (not going_on.size or rng.random() < 0.5):
            ended = True
            break
        closing = closers(tokenizer)[may[closers(tokenizer)]]
        choices = closing if closing.size and rng.random() < 0.6 else going_on
        token_id = int(choices[rng.randrange(choices.size)])
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


def takes(compiler: GrammarCompiler, path: str, params: StructuredOutputsParams, text: str) -> bool:
    """Return whether the whole of `text`, with special tokens in it, is allowed and may end there."""
    ids = smollm2_tokenizer(path).encode([text])[0]
    grammar = compiler.start(params).result()

    def run() -> bool:
        matcher = grammar.matcher()
        return all(map(matcher.accept, ids)) and matcher.accept(EOS)

    return compiler.submit(run).result()
