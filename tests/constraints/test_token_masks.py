"""The rows of TokenMasks equal sets of ids, with grammars that are lists of words."""

from __future__ import annotations

import random
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.constraints.compiler import GrammarCompiler
from jaxllm.constraints.thinking import ThinkingTokens
from jaxllm.constraints.token_masks import TokenMasks
from jaxllm.core_messages import EngineCoreRequest, RequestError
from jaxllm.params.structured_outputs import StructuredOutputsParams
from jaxllm.sampling_params import SamplingParams

V = 40
EOS = 39
START, END = 37, 38
THINKING = ThinkingTokens((START,), (END,))


class WordMatcher:
    """Allows a finite set of token sequences; EOS after a whole one."""

    def __init__(self, words: list[tuple[int, ...]]) -> None:
        self.words = words
        self.output: tuple[int, ...] = ()
        self.error: str | None = None

    def fork(self) -> WordMatcher:
        assert threading.current_thread() is not threading.main_thread()
        fork = WordMatcher(self.words)
        fork.output = self.output
        return fork

    def allowed(self) -> set[int]:
        size = len(self.output)
        following = {word[size] for word in self.words if len(word) > size and word[:size] == self.output}
        return following | ({EOS} if self.output in self.words else set())

    @property
    def may_end(self) -> bool:
        return self.output in self.words or self.output[-1:] == (EOS,)

    @property
    def is_complete(self) -> bool:
        return self.may_end and not self.allowed() - {EOS}

    def accept(self, token_id: int) -> bool:
        assert threading.current_thread() is not threading.main_thread()
        is_allowed = token_id in self.allowed()
        self.output += (token_id,)
        self.error = None if is_allowed else "too many items"
        return is_allowed

    def fill(self, bits_w: np.ndarray) -> None:
        assert threading.current_thread() is not threading.main_thread()
        bits_w[:] = pack(self.allowed())


class Words:
    def __init__(self, words: list[tuple[int, ...]]) -> None:
        self.words = words

    def matcher(self) -> WordMatcher:
        return WordMatcher(self.words)


class WordGrammars:
    """Stands in for the compiler: a choice of "3 4" is the token sequence (3, 4)."""

    def __init__(self) -> None:
        self.executor = ThreadPoolExecutor(1)
        self.held: list[tuple[Future[Words], Words]] | None = None
        """Grammars that are "being compiled"; None compiles at once."""

    def start(self, params: StructuredOutputsParams) -> Future[Words]:
        future: Future[Words] = Future()
        grammar = Words([tuple(map(int, choice.split())) for choice in params.choice or ()])
        if self.held is None:
            future.set_result(grammar)
        else:
            self.held.append((future, grammar))
        return future

    def submit[T](self, run: Callable[[], T]) -> Future[T]:
        return self.executor.submit(run)


def masks_of(grammars: WordGrammars, thinking: ThinkingTokens | None = None) -> TokenMasks:
    return TokenMasks(V, cast("GrammarCompiler", grammars), thinking)


@pytest.fixture(scope="module")
def grammars() -> Iterator[WordGrammars]:
    made = WordGrammars()
    yield made
    made.executor.shutdown()


@pytest.fixture
def masks(grammars: WordGrammars) -> TokenMasks:
    grammars.held = None
    return masks_of(grammars, THINKING)


def pack(ids: set[int]) -> np.ndarray:
    flags = np.zeros(64, np.uint8)
    flags[list(ids)] = 1
    return np.packbits(flags, bitorder="little").view(np.int32)


def unpack(row: np.ndarray | None) -> set[int]:
    if row is None:
        return set(range(V))
    assert row.dtype == np.int32
    assert row.shape == (2,)
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


def choose(*words: Sequence[int]) -> StructuredOutputsParams:
    return StructuredOutputsParams(choice=[" ".join(map(str, word)) for word in words])


