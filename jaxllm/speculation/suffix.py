"""Draft by suffixes: what followed most often after a request's last tokens, earlier in it or in past answers.

The method is of Oliaro et al., "SuffixDecoding", 2024 (https://arxiv.org/abs/2411.04975). Their suffix trees would take
a Python object for each token of every suffix; this module finds occurrences by the last two tokens.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from typing import NamedTuple

from jaxllm.utils.token_search import WIDTH, find_last

KEY_TOKENS = 2
"""The number of tokens that occurrences are found by; a single token means little."""
_MAX_PLACES = 16
"""The number of latest occurrences that are compared, of the request and of past answers each."""
MAX_CACHED_TOKENS = 1 << 18
"""The most tokens of past answers that are kept: an entry takes some 200 bytes."""


class _Place(NamedTuple):
    """An earlier occurrence of a request's last tokens."""

    token_ids: array[int]
    after: int
    """The index of the token that followed."""
    num_matching: int
    """The number of matching tokens before it."""


class SuffixDrafter:
    """Compare the earlier occurrences of the last two tokens, and follow those that match furthest back."""

    def __init__(self, depth: int, max_answers: int, *, factor: float, least_share: float) -> None:
        """Compare at most `depth` tokens, keep `max_answers` answers, and draft at most `factor` times as many tokens
        as match; each draft followed at least `least_share` of the occurrences.
        """
        self._depth, self._factor, self._least_share = depth, factor, least_share
        self._answers = _Answers(max_answers)

    def propose(self, token_ids: array[int], at_most: int) -> array[int]:
        """Return the tokens that followed most often."""
        if len(token_ids) <= KEY_TOKENS:
            return array("i")
        places = [*self._own_places(token_ids), *self._answers.places(token_ids)]
        matches = [self._match(token_ids, *place) for place in places]
        longest = max((match.num_matching for match in matches), default=0)
        count = min(at_most, int(longest * self._factor))
        return self._vote([match for match in matches if match.num_matching == longest], count)

    def learn(self, token_ids: array[int], num_prompt_tokens: int) -> None:
        """Keep an answer for later requests."""
        self._answers.add(token_ids[num_prompt_tokens:])

    def _own_places(self, token_ids: array[int]) -> list[tuple[array[int], int]]:
        """Return the indices after earlier occurrences of the last two tokens in the request, latest first."""
        text, key = token_ids.tobytes(), token_ids[-KEY_TOKENS:].tobytes()
        places: list[tuple[array[int], int]] = []
        end = len(token_ids) - 1
        while len(places) < _MAX_PLACES and (start := find_last(text, key, end)) is not None:
            places.append((token_ids, start + KEY_TOKENS))
            end = start + KEY_TOKENS - 1
        return places

    def _match(self, token_ids: array[int], others: array[int], after: int) -> _Place:
        """Count the tokens before an index that equal the request's last ones."""
        count, last = KEY_TOKENS, len(token_ids)
        most = min(self._depth, after, last)
        while count < most and others[after - 1 - count] == token_ids[last - 1 - count]:
            count += 1
        return _Place(others, after, count)

    def _vote(self, places: list[_Place], count: int) -> array[int]:
        """Follow the token that comes next most often, as long as enough occurrences agree."""
        drafts, num_places = array("i"), len(places)
        followed = [(place.token_ids, place.after) for place in places]
        while len(drafts) < count and followed:
            # An occurrence in the request's own tokens continues with the drafts themselves.
            nexts = [own[after] if after < len(own) else drafts[after - len(own)] for own, after in followed]
            [(token_id, votes)] = Counter(nexts).most_common(1)
            if votes < self._least_share * num_places:
                break
            drafts.append(token_id)
            agreeing = [place for place, follows in zip(followed, nexts, strict=True) if follows == token_id]
            followed = [(own, after + 1) for own, after in agreeing if self._goes_on(own, after + 1, len(drafts))]
        return drafts

    def _goes_on(self, token_ids: array[int], after: int, num_drafts: int) -> bool:
        """Return whether a token exists at an index: past answers end, but a request continues with its drafts."""
        return after < len(token_ids) or (not self._answers.has(token_ids) and after - len(token_ids) < num_drafts)


class _Answers:
    """The latest answers, with the indices after each pair of tokens."""

    def __init__(self, max_answers: int) -> None:
        self._max_answers = max_answers
        self._num_tokens = 0
        self._answers: OrderedDict[int, array[int]] = OrderedDict()
        """The answers by `id`, oldest first."""
        self._places: dict[bytes, list[tuple[array[int], int]]] = {}

    def has(self, token_ids: array[int]) -> bool:
        """Return whether an array is one of the answers."""
        return id(token_ids) in self._answers

    def places(self, token_ids: array[int]) -> list[tuple[array[int], int]]:
        """Return the indices after the last two tokens, latest first."""
        return self._places.get(token_ids[-KEY_TOKENS:].tobytes(), [])[::-1]

    def add(self, answer: array[int]) -> None:
        """Keep an answer; the oldest are dropped to make room."""
        if not self._max_answers or not KEY_TOKENS < len(answer) <= MAX_CACHED_TOKENS:
            return
        self._answers[id(answer)] = answer
        self._num_tokens += len(answer)
        for key, after in _keys(answer):
            places = self._places.setdefault(key, [])
            places.append((answer, after))
            del places[:-_MAX_PLACES]
        while len(self._answers) > self._max_answers or self._num_tokens > MAX_CACHED_TOKENS:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        _, answer = self._answers.popitem(last=False)
        self._num_tokens -= len(answer)
        for key, _ in _keys(answer):
            places = [place for place in self._places.get(key, ()) if place[0] is not answer]
            if places:
                self._places[key] = places
            else:
                self._places.pop(key, None)


def _keys(token_ids: array[int]) -> list[tuple[bytes, int]]:
    """Return each pair of tokens that has a successor, as bytes, with the successor's index."""
    text = token_ids.tobytes()
    return [(text[(after - KEY_TOKENS) * WIDTH : after * WIDTH], after) for after in range(KEY_TOKENS, len(token_ids))]
