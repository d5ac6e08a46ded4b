"""Run the calls of an `LLM` on its engine: number requests, queue all or none, and run them to their end."""

from __future__ import annotations

import contextlib
import itertools
import logging
import numbers
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxllm.beam_search import BeamSearchOutput
from jaxllm.engine.front.input_processor import ProcessedRequest
from jaxllm.engine.front.pooling_resolver import resolve_pooling_params, verify_pooling_task
from jaxllm.engine.offline.llm_engine import LLMEngine
from jaxllm.engine.offline.progress import Progress, UseTqdm
from jaxllm.exceptions import EngineGenerateError, VLLMValidationError
from jaxllm.lora.request import LoRARequest
from jaxllm.outputs import AnyOutput, PoolingOutput, PoolingRequestOutput, RequestOutput
from jaxllm.params.checks import check_options, has_length, shown
from jaxllm.pooling_params import PoolingParams
from jaxllm.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from jaxllm.text.chat import is_single_conversation
from jaxllm.text.prompts import begin_with, is_single_prompt, with_processor_options
from jaxllm.utils.interrupts import deferred_interrupts

if TYPE_CHECKING:
    from jaxllm.decisions import DecisionOutput
    from jaxllm.engine.beam.search import BeamSearcher
    from jaxllm.engine.decisions.decider import DecisionOptions
    from jaxllm.resolve.pooling_settings import TextForm

logger = logging.getLogger(__name__)

type Params = SamplingParams | Sequence[SamplingParams] | None
type _Pooled = PoolingParams | Sequence[PoolingParams] | None
type Priority = int | Sequence[int] | None
type Adapters = LoRARequest | Sequence[LoRARequest | None] | None


