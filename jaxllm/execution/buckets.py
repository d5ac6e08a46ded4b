"""The fixed shapes that steps are padded to: one program per bucket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MIN_TOKENS = 8  # fewer rows take other matmul paths, with other rounding, and save nothing


class Bucket(NamedTuple):
    """Shape of a step."""

    num_tokens: int
    num_seqs: int


def make_buckets(max_num_batched_tokens: int, max_num_seqs: int) -> tuple[Bucket, ...]:
    """Return powers of two from 8 up to the token budget, each with as many sequences as it can hold."""
    most_seqs = _round_up(max_num_seqs)
    sizes = [MIN_TOKENS]
    while sizes[-1] < max_num_batched_tokens:
        sizes.append(2 * sizes[-1])
    # A budget that is no power of two would pad its fullest steps for nothing.
    sizes[-1] = max(MIN_TOKENS, -(-min(sizes[-1], max_num_batched_tokens) // MIN_TOKENS) * MIN_TOKENS)
    return tuple(Bucket(size, min(size, most_seqs)) for size in sizes)


def pick_bucket(buckets: Sequence[Bucket], num_tokens: int, num_seqs: int) -> Bucket:
    """Return the smallest bucket that holds a step. Raise ValueError when none does: a plan beyond its budget."""
    for bucket in buckets:
        if num_tokens <= bucket.num_tokens and num_seqs <= bucket.num_seqs:
            return bucket
    raise ValueError(f"a step of {num_tokens} tokens and {num_seqs} sequences is larger than any of {tuple(buckets)}")


def _round_up(count: int) -> int:
    size = MIN_TOKENS
    while size < count:
        size *= 2
    return size
