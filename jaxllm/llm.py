"""`LLM`: vLLM's class for offline use, name for name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

from jaxllm.beam_search import BeamSearchOutput
from jaxllm.config.engine_args import EngineArgs
from jaxllm.engine.beam_search import BeamSearcher
from jaxllm.engine.interrupts import deferred_interrupts
from jaxllm.engine.llm_engine import LLMEngine, refuse_given
from jaxllm.engine.metrics import Metric
from jaxllm.engine.progress import Progress
from jaxllm.engine.refused_methods import RefusedMethods
from jaxllm.exceptions import VLLMValidationError
from jaxllm.inputs import PromptType
from jaxllm.outputs import RequestOutput
from jaxllm.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from jaxllm.text.chat import ChatRenderer, is_single_conversation
from jaxllm.text.prompts import is_single_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

type Params = SamplingParams | Sequence[SamplingParams] | None
type UseTqdm = bool | Callable[..., Any]


class LLM(RefusedMethods):
    """A model, its tokenizer and its KV cache, ready to generate; `with LLM(...) as llm:` releases them at the end.

    `model` is a hub id, a folder, or a .gguf file; every other argument is one of `EngineArgs`.
    """

    llm_engine: LLMEngine

    def __init__(
        self,
        model: str,
        *,
        runner: str = "auto",
        convert: str = "auto",
        tokenizer: str | None = None,
        tokenizer_mode: str = "auto",
        skip_tokenizer_init: bool = False,
        trust_remote_code: bool = False,
        allowed_local_media_path: str = "",
        allowed_media_domains: list[str] | None = None,
        tensor_parallel_size: int = 1,
        dtype: Any = "auto",
        quantization: str | None = None,
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        chat_template: str | None = None,
        seed: int = 0,
        gpu_memory_utilization: float = 0.9,
        cpu_offload_gb: float = 0,
        offload_group_size: int = 0,
        offload_num_in_group: int = 1,
        offload_prefetch_step: int = 1,
        offload_params: Any = None,
        enforce_eager: bool = False,
        enable_return_routed_experts: bool = False,
        return_sampling_mask: bool = False,
        disable_custom_all_reduce: bool = False,
        hf_token: bool | str | None = None,
        hf_overrides: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
        pooler_config: Any = None,
        structured_outputs_config: Any = None,
        profiler_config: Any = None,
        attention_config: Any = None,
        kv_cache_memory_bytes: int | None = None,
        compilation_config: Any = None,
        quantization_config: Any = None,
        logits_processors: Any = None,
        spec_method: str | None = None,
        spec_model: str | None = None,
        spec_tokens: int | None = None,
        **kwargs: Any,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "kwargs", "__class__")}
        self._start(LLMEngine.from_engine_args(EngineArgs(**given, **kwargs)))

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Make an LLM from engine arguments."""
        llm = cls.__new__(cls)
        llm._start(LLMEngine.from_engine_args(engine_args))
        return llm

    def _start(self, llm_engine: LLMEngine) -> None:
        self.llm_engine = llm_engine
        self._num_requests = 0
        self._enqueued: dict[str, RequestOutput | None] = {}

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: Params = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: Any = None,
        priority: list[int] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Generate for one prompt or many and return the outputs in the prompts' order.

        Nothing runs if a prompt or its params are invalid: the error names the first one by its index. With
        sampling_params=None the model's defaults hold. Ctrl-C ends this call's requests only.
        """
        refuse_given(lora_request=lora_request, mm_processor_kwargs=mm_processor_kwargs)
        request_ids = self._add_prompts(prompts, sampling_params, priority, tokenization_kwargs)
        return self._run(request_ids, use_tqdm)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: Params = None,
        use_tqdm: UseTqdm = True,
        lora_request: Any = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Generate the next message of one conversation or of many; messages have OpenAI's form."""
        refuse_given(lora_request=lora_request, mm_processor_kwargs=mm_processor_kwargs)
        template_options = {
            "chat_template": chat_template,
            "content_format": chat_template_content_format,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            "chat_template_kwargs": chat_template_kwargs,
        }
        request_ids = self._add_chats(messages, sampling_params, None, tokenization_kwargs, template_options)
        return self._run(request_ids, use_tqdm)

    def beam_search(
        self,
        prompts: PromptType | Sequence[PromptType],
        params: BeamSearchParams,
        lora_request: Any = None,
        use_tqdm: UseTqdm = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Search for the likeliest texts, `beam_width` per prompt, as Hugging Face's generate(num_beams=...) does.

        Beams share their KV blocks. At most concurrency_limit prompts are searched at once; with None, all.
        """
        refuse_given(lora_request=lora_request)
        batch = [prompts] if is_single_prompt(prompts) else list(prompts)
        request_ids = [str(self._num_requests + i) for i in range(len(batch))]
        self._num_requests += len(batch)
        with deferred_interrupts():
            searcher = BeamSearcher(self.llm_engine, request_ids, batch, params, concurrency_limit)
        searcher.run(self._step, use_tqdm)
        return searcher.outputs(self.llm_engine.tokenizer)

    def enqueue(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: Params = None,
        lora_request: Any = None,
        priority: list[int] | None = None,
        use_tqdm: UseTqdm = True,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[str]:
        """Queue prompts for `wait_for_completion` and return their request ids."""
        del use_tqdm  # queueing is quick
        refuse_given(lora_request=lora_request, mm_processor_kwargs=mm_processor_kwargs)
        return self._remember(self._add_prompts(prompts, sampling_params, priority, tokenization_kwargs))

    def enqueue_chat(
        self,
        messages: Sequence[Any],
        sampling_params: Params = None,
        lora_request: Any = None,
        priority: list[int] | None = None,
        use_tqdm: UseTqdm = True,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[str]:
        """Queue conversations for `wait_for_completion` and return their request ids."""
        del use_tqdm
        refuse_given(lora_request=lora_request, mm_processor_kwargs=mm_processor_kwargs)
        template_options = {
            "chat_template": chat_template,
            "content_format": chat_template_content_format,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            "chat_template_kwargs": chat_template_kwargs,
        }
        return self._remember(
            self._add_chats(messages, sampling_params, priority, tokenization_kwargs, template_options)
        )

    def wait_for_completion(self, output_type: Any = None, *, use_tqdm: UseTqdm = True) -> list[RequestOutput]:
        """Run everything enqueued and return the outputs in the order of their request ids."""
        del output_type  # there is one type of output
        waiting = [request_id for request_id, output in self._enqueued.items() if output is None]
        try:
            self._run(waiting, use_tqdm)
            done = [output for output in self._enqueued.values() if output is not None]
        finally:
            self._enqueued.clear()
        return _in_order(done)

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the transformers tokenizer. The engine has a copy of its own, which changes to it do not reach."""
        return self.llm_engine.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return what holds when sampling_params is None: vLLM's defaults with the model's own on top."""
        return SamplingParams.from_optional(**self.llm_engine.config.default_sampling_params)

    def get_metrics(self) -> list[Metric]:
        """Return counts and times since the engine's start, as vLLM's metrics."""
        return self.llm_engine.get_metrics()

    def start_profile(
        self,
        profile_prefix: str | None = None,
        *,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> None:
        """Record what host and devices do until `stop_profile`; what is None is as profiler_config says."""
        self.llm_engine.start_profile(profile_prefix, delay_iterations=delay_iterations, max_iterations=max_iterations)

    def stop_profile(self) -> None:
        """End the recording and write it to the folder of profiler_config."""
        self.llm_engine.stop_profile()

    def get_world_size(self, include_dp: bool = True) -> int:
        """Return how many devices run the model."""
        del include_dp  # there are no replicas
        return self.llm_engine.config.mesh.size

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, and nothing forgotten, while requests run."""
        return self.llm_engine.reset_prefix_cache()

    def reset_mm_cache(self) -> None:
        """Do nothing: there is no cache of multimodal inputs."""

    def shutdown(self) -> None:
        """Release the device; may be called twice. The LLM cannot be used afterwards."""
        self.llm_engine.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.shutdown()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # a half-made LLM, or an interpreter that is going down
            self.shutdown()

    def _add_prompts(
        self, prompts: Any, sampling_params: Params, priority: list[int] | None, options: dict[str, Any] | None
    ) -> list[str]:
        """Queue one prompt or many for their final outputs."""
        batch = [prompts] if is_single_prompt(prompts) else list(prompts)
        return self._add(batch, sampling_params, priority, options, "prompts")

    def _add_chats(
        self,
        messages: Any,
        sampling_params: Params,
        priority: list[int] | None,
        options: dict[str, Any] | None,
        template_options: dict[str, Any],
    ) -> list[str]:
        """Queue one conversation or many for their final outputs."""
        single = is_single_conversation(messages)
        renderer = self._chat_renderer()
        with deferred_interrupts():
            rendered = [
                renderer.render(conversation, "messages" if single else f"messages[{i}]", **template_options)
                for i, conversation in enumerate([messages] if single else messages)
            ]
        return self._add(rendered, sampling_params, priority, options, "messages")

    def _chat_renderer(self) -> ChatRenderer:
        return ChatRenderer(self.llm_engine.require_tokenizer(), self.llm_engine.config.chat_template)

    def _add(
        self,
        prompts: list[Any],
        sampling_params: Params,
        priority: list[int] | None,
        options: dict[str, Any] | None,
        label: str,
    ) -> list[str]:
        params = self._spread_params(sampling_params, len(prompts), label)
        if priority is not None:
            _check_same_length(label, len(prompts), "priority", priority)
        request_ids = [str(self._num_requests + i) for i in range(len(prompts))]
        if prompts:
            self._add_all_or_none(request_ids, prompts, params, priority, options, label)
        self._num_requests += len(prompts)
        return request_ids

    def _add_all_or_none(
        self,
        request_ids: list[str],
        prompts: list[Any],
        params: list[SamplingParams],
        priority: list[int] | None,
        options: dict[str, Any] | None,
        label: str,
    ) -> None:
        try:
            # Not only for order's sake: JAX runs code in the garbage collector, where a KeyboardInterrupt gets lost.
            with deferred_interrupts():
                self.llm_engine.add_requests(
                    request_ids,
                    prompts,
                    params,
                    priorities=priority,
                    tokenization_kwargs=options,
                    output_kind=RequestOutputKind.FINAL_ONLY,
                    label=label,
                )
        except KeyboardInterrupt:
            with deferred_interrupts():
                self.llm_engine.abort_request(request_ids)
            raise

    def _spread_params(self, sampling_params: Params, num_prompts: int, label: str) -> list[SamplingParams]:
        """Return one SamplingParams per prompt."""
        if sampling_params is None:
            return [self.get_default_sampling_params()] * num_prompts
        if isinstance(sampling_params, Sequence):
            _check_same_length(label, num_prompts, "sampling_params", sampling_params)
            return list(sampling_params)
        return [sampling_params] * num_prompts

    def _remember(self, request_ids: list[str]) -> list[str]:
        self._enqueued |= dict.fromkeys(request_ids)
        return request_ids

    def _run(self, request_ids: Sequence[str], use_tqdm: UseTqdm) -> list[RequestOutput]:
        """Step until these requests are finished."""
        waiting = set(request_ids)
        done: list[RequestOutput] = []
        try:
            with (
                deferred_interrupts() as raise_if_interrupted,
                contextlib.closing(Progress(use_tqdm, len(waiting))) as progress,
            ):
                while waiting and self.llm_engine.has_unfinished_requests():
                    for output in self._step():
                        if output.request_id in waiting and output.finished:
                            waiting.discard(output.request_id)
                            done.append(output)
                            progress.update(output)
                    raise_if_interrupted()
        except BaseException:
            with deferred_interrupts():  # impatient fingers must not leave half of them running
                self.llm_engine.abort_request(waiting)
            raise
        return _in_order(done)

    def _step(self) -> list[RequestOutput]:
        """Do one step; outputs of enqueued requests are kept for `wait_for_completion`."""
        outputs = self.llm_engine.step()
        for output in outputs:
            if output.request_id in self._enqueued and output.finished:
                self._enqueued[output.request_id] = output
        return outputs


def _in_order(outputs: list[RequestOutput]) -> list[RequestOutput]:
    return sorted(outputs, key=lambda output: int(output.request_id))


def _check_same_length(label: str, num_prompts: int, name: str, values: Sequence[Any]) -> None:
    if len(values) != num_prompts:
        message = f"The lengths of {label} ({num_prompts}) and {name} ({len(values)}) must be the same."
        raise VLLMValidationError(message, parameter=name, value=len(values))
