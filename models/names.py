"""The names of a checkpoint's tensors: templates of HF's names, their prefixes, and tensors of several parameters."""

from __future__ import annotations

from typing import NamedTuple


class Fused(NamedTuple):
    """Parameters of one module that the checkpoint stores as one tensor; `members` are their names, in order."""

    members: tuple[str, ...]
    axis: int = 0
    """The axis of their concatenation; in a tensor of all experts, that of one expert's part."""
    alternates: bool = False
    """They alternate along the axis, instead of taking a range each."""
    by_head: bool = False
    """Each head has its own one after the other, instead of all heads having one first."""


class TensorName(NamedTuple):
    """The tensor of a checkpoint that a parameter comes from.

    `name` is HF's, with the fields of `Prefixes` in braces, `{l}` for the layer and `{e}` for the expert; without
    `{e}`, a parameter of experts comes from one tensor of all experts. `layout` goes from HF's axes to ours, those of
    one expert, as in "(n h) d -> d n h".
    """

    name: str
    layout: str
    fused: Fused | None = None


class Prefixes(NamedTuple):
    """What differs between checkpoints in HF's names: the beginnings of those of the model's body and of its output
    head, and the ends of those of LayerNorms."""

    body: str
    head: str
    scale: str = "weight"
    shift: str = "bias"


DECODER_PREFIXES = Prefixes("model.", "")
NO_PREFIXES = Prefixes("", "")
# A multimodal wrapper's text part: as on the hub, as later versions of HF name it, and beside the other parts.
WRAPPER_PREFIXES = (
    Prefixes("language_model.model.", "language_model."),
    Prefixes("model.language_model.", ""),
    DECODER_PREFIXES,
)
