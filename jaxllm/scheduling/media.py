"""The images and videos of requests: the rows that their tokens take, and who holds them in the feature cache.

The device's feature cache has rows, which an encoder writes item by item and steps read. An item is known by its key,
the hash of its content, so requests with the same picture share its rows. Rows without a holder stay until their place
is wanted: the least recently held go first.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator
from itertools import zip_longest

import msgspec

from jaxllm.core_messages import MediaItem, MediaSpan, PromptMedia


class ChunkMedia(msgspec.Struct, frozen=True, gc=False):
    """What the tokens of a chunk take from media."""

    rows: array[int] | None = None
    """int32, for each token the row of the feature cache in place of its embedding, -1 for none; None if none has one.
    """
    ends: array[int] | None = None
    """int32, for each token the position after the last one that it attends to; None if attention is causal."""
    rope_positions: bytes = b""
    """int32 [n, 3], the positions of multimodal RoPE of the chunk's tokens in the prompt, which come first; empty if
    all are the token's position."""
    rope_offset: int = 0
    """What multimodal RoPE adds to the positions of tokens after the prompt."""


class Encode(msgspec.Struct, frozen=True, gc=False):
    """An item to be written to rows of the feature cache before a step runs: encoded, unless it is already."""

    item: MediaItem
    rows: array[int]


class _Entry:
    """The rows of an item, and the requests that still need them."""

    __slots__ = ("holders", "rows")

    def __init__(self, rows: array[int]) -> None:
        self.rows = rows
        self.holders: set[str] = set()


_NOTHING = ChunkMedia()


