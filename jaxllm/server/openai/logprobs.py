"""Convert log-probabilities to the forms of chat, of completions, and of vLLM's prompt logprobs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

import msgspec

from jaxllm.logprobs import Logprob, LogprobsOnePosition
from jaxllm.text.tokenizer import Tokenizer

LEAST = -9999.0
"""The log-probability shown for impossible tokens, as in vLLM: JSON has no infinity."""
type _Positions = Iterable[LogprobsOnePosition | None]


class ChatTopLogprob(msgspec.Struct, frozen=True):
    """One of the most likely tokens at a position."""

    token: str
    logprob: float
    bytes: list[int] | None
    """The text's bytes in UTF-8; None where nothing is detokenized."""


class ChatTokenLogprob(msgspec.Struct, frozen=True):
    """A token of a chat's answer, with the most likely tokens at its position, itself among them, most likely first."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """The log-probabilities of a chat's answer or delta."""

    content: list[ChatTokenLogprob]


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """The log-probabilities of a completion or delta, in four lists of equal length."""

    text_offset: list[int]
    """The offset of each token in characters of the tokens' texts."""
    token_logprobs: list[float | None]
    """None where unknown, as for a prompt's first token."""
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]
    """The most likely tokens by text, and the token itself."""


class PromptTokenLogprob(msgspec.Struct, frozen=True):
    """A token at one position of a prompt, as vLLM shows it."""

    logprob: float
    rank: int | None
    decoded_token: str | None


def chat_logprobs(
    token_ids: Sequence[int], positions: _Positions, num_top: int | None, *, as_token_ids: bool = False
) -> ChatLogprobs:
    """Return the chat form with `num_top` tokens at each position, or all known ones for None or -1. As in vLLM the
    sampled token is one of them.

    With `as_token_ids` token 5 reads "token_id:5"; its bytes are still those of its text.
    """
    limit = None if num_top is None or num_top < 0 else num_top
    content: list[ChatTokenLogprob] = []
    for token_id, position in zip(token_ids, positions, strict=True):
        assert position is not None  # generated tokens all have one
        sampled = _chat_token(token_id, position[token_id], as_token_ids)
        ranked = sorted(islice(position.items(), limit), key=_rank)  # the sampled token comes first in a position
        top = [_chat_token(each, entry, as_token_ids) for each, entry in ranked]
        content.append(ChatTokenLogprob(sampled.token, sampled.logprob, sampled.bytes, top))
    return ChatLogprobs(content)


def completion_logprobs(
    token_ids: Sequence[int],
    positions: _Positions,
    *,
    as_token_ids: bool = False,
    text_offset: int = 0,
    tokenizer: Tokenizer | None = None,
) -> CompletionLogprobs:
    """Return the completion form; the first token begins at `text_offset`.

    For a position that is None, like a prompt's first, only the token's text is shown, by `tokenizer`.
    """
    offsets: list[int] = []
    values: list[float | None] = []
    tokens: list[str] = []
    tops: list[dict[str, float] | None] = []
    for token_id, position in zip(token_ids, positions, strict=True):
        sampled = position[token_id] if position else None
        decoded = sampled.decoded_token if sampled else tokenizer.token_string(token_id) if tokenizer else None
        tokens.append(_token_text(token_id, decoded, as_token_ids))
        values.append(None if sampled is None else _shown_logprob(sampled.logprob))
        tops.append(_tops(position, as_token_ids) if position else None)
        offsets.append(text_offset)
        text_offset += len(tokens[-1])
    return CompletionLogprobs(offsets, values, tokens, tops)


def prompt_logprobs(positions: _Positions | None) -> list[dict[int, PromptTokenLogprob] | None] | None:
    """Return vLLM's form for prompts: a dict by token id per position, None for the first; None if not requested."""
    if positions is None:
        return None
    return [
        {
            token_id: PromptTokenLogprob(_shown_logprob(each.logprob), each.rank, each.decoded_token)
            for token_id, each in position.items()
        }
        if position
        else None
        for position in positions
    ]


def _token_text(token_id: int, decoded: str | None, as_token_id: bool) -> str:
    """Return a token as its text or as "token_id:5"."""
    return f"token_id:{token_id}" if as_token_id or decoded is None else decoded


def _shown_logprob(value: float) -> float:
    """Return a log-probability that JSON can hold."""
    return max(value, LEAST)


def _chat_token(token_id: int, entry: Logprob, as_token_ids: bool) -> ChatTopLogprob:
    text = entry.decoded_token
    encoded = None if text is None else list(text.encode(errors="replace"))
    return ChatTopLogprob(_token_text(token_id, text, as_token_ids), _shown_logprob(entry.logprob), encoded)


def _tops(position: Mapping[int, Logprob], as_token_ids: bool) -> dict[str, float]:
    """Return the values by text. Of several tokens with one text the first is shown, which may be the sampled one."""
    tops: dict[str, float] = {}
    for token_id, entry in position.items():
        tops.setdefault(_token_text(token_id, entry.decoded_token, as_token_ids), _shown_logprob(entry.logprob))
    return tops


def _rank(item: tuple[int, Logprob]) -> tuple[bool, int]:
    rank = item[1].rank
    return rank is None, rank or 0
