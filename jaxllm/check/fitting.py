"""Decide whether an engine fits on described devices, by its own sizing; find changes that make it fit by trying."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxllm.check import compilers
from jaxllm.check.report import Change
from jaxllm.exceptions import VLLMValidationError
from jaxllm.execution.mesh import most_expert_shards, refusal
from jaxllm.models.model import Model
from jaxllm.models.params import ParamSpec
from jaxllm.resolve.kv_cache_size import EngineSize, longest_context, size_engine
from jaxllm.resolve.model import checked_draft, make_model
from jaxllm.sampling.processors import on_host
from jaxllm.usage.usage_lib import UsageContext

if TYPE_CHECKING:
    from jaxllm.loading.checkpoint import Checkpoint
    from jaxllm.resolve.engine_args import EngineArgs
    from jaxllm.resolve.engine_config import EngineConfig
    from jaxllm.resolve.hardware import Hardware

logger = logging.getLogger(__name__)

UTILIZATION = 0.95
"""The largest gpu_memory_utilization that is proposed."""
_FEW_TOKENS = 512
"""The fewest tokens of a step that are proposed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """An engine on some devices: its size, and the reason why it does not fit."""

    size: EngineSize
    model: Model
    specs: Mapping[str, ParamSpec]
    num_blocks: int
    """The number of KV blocks; 0 if the engine does not fit."""
    reason: str | None
    """The reason why it does not fit, or None."""
    draft: Model | None = None
    """The draft model, if there is one."""

    @property
    def config(self) -> EngineConfig:
        return self.size.config

    @property
    def step_specs(self) -> dict[str, ParamSpec]:
        """Return the specs of the parameters that steps read: all but the towers'."""
        return {path: spec for path, spec in self.specs.items() if path not in self.tower_specs}

    @property
    def tower_specs(self) -> dict[str, ParamSpec]:
        """Return the specs of the parameters of towers, or of an encoder; none in a model of text alone."""
        return {path: spec for path, spec in self.specs.items() if self.model.specs.is_of_encoder(path)}


def fit(args: EngineArgs, checkpoint: Checkpoint, hardware: Hardware, devices: Sequence[Any]) -> Fit:
    """Size a server's engine as its start does. Raises VLLMValidationError for arguments that can never run."""
    config = args.create_engine_config(UsageContext.OPENAI_API_SERVER, devices=devices, checkpoint=checkpoint)
    if classes := on_host(config.logits_processors):
        message = f"logits_processors: {classes[0].__name__} runs on the host, and check compiles for devices alone"
        raise VLLMValidationError(f"{message}; leave it out.", parameter="logits_processors", value=classes[0])
    model = make_model(config)
    specs = model.specs.all_param_specs(checkpoint.tensors)
    draft, reason = None, None
    try:
        draft = None if config.draft is None else checked_draft(config, config.draft, specs)
    except VLLMValidationError as error:
        reason = str(error)
    size = size_engine(config, model, specs, hardware.memory_limit(config.args.gpu_memory_utilization), draft=draft)
    reason = reason or _reason(size, hardware)
    return Fit(
        size=size,
        model=model,
        specs=specs,
        num_blocks=0 if reason else size.num_blocks,
        reason=reason,
        draft=None if draft is None else draft[0],
    )


def _reason(size: EngineSize, hardware: Hardware) -> str | None:
    """Return the reason why an engine does not fit, or None."""
    if isinstance(size.refusal, RuntimeError):
        return out_of_memory(size.refusal)
    if size.refusal is not None:
        return str(size.refusal)
    memory = size.memory
    if memory is not None and memory.used + memory.layout.bytes(size.num_blocks) > hardware.usable_bytes:
        return f"{size.num_blocks} KV blocks are more than there is memory for."  # the user's own number of them
    return None


def out_of_memory(error: RuntimeError) -> str:
    """Return the compiler's message for a program that is too large for the device's memory; raise any other error."""
    message = str(error)
    if "RESOURCE_EXHAUSTED" not in message or "hbm" not in message.lower():
        raise error
    return message.splitlines()[0]


def find_changes(
    args: EngineArgs, failed: Fit, checkpoint: Checkpoint, hardware: Hardware, topology: str
) -> list[Change]:
    """Return the changes that make an engine fit, the smallest first, each tried with the engine's own sizing."""
    changes = []
    for settings in _settings(args, failed):
        changes += _try(args, settings, topology, checkpoint, hardware)
    for settings, name in _more_devices(args, failed, hardware, topology):
        if changes and name != topology:
            break  # other hardware is no small change
        change = _try(args, settings, name, checkpoint, hardware)
        changes += change
        if change:
            break
    if failed.config.quantization is None:  # last, as it changes the model
        changes += _try(args, {"quantization": "int8"}, topology, checkpoint, hardware)
    return changes


def _try(
    args: EngineArgs, settings: Mapping[str, Any], topology: str, checkpoint: Checkpoint, hardware: Hardware
) -> list[Change]:
    """Return the change if it makes the engine fit."""
    logger.info("trying %s", ", ".join(f"{name}={value}" for name, value in settings.items()))
    changed = dataclasses.replace(args, **{name: value for name, value in settings.items() if name != "topology"})
    devices = compilers.describe_devices(hardware, topology, hardware.topologies()[topology])
    try:
        result = fit(changed, checkpoint, hardware, devices)
    except VLLMValidationError:  # for example, a kernel that does not support the dtype
        return []
    if result.reason is not None:
        return []
    return [Change(settings=dict(settings), num_blocks=result.num_blocks, max_model_len=result.config.max_model_len)]


def _settings(args: EngineArgs, failed: Fit) -> Iterator[dict[str, Any]]:
    """Yield changes of settings alone."""
    config, memory = failed.config, failed.size.memory
    if memory is not None and not config.max_model_len_can_shrink and longest_context(config, memory) > 0:
        yield {"max_model_len": longest_context(config, memory)}
    if args.kv_cache_dtype == "auto":
        yield {"kv_cache_dtype": "fp8"}
    if config.args.gpu_memory_utilization < UTILIZATION:
        yield {"gpu_memory_utilization": UTILIZATION}
    if config.max_num_batched_tokens > _FEW_TOKENS:
        yield {"max_num_batched_tokens": _FEW_TOKENS, "max_num_seqs": min(config.max_num_seqs, _FEW_TOKENS)}


def _more_devices(
    args: EngineArgs, failed: Fit, hardware: Hardware, topology: str
) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield settings and topology for more devices: of the same topology, then of larger ones, the fewest first."""
    most, model_config = 0, failed.config.model_config
    for name, num_devices in hardware.topologies().items():
        if num_devices < hardware.topologies()[topology] or (num_devices <= most and name != topology):
            continue
        for count in range(max(most, args.tensor_parallel_size) + 1, num_devices + 1):
            shards = most_expert_shards(model_config, count) if args.enable_expert_parallel else 1
            if refusal(model_config, count, shards) is None:
                larger = {} if name == topology else {"topology": name}
                yield larger | {"tensor_parallel_size": count}, name
        most = num_devices
