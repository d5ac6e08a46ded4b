"""`AsyncLLM` is the engine for programs with an event loop: each request is an asynchronous iterator of outputs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Self

from jaxllm.core_messages import Alignment
from jaxllm.decisions import DecisionOutput
from jaxllm.engine.client.replicated_core import MAX_REPLICAS, ReplicatedCore, for_replica
from jaxllm.engine.decisions.decider import DecisionOptions
from jaxllm.engine.front.asleep import PauseMode, check_level, check_mode, check_pause_mode, check_tags
from jaxllm.engine.front.front_end import checked_ids, refuse_given
from jaxllm.engine.front.metrics import Metric
from jaxllm.engine.front.prompt_encoder import align_arguments
from jaxllm.engine.front.reasoning_grammar import ReasoningGrammar
from jaxllm.engine.front.refused_methods import ASYNC_LACKS, ASYNC_REFUSES, RefusesMethods
from jaxllm.engine.front.start import start_in_process, start_in_thread
from jaxllm.engine.online.admission import Admission
from jaxllm.engine.online.async_core import AsyncCore, end_from_thread
from jaxllm.engine.online.async_decisions import decide
from jaxllm.engine.online.gate import Gate
from jaxllm.engine.online.held_core import HeldCore, StartCore
from jaxllm.engine.online.prompt_encoding import encode_prompt
from jaxllm.engine.online.request_stream import RequestOutputCollector
from jaxllm.engine.online.running_requests import RunningRequests, log_request
from jaxllm.engine.online.takes_weights import TakesWeights
from jaxllm.exceptions import EngineBusyError, EngineDeadError, EngineGenerateError, VLLMValidationError
from jaxllm.lora.request import LoRARequest
from jaxllm.outputs import PoolingOutput, PoolingRequestOutput, RequestOutput
from jaxllm.params.checks import INT32_MAX, check_bool, check_int, check_str
from jaxllm.pooling_params import PoolingParams
from jaxllm.resolve.async_engine_args import AsyncEngineArgs
from jaxllm.resolve.discovery import on_this_host
from jaxllm.resolve.vllm_config import ModelConfig, VllmConfig
from jaxllm.sampling_params import BeamSearchParams, SamplingParams
from jaxllm.usage.usage_lib import UsageContext
from jaxllm.utils.awaitable import awaitable
from jaxllm.utils.fork_safety import check_home
from jaxllm.utils.log import configure_log

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.1


class AsyncLLM(RefusesMethods, TakesWeights, refused=ASYNC_REFUSES, lacks=ASYNC_LACKS):
    """An engine whose core has a process, or a thread, of its own. It belongs to the event loop that first uses it.

    A request that cannot be run raises VLLMValidationError, too many raise EngineBusyError, and once the core has
    ended everything raises EngineDeadError. An engine that nobody holds any more ends as by `shutdown`; a request's
    iterator holds its engine.
    """

    max_log_len: int | None = None
    """The most characters or token ids of a prompt that are logged; None is all."""

    def __init__(
        self, start: StartCore, *, admission: Admission, logs_requests: bool = False, reasoning_parser: str = ""
    ) -> None:
        """Start an engine; use `from_engine_args`."""
        self.log_requests = logs_requests
        """Whether ids and parameters of requests are logged, and at level DEBUG their prompts."""
        check_home()
        remote, self.front = start()
        self.admission, self._gate = admission, Gate()
        self._requests = RunningRequests(self.front, admission, self._gate)
        self._held = HeldCore(start, remote, self.front, self._requests, self._gate)
        self._reasoning = ReasoningGrammar.of(reasoning_parser, self.front)

    @classmethod
    def from_engine_args(
        cls,
        engine_args: AsyncEngineArgs,
        start_engine_loop: bool = True,
        usage_context: UsageContext = UsageContext.ENGINE_CONTEXT,
        stat_loggers: Any = None,
        *,
        disable_frontend_multiprocessing: bool = False,
    ) -> Self:
        """Start an engine; returns when it is ready. With disable_frontend_multiprocessing its core is a thread."""
        del start_engine_loop  # it starts with the first request
        refuse_given(stat_loggers=stat_loggers)
        engine_args = AsyncEngineArgs.of(engine_args)
        if engine_args.log_config_file is not None:
            configure_log(engine_args.log_config_file)
        engine_args = on_this_host(engine_args)
        begin = start_in_thread if disable_frontend_multiprocessing else start_in_process
        engine = cls(
            lambda: begin(engine_args, usage_context, asks_core=False),
            admission=Admission.of(engine_args),
            logs_requests=engine_args.enable_log_requests,
            reasoning_parser=engine_args.reasoning_parser,
        )
        engine.max_log_len = engine_args.max_log_len
        return engine

    @classmethod
    def from_vllm_config(
        cls,
        vllm_config: Any,
        start_engine_loop: bool = True,
        usage_context: UsageContext = UsageContext.ENGINE_CONTEXT,
        stat_loggers: Any = None,
        enable_log_requests: bool | None = None,
        aggregate_engine_logging: bool = False,
        disable_log_stats: bool | None = None,
        client_addresses: Any = None,
        client_count: int = 1,
        client_index: int = 0,
        *,
        disable_log_requests: bool | None = None,
    ) -> Self:
        """Start an engine from the result of `AsyncEngineArgs.create_engine_config`; the core resolves it."""
        del aggregate_engine_logging  # one engine logs the line of all
        refuse_given(
            client_addresses=client_addresses,
            client_count=None if client_count == 1 else client_count,
            client_index=client_index or None,
        )
        engine_args = AsyncEngineArgs.of_config(
            vllm_config,
            enable_log_requests=enable_log_requests,
            disable_log_requests=disable_log_requests,
            disable_log_stats=disable_log_stats,
        )
        return cls.from_engine_args(engine_args, start_engine_loop, usage_context, stat_loggers)

    @property
    def vllm_config(self) -> VllmConfig:  # type: ignore[override]
        """Return the settings that the engine runs by, under vLLM's names."""
        return self.front.ready.vllm_config

    @property
    def model_config(self) -> ModelConfig:  # type: ignore[override]
        """Return the settings of the model under vLLM's names: max_model_len, dtype, hf_config, get_vocab_size()."""
        return self.vllm_config.model_config

    @property
    def _core(self) -> AsyncCore:
        return self._held.core

    @property
    def core_pids(self) -> dict[int, int]:
        """Return the ids of the cores' processes by their replicas' numbers; none for a thread."""
        return self._core.remote.process_ids

    @property
    def is_running(self) -> bool:
        """Return whether requests are taken."""
        return self._core.dead_error is None and not self._gate.is_draining

    @property
    def is_stopped(self) -> bool:
        """Return whether the engine has ended, by `shutdown` or an error."""
        return self._core.dead_error is not None and not self._gate.is_sleeping

    @property
    def errored(self) -> bool:
        """Return whether the engine has ended; as in vLLM, by `shutdown` too."""
        return self.is_stopped

    @property
    def dead_error(self) -> BaseException:
        """Return the error that requests get once the engine has ended."""
        return self._held.dead_error

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        lora_request: Any = None,
        trace_headers: Mapping[str, str] | None = None,
        prompt_adapter_request: Any = None,
        priority: int = 0,
        *,
        prompt_text: str | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        data_parallel_rank: int | None = None,
        session_id: str | None = None,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: dict[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run a request and yield its outputs, of the kind that sampling_params.output_kind names.

        A failed request ends with finish_reason "error" and a stop_reason. Leaving the loop aborts the request.
        """
        stream = await self.add_request(
            request_id,
            prompt,
            sampling_params,
            lora_request=lora_request,
            trace_headers=trace_headers,
            prompt_adapter_request=prompt_adapter_request,
            priority=priority,
            prompt_text=prompt_text,
            tokenization_kwargs=tokenization_kwargs,
            data_parallel_rank=data_parallel_rank,
            session_id=session_id,
            reasoning_ended=reasoning_ended,
            reasoning_parser_kwargs=reasoning_parser_kwargs,
        )
        is_finished = False
        try:
            while not is_finished:
                output = await stream.get()
                is_finished = output.finished
                yield output
        finally:
            if not is_finished:
                self._core.abort_requests(self._requests.drop(stream))

    async def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams | PoolingParams,
        arrival_time: float | None = None,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        session_id: str | None = None,
        prompt_text: str | None = None,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: dict[str, Any] | None = None,
        *,
        prompt_adapter_request: Any = None,
    ) -> RequestOutputCollector:
        """Queue a request and return its outputs' collector. One with structured outputs is good once this returns.

        With a reasoning parser they begin after the reasoning, or at once if `reasoning_ended`. A caller that stops
        reading the collector calls `abort`.
        """
        refuse_given(prompt_adapter_request=prompt_adapter_request, reasoning_parser_kwargs=reasoning_parser_kwargs)
        del prompt_text, session_id  # no output shows the text of token ids; prefixes keep a session together
        check_str("request_id", request_id, INT32_MAX)
        self._check_open()  # before the prompt is tokenized; what waits at the gate afterwards asks again
        if self._reasoning is not None and not reasoning_ended:
            [params] = self._reasoning.behind_reasoning([prompt], [params])
        request, stream = await self._requests.take(
            request_id,
            prompt,
            params,
            tokenization_kwargs,
            arrival_time,
            priority,
            trace_headers,
            lora_request,
            enter=self._enter,
        )
        try:
            remote = self._core.remote
            remote.add_request(for_replica(request.core, remote, data_parallel_rank))
            if self.log_requests:
                log_request(request, self.max_log_len)
            if request.params.structured_outputs is not None or self.front.ready.has_validators:
                await stream.wait_admitted()
        except BaseException:
            self._core.abort_requests(self._requests.drop(stream))
            raise
        return stream

    async def encode(
        self,
        prompt: Any,
        pooling_params: PoolingParams,
        request_id: str,
        lora_request: Any = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        tokenization_kwargs: dict[str, Any] | None = None,
        *,
        data_parallel_rank: int | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]:
        """Pool a prompt, for the task that the params name, and yield its output. Texts get no prompt of the
        checkpoint's: `PoolingSettings.prompt` has what goes before them.

        Raises VLLMValidationError for what this model does not do, EngineGenerateError for a request that failed or
        was aborted. Cancelling the task aborts the request.
        """
        stream = await self.add_request(
            request_id,
            prompt,
            pooling_params,
            lora_request=lora_request,
            trace_headers=trace_headers,
            priority=priority,
            tokenization_kwargs=tokenization_kwargs,
            data_parallel_rank=data_parallel_rank,
        )
        try:
            output = await stream.get()
        except BaseException:
            self._core.abort_requests(self._requests.drop(stream))
            raise
        assert isinstance(output, PoolingRequestOutput)
        if output.error is not None:
            raise EngineGenerateError(output.error)
        yield output

    async def beam_search(
        self,
        prompt: Any,
        request_id: str,
        params: BeamSearchParams,
        lora_request: Any = None,
        *,
        trace_headers: Mapping[str, str] | None = None,
        data_parallel_rank: int | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Search for the likeliest texts and yield them as the outputs of one `RequestOutput`, best first.

        The prompt may be an `EncodedPrompt`. A search that is aborted yields what it has, with finish_reason "abort".
        """
        from jaxllm.engine.online.async_beam_search import search_beams  # imports numpy

        check_str("request_id", request_id, INT32_MAX)
        self._check_open()
        parts = self.front, self._requests, self._enter, lambda: self._core
        yield await search_beams(*parts, request_id, prompt, params, trace_headers, lora_request, data_parallel_rank)

    async def decide(
        self,
        state: Any,
        questions: Mapping[str, Any],
        request_id: str,
        options: DecisionOptions | None = None,
        *,
        lora_request: Any = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
    ) -> DecisionOutput:
        """Answer questions about one state, as `LLM.decide` does. Each row of log-probabilities counts as a request.

        Raises VLLMValidationError for what cannot be asked, EngineGenerateError if it failed or was aborted.
        """
        check_str("request_id", request_id, INT32_MAX)
        self._check_open()
        parts = self.front, self._requests, self._enter, lambda: self._core
        asked = state, questions, options or DecisionOptions()
        return await decide(*parts, request_id, *asked, lora_request, trace_headers, priority, data_parallel_rank)

    async def align(self, prompt: Any, token_ids: Iterable[int]) -> Alignment:
        """Return where the tokens after an encoder-decoder's prompt are in its sound, as `LLMEngine.align` does."""
        encoded = await encode_prompt(self.front.inputs, prompt)
        return Alignment(*await self._call("align", *align_arguments(encoded, token_ids)))

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """End a request or several, whose readers get an output with finish_reason "abort"; unknown ids are ignored."""
        del internal
        for one_id in checked_ids("request_id", request_id):
            self._core.abort_requests(self._requests.abort(one_id))

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer as an object of transformers, which the first call imports in a second or two.

        It may be awaited too, as vLLM's method had to be up to 0.14.
        """
        return awaitable(self.front.require_tokenizer().hf)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """Return what `get_tokenizer` returns; None with skip_tokenizer_init=True."""
        return None if self.front.tokenizer is None else self.get_tokenizer()

    def get_metrics(self) -> list[Metric]:
        """Return counts and times since the engine's start, as vLLM's metrics."""
        self.front.metrics.on_programs(self._core.remote.programs(), sleep_level=self._gate.asleep.level)
        return self.front.metrics.snapshot()

    async def do_log_stats(self) -> None:
        """Log the statistics line now, unless disable_log_stats was given."""
        self.front.metrics.log()

    async def check_health(self) -> None:
        """Raise EngineDeadError if the core has ended or hangs, RuntimeError while the engine sleeps."""
        self._held.check_awake()
        self._core.look()
        self._held.check_awake()

    async def prefill_progress(self, request_id: str) -> tuple[int, int]:
        """Return the numbers of computed and of all tokens of a request's prompt; (0, 0) if the request has ended."""
        sequence_id, length = self.front.outputs.prompt_of(request_id)
        return min(length, await self._call("num_computed_tokens", sequence_id)), length

    async def start_profile(self, profile_prefix: str | None = None) -> None:
        """Record what host and devices of the core do until `stop_profile`, with JAX's profiler."""
        await self._call("start_profile", profile_prefix, None, None)

    async def stop_profile(self) -> None:
        """End the recording and write it to the folder of profiler_config."""
        await self._call("stop_profile")

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget all cached prefixes and return True; while requests run, forget nothing and return False.

        With `reset_running_requests` they are preempted first, and compute what they had anew. With `reset_connector`
        what the host keeps is forgotten too.
        """
        check_bool("reset_running_requests", reset_running_requests)
        check_bool("reset_connector", reset_connector)
        is_reset = await self._call("reset_prefix_cache", reset_running_requests, reset_connector)
        if is_reset:
            self.front.metrics.forget_hits()
        return is_reset

    async def reset_mm_cache(self) -> None:
        """Forget all processed images and videos."""
        self.front.inputs.forget_media()

    async def reset_encoder_cache(self) -> bool:
        """Forget all encoded images and videos and return True; return False while a request that runs needs some."""
        return await self._call("reset_encoder_cache")

    async def warm_up(self) -> None:
        """Wait until every program is compiled, so that no step has to."""
        await self._call("warm_up")

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter for later requests and return True; streams go on meanwhile. Raises VLLMValidationError for
        a bad one.
        """
        return await self._call("add_lora", self.front.inputs.check_named(lora_request))

    async def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter, with which running requests go on; return False for an unknown id."""
        return await self._call("remove_lora", check_int("lora_id", lora_id, 1, INT32_MAX))

    async def list_loras(self) -> set[int]:
        """Return the ids of the adapters that are kept on the host."""
        return set(await self._call("list_loras"))

    async def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter on the host until it is removed; return False for an unknown id."""
        return await self._call("pin_lora", check_int("lora_id", lora_id, 1, INT32_MAX))

    async def scale_elastic_ep(self, new_data_parallel_size: int, drain_timeout: int = 300) -> None:
        """Have another number of replicas; return when the new ones are ready, and those to go have ended.

        Those end their requests first, for `drain_timeout` seconds at most. Raises VLLMValidationError for an engine
        that was started with data_parallel_size=1, RuntimeError if a new replica cannot be started, and
        ScalingReplacedError if another call asks for another number meanwhile.
        """
        check_int("new_data_parallel_size", new_data_parallel_size, 1, MAX_REPLICAS)
        check_int("drain_timeout", drain_timeout, 0, INT32_MAX)
        self._held.check_awake()
        remote = self._core.remote
        if not isinstance(remote, ReplicatedCore):
            if new_data_parallel_size == 1:
                return
            message = "an engine of one replica has no others: start it with data_parallel_size of 2 or more."
            raise VLLMValidationError(message, parameter="new_data_parallel_size", value=new_data_parallel_size)
        remote.replicas.scale(new_data_parallel_size, drain_timeout)
        while not remote.replicas.has_scaled(new_data_parallel_size):
            await asyncio.sleep(_POLL_SECONDS)
            self._held.check_awake()
            self._core.look()

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Free the device's weights and caches until `wake_up`, as `LLM.sleep` does; where JAX would keep their memory
        for the core's process, as `sleeps_in_place` says, end that process. A sleeping engine goes on sleeping.

        Running requests are aborted, or with mode "wait" end first; "keep" is refused.
        """
        check_level(level, self.vllm_config.parallel_config.nnodes)
        check_mode(mode)
        await self._held.sleep(level, mode)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Bring back the parts that `sleep` has freed: "weights", "kv_cache", or both for None. If the core has ended,
        start it again, with both parts. This goes on if the caller is cancelled.

        Raises RuntimeError if a part cannot come back, as without memory for it; it goes on sleeping then.
        """
        await self._held.wake_up(check_tags(tags))

    async def is_sleeping(self) -> bool:
        """Return whether the engine sleeps."""
        return self._gate.is_sleeping

    async def pause_generation(
        self, *, mode: PauseMode = "abort", wait_for_inflight_requests: bool = False, clear_cache: bool = True
    ) -> None:
        """Let new requests wait until `resume_generation`. Running ones are aborted, or with mode "wait" end first, or
        with "keep" stay as they are until then; with `clear_cache` these compute again what they have.
        """
        mode = "wait" if wait_for_inflight_requests else mode
        check_pause_mode(mode)
        was_paused = not self._gate.unpaused.is_set
        self._gate.unpaused.clear()
        try:
            await self._freeze(is_frozen=mode == "keep")
            if mode != "keep":
                await self._held.settle(mode)
            if clear_cache and not await self.reset_prefix_cache(mode == "keep"):
                logger.warning("the prefix cache keeps what it has: the core still has blocks in use")
        except BaseException:
            if not was_paused:
                self._gate.unpaused.set()
            raise

    async def resume_generation(self) -> None:
        """Take requests again, and let those go on that were kept."""
        await self._freeze(is_frozen=False)
        self._gate.unpaused.set()

    async def _freeze(self, *, is_frozen: bool) -> None:
        if is_frozen != self._gate.is_frozen:
            await self._call("set_paused", is_frozen)
            self._gate.is_frozen = is_frozen

    async def is_paused(self) -> bool:
        """Return whether new requests wait."""
        return not self._gate.unpaused.is_set

    def num_unfinished(self) -> int:
        """Return the number of this engine's requests that have not ended."""
        return len(self._requests.ids())

    async def wait_for_requests_to_drain(self, drain_timeout: float = 300) -> None:
        """Wait until no request runs, while others may come. Raises TimeoutError after `drain_timeout` seconds."""
        await self._requests.idle.wait(drain_timeout)

    async def drain(self, timeout: float | None = None) -> bool:
        """Take no more requests and wait until all have ended; after `timeout` seconds abort the rest, return False."""
        self._gate.drain()
        with contextlib.suppress(EngineDeadError, EngineBusyError):
            await self._freeze(is_frozen=False)
        try:
            await self._requests.idle.wait(timeout)
        except TimeoutError:
            await self.abort(self._requests.ids())
            return False
        return True

    def cut_off(self, error: Exception) -> None:
        """Take no more requests, and end those in hand at once: their readers get the error. For the event loop."""
        self._gate.drain()
        self._core.abort_requests(self._requests.on_end(error, False))

    def shutdown(self, timeout: float | None = None) -> None:
        """End the core and release the device; requests that run end with EngineDeadError. May be called twice.

        After `timeout` seconds, by default 5, a core's process is killed; a thread ends after the step that it is in.
        Any thread may call this. The event loop waits meanwhile, but for `aclose`.
        """
        if self._held.home.is_here and not end_from_thread(self._core.loop, lambda: self.aclose(timeout)):
            self._gate.end()
            self._core.shutdown(timeout)
            self.front.close()

    async def aclose(self, timeout: float | None = None) -> None:
        """Do as `shutdown` does, while the event loop goes on."""
        if self._core.loop not in (None, asyncio.get_running_loop()):
            await asyncio.to_thread(self.shutdown, timeout)
        elif self._held.home.is_here:
            self._gate.end()
            await self._core.close(timeout)
            await self._held.changes.wait()
            await asyncio.to_thread(self.front.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.shutdown()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.aclose()

    def _check_open(self) -> None:
        """Raise unless the engine takes requests, now or after a pause."""
        self._held.check_awake()
        self._gate.check_open()

    async def _call(self, method: str, *arguments: Any) -> Any:
        self._held.check_awake()
        return await self._core.call(method, *arguments)

    async def _enter(self) -> None:
        """Wait while the engine is paused. Raises if it takes no requests."""
        while True:
            self._check_open()
            if self._gate.unpaused.is_set:
                return
            await self._gate.unpaused.wait()
