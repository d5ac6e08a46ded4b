"""The declaration of a family of models: how to read its config, its layer, and its tensors' HF names."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from flax import nnx

from .config import ModelConfig
from .fields import read_mapping
from .layers import DecoderLayer, Frame
from .names import DECODER_PREFIXES, NO_PREFIXES, WRAPPER_PREFIXES, Prefixes, TensorName
from .towers.reading import AUDIO, VISION, check_fit

EMBEDDING, HEAD, FINAL_NORM = "embed.table", "lm_head.table", "final_norm.scale"

# Checkpoints may hold these tensors, which no model needs.
BUFFERS = ("*rotary_emb.inv_freq",)
OTHER_MODALITIES = (
    "*vision_tower.*",
    "*vision_model.*",
    "*multi_modal_projector.*",
    "*connector.*",
    "*embed_vision.*",
    "*visual.*",
    "*vision_embedder.*",
    "*audio_tower.*",
    "*embed_audio.*",
)
"""Tensors of images and sounds, which a model without the tower that they belong to does not need."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family of models; with `is_wrapper` its checkpoints hold other modalities around the decoder."""

    config_from_hf: Callable[[Mapping[str, Any]], ModelConfig]
    names: Mapping[str, TensorName]
    other_names: tuple[Mapping[str, TensorName], ...] = ()
    """Other names that checkpoints may have for some parameters; the first set with all its tensors present is used."""
    layer: Callable[..., nnx.Module] = DecoderLayer
    frame: Callable[..., nnx.Module] = Frame
    is_wrapper: bool = False
    is_text_part: bool = False
    """HF's classes without the output head are `*TextModel` and so on; `*Model` has other modalities."""
    prefixes: tuple[Prefixes, ...] = (DECODER_PREFIXES, NO_PREFIXES)
    """The prefixes that checkpoints may have, the usual ones first; wrappers have `WRAPPER_PREFIXES` instead."""
    marks: tuple[str, ...] = ("embed.table", "embed_norm.scale")
    """The parameters by which a checkpoint's prefixes are found."""
    vision: Family | None = None
    """The tower of a wrapper, which sees or hears. Its `config_from_hf` takes the wrapper's config.json, with the text
    model's width and epsilon of norms in `text_config`, and its prefixes are of tower and projector."""
    audio: Family | None = None
    """The tower that hears, in a wrapper with a `vision` that sees."""
    section: str = VISION
    """The key of a tower's settings in its wrapper's config.json."""
    encoder: Family | None = None
    """The encoder of an encoder-decoder. Its `config_from_hf` takes the same config.json."""
    leaves_out: tuple[str, ...] = ()
    """Glob patterns of tensors in its checkpoints that it does not use; `{after}` is the number of a layer that follows
    the last. Tensors that no family uses need not be listed."""

    @property
    def encoders(self) -> dict[str, Family | None]:
        """Return the families of towers, or of an encoder, by the part of the parameters that holds theirs."""
        return {"encoder": self.vision or self.encoder, "audio": self.audio}

    @property
    def ignored(self) -> tuple[str, ...]:
        """Return glob patterns of tensors that the family knowingly leaves out."""
        return BUFFERS + self.leaves_out + (OTHER_MODALITIES if self.is_wrapper else ())

    @property
    def output_heads(self) -> tuple[str, ...]:
        """Return glob patterns of the tensors of the output head, by all names that checkpoints may have for them."""
        names = [tensor.name for path, tensor in self.names.items() if path.startswith("lm_head.")]
        return tuple(f"*{name.format(**prefixes._asdict())}" for name in names for prefixes in self._all_prefixes)

    @property
    def _all_prefixes(self) -> tuple[Prefixes, ...]:
        return WRAPPER_PREFIXES if self.is_wrapper else self.prefixes

    def read_config(
        self,
        hf: Mapping[str, Any],
        tensor_names: Collection[str] = (),
        *,
        sees: bool = True,
        hears: bool = True,
    ) -> ModelConfig:
        """Read a config.json. The checkpoint's tensor names, if known, decide whether there is an output head.

        The config has the towers that the family and the checkpoint have, unless the model is not to see or hear.
        Raises ValueError, with the key, for values that are malformed or not supported.
        """

        def is_wanted(tower: Family) -> bool:
            return hears if tower.section == AUDIO else sees

        try:
            config = self.config_from_hf(hf)
            if (tower := self.vision) is not None and is_wanted(tower) and tower.is_in(hf, tensor_names):
                config = config.with_encoder(tower.read_vision(hf, config))
            if (tower := self.audio) is not None and is_wanted(tower) and tower.is_in(hf, tensor_names):
                config = replace(config, audio=tower.read_vision(hf, config))
            if self.encoder is not None:
                config = config.with_encoder(self.encoder.config_from_hf(hf))
        except ValueError as error:
            raise ValueError(f"config.json: {error}") from error
        return self._with_stored_head(config, tensor_names)

    def read_vision(self, hf: Mapping[str, Any], text: ModelConfig) -> ModelConfig:
        """Read a tower's config from its wrapper's config.json and the config of the text model."""
        settled = {"hidden_size": text.hidden_size, "rms_norm_eps": text.norm_eps}
        of_text = {**read_mapping(hf, "text_config"), **settled}
        return check_fit(self.config_from_hf({**hf, "text_config": of_text}), text.hidden_size)

    def is_in(self, hf: Mapping[str, Any], tensor_names: Collection[str]) -> bool:
        """Return whether a wrapper has this tower: its config.json, and its tensors if they are known."""
        return bool(hf.get(self.section)) and self.is_stored(tensor_names)

    def has_tensors_like(self, pattern: str) -> bool:
        """Return whether a glob pattern of whole names fits names with one of the family's prefixes."""
        starts = {start for prefix in self.prefixes for start in (prefix.body, prefix.head) if start}
        return any(fnmatch.fnmatchcase(start, pattern) for start in starts)

    def is_stored(self, tensor_names: Collection[str]) -> bool:
        """Return whether a checkpoint has the family's parameters, as far as its tensor names are known."""
        marks = [self.names[mark].name for mark in self.marks if mark in self.names]
        names = {name.format(**prefix._asdict()) for name in marks for prefix in self.prefixes}
        return not tensor_names or not names.isdisjoint(tensor_names)

    def _with_stored_head(self, config: ModelConfig, tensor_names: Collection[str]) -> ModelConfig:
        """Return the config tied if and only if the checkpoint has an embedding and no output head.

        As in HF, a head that is stored is used even where the config says that it is tied. Where the embedding is
        missing, the config decides.
        """
        stored = self._stored_tables(tensor_names)
        if EMBEDDING not in stored:
            return config
        if config.pooling is None:
            return replace(config, tie_word_embeddings=HEAD not in stored)
        source = self.names[HEAD if HEAD in stored else EMBEDDING].name.removesuffix(".weight")
        layers = (layer if layer.rows is None else replace(layer, source=source) for layer in config.pooling.head)
        return replace(config, pooling=replace(config.pooling, head=tuple(layers)))

    def _stored_tables(self, tensor_names: Collection[str]) -> set[str]:
        """Return which of the embedding and the output head the checkpoint has."""
        prefixes = self.find_prefixes(tensor_names)._asdict()
        tables = [path for path in (EMBEDDING, HEAD) if path in self.names]
        return {path for path in tables if self.names[path].name.format(**prefixes) in tensor_names}

    def find_names(self, tensor_names: Collection[str], *, is_tied: bool = False) -> Mapping[str, TensorName]:
        """Return the names in a checkpoint. In a tied model without an embedding the output head takes its place."""
        names = self.names
        if is_tied and self._stored_tables(tensor_names) == {HEAD}:
            names = {**names, EMBEDDING: names[HEAD]}
        for others in self.other_names:
            if all(self._has_tensor(name, tensor_names) for name in {tensor.name for tensor in others.values()}):
                return {**names, **others}
        return names

    def _has_tensor(self, name: str, tensor_names: Collection[str]) -> bool:
        """Return whether a checkpoint has a tensor of any layer with a name, under any of the family's prefixes."""
        patterns = {name.format(**prefixes._asdict(), l="*", e="*") for prefixes in self._all_prefixes}
        return any(fnmatch.filter(tensor_names, pattern) for pattern in patterns)

    def find_prefixes(self, tensor_names: Collection[str]) -> Prefixes:
        """Return the prefixes under which the checkpoint has the `marks` or final norm; by default the first ones."""
        prefixes = self._all_prefixes
        # A tied checkpoint may hold its embedding under the output head's name only.
        for marks in (self.marks, (FINAL_NORM,)):
            names = [self.names[path].name for path in marks if path in self.names]
            for prefix in prefixes if names and all("{l}" not in name for name in names) else ():
                if {name.format(**prefix._asdict()) for name in names} <= set(tensor_names):
                    return prefix
        return prefixes[0]
