"""The synchronous engine: requests go in, each `step` gives outputs. `LLM` and offline streaming stand on it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from jaxllm.engine.core_client import CoreClient, InprocClient
from jaxllm.engine.input_processor import InputLimits, InputProcessor, ProcessedRequest
from jaxllm.engine.metrics import EngineMetrics, Metric, StatsLogger
from jaxllm.engine.output_processor import OutputProcessor
from jaxllm.engine.tokenizer import Tokenizer, load_tokenizer
from jaxllm.exceptions import VLLMValidationError
from jaxllm.log import show_log
from jaxllm.outputs import RequestOutput
from jaxllm.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from jaxllm.config import EngineArgs, EngineConfig
    from jaxllm.models.config import ModelConfig


class LLMEngine:
    """Runs requests, many at a time; not safe to use from several threads."""

    def __init__(self, config: EngineConfig, core: CoreClient, tokenizer: Tokenizer | None) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self._core = core
        self._metrics = EngineMetrics(config.model)
        self._stats_logger = None if config.disable_log_stats else StatsLogger(self._metrics)
        self._outputs = OutputProcessor(tokenizer, self._metrics)
        limits = InputLimits(
            vocab_size=config.model_config.vocab_size,
            max_model_len=core.max_model_len,
            max_logprobs=config.max_logprobs,
            priorities=config.scheduling_policy == "priority",
        )
        self._inputs = InputProcessor(tokenizer, limits, config.generation_config, config.seed)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Load the model and make an engine, its core in this process."""
        from jaxllm.engine.startup import make_core

        show_log()
        config = engine_args.create_engine_config()
        tokenizer = load_tokenizer(config)
        return cls(config, InprocClient(make_core(config)), tokenizer)

    @property
    def model_config(self) -> ModelConfig:
        """The model's shapes."""
        return self.config.model_config

    @property
    def max_model_len(self) -> int:
        """The longest sequence, prompt and output together."""
        return self._core.max_model_len

    def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams,
        arrival_time: float | None = None,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Any = None,
        priority: int = 0,
    ) -> str:
        """Queue a request and return its id. Raises VLLMValidationError, nothing queued, if it cannot be run."""
        if not isinstance(request_id, str):
            message = f"request_id must be a string, got {type(request_id).__name__}."
            raise VLLMValidationError(message, parameter="request_id", value=request_id)
        refuse_given(lora_request=lora_request, trace_headers=trace_headers)
        request = self._inputs.process(
            request_id,
            prompt,
            params,
            arrival_time=arrival_time,
            priority=priority,
            tokenization_kwargs=tokenization_kwargs,
        )
        self._enqueue(request)
        return request_id

    def add_requests(
        self,
        request_ids: Sequence[str],
        prompts: Sequence[Any],
        params: Sequence[Any],
        *,
        priorities: Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        output_kind: RequestOutputKind | None = None,
        label: str = "prompts",
    ) -> None:
        """Queue many requests, all or none; errors name the index. `output_kind` replaces that of the params."""
        processed = self._inputs.process_batch(
            request_ids,
            prompts,
            params,
            priorities=priorities,
            tokenization_kwargs=tokenization_kwargs,
            output_kind=output_kind,
            label=label,
        )
        queued: list[str] = []
        try:
            for request in processed:
                self._enqueue(request)
                queued.append(request.request_id)
        except BaseException:
            self.abort_request(queued)
            raise

    def step(self) -> list[RequestOutput]:
        """Do one step of the core and return what is new; empty when there is nothing to do."""
        processed = self._outputs.process_outputs(self._core.step())
        if processed.aborts:
            self._core.abort_requests(processed.aborts)
        if self._stats_logger is not None:
            self._stats_logger.on_step(time.monotonic())
        return processed.outputs

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests without further output; unknown ids are ignored."""
        ids = [request_ids] if isinstance(request_ids, str) else request_ids
        if aborted := self._outputs.abort_requests(ids):
            self._core.abort_requests(aborted)

    def has_unfinished_requests(self) -> bool:
        """Say whether a step can give outputs."""
        return self._outputs.num_unfinished_requests > 0

    def get_num_unfinished_requests(self) -> int:
        """Return how many requests are not finished; n outputs count once."""
        return self._outputs.num_unfinished_requests

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, and nothing forgotten, while requests run."""
        return self._core.reset_prefix_cache()

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the transformers tokenizer."""
        return self.require_tokenizer().hf

    def require_tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Raises VLLMValidationError without one."""
        if self.tokenizer is None:
            message = "there is no tokenizer: the engine was made with skip_tokenizer_init=True."
            raise VLLMValidationError(message, parameter="skip_tokenizer_init", value=True)
        return self.tokenizer

    def get_metrics(self) -> list[Metric]:
        """Return counts and times since the engine's start."""
        return self._metrics.snapshot()

    def warm_up(self) -> None:
        """Wait until every program is compiled, so that no step has to."""
        self._core.warm_up()

    def shutdown(self) -> None:
        """Release the device; may be called twice."""
        self._core.shutdown()

    def _enqueue(self, request: ProcessedRequest) -> None:
        self._outputs.add_request(request)
        try:
            for sequence in request.sequences:
                self._core.add_request(sequence)
        except BaseException:
            self.abort_request(request.request_id)
            raise


def refuse_given(**arguments: Any) -> None:
    """Refuse arguments of vLLM that have no meaning here unless they are None, or a list of None."""
    for name, value in arguments.items():
        if value is None or (isinstance(value, (list, tuple)) and all(each is None for each in value)):
            continue
        raise VLLMValidationError(f"{name} is not supported yet; leave it at None.", parameter=name, value=value)
