"""Convert tokens to text as they come: whole characters only, up to the first complete stop string."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from tokenizers.decoders import DecodeStream

from jaxllm.sampling_params import SamplingParams
from jaxllm.text.tokenizer import HALF, Tokenizer, WholeTexts

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_MAX_HELD = 64
"""The maximum number of tokens held for a character, so that a model's broken bytes do not slow down each step."""


class TextStream:
    """Decodes a growing token sequence. Its output is never revised.

    Of adjacent `unspaced` tokens, each but the first shows as its string in the dict, not as the decoder writes it.
    """

    def __init__(
        self,
        backend: Backend,
        prompt_token_ids: Sequence[int],
        skip_special_tokens: bool,
        unspaced: Mapping[int, str] = MappingProxyType({}),
        whole_texts: WholeTexts | None = None,
    ) -> None:
        """Continue a prompt. With `whole_texts`, of a tokenizer that has them, most tokens cost one look-up."""
        self._backend = backend
        self._whole_texts = None if unspaced else whole_texts
        self._skip = skip_special_tokens
        self._unspaced = unspaced
        self._after_unspaced = False
        self._held: list[int] = []
        self._restart(self._clean_suffix(prompt_token_ids))

    def push(self, token_id: int) -> str:
        """Add a token and return the text that became final, often ""."""
        if self._whole_texts is not None and not self._held and (text := self._whole_texts[token_id]):
            return text  # the context stays behind, which changes nothing: tokens do not depend on it
        text = self._push(token_id)
        if not self._unspaced:
            return text
        follows, string = self._after_unspaced, self._unspaced.get(token_id)
        self._after_unspaced = string is not None
        return string if text and follows and string is not None else text

    def _push(self, token_id: int) -> str:
        self._held.append(token_id)
        try:
            text = self._stream.step(self._backend, token_id)
        except Exception as error:
            if "Invalid prefix" not in str(error):
                raise
            return self._put_out(self._held, self._decode(self._held))  # a byte run turned out invalid after all
        if text is None:
            return "" if len(self._held) < _MAX_HELD else self._let_out()
        self._context, self._held = self._held, []
        return text

    def flush(self) -> str:
        """Return the held text, with broken characters as U+FFFD."""
        return self._put_out(self._held, self._after_context(self._held)) if self._held else ""

    def _restart(self, context: list[int]) -> None:
        """Continue after `context`, the tokens of whole characters that are already output, or none."""
        self._context = context
        self._stream = DecodeStream(ids=context, skip_special_tokens=self._skip)

    def _put_out(self, token_ids: list[int], text: str) -> str:
        self._held = []
        self._restart([] if text.endswith(HALF) else token_ids)
        return text

    def _let_out(self) -> str:
        """Output held tokens up to the cut that breaks the fewest characters."""
        cuts = range(len(self._held) - 8, len(self._held))
        cut = min(cuts, key=lambda i: (len(self._decode(self._held[:i])) + len(self._decode(self._held[i:])), -i))
        text, rest = self._after_context(self._held[:cut]), self._held[cut:]
        self._held = []
        self._restart(self._context)
        return text + "".join(map(self._push, rest))

    def _after_context(self, token_ids: list[int]) -> str:
        """Decode tokens in their context; some decoders treat a first token differently."""
        before, both = self._decode(self._context), self._decode(self._context + token_ids)
        return both[len(before) :] if both.startswith(before) else self._decode(token_ids)

    def _clean_suffix(self, token_ids: Sequence[int]) -> list[int]:
        """Return the shortest suffix of 4 to 24 prompt tokens that cuts no character, else nothing."""
        for length in range(min(4, len(token_ids)), min(24, len(token_ids)) + 1):
            suffix = list(token_ids[len(token_ids) - length :])
            if HALF not in self._decode(suffix):
                return suffix
        return []

    def _decode(self, token_ids: list[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=self._skip)


class Detokenizer(Protocol):
    """A sequence's tokens and text."""

    token_ids: list[int]
    shows_at_once: bool
    """True if no text is held back for a stop string that it may begin; then `push` may be called."""

    @property
    def text(self) -> str:
        """Return all text so far, held-back characters included."""
        ...

    def update(self, new_token_ids: Sequence[int], *, finished: bool, ends_in_stop_token: bool) -> str | None:
        """Add tokens; return the stop string that ends the sequence, with everything after it dropped, or None."""
        ...

    def push(self, new_token_ids: Sequence[int]) -> str:
        """Add tokens of a sequence that goes on and return the text that they complete. It costs less than `update`."""
        ...

    def visible_length(self, *, finished: bool) -> int:
        """Return the number of characters of `text` that may be shown."""
        ...


class TokenCollector:
    """Collects tokens without text, for detokenize=False."""

    text = ""
    shows_at_once = True

    def __init__(self) -> None:
        self.token_ids: list[int] = []

    def update(self, new_token_ids: Sequence[int], *, finished: bool, ends_in_stop_token: bool) -> str | None:
        """Add tokens."""
        del finished, ends_in_stop_token
        self.token_ids.extend(new_token_ids)
        return None

    def push(self, new_token_ids: Sequence[int]) -> str:
        """Add tokens."""
        self.token_ids.extend(new_token_ids)
        return ""

    def visible_length(self, *, finished: bool) -> int:
        """Return 0: there is no text."""
        del finished
        return 0


class IncrementalDetokenizer:
    """Makes text from tokens and finds stop strings in it."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        self.token_ids: list[int] = []
        self._text = ""
        self._unjoined: list[str] = []
        """The pieces after `_text`: to join them one by one would copy a long text for every token."""
        skip = params.skip_special_tokens
        unspaced = {} if skip or params.spaces_between_special_tokens else tokenizer.added_tokens
        self._stream = TextStream(tokenizer.decoder, prompt_token_ids, skip, unspaced, tokenizer.whole_texts[skip])
        self._stop: list[str] = [params.stop] if isinstance(params.stop, str) else params.stop or []
        self._keep_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._hold_back = params.output_text_buffer_length
        self.shows_at_once = not self._stop and not self._hold_back

    @property
    def text(self) -> str:
        """Return all text so far, held-back characters included."""
        if self._unjoined:
            self._text += "".join(self._unjoined)
            self._unjoined.clear()
        return self._text

    def push(self, new_token_ids: Sequence[int]) -> str:
        """Add tokens of a sequence that goes on and return the text that they complete; there are no stop strings."""
        self.token_ids += new_token_ids
        push = self._stream.push
        text = push(new_token_ids[0]) if len(new_token_ids) == 1 else "".join(map(push, new_token_ids))
        self._unjoined.append(text)
        return text

    def update(self, new_token_ids: Sequence[int], *, finished: bool, ends_in_stop_token: bool) -> str | None:
        """Add tokens; return the stop string that ends the sequence, with everything after it dropped, or None.

        The stop token that ended the sequence makes no text unless stop strings are kept in the output.
        """
        num_texts = len(new_token_ids) - (ends_in_stop_token and not self._keep_stop)
        for i, token_id in enumerate(new_token_ids):
            self.token_ids.append(token_id)
            text = self._stream.push(token_id) if i < num_texts else ""
            if text and (stop := self._append(text)):
                return stop
        # A character that the end cuts is left out, as in vLLM: the rest will not come.
        return self._append(self._stream.flush().rstrip(HALF)) if finished else None

    def visible_length(self, *, finished: bool) -> int:
        """Return the number of characters that may be shown: the last ones may begin a stop string."""
        return len(self.text) if finished else max(0, len(self.text) - self._hold_back)

    def _append(self, text: str) -> str | None:
        self._unjoined.append(text)
        if not self._stop or not text or len(self.token_ids) <= self._min_tokens:
            return None
        match = first_stop(self.text, len(text), self._stop)
        if match is None:
            return None
        start, stop = match
        self._text = self._text[: start + len(stop) if self._keep_stop else start]
        return stop


def first_stop(text: str, num_new: int, stops: Sequence[str]) -> tuple[int, str] | None:
    """Return the start and the text of the stop string that completes first in the last `num_new` characters.

    The first to complete counts, not the first to start, so that the split into tokens does not matter.
    """
    best: tuple[int, int, str] | None = None
    for stop in stops:
        start = text.find(stop, max(0, len(text) - num_new - len(stop) + 1))
        if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
            best = start + len(stop), start, stop
    return None if best is None else best[1:]


def make_detokenizer(
    tokenizer: Tokenizer | None, prompt_token_ids: Sequence[int], params: SamplingParams
) -> Detokenizer:
    """Make the detokenizer for a request; without a tokenizer there is no text."""
    if tokenizer is None or not params.detokenize:
        return TokenCollector()
    return IncrementalDetokenizer(tokenizer, prompt_token_ids, params)
