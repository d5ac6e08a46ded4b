"""Requests go into the synchronous engine, and each `step` gives outputs. `LLM` and offline streaming stand on it."""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from jaxllm.config.vllm_config import ModelConfig, VllmConfig, vllm_config
from jaxllm.engine.core_client import CoreClient, InprocClient
from jaxllm.engine.input_processor import GRAMMAR_SECONDS, InputProcessor, ProcessedRequest
from jaxllm.engine.interrupts import lasting_interrupts
from jaxllm.engine.metrics import EngineMetrics, Metric, cache_config_info
from jaxllm.engine.output_processor import OutputProcessor
from jaxllm.engine.params_resolver import InputLimits
from jaxllm.engine.profiler import StepProfiler
from jaxllm.engine.refused_methods import ENGINE_REFUSES, RefusesMethods
from jaxllm.engine.stats_log import StatsLogger
from jaxllm.engine.turn import FairLock, locked
from jaxllm.exceptions import VLLMValidationError
from jaxllm.outputs import RequestOutput
from jaxllm.params.checks import INT32_MAX, check_bool, check_str, shown
from jaxllm.sampling_params import RequestOutputKind, SamplingParams
from jaxllm.text.reasoning import thinking_tokens
from jaxllm.text.tokenizer import Tokenizer, load_tokenizer
from jaxllm.utils.forks import Home, engines_home
from jaxllm.utils.log import log_phase, show_log

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from jaxllm.config.engine_args import EngineArgs
    from jaxllm.config.engine_config import EngineConfig
    from jaxllm.constraints.compiler import GrammarCompiler

logger = logging.getLogger(__name__)


