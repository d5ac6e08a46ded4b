"""The synchronous engine: requests are queued, and each `step` returns outputs. `LLM` runs on it."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from jaxllm.config.environment import uses_core_process
from jaxllm.core_messages import Alignment
from jaxllm.engine.client.in_process import InprocClient
from jaxllm.engine.front.asleep import Asleep, PauseMode, check_level, check_mode, check_tags
from jaxllm.engine.front.front_end import FrontEnd, checked_ids
from jaxllm.engine.front.input_processor import GRAMMAR_SECONDS, ProcessedRequest
from jaxllm.engine.front.metrics import Metric
from jaxllm.engine.front.new_weights import check_update_mode, check_version, read_weights, refuse_replicas
from jaxllm.engine.front.prompt_encoder import EncodedPrompt, align_arguments
from jaxllm.engine.front.reasoning_grammar import ReasoningGrammar
from jaxllm.engine.front.refused_methods import ENGINE_REFUSES, RefusesMethods
from jaxllm.engine.front.start import start_in_place, start_in_process, uses_ray
from jaxllm.engine.transport.core_client import CoreClient
from jaxllm.engine.transport.wire import FrameError
from jaxllm.exceptions import EngineDeadError, VLLMValidationError
from jaxllm.lora.request import LoRARequest
from jaxllm.outputs import AnyOutput
from jaxllm.params.checks import INT32_MAX, check_bool, check_int, check_str
from jaxllm.pooling_params import PoolingParams
from jaxllm.resolve.discovery import on_this_host
from jaxllm.resolve.vllm_config import ModelConfig, VllmConfig
from jaxllm.sampling_params import RequestOutputKind, SamplingParams
from jaxllm.usage.usage_lib import UsageContext
from jaxllm.utils.fork_safety import Home, check_home, engines_home
from jaxllm.utils.interrupts import lasting_interrupts
from jaxllm.utils.log import show_log
from jaxllm.utils.turn import FairLock, locked

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from jaxllm.resolve.engine_args import EngineArgs


class LLMEngine(RefusesMethods, refused=ENGINE_REFUSES):
    """Runs requests, many at a time. Threads may share it: each call waits for those of the others.

    An engine that nobody holds any more releases its device, as `shutdown` does.
    """

    def __init__(self, core: CoreClient, front: FrontEnd, reasoning: ReasoningGrammar | None = None) -> None:
        """Run requests on a core; with `reasoning`, structured outputs begin after the model's reasoning."""
        self.front, self._reasoning = front, reasoning
        self._home = engines_home()
        self._lock = FairLock()
        self._core = core
        self._asleep = Asleep()
        self._is_updating = False
        weakref.finalize(self, _drop, self._home, core)

    @classmethod
    @lasting_interrupts()
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Load the model and make an engine: its core is in this process, unless JAXLLM_ENABLE_V1_MULTIPROCESSING is 1,
        or there are replicas, which have processes of their own, or it is a Ray actor.
        """
        check_home()
        show_log()
        engine_args = on_this_host(engine_args)
        has_processes = uses_core_process() or engine_args.data_parallel_size > 1 or uses_ray(engine_args)
        core, front = (start_in_process if has_processes else start_in_place)(engine_args, UsageContext.LLM_CLASS)
        return cls(core, front, ReasoningGrammar.of(engine_args.reasoning_parser, front))

    @property
    def vllm_config(self) -> VllmConfig:
        """Return the settings that the engine runs by, under vLLM's names."""
        return self.front.ready.vllm_config

    @property
    def model_config(self) -> ModelConfig:
        """Return the settings of the model under vLLM's names: max_model_len, dtype, hf_config, get_vocab_size()."""
        return self.vllm_config.model_config

    @property
    def max_model_len(self) -> int:
        """Return the length of the longest sequence, prompt and output together."""
        return self.front.ready.max_model_len

    @locked
    def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams | PoolingParams,
        arrival_time: float | None = None,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        *,
        grammar_seconds: float = GRAMMAR_SECONDS,
    ) -> str:
        """Queue a request and return its id. Raises VLLMValidationError, nothing queued, if it cannot be run.

        The call waits up to grammar_seconds for a grammar to compile. One that fails later ends the request with
        finish_reason "error"; with 0 every grammar that fails does that.
        """
        self._asleep.check_awake()
        check_str("request_id", request_id, INT32_MAX)
        [placed] = self._placed([prompt], [params])
        request = self.front.inputs.process(
            request_id,
            prompt,
            placed,
            arrival_time=arrival_time,
            priority=priority,
            tokenization_kwargs=tokenization_kwargs,
            trace_headers=trace_headers,
            lora_request=lora_request,
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
        lora_requests: Sequence[Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        output_kind: RequestOutputKind | None = None,
        label: str = "prompts",
    ) -> None:
        """Queue many requests, all or none; errors name the index. `output_kind` replaces that of the params."""
        self._asleep.check_awake()
        processed = self.front.inputs.process_batch(
            request_ids,
            prompts,
            self._placed(prompts, params),
            priorities=priorities,
            lora_requests=lora_requests,
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
        self,
        request_ids: Sequence[str],
        prompts: Sequence[Any],
        params: Sequence[SamplingParams],
        lora_requests: Sequence[Any] | None = None,
    ) -> list[ProcessedRequest]:
        """Check and complete many requests without queueing any, for final outputs; errors name the index."""
        self._asleep.check_awake()
        process, final = self.front.inputs.process_batch, RequestOutputKind.FINAL_ONLY
        params = self._placed(prompts, params)
        return process(request_ids, prompts, params, lora_requests=lora_requests, output_kind=final)

    def _placed(self, prompts: Sequence[Any], params: Sequence[Any]) -> Sequence[Any]:
        """Return the params of each prompt, whose structured outputs begin after any reasoning."""
        return params if self._reasoning is None else self._reasoning.behind_reasoning(prompts, params)

    @locked
    def enqueue(self, request: ProcessedRequest) -> None:
        """Queue a request that is complete already. Raises EngineBusyError while the engine sleeps."""
        self._asleep.check_awake()
        self.front.outputs.add_request(request)
        try:
            self._core.add_request(request.core)
        except BaseException:
            self.abort_request(request.request_id)
            raise

    @locked
    def step(self) -> list[AnyOutput]:
        """Return the outputs of the core's next step; empty when there is nothing to do.

        If it fails or is cut off, all requests end with it.
        """
        started = time.monotonic()
        try:
            step = self._core.step(wait=self.has_unfinished_requests())
        except EngineDeadError as error:
            self.front.outputs.fail_all(str(error))
            raise
        except FrameError as error:
            self._fail_all(error)
            raise
        if step is None:
            self._check_none_lost()
            return []
        try:
            processed = self.front.outputs.process_outputs(step)
        except BaseException as error:
            self._fail_all(error)
            raise
        if processed.aborts:
            self._core.abort_requests(processed.aborts)
        self.front.metrics.on_step(step.engine_index, started, time.monotonic())
        return processed.outputs

    def _fail_all(self, error: BaseException) -> None:
        """End all requests after a failure: nobody knows which of them have got their tokens."""
        self._core.abort_requests(self.front.outputs.fail_all(f"{type(error).__name__}: {error}"))

    def _check_none_lost(self) -> None:
        if lost := self.front.outputs.fail_all("the scheduler has lost the request"):
            raise RuntimeError(f"The scheduler has lost {len(lost)} requests: none is queued, and they never ended.")

    @locked
    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests without further output; unknown ids are ignored."""
        if aborted := self.front.outputs.abort_requests(checked_ids("request_ids", request_ids)):
            self._core.abort_requests(aborted)

    @locked
    def release(self, request_ids: Iterable[str]) -> None:
        """Give up the blocks that ended requests have kept for forks; unknown ids are ignored."""
        self._core.release(request_ids)

    def has_unfinished_requests(self) -> bool:
        """Return whether a step can give outputs."""
        return self.front.outputs.num_unfinished_requests > 0

    def get_num_unfinished_requests(self) -> int:
        """Return the number of unfinished requests; n outputs count once."""
        return self.front.outputs.num_unfinished_requests

    @locked
    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget all cached prefixes and return True; while requests run, forget nothing and return False.

        With `reset_running_requests` running requests are preempted first, and recompute their tokens. With
        `reset_connector` what the host keeps is forgotten too.
        """
        check_bool("reset_running_requests", reset_running_requests)
        check_bool("reset_connector", reset_connector)
        is_reset = self._core.reset_prefix_cache(reset_running_requests, reset_connector)
        if is_reset:
            self.front.metrics.forget_hits()
        return is_reset

    @locked
    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter for later requests and return True. Raises VLLMValidationError for a bad one."""
        return self._core.add_lora(self.front.inputs.check_named(lora_request))

    @locked
    def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter, with which running requests go on; return False for an unknown id."""
        return self._core.remove_lora(check_int("lora_id", lora_id, 1, INT32_MAX))

    @locked
    def list_loras(self) -> set[int]:
        """Return the ids of the adapters that are kept on the host."""
        return set(self._core.list_loras())

    @locked
    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter on the host until it is removed; return False for an unknown id."""
        return self._core.pin_lora(check_int("lora_id", lora_id, 1, INT32_MAX))

    @locked
    def align(self, prompt: Any, token_ids: Iterable[int]) -> Alignment:
        """Return where the tokens after an encoder-decoder's prompt are in its sound, and their log-probabilities.

        The prompt may be an `EncodedPrompt`. The first call for a length compiles a program. Raises
        VLLMValidationError for a model without an encoder of sound, and for tokens that it cannot have written.
        """
        self._asleep.check_awake()
        encoded = prompt if isinstance(prompt, EncodedPrompt) else self.front.inputs.encode(prompt)
        return Alignment(*self._core.align(*align_arguments(encoded, token_ids)))

    def reset_mm_cache(self) -> None:
        """Forget all processed images and videos."""
        self.front.inputs.forget_media()

    @locked
    def reset_encoder_cache(self) -> None:
        """Forget all encoded images and videos, unless a request that runs needs some."""
        self._core.reset_encoder_cache()

    @lasting_interrupts()
    @locked
    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Free the device's weights and caches until `wake_up`; prefixes and processed images are forgotten.

        At level 1 the host keeps the weights, except on a CPU, where its memory is the device's; at level 2, and there,
        they are read from the checkpoint again. Compiled programs stay. An engine that sleeps already goes on sleeping.
        Raises VLLMValidationError while a request is unfinished, whatever the mode, and for several hosts.
        """
        check_level(level, self.vllm_config.parallel_config.nnodes)
        check_mode(mode)
        if self._asleep.level:
            return
        if count := self.get_num_unfinished_requests():
            message = f"{count} requests are unfinished: run them to their end, or abort them, before sleep()."
            raise VLLMValidationError(message, parameter="mode", value=mode)
        self._core.sleep(level)
        self._asleep.begin(level)
        self.front.inputs.forget_media()
        self.front.metrics.forget_hits()

    @lasting_interrupts()
    @locked
    def wake_up(self, tags: list[str] | None = None) -> None:
        """Bring back the parts that `sleep` has freed: "weights", "kv_cache", or both for None. Nothing is compiled.

        Raises what keeps a part from coming back, such as a checkpoint that is gone; the part goes on sleeping then.
        """
        for part in check_tags(tags):
            if part in self._asleep.parts:
                self._core.wake_up([part])
                self._asleep.end([part])

    @lasting_interrupts()
    @locked
    def start_weight_update(self, *, of_draft: bool = False) -> None:
        """Begin to take in new weights, of the draft model if so; an update that was begun before is dropped."""
        refuse_replicas(self.vllm_config.parallel_config.data_parallel_size)
        self._core.start_weight_update(of_draft)
        self._is_updating = True

    @lasting_interrupts()
    @locked
    def update_weights(
        self,
        request: Any,
        *,
        version: str | int | None = None,
        mode: PauseMode | None = None,
        settle: Callable[[], None] | None = None,
    ) -> None:
        """Take in weights; put them in place unless `start_weight_update` was called before, see `LLM`.

        `settle` runs requests to their end for mode "wait".
        """
        weights = read_weights(request, takes_arrays=isinstance(self._core, InprocClient))
        if self._is_updating:
            if version is not None or mode is not None:
                message = "version and mode are finish_weight_update()'s, once start_weight_update() was called."
                raise VLLMValidationError(message, parameter="version")
            self._core.update_weights(weights)
            return
        self._check_update(version, mode, settle)
        self.start_weight_update()
        try:
            self._core.update_weights(weights)
            self.finish_weight_update(version, mode=mode, settle=settle)
        finally:
            if self._is_updating:
                self._is_updating = False
                self._core.drop_weight_update()

    @lasting_interrupts()
    @locked
    def finish_weight_update(
        self,
        weight_version: str | int | None = None,
        *,
        mode: PauseMode | None = None,
        settle: Callable[[], None] | None = None,
    ) -> None:
        """Put the new weights in place and set their version, if one is passed; see `LLM.finish_weight_update`."""
        self._check_update(weight_version, mode, settle)
        if mode == "abort":
            self.abort_request(self.front.outputs.request_ids())
        elif mode == "wait" and settle is not None:
            settle()
        self._core.finish_weight_update(weight_version)
        self._is_updating = False
        self._asleep.end(["weights"])
        self.front.metrics.forget_hits()

    def _check_update(
        self, version: str | int | None, mode: PauseMode | None, settle: Callable[[], None] | None
    ) -> None:
        """Raise VLLMValidationError for a bad version or mode, and for requests that no mode decides about."""
        if version is not None:
            check_version(version)
        check_update_mode(mode)
        is_decided = mode in ("abort", "keep") or (mode == "wait" and settle is not None)
        if not is_decided and (count := self.get_num_unfinished_requests()):
            message = (
                f"{count} requests are unfinished: run them to their end, or pass mode='abort', or mode='keep', with "
            )
            raise VLLMValidationError(message + "which they compute again what they have, and go on.", parameter="mode")

    @locked
    def get_weights(self) -> Any:
        """Return the weights as a pytree of arrays, without a copy; see `LLM.get_weights`."""
        if not isinstance(self._core, InprocClient):
            message = "the engine's core is in another process, and so are its arrays."
            raise VLLMValidationError(message, parameter="get_weights")
        return self._core.get_weights()

    @locked
    def set_weight_version(self, version: str | int) -> None:
        """Set the version of the weights without new weights."""
        self._core.set_weight_version(check_version(version))

    @locked
    def get_weight_version(self) -> str | int:
        """Return the version of the weights, "default" before one is set."""
        return self._core.get_weight_version()

    def is_sleeping(self) -> bool:
        """Return whether weights or caches are off the device, until `wake_up` has brought both back."""
        return self._asleep.level > 0

    def get_supported_tasks(self) -> tuple[str, ...]:
        """Return the tasks that the model supports."""
        return self.front.supported_tasks

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the transformers tokenizer. The engine has a copy of its own, which changes to it do not reach."""
        return self.front.require_tokenizer().hf

    @locked
    def get_metrics(self) -> list[Metric]:
        """Return counts and times since the engine's start, as vLLM's metrics."""
        self.front.metrics.on_programs(self._core.programs(), sleep_level=self._asleep.level)
        return self.front.metrics.snapshot()

    @locked
    def start_profile(
        self,
        profile_prefix: str | None = None,
        *,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> None:
        """Record what host and devices do until `stop_profile`; None takes profiler_config's value."""
        self._core.start_profile(profile_prefix, delay_iterations, max_iterations)

    @locked
    def stop_profile(self) -> None:
        """End the recording and write it to the folder of profiler_config."""
        self._core.stop_profile()

    @locked
    def do_log_stats(self) -> None:
        """Log the statistics line now, unless disable_log_stats was given."""
        self.front.metrics.log()

    @lasting_interrupts()
    @locked
    def warm_up(self) -> None:
        """Wait until every program is compiled, so that no step has to."""
        self._core.warm_up()

    def shutdown(self) -> None:
        """Release the device; may be called twice. In a forked child nothing is done."""
        if self._home.is_here:
            with self._lock.take():
                self._core.shutdown()
                self.front.close()


def _drop(home: Home, core: CoreClient) -> None:
    """End an engine that nobody holds any more, in its own process only: a forked child's copy cannot be ended."""
    if home.is_here:
        core.drop()
