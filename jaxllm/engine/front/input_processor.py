"""Check prompts and params and make complete `EngineCoreRequest`s of them before anything runs."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import TYPE_CHECKING, Any

from jaxllm.core_messages import SEED_MASK, EngineCoreRequest
from jaxllm.engine.front.late_chunks import find_chunks
from jaxllm.engine.front.params_resolver import CheckInCore, InputLimits, ParamsResolver, refusal
from jaxllm.engine.front.pooling_resolver import resolve_pooling_params, verify_pooling_task
from jaxllm.engine.front.prompt_encoder import EncodedPrompt, PromptEncoder, too_long
from jaxllm.exceptions import VLLMValidationError
from jaxllm.lora.request import LoRARequest
from jaxllm.media.items import MediaSettings
from jaxllm.outputs import LateChunkingMetadata
from jaxllm.params.checks import check_float, check_int
from jaxllm.pooling_params import PoolingParams
from jaxllm.sampling_params import RequestOutputKind, SamplingParams
from jaxllm.text.prompts import parse_prompt
from jaxllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxllm.media.reader import MediaReader
    from jaxllm.resolve.pooling_settings import PoolingSettings

type _Resolved = SamplingParams | PoolingParams
"""The complete params of a request, to generate or to pool."""

_UNSAMPLED = SamplingParams(max_tokens=1, detokenize=False)
"""The sampling parameters of requests that are pooled."""
# How long a single request may keep the caller, who has steps to run, waiting for its grammar.
GRAMMAR_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class ProcessedRequest:
    """A user's request, complete."""

    request_id: str
    """The user's name of the request; the core knows it by another one."""
    prompt: str | None
    core: EngineCoreRequest
    """The request as the core runs it."""
    trace: Mapping[str, str] | None = None
    """The W3C headers of the trace that it belongs to, if any; None for a step of a search, which is no request."""
    num_hidden_layers: int = 0
    """The layers whose outputs the engine returns, for requests that ask."""
    late_chunking: LateChunkingMetadata | None = None
    """The chunks that its tokens' outputs become embeddings of."""

    @property
    def prompt_token_ids(self) -> list[int]:
        """Return the token ids of the prompt."""
        return self.core.prompt_token_ids

    @property
    def params(self) -> SamplingParams:
        """Return the params: a private copy with stop ids and EOS resolved."""
        return self.core.sampling_params


