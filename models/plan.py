"""The plan of a model's layers: their kinds, their cache groups, and the loops that go through them in order."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from .config import LayerSpec
from .mixer_specs import StateSpec


class Run(NamedTuple):
    """Consecutive layers of one kind."""

    kind: int
    length: int


class Segment(NamedTuple):
    """A pattern of runs, and the number of its repeats."""

    pattern: tuple[Run, ...]
    repeats: int

    def counts(self, num_kinds: int) -> list[int]:
        """Return the number of layers of each kind in the pattern."""
        return [sum(run.length for run in self.pattern if run.kind == kind) for kind in range(num_kinds)]


class CacheGroup(NamedTuple):
    """Layers that share a cache array, as their keys and values, or their states, have one shape and one window.

    Where no layer attends to tokens there is one group more, without layers: its blocks hold nothing, and count the
    tokens that states stand for.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    attention_chunk: int | None
    causal: bool
    latent_dim: int | None = None
    """The size of a key's first part, which is also its value, in attention over latents; else None."""
    sees_both_sides: bool = False
    state: StateSpec | None = None
    """The recurrent state of layers without keys and values; None for layers that attend."""
    is_cross: bool = False
    """The keys and values are those of an encoder's frames."""
    top_k: int | None = None
    """The number of tokens that a token attends to at most, or that an indexer chooses; None if attention reads all."""

    @property
    def is_indexer(self) -> bool:
        """Return whether the group has the keys of indexers."""
        return self.top_k is not None and self.latent_dim is None


@dataclass(frozen=True)
class LayerPlan:
    """The layers of a model in order. A layer is identified by its kind and its index among those of its kind."""

    layers: tuple[LayerSpec, ...]
    marks: tuple[Hashable, ...] = ()
    """For each layer, the formats of its weights, which distinguish layers of one spec; empty if nothing does."""

    @cached_property
    def _marked(self) -> tuple[tuple[LayerSpec, Hashable], ...]:
        return tuple(zip(self.layers, self.marks or [None] * len(self.layers), strict=True))

    @cached_property
    def kinds(self) -> tuple[LayerSpec, ...]:
        """Return the spec of each kind, in the order of their first layers."""
        return tuple(spec for spec, _ in dict.fromkeys(self._marked))

    @cached_property
    def sequence(self) -> tuple[int, ...]:
        """Return each layer's kind."""
        numbers = {kind: number for number, kind in enumerate(dict.fromkeys(self._marked))}
        return tuple(numbers[layer] for layer in self._marked)

    @cached_property
    def layers_of(self) -> tuple[tuple[int, ...], ...]:
        """Return the numbers of each kind's layers."""
        numbers: tuple[list[int], ...] = tuple([] for _ in self.kinds)
        for number, kind in enumerate(self.sequence):
            numbers[kind].append(number)
        return tuple(map(tuple, numbers))

    @cached_property
    def groups(self) -> dict[CacheGroup, tuple[int, ...]]:
        """Return the numbers of the layers in each cache group that compute keys and values or have a state.

        Those of cross-attention come after other groups that attend, and those with recurrent state come last. Layers
        of an MLP alone are in none. The first group has no layers if none attends to tokens.
        """
        groups: dict[CacheGroup, tuple[int, ...]] = {} if self._attends else {_WITHOUT_LAYERS: ()}
        for number, layer in enumerate(self.layers):
            if layer.has_mixer:
                for group in _groups_of(layer):
                    groups[group] = (*groups.get(group, ()), number)
        return dict(sorted(groups.items(), key=lambda item: (item[0].state is not None, item[0].is_cross)))

    @cached_property
    def _attends(self) -> bool:
        return any(layer.attends and not layer.is_cross for layer in self.kinds)

    @cached_property
    def attention_groups(self) -> tuple[CacheGroup, ...]:
        """Return the groups of layers that attend to tokens, or the one without layers if none does."""
        return tuple(group for group in self.groups if group.state is None and not group.is_cross)

    @cached_property
    def cross_groups(self) -> tuple[CacheGroup, ...]:
        """Return the groups of layers that attend to an encoder's frames, which come after those."""
        return tuple(group for group in self.groups if group.is_cross)

    @cached_property
    def state_groups(self) -> tuple[CacheGroup, ...]:
        """Return the groups of layers with recurrent state, which come after the others."""
        return tuple(group for group in self.groups if group.state is not None)

    @cached_property
    def lending_groups(self) -> frozenset[CacheGroup]:
        """Return the cache groups with keys and values that other layers borrow."""
        return frozenset(group_of(layer) for layer in self.kinds if layer.borrows_kv)

    def depth(self, group: CacheGroup) -> int:
        """Return the number of layers with keys and values in the group's array.

        Prompts go whole through layers that are not causal, and nothing is read again, so the keys and values of one
        layer overwrite those of the layer before it.
        """
        return len(self.groups[group]) if group.causal else 1

    def cache_layers(
        self, kind: int, part: Callable[[LayerSpec], CacheGroup] | None = None
    ) -> tuple[int, tuple[int, ...]]:
        """Return the index of a kind's cache group, and its layers' indices in it.

        The group is that of attention, or of another `part`: `state_group_of` or `indexer_group_of`.
        A layer that borrows keys and values has the index of the layer that computes them. Layers that are not causal
        share one index, see `depth`.
        """
        group = (part or group_of)(self.kinds[kind])
        members = self.groups[group]
        if not group.causal:
            return list(self.groups).index(group), (0,) * len(self.layers_of[kind])
        places = tuple(bisect.bisect(members, number) - 1 for number in self.layers_of[kind])
        return list(self.groups).index(group), places

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """Return the layers as a few loop bodies; each is compiled once and may run many times."""
        return tuple(_segments([Run(kind, len(list(run))) for kind, run in itertools.groupby(self.sequence)]))


