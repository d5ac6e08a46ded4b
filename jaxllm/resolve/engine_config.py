"""`EngineConfig`: what resolution settles of an engine, with the user's arguments."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxllm.config.arguments import EngineArguments
from jaxllm.config.groups import StructuredOutputsConfig
from jaxllm.config.pooler import PoolerConfig
from jaxllm.exceptions import VLLMValidationError
from jaxllm.params.checks import shown
from jaxllm.resolve.pooling_settings import PoolingSettings
from jaxllm.usage.usage_lib import UsageContext

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from jaxllm.execution.kv_pool import FeatureGroup, KVGroup, StateGroup
    from jaxllm.loading.checkpoint import Checkpoint
    from jaxllm.models.adapters import AdapterShape
    from jaxllm.models.config import ModelConfig
    from jaxllm.resolve.resolve_ops import EngineOps
    from jaxllm.sampling.processors import LogitsProcessor
    from jaxllm.scheduling.config import StepTarget
    from jaxllm.speculation.drafter import SpeculationSettings
    from jaxllm.steering.vectors import SteeringVectors


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What resolution settles of an engine, with the user's arguments for everything else.

    A setting with a field of its own, such as `max_model_len`, `dtype` or `chat_template`, is settled: read the field,
    because `args` has what the user asked for, perhaps None or "auto". Some are settled under another name: `runner`
    and `convert` are `runner_type` and `convert_type`, `tensor_parallel_size` is the size of `mesh`, `kv_cache_dtype`
    and `attention_config` are in `ops`, `hf_overrides` is in `hf_config`, `override_generation_config` in
    `default_sampling_params`, and `speculative_config` is now `speculation` and `draft`. All other arguments are read
    from `args`, as in `config.args.seed`.

    It stays in the process of the core; `EngineReady` takes plain data to the front end.
    """

    args: EngineArguments
    """The user's arguments, checked: a copy, which later changes of the user's object do not reach."""
    usage_context: UsageContext
    """What the engine is for, by which limits that the user leaves open are settled."""
    checkpoint: Checkpoint
    hf_config: Mapping[str, Any]
    """The checkpoint's config.json with `hf_overrides` in place."""
    model_config: ModelConfig
    runner_type: str
    """What the engine is for: "generate" or "pooling"."""
    convert_type: str
    """The conversion of a model that generates: "none", "embed" or "classify"."""
    pooler_config: PoolerConfig | None
    """The settled settings of pooling by vLLM's names; None for an engine that only generates."""
    pooling: PoolingSettings | None
    """The settled settings of pooling in jaxllm's form; None for an engine that only generates."""
    dtype: str
    """The dtype of weights and activations: "float32", "bfloat16" or "float16"."""
    quantization: str | None
    """How weights are rounded when they are loaded: "int8", "int4" or "fp8"; None if they stay as in the
    checkpoint."""
    mesh: Mesh
    """The devices that the model is spread over."""
    platform: str
    """The kind of the devices: "cpu", "gpu" or "tpu"."""
    ops: EngineOps
    """The ops of one device, and the parameters that they multiply by."""
    max_model_len: int
    max_model_len_can_shrink: bool
    """True if the user did not set it: the engine may then lower it to what the KV cache holds."""
    max_logprobs: int
    """The most log-probabilities per position: at most the vocabulary's size."""
    logits_processors: tuple[LogitsProcessor | type, ...]
    """Functions that steps trace, and classes that run on the host."""
    batch_invariant: bool
    """True if outputs do not depend, to the bit, on what else runs."""
    structured_outputs_config: StructuredOutputsConfig
    block_size: int
    num_gpu_blocks_override: int | None
    """The number of KV blocks: the user's, or on a follower the first host's; None is as many as fit."""
    enable_prefix_caching: bool
    max_num_seqs: int
    max_num_seqs_can_shrink: bool
    """True if the engine may lower it where the sequences' recurrent states would take most of the memory."""
    max_num_batched_tokens: int
    cudagraph_capture_sizes: tuple[int, ...] | None
    """The tokens of steps that get a program, besides the largest; None: from the smallest on, doubled each time."""
    enable_chunked_prefill: bool
    step_target: StepTarget | None
    """How long steps with streams may take; None for any time."""
    async_scheduling: bool
    scheduler_cls: type | None
    speculation: SpeculationSettings | None
    """How tokens are guessed ahead; None if they are not."""
    draft: EngineConfig | None = None
    """The settings of the draft model, which runs on the same devices; None if no model guesses."""
    reads: FeatureGroup | None = None
    """The features of the other model that this one reads, if this is a draft head; None for other models."""
    max_cpu_loras: int
    hidden_layers: tuple[int, ...] = ()
    """The layers whose outputs requests may have returned, counted from 0."""
    steering: SteeringVectors | None = None
    """The vectors that requests may name; None if there are none."""
    generation_config: Mapping[str, Any]
    """The HF generation config in force; its eos_token_id ends outputs."""
    default_sampling_params: Mapping[str, Any]
    """Keywords of SamplingParams for requests without their own."""
    max_output_tokens: int | None
    """The most tokens that a request to a server may ask for; None sets no limit."""
    chat_template: str | None
    """The template's text; None is the tokenizer's own."""
    cache_dir: str

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        """Return the cache groups, each with the attention op of one device's heads."""
        return self.ops.kv_groups

    @property
    def attention_names(self) -> str:
        """Return the implementations of attention, as in "gpu/xla": XLA's where scores depend on distances."""
        by_distance = self.model_config.layers[0].relative is not None
        names = ["xla"] if by_distance else [group.attention.implementation for group in self.kv_groups]
        return "/".join(dict.fromkeys(names))

    @property
    def cross_groups(self) -> tuple[KVGroup, ...]:
        """Return the cache groups of an encoder's frames."""
        return self.ops.cross_groups

    @property
    def num_frames(self) -> int:
        """Return the frames that the encoder of an encoder-decoder makes of a clip; 0 in other models."""
        return 0 if self.ops.encoder is None else self.ops.encoder.settings.num_frames

    @property
    def alignment_heads(self) -> tuple[tuple[int, int], ...] | None:
        """Return the (layer, head) of the heads by which transcripts are aligned; None if the checkpoint names none.

        Raises VLLMValidationError for a value that is no list of pairs of numbers.
        """
        heads = None if self.ops.encoder is None else self.generation_config.get("alignment_heads")
        if heads is None:
            return None
        try:
            return tuple((operator.index(layer), operator.index(head)) for layer, head in heads)
        except (TypeError, ValueError) as error:
            message = "alignment_heads of generation_config must be a list of pairs of a layer and a head"
            raise VLLMValidationError(f"{message}, got {shown(heads)}.", parameter="generation_config") from error

    @property
    def state_groups(self) -> tuple[StateGroup, ...]:
        """Return the groups of layers with recurrent state."""
        return self.ops.state_groups

    @property
    def adapter_shape(self) -> AdapterShape | None:
        """Return the slots and rank of adapters; None if requests have no adapters."""
        from jaxllm.models.adapters import AdapterShape

        args, tasks = self.args, self.model_config.task_adapters
        num_slots, rank = (args.max_loras, args.max_lora_rank) if args.enable_lora else (0, 0)
        if tasks is not None:
            num_slots, rank = num_slots + len(tasks.names), max(rank, tasks.rank)
        return AdapterShape(num_slots, rank) if num_slots else None

    @property
    def generates(self) -> bool:
        """Return whether requests may generate."""
        return self.runner_type == "generate"
