"""`LLM` is vLLM's class for offline use, name for name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from jaxllm.beam_search import BeamSearchOutput
from jaxllm.decisions import DecisionOutput
from jaxllm.engine.front.asleep import PauseMode
from jaxllm.engine.front.metrics import Metric
from jaxllm.engine.front.new_weights import check_transfer
from jaxllm.engine.front.refused_methods import LLM_REFUSES, RefusesMethods
from jaxllm.engine.offline.llm_engine import LLMEngine
from jaxllm.engine.offline.offline_runner import Adapters, OfflineRunner, Params, Priority, check_output_type
from jaxllm.engine.offline.progress import UseTqdm, check_use_tqdm
from jaxllm.inputs import PromptType
from jaxllm.lora.request import LoRARequest
from jaxllm.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
)
from jaxllm.pooling_params import PoolingParams
from jaxllm.resolve.engine_args import EngineArgs
from jaxllm.sampling_params import BeamSearchParams, SamplingParams
from jaxllm.utils.turn import Turn, in_turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from jaxllm.resolve.vllm_config import ModelConfig


class LLM(RefusesMethods, refused=LLM_REFUSES):
    """A model with its tokenizer and its KV cache; `with LLM(...) as llm:` releases them at the end.

    `model` is a hub id, a folder, or a .gguf file; every other argument is one of `EngineArgs`. Threads may share an
    LLM: their calls happen in turn.
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
        arguments = {name: value for name, value in locals().items() if name not in ("self", "kwargs", "__class__")}
        self._start(LLMEngine.from_engine_args(EngineArgs(**arguments, **kwargs)))

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Make an LLM from engine arguments."""
        llm = cls.__new__(cls)
        llm._start(LLMEngine.from_engine_args(engine_args))
        return llm

    def _start(self, llm_engine: LLMEngine) -> None:
        self.llm_engine = llm_engine
        self._runner = OfflineRunner(llm_engine)
        self._turn = Turn()

    def __repr__(self) -> str:
        """Return the model and the settings that matter most, for a notebook to show."""
        config = self.llm_engine.vllm_config
        model, scheduler = config.model_config, config.scheduler_config
        return (
            f"LLM(model={model.model!r}, dtype={str(model.dtype)!r}, max_model_len={model.max_model_len}, "
            f"max_num_seqs={scheduler.max_num_seqs})"
        )

    @in_turn
    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: Params = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: Adapters = None,
        priority: Priority = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Generate for one prompt or many and return the outputs in the prompts' order.

        Nothing runs if a prompt or its params are invalid: the error names the first one by its index. With
        sampling_params=None the model's defaults hold. Ctrl-C ends this call's requests only.

        A request may fail as it runs, for example if its adapter cannot be loaded. Raises RuntimeError if it was the
        only one; among several its outputs have the finish_reason "error" and the reason as stop_reason, and the
        failures are logged.
        """
        check_use_tqdm(use_tqdm)
        request_ids = self._runner.add_prompts(
            prompts, sampling_params, priority, tokenization_kwargs, lora_request, mm_processor_kwargs
        )
        return self._runner.run_generated(request_ids, use_tqdm, "prompts")

    @in_turn
    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: Params = None,
        use_tqdm: UseTqdm = True,
        lora_request: Adapters = None,
        priority: Priority = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Generate the next message of one conversation or of many; messages have OpenAI's form.

        Requests that fail as they run are treated as in `generate`.
        """
        check_use_tqdm(use_tqdm)
        template_options = {
            "chat_template": chat_template,
            "content_format": chat_template_content_format,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            "chat_template_kwargs": chat_template_kwargs,
            "mm_processor_kwargs": mm_processor_kwargs,
        }
        request_ids = self._runner.add_chats(
            messages, sampling_params, priority, tokenization_kwargs, template_options, lora_request
        )
        return self._runner.run_generated(request_ids, use_tqdm, "messages")

    @in_turn
    def beam_search(
        self,
        prompts: PromptType | Sequence[PromptType],
        params: BeamSearchParams,
        lora_request: Adapters = None,
        use_tqdm: UseTqdm = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Search for the likeliest texts, `beam_width` per prompt, in vLLM's ranking.

        Beams share their KV blocks. At most concurrency_limit prompts are searched at once; with None, all.
        """
        check_use_tqdm(use_tqdm)
        return self._runner.beam_search(prompts, params, use_tqdm, concurrency_limit, lora_request)

    @in_turn
    def decide(
        self,
        state: Any,
        questions: Mapping[str, Any],
        *,
        instructions: str | None = None,
        images: Sequence[Any] = (),
        calibrate: bool = False,
        num_orders: int = 1,
        use_tqdm: UseTqdm = False,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        cache_salt: str | None = None,
    ) -> list[DecisionOutput]:
        """Answer questions about a state with the probability of each option; a list is many states.

        A state is a text, or a dict or tuple that is sent as JSON. Questions have vLLM's form, by id: {"type":
        "choice", "score" or "noul", "instructions": ..., "criteria": ...}. `calibrate` divides by the probabilities
        after a state that says nothing; `num_orders` averages over orders of the options. Images are content parts in
        OpenAI's form, about all states. Raises VLLMValidationError for what cannot be asked. docs/decisions.md has what
        the probabilities mean.
        """
        check_use_tqdm(use_tqdm)
        from jaxllm.engine.decisions.decider import DecisionOptions
        from jaxllm.engine.decisions.prompts import Template

        template = Template(chat_template, chat_template_kwargs, cache_salt, tuple(images))
        options = DecisionOptions(template, instructions, calibrate, num_orders)
        return self._runner.decide(state, questions, options, use_tqdm, priority, lora_request)

    @in_turn
    def encode(
        self,
        prompts: PromptType | Sequence[PromptType],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: Adapters = None,
        pooling_task: str | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        prompt_name: str | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Pool one prompt or many for a task: embed, classify, token_embed or token_classify.

        An output's data is a float32 array [o] or, of the token tasks, [tokens, o]. In a ColBERT model texts with
        `prompt_name` "query" or "document" are read as such, and the vectors are those that count in scores. Raises
        RuntimeError, once all have ended, if some ended without an output.
        """
        check_use_tqdm(use_tqdm)
        from jaxllm.engine.front.text_forms import counted, find_form  # imports numpy

        form = find_form(self.llm_engine.front.ready.pooling, pooling_task, prompt_name)
        request_ids = self._runner.add_pooled(
            prompts, pooling_params, pooling_task, tokenization_kwargs, lora_request, form=form
        )
        return [counted(output, form) for output in self._runner.run_pooled(request_ids, use_tqdm)]

    @in_turn
    def embed(
        self,
        prompts: PromptType | Sequence[PromptType],
        *,
        use_tqdm: UseTqdm = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: Adapters = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        prompt_name: str | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return an embedding for each prompt, in order.

        As in sentence-transformers, `prompt_name` names a prompt of the checkpoint that is put before each text; by
        default the checkpoint's own default, if any. Token ids stay unchanged. A task of Jina Embeddings v3 is the name
        of a prompt with an adapter.
        """
        check_use_tqdm(use_tqdm)
        request_ids = self._runner.add_pooled(
            prompts, pooling_params, "embed", tokenization_kwargs, lora_request, prompt_name=prompt_name
        )
        return [EmbeddingRequestOutput.from_base(each) for each in self._runner.run_pooled(request_ids, use_tqdm)]

    @in_turn
    def classify(
        self,
        prompts: PromptType | Sequence[PromptType],
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: Adapters = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """Return the probability of each class, or its score, for each prompt, in order."""
        check_use_tqdm(use_tqdm)
        request_ids = self._runner.add_pooled(prompts, pooling_params, "classify", tokenization_kwargs, lora_request)
        return [ClassificationRequestOutput.from_base(each) for each in self._runner.run_pooled(request_ids, use_tqdm)]

    @in_turn
    def score(
        self,
        data_1: str | list[str],
        data_2: str | list[str],
        /,
        *,
        use_tqdm: UseTqdm = True,
        pooling_params: PoolingParams | None = None,
        lora_request: Adapters = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """Return how well texts go together, in pairs: one with one, one with each of many, or many with as many.

        A cross-encoder reads both texts of a pair; other models compare the texts' embeddings, as the checkpoint says.
        """
        check_use_tqdm(use_tqdm)
        from jaxllm.engine.front.scoring import Scorer  # imports numpy

        front = self.llm_engine.front
        plan = Scorer(front).plan(data_1, data_2, chat_template=chat_template)
        request_ids = self._runner.add_pooled(
            plan.prompts, pooling_params, plan.task, tokenization_kwargs, lora_request
        )
        return plan.scores(self._runner.run_pooled(request_ids, use_tqdm))

    @in_turn
    def enqueue(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: Params = None,
        lora_request: Adapters = None,
        priority: Priority = None,
        use_tqdm: UseTqdm = True,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[str]:
        """Queue prompts for `wait_for_completion` and return their request ids; no bar is shown."""
        check_use_tqdm(use_tqdm)
        return self._runner.enqueue(
            self._runner.add_prompts(
                prompts, sampling_params, priority, tokenization_kwargs, lora_request, mm_processor_kwargs
            )
        )

    @in_turn
    def enqueue_chat(
        self,
        messages: Sequence[Any],
        sampling_params: Params = None,
        use_tqdm: UseTqdm = True,
        lora_request: Adapters = None,
        priority: Priority = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[str]:
        """Queue conversations for `wait_for_completion` and return their request ids; no bar is shown."""
        check_use_tqdm(use_tqdm)
        template_options = {
            "chat_template": chat_template,
            "content_format": chat_template_content_format,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            "chat_template_kwargs": chat_template_kwargs,
            "mm_processor_kwargs": mm_processor_kwargs,
        }
        return self._runner.enqueue(
            self._runner.add_chats(
                messages, sampling_params, priority, tokenization_kwargs, template_options, lora_request
            )
        )

    @in_turn
    def wait_for_completion(self, output_type: Any = None, *, use_tqdm: UseTqdm = True) -> list[RequestOutput]:
        """Run everything enqueued and return the outputs in the order of their request ids.

        Raises RuntimeError if a step of another call failed and ended some; the others can be waited for again.
        """
        check_use_tqdm(use_tqdm)
        check_output_type(output_type)
        return self._runner.wait(use_tqdm)

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the transformers tokenizer. The engine has a copy of its own, which changes to it do not reach."""
        return self.llm_engine.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the params that hold when sampling_params is None: vLLM's defaults with the model's own on top."""
        return self._runner.default_params()

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
        """Record what host and devices do until `stop_profile`; None takes profiler_config's value."""
        self.llm_engine.start_profile(profile_prefix, delay_iterations=delay_iterations, max_iterations=max_iterations)

    def stop_profile(self) -> None:
        """End the recording and write it to the folder of profiler_config."""
        self.llm_engine.stop_profile()

    @property
    def model_config(self) -> ModelConfig:
        """Return the settings of the model under vLLM's names: max_model_len, dtype, hf_config, get_vocab_size()."""
        return self.llm_engine.model_config

    def get_world_size(self, include_dp: bool = True) -> int:
        """Return the number of devices that run the model."""
        del include_dp  # replicas are no part of a mesh
        return self.llm_engine.vllm_config.parallel_config.world_size

    @in_turn
    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget all cached prefixes and return True; while requests run, forget nothing and return False.

        With `reset_running_requests` they are preempted first, and compute what they had anew. With `reset_connector`
        what the host keeps is forgotten too.
        """
        return self.llm_engine.reset_prefix_cache(reset_running_requests, reset_connector)

    @in_turn
    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Free the device's weights and KV cache until `wake_up`; compiled programs stay, cached prefixes go.

        At level 1 the host's memory keeps the weights, except on a CPU, where it is the device's; at level 2, and
        there, they are read from the checkpoint again. Raises VLLMValidationError, whatever the mode, while an enqueued
        request is unfinished, and for replicas or several hosts.
        """
        self.llm_engine.sleep(level, mode)

    @in_turn
    def wake_up(self, tags: list[str] | None = None) -> None:
        """Bring back the parts that `sleep` has freed: "weights", "kv_cache", or both for None. Nothing is compiled."""
        self.llm_engine.wake_up(tags)

    def is_sleeping(self) -> bool:
        """Return whether the LLM sleeps, until `wake_up` has brought back both parts."""
        return self.llm_engine.is_sleeping()

    def get_weights(self) -> Any:
        """Return the model's weights as a pytree of the arrays on the devices, without a copy.

        A trainer may begin with them and pass others of the same tree to `update_weights`. They are shared: whoever
        deletes or donates them ends the engine's steps. Raises VLLMValidationError for a core in another process.
        """
        return self.llm_engine.get_weights()

    @in_turn
    def update_weights(self, request: Any, *, version: str | int | None = None, mode: PauseMode | None = None) -> None:
        """Replace weights: all or nothing, with prefixes and other caches dropped. Adapters stay.

        `request` is a mapping of HF's names to arrays of JAX or numpy, or a pytree like that of `get_weights`, or some
        of it, or the path of a folder with a checkpoint; or vLLM's {"update_info": {"weights": ...}}, or with
        "weights_path". Arrays as the engine has them are taken over without a copy, and must be kept until the next
        update; others are brought to its dtype and devices. Arrays that an update does not name stay.

        Between `start_weight_update` and `finish_weight_update` it takes in one part, and steps read the old weights.
        `mode` decides about unfinished requests: "abort" ends them without an output, with "wait" those enqueued end
        first, with "keep" they compute what they have again and go on. Raises VLLMValidationError, before anything
        changes, for names, shapes and dtypes that do not fit, and without a mode while a request is unfinished.
        """
        self.llm_engine.update_weights(request, version=version, mode=mode, settle=self._runner.finish_enqueued)

    @in_turn
    def start_weight_update(self) -> None:
        """Begin an update in several parts; one that was begun before is dropped."""
        self.llm_engine.start_weight_update()

    @in_turn
    def start_draft_weight_update(self) -> None:
        """Begin an update of the draft model; names are those of its own checkpoint."""
        self.llm_engine.start_weight_update(of_draft=True)

    @in_turn
    def finish_weight_update(self, weight_version: str | int | None = None, *, mode: PauseMode | None = None) -> None:
        """Put the parts of an update in place, and set the weights' version if one is passed."""
        self.llm_engine.finish_weight_update(weight_version, mode=mode, settle=self._runner.finish_enqueued)

    def update_weight_version(self, new_version: str | int) -> None:
        """Set the version of the weights without new weights."""
        self.llm_engine.set_weight_version(new_version)

    def get_weight_version(self) -> str | int:
        """Return the version of the weights, "default" before one is set."""
        return self.llm_engine.get_weight_version()

    def init_weight_transfer_engine(self, request: Any) -> None:
        """Do nothing: arrays are handed over in this process. Raises VLLMValidationError for a transport's settings."""
        check_transfer(request)

    def shutdown_weight_transfer_engine(self) -> None:
        """Do nothing: there is no connection."""

    def reset_mm_cache(self) -> None:
        """Forget all processed images and videos."""
        self.llm_engine.reset_mm_cache()

    def shutdown(self) -> None:
        """Release the device; may be called twice. The LLM cannot be used afterwards.

        A call that another thread is in ends with an error after its present step. In a forked child nothing is done.
        """
        if not self._turn.home.is_here:
            return
        self._turn.check("shutdown")
        self._runner.close()
        with self._turn.take("shutdown"):
            self.llm_engine.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.shutdown()