def request(
    name: str = "r", prompt: Sequence[int] = (1,), bad: list[list[int]] | None = None, **fields: Any
) -> EngineCoreRequest:
    params = SamplingParams(max_tokens=64, **fields)
    params.update_from_generation_config({}, EOS)
    params._bad_words_token_ids = bad
    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=list(prompt),
        sampling_params=params,
        eos_token_id=params.eos_token_id,
        max_tokens=64,
        seed=0,
        arrival_time=0.0,
    )


def allowed(masks: TokenMasks, num_outputs: int, name: str = "r") -> set[int]:
    row = masks.row(name, num_outputs)
    return unpack(None if row is None else row.allowed_w)


WORD = st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple)


@settings(max_examples=100)
@given(
    words=st.none() | st.lists(WORD, min_size=1, max_size=4),
    allow=st.none() | st.lists(st.sampled_from([0, 1, 2, 3, EOS]), min_size=1, max_size=5),
    bad=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), max_size=3),
    min_tokens=st.integers(0, 4),
    stop=st.lists(st.integers(0, 4), max_size=2),
    ignore_eos=st.booleans(),
    choices=st.randoms(use_true_random=False),
)
def test_rows_are_what_all_rules_leave(
    grammars: WordGrammars,
    words: list[tuple[int, ...]] | None,
    allow: list[int] | None,
    bad: list[list[int]],
    min_tokens: int,
    stop: list[int],
    ignore_eos: bool,
    choices: random.Random,
):
    grammars.held = None
    masks = masks_of(grammars)
    fields = {"allowed_token_ids": allow, "min_tokens": min_tokens, "stop_token_ids": stop, "ignore_eos": ignore_eos}
    masks.add(request(bad=bad, structured_outputs=None if words is None else choose(*words), **fields))
    output: list[int] = []
    static = (set(range(V)) if allow is None else set(allow)) - {word[0] for word in bad if len(word) == 1}
    while len(output) < 6 and (not static or masks.is_ready("r")):
        row = allowed(masks, len(output))
        matcher = WordMatcher(words or [])
        matcher.output = tuple(output)
        if words is not None and matcher.is_complete:
            ends = not ignore_eos and EOS in static
            assert (masks.completed() == []) == ends
            assert not ends or row == {EOS}
            return
        banned = {word[-1] for word in bad if [*output, word[-1]][-len(word) :] == word}
        left = static - banned if words is None else (static - banned) & matcher.allowed()
        assert masks.completed() == []
        assert bool(masks.dead_ends()) == (not left)
        if not left:
            return
        early = left - {EOS, *stop} if len(output) < min_tokens else left
        assert row == (early or left)
        output.append(choices.choice(sorted(row)))
        masks.accept("r", output[-1:])


@settings(max_examples=200)
@given(
    words=st.none() | st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple), min_size=1, max_size=4),
    bad=st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=3), max_size=2),
    budget=st.none() | st.integers(0, 2),
    min_tokens=st.integers(0, 3),
    ignore_eos=st.booleans(),
    drafts=st.lists(st.sampled_from([0, 1, 2, START, END, EOS]), min_size=1, max_size=6),
    num_before=st.integers(0, 2),
)
def test_rows_of_drafts_are_those_of_outputs(
    grammars: WordGrammars,
    words: list[tuple[int, ...]] | None,
    bad: list[list[int]],
    budget: int | None,
    min_tokens: int,
    ignore_eos: bool,
    drafts: list[int],
    num_before: int,
):
    """Drafts are cut where a token may not follow or the output ends; to look at them changes nothing."""
    grammars.held = None
    fields: dict[str, Any] = {"min_tokens": min_tokens, "ignore_eos": ignore_eos, "thinking_token_budget": budget}
    fields["structured_outputs"] = None if words is None else choose(*words)
    guessing, plain = masks_of(grammars, THINKING), masks_of(grammars, THINKING)
    for masks in (guessing, plain):
        masks.add(request(bad=bad, **fields))
        if not masks.is_ready("r"):
            return
    output: list[int] = []
    for _ in range(num_before):
        row = allowed(plain, len(output))
        if plain.completed() or plain.dead_ends():
            return
        output.append(min(row))
        for masks in (guessing, plain):
            masks.accept("r", output[-1:])
    kept = guessing.cut_drafts("r", len(output), array("i", drafts)).tolist()
    assert kept == drafts[: len(kept)]
    got = guessing.rows("r", len(output), array("i", kept)) if kept else [guessing.row("r", len(output))]
    assert len(got) == len(kept) + 1
    expected: set[int] = set()
    for index, row in enumerate(got):
        expected = allowed(plain, len(output) + index)
        if plain.completed() or plain.dead_ends():
            assert not kept, "an output that has ended goes on"
            return
        assert unpack(None if row is None else row.allowed_w) == expected
        assert index == len(kept) or kept[index] in expected
        plain.accept("r", drafts[index : index + 1])
    if len(kept) < len(drafts):
        row = allowed(plain, len(output) + len(drafts[: len(kept) + 1]))
        assert drafts[len(kept)] not in expected or plain.completed() or plain.dead_ends()
    assert (guessing.completed(), guessing.dead_ends()) == ([], {})


