"""vLLM's `SamplingParams`, field for field: how to generate. They are checked when made, and again by `clone`."""

from __future__ import annotations

import copy
import enum
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from jaxllm.exceptions import VLLMValidationError, unknown_parameter
from jaxllm.params.checks import (
    INT32_MAX,
    check_bool,
    check_choice,
    check_float,
    check_int,
    check_ints,
    check_kind,
    check_strings,
    shown,
)
from jaxllm.params.limits import (
    LENGTH_PENALTIES,
    MAX_ALLOWED_TOKEN_IDS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_N,
    MAX_PATTERN_SIZE,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    REPETITION_PENALTIES,
)
from jaxllm.params.sampling_rules import (
    GONE,
    check_bad_words,
    check_extra_args,
    check_logit_bias,
    check_prompt_scores,
    check_temperature,
    refuse_without_meaning,
)
from jaxllm.params.structured_outputs import StructuredOutputsParams


class SamplingType(enum.IntEnum):
    """The ways in which a request picks its next token."""

    GREEDY = 0
    RANDOM = 1
    RANDOM_SEED = 2


class RequestOutputKind(enum.Enum):
    """The contents of each `RequestOutput` of an unfinished request."""

    CUMULATIVE = 0
    """Each output holds everything generated so far."""
    DELTA = 1
    """Each output holds only what is new."""
    FINAL_ONLY = 2
    """One output, when the request is finished."""


