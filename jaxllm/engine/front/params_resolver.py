"""Make the `SamplingParams` that the engine runs by of a user's: checked against the model, and complete."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from jaxllm.config.groups import StructuredOutputsConfig
from jaxllm.exceptions import VLLMValidationError
from jaxllm.params.checks import INT32_MAX, check_float, check_int, shown
from jaxllm.params.hidden_states import HIDDEN_STATES, Positions, read_positions
from jaxllm.params.limits import FLOAT32_MAX, MAX_BAD_WORD_TOKENS
from jaxllm.sampling_params import RequestOutputKind, SamplingParams
from jaxllm.steering.request import STEERING, Steered, read_steered
from jaxllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxllm.engine.transport.engine_ready import EngineReady

type CheckInCore = Callable[[SamplingParams, float | None], None]
"""A check raises VLLMValidationError for params that the core would refuse. Its second argument is the
seconds to wait for a grammar to compile; one that has not compiled by then passes.
"""

_ID_FIELDS = ("stop_token_ids", "allowed_token_ids", "logit_bias", "logprob_token_ids", "prompt_logprob_token_ids")


@dataclass(frozen=True, slots=True)
class InputLimits:
    """The limits of the requests that an engine takes."""

    vocab_size: int
    """The width of the logits: every token id is below it."""
    max_model_len: int
    max_logprobs: int
    """The most tokens whose log-probabilities are returned; the vocabulary's size sets no limit."""
    priorities: bool
    """True if the scheduling policy uses priorities."""
    stream_interval: int = 1
    """The least number of new tokens in a streamed output."""
    has_thinking_tokens: bool = False
    """True if the markers of the model's reasoning are known."""
    extra_args: Mapping[str, int | float] = field(default_factory=dict)
    """The arguments that traced logits processors take, with their defaults."""
    has_validators: bool = False
    """True if classes among the logits processors look at the params of each request."""
    structured_outputs: StructuredOutputsConfig = field(default_factory=StructuredOutputsConfig)
    traces: bool = False
    """True if requests are traced."""
    adapters: bool = False
    """True if requests may name LoRA adapters."""
    vectors: Mapping[str, str] = field(default_factory=dict)
    """The digests of the steering vectors that requests may name, by name, in their order."""
    num_hidden_layers: int = 0
    """The layers whose outputs requests may have returned."""
    embed_size: int = 0
    """The numbers of an embedding, where prompts may be embeddings; else 0."""
    runner: str = "generate"
    """The engine's runner: "generate" or "pooling"."""

    @classmethod
    def of(cls, ready: EngineReady) -> Self:
        """Return the limits of an engine."""
        config = ready.vllm_config
        return cls(
            vocab_size=ready.vocab_size,
            max_model_len=ready.max_model_len,
            max_logprobs=config.model_config.max_logprobs,
            priorities=config.scheduler_config.policy == "priority",
            stream_interval=config.scheduler_config.stream_interval,
            has_thinking_tokens=ready.has_thinking_tokens,
            extra_args=ready.extra_args,
            has_validators=ready.has_validators,
            structured_outputs=config.structured_outputs_config,
            runner=config.model_config.runner_type,
            embed_size=ready.embed_size,
            num_hidden_layers=ready.num_hidden_layers,
            vectors=ready.vectors,
            adapters=config.lora_config is not None,
            traces=config.observability_config.otlp_traces_endpoint is not None,
        )


