"""A router knows which replica has which sequences, and gives each request to the one where it costs the least."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable

from jaxllm.engine.replicas.prefix_index import PrefixIndex, prefixes
from jaxllm.messages import EngineCoreOutput, EngineCoreRequest, sequence_ids


class _Sequence:
    """A sequence that has not ended, its replica, and the tokens that it holds there."""

    __slots__ = ("num_tokens", "replica")

    def __init__(self, replica: int, num_tokens: int) -> None:
        self.replica, self.num_tokens = replica, num_tokens


class Router:
    """This counts the tokens that each replica holds, and remembers the prompts that it has been given.

    A request costs a replica's tokens and those of its own prompt that the replica has not cached. So a prefix draws
    requests to where it is, until that replica holds as many tokens more than another as the prefix saves.
    """

    def __init__(self, block_size: int | None) -> None:
        """Look for prefixes of whole blocks of so many tokens; None where nothing is cached."""
        self._block_size = block_size
        self._indices: dict[int, PrefixIndex] = {}
        self._num_tokens: dict[int, int] = {}
        """The tokens of all sequences that a replica has, those that wait among them."""
        self._turns: dict[int, int] = {}
        """When each replica was last given a request, so that equal ones take turns."""
        self._turn = itertools.count(1)
        self._sequences: dict[str, _Sequence] = {}
        self._kept: dict[str, int] = {}
        """The replica of each request whose blocks are kept for forks."""

    def add(self, replica: int, num_tokens: int) -> None:
        """Know a replica whose KV cache has so many tokens, and which has no sequence yet."""
        self._indices[replica] = PrefixIndex(num_tokens)
        self._num_tokens[replica] = self._turns[replica] = 0

    def num_tokens(self, replica: int) -> int:
        """Return how many tokens a replica's sequences hold."""
        return self._num_tokens[replica]

    def owner(self, sequence_id: str) -> int | None:
        """Return the replica of a sequence, or of the blocks that it has left for forks; None if there is none."""
        sequence = self._sequences.get(sequence_id)
        return self._kept.get(sequence_id) if sequence is None else sequence.replica

    def sequences(self, replica: int) -> list[str]:
        """Return the sequences of a replica that have not ended."""
        return [name for name, sequence in self._sequences.items() if sequence.replica == replica]

    def route(self, request: EngineCoreRequest, replicas: Collection[int]) -> int:
        """Return the replica that is to compute a request, one of `replicas`: a fork's is that of its donor."""
        prompt = [] if self._block_size is None else prefixes(request, self._block_size)
        replica = self._owner_among(request.fork_of, replicas)
        if replica is None:
            reads = not request.sampling_params.skip_reading_prefix_cache
            saved = {each: self._indices[each].num_cached(prompt) if reads else 0 for each in replicas}
            replica = min(replicas, key=lambda each: (self._num_tokens[each] - saved[each], self._turns[each]))
        self._turns[replica] = next(self._turn)
        self._indices[replica].add(prompt)
        self._begin(request, replica)
        return replica

    def on_output(self, output: EngineCoreOutput) -> None:
        """Take in what has become of a sequence."""
        sequence = self._sequences.get(output.request_id)
        if sequence is None:
            return
        if output.finish_reason is not None:
            self._end(output.request_id)
        else:
            sequence.num_tokens += len(output.new_token_ids)
            self._num_tokens[sequence.replica] += len(output.new_token_ids)

    def split(self, sequence_ids: Iterable[str]) -> dict[int, list[str]]:
        """Return sequences by their replicas; those that are not known are left out."""
        parts: dict[int, list[str]] = {}
        for each in sequence_ids:
            if (replica := self.owner(each)) is not None:
                parts.setdefault(replica, []).append(each)
        return parts

    def end(self, sequence_ids: Iterable[str]) -> None:
        """Forget sequences that were aborted or whose blocks are given up; unknown ids are ignored."""
        for each in sequence_ids:
            self._kept.pop(each, None)
            if each in self._sequences:
                self._end(each)

    def release(self, sequence_ids: Iterable[str]) -> None:
        """Forget blocks that ended sequences have kept for forks; unknown ids are ignored."""
        for each in sequence_ids:
            self._kept.pop(each, None)

    def lose(self, replica: int) -> list[str]:
        """Forget what a replica had: it has ended. Return the sequences that have not."""
        lost = self.sequences(replica)
        self.end([*lost, *(each for each, owner in self._kept.items() if owner == replica)])
        self._indices[replica].clear()
        return lost

    def forget_prefixes(self) -> None:
        """Expect nothing in the prefix caches: they were emptied."""
        for each in self._indices.values():
            each.clear()

    def _owner_among(self, donor: str | None, replicas: Collection[int]) -> int | None:
        replica = None if donor is None else self.owner(donor)
        return replica if replica in replicas else None

    def _begin(self, request: EngineCoreRequest, replica: int) -> None:
        num_tokens = len(request.prompt_token_ids)
        for each in sequence_ids(request):  # all but the first are forks, which share its prompt
            self._sequences[each] = _Sequence(replica, num_tokens)
            self._num_tokens[replica] += num_tokens
            num_tokens = 0
        if request.keeps_blocks:
            self._kept[request.request_id] = replica

    def _end(self, sequence_id: str) -> None:
        sequence = self._sequences.pop(sequence_id)
        self._num_tokens[sequence.replica] -= sequence.num_tokens
