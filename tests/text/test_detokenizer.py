"""Text comes out as it would decode at once, whatever the tokens' borders, and never holds half a character."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from jaxllm.loading.open import open_checkpoint
from jaxllm.sampling_params import SamplingParams
from jaxllm.text.detokenizer import IncrementalDetokenizer, TextStream, TokenCollector, first_stop, make_detokenizer
from jaxllm.text.tokenizer import Tokenizer
from tests.engine.support import byte_fallback, byte_level

FAMILIES: dict[str, Callable[[], Tokenizer]] = {"byte_level": byte_level, "byte_fallback": byte_fallback}
HALF = "\N{REPLACEMENT CHARACTER}"
TEXTS = st.text(
    st.one_of(st.sampled_from("heloEND .é你🎉\N{ZERO WIDTH JOINER}"), st.characters(codec="utf-8")), max_size=40
)


@pytest.fixture(scope="module", params=list(FAMILIES))
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return FAMILIES[request.param]()


@pytest.fixture(scope="module")
def byte_tokenizer() -> Tokenizer:
    return byte_level()


@pytest.fixture(scope="module")
def added() -> Tokenizer:
    return with_added_words()


@pytest.fixture(scope="module")
def real(smollm2_path: str) -> Tokenizer:
    return Tokenizer.of(open_checkpoint(smollm2_path).tokenizer())


def pieces(tokenizer: Tokenizer, prompt: list[int], token_ids: list[int], skip: bool = True) -> list[str]:
    """Return the text of each token; it is the same whether or not tokens that are whole are looked up."""
    out: list[list[str]] = []
    for whole_texts in (None, tokenizer.whole_texts[skip]):
        stream = TextStream(tokenizer.decoder, prompt, skip, whole_texts=whole_texts)
        out.append([*(stream.push(token_id) for token_id in token_ids), stream.flush()])
    assert out[0] == out[1]
    return out[0]


def after(tokenizer: Tokenizer, prompt: list[int], token_ids: list[int], skip: bool = True) -> str:
    """Return the output's text as it reads after the prompt."""
    decode = tokenizer.backend.decode
    before = decode(prompt, skip_special_tokens=skip)
    return decode(prompt + token_ids, skip_special_tokens=skip)[len(before) :]


@settings(max_examples=300)
@given(text=TEXTS)
@example(text=HALF)
@example(text="a" + HALF * 100 + "b")
@example(text=" hello")
@example(text="👩‍👩‍👧‍👦" * 3)
def test_stream_equals_decoding_at_once(tokenizer: Tokenizer, text: str) -> None:
    prompt = tokenizer.encode(["he "])[0]
    ids = tokenizer.backend.encode(text, add_special_tokens=False).ids
    assert "".join(pieces(tokenizer, prompt, ids)) == after(tokenizer, prompt, ids)
    assert "".join(pieces(tokenizer, [], ids)) == after(tokenizer, [], ids)


@pytest.mark.texts
@settings(max_examples=300)
@given(ids=st.lists(st.one_of(st.integers(0, 450), st.integers(100, 220)), max_size=90))
def test_any_byte_level_tokens(byte_tokenizer: Tokenizer, ids: list[int]) -> None:
    """Random tokens make broken characters, special tokens, and ids that the tokenizer does not know."""
    tokenizer = byte_tokenizer
    for skip in (True, False):
        assert "".join(pieces(tokenizer, [], ids, skip)) == after(tokenizer, [], ids, skip)


@settings(max_examples=100)
@given(text=TEXTS, ids=st.lists(st.integers(0, 49_151), max_size=40))
def test_a_real_tokenizer(real: Tokenizer, text: str, ids: list[int]) -> None:
    prompt = real.encode(["The answer is"])[0]
    for token_ids in (real.encode([text])[0], ids):
        assert "".join(pieces(real, prompt, token_ids)) == after(real, prompt, token_ids)


def test_no_half_characters(tokenizer: Tokenizer) -> None:
    ids = tokenizer.backend.encode("é🎉ö", add_special_tokens=False).ids
    assert len(ids) >= 8
    out = pieces(tokenizer, [], ids)
    assert not any(HALF in piece for piece in out)
    assert [piece for piece in out if piece] == ["é", "🎉", "ö"]


