"""Engine arguments that are groups of settings, passed as these classes, dicts or JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxllm.exceptions import VLLMValidationError
from jaxllm.params.checks import check_bool, check_int, check_str, shown

OTHER_GRAMMARS = ("xgrammar", "outlines", "lm-format-enforcer")
_MAX_REASONING_STRING = 4_096
MOST_LOADING_THREADS = 64
_NO_PARSER = "there are no reasoning parsers yet: give reasoning_config its reasoning_start_str and reasoning_end_str"


def refused(default: Any, reason: str) -> Any:
    """Declare a field of vLLM's that only takes its default."""
    return dataclasses.field(default=default, metadata={"refused": reason})


def check_refused(group: str, settings: Any) -> None:
    """Raise VLLMValidationError for a field that is declared `refused` and has another value."""
    for field in dataclasses.fields(settings):
        reason, value = field.metadata.get("refused"), getattr(settings, field.name)
        if reason is not None and (type(value) is not type(field.default) or value != field.default):
            message = f"{group}: {field.name}={shown(value)} is not supported: {reason}."
            raise VLLMValidationError(message, parameter=group, value=value)


@dataclasses.dataclass(frozen=True)
class StructuredOutputsConfig:
    """The settings of all structured outputs."""

    backend: str = "auto"
    """One of vLLM's names of backends, which all mean llguidance."""
    disable_fallback: bool = False
    """It has no effect: there is only one backend."""
    disable_any_whitespace: bool = False
    """True leaves whitespace out of all JSON, not only for the requests that ask for it."""
    disable_additional_properties: bool = False
    """With backend="guidance", True keeps objects to the properties that their JSON schema lists; see below."""
    reasoning_parser: str = ""
    reasoning_parser_plugin: str = ""
    enable_in_reasoning: bool = False
    """Whether an output is structured from its first token though there is a reasoning parser, in `LLM`."""

    def __post_init__(self) -> None:
        group = "structured_outputs_config"
        if self.backend not in ("auto", "guidance", *OTHER_GRAMMARS):
            message = f"{group}: backend={shown(self.backend)} is not supported; use 'auto' or 'guidance'."
            raise VLLMValidationError(message, parameter=group, value=self.backend)
        for name in ("disable_fallback", "disable_any_whitespace", "disable_additional_properties"):
            check_bool(f"{group}.{name}", getattr(self, name), parameter=group)
        check_bool(f"{group}.enable_in_reasoning", self.enable_in_reasoning, parameter=group)
        for name in ("reasoning_parser", "reasoning_parser_plugin"):
            _refuse_parser(group, name, getattr(self, name))

    @property
    def closes_objects(self) -> bool:
        """Return whether objects only have the properties that their JSON schema lists, unless it mentions others.

        As in vLLM, only the backend "guidance" leaves objects open by default.
        """
        return self.disable_additional_properties or self.backend != "guidance"


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """The settings of attention."""

    backend: str | None = None
    """The kernels: "xla", "cpu", "tpu", "gpu" (for Hopper) or "gpu_mma" (for NVIDIA's GPUs from Ampere on).

    None is the platform's own, or "xla" where they cannot run a model.

    A CPU runs the kernels of a TPU or GPU in their interpreters: slow, for tests.
    """

    def __post_init__(self) -> None:
        if self.backend not in (None, "xla", "cpu", "tpu", "gpu", "gpu_mma"):
            group = "attention_config"
            message = (
                f"{group}: backend={shown(self.backend)} is not supported; use 'xla', 'cpu', 'tpu', 'gpu' or 'gpu_mma'."
            )
            raise VLLMValidationError(message, parameter=group, value=self.backend)


@dataclasses.dataclass(frozen=True)
class LoaderSettings:
    """The settings of reading files of weights ahead, under vLLM's older names."""

    enable_multithread_load: bool = False
    """Whether several threads read ahead, as with safetensors_load_strategy="prefetch"."""
    num_threads: int = 8

    def __post_init__(self) -> None:
        group = "model_loader_extra_config"
        check_bool(f"{group}.enable_multithread_load", self.enable_multithread_load, parameter=group)
        check_int(f"{group}.num_threads", self.num_threads, 1, MOST_LOADING_THREADS, parameter=group)


@dataclasses.dataclass(frozen=True)
class ReasoningConfig:
    """The markers of a model's reasoning, which thinking_token_budget needs."""

    reasoning_parser: str = ""
    reasoning_start_str: str = ""
    """The text that begins the reasoning, such as "<think>"."""
    reasoning_end_str: str = ""
    """The text that ends the reasoning, such as "</think>"; a spent budget forces it."""

    def __post_init__(self) -> None:
        group = "reasoning_config"
        _refuse_parser(group, "reasoning_parser", self.reasoning_parser)
        for name in ("reasoning_start_str", "reasoning_end_str"):
            value = getattr(self, name)
            if value == "":
                message = f"{group} needs reasoning_start_str and reasoning_end_str, as '<think>' and '</think>'."
                raise VLLMValidationError(message, parameter=group, value=value)
            check_str(f"{group}.{name}", value, _MAX_REASONING_STRING, parameter=group)


def _refuse_parser(group: str, name: str, value: object) -> None:
    if value != "":
        message = f"{group}: {name}={shown(value)} is not supported: {_NO_PARSER}."
        raise VLLMValidationError(message, parameter=group, value=value)
