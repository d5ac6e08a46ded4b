"""Expand the placeholders of images and videos in a prompt, as text or as token ids.

A text is expanded before it is tokenized, as transformers' processors do it, so that tokens merge with the text around
them. Token ids are expanded where the ids of the placeholder stand; newlines at the seams are merged as the tokenizer
would merge them. While tokenizing, one token stands for all rows of a run, which is as long as it has to be later.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from jaxllm.exceptions import VLLMValidationError
from jaxllm.media.rules import find_rule
from jaxllm.media.shapes import ItemShape, Modality

_MOST_NEWLINES = 32
"""Tokens of up to this many newlines are looked for at the seams of ids."""


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive positions of a prompt that take consecutive rows of an item."""

    offset: int
    """The first position."""
    num_rows: int
    item: int
    """The number of the item among all items of the prompt."""
    first_row: int
    """The row of the item that the first position takes."""


@dataclass(frozen=True, slots=True)
class Expanded:
    """The token ids of a prompt with a token for each row, and the spans of these."""

    ids: list[int]
    spans: tuple[Span, ...]


class Encodes(Protocol):
    """A tokenizer, as `jaxllm.text.tokenizer.Tokenizer` is one."""

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Return the token ids of texts."""
        ...


@dataclass(frozen=True, slots=True)
class _Run:
    """Rows that stand together: the id of their token, their number, their item and their first row."""

    token_id: int
    num_rows: int
    item: int
    first_row: int


class Expander:
    """Expands the placeholders of one model's prompts. Threads may share it."""

    def __init__(self, config: Mapping[str, Any], tokenizer: Encodes) -> None:
        """Make an expander for a model with this config.json.

        Raises VLLMValidationError for a type of model that takes no images.
        """
        self.rule = find_rule(config)
        self._tokenizer = tokenizer

    def check_counts(self, prompt: str | Sequence[int], modalities: Sequence[Modality]) -> None:
        """Raise VLLMValidationError unless a text or token ids have as many placeholders as there are items."""
        texts = self._pattern.findall(prompt) if isinstance(prompt, str) else self._split_ids(prompt)[1]
        self._match(texts, modalities)

    def expand_text(self, text: str, shapes: Sequence[ItemShape], *, add_special_tokens: bool = True) -> Expanded:
        """Return the token ids of a text, the n-th placeholder of a modality expanded for its n-th item.

        A prompt without items needs no expanding. Raises VLLMValidationError if there are not as many placeholders as
        items, or if a token that takes rows stands elsewhere.
        """
        order = self._match(self._pattern.findall(text), [shape.modality for shape in shapes])
        parts = self._pattern.split(text)
        runs: list[_Run] = []
        texts = [parts[0]]
        for item, part in zip(order, parts[1:], strict=True):
            texts += [self._collapse(shapes[item], item, runs), part]
        (ids,) = self._tokenizer.encode(["".join(texts)], add_special_tokens=add_special_tokens)
        return self._finish(ids, runs)

    def expand_ids(self, ids: Sequence[int], shapes: Sequence[ItemShape]) -> Expanded:
        """Return the token ids of a prompt of token ids, expanded like a text.

        Raises VLLMValidationError as `expand_text` does.
        """
        parts, texts = self._split_ids(ids)
        order = self._match(texts, [shape.modality for shape in shapes])
        runs: list[_Run] = []
        joined = parts[0]
        for item, part in zip(order, parts[1:], strict=True):
            (expansion,) = self._tokenizer.encode([self._collapse(shapes[item], item, runs)], add_special_tokens=False)
            joined = self._join(self._join(joined, expansion), part)
        return self._finish(joined, runs)

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        """Return the pattern of all placeholders, longer ones first."""
        return re.compile("|".join(map(re.escape, sorted(self._modalities, key=len, reverse=True))))

    @cached_property
    def _modalities(self) -> dict[str, str]:
        """Return the modality of each placeholder's text."""
        return {text: modality for modality, text in self.rule.placeholders.items()}

    @cached_property
    def _row_ids(self) -> dict[str, int]:
        """Return the id of the token that takes a row of a modality, unless the tokenizer takes it apart."""
        encoded = self._tokenizer.encode(list(self.rule.rows.values()), add_special_tokens=False)
        return {modality: ids[0] for modality, ids in zip(self.rule.rows, encoded, strict=True) if len(ids) == 1}

    @cached_property
    def _placeholder_ids(self) -> dict[tuple[int, ...], str]:
        """Return the text of each placeholder by its ids."""
        texts = list(self._modalities)
        encoded = self._tokenizer.encode(texts, add_special_tokens=False)
        return {tuple(ids): text for ids, text in zip(encoded, texts, strict=True)}

    @cached_property
    def _newlines(self) -> dict[int, int]:
        """Return the number of newlines of each token that is nothing else."""
        numbers = range(1, _MOST_NEWLINES + 1)
        encoded = self._tokenizer.encode(["\n" * number for number in numbers], add_special_tokens=False)
        return {ids[0]: number for number, ids in zip(numbers, encoded, strict=True) if len(ids) == 1}

    def _row_id(self, modality: str) -> int:
        """Return the id of the token that takes a row. Raises VLLMValidationError if the tokenizer takes it apart."""
        if modality not in self._row_ids:
            token = self.rule.rows[modality]
            raise VLLMValidationError(
                f"the checkpoint's tokenizer has no token {token!r}, which the model's {modality}s need",
                parameter="tokenizer",
                value=token,
            )
        return self._row_ids[modality]

    def _match(self, texts: Sequence[str], modalities: Sequence[Modality]) -> list[int]:
        """Return the item of each placeholder. Raises VLLMValidationError if their numbers differ."""
        items = {
            modality: [number for number, kind in enumerate(modalities) if kind == modality]
            for modality in dict.fromkeys([*self.rule.placeholders, *modalities])
        }
        counts = Counter(self._modalities[text] for text in texts)
        for modality, numbers in items.items():
            if counts[modality] != len(numbers):
                token = self.rule.placeholders.get(modality)
                raise VLLMValidationError(
                    f"the prompt has {counts[modality]} placeholders {token!r} for {modality}s, "
                    f"but multi_modal_data has {len(numbers)}"
                    if token
                    else f"the model takes no {modality}s, but multi_modal_data has {len(numbers)}",
                    parameter="multi_modal_data",
                )
        following = {modality: iter(numbers) for modality, numbers in items.items()}
        return [next(following[self._modalities[text]]) for text in texts]

    def _collapse(self, shape: ItemShape, item: int, runs: list[_Run]) -> str:
        """Return what an item's placeholder becomes, with one token for each run of rows; append these to `runs`."""
        row, token_id = self.rule.rows[shape.modality], self._row_id(shape.modality)
        texts: list[str] = []
        first_row = 0
        for piece in self.rule.pieces(shape):
            if isinstance(piece, str):
                texts.append(piece)
            else:
                texts.append(row)
                runs.append(_Run(token_id, piece, item, first_row))
                first_row += piece
        return "".join(texts)

    def _finish(self, ids: Sequence[int], runs: Sequence[_Run]) -> Expanded:
        """Return ids with each run at its length.

        Raises VLLMValidationError if a token that takes a row stands elsewhere too.
        """
        rows = set(self._row_ids.values())
        positions = [position for position, token_id in enumerate(ids) if token_id in rows]
        if [ids[position] for position in positions] != [run.token_id for run in runs]:
            raise VLLMValidationError(
                f"the prompt holds one of {sorted(self.rule.rows.values())} where no image or video belongs: "
                f"write {' or '.join(map(repr, self._modalities))} once for each item, and nothing else of these",
                parameter="prompt",
            )
        expanded: list[int] = []
        spans: list[Span] = []
        end = 0
        for position, run in zip(positions, runs, strict=True):
            expanded += ids[end:position]
            spans.append(Span(len(expanded), run.num_rows, run.item, run.first_row))
            expanded += [run.token_id] * run.num_rows
            end = position + 1
        expanded += ids[end:]
        return Expanded(expanded, tuple(spans))

    def _split_ids(self, ids: Sequence[int]) -> tuple[list[list[int]], list[str]]:
        """Return the ids around placeholders, one part more than there are placeholders, and the placeholders."""
        parts: list[list[int]] = [[]]
        texts: list[str] = []
        end = 0
        firsts = {placeholder[0] for placeholder in self._placeholder_ids}
        for start in [position for position, token_id in enumerate(ids) if token_id in firsts]:
            for placeholder, text in self._placeholder_ids.items():
                if tuple(ids[start : start + len(placeholder)]) == placeholder:
                    parts[-1] = list(ids[end:start])
                    parts.append([])
                    texts.append(text)
                    end = start + len(placeholder)
        parts[-1] = list(ids[end:])
        return parts, texts

    def _join(self, left: list[int], right: list[int]) -> list[int]:
        """Return two lists of ids joined, with the newlines at the seam tokenized together."""
        if not (left and right and left[-1] in self._newlines and right[0] in self._newlines):
            return left + right
        number = self._newlines[left[-1]] + self._newlines[right[0]]
        (seam,) = self._tokenizer.encode(["\n" * number], add_special_tokens=False)
        return left[:-1] + seam + right[1:]
