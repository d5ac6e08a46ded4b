"""Refuse prompts of embeddings for engines that cannot take them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxllm.exceptions import VLLMValidationError
from jaxllm.resolve.checkpoint_settings import find_family

if TYPE_CHECKING:
    from jaxllm.models.family import Family
    from jaxllm.resolve.engine_config import EngineConfig

_GUESSES_ALONE = ("ngram", "suffix")
"""The ways of guessing tokens without a draft model."""


def check_prompt_embeds(settled: EngineConfig) -> None:
    """Raise VLLMValidationError for an engine that is to take prompts of embeddings, and cannot."""
    args = settled.args
    if not args.enable_prompt_embeds:
        return
    config, speculative = settled.model_config, args.speculation()
    if settled.runner_type != "generate":
        raise _refusal("is for models that generate")
    if config.towers:
        raise _refusal("is for models of text: load no tower, with language_model_only=True")
    if config.encoder is not None:
        raise _refusal(f"is for models without an encoder, and {config.architecture} has one")
    if any(layer.input_size for layer in config.layers):
        raise _refusal(f"is no use to {config.architecture}, whose layers look tokens up themselves")
    if not _starts_with_embeddings(find_family(args.model, settled.hf_config)[1]):
        raise _refusal(f"is not there for {config.architecture}, which adds to embeddings before its first layer")
    if speculative is not None and speculative.drafter not in _GUESSES_ALONE:
        raise _refusal("does not go with a draft model: use method='ngram' or 'suffix'")
    if any(isinstance(each, type) for each in settled.logits_processors):
        raise _refusal("does not go with logits_processors that are classes: they look at the prompt's tokens")


def _starts_with_embeddings(family: Family) -> bool:
    """Return whether embeddings, scaled, are what goes into the first layer: not so where positions are learned."""
    from jaxllm.models.layers.frame import Frame  # which loads JAX

    return isinstance(family.frame, type) and issubclass(family.frame, Frame)


def _refusal(reason: str) -> VLLMValidationError:
    message = f"enable_prompt_embeds {reason}. Leave it out."
    return VLLMValidationError(message, parameter="enable_prompt_embeds", value=True)
