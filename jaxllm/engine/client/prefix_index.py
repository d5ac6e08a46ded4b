"""Estimate what a replica's prefix cache holds, by hashes of the beginnings of its prompts."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from jaxllm.core_messages import EngineCoreRequest


class _Prefix(NamedTuple):
    """A beginning of a prompt."""

    key: Hashable
    num_tokens: int


def prefixes(request: EngineCoreRequest, block_size: int) -> list[_Prefix]:
    """Return beginnings of a request's prompt of 1, 2, 3, 4, 6, 8, 12, 16, 24, ... whole blocks, shortest first.

    Long prompts too have few of them, and of whole blocks that two prompts share, one of these has at least two thirds.
    What the cache tells apart, an adapter, a salt, a clip, steering or an image that begins there, tells their keys
    apart.
    """
    tokens = array("i", request.prompt_token_ids)
    adapter, clip = request.lora and request.lora.lora_int_id, request.clip and request.clip.key
    key: Hashable = (adapter, request.cache_salt, clip, request.steered and request.steered.key)
    items = [] if request.media is None else [(item.spans[0].offset, item.key) for item in request.media.items]
    prefixes: list[_Prefix] = []
    start, num_blocks, step = 0, 1, 1
    while (end := num_blocks * block_size) <= len(tokens):
        of_media = tuple(name for offset, name in items if start <= offset < end)
        key = hash((key, tokens[start:end].tobytes(), of_media))
        prefixes.append(_Prefix(key, end))
        start = end
        if num_blocks >= 4 and num_blocks & (num_blocks - 1) == 0:
            step = num_blocks // 2
        num_blocks += step
    return prefixes


class PrefixIndex:
    """The prefixes that a replica is likely to have in its cache: those used last, as far as there is room."""

    def __init__(self, num_tokens: int) -> None:
        """Make room for the number of tokens that the replica's KV cache has."""
        self._room = num_tokens
        self._lengths: OrderedDict[Hashable, int] = OrderedDict()
        """The tokens that each prefix adds to the next shorter one, by its key; those used last at the end."""
        self._num_tokens = 0

    def num_cached(self, prompt: Sequence[_Prefix]) -> int:
        """Return the number of a prompt's tokens that are likely to be cached."""
        longest = 0
        for prefix in prompt:
            if prefix.key not in self._lengths:
                break
            longest = prefix.num_tokens
        return longest

    def add(self, prompt: Sequence[_Prefix]) -> None:
        """Note that the replica computes a prompt; a prefix stays for longer than those that go on from it."""
        before = [0, *(prefix.num_tokens for prefix in prompt)]
        for prefix, shorter in zip(reversed(prompt), reversed(before[:-1]), strict=True):
            if prefix.key not in self._lengths:
                self._lengths[prefix.key] = prefix.num_tokens - shorter
                self._num_tokens += prefix.num_tokens - shorter
            self._lengths.move_to_end(prefix.key)
        while self._num_tokens > self._room:
            self._num_tokens -= self._lengths.popitem(last=False)[1]

    def clear(self) -> None:
        """Forget all prefixes: the cache was emptied."""
        self._lengths.clear()
        self._num_tokens = 0