class RepetitionDetectionParams(msgspec.Struct, omit_defaults=True):
    """End a generation that repeats a pattern of min_pattern_size..max_pattern_size tokens min_count times.

    max_pattern_size=0 disables the check; min_pattern_size=0 means 1.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        self.max_pattern_size = check_int("max_pattern_size", self.max_pattern_size, 0, MAX_PATTERN_SIZE)
        self.min_pattern_size = check_int("min_pattern_size", self.min_pattern_size, 0, self.max_pattern_size)
        self.min_count = check_int("min_count", self.min_count, 2 if self.max_pattern_size else 0, INT32_MAX)


class BeamSearchParams(msgspec.Struct, omit_defaults=True):
    """Parameters of `LLM.beam_search`."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    """Above 0, each beam's candidates also include a token drawn at this temperature."""
    length_penalty: float = 1.0
    """A text's score is its log-probability divided by its length to the power of this; in [-32, 32].

    The length is that of the whole sequence in tokens: the prompt counts, a final end of sequence does not.
    """
    include_stop_str_in_output: bool = False
    """Keep the end-of-sequence token in the text even if special tokens are left out; it is always among the tokens."""
    structured_outputs: StructuredOutputsParams | None = None
    """A constraint on the generated text. It does not change the model's scores."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    watermarking: bool | None = None
    """Must be False: there are no watermarks."""
    allowed_token_ids: list[int] | None = None
    """The only tokens that may extend a beam; include the end of sequence for beams that may end before max_tokens.

    It does not change the model's scores, and cannot be combined with structured_outputs.
    """

    def __post_init__(self) -> None:
        self.beam_width = check_int("beam_width", self.beam_width, 1, MAX_N)
        self.max_tokens = check_int("max_tokens", self.max_tokens, 1, INT32_MAX)
        check_bool("ignore_eos", self.ignore_eos)
        self.temperature = check_float("temperature", self.temperature, 0.0, 2.0)
        self.length_penalty = check_float("length_penalty", self.length_penalty, *LENGTH_PENALTIES)
        check_bool("include_stop_str_in_output", self.include_stop_str_in_output)
        check_kind("structured_outputs", self.structured_outputs, StructuredOutputsParams)
        check_bool("skip_special_tokens", self.skip_special_tokens)
        if self.watermarking not in (None, False):
            message = f"watermarking={shown(self.watermarking)} is not supported: outputs have no watermarks."
            raise VLLMValidationError(message, parameter="watermarking", value=self.watermarking)
        if self.allowed_token_ids is not None:
            self._check_allowed()

    def _check_allowed(self) -> None:
        name = "allowed_token_ids"
        self.allowed_token_ids = check_ints(name, self.allowed_token_ids, 0, INT32_MAX, MAX_LOGPROB_TOKEN_IDS)
        if not self.allowed_token_ids:
            raise VLLMValidationError(f"{name} must not be empty: a search needs tokens.", parameter=name, value=[])
        if self.structured_outputs is not None:
            message = f"{name} and structured_outputs exclude each other in beam search; give one of them."
            raise VLLMValidationError(message, parameter=name, value=self.allowed_token_ids)


class _SamplingParamsMeta(msgspec.StructMeta):
    """A metaclass that turns an unknown keyword into an error with its replacement."""

    if not TYPE_CHECKING:  # a __call__ seen by type checkers would hide the fields from them

        def __call__(cls, *args, **kwargs):  # noqa: N805
            for name, value in kwargs.items():
                if name not in _NAMES:
                    known = [field for field in cls.__struct_fields__ if field not in _INTERNAL]
                    raise unknown_parameter("SamplingParams", name, value, known, GONE)
            return super().__call__(*args, **kwargs)


class SamplingParams(msgspec.Struct, omit_defaults=True, dict=True, metaclass=_SamplingParamsMeta):
    """How to generate one request's output. The defaults are vLLM's; note max_tokens=16."""

    n: int = 1
    """The number of outputs per prompt, all equal when greedy."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens already in the output; in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once per occurrence in the output; in [-2, 2]."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of tokens in prompt or output and multiplies negative ones; in [0.001, 1000]."""
    temperature: float = 1.0
    """In [0, 2]; 0 is greedy, and a value between 0 and 0.01 becomes 0.01."""
    watermarking: bool | None = None
    """Must be None or False: there are no watermarks."""
    top_p: float = 1.0
    """Keep the most likely tokens whose probabilities sum to this; in (0, 1], 1 keeps all."""
    top_k: int = 0
    """Keep this many of the most likely tokens; 0 or -1 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this likely relative to the most likely one; in [0, 1]."""
    seed: int | None = None
    """Makes the request's randomness reproducible, in any batch; None and -1 take a seed from the engine's."""
    stop: str | list[str] | None = None
    """Strings that end the output; stored as a list."""
    stop_token_ids: list[int] | None = None
    """Token ids that end the output."""
    ignore_eos: bool = False
    """Continue after the end-of-sequence token."""
    max_tokens: int | None = 16
    """The most tokens of the output; None means up to the end of the model's context."""
    min_tokens: int = 0
    """Suppress the end of sequence and stop tokens until the output has this many tokens."""
    logprobs: int | None = None
    """Return log-probabilities of this many most likely tokens besides the sampled one; -1 is the whole vocabulary."""
    prompt_logprobs: int | None = None
    """Also return them for the prompt's tokens, of this many most likely ones; -1 is the whole vocabulary."""
    prompt_logprob_token_ids: list[list[int]] | None = None
    """Score one row of token ids per prompt position; `RequestOutput.prompt_token_id_logprobs` has the values.

    Row i is for position prompt_logprob_start + i + 1, and the last row for the prompt's last token. Rows are a list of
    lists, or an integer array of two dimensions; missing entries and entries of -1 score -inf.
    """
    prompt_logprob_start: int | None = None
    """The prompt position before the first one that prompt_logprob_token_ids score; 0 by default."""
    logprob_token_ids: list[int] | None = None
    """Return the log-probabilities of these token ids at each output token, in place of the most likely ones'."""
    flat_logprobs: bool = False
    """Return log-probabilities as `FlatLogprobs`: a few long lists instead of many small dicts."""
    detokenize: bool = True
    """Convert the tokens to text; otherwise `text` stays empty."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    spaces_between_special_tokens: bool = True
    """If False, neighbouring special tokens in the text are joined even where the decoder puts spaces."""
    include_stop_str_in_output: bool = False
    """Keep the stop string in the text."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """The contents of outputs before the last one."""
    stream_interval: int | None = None
    """The number of new tokens per output, at least the engine's stream_interval; the first and last come at once."""
    skip_clone: bool = False
    """Let `clone` return this object itself: nobody may change it then."""
    structured_outputs: StructuredOutputsParams | None = None
    """A constraint on the generated text."""
    logit_bias: dict[int, float] | None = None
    """Values added to the logits of these token ids; in [-1e30, 1e30]."""
    allowed_token_ids: list[int] | None = None
    """Sample from these token ids only."""
    extra_args: dict[str, Any] | None = None
    """Values for the engine's logits processors, by name, and for `steering`; others are passed along."""
    bad_words: list[str] | None = None
    """Words that are never generated, at the beginning of a word or after a space."""
    skip_reading_prefix_cache: bool | None = None
    """Compute the whole prompt without the prefix cache; default, and required, with log-probabilities of the prompt.
    """
    thinking_token_budget: int | None = None
    """Force the end of reasoning after this many tokens; None and -1 set no limit."""
    repetition_detection: RepetitionDetectionParams | None = None
    """End an output that repeats itself."""
    routed_experts_prompt_start: int = 0
    """Must be 0: routing is not returned."""
    trace_decode_token_ids: list[int] | None = None
    """Must be None: outputs are sampled."""
    output_text_buffer_length: int = 0
    """The number of characters to hold back until no stop string can start in them; derived from `stop`."""
    _eos_token_id: int | None = None
    _all_stop_token_ids: set[int] = msgspec.field(default_factory=set)
    _bad_words_token_ids: list[list[int]] | None = None

    @staticmethod
    def from_optional(**fields: Any) -> SamplingParams:
        """Make params from fields; any may be None for its default, but max_tokens=None stays unlimited."""
        kept = ((name, value) for name, value in fields.items() if value is not None or name == "max_tokens")
        values: dict[str, Any] = dict(kept)
        return SamplingParams(**values)

    def __post_init__(self) -> None:
        """Normalise and check every field. It runs again when decoded from msgpack, so it changes nothing twice."""
        self._check_random()
        self._check_lengths()
        self._check_text()
        self._check_logprobs()
        self._check_token_rules()
        refuse_without_meaning(self)
        if self.sampling_type is SamplingType.GREEDY:
            self.temperature, self.top_p, self.top_k, self.min_p = 0.0, 1.0, 0, 0.0
        self._all_stop_token_ids.update(self.stop_token_ids or ())

    def _check_random(self) -> None:
        self.n = check_int("n", self.n, 1, MAX_N)
        self.presence_penalty = check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        self.frequency_penalty = check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        self.repetition_penalty = check_float("repetition_penalty", self.repetition_penalty, *REPETITION_PENALTIES)
        self.temperature = check_temperature(self.temperature)
        self.top_p = check_float("top_p", self.top_p, 0.0, 1.0, above_low=True)
        self.top_k = max(0, check_int("top_k", self.top_k, -1, INT32_MAX, below="0 (disable), or at least 1"))
        self.min_p = check_float("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            self.seed = check_int("seed", self.seed, -(2**63), 2**64 - 1)
            self.seed = None if self.seed == -1 else self.seed

    def _check_lengths(self) -> None:
        if self.max_tokens is not None:
            self.max_tokens = check_int("max_tokens", self.max_tokens, 1, INT32_MAX)
        self.min_tokens = check_int("min_tokens", self.min_tokens, 0, INT32_MAX, below="greater than or equal to 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise VLLMValidationError(
                f"min_tokens must be less than or equal to max_tokens={self.max_tokens}, got {self.min_tokens}.",
                parameter="min_tokens",
                value=self.min_tokens,
            )
        check_bool("ignore_eos", self.ignore_eos)
        if self.stream_interval is not None:
            self.stream_interval = check_int("stream_interval", self.stream_interval, 1, INT32_MAX)
        if self.thinking_token_budget is not None:
            below = "a non-negative integer or -1 for unlimited"
            budget = check_int("thinking_token_budget", self.thinking_token_budget, -1, INT32_MAX, below=below)
            self.thinking_token_budget = None if budget == -1 else budget

    def _check_text(self) -> None:
        for name in ("detokenize", "skip_special_tokens", "spaces_between_special_tokens"):
            check_bool(name, getattr(self, name))
        for name in ("include_stop_str_in_output", "skip_clone", "flat_logprobs"):
            check_bool(name, getattr(self, name))
        if not isinstance(self.output_kind, RequestOutputKind):
            check_choice("output_kind", self.output_kind, tuple(RequestOutputKind))
        stop = [] if self.stop is None else [self.stop] if isinstance(self.stop, str) else self.stop
        self.stop = check_strings("stop", stop, MAX_STOP_STRINGS, MAX_STOP_LENGTH)
        if self.stop and not self.detokenize:
            raise VLLMValidationError(
                "stop strings are only supported when detokenize is True. Set detokenize=True to use stop, or use "
                "stop_token_ids.",
                parameter="stop",
                value=self.stop,
            )
        hold_back = bool(self.stop) and not self.include_stop_str_in_output
        self.output_text_buffer_length = max(map(len, self.stop)) - 1 if hold_back else 0

    def _check_logprobs(self) -> None:
        below = "non-negative or -1"
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:  # True means 1, as in vLLM
                setattr(self, name, 1 if value is True else check_int(name, value, -1, INT32_MAX, below=below))
        if self.logprob_token_ids is not None:
            name = "logprob_token_ids"
            self.logprob_token_ids = check_ints(name, self.logprob_token_ids, 0, INT32_MAX, MAX_LOGPROB_TOKEN_IDS)
            if self.logprobs not in (None, len(self.logprob_token_ids)):
                message = f"When both logprobs and {name} are set, logprobs must equal len({name})"
                counts = f"logprobs={self.logprobs}, len({name})={len(self.logprob_token_ids)}"
                raise VLLMValidationError(f"{message}. Got {counts}.", parameter=name, value=self.logprobs)
        check_prompt_scores(self)

    def _check_token_rules(self) -> None:
        ids = [] if self.stop_token_ids is None else self.stop_token_ids
        self.stop_token_ids = check_ints("stop_token_ids", ids, 0, INT32_MAX, MAX_STOP_TOKEN_IDS)
        self.bad_words = check_bad_words(self.bad_words)
        if self.allowed_token_ids is not None:
            name, ids = "allowed_token_ids", self.allowed_token_ids
            self.allowed_token_ids = check_ints(name, ids, 0, INT32_MAX, MAX_ALLOWED_TOKEN_IDS)
            if not self.allowed_token_ids:
                message = f"{name} is not None and empty: nothing could be sampled. Leave it out to allow every token."
                raise VLLMValidationError(message, parameter=name, value=ids)
        if self.logit_bias is not None:
            self.logit_bias = check_logit_bias(self.logit_bias)
        check_kind("structured_outputs", self.structured_outputs, StructuredOutputsParams)
        check_kind("repetition_detection", self.repetition_detection, RepetitionDetectionParams)
        if self.repetition_detection is not None:
            self.repetition_detection.__post_init__()  # its fields may have been assigned since
        if self.extra_args is not None:
            self.extra_args = check_extra_args(self.extra_args)

    @property
    def sampling_type(self) -> SamplingType:
        """Return whether the request is greedy, random, or random with a seed of its own."""
        if self.temperature == 0:
            return SamplingType.GREEDY
        return SamplingType.RANDOM if self.seed is None else SamplingType.RANDOM_SEED

    @property
    def num_logprobs(self) -> int | None:
        """The number of log-probabilities for each token besides its own; -1 is all, None not even its own."""
        return self.logprobs if self.logprobs is not None else len(self.logprob_token_ids or ()) or None

    @property
    def first_scored_position(self) -> int | None:
        """The first prompt position with a log-probability, at least 1; None if there is none."""
        if self.prompt_logprobs is not None:
            return 1
        return None if self.prompt_logprob_token_ids is None else (self.prompt_logprob_start or 0) + 1

    def prompt_ids_at(self, position: int) -> list[int] | None:
        """Return the row of prompt_logprob_token_ids for a prompt position; None if it has none."""
        row = position - 1 - (self.prompt_logprob_start or 0)
        return None if self.prompt_logprob_token_ids is None or row < 0 else self.prompt_logprob_token_ids[row]

    @property
    def eos_token_id(self) -> int | None:
        """The end-of-sequence id that ends the output; None if it is ignored or not resolved yet."""
        return self._eos_token_id

    @property
    def all_stop_token_ids(self) -> set[int]:
        """All ids that min_tokens suppresses: stop_token_ids and, once resolved, the model's EOS ids."""
        return self._all_stop_token_ids

    @property
    def bad_words_token_ids(self) -> list[list[int]] | None:
        """The token sequences of bad_words; None until they are resolved with a tokenizer."""
        return self._bad_words_token_ids

    def update_from_generation_config(
        self, generation_config: Mapping[str, Any], eos_token_id: int | None = None
    ) -> None:
        """Add the tokenizer's EOS and the further EOS ids of a generation config."""
        extra = generation_config.get("eos_token_id")
        eos_ids = {extra} if isinstance(extra, int) else set(extra or ())
        eos_ids.discard(eos_token_id)
        self._all_stop_token_ids |= eos_ids
        if eos_token_id is not None:
            self._all_stop_token_ids.add(eos_token_id)
        if not self.ignore_eos:
            self._eos_token_id = eos_token_id
            self.stop_token_ids = sorted(eos_ids.union(self.stop_token_ids or ()))

    def clone(self) -> SamplingParams:
        """Return a deep copy, checked again since fields may have been assigned; with skip_clone, this object."""
        if self.skip_clone:
            return self
        copied = copy.copy(self)  # __post_init__ makes the plain lists anew
        copied._all_stop_token_ids = set(self._all_stop_token_ids)
        for name in ("structured_outputs", "extra_args", "repetition_detection", "_bad_words_token_ids"):
            setattr(copied, name, copy.deepcopy(getattr(self, name)))
        copied.__post_init__()
        return copied

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.__struct_fields__ if name not in _INTERNAL)
        return f"SamplingParams({shown})"


_NAMES = frozenset(SamplingParams.__struct_fields__)
_INTERNAL = frozenset({"output_text_buffer_length", "_eos_token_id", "_all_stop_token_ids", "_bad_words_token_ids"})
