"""The fixed shapes that steps are padded to: one program per bucket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Bucket(NamedTuple):
    """Shape of a step."""

    num_tokens: int
    num_seqs: int


def make_buckets(max_num_batched_tokens: int, max_num_seqs: int, least: int) -> tuple[Bucket, ...]:
    """Return sizes from `least`, each twice the last, up to the token budget, with as many sequences as they hold."""
    most_seqs = least
    while most_seqs < max_num_seqs:
        most_seqs *= 2
    sizes = [least]
    while sizes[-1] < max_num_batched_tokens:
        sizes.append(2 * sizes[-1])
    # A budget that is no power of two would pad its fullest steps for nothing.
    sizes[-1] = max(least, -(-min(sizes[-1], max_num_batched_tokens) // least) * least)
    return tuple(Bucket(size, min(size, most_seqs)) for size in sizes)


def pick_bucket(buckets: Sequence[Bucket], num_tokens: int, num_seqs: int) -> Bucket:
    """Return the smallest bucket that holds a step. Raise ValueError when none does: a plan beyond its budget."""
    for bucket in buckets:
        if num_tokens <= bucket.num_tokens and num_seqs <= bucket.num_seqs:
            return bucket
    raise ValueError(f"a step of {num_tokens} tokens and {num_seqs} sequences is larger than any of {tuple(buckets)}")
