"""The front half of an engine: it turns text into requests, and the core's outputs into text."""

from __future__ import annotations

import contextlib
from functools import cached_property
from typing import TYPE_CHECKING, Any

from jaxllm.engine.front.front_metrics import FrontMetrics
from jaxllm.engine.front.input_processor import InputProcessor
from jaxllm.engine.front.output_processor import OutputProcessor
from jaxllm.engine.front.params_resolver import CheckInCore, InputLimits
from jaxllm.engine.transport.engine_ready import EngineReady
from jaxllm.exceptions import VLLMValidationError
from jaxllm.params.checks import shown
from jaxllm.text.chat import ChatRenderer
from jaxllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxllm.constraints.compiler import GrammarCompiler
    from jaxllm.engine.front.tracing import RequestTracer
    from jaxllm.resolve.vllm_config import VllmConfig


class FrontEnd:
    """The parts that the synchronous and the asynchronous engine share: all but the client of the core."""

    def __init__(self, ready: EngineReady, tokenizer: Tokenizer | None, check_in_core: CheckInCore | None) -> None:
        """Ask the core through `check_in_core` whether it would refuse a request; if None, it refuses on arrival."""
        self.ready = ready
        self.tokenizer = tokenizer
        config = ready.vllm_config
        self.metrics = FrontMetrics(ready)
        self.inputs = InputProcessor(
            tokenizer,
            InputLimits.of(ready),
            ready.generation_config,
            config.model_config.seed,
            check_in_core,
            ready.pooling,
            ready.media,
        )
        self.metrics.media_counts = lambda: self.inputs.media_counts
        self.tracer = _make_tracer(config)
        self.outputs = OutputProcessor(tokenizer, self.metrics, self.tracer, _cached_block_size(config))
        if config.lora_config is not None:
            self.metrics.watch_adapters(config.lora_config.max_loras, self.outputs.adapters)

    def close(self) -> None:
        """Send the spans that have not been sent; waits some seconds for a collector that does not take them.

        No more media are fetched.
        """
        self.inputs.close()
        if self.tracer is not None:
            self.tracer.close()

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        """Return the tasks that the model supports."""
        pools = self.ready.pooling.tasks if self.ready.pooling else ()
        generates = ("transcription",) if self.ready.transcribes else ("generate",)
        return (generates if self.ready.generates else ()) + tuple(pools)

    def require_tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Raises VLLMValidationError without one."""
        if self.tokenizer is None:
            message = "there is no tokenizer: the engine was made with `skip_tokenizer_init=True`."
            raise VLLMValidationError(message, parameter="skip_tokenizer_init", value=True)
        return self.tokenizer

    @cached_property
    def chat_renderer(self) -> ChatRenderer:
        """Return the renderer of conversations as prompts. Raises VLLMValidationError without a tokenizer."""
        return ChatRenderer(self.require_tokenizer(), self.ready.chat_template, self.ready.media)

    @cached_property
    def grammars(self) -> GrammarCompiler | None:
        """Return a compiler of grammars for beam searches, which the front end follows; None without a tokenizer."""
        if self.tokenizer is None:
            return None
        from jaxllm.constraints.compiler import make_grammar_compiler  # which loads numpy

        return make_grammar_compiler(self.tokenizer, self.ready.vocab_size, self.ready.generation_config)


def _cached_block_size(config: VllmConfig) -> int | None:
    cache = config.cache_config
    return cache.block_size if cache.enable_prefix_caching else None


def _make_tracer(config: VllmConfig) -> RequestTracer | None:
    endpoint = config.observability_config.otlp_traces_endpoint
    if endpoint is None:
        return None
    from jaxllm.engine.front.tracing import RequestTracer  # which loads opentelemetry

    return RequestTracer(endpoint, config.model_config.served_model_name)


def refuse_given(**arguments: Any) -> None:
    """Refuse vLLM's arguments that this engine does not support unless they are None, or a list of None."""
    for name, value in arguments.items():
        if value is None or (isinstance(value, (list, tuple)) and all(each is None for each in value)):
            continue
        raise VLLMValidationError(f"{name} is not supported yet; leave it at None.", parameter=name, value=value)


def checked_ids(name: str, ids_or_id: Any) -> list[str]:
    """Return one request id or several as a list. Raises VLLMValidationError, naming the argument, for others."""
    ids: list[Any] = [ids_or_id]
    if not isinstance(ids_or_id, str):
        with contextlib.suppress(TypeError):  # NumPy's scalars claim to be iterable
            ids = list(ids_or_id)
    for request_id in ids:
        if not isinstance(request_id, str):
            message = f"{name} must be a string or strings, got {shown(request_id)} ({type(request_id).__name__})."
            raise VLLMValidationError(message, parameter=name, value=request_id)
    return ids