def test_unfinished_character_shows_at_the_end_only() -> None:
    tokenizer = byte_level()
    ids = tokenizer.backend.encode("a🎉").ids[:-1]
    assert pieces(tokenizer, [], ids) == ["a", *[""] * (len(ids) - 1), HALF]


def test_space_after_prompt_is_kept() -> None:
    """The first token of a Llama-2 tokenizer, decoded alone, loses its space."""
    tokenizer = byte_fallback()
    ids = tokenizer.backend.encode("hello hello").ids
    prompt, output = ids[: len(ids) // 2], ids[len(ids) // 2 :]
    assert after(tokenizer, prompt, output) == " hello"
    assert "".join(pieces(tokenizer, prompt, output)) == " hello"


def test_prompt_that_ends_in_half_a_character() -> None:
    tokenizer = byte_level()
    ids = tokenizer.backend.encode("🎉ab").ids
    assert "".join(pieces(tokenizer, ids[:2], ids[2:])) == tokenizer.backend.decode(ids[2:])


def test_byte_run_that_turns_out_invalid() -> None:
    """Byte-fallback decoders take back a character when a bad byte follows it; what is out stays."""
    tokenizer = byte_fallback()
    vocab = tokenizer.hf.get_vocab()
    ids = [vocab[f"<0x{byte:02X}>"] for byte in "é".encode()] + [vocab["<0xFF>"], vocab["a"], vocab["b"]]
    assert "".join(pieces(tokenizer, [], ids)) == f"é{HALF}ab"


def test_endless_broken_bytes_are_let_out() -> None:
    tokenizer = byte_level()
    bad = tokenizer.backend.encode("🎉").ids[0]
    ids = [*tokenizer.backend.encode("ab").ids, *[bad] * 300, *tokenizer.backend.encode("cd🎉").ids]
    out = pieces(tokenizer, [], ids)
    assert "".join(out) == tokenizer.backend.decode(ids)
    assert max(map(len, out)) <= 64


def test_nothing_is_lost_where_broken_bytes_are_let_out() -> None:
    tokenizer = byte_fallback()
    vocab = tokenizer.hf.get_vocab()
    ids = [vocab["<0xFF>"]] * 61 + [vocab[f"<0x{byte:02X}>"] for byte in "語".encode()] + [vocab["a"]]
    assert "".join(pieces(tokenizer, [], ids)) == HALF * 61 + "語a"


def test_endless_skipped_tokens_keep_the_next_space() -> None:
    tokenizer = byte_fallback()
    vocab = tokenizer.hf.get_vocab()
    ids = [vocab["a"], *[vocab["<s>"]] * 200, vocab["▁he"]]
    assert "".join(pieces(tokenizer, [], ids)) == "a he"


def detokenizer(tokenizer: Tokenizer, **params: object) -> IncrementalDetokenizer:
    return IncrementalDetokenizer(tokenizer, [], SamplingParams.from_optional(**params))


def run_text(tokenizer: Tokenizer, ids: list[int], **params: object) -> tuple[str, str | None, list[str]]:
    """Feed tokens one by one; return (text, stop string, what a stream shows at each step)."""
    state = detokenizer(tokenizer, **params)
    shown: list[str] = []
    visible = 0
    for i, token_id in enumerate(ids):
        last = i == len(ids) - 1
        stop = state.update([token_id], finished=last, ends_in_stop_token=False)
        length = state.visible_length(finished=last or stop is not None)
        shown.append(state.text[visible:length])
        visible = max(visible, length)
        if stop is not None:
            return state.text, stop, shown
    return state.text, None, shown


@pytest.mark.texts
@settings(max_examples=400)
@given(data=st.data())
def test_stop_strings_across_any_borders(tokenizer: Tokenizer, data: st.DataObject) -> None:
    text = data.draw(TEXTS.filter(lambda value: not value.startswith(" ")))
    begin = data.draw(st.integers(0, max(0, len(text) - 1)))
    stops = [text[begin : begin + data.draw(st.integers(1, 6))], data.draw(TEXTS), data.draw(TEXTS)]
    stops = [stop for stop in stops if stop] or ["END"]
    keep = data.draw(st.booleans())
    ids = tokenizer.backend.encode(text, add_special_tokens=False).ids
    decoded = tokenizer.backend.decode(ids)
    if not ids:
        return
    out, stop, shown = run_text(tokenizer, ids, stop=stops, include_stop_str_in_output=keep)
    ends = [(decoded.find(each) + len(each), decoded.find(each), each) for each in stops if each in decoded]
    assert "".join(shown) == out
    if not ends:
        assert (out, stop) == (decoded, None)
    else:
        end, start, first = min(ends)
        assert (out, stop) == (decoded[: end if keep else start], first)


def test_held_back_characters() -> None:
    tokenizer = byte_level()
    ids = [tokenizer.backend.encode(letter).ids[0] for letter in "abENcEND!"]
    text, stop, shown = run_text(tokenizer, ids, stop=["END"])
    assert (text, stop) == ("abENc", "END")
    assert shown == ["", "", "a", "b", "E", "N", "c", ""]


def test_min_tokens_hides_stop_strings() -> None:
    tokenizer = byte_level()
    ids = [tokenizer.backend.encode(letter).ids[0] for letter in "xaxbxc"]
    assert run_text(tokenizer, ids, stop=["x"])[:2] == ("", "x")
    assert run_text(tokenizer, ids, stop=["x"], min_tokens=1)[:2] == ("xa", "x")
    assert run_text(tokenizer, ids, stop=["x"], min_tokens=3)[:2] == ("xaxb", "x")
    assert run_text(tokenizer, ids, stop=["x"], min_tokens=5)[:2] == ("xaxbxc", None)


def test_several_tokens_at_once_stop_at_the_same_place() -> None:
    tokenizer = byte_level()
    ids = [tokenizer.backend.encode(letter).ids[0] for letter in "abENDcd"]
    state = detokenizer(tokenizer, stop=["END"])
    assert state.update(ids, finished=True, ends_in_stop_token=False) == "END"
    assert (state.text, state.token_ids) == ("ab", ids[:5])


def test_stop_token_makes_no_text() -> None:
    tokenizer = byte_level()
    ids = [tokenizer.backend.encode(letter).ids[0] for letter in "ab"]
    state = detokenizer(tokenizer)
    state.update(ids, finished=True, ends_in_stop_token=True)
    assert (state.text, state.token_ids) == ("a", ids)
    state = detokenizer(tokenizer, include_stop_str_in_output=True)
    state.update(ids, finished=True, ends_in_stop_token=True)
    assert (state.text, state.token_ids) == ("ab", ids)


def test_first_stop_is_the_one_that_completes_first() -> None:
    assert first_stop("xabc", 4, ["abc", "b"]) == (2, "b")
    assert first_stop("xabc", 4, ["c", "abc"]) == (1, "abc")
    assert first_stop("aab", 1, ["aa"]) is None
    assert first_stop("aab", 2, ["aa"]) == (0, "aa")


WORDS = ["ção", "<é>", "año", "<a b>", "Ġx"]
"""Letters of all but the fourth spell bytes in a byte-level vocabulary, where `ção` could be E7 E3 6F."""


def with_added_words(*, special: bool = False) -> Tokenizer:
    """Return a byte-level tokenizer that has words added whole; the first is in the vocabulary, as in GGUF."""
    base = byte_level().backend
    data = json.loads(base.to_str())
    data["model"]["vocab"][WORDS[0]] = len(data["model"]["vocab"])
    backend = Backend.from_str(json.dumps(data))
    tokens = [AddedToken(word, normalized=False, special=special) for word in WORDS]
    _ = backend.add_special_tokens(tokens) if special else backend.add_tokens(tokens)
    return Tokenizer.of(PreTrainedTokenizerFast(tokenizer_object=backend))


def test_added_words_are_their_own_text() -> None:
    tokenizer = with_added_words()
    text = "informação <é> año <a b> Ġx x ção é ñ END"
    ids = tokenizer.encode([text])[0]
    assert {tokenizer.backend.token_to_id(word) for word in WORDS} <= set(ids)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert "".join(pieces(tokenizer, [], ids)) == text
    assert (
        "".join(pieces(tokenizer, ids[:7], ids[7:])) == text[len(tokenizer.decode(ids[:7], skip_special_tokens=True)) :]
    )
    assert tokenizer.token_strings(tokenizer.encode(["ção"])[0], []) == ["ção"]
    assert tokenizer.encode([tokenizer.decode(ids, skip_special_tokens=True)]) == [ids]


@pytest.mark.parametrize("stop", ["ção", "ação", "ã", "o a", "<é>"])
def test_stop_strings_are_found_in_added_words(stop: str) -> None:
    tokenizer = with_added_words()
    text = "uma informação a mais <é>"
    ids = tokenizer.encode([text])[0]
    assert run_text(tokenizer, ids, stop=[stop])[:2] == (text[: text.index(stop)], stop)


def test_added_words_that_are_special_are_left_out() -> None:
    tokenizer = with_added_words(special=True)
    ids = tokenizer.encode(["uma ção é <é>"])[0]
    assert run_text(tokenizer, ids)[0] == "uma  é "
    assert run_text(tokenizer, ids, skip_special_tokens=False)[0] == "uma ção é <é>"


@pytest.mark.texts
@settings(max_examples=100)
@given(text=st.text(st.sampled_from("çãoñaé Ġx<>你🎉EN"), max_size=30), ids=st.lists(st.integers(0, 410), max_size=40))
def test_any_text_with_added_words(added: Tokenizer, text: str, ids: list[int]) -> None:
    encoded = added.encode([text])[0]
    assert added.decode(encoded, skip_special_tokens=True) == text
    for token_ids in (encoded, ids):
        assert "".join(pieces(added, [], token_ids)) == added.decode(token_ids, skip_special_tokens=True)


def test_words_that_merges_make_are_bytes() -> None:
    """To add a word of the vocabulary again changes nothing: a model learned it as bytes."""
    backend = byte_level().backend
    word = "Ġhello"
    assert backend.token_to_id(word) is not None
    ids = backend.encode("say hello é").ids
    backend.add_tokens([word, "Ã", "Ġhello!"])
    tokenizer = Tokenizer.of(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert tokenizer.decode(ids, skip_special_tokens=True) == "say hello é"
    assert tokenizer.decode(tokenizer.encode(["Ġhello!"])[0], skip_special_tokens=True) == "Ġhello!"


def test_other_tokenizers_decode_as_they_are(real: Tokenizer) -> None:
    for tokenizer in (real, byte_level(), byte_fallback()):
        assert tokenizer.decoder is tokenizer.backend


def test_without_detokenizing() -> None:
    state = make_detokenizer(byte_level(), [1], SamplingParams(detokenize=False))
    assert isinstance(state, TokenCollector)
    assert state.update([5, 6], finished=False, ends_in_stop_token=False) is None
    assert (state.text, state.token_ids, state.visible_length(finished=True)) == ("", [5, 6], 0)
    assert isinstance(make_detokenizer(None, [1], SamplingParams()), TokenCollector)


def test_spaces_between_special_tokens() -> None:
    """A backend without a decoder joins tokens by spaces; neighbouring added tokens need not be."""
    backend = Backend(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    backend.add_special_tokens(["<x>", "<y>"])
    tokenizer = Tokenizer.of(PreTrainedTokenizerFast(tokenizer_object=backend))
    vocab = backend.get_vocab()
    ids = [vocab[token] for token in ["<x>", "<y>", "a", "<x>", "<x>", "<y>", "b", "<y>"]]

    def text(**params: object) -> str:
        return run_text(tokenizer, ids, **params)[0]

    assert text(skip_special_tokens=False) == "<x> <y> a <x> <x> <y> b <y>"
    assert text(skip_special_tokens=False, spaces_between_special_tokens=False) == "<x><y> a <x><x><y> b <y>"
    assert text(spaces_between_special_tokens=False) == text() == "a b"
