"""The sampler's inputs besides the logits: records of arrays with one entry per row.

A record defines its own packing: the letters that end an array's name are its axes, and `Packed` in its annotation has
its type (int32 by default) and the neutral value, which changes nothing in a row.
"""

from __future__ import annotations

import enum
from typing import Annotated, Any, NamedTuple

import numpy as np
from jax import Array


class Sampling(enum.Enum):
    """What a step's program can do for its rows, from the least to the most; more changes no row that needs less."""

    PLAIN = "plain"
    """Greedy choice, or a draw by temperature and seed."""
    TRUNCATED = "truncated"
    """The same, after top_k, top_p and min_p."""
    FULL = "full"
    """Every feature, such as penalties, masks, biases and log-probabilities."""


class Packed(NamedTuple):
    """The packing of an array that is sent to the device."""

    dtype: type[np.generic] = np.int32
    neutral: float = 0
    """The value in padding, and in rows that do not use the field."""


class SamplingBatch(NamedTuple):
    """The settings of each row that all programs read, and those of truncation."""

    seeds_s2: Array
    """The bits of the high and low word of each row's 64-bit seed."""
    positions_s: Array
    """Position of the token to be sampled."""
    temperature_s: Annotated[Array, Packed(np.float32)]
    top_k_s: Array
    """0 and -1 keep all."""
    top_p_s: Annotated[Array, Packed(np.float32, 1.0)]
    min_p_s: Annotated[Array, Packed(np.float32)]


class Rules(NamedTuple):
    """The settings of each row that only `sample_full` reads."""

    is_scored_s: Array
    """1 for rows of prompt positions: they "pick" `scored_ids_s`, by unprocessed logits."""
    scored_ids_s: Array
    count_rows_s: Array
    """The index of the row's token counts; UNCOUNTED_ROW counts nothing."""
    presence_s: Annotated[Array, Packed(np.float32)]
    frequency_s: Annotated[Array, Packed(np.float32)]
    repetition_s: Annotated[Array, Packed(np.float32, 1.0)]
    num_outputs_s: Array
    """Output tokens before the one to be sampled."""
    extra_args: dict[str, Array]
    """Arguments of the custom logits processors, by name; their defaults define the packing."""


WITHOUT_RULES, WITHOUT_TIMESTAMPS = -2, -1


class TranscriptRows(NamedTuple):
    """What the rules of a transcript need of each row besides its last token. See `sampling.transcripts`."""

    before_s: Annotated[Array, Packed(neutral=-1)]
    """The output before the last token; -1 if there is none."""
    latest_s: Annotated[Array, Packed(neutral=WITHOUT_RULES)]
    """The latest timestamp among the outputs before the last token, 0 if there is none; below 0, WITHOUT_TIMESTAMPS for
    a transcript that has none, or WITHOUT_RULES."""


class RareRules(NamedTuple):
    """The large settings of each row that few steps need: each array is sent on its own, if some row uses it.

    On the host, None stands for an array that no row uses.
    """

    allowed_bits_sw: Annotated[Any, Packed(neutral=-1)]
    """Words of 32 ids; bit i % 32 of word i // 32 is 1 if id i may be sampled."""
    grammar_bits_sw: Annotated[Any, Packed(neutral=-1)]
    """The same for the ids that each row's grammar allows; raw log-probabilities are taken after this mask."""
    bias_ids_sb: Any
    bias_sb: Annotated[Any, Packed(np.float32)]
    """The bias that is added to the logit of each of `bias_ids_sb`."""
    logprob_ids_sn: Any
    """Ids whose log-probabilities are asked for."""
    drafts_sd: Annotated[Any, Packed(neutral=-1)]
    """The drafts before a row's token, if the row's tokens are counted: the counts do not have them yet. The row's
    token only becomes output if all of them were sampled."""
    draft_rows_sd: Any
    """The rows that these drafts are sampled in."""


class Uses(NamedTuple):
    """The features that some row of the step uses; the others are skipped."""

    num_biases: Array
    """Columns of `bias_sb` in use."""
    penalties: Array
    truncation: Array
    logprobs: Array
