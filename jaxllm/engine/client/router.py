"""Choose the replica where a request costs the least, and track the replica of each sequence."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable

from jaxllm.core_messages import EngineCoreOutput, EngineCoreRequest, sequence_ids
from jaxllm.engine.client.prefix_index import PrefixIndex, prefixes


class _Sequence:
    """A sequence that has not ended, its replica, and the tokens that it costs there: those of its prompt that were not
    cached when it was routed, at least a block's for what it will say, and those that it has said.
    """

    __slots__ = ("num_tokens", "replica")

    def __init__(self, replica: int, num_tokens: int) -> None:
        self.replica, self.num_tokens = replica, num_tokens


class Router:
    """Counts the tokens that each replica's sequences cost, and remembers the prompts that it has been given.

    A request goes where those and what it would cost itself are the fewest. So a prefix draws requests to where it is
    cached, until that replica's sequences cost as many tokens more than another's as the prefix saves, or until it has
    as many as it can run at once and another has fewer.
    """

    def __init__(self, block_size: int | None, num_seats: int = 1) -> None:
        """Look for prefixes of whole blocks of `block_size` tokens; None where nothing is cached. A replica can run
        `num_seats` sequences at once.
        """
        self._block_size, self._num_seats = block_size, num_seats
        self._indices: dict[int, PrefixIndex] = {}
        self._num_tokens: dict[int, int] = {}
        """The tokens that all sequences of a replica cost, including those that wait."""
        self._num_sequences: dict[int, int] = {}
        self._turns: dict[int, int] = {}
        """The turn in which each replica last got a request, so that equal ones alternate."""
        self._turn = itertools.count(1)
        self._sequences: dict[str, _Sequence] = {}
        self._kept: dict[str, int] = {}
        """The replica of each request whose blocks are kept for forks."""

    def add(self, replica: int, num_tokens: int) -> None:
        """Add a replica with the number of tokens of its KV cache and no sequence yet."""
        self._indices[replica] = PrefixIndex(num_tokens)
        self._num_tokens[replica] = self._num_sequences[replica] = self._turns[replica] = 0

    def num_tokens(self, replica: int) -> int:
        """Return the number of tokens that a replica's sequences cost."""
        return self._num_tokens[replica]

    def owner(self, sequence_id: str) -> int | None:
        """Return the replica of a sequence, or of the blocks that it has left for forks; None if there is none."""
        sequence = self._sequences.get(sequence_id)
        return self._kept.get(sequence_id) if sequence is None else sequence.replica

    def is_needed(self, replica: int) -> bool:
        """Return whether a replica has sequences, or blocks that are kept for forks."""
        return self._num_sequences[replica] > 0 or replica in self._kept.values()

    def sequences(self, replica: int) -> list[str]:
        """Return the sequences of a replica that have not ended."""
        return [name for name, sequence in self._sequences.items() if sequence.replica == replica]

    def route(self, request: EngineCoreRequest, replicas: Collection[int]) -> int:
        """Return the replica that is to compute a request, one of `replicas`: a fork's is that of its donor."""
        prompt = [] if self._block_size is None else prefixes(request, self._block_size)
        reads = not request.sampling_params.skip_reading_prefix_cache
        costs = {each: self._cost(request, self._indices[each].num_cached(prompt) if reads else 0) for each in replicas}
        replica = self._owner_among(request.fork_of, replicas)
        if replica is None:
            replica = min(replicas, key=lambda index: self._rank(index, costs[index]))
        self._turns[replica] = next(self._turn)
        self._indices[replica].add(prompt)
        self._begin(request, replica, costs[replica])
        return replica

    def on_output(self, output: EngineCoreOutput) -> None:
        """Take in an output of a sequence."""
        sequence = self._sequences.get(output.request_id)
        if sequence is None:
            return
        if output.finish_reason is not None:
            self._end(output.request_id)
        else:
            sequence.num_tokens += len(output.new_token_ids)
            self._num_tokens[sequence.replica] += len(output.new_token_ids)

    def on_next_tokens(self, sequence_ids: Iterable[str]) -> None:
        """Count a token of each of these sequences; ignore unknown ones."""
        for sequence_id in sequence_ids:
            sequence = self._sequences.get(sequence_id)
            if sequence is not None:
                sequence.num_tokens += 1
                self._num_tokens[sequence.replica] += 1

    def split(self, sequence_ids: Iterable[str]) -> dict[int, list[str]]:
        """Return sequences by their replicas; those that are not known are left out."""
        parts: dict[int, list[str]] = {}
        for sequence_id in sequence_ids:
            if (replica := self.owner(sequence_id)) is not None:
                parts.setdefault(replica, []).append(sequence_id)
        return parts

    def end(self, sequence_ids: Iterable[str]) -> None:
        """Forget sequences that were aborted; unknown ids are ignored. Blocks are kept until they are released."""
        for sequence_id in sequence_ids:
            if sequence_id in self._sequences:
                self._end(sequence_id)

    def withdraw(self, request: EngineCoreRequest) -> None:
        """Forget a request that was not sent to any core."""
        names = sequence_ids(request)
        self.end(names)
        self.release(names)

    def release(self, sequence_ids: Iterable[str]) -> None:
        """Forget blocks that ended sequences have kept for forks; unknown ids are ignored."""
        for sequence_id in sequence_ids:
            self._kept.pop(sequence_id, None)

    def lose(self, replica: int) -> list[str]:
        """Forget a replica that has ended, and return its unfinished sequences."""
        lost = self.sequences(replica)
        self.end(lost)
        self.release([each for each, owner in self._kept.items() if owner == replica])
        self._indices[replica].clear()
        return lost

    def forget_prefixes(self) -> None:
        """Expect nothing in the prefix caches: they were emptied."""
        for index in self._indices.values():
            index.clear()

    def _rank(self, replica: int, cost: int) -> tuple[bool, int, int]:
        is_full = self._num_sequences[replica] >= self._num_seats
        return is_full, self._num_tokens[replica] + cost, self._turns[replica]

    def _cost(self, request: EngineCoreRequest, num_cached: int) -> int:
        return max(len(request.prompt_token_ids) - num_cached, self._block_size or 0)

    def _owner_among(self, donor: str | None, replicas: Collection[int]) -> int | None:
        replica = None if donor is None else self.owner(donor)
        return replica if replica in replicas else None

    def _begin(self, request: EngineCoreRequest, replica: int, num_tokens: int) -> None:
        for sequence_id in sequence_ids(request):  # all but the first are forks, which share its prompt
            self._sequences[sequence_id] = _Sequence(replica, num_tokens)
            self._num_tokens[replica] += num_tokens
            self._num_sequences[replica] += 1
            num_tokens = 0
        if request.keeps_blocks:
            self._kept[request.request_id] = replica

    def _end(self, sequence_id: str) -> None:
        sequence = self._sequences.pop(sequence_id)
        self._num_tokens[sequence.replica] -= sequence.num_tokens
        self._num_sequences[sequence.replica] -= 1