class InputProcessor:
    """Turns prompts and params into complete requests, or refuses them with an error that names the argument."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        limits: InputLimits,
        generation_config: Mapping[str, Any],
        seed: int,
        check_in_core: CheckInCore | None = None,
        pooling: PoolingSettings | None = None,
        media: MediaSettings | None = None,
    ) -> None:
        """Ask the core through `check_in_core` whether it would refuse a request; if None, it refuses on arrival."""
        self._pooling, self._tokenizer, self._media = pooling, tokenizer, media
        self._reader = _make_reader(media, tokenizer)
        self._prompts = PromptEncoder(tokenizer, limits, pooling, self._reader, None if media is None else media.clips)
        self._limits = limits
        self._params = ParamsResolver(tokenizer, limits, generation_config, check_in_core)
        self._seed = seed
        self.arrivals: Iterator[int] = count()
        """The numbers of requests in the order of their arrival. Front ends of one core must share them."""

    def process(
        self,
        request_id: str,
        prompt: Any,
        params: Any,
        *,
        arrival_time: float | None = None,
        priority: int = 0,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        lora_request: Any = None,
        grammar_seconds: float = GRAMMAR_SECONDS,
    ) -> ProcessedRequest:
        """Check and complete one request."""
        adapter = self.check_adapter(lora_request)
        resolved = self.resolve(params, grammar_seconds)
        encoded = self.encode(prompt, tokenization_kwargs, pools=isinstance(resolved, PoolingParams))
        return self.complete(
            request_id,
            encoded,
            resolved,
            arrival_time=arrival_time,
            priority=priority,
            trace_headers=trace_headers,
            adapter=adapter,
        )

    @property
    def media_counts(self) -> tuple[int, int]:
        """Return how often processed images and videos were looked up, and found."""
        return (0, 0) if self._reader is None else (self._reader.counts.queries, self._reader.counts.hits)

    def forget_media(self) -> None:
        """Forget all processed images and videos."""
        if self._reader is not None:
            self._reader.forget_all()

    def prepare_media(self) -> None:
        """Load what processes images, if the model takes any; without this the first image does it."""
        if self._reader is not None:
            self._reader.prepare()

    def close(self) -> None:
        """Start no more fetches."""
        if self._reader is not None:
            self._reader.close()

    def resolve(self, params: Any, grammar_seconds: float | None = None) -> _Resolved:
        """Check the params of one request and return a private, complete copy; see `ParamsResolver.resolve`."""
        if isinstance(params, PoolingParams):
            return self._resolve_pooling(params)
        verify_pooling_task("generate", self._pooling, self._limits.runner)
        return self._params.resolve(params, "params", None, grammar_seconds=grammar_seconds)

    def encode(
        self, prompt: Any, tokenization_kwargs: Mapping[str, Any] | None = None, *, pools: bool = False
    ) -> EncodedPrompt:
        """Check one prompt and tokenize it. Any thread may do it: 100,000 tokens take a quarter of a second."""
        return self._prompts.encode(
            [parse_prompt(prompt, "prompt", self._media)], ["prompt"], tokenization_kwargs, pools=pools
        )[0]

    def complete(
        self,
        request_id: str,
        prompt: EncodedPrompt,
        params: _Resolved,
        *,
        arrival_time: float | None = None,
        priority: int = 0,
        trace_headers: Mapping[str, str] | None = None,
        adapter: LoRARequest | None = None,
    ) -> ProcessedRequest:
        """Put an encoded prompt, resolved params and an adapter that was checked together, if they fit each other."""
        trace = self.check_trace(trace_headers)
        when = time.time() if arrival_time is None else check_float("arrival_time", arrival_time, 0, math.inf)
        _check_scores(prompt, params, "prompt")
        max_tokens = self._check_lengths(prompt.token_ids, params, "prompt")
        checked = self.check_priority(priority)
        return self._complete(request_id, prompt, params, max_tokens, checked, when, trace, adapter)

    def process_batch(
        self,
        request_ids: Sequence[str],
        prompts: Sequence[Any],
        params: Sequence[Any],
        *,
        priorities: Sequence[int] | None = None,
        lora_requests: Sequence[Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        output_kind: RequestOutputKind | None = None,
        label: str = "prompts",
    ) -> list[ProcessedRequest]:
        """Check and complete many requests, all or none; an error names the index as in "prompts[3]: ..."."""
        when = time.time()
        labels = [f"{label}[{i}]" for i in range(len(prompts))]
        resolved = self._resolve_all(params, output_kind)
        parsed = [parse_prompt(prompt, name, self._media) for prompt, name in zip(prompts, labels, strict=True)]
        all_priorities = [0] * len(prompts) if priorities is None else priorities
        checked = [self.check_priority(priority, f"priority[{i}]") for i, priority in enumerate(all_priorities)]
        named = [None] * len(prompts) if lora_requests is None else lora_requests
        adapters = [self.check_adapter(each, f"lora_request[{i}]") for i, each in enumerate(named)]
        pools = any(isinstance(each, PoolingParams) for each in resolved)
        tokenized = self._prompts.encode(parsed, labels, tokenization_kwargs, pools=pools)
        for prompt, request_params, name in zip(tokenized, resolved, labels, strict=True):
            _check_scores(prompt, request_params, name)
        lengths = [
            self._check_lengths(prompt.token_ids, each, name)
            for prompt, each, name in zip(tokenized, resolved, labels, strict=True)
        ]
        return [
            self._complete(request_ids[i], prompt, resolved[i], lengths[i], checked[i], when, {}, adapters[i])
            for i, prompt in enumerate(tokenized)
        ]

    def _resolve_all(self, params: Sequence[Any], output_kind: RequestOutputKind | None) -> list[_Resolved]:
        """Resolve each distinct object once: a batch mostly shares one."""
        same = len({id(request_params) for request_params in params}) == 1
        resolved: dict[int, _Resolved] = {}
        for i, request_params in enumerate(params):
            if id(request_params) not in resolved:
                if isinstance(request_params, PoolingParams):
                    resolved[id(request_params)] = self._resolve_pooling(request_params)
                    continue
                verify_pooling_task("generate", self._pooling, self._limits.runner)
                name = "sampling_params" if same else f"sampling_params[{i}]"
                resolved[id(request_params)] = self._params.resolve(request_params, name, output_kind)
        return [resolved[id(request_params)] for request_params in params]

    def _resolve_pooling(self, params: PoolingParams) -> PoolingParams:
        verify_pooling_task(params.task, self._pooling, self._limits.runner)
        assert self._pooling is not None
        return resolve_pooling_params(params, None, self._pooling)

    def _check_lengths(self, ids: Sequence[int], params: _Resolved, label: str) -> int:
        """Return the number of tokens that may be generated: max_tokens cut to what the context has left."""
        limit = self._limits.max_model_len
        if len(ids) > limit:
            raise too_long(limit, label, len(ids), f"{len(ids)} input tokens")
        if isinstance(params, PoolingParams):
            return 1
        if len(ids) == limit:
            message = (
                f"The decoder prompt (length {limit}) plus the number of requested output tokens (at least 1) is "
                f"longer than the maximum model length of {limit}. Please reduce the length of the input prompt, or "
                "start the engine with a larger max_model_len"
            )
            raise refusal(label, message, "prompt", limit)
        room = limit - len(ids)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        if params.min_tokens > max_tokens:
            message = (
                f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {params.min_tokens}: a prompt "
                f"of {len(ids)} tokens leaves no more within max_model_len={limit}"
            )
            raise refusal(label, message, "min_tokens", params.min_tokens)
        rows = params.prompt_logprob_token_ids
        num_scored = max(0, len(ids) - 1 - (params.prompt_logprob_start or 0))
        if rows is not None and len(rows) != num_scored:
            message = (
                f"prompt_logprob_token_ids has {len(rows)} rows, but the prompt has {num_scored} scored rows "
                "(prompt_len - 1 - prompt_logprob_start)"
            )
            raise refusal(label, message, "prompt_logprob_token_ids", len(rows))
        return max_tokens

    def check_priority(self, priority: Any, label: str = "priority") -> int:
        """Return a priority. Raises VLLMValidationError if there can be none."""
        checked = check_int(label, priority, -(2**31), 2**31 - 1, parameter="priority")
        if checked and not self._limits.priorities:
            message = "needs scheduling_policy='priority'; the engine runs first come, first served"
            raise refusal(label, message, "priority", priority)
        return checked

    def check_adapter(self, adapter: Any, label: str = "lora_request") -> LoRARequest | None:
        """Return the request's adapter, or None. Raises VLLMValidationError if this engine takes none."""
        return None if adapter is None else self.check_named(adapter, label)

    def check_named(self, adapter: Any, label: str = "lora_request") -> LoRARequest:
        """Return an adapter's request. Raises VLLMValidationError for anything else, or if this engine takes none."""
        if not isinstance(adapter, LoRARequest):
            message = f"must be a jaxllm.lora.request.LoRARequest, not {type(adapter).__name__}"
            raise refusal(label, message, "lora_request", adapter)
        if self._pooling is not None and adapter.task in self._pooling.adapter_names:
            return adapter
        if not self._limits.adapters:
            raise refusal(label, "needs an engine with enable_lora=True", "lora_request", adapter)
        if adapter.tensorizer_config_dict is not None:
            message = "tensorizer_config_dict is not supported: adapters are read as PEFT saves them"
            raise refusal(label, message, "tensorizer_config_dict", adapter.tensorizer_config_dict)
        return adapter

    def check_trace(self, headers: Any) -> Mapping[str, str]:
        """Return the headers of a request's trace. Raises VLLMValidationError if there can be none."""
        if headers is None:
            return {}
        if not isinstance(headers, Mapping) or not all(isinstance(each, str) for each in chain(*headers.items())):
            message = "trace_headers must be a mapping of strings to strings, such as {'traceparent': '00-...'}."
            raise VLLMValidationError(message, parameter="trace_headers", value=headers)
        if headers and not self._limits.traces:
            message = "trace_headers needs an engine with otlp_traces_endpoint: this one traces nothing."
            raise VLLMValidationError(message, parameter="trace_headers", value=headers)
        return headers

    def _complete(
        self,
        request_id: str,
        prompt: EncodedPrompt,
        params: _Resolved,
        max_tokens: int,
        priority: int,
        arrival_time: float,
        trace: Mapping[str, str],
        adapter: LoRARequest | None = None,
    ) -> ProcessedRequest:
        """Make the core's request, under an id of its own: the user's may come again while its end is on the way."""
        number = next(self.arrivals)
        pooling = params if isinstance(params, PoolingParams) else None
        params = _UNSAMPLED if isinstance(params, PoolingParams) else params
        core = EngineCoreRequest(
            request_id=str(number),
            prompt_token_ids=prompt.token_ids,
            sampling_params=params,
            eos_token_id=params.eos_token_id,
            max_tokens=max_tokens,
            seed=mix(self._seed, number) if params.seed is None else params.seed & SEED_MASK,
            arrival_time=arrival_time,
            arrival=number,
            priority=priority,
            cache_salt=prompt.salt,
            lora=adapter,
            pooling_params=pooling,
            pair_start=prompt.pair_start,
            media=prompt.media,
            clip=prompt.clip,
            steered=self._params.steered(params),
            hidden_states=self._params.hidden_states(params),
        )
        late = None if pooling is None else pooling.late_chunking_params
        chunks = None if late is None else find_chunks(prompt.text, prompt.token_ids, late.chunk_size, self._tokenizer)
        num_layers = self._limits.num_hidden_layers
        return ProcessedRequest(request_id, prompt.text, core, trace, num_layers, chunks)


def _check_scores(prompt: EncodedPrompt, params: _Resolved, label: str) -> None:
    """Raise VLLMValidationError where the tokens of a prompt of embeddings, which has none, are to be scored."""
    if prompt.media is None or not prompt.media.is_whole_prompt or isinstance(params, PoolingParams):
        return
    if params.first_scored_position is not None:
        message = "a prompt of embeddings has no tokens to score: leave prompt_logprobs out"
        raise refusal(label, message, "prompt_logprobs", params.prompt_logprobs)


def _make_reader(media: MediaSettings | None, tokenizer: Tokenizer | None) -> MediaReader | None:
    if media is None or media.text_only or media.clips is not None or tokenizer is None:
        return None
    from jaxllm.media.reader import MediaReader  # which loads numpy and Pillow

    return MediaReader(media, tokenizer)


def mix(seed: int, counter: int) -> int:
    """Mix two integers into one in [0, 2**64), evenly and always the same way (SplitMix64 twice)."""
    return _split_mix(_split_mix(seed & SEED_MASK) ^ (counter & SEED_MASK))


def _split_mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & SEED_MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & SEED_MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & SEED_MASK
    return value ^ (value >> 31)