def test_no_rules_no_row(masks: TokenMasks):
    masks.add(request(thinking_token_budget=None))
    assert masks.is_ready("r")
    assert masks.row("r", 0) is None
    masks.accept("r", [5])
    assert masks.row("unheard of", 0) is None
    assert masks.dead_ends() == {}


def test_static_rows_are_made_once(masks: TokenMasks):
    masks.add(request(allowed_token_ids=[3, EOS], min_tokens=2))
    rows = [row.allowed_w for row in (masks.row("r", index) for index in range(4)) if row is not None]
    assert (rows[0] is rows[1], rows[2] is rows[3]) == (True, True)
    assert (allowed(masks, 1), allowed(masks, 2)) == ({3}, {3, EOS})


def test_min_tokens_alone(masks: TokenMasks):
    masks.add(request(min_tokens=1, stop_token_ids=[4, 1000], ignore_eos=True))
    assert allowed(masks, 0) == set(range(V)) - {4, EOS}, "1000 is no id of this model"
    assert masks.row("r", 1) is None


def test_the_grammar_compiles_in_the_background(masks: TokenMasks, grammars: WordGrammars):
    grammars.held = []
    masks.add(request(structured_outputs=choose([3])))
    assert not masks.is_ready("r")
    masks.wait(0.01)
    assert not masks.is_ready("r")
    timer = threading.Timer(0.02, lambda: grammars.held and grammars.held[0][0].set_result(grammars.held[0][1]))
    timer.start()
    masks.wait(60)
    assert masks.is_ready("r")
    assert allowed(masks, 0) == {3}


def test_a_grammar_that_does_not_compile_is_a_dead_end(masks: TokenMasks, grammars: WordGrammars):
    grammars.held = []
    masks.add(request(structured_outputs=choose([3])))
    grammars.held[0][0].set_exception(ValueError("too deep"))
    masks.wait(60)
    assert masks.dead_ends() == {
        "r": RequestError("invalid", "structured_outputs did not compile: too deep", "structured_outputs")
    }
    assert not masks.is_ready("r")
    assert masks.row("r", 0) is None
    masks.remove(["r", "unheard of"])
    assert masks.dead_ends() == {}


def test_without_a_compiler_structured_outputs_are_a_dead_end():
    masks = TokenMasks(V, None, None)
    masks.add(request(structured_outputs=choose([3])))
    assert "need a tokenizer" in masks.dead_ends()["r"].message
    assert not masks.is_ready("r")


def test_accept_returns_before_the_matcher_has_worked(masks: TokenMasks, grammars: WordGrammars):
    masks.add(request(structured_outputs=choose([3, 4])))
    assert allowed(masks, 0) == {3}
    gate = threading.Event()
    grammars.executor.submit(gate.wait)
    masks.accept("r", [3])  # hangs here if the engine's thread does the work
    gate.set()
    assert allowed(masks, 1) == {4}


