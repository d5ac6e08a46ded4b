"""`EngineClient`: the methods of an asynchronous engine that servers and programs use, with vLLM's names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from jaxllm.engine.front.asleep import PauseMode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from jaxllm.inputs import PromptType
    from jaxllm.outputs import PoolingRequestOutput, RequestOutput
    from jaxllm.pooling_params import PoolingParams
    from jaxllm.resolve.vllm_config import ModelConfig, VllmConfig
    from jaxllm.sampling_params import SamplingParams


class EngineClient(ABC):
    """The base class of asynchronous engines; programs should accept it where any of them will do."""

    vllm_config: VllmConfig
    model_config: ModelConfig

    @property
    @abstractmethod
    def is_running(self) -> bool:
        """Return whether requests are taken."""

    @property
    @abstractmethod
    def is_stopped(self) -> bool:
        """Return whether the engine has ended, by `shutdown` or an error."""

    @property
    @abstractmethod
    def errored(self) -> bool:
        """Return whether an error has ended the engine."""

    @property
    @abstractmethod
    def dead_error(self) -> BaseException:
        """Return the error that requests get once the engine has ended."""

    @abstractmethod
    def generate(
        self,
        prompt: PromptType,
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
        """Run a request and yield its outputs, of the kind that its sampling parameters ask for.

        Raises VLLMValidationError for a request that cannot be run, EngineGenerateError for one that failed, and
        EngineDeadError once the engine has ended.
        """

    @abstractmethod
    def encode(
        self,
        prompt: PromptType,
        pooling_params: PoolingParams,
        request_id: str,
        lora_request: Any = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        tokenization_kwargs: dict[str, Any] | None = None,
        *,
        data_parallel_rank: int | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """Run a request of a pooling model and yield its outputs."""

    @abstractmethod
    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End a request, or several; those that have ended already are left alone."""

    @abstractmethod
    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer as an object of transformers, which may be awaited too."""

    async def is_tracing_enabled(self) -> bool:
        """Return whether requests are traced, so that `trace_headers` may be given."""
        return self.vllm_config.observability_config.otlp_traces_endpoint is not None

    @abstractmethod
    async def do_log_stats(self) -> None:
        """Log the statistics line now."""

    @abstractmethod
    async def check_health(self) -> None:
        """Raise `dead_error` if the engine has ended, or does not answer."""

    @abstractmethod
    async def start_profile(self, profile_prefix: str | None = None) -> None:
        """Begin to record what host and devices do."""

    @abstractmethod
    async def stop_profile(self) -> None:
        """End the recording."""

    @abstractmethod
    async def reset_mm_cache(self) -> None:
        """Forget processed multimodal inputs."""

    @abstractmethod
    async def reset_encoder_cache(self) -> bool:
        """Forget what encoders have computed; return False, and forget nothing, while requests need some of it."""

    @abstractmethod
    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget the KV blocks of ended requests; returns whether that was possible."""

    @abstractmethod
    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Release the device until `wake_up`."""

    @abstractmethod
    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Load again what `sleep` has released."""

    @abstractmethod
    async def is_sleeping(self) -> bool:
        """Return whether the engine sleeps."""

    @abstractmethod
    async def add_lora(self, lora_request: Any) -> bool:
        """Load an adapter for later requests."""

    @abstractmethod
    async def pause_generation(
        self, *, mode: PauseMode = "abort", wait_for_inflight_requests: bool = False, clear_cache: bool = True
    ) -> None:
        """Let new requests wait until `resume_generation`; `wait_for_inflight_requests` is the older mode="wait"."""

    @abstractmethod
    async def resume_generation(self) -> None:
        """Take requests again."""

    @abstractmethod
    async def is_paused(self) -> bool:
        """Return whether new requests wait."""

    async def get_vllm_config(self) -> VllmConfig:
        """Return the engine's settings under vLLM's names."""
        return self.vllm_config

    async def get_model_config(self) -> ModelConfig:
        """Return the settings of the model under vLLM's names."""
        return self.model_config


class TextClient(EngineClient):
    """The base class of engines for text models: methods for other inputs do nothing."""

    async def get_supported_tasks(self) -> tuple[str, ...]:
        """Return the tasks that the model supports."""
        return ("generate",)

    async def reset_mm_cache(self) -> None:
        """Do nothing: there is no cache of multimodal inputs."""

    async def reset_encoder_cache(self) -> bool:
        """Return True: no model has an encoder, so that there is nothing to forget."""
        return True
