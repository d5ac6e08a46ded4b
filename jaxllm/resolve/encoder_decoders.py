"""Refuse what encoder-decoders cannot do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxllm.exceptions import VLLMValidationError

if TYPE_CHECKING:
    from jaxllm.config.arguments import EngineArguments
    from jaxllm.resolve.resolve_pooling import Resolved

_GUESSES_ALONE = ("ngram", "suffix")
"""The ways of guessing tokens without a draft model."""


def check_encoder_decoder(args: EngineArguments, resolved: Resolved) -> None:
    """Raise VLLMValidationError for an argument that an encoder-decoder cannot follow; others are all fine."""
    config, speculative = resolved.model_config, args.speculation()
    if config.encoder is None or config.encoder.clips is None:
        return
    if args.enable_lora:
        raise _refusal("enable_lora", True, "adapters of its attention to sound are not supported")
    if resolved.runner_type == "pooling":
        raise _refusal("runner", resolved.runner_type, "its hidden states are not pooled")
    if speculative is not None and speculative.drafter not in _GUESSES_ALONE:
        reason = f"no draft model hears the sound: use method={' or '.join(map(repr, _GUESSES_ALONE))}"
        raise _refusal("speculative_config", speculative.drafter, reason)


def _refusal(name: str, value: object, reason: str) -> VLLMValidationError:
    message = f"{name}={value!r} does not go with an encoder-decoder: {reason}."
    return VLLMValidationError(message, parameter=name, value=value)
