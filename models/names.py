"""The names of a checkpoint's tensors: templates of HF's names, their prefixes, and tensors of several parameters."""

from __future__ import annotations

from typing import NamedTuple


class Fused(NamedTuple):
    """Parameters of one module that the checkpoint stores as one tensor; `members` are their names, in order."""

    members: tuple[str, ...]
    axis: int = 0
    """The axis of their concatenation; in a tensor of all experts, that of one expert's part."""
    alternates: bool = False
    """The members alternate along the axis instead of taking one range each."""
    by_head: bool = False
    """Each head has its part of all members, instead of each member having all heads."""


class TensorName(NamedTuple):
    """The tensor of a checkpoint that a parameter comes from.

    `name` is HF's, with the fields of `Prefixes` in braces, `{l}` for the layer and `{e}` for the expert; without
    `{e}`, a parameter of experts comes from one tensor of all experts. `layout` maps HF's axes to the parameter's,
    those of one expert, as in "(n h) d -> d n h"; `1` is an axis of HF's that has one entry, and that ours lack.
    """

    name: str
    layout: str
    fused: Fused | None = None


def plain_mlp_names(up: str, down: str, *, inputs_first: bool = False) -> dict[str, TensorName]:
    """Return the names of an MLP without a gate, from those of HF's two modules.

    HF's matrices are [out, in], or [in, out] if `inputs_first`.
    """
    return {
        "layers.mlp.up": TensorName(f"{up}.weight", "d f -> f d" if inputs_first else "f d -> f d"),
        "layers.mlp.up_bias": TensorName(f"{up}.bias", "f -> f"),
        "layers.mlp.down": TensorName(f"{down}.weight", "f d -> d f" if inputs_first else "d f -> d f"),
        "layers.mlp.down_bias": TensorName(f"{down}.bias", "d -> d"),
    }


class Prefixes(NamedTuple):
    """The parts of names that differ between checkpoints: prefixes of body and output head, suffixes of LayerNorms."""

    body: str
    head: str
    scale: str = "weight"
    shift: str = "bias"


DECODER_PREFIXES = Prefixes("model.", "")
NO_PREFIXES = Prefixes("", "")
# A multimodal wrapper's text part: on the hub, in later versions of HF, in Idefics 3, in Qwen3-ASR on the hub, and
# beside the other parts.
WRAPPER_PREFIXES = (
    Prefixes("language_model.model.", "language_model."),
    Prefixes("model.language_model.", ""),
    Prefixes("model.text_model.", ""),
    Prefixes("thinker.model.", "thinker."),
    DECODER_PREFIXES,
)
