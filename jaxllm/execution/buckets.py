"""Steps are padded to fixed shapes, the buckets; each has a program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Bucket(NamedTuple):
    """The shape that a step is padded to."""

    num_tokens: int
    num_seqs: int


def make_buckets(
    max_num_batched_tokens: int, max_num_seqs: int, least: int, sizes: Sequence[int] | None = None
) -> tuple[Bucket, ...]:
    """Return buckets of these numbers of tokens, and of the token budget, with as many sequences as they hold.

    Sizes are rounded up to a multiple of `least`; left out, they are `least`, each time twice as many.
    """
    # A budget that is none of these would pad its fullest steps for nothing.
    wanted = [*(_doubled(least, max_num_batched_tokens) if sizes is None else sizes), max_num_batched_tokens]
    rounded = {-(-size // least) * least for size in wanted if size <= max_num_batched_tokens}
    most_seqs = _doubled(least, max_num_seqs)[-1]
    return tuple(Bucket(size, min(size, most_seqs)) for size in sorted(rounded))


def pick_bucket(buckets: Sequence[Bucket], num_tokens: int, num_seqs: int) -> Bucket:
    """Return the smallest bucket that holds a step. Raise ValueError when none does: a plan beyond its budget."""
    for bucket in buckets:
        if num_tokens <= bucket.num_tokens and num_seqs <= bucket.num_seqs:
            return bucket
    raise ValueError(f"a step of {num_tokens} tokens and {num_seqs} sequences is larger than any of {tuple(buckets)}")


def _doubled(least: int, most: int) -> list[int]:
    """Return `least`, each time doubled, up to the first that is no less than `most`."""
    sizes = [least]
    while sizes[-1] < most:
        sizes.append(2 * sizes[-1])
    return sizes
