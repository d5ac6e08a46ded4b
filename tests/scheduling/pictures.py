"""Prompts with pictures for the simulation, and the feature cache of its device."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from jaxllm.core_messages import EngineCoreRequest, MediaItem, MediaSpan, PromptMedia
from jaxllm.scheduling.config import SchedulerConfig
from jaxllm.scheduling.media import Encode, MediaCache
from jaxllm.scheduling.plan import Chunk

PICTURE_TOKEN, BREAK_TOKEN = 48, 47


@dataclass(frozen=True)
class Picture:
    """A picture, or a video: its tokens come in spans with a token between them that takes no row."""

    name: str
    spans: tuple[int, ...] = (4,)
    stretch: int = 1
    """How far its lines are apart in multimodal RoPE, as with videos of other rates."""

    @property
    def num_rows(self) -> int:
        return sum(self.spans)

    @property
    def num_tokens(self) -> int:
        return self.num_rows + len(self.spans) - 1


PICTURES = (
    Picture("a", (4,)),
    Picture("another a", (4,)),
    Picture("lines", (2, 2, 2)),
    Picture("other lines", (2, 2, 2)),
    Picture("dot", (1,)),
    Picture("dots", (1, 3)),
    Picture("wide", (7,)),
)
LARGE_PICTURES = (Picture("wider", (9,)), Picture("wider lines", (8, 8)))
"""Pictures that many engines refuse."""


def make_prompt(parts: Iterable[list[int] | Picture], *, has_rope: bool = False) -> tuple[list[int], PromptMedia]:
    """Return the tokens of texts and pictures, and their media; `has_rope` gives each token three positions."""
    token_ids: list[int] = []
    items: list[MediaItem] = []
    positions = array("i")
    after = 0
    for part in parts:
        if not isinstance(part, Picture):
            token_ids += part
            for _ in part:
                positions.extend((after,) * 3)
                after += 1
            continue
        spans, row = [], 0
        for line, num_rows in enumerate(part.spans):
            if line:
                token_ids.append(BREAK_TOKEN)
                positions.extend((after, after + line * part.stretch, after + num_rows))
            spans.append(MediaSpan(len(token_ids), num_rows, row))
            token_ids += [PICTURE_TOKEN] * num_rows
            for column in range(num_rows):
                positions.extend((after, after + line * part.stretch, after + column))
            row += num_rows
        after += max(*part.spans, len(part.spans) * part.stretch)
        patches = array("f", range(part.num_rows)).tobytes()
        items.append(
            MediaItem(
                key=part.name.encode(),
                modality="image",
                grids=[(1, 1, part.num_rows)],
                size=(1, part.num_rows),
                patches=patches,
                spans=spans,
            )
        )
    if not has_rope:
        return token_ids, PromptMedia(items=items)
    offset = after - len(token_ids)
    return token_ids, PromptMedia(items=items, rope_positions=positions.tobytes(), rope_offset=offset)


def prefix(media: PromptMedia | None, num_tokens: int) -> tuple[PromptMedia | None, int]:
    """Return the media of a prompt's first tokens, and their number: fewer if a picture would be cut."""
    if media is None:
        return None, num_tokens
    cut = next((item for item in media.items if item.spans[0].offset < num_tokens < end_of(item)), None)
    num_tokens = num_tokens if cut is None else cut.spans[0].offset
    items = [item for item in media.items if end_of(item) <= num_tokens]
    positions, offset = media.rope_positions[: 12 * num_tokens], media.rope_offset
    if 12 * num_tokens < len(media.rope_positions):
        offset = max(array("i", positions), default=-1) + 1 - num_tokens
    return PromptMedia(items=items, rope_positions=positions, rope_offset=offset), num_tokens


def exchanged(media: PromptMedia | None) -> PromptMedia | None:
    """Return media with another picture in the place of each."""
    if media is None:
        return None
    items = [msgspec.structs.replace(item, key=b"not " + item.key) for item in media.items]
    return msgspec.structs.replace(media, items=items)