class ParamsResolver:
    """Copies params, completes the copies, and refuses what this model or this engine cannot do."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        limits: InputLimits,
        generation_config: Mapping[str, Any],
        check_in_core: CheckInCore | None,
    ) -> None:
        """Ask the core through `check_in_core` whether it would refuse a request; if None, it refuses on arrival."""
        self._tokenizer = tokenizer
        self._limits = limits
        self._generation_config = generation_config
        self._check_in_core = check_in_core

    def resolve(
        self, source: Any, label: str, output_kind: RequestOutputKind | None, grammar_seconds: float | None = None
    ) -> SamplingParams:
        """Return a private, complete copy; cheap checks go first, and errors begin with `label`.

        With `grammar_seconds`, a grammar that takes longer to compile is let through and refused by the core; with 0
        every one that does not compile is.
        """
        if not isinstance(source, SamplingParams):
            kind = type(source).__name__
            raise refusal(label, f"must be SamplingParams, got {shown(source)} ({kind})", "sampling_params", source)
        params = source.clone()
        if params is source:  # skip_clone: still not ours to change
            params = copy.copy(source)
        self._check_ids(params, label)
        self._check_logprobs(params, label)
        self._check_lengths(params, label)
        self._check_needs(params, label)
        self._check_extra_args(params, label)
        self._resolve_stops(params)
        params._bad_words_token_ids = self._resolve_bad_words(params, label)
        self._resolve_structured_outputs(params)
        self._ask_core(params, label, grammar_seconds)
        params.stream_interval = max(params.stream_interval or 1, self._limits.stream_interval)
        if output_kind is not None:
            params.output_kind = output_kind
        return params

    def _check_ids(self, params: SamplingParams, label: str) -> None:
        for name in _ID_FIELDS:
            ids = getattr(params, name)
            largest = max(map(max, ids)) if ids and name == "prompt_logprob_token_ids" else max(ids or (0,))
            if largest >= self._limits.vocab_size:
                message = f"token_id(s) [{largest}] in {name} contain out-of-vocab token ids"
                if name == "allowed_token_ids":  # vLLM words this error in its own way
                    message = f"{name} contains out-of-vocab token id {largest}"
                raise refusal(label, f"{message}. Vocabulary size: {self._limits.vocab_size}", name, largest)

    def _check_logprobs(self, params: SamplingParams, label: str) -> None:
        limit = self._limits.max_logprobs
        if limit >= self._limits.vocab_size:
            return
        ids = params.prompt_logprob_token_ids
        asked = {
            "logprobs": ("sample logprobs of {}", params.logprobs),
            "prompt_logprobs": ("prompt logprobs of {}", params.prompt_logprobs),
            "prompt_logprob_token_ids": ("{} token ids per row in prompt_logprob_token_ids", ids and len(ids[0])),
        }
        for name, (what, count) in asked.items():
            if count is not None and not 0 <= count <= limit:
                num = self._limits.vocab_size if count < 0 else count
                message = f"Requested {what.format(num)}, which is greater than max allowed: {limit}"
                way_out = f"lower {name}, or start the engine with max_logprobs={num} or more (-1 for no limit)"
                raise refusal(label, f"{message}; {way_out}", name, count)

    def _check_lengths(self, params: SamplingParams, label: str) -> None:
        """Refuse params that fit no prompt."""
        longest = self._limits.max_model_len - 1
        for name in ("min_tokens", "prompt_logprob_start"):
            value = getattr(params, name) or 0
            if value > longest:
                message = f"{name}={value} does not fit max_model_len={longest + 1}; it must be at most {longest}"
                raise refusal(label, message, name, value)
        num_rows = len(params.prompt_logprob_token_ids or ())
        if num_rows > longest:
            message = f"prompt_logprob_token_ids has {num_rows} rows, but a prompt has at most {longest} scored rows"
            raise refusal(label, f"{message} (max_model_len - 1)", "prompt_logprob_token_ids", num_rows)

    def _check_needs(self, params: SamplingParams, label: str) -> None:
        """Refuse params that need a feature that this engine was started without."""
        if self._tokenizer is None:
            instead = {
                "stop": "use stop_token_ids",
                "bad_words": "use logit_bias or allowed_token_ids",
                "structured_outputs": "use allowed_token_ids",
            }
            for name, way_out in instead.items():
                if getattr(params, name):
                    what = "stop strings need" if name == "stop" else f"{name} needs"
                    message = f"{what} a tokenizer; {way_out} with `skip_tokenizer_init=True`"
                    raise refusal(label, message, name, getattr(params, name))
        if params.thinking_token_budget is not None and not self._limits.has_thinking_tokens:
            message = (
                "thinking_token_budget is set but reasoning_config is not configured, and the tokenizer has no <think> "
                "and </think>; start the engine with reasoning_config={'reasoning_start_str': ..., "
                "'reasoning_end_str': ...}"
            )
            raise refusal(label, message, "thinking_token_budget", params.thinking_token_budget)

    def _check_extra_args(self, params: SamplingParams, label: str) -> None:
        """Check what steering takes, and what logits processors take against the kind of its default."""
        taken, checked = self._limits.extra_args, dict(params.extra_args or {})
        for name in checked.keys() & taken.keys():
            value = checked[name]
            what = f"{label}: extra_args[{name!r}]"
            if isinstance(taken[name], int):
                checked[name] = check_int(what, value, -INT32_MAX - 1, INT32_MAX, parameter="extra_args")
            else:
                checked[name] = check_float(what, value, -FLOAT32_MAX, FLOAT32_MAX, parameter="extra_args")
        if checked:
            params.extra_args = checked
        self.steered(params, label)
        if self.hidden_states(params, label) == "all":
            params.skip_reading_prefix_cache = True  # which has no hidden states

    def steered(self, params: SamplingParams, label: str = "params") -> Steered | None:
        """Return the steering vector that params ask for. Raises VLLMValidationError if there is no such vector."""
        asked, limits = params.extra_args or {}, self._limits
        if STEERING not in asked or STEERING in limits.extra_args:
            return None
        return read_steered(asked[STEERING], limits.vectors, label)

    def hidden_states(self, params: SamplingParams, label: str = "params") -> Positions | None:
        """Return the positions whose hidden states params ask for. Raises VLLMValidationError if there are none."""
        asked, limits = params.extra_args or {}, self._limits
        if HIDDEN_STATES not in asked or HIDDEN_STATES in limits.extra_args:
            return None
        return read_positions(asked[HIDDEN_STATES], label, has_layers=limits.num_hidden_layers > 0)

    def _resolve_stops(self, params: SamplingParams) -> None:
        """Add the model's EOS ids, leaving out any that the model itself lacks."""
        params._eos_token_id = None
        params._all_stop_token_ids = set(params.stop_token_ids or ())
        eos_token_id = None if self._tokenizer is None else self._tokenizer.eos_token_id
        params.update_from_generation_config(self._generation_config, eos_token_id)
        known = range(self._limits.vocab_size)
        params._all_stop_token_ids = {each for each in params._all_stop_token_ids if each in known}
        params.stop_token_ids = [each for each in params.stop_token_ids or () if each in known]

    def _resolve_bad_words(self, params: SamplingParams, label: str) -> list[list[int]] | None:
        """Return the token sequences that spell the words, at the beginning and after a space."""
        if not params.bad_words or self._tokenizer is None:
            return None
        bare = [word.lstrip() for word in params.bad_words]
        encoded = self._tokenizer.encode(bare + [" " + word for word in bare], add_special_tokens=False)
        sequences: list[list[int]] = []
        for word, first, spaced in zip(bare, encoded[: len(bare)], encoded[len(bare) :], strict=True):
            if not first:
                raise refusal(label, f"bad_words: {shown(word)} makes no token", "bad_words", word)
            sequences.append(first)
            # As in vLLM: the space must make another first token, not a token of its own before the word's.
            if spaced and spaced[0] != first[0] and len(spaced) == len(first):
                sequences.append(spaced)
        count, largest = sum(map(len, sequences)), max(map(max, sequences))
        if count > MAX_BAD_WORD_TOKENS:
            message = f"bad_words must make at most {MAX_BAD_WORD_TOKENS} tokens together, got {count}"
            raise refusal(label, message, "bad_words", count)
        if largest >= self._limits.vocab_size:
            message = f"bad_words make token {largest}, which the model lacks: it has {self._limits.vocab_size}"
            raise refusal(label, message, "bad_words", largest)
        return sequences

    def _resolve_structured_outputs(self, params: SamplingParams) -> None:
        """Put the engine's settings into the constraint."""
        constraint, defaults = params.structured_outputs, self._limits.structured_outputs
        if constraint is not None:
            params.structured_outputs = constraint.with_defaults(
                disable_any_whitespace=defaults.disable_any_whitespace,
                disable_additional_properties=defaults.closes_objects,
            )

    def _ask_core(self, params: SamplingParams, label: str, grammar_seconds: float | None) -> None:
        """Let the core refuse what only it knows: a grammar, or what a class of logits processors does not take."""
        if self._check_in_core is None:
            return
        if params.structured_outputs is None and not self._limits.has_validators:
            return
        try:
            self._check_in_core(params, grammar_seconds)
        except VLLMValidationError as error:
            message = str(error).removesuffix(".")
            raise refusal(label, message, error.parameter or "structured_outputs", error.value) from error


def refusal(label: str, message: str, parameter: str, value: object) -> VLLMValidationError:
    """Make the error for one of many inputs, named by `label`."""
    return VLLMValidationError(f"{label}: {message}.", parameter=parameter, value=value)
