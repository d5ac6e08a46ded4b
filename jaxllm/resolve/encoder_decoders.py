"""Settle the rules of encoder-decoders' outputs, and refuse what these models cannot do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxllm.exceptions import VLLMValidationError
from jaxllm.params.checks import INT32_MAX, check_int, check_ints

if TYPE_CHECKING:
    from jaxllm.config.arguments import EngineArguments
    from jaxllm.resolve.engine_config import EngineConfig
    from jaxllm.resolve.resolve_pooling import Resolved
    from jaxllm.sampling.transcripts import TranscriptRules

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


def transcript_rules(config: EngineConfig) -> TranscriptRules | None:
    """Return the rules of outputs that the generation config gives a Whisper; None if it is not read, or gives none.

    Raises VLLMValidationError for values that are malformed.
    """
    encoder, vocab_size = config.model_config.encoder, config.model_config.vocab_size
    if encoder is None or encoder.clips is None or config.args.generation_config == "vllm":
        return None
    from jaxllm.sampling.transcripts import TranscriptRules  # which loads JAX

    settings = config.generation_config
    suppressed, suppressed_first = (_ids(settings, key) for key in ("suppress_tokens", "begin_suppress_tokens"))
    mark = _id(settings, "no_timestamps_token_id", vocab_size - 1)
    if not (suppressed or suppressed_first) and mark == vocab_size - 1:
        return None
    ends = settings.get("eos_token_id")
    end_of_text = ends[0] if isinstance(ends, list) and ends else ends
    return TranscriptRules(
        suppressed=suppressed,
        suppressed_first=suppressed_first,
        first_timestamp=mark + 1,
        end_of_text=end_of_text if isinstance(end_of_text, int) else _id(settings, "bos_token_id", 0),
        last_initial=min(mark + 1 + _id(settings, "max_initial_timestamp_index", vocab_size), vocab_size),
    )


def _id(settings: Mapping[str, Any], key: str, default: int) -> int:
    value = settings.get(key)
    return default if value is None else check_int(f"{key} of generation_config", value, 0, INT32_MAX)


def _ids(settings: Mapping[str, Any], key: str) -> tuple[int, ...]:
    value = settings.get(key)
    return () if value is None else tuple(check_ints(f"{key} of generation_config", value, -1, INT32_MAX, 1 << 16))


def _refusal(name: str, value: object, reason: str) -> VLLMValidationError:
    message = f"{name}={value!r} does not go with an encoder-decoder: {reason}."
    return VLLMValidationError(message, parameter=name, value=value)