def end_of(item: MediaItem) -> int:
    return item.spans[-1].offset + item.spans[-1].num_rows


def trait(position: int, source: tuple[bytes, int] | None, rope: Sequence[int]) -> bytes:
    """Return what a token's keys depend on besides the tokens: nothing for text at its own position."""
    if source is None and tuple(rope) == (position,) * 3:
        return b""
    return repr((source, tuple(rope))).encode()


class Traits:
    """What each token of a request takes from media, written independently of the scheduler's code."""

    def __init__(self, request: EngineCoreRequest) -> None:
        media = request.media or PromptMedia(items=[])
        self.sources: dict[int, tuple[bytes, int]] = {}
        self.ends: dict[int, int] = {}
        for item in media.items:
            for span in item.spans:
                for i in range(span.num_rows):
                    self.sources[span.offset + i] = item.key, span.first_row + i
                    self.ends[span.offset + i] = span.offset + span.num_rows
        self._offset, self._positions = media.rope_offset, array("i", media.rope_positions)

    def __getitem__(self, position: int) -> bytes:
        rope = self._positions[3 * position : 3 * position + 3] or [position + self._offset] * 3
        return trait(position, self.sources.get(position), rope)


class FeatureRows:
    """The rows of the device's feature cache: what each holds."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._rows: list[tuple[bytes, int] | None] = [None] * config.num_media_rows

    def encode(self, encodes: Sequence[Encode]) -> None:
        """Write items, as before a step."""
        written = [row for encode in encodes for row in encode.rows]
        assert len(set(written)) == len(written), "two items of a step are written to one row"
        assert len(encodes) <= 1 or self._is_within_budget(encodes), "a step encodes too much"
        for encode in encodes:
            assert len(encode.rows) == sum(span.num_rows for span in encode.item.spans)
            for index, row in enumerate(encode.rows):
                self._rows[row] = encode.item.key, index

    def _is_within_budget(self, encodes: Sequence[Encode]) -> bool:
        # The first item may be larger than what a step encodes; then it is the only one.
        return sum(len(encode.rows) for encode in encodes) <= self._config.max_num_batched_tokens

    def read(self, chunk: Chunk, request: EngineCoreRequest) -> list[bytes]:
        """Return what each token of a chunk takes, and check that it is what the request wants."""
        assert (chunk.media is None) == (request.media is None)
        if chunk.media is None:
            return [b""] * len(chunk.token_ids)
        wanted, media, num_known = Traits(request), chunk.media, len(chunk.token_ids) - chunk.num_drafts
        rope = array("i", media.rope_positions)
        assert (media.ends is None) == (media.rows is None or not self._config.sees_both_sides)
        for taken in (media.rows, media.ends):
            assert taken is None or len(taken) == num_known
        traits = []
        for i, position in enumerate(range(chunk.start, chunk.start + len(chunk.token_ids))):
            row = -1 if media.rows is None or i >= num_known else media.rows[i]
            source = None if row < 0 else self._rows[row]
            assert source == wanted.sources.get(position), f"{chunk.request_id} reads a wrong row at {position}"
            if media.ends is not None and i < num_known:
                end = wanted.ends.get(position, position + 1)
                assert media.ends[i] == end, f"{chunk.request_id} has a wrong end at {position}"
            if self._config.sees_both_sides:
                end = wanted.ends.get(position, 0)
                assert end <= chunk.start + num_known, f"{chunk.request_id} cuts an image at {position}"
            traits.append(trait(position, source, rope[3 * i : 3 * i + 3] or [position + media.rope_offset] * 3))
            assert traits[-1] == wanted[position], f"{chunk.request_id} has wrong positions at {position}"
        return traits

    def check(self, cache: MediaCache) -> None:
        """Check that the rows of each item hold it."""
        for key, entry in cache._entries.items():
            assert [self._rows[row] for row in entry.rows] == [(key, i) for i in range(len(entry.rows))]
