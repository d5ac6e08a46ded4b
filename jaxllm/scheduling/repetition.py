"""Detect outputs that repeat themselves."""

from __future__ import annotations

from array import array

from jaxllm.sampling_params import RepetitionDetectionParams


def repeats(token_ids: array[int], num_prompt_tokens: int, params: RepetitionDetectionParams) -> bool:
    """Return whether the output ends with min_count copies in a row of one pattern of an allowed size.

    token_ids has the prompt and the output; the prompt is ignored.
    """
    # A pattern of size p repeats c times if the last p * (c - 1) tokens equal the tokens p before them. So for every
    # size p the last min_size * (c - 1) tokens must also occur p tokens earlier: a search in C finds these p, which are
    # few unless a small pattern repeats. Work is O(max_size * c) in C and O(max_size) in Python, at worst.
    copies = params.min_count - 1
    smallest = max(1, params.min_pattern_size)
    largest = min(
        params.max_pattern_size, (len(token_ids) - num_prompt_tokens) // params.min_count if copies > 0 else 0
    )
    if largest < smallest:
        return False
    width = token_ids.itemsize
    tail = token_ids[-largest * params.min_count :].tobytes()
    common = smallest * copies * width
    ending = tail[-common:]
    stop = len(tail) - smallest * width
    start = tail.find(ending, len(tail) - common - largest * width, stop)
    while start >= 0:
        size = (len(tail) - common - start) // width  # a match out of step with the tokens only costs a comparison
        if _ends_alike(tail, size * width, size * copies * width):
            return True
        start = tail.find(ending, start + 1, stop)
    return False


def _ends_alike(tail: bytes, shift: int, length: int) -> bool:
    """Return whether the last `length` bytes equal those `shift` bytes before them."""
    end, tried = len(tail), 64
    while tried < length:  # most candidates differ soon: do not copy all of them
        if tail[end - tried :] != tail[end - tried - shift : end - shift]:
            return False
        tried *= 8
    return tail[end - length :] == tail[end - length - shift : end - shift]
