"""`EngineReady`: the facts that a core sends to its front end when it is ready."""

from __future__ import annotations

from typing import Any

import msgspec

from jaxllm.core_messages import SchedulerStats
from jaxllm.media.items import MediaSettings
from jaxllm.resolve.pooling_settings import PoolingSettings
from jaxllm.resolve.vllm_config import VllmConfig


class EngineReady(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="ready"):
    """The settings of an engine whose core is ready for requests. It is plain data and crosses to another process."""

    vllm_config: VllmConfig
    """The settings by vLLM's names, settled: max_model_len is what the KV cache holds."""
    stats: SchedulerStats
    """The scheduler at its start."""
    generation_config: dict[str, int | list[int] | None]
    """The part of the HF generation config in force that a front end needs: eos_token_id, which ends outputs."""
    default_sampling_params: dict[str, Any]
    """Keywords of SamplingParams for requests that bring none."""
    max_output_tokens: int | None
    """The most tokens that a request to a server may ask for; None sets no limit."""
    chat_template: str | None
    """The text of a template to use instead of the tokenizer's own."""
    extra_args: dict[str, int | float]
    """The arguments that traced logits processors take, with their defaults."""
    has_logits_processors: bool
    has_validators: bool
    """True if classes among the logits processors look at the params of each request."""
    has_thinking_tokens: bool
    """True if the markers of the model's reasoning are known."""
    pooling: PoolingSettings | None = None
    """How the model pools; None if it only generates."""
    media: MediaSettings | None = None
    """How prompts refer to media; None if the model takes text only."""
    vectors: dict[str, str] = {}
    """The digests of the steering vectors that requests may name, by name, in their order."""
    num_hidden_layers: int = 0
    """The layers whose outputs requests may have returned."""
    embed_size: int = 0
    """The numbers of an embedding, where prompts may be embeddings; else 0."""
    num_weight_bytes: int = 0
    """The size of the checkpoint's tensors in bytes, as they are stored."""
    weight_type: str = ""
    """The name of what most of the weights are held as, e.g. "bfloat16", "Q4_1", "awq" or "int8"."""

    @property
    def max_model_len(self) -> int:
        """Return the length of the longest sequence, prompt and output together."""
        return self.vllm_config.model_config.max_model_len

    @property
    def vocab_size(self) -> int:
        """Return the number of token ids: the width of the logits."""
        return self.vllm_config.model_config.get_vocab_size()

    @property
    def generates(self) -> bool:
        """Return whether requests may generate."""
        return self.vllm_config.model_config.runner_type == "generate"

    @property
    def transcribes(self) -> bool:
        """Return whether requests turn speech into text, and do nothing else."""
        return self.generates and self.media is not None and self.media.clips is not None

    @property
    def takes_images(self) -> bool:
        """Return whether a prompt may have an image."""
        return self.media is not None and self.media.takes_images