@pytest.mark.parametrize("broken", ["accept", "fill", "matcher"])
def test_a_failing_matcher_is_a_dead_end(masks: TokenMasks, monkeypatch: pytest.MonkeyPatch, broken: str):
    class Panic(BaseException):
        """Arrives as a panic in Rust does: it is no Exception."""

    def fail(*args: object):
        raise Panic("boom")

    masks.add(request("good", allowed_token_ids=[1, 2]))
    monkeypatch.setattr(Words if broken == "matcher" else WordMatcher, broken, fail)
    masks.add(request(structured_outputs=choose([3, 4])))
    masks.accept("r", [3])
    masks.accept("r", [4])
    assert masks.row("r", 2) is None
    assert masks.dead_ends() == {"r": RequestError("invalid", "structured_outputs failed: boom", "structured_outputs")}
    assert allowed(masks, 0, "good") == {1, 2}


def test_a_matcher_that_gives_up_is_a_dead_end(masks: TokenMasks, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(WordMatcher, "fill", lambda self, bits_w: setattr(self, "error", "lexer too complex"))
    masks.add(request(structured_outputs=choose([3, 4])))
    assert masks.row("r", 0) is None
    assert masks.dead_ends() == {
        "r": RequestError("invalid", "structured_outputs came to an end: lexer too complex", "structured_outputs")
    }


def test_a_token_that_the_grammar_forbids_is_a_dead_end(masks: TokenMasks):
    masks.add(request(structured_outputs=choose([3, 4])))
    masks.accept("r", [9])
    assert masks.row("r", 1) is None
    assert masks.dead_ends()["r"].message.endswith("does not let token 9 follow: too many items")


def test_a_compiler_that_was_shut_down_is_a_dead_end():
    compiler = WordGrammars()
    masks = masks_of(compiler)
    masks.add(request(structured_outputs=choose([3, 4])))
    assert allowed(masks, 0) == {3}
    compiler.executor.shutdown()
    masks.accept("r", [3])
    assert masks.row("r", 1) is None
    assert "shutdown" in masks.dead_ends()["r"].message


def test_rules_that_exclude_each_other_are_named(masks: TokenMasks):
    masks.add(request("static", bad=[[3]], bad_words=["x"], allowed_token_ids=[3]))
    masks.add(request("moving", structured_outputs=choose([3]), allowed_token_ids=[4]))
    assert masks.row("static", 0) is None
    assert masks.row("moving", 0) is None
    assert {each: error.message for each, error in masks.dead_ends().items()} == {
        "static": "allowed_token_ids and bad_words leave no token that may follow; loosen one of them",
        "moving": "structured_outputs and allowed_token_ids leave no token that may follow; loosen one of them",
    }
    assert [error.parameter for error in masks.dead_ends().values()] == ["allowed_token_ids", "structured_outputs"]
    assert not masks.is_ready("static")


def test_what_the_grammar_alone_allows_is_told_apart(masks: TokenMasks):
    fields = {"allowed_token_ids": [3, 4, 7, EOS], "min_tokens": 1, "stop_token_ids": [3]}
    masks.add(request(structured_outputs=choose([3], [4], [5]), bad=[[7]], **fields))
    masks.add(request("free", **fields))
    row, free = masks.row("r", 0), masks.row("free", 0)
    assert row is not None
    assert free is not None
    assert (unpack(row.allowed_w), unpack(row.grammar_w), free.grammar_w) == ({4}, {3, 4, 5}, None)
    masks.accept("r", [4])
    row = masks.row("r", 1)
    assert row is not None
    assert unpack(row.allowed_w) == unpack(row.grammar_w) == {EOS}


def test_forks_have_their_own_place(masks: TokenMasks):
    for name in ("a", "b"):
        masks.add(request(name, structured_outputs=choose([3, 5], [4, 6])))
    masks.accept("a", [3])
    assert (allowed(masks, 1, "a"), allowed(masks, 0, "b")) == ({5}, {3, 4})
    masks.accept("b", [4])
    assert (allowed(masks, 1, "a"), allowed(masks, 1, "b")) == ({5}, {6})


def test_an_id_can_be_used_again(masks: TokenMasks):
    masks.add(request(structured_outputs=choose([3])))
    masks.accept("r", [9])
    masks.row("r", 1)
    masks.add(request(allowed_token_ids=[7]))
    assert masks.dead_ends() == {}
    assert allowed(masks, 0) == {7}


@pytest.mark.parametrize("words", [[[3]], [[3, 4], [3]]], ids=["complete", "nothing else allowed"])
def test_min_tokens_yields_to_the_end_of_a_grammar(masks: TokenMasks, words: list[list[int]]):
    masks.add(request(structured_outputs=choose(*words), min_tokens=9, allowed_token_ids=[3, EOS]))
    masks.accept("r", [3])
    assert allowed(masks, 1) == {EOS}
    assert masks.completed() == []


def test_the_thinking_budget_forces_the_end(masks: TokenMasks):
    masks.add(request(prompt=[1, START], thinking_token_budget=2, allowed_token_ids=[5, END]))
    for num_outputs in range(2):
        assert allowed(masks, num_outputs) == {5, END}
        masks.accept("r", [5])
    assert allowed(masks, 2) == {END}
    masks.accept("r", [END])
    assert allowed(masks, 3) == {5, END}


def test_min_tokens_yields_to_a_forced_token(masks: TokenMasks):
    masks.add(request(prompt=[START], thinking_token_budget=0, min_tokens=5, stop_token_ids=[END]))
    assert allowed(masks, 0) == {END}


def test_a_thinking_section_comes_before_the_grammar(masks: TokenMasks):
    masks.add(request(prompt=[START], thinking_token_budget=2, structured_outputs=choose([3, 4])))
    assert masks.row("r", 0) is None
    masks.accept("r", [8])
    masks.accept("r", [9])
    assert allowed(masks, 2) == {END}
    masks.accept("r", [END])
    assert allowed(masks, 3) == {3}
    masks.accept("r", [3])
    assert allowed(masks, 4) == {4}


def test_several_tokens_at_once_end_the_section_and_begin_the_grammar(masks: TokenMasks):
    masks.add(request(prompt=[START], thinking_token_budget=9, structured_outputs=choose([3, 4, 5])))
    masks.accept("r", [8, END, 3, 4])
    assert allowed(masks, 4) == {5}


def test_what_follows_a_complete_output_is_not_the_grammars(masks: TokenMasks):
    masks.add(request(structured_outputs=choose([3]), ignore_eos=True))
    masks.accept("r", [3, 7])
    assert masks.row("r", 2) is None
    assert (masks.completed(), masks.dead_ends()) == (["r"], {})


def test_without_a_budget_the_grammar_rules_from_the_first_token(masks: TokenMasks):
    masks.add(request(prompt=[START], structured_outputs=choose([3, 4])))
    assert allowed(masks, 0) == {3}


def test_a_late_mask_is_told_and_waited_for(grammars: WordGrammars, masks: TokenMasks):
    masks.add(request("slow", structured_outputs=choose([3, 4])))
    masks.add(request("free", min_tokens=3))
    assert masks.is_ready("slow")
    masks.wait(5.0)
    assert masks.late() == set()
    gate = threading.Event()
    grammars.submit(gate.wait)
    masks.accept("slow", [3])
    masks.wait(0.01)
    assert masks.late() == {"slow"}
    threading.Timer(0.05, gate.set).start()
    masks.wait(5.0)
    assert masks.late() == set()
    assert allowed(masks, 1, "slow") == {4}


def test_waiting_for_a_grammar_leaves_the_matchers_thread_free(grammars: WordGrammars, masks: TokenMasks):
    grammars.held = []
    masks.add(request("compiling", structured_outputs=choose([3, 4])))
    masks.wait(0.01)
    assert masks.late() == set()
    assert grammars.submit(lambda: 7).result(timeout=5) == 7
    [(future, grammar)] = grammars.held
    future.set_result(grammar)
    assert masks.is_ready("compiling")
    assert allowed(masks, 0, "compiling") == {3}