class MediaCache:
    """The rows of the feature cache: free, or of an item.

    A request holds the items of its chunk until the step is planned, since later steps run after it, and then only the
    item in which the chunk ends. So a request that waits for rows holds none, and one that holds some can go on.
    """

    def __init__(self, num_rows: int, *, sees_both_sides: bool = False) -> None:
        self.num_rows = num_rows
        self._sees_both_sides = sees_both_sides
        self._free = array("i", range(num_rows - 1, -1, -1))
        self._entries: dict[bytes, _Entry] = {}
        """By key; those without holders in the order in which they lost the last one."""
        self._num_idle = 0
        """The number of rows of items without holders."""
        self._held: dict[str, dict[bytes, None]] = {}
        """The keys that each request holds, in order."""
        self.begin_step(0)

    # -- a step --------------------------------------------------------------------------------------------------------

    def begin_step(self, num_rows: int) -> None:
        """Begin to plan a step, which may encode `num_rows` rows, or one item of more."""
        self._num_encodable = num_rows
        self._encodes: list[Encode] = []
        self._chunks: list[tuple[str, PromptMedia, int]] = []
        """The request of each chunk that took items, its media, and the chunk's end."""
        self._are_awaited = False
        """True once a request of this step has found too few rows: later ones leave to it what becomes free."""

    def limit(self, request_id: str, media: PromptMedia, start: int, num_tokens: int) -> int:
        """Return how many of the tokens from `start` on the step can compute.

        It ends before an item that has no room: in the cache, or among the rows that the step may still encode, which
        do not bind its first item. Where tokens of a span attend to all of it, the chunk does not end within one.
        """
        end, room = start + num_tokens, len(self._free) + self._num_idle
        num_encodable, is_first = self._num_encodable, not self._encodes
        counted = set(self._held.get(request_id, ()))
        for item in _items_in(media, start, end):
            num_before = max(0, item.spans[0].offset - start)
            if self._sees_both_sides and _end(item) > end:
                num_tokens = max(0, span_start(media, end) - start)
                if num_tokens <= num_before:
                    return num_tokens
            if item.key in counted:
                continue
            counted.add(item.key)
            entry, num_rows = self._entries.get(item.key), _num_rows(item)
            num_taken = 0 if entry is not None and entry.holders else num_rows
            if self._are_awaited or num_taken > room:
                self._are_awaited = True
                return num_before
            room -= num_taken
            if entry is None:
                if num_rows > num_encodable and not is_first:
                    return num_before
                num_encodable, is_first = num_encodable - num_rows, False
        return num_tokens

    def take(self, request_id: str, media: PromptMedia, start: int, num_tokens: int) -> None:
        """Hold the items of a chunk for its request, and encode those that are not cached; `limit` has allowed it."""
        items = {item.key: item for item in _items_in(media, start, start + num_tokens)}
        if not items:
            return
        self._chunks.append((request_id, media, start + num_tokens))
        held = self._held.setdefault(request_id, {})
        new = [item for key, item in items.items() if key not in held]
        cached = [item.key for item in new if item.key in self._entries]
        # The cached ones first: they must not make room for the others.
        for key in cached:
            if not self._entries[key].holders:
                self._num_idle -= len(self._entries[key].rows)
            self._hold(request_id, key)
        for item in new:
            if item.key not in held:
                rows = self._take_rows(_num_rows(item))
                self._entries[item.key] = _Entry(rows)
                self._hold(request_id, item.key)
                self._encodes.append(Encode(item, rows))
                self._num_encodable = max(0, self._num_encodable - len(rows))

    def end_step(self) -> tuple[Encode, ...]:
        """Give up the items whose tokens are all planned, and return those to encode before the step."""
        for request_id, media, end in self._chunks:
            kept = {item.key for item in _items_in(media, end - 1, end) if _end(item) > end}
            self._release(request_id, [key for key in self._held[request_id] if key not in kept])
        return tuple(self._encodes)

    def chunk(self, media: PromptMedia, start: int, num_tokens: int, num_prompt_tokens: int) -> ChunkMedia:
        """Return what a chunk, whose items are held, takes from media."""
        if start >= num_prompt_tokens:
            return ChunkMedia(rope_offset=media.rope_offset) if media.rope_offset else _NOTHING
        end, rows, ends = start + num_tokens, None, None
        for item in _items_in(media, start, end):
            if rows is None:
                rows = array("i", (-1,)) * num_tokens
                ends = array("i", range(start + 1, end + 1)) if self._sees_both_sides else None
            of_item = self._entries[item.key].rows
            for first, after, row in _pieces(item, start, end):
                rows[first - start : after - start] = of_item[row : row + after - first]
                if ends is not None:  # the chunk does not end within the item, so these are the rest of a span
                    ends[first - start : after - start] = array("i", (after,)) * (after - first)
        return ChunkMedia(rows, ends, _rope_bytes(media, start, end), media.rope_offset)

    # -- holders -------------------------------------------------------------------------------------------------------

    def release(self, request_id: str) -> bool:
        """Give up all items of a request; return whether it held any."""
        held = self._held.get(request_id)
        if held is None:
            return False
        was_holding = bool(held)
        self._release(request_id, list(held))
        del self._held[request_id]
        return was_holding

    def _hold(self, request_id: str, key: bytes) -> None:
        self._entries[key].holders.add(request_id)
        self._held[request_id][key] = None

    def _release(self, request_id: str, keys: list[bytes]) -> None:
        for key in keys:
            del self._held[request_id][key]
            entry = self._entries[key]
            entry.holders.remove(request_id)
            if not entry.holders:
                self._num_idle += len(entry.rows)
                self._entries[key] = self._entries.pop(key)

    def _take_rows(self, num_rows: int) -> array[int]:
        while len(self._free) < num_rows:
            key = next(key for key, entry in self._entries.items() if not entry.holders)
            rows = self._entries.pop(key).rows
            self._free.extend(rows)
            self._num_idle -= len(rows)
        rows = self._free[len(self._free) - num_rows :]
        del self._free[len(self._free) - num_rows :]
        return rows

    def forget_all(self) -> bool:
        """Forget all items; return False, and forget nothing, while a request holds one."""
        if any(self._held.values()):
            return False
        for entry in self._entries.values():
            self._free.extend(entry.rows)
        self._entries.clear()
        self._num_idle = 0
        return True

    def check(self, running: set[str]) -> None:
        """Assert that each row is free or of one item, and that only running requests hold items."""
        rows = [row for entry in self._entries.values() for row in entry.rows]
        assert sorted([*self._free, *rows]) == list(range(self.num_rows)), "a row is lost or has two owners"
        idle = sum(len(entry.rows) for entry in self._entries.values() if not entry.holders)
        assert idle == self._num_idle, "the rows without holders are miscounted"
        holders = {(name, key) for key, entry in self._entries.items() for name in entry.holders}
        assert holders == {(name, key) for name, keys in self._held.items() for key in keys}, "holders differ"
        assert {name for name, keys in self._held.items() if keys} <= running, "a request that does not run holds rows"