_WITHOUT_LAYERS = CacheGroup(0, 0, 0, None, None, True)


def _groups_of(layer: LayerSpec) -> list[CacheGroup]:
    """Return the cache groups that a layer writes to: of its attention, its indexer and its recurrent state."""
    of_attention = [group_of(layer)] if layer.attends and not layer.borrows_kv else []
    of_indexer = [indexer_group_of(layer)] if layer.has_indexer else []
    of_state = [] if layer.state is None else [state_group_of(layer)]
    return [*of_attention, *of_indexer, *of_state]


def indexer_group_of(layer: LayerSpec) -> CacheGroup:
    """Return the cache group of the keys of a layer's indexer."""
    assert layer.indexer is not None
    num_heads, head_dim, top_k = layer.indexer.num_heads, layer.indexer.head_dim, layer.indexer.top_k
    return CacheGroup(num_heads, 1, head_dim, None, None, True, top_k=top_k)


def state_group_of(layer: LayerSpec) -> CacheGroup:
    """Return the cache group of a layer's recurrent state."""
    return CacheGroup(0, 0, 0, None, None, True, state=layer.state)


def group_of(layer: LayerSpec) -> CacheGroup:
    """Return the cache group of a layer's attention."""
    return CacheGroup(
        layer.num_heads,
        layer.num_kv_heads,
        layer.cached_dim,
        layer.window,
        layer.attention_chunk,
        layer.causal,
        None if layer.latent is None else layer.latent.rank,
        layer.sees_both_sides,
        is_cross=layer.is_cross,
        top_k=None if layer.indexer is None else layer.indexer.top_k,
    )


def _segments(runs: Sequence[Run]) -> Iterator[Segment]:
    """Cut runs into segments, each with the pattern that covers most of the remaining runs, or with one run."""
    start = 0
    while start < len(runs):
        left = runs[start:]
        repeats = {period: _repeats(left, period) for period in range(1, len(left) // 2 + 1)}
        period = max((each for each in repeats if repeats[each] > 1), key=lambda x: repeats[x] * x, default=1)
        segment = Segment(tuple(left[:period]), repeats.get(period, 1))
        yield segment
        start += period * segment.repeats


def _repeats(runs: Sequence[Run], period: int) -> int:
    """Return the number of times that the first `period` runs are repeated in a row."""
    repeats = 1
    while runs[repeats * period : (repeats + 1) * period] == runs[:period]:
        repeats += 1
    return repeats
