"""What a family of models declares: how to read its config, its layer, and its tensors' HF names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from flax import nnx

from .config import ModelConfig
from .layers import DecoderLayer, Frame


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


# Tensors that checkpoints may hold and no model needs.
BUFFERS = ("*rotary_emb.inv_freq",)
OTHER_MODALITIES = (
    "*vision_tower.*",
    "*vision_model.*",
    "*multi_modal_projector.*",
    "*audio_tower.*",
    "*embed_vision.*",
    "*embed_audio.*",
    "*visual.*",
)


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family of models; `is_wrapper` says that its checkpoints hold other modalities around the decoder."""

    config_from_hf: Callable[[Mapping[str, Any]], ModelConfig]
    names: Mapping[str, TensorName]
    other_names: tuple[Mapping[str, TensorName], ...] = ()
    """Names that checkpoints may have in place of those, for some parameters; the first ones whose tensors are there
    are taken."""
    layer: Callable[..., nnx.Module] = DecoderLayer
    frame: Callable[..., nnx.Module] = Frame
    is_wrapper: bool = False
    prefixes: tuple[Prefixes, ...] = (DECODER_PREFIXES, NO_PREFIXES)
    """The prefixes that checkpoints may have, the usual ones first; wrappers have `WRAPPER_PREFIXES` instead."""
    marks: tuple[str, ...] = ("embed.table", "embed_norm.scale")
    """The parameters that tell a checkpoint's prefixes apart."""
    leaves_out: tuple[str, ...] = ()
    """Glob patterns of tensors in its checkpoints that it does not use, besides those that no family uses; `{after}` is
    the number after that of the last layer."""

    @property
    def ignored(self) -> tuple[str, ...]:
        """Return glob patterns of tensors that the family knowingly leaves out."""
        return BUFFERS + self.leaves_out + (OTHER_MODALITIES if self.is_wrapper else ())

    def read_config(self, hf: Mapping[str, Any], tensor_names: Collection[str] = ()) -> ModelConfig:
        """Read a config.json; for a wrapper the checkpoint's tensor names, if given, say whether it has a head.

        HF's defaults for wrappers have changed over time, and HF too unties a head that the checkpoint holds.
        Raises ValueError that names the key for what is malformed or not supported.
        """
        try:
            config = self.config_from_hf(hf)
        except ValueError as error:
            raise ValueError(f"config.json: {error}") from error
        if self.is_wrapper and tensor_names and config.pooling is None:
            return replace(
                config, tie_word_embeddings=not any(name.endswith("lm_head.weight") for name in tensor_names)
            )
        return config

    def find_names(self, tensor_names: Collection[str]) -> Mapping[str, TensorName]:
        """Return the names that a checkpoint has."""
        for others in self.other_names:
            ends = {tensor.name.rpartition("}")[2] for tensor in others.values()}
            if all(any(name.endswith(end) for name in tensor_names) for end in ends):
                return {**self.names, **others}
        return self.names

    def find_prefixes(self, tensor_names: Collection[str]) -> Prefixes:
        """Return the prefixes under which the checkpoint has one of the `marks`; the first ones if it has none."""
        prefixes = WRAPPER_PREFIXES if self.is_wrapper else self.prefixes
        marks = [self.names[path].name for path in self.marks if path in self.names]
        found = [each for each in prefixes if {mark.format(**each._asdict()) for mark in marks} <= set(tensor_names)]
        return (found or prefixes)[0]