def block_media(media: PromptMedia, start: int, end: int) -> bytes:
    """Return what the tokens from `start` to `end` take from items as bytes, for the hash of a block.

    With multimodal RoPE their positions are part of it from the first item on: the same text may get others in another
    prompt.
    """
    parts = []
    for item in _items_in(media, start, end):
        for first, after, row in _pieces(item, start, end):
            numbers = array("q", (first - start, after - first, row, len(item.key)))
            parts += [b"\xfe", numbers.tobytes(), item.key]  # no text in UTF-8 has that byte
    if media.rope_positions and media.items and end > media.items[0].spans[0].offset:
        num_prompt_tokens = len(media.rope_positions) // 12
        of_outputs = range(max(start, num_prompt_tokens) + media.rope_offset, end + media.rope_offset)
        repeated = array("i", [position for position in of_outputs for _ in range(3)])
        parts += [b"\xfd", _rope_bytes(media, start, end), repeated.tobytes()]
    return b"".join(parts)


def agreeing_length(left: PromptMedia | None, right: PromptMedia | None, at_most: int) -> int:
    """Return the number of leading tokens, up to a limit, that take the same from items in two prompts."""
    if left is right:
        return at_most
    for pair in zip_longest(*(() if media is None else _places(media) for media in (left, right))):
        if pair[0] != pair[1]:
            return min(at_most, *(offset for offset, *_ in filter(None, pair)))
    return at_most


def span_start(media: PromptMedia, position: int) -> int:
    """Return the first position of the span that goes on at a position, or the position itself if none does."""
    return next((span.offset for span in _spans_at(media, position) if span.offset < position), position)


def span_end(media: PromptMedia, position: int) -> int:
    """Return the position after the span in which a position lies, or the position itself if it lies in none."""
    return next((_span_end(span) for span in _spans_at(media, position)), position)


def extents(media: PromptMedia) -> list[tuple[int, int]]:
    """Return the positions of each span's first token, and after its last."""
    return [(span.offset, _span_end(span)) for item in media.items for span in item.spans]


def row_counts(media: PromptMedia) -> list[int]:
    """Return the rows of each item; of equal ones, those of one."""
    return list({item.key: _num_rows(item) for item in media.items}.values())


def _places(media: PromptMedia) -> Iterator[tuple[int, list[MediaSpan], bytes, bytes]]:
    """Yield the first position of each item, its spans, its key and its positions."""
    for item in media.items:
        first = item.spans[0].offset
        yield first, item.spans, item.key, _rope_bytes(media, first, _end(item))


def _items_in(media: PromptMedia, start: int, end: int) -> Iterator[MediaItem]:
    """Yield the items with tokens between two positions, in order."""
    for index in range(bisect_right(media.items, start, key=_end), len(media.items)):
        if media.items[index].spans[0].offset >= end:
            return
        yield media.items[index]


def _spans_at(media: PromptMedia, position: int) -> Iterator[MediaSpan]:
    """Yield the span in which a position lies, if there is one."""
    for item in _items_in(media, position, position + 1):
        index = bisect_right(item.spans, position, key=_span_end)
        if item.spans[index].offset <= position:
            yield item.spans[index]


def _pieces(item: MediaItem, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield the first position of each span between two positions, the one after its last, and its first row."""
    for index in range(bisect_right(item.spans, start, key=_span_end), len(item.spans)):
        span = item.spans[index]
        if span.offset >= end:
            return
        first = max(span.offset, start)
        yield first, min(_span_end(span), end), span.first_row + first - span.offset


def _rope_bytes(media: PromptMedia, start: int, end: int) -> bytes:
    """Return the positions in multimodal RoPE of the tokens from `start` to `end`: three int32 each."""
    return media.rope_positions[12 * start : 12 * end]


def _end(item: MediaItem) -> int:
    return _span_end(item.spans[-1])


def _span_end(span: MediaSpan) -> int:
    return span.offset + span.num_rows


def _num_rows(item: MediaItem) -> int:
    return sum(span.num_rows for span in item.spans)
