"""A step as kernels of recurrent state see it: rows of tokens, and slots of states."""

from __future__ import annotations

from typing import NamedTuple

from jax import Array


class StateBatch(NamedTuple):
    """The rows and slots of one step's sequences.

    All int32. Decode rows (sequences of one token) come first, then the longer chunks, in the order of their rows; rows
    of padding may lie between and behind, and padding sequences, which come last, have no rows. Slots are counted
    within a layer. No slot is written twice in a step, and no slot that one sequence writes is read by another.
    """

    query_starts_s: Array
    """Each sequence's first row in t."""
    query_ends_s: Array
    """One past each sequence's last row; for padding sequences equal to the first row."""
    num_decodes: Array
    """The number of leading sequences with one token each; sequence i < num_decodes is row i."""
    read_slots_s: Array
    """The slot with the state before the step; 0 where the sequence begins, from zeros."""
    write_slots_s: Array
    """The slot for the state after the last row, often the slot that is read; 0 for padding."""
    save_ends_s: Array | None
    """One past the row after which the state is also saved, in (start, end]; any number where `save_slots_s` is 0. None
    means that the step has decodes alone; their states are saved after their only row."""
    save_slots_s: Array
    """The slot that the state is also saved to; 0 for none."""
    row_slots_t: Array | None = None
    """The slot that keeps the state after each row of a chunk with drafts, but for its last row; 0 for none. Such a
    chunk saves no other state. Later the host decides from which of its states the sequence goes on. None means that
    the step has no drafts."""

    @property
    def has_chunks(self) -> bool:
        """Return whether the step may have chunks of more than one token, which is known when it is traced."""
        return self.save_ends_s is not None

    def without_chunks(self) -> StateBatch:
        """Return the batch for a step of decodes alone, for which less is compiled."""
        return self._replace(save_ends_s=None, row_slots_t=None)

    @property
    def all_save_ends_s(self) -> Array:
        """Return one past the row after which the state is saved, with chunks or without."""
        return self.query_ends_s if self.save_ends_s is None else self.save_ends_s