class LLMEngine(RefusesMethods, refused=ENGINE_REFUSES):
    """An engine runs requests, many at a time. Threads may share it: each call waits for those of the others.

    An engine that nobody holds any more releases its device, as `shutdown` does.
    """

    def __init__(
        self,
        config: EngineConfig,
        core: CoreClient,
        tokenizer: Tokenizer | None,
        grammars: GrammarCompiler | None = None,
        *,
        has_thinking_tokens: bool = False,
    ) -> None:
        """Compile structured outputs with `grammars`; without it, check only their form."""
        self.config = config
        self.tokenizer = tokenizer
        self.grammars = grammars
        self._home = engines_home()
        self._lock = FairLock()
        self._core = core
        stats = core.stats()
        cache_info = cache_config_info(config, stats.num_blocks, core.max_model_len)
        self._metrics = EngineMetrics(
            config.model, core.max_model_len, stats, cache_info, has_residency=config.kv_cache_metrics
        )
        self._stats_logger = None if config.disable_log_stats else StatsLogger(self._metrics, config.platform)
        self._profiler = StepProfiler(config.profiler_config)
        self._outputs = OutputProcessor(tokenizer, self._metrics)
        limits = InputLimits.of(config, max_model_len=core.max_model_len, has_thinking_tokens=has_thinking_tokens)
        check_grammar = None if grammars is None else grammars.check
        self._inputs = InputProcessor(tokenizer, limits, config.generation_config, config.seed, check_grammar)
        weakref.finalize(self, _release, self._home, self._profiler, core)

    @classmethod
    @lasting_interrupts()
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Load the model and make an engine, its core in this process."""
        from jaxllm.engine.startup import make_core, prepare

        show_log()
        log_phase(logger, "imports")
        config = engine_args.create_engine_config()
        log_phase(logger, "configuration")
        engines_home().check()  # now that JAX has its devices, which a child forked later would share
        prepared = prepare(config)
        log_phase(logger, "shapes")
        try:  # meanwhile the first program is compiled
            tokenizer = _load_tokenizer(config)
            grammars = None if tokenizer is None else _make_grammar_compiler(config, tokenizer)
            thinking = thinking_tokens(_reasoning_markers(config), tokenizer)
            log_phase(logger, "tokenizer")
            core = InprocClient(make_core(prepared, grammars, thinking))
        except BaseException:
            prepared.stop()
            raise
        log_phase(logger, "engine")
        return cls(config, core, tokenizer, grammars, has_thinking_tokens=thinking is not None)

    @cached_property
    def vllm_config(self) -> VllmConfig:
        """Return the settings that the engine runs by, under vLLM's names."""
        return vllm_config(self.config, num_blocks=self._core.stats().num_blocks, max_model_len=self.max_model_len)

    @property
    def model_config(self) -> ModelConfig:
        """Return the settings of the model under vLLM's names: max_model_len, dtype, hf_config, get_vocab_size()."""
        return self.vllm_config.model_config

    @property
    def max_model_len(self) -> int:
        """Return the length of the longest sequence, prompt and output together."""
        return self._core.max_model_len

    @locked
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
        *,
        grammar_seconds: float = GRAMMAR_SECONDS,
    ) -> str:
        """Queue a request and return its id. Raises VLLMValidationError, nothing queued, if it cannot be run.

        A grammar that has not failed to compile after grammar_seconds can still do so, which ends the request with
        finish_reason "error"; with 0 every grammar that fails does that.
        """
        check_str("request_id", request_id, INT32_MAX)
        refuse_given(lora_request=lora_request, trace_headers=trace_headers)
        request = self._inputs.process(
            request_id,
            prompt,
            params,
            arrival_time=arrival_time,
            priority=priority,
            tokenization_kwargs=tokenization_kwargs,
            grammar_seconds=grammar_seconds,
        )
        self.enqueue(request)
        return request_id

    @locked
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
                self.enqueue(request)
                queued.append(request.request_id)
        except BaseException:
            self.abort_request(queued)
            raise

    @locked
    def process_requests(
        self, request_ids: Sequence[str], prompts: Sequence[Any], params: Sequence[SamplingParams]
    ) -> list[ProcessedRequest]:
        """Check and complete many requests without queueing any, for final outputs; errors name the index."""
        return self._inputs.process_batch(request_ids, prompts, params, output_kind=RequestOutputKind.FINAL_ONLY)

    @locked
    def enqueue(self, request: ProcessedRequest) -> None:
        """Queue a request that is complete already."""
        self._outputs.add_request(request)
        try:
            for sequence in request.sequences:
                self._core.add_request(sequence)
        except BaseException:
            self.abort_request(request.request_id)
            raise

    @locked
    def step(self) -> list[RequestOutput]:
        """Do one step of the core and return what is new; empty when there is nothing to do.

        If it fails or is cut off, all requests end with it.
        """
        self._profiler.before_step()
        started = time.monotonic()
        step = self._core.step()
        try:
            processed = self._outputs.process_outputs(step)
        except BaseException:
            # Nobody knows which of them have got their tokens.
            self._core.abort_requests(self._outputs.abort_all())
            raise
        if processed.aborts:
            self._core.abort_requests(processed.aborts)
        if not step.outputs and self.has_unfinished_requests() and not self._core.has_unfinished_requests():
            lost = self._outputs.abort_all()
            raise RuntimeError(f"The scheduler has lost {len(lost)} requests: none is queued, and they never ended.")
        if self._stats_logger is not None:
            self._stats_logger.on_step(started, time.monotonic())
        return processed.outputs

    @locked
    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests without further output; unknown ids are ignored."""
        ids: list[Any] = [request_ids]
        if not isinstance(request_ids, str):
            with contextlib.suppress(TypeError):  # NumPy's scalars say that they are iterable
                ids = list(request_ids)
        for each in ids:
            if not isinstance(each, str):
                message = f"request_ids must be a string or strings, got {shown(each)} ({type(each).__name__})."
                raise VLLMValidationError(message, parameter="request_ids", value=each)
        if aborted := self._outputs.abort_requests(ids):
            self._core.abort_requests(aborted)

    @locked
    def release(self, request_ids: Iterable[str]) -> None:
        """Give up the blocks that ended requests have kept for forks; unknown ids are ignored."""
        self._core.release(request_ids)

    def has_unfinished_requests(self) -> bool:
        """Say whether a step can give outputs."""
        return self._outputs.num_unfinished_requests > 0

    def get_num_unfinished_requests(self) -> int:
        """Return how many requests are not finished; n outputs count once."""
        return self._outputs.num_unfinished_requests

    @locked
    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget all cached prefixes and return True; while requests run, forget nothing and return False.

        With `reset_running_requests` they are preempted first, and compute what they had anew. A connector's cache
        counts as reset: there is none.
        """
        check_bool("reset_running_requests", reset_running_requests)
        check_bool("reset_connector", reset_connector)
        is_reset = self._core.reset_prefix_cache(reset_running_requests)
        if is_reset and self._stats_logger is not None:
            self._stats_logger.forget_hits()
        return is_reset

    def reset_mm_cache(self) -> None:
        """Do nothing: there is no cache of multimodal inputs."""

    def reset_encoder_cache(self) -> None:
        """Do nothing: no model here has an encoder."""

    def is_sleeping(self) -> bool:
        """Return False: an engine is awake until `shutdown`."""
        return False

    def get_supported_tasks(self) -> tuple[str, ...]:
        """Return what the model can be used for."""
        return ("generate",)

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the transformers tokenizer. The engine has a copy of its own, which changes to it do not reach."""
        return self.require_tokenizer().hf

    def require_tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Raises VLLMValidationError without one."""
        if self.tokenizer is None:
            message = "there is no tokenizer: the engine was made with `skip_tokenizer_init=True`."
            raise VLLMValidationError(message, parameter="skip_tokenizer_init", value=True)
        return self.tokenizer

    @locked
    def get_metrics(self) -> list[Metric]:
        """Return counts and times since the engine's start, as vLLM's metrics."""
        return self._metrics.snapshot()

    @locked
    def start_profile(
        self,
        profile_prefix: str | None = None,
        *,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> None:
        """Record what host and devices do until `stop_profile`; arguments left at None are as profiler_config says."""
        self._profiler.start(profile_prefix, delay_iterations, max_iterations)

    @locked
    def stop_profile(self) -> None:
        """End the recording and write it to the folder of profiler_config."""
        self._profiler.stop()

    @locked
    def do_log_stats(self) -> None:
        """Log the statistics line now, unless disable_log_stats was given."""
        if self._stats_logger is not None:
            self._stats_logger.log()

    @lasting_interrupts()
    def warm_up(self) -> None:
        """Wait until every program is compiled, so that no step has to."""
        self._home.check()
        self._core.warm_up()

    def shutdown(self) -> None:
        """Release the device; may be called twice. In a forked child nothing is done."""
        if self._home.is_here:
            with self._lock.take():
                _release(self._home, self._profiler, self._core)


def _release(home: Home, profiler: StepProfiler, core: CoreClient) -> None:
    """End an engine in its own process: of what a forked child has of it, nothing can be ended there."""
    if home.is_here:
        try:
            profiler.close()
        finally:
            core.shutdown()


def _load_tokenizer(config: EngineConfig) -> Tokenizer | None:
    """Load the tokenizer that the config asks for: the checkpoint's own, another, or none."""
    if config.skip_tokenizer_init:
        return None
    is_own = config.tokenizer == config.model and config.tokenizer_revision is None
    try:
        tokenizer = load_tokenizer(
            config.checkpoint,
            config.cache_dir,
            name=None if is_own else config.tokenizer,
            revision=config.tokenizer_revision,
            hf_token=config.hf_token,
            download_dir=config.download_dir,
        )
    except VLLMValidationError as error:
        if config.tokenizer_mode != "mistral":
            raise
        message = f"tokenizer_mode='mistral' works only where there is a tokenizer.json. {error}"
        raise VLLMValidationError(message, parameter="tokenizer_mode", value="mistral") from error
    if config.tokenizer_mode == "mistral":
        logger.info("tokenizer_mode='mistral': the tokenizer.json is used, by the tokenizers library")
    return tokenizer


def _reasoning_markers(config: EngineConfig) -> tuple[str, str] | None:
    group = config.reasoning_config
    return None if group is None else (group.reasoning_start_str, group.reasoning_end_str)


def _make_grammar_compiler(config: EngineConfig, tokenizer: Tokenizer) -> GrammarCompiler:
    """Make the compiler of structured outputs, which the engine's front and core share; it starts nothing yet."""
    from jaxllm.constraints.compiler import GrammarCompiler

    more = config.generation_config.get("eos_token_id")
    ids = [tokenizer.eos_token_id, *(more if isinstance(more, list) else [more])]
    eos_token_ids = list(dict.fromkeys(token_id for token_id in ids if token_id is not None))
    return GrammarCompiler(tokenizer, config.model_config.vocab_size, eos_token_ids)


def refuse_given(**arguments: Any) -> None:
    """Refuse arguments of vLLM that have no meaning here unless they are None, or a list of None."""
    for name, value in arguments.items():
        if value is None or (isinstance(value, (list, tuple)) and all(each is None for each in value)):
            continue
        raise VLLMValidationError(f"{name} is not supported yet; leave it at None.", parameter=name, value=value)