class OfflineRunner:
    """Runs batches of prompts to their end, one at a time; `enqueue` keeps some for a later `wait`."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._num_requests = 0
        self._enqueued: dict[str, AnyOutput | None] = {}
        """The output of each enqueued request, None while it is unfinished."""
        self._failure: Exception | KeyboardInterrupt | None = None
        """The error of a step that ended enqueued requests, until `wait` raises it."""
        self._is_closing = False

    def default_params(self) -> SamplingParams:
        """Return vLLM's default sampling parameters with the model's own on top."""
        return SamplingParams.from_optional(**self._engine.front.ready.default_sampling_params)

    def add_prompts(
        self,
        prompts: Any,
        params: Params,
        priority: Priority,
        options: dict[str, Any] | None,
        adapters: Adapters = None,
        processor_options: dict[str, Any] | None = None,
    ) -> list[str]:
        """Queue one prompt or many for their final outputs, and return their request ids.

        `processor_options` are mm_processor_kwargs of all prompts.
        """
        batch = [prompts] if is_single_prompt(prompts) else list(prompts)
        processor_options = check_options("mm_processor_kwargs", processor_options)
        batch = [with_processor_options(processor_options, prompt) for prompt in batch]
        return self._add(batch, params, priority, options, adapters, "prompts")

    def add_chats(
        self,
        messages: Any,
        params: Params,
        priority: Priority,
        options: dict[str, Any] | None,
        template_options: dict[str, Any],
        adapters: Adapters = None,
    ) -> list[str]:
        """Queue one conversation or many for their final outputs, and return their request ids."""
        single = is_single_conversation(messages)
        renderer = self._engine.front.chat_renderer
        with deferred_interrupts():
            rendered = [
                renderer.render(conversation, "messages" if single else f"messages[{i}]", **template_options)
                for i, conversation in enumerate([messages] if single else messages)
            ]
        return self._add(rendered, params, priority, options, adapters, "messages")

    def enqueue(self, request_ids: list[str]) -> list[str]:
        """Keep the outputs of these requests for `wait`, whichever call's steps finish them."""
        self._enqueued |= dict.fromkeys(request_ids)
        return request_ids

    def finish_enqueued(self) -> None:
        """Run everything enqueued to its end and keep the outputs for `wait`."""
        self._step_until_done([name for name, output in self._enqueued.items() if output is None], False)

    def wait(self, use_tqdm: UseTqdm) -> list[Any]:
        """Run everything enqueued and return the outputs in the order of their request ids, without aborted ones.

        Raises RuntimeError if a step of another call failed and ended enqueued requests; the rest can be waited for.
        Requests that failed are treated as in `run_generated`.
        """
        failure, self._failure = self._failure, None
        if failure is not None:
            raise RuntimeError("Enqueued requests ended without an output: a step of another call failed.") from failure
        try:
            self._step_until_done([name for name, output in self._enqueued.items() if output is None], use_tqdm)
            outputs = _in_order([output for output in self._enqueued.values() if output is not None])
        finally:
            self._enqueued.clear()
            self._failure = None
        return _reported(outputs, "enqueued requests")

    def run_generated(self, request_ids: Sequence[str], use_tqdm: UseTqdm, label: str) -> list[RequestOutput]:
        """Do as `run`. Raises RuntimeError if the only request failed; if there are several, failures are logged."""
        return _reported(self.run(request_ids, use_tqdm), label)

    def run(self, request_ids: Sequence[str], use_tqdm: UseTqdm) -> list[Any]:
        """Step until these requests are finished and return their outputs in order."""
        outputs = self._step_until_done(request_ids, use_tqdm)
        if len(outputs) < len(request_ids):
            raise RuntimeError(
                f"{len(request_ids) - len(outputs)} of {len(request_ids)} requests ended without an output: they were "
                "aborted, or another caller of llm_engine.step() has taken their outputs."
            )
        return _in_order(outputs)

    def add_pooled(
        self,
        prompts: Any,
        params: _Pooled,
        task: str | None,
        options: dict[str, Any] | None,
        adapters: Adapters = None,
        *,
        prompt_name: str | None = None,
        form: TextForm | None = None,
    ) -> list[str]:
        """Queue one prompt or many for a task of pooling, and return their request ids.

        Texts to embed begin with the checkpoint's prompt named `prompt_name`, or with its default prompt, and have the
        adapter that comes with it; those with a `form` are prompts in it.
        """
        batch = [prompts] if is_single_prompt(prompts) else list(prompts)
        spread = self._spread_pooling(params, task, len(batch))
        pooling = self._engine.front.ready.pooling
        if task == "embed" and pooling is not None:
            before = pooling.prompt(prompt_name)
            batch = [begin_with(before, prompt) for prompt in batch] if before else batch
            adapters = pooling.adapter(prompt_name, adapters, "lora_request")
        if form is not None:
            from jaxllm.engine.front.text_forms import as_form  # imports numpy

            batch = [as_form(self._engine.front, form, prompt) for prompt in batch]
        return self._add_all(batch, spread, None, options, _spread_adapters(adapters, len(batch), "prompts"), "prompts")

    def run_pooled(
        self, request_ids: Sequence[str], use_tqdm: UseTqdm, label: str = "prompts"
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Do as `run`. Raises RuntimeError if requests ended without an output, after the others have ended."""
        outputs = self.run(request_ids, use_tqdm)
        failed = [(i, output.error) for i, output in enumerate(outputs) if output.error is not None]
        if failed:
            i, error = failed[0]
            more = f" ({len(failed)} of {len(outputs)} failed.)" if len(outputs) > 1 else ""
            raise RuntimeError(f"{label}[{i}]: {error}{more}")
        return outputs

    def beam_search(
        self, prompts: Any, params: BeamSearchParams, use_tqdm: UseTqdm, limit: int | None, adapters: Adapters = None
    ) -> list[BeamSearchOutput]:
        """Search for the likeliest continuations of one prompt or many, at most `limit` prompts at once."""
        from jaxllm.engine.beam.search import BeamSearcher  # imports numpy

        batch = [prompts] if is_single_prompt(prompts) else list(prompts)
        searcher = BeamSearcher(self._engine, self._engine.front, params, limit)
        with deferred_interrupts():
            ids, sampling_params = self._new_ids(len(batch)), [searcher.sampling_params] * len(batch)
            named = _spread_adapters(adapters, len(batch), "prompts")
            requests = self._engine.process_requests(ids, batch, sampling_params, named) if batch else []
        self._step_until_found(searcher, requests, use_tqdm)
        return searcher.outputs()

    def decide(
        self,
        states: Any,
        questions: Any,
        options: DecisionOptions,
        use_tqdm: UseTqdm,
        priority: int = 0,
        adapter: LoRARequest | None = None,
    ) -> list[DecisionOutput]:
        """Answer the same questions about one state or about each of a list."""
        from jaxllm.engine.decisions.decider import Decision

        batch = states if isinstance(states, list) else [states]
        with deferred_interrupts():
            decisions = [Decision(self._engine.front, state, questions, options) for state in batch]
            asked = [each.requests(lambda: self._new_ids(1)[0], priority, adapter) for each in decisions]
            owners = {
                request.request_id: decision
                for decision, requests in zip(decisions, asked, strict=True)
                for request in requests
            }
            try:
                for request in itertools.chain(*asked):
                    self._engine.enqueue(request)
            except BaseException:
                self._engine.abort_request(owners)
                raise
        outputs = self._step_until_done(list(owners), use_tqdm)
        if len(outputs) < len(owners):
            raise EngineGenerateError(f"{len(owners) - len(outputs)} rows of decisions were aborted.")
        for output in outputs:
            assert isinstance(output, RequestOutput)
            owners[output.request_id].take(output)
        return [decision.answer() for decision in decisions]

    def close(self) -> None:
        """Let a call that runs in another thread end with an error after its present step."""
        self._is_closing = True

    def _new_ids(self, count: int) -> list[str]:
        first, self._num_requests = self._num_requests, self._num_requests + count
        return [str(first + i) for i in range(count)]

    def _add(
        self,
        prompts: list[Any],
        params: Params,
        priority: Priority,
        options: dict[str, Any] | None,
        adapters: Adapters,
        label: str,
    ) -> list[str]:
        return self._add_all(
            prompts,
            self._spread_params(params, len(prompts), label),
            _spread_priority(priority, len(prompts), label),
            options,
            _spread_adapters(adapters, len(prompts), label),
            label,
        )

    def _add_all(
        self,
        prompts: list[Any],
        params: Sequence[SamplingParams | PoolingParams],
        priorities: list[Any] | None,
        options: dict[str, Any] | None,
        adapters: list[Any] | None,
        label: str,
    ) -> list[str]:
        if not prompts:
            return []
        request_ids = [str(self._num_requests + i) for i in range(len(prompts))]
        try:
            # Not for order alone: JAX runs code in the garbage collector, where a KeyboardInterrupt gets lost.
            with deferred_interrupts():
                self._engine.add_requests(
                    request_ids,
                    prompts,
                    params,
                    priorities=priorities,
                    lora_requests=adapters,
                    tokenization_kwargs=options,
                    output_kind=RequestOutputKind.FINAL_ONLY,
                    label=label,
                )
        except KeyboardInterrupt:
            with deferred_interrupts():
                self._engine.abort_request(request_ids)
            raise
        return self._new_ids(len(prompts))

    def _spread_params(self, params: Params, num_prompts: int, label: str) -> list[SamplingParams]:
        """Return one SamplingParams per prompt."""
        if params is None:
            return [self.default_params()] * num_prompts
        if isinstance(params, Sequence):
            _check_same_length(label, num_prompts, "sampling_params", params)
            return list(params)
        return [params] * num_prompts

    def _spread_pooling(self, params: _Pooled, task: str | None, num_prompts: int) -> list[PoolingParams]:
        """Return one PoolingParams per prompt; prompts share an object where they are given one."""
        ready = self._engine.front.ready
        verify_pooling_task(task, ready.pooling, ready.vllm_config.model_config.runner_type)
        assert ready.pooling is not None
        if not isinstance(params, Sequence):
            return [resolve_pooling_params(params, task, ready.pooling)] * num_prompts
        _check_same_length("prompts", num_prompts, "pooling_params", params)
        return [resolve_pooling_params(each, task, ready.pooling) for each in params]

    def _step_until_done(self, request_ids: Sequence[str], use_tqdm: UseTqdm) -> list[AnyOutput]:
        """Step until these requests are finished or aborted; return the outputs of those that finished."""
        waiting = set(request_ids)
        done: list[AnyOutput] = []
        try:
            with (
                deferred_interrupts() as raise_if_interrupted,
                contextlib.closing(Progress(use_tqdm, len(waiting))) as progress,
            ):
                while waiting and self._engine.has_unfinished_requests():
                    for output in self._step():
                        if output.request_id in waiting and output.finished:
                            waiting.discard(output.request_id)
                            done.append(output)
                            progress.update(output)
                    raise_if_interrupted()
        except BaseException:
            with deferred_interrupts():  # a second Ctrl-C must not leave half of them running
                self._engine.abort_request(waiting)
            raise
        return done

    def _step_until_found(
        self, searcher: BeamSearcher, requests: Sequence[ProcessedRequest], use_tqdm: UseTqdm
    ) -> None:
        """Step until every search has ended. Ctrl-C and errors leave neither requests nor blocks behind."""
        try:
            with (
                deferred_interrupts() as raise_if_interrupted,
                contextlib.closing(Progress(use_tqdm, len(requests))) as progress,
            ):
                searcher.start(requests, progress.count)
                searcher.resume(wait=True)
                while not searcher.is_done:
                    if self._engine.has_unfinished_requests():
                        for output in self._step():
                            searcher.take(output)
                        raise_if_interrupted()
                    else:
                        searcher.end_lost()
                    searcher.resume(wait=True)
        except BaseException:
            with deferred_interrupts():
                searcher.abort()
            raise

    def _step(self) -> list[AnyOutput]:
        """Do one step; outputs of enqueued requests are kept for `wait`."""
        if self._is_closing:
            raise RuntimeError("The LLM was shut down by another thread.")
        try:
            outputs = self._engine.step()
        except Exception as error:  # the failed step has ended every request, the enqueued ones too
            lost = [name for name, output in self._enqueued.items() if output is None]
            if lost:
                self._engine.abort_request(lost)
                self._enqueued = {name: output for name, output in self._enqueued.items() if output is not None}
                self._failure = error
            raise
        for output in outputs:
            if output.request_id in self._enqueued and output.finished:
                self._enqueued[output.request_id] = output
        return outputs


def check_output_type(output_type: Any) -> None:
    """Refuse a type that no output of a generating model has."""
    kinds = output_type if isinstance(output_type, tuple) else (output_type,)
    if output_type is not None and not any(kind is RequestOutput for kind in kinds):
        message = f"output_type must be RequestOutput, which every output is; got {shown(output_type)}."
        raise VLLMValidationError(message, parameter="output_type", value=output_type)


def _spread_adapters(adapters: Any, num_prompts: int, label: str) -> list[Any] | None:
    """Return each prompt's adapter; a single one is for all prompts."""
    if adapters is None:
        return None
    if isinstance(adapters, Sequence) and not isinstance(adapters, str):
        _check_same_length(label, num_prompts, "lora_request", adapters)
        return list(adapters)
    return [adapters] * num_prompts


def _spread_priority(priority: Any, num_prompts: int, label: str) -> list[Any] | None:
    """Return one priority per prompt: a single integer holds for all of them."""
    if priority is None:
        return None
    if isinstance(priority, numbers.Integral):
        return [priority] * num_prompts
    if isinstance(priority, (str, bytes, Mapping)) or not has_length(priority):
        message = f"priority must be an integer or a list of them, got {shown(priority)} ({type(priority).__name__})."
        raise VLLMValidationError(message, parameter="priority", value=priority)
    _check_same_length(label, num_prompts, "priority", priority)
    return list(priority)


def _reported(outputs: list[RequestOutput], label: str) -> list[RequestOutput]:
    """Log which outputs failed, and return all of them. Raises RuntimeError if the only one failed.

    The completions of a failed request have the finish_reason "error", and the reason as their stop_reason.
    """
    failures = [(i, each.outputs[0].stop_reason) for i, each in enumerate(outputs) if _has_failed(each)]
    if failures:
        i, reason = failures[0]
        if len(outputs) == 1:
            raise RuntimeError(f"{label}[0]: {reason}")
        logger.error(
            "%d of %d %s failed, the first of them %s[%d]: %s", len(failures), len(outputs), label, label, i, reason
        )
    return outputs


def _has_failed(output: RequestOutput) -> bool:
    return all(completion.finish_reason == "error" for completion in output.outputs)


def _in_order(outputs: list[AnyOutput]) -> list[AnyOutput]:
    return sorted(outputs, key=lambda output: int(output.request_id))


def _check_same_length(label: str, num_prompts: int, name: str, values: Collection[Any]) -> None:
    if len(values) != num_prompts:
        message = f"The lengths of {label} ({num_prompts}) and {name} ({len(values)}) must be the same."
        raise VLLMValidationError(message, parameter=name, value=len(values))
