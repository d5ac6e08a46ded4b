"""Sleeping engines: where one sleeps, whether it may sleep and may be woken, and what it refuses meanwhile."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from jaxllm.config.environment import gives_gpu_memory_back
from jaxllm.engine.transport.core_client import SLEEPING_PARTS
from jaxllm.exceptions import EngineBusyError, VLLMValidationError
from jaxllm.params.checks import shown

type PauseMode = Literal["abort", "wait", "keep"]
"""What becomes of running requests at a pause: they end at once, end by themselves, or go on afterwards."""

ASLEEP = "The engine sleeps: call wake_up() first."


class Asleep:
    """The parts of an engine that sleep, and at which level, as its front end knows."""

    def __init__(self) -> None:
        self.level = 0
        """0 if the whole engine is awake."""
        self.parts: frozenset[str] = frozenset()

    def begin(self, level: int, parts: Iterable[str] = SLEEPING_PARTS) -> None:
        """Note that some parts sleep."""
        self.level, self.parts = level, frozenset(parts)

    def end(self, parts: Iterable[str] = SLEEPING_PARTS) -> None:
        """Note that some parts are awake."""
        self.parts -= set(parts)
        if not self.parts:
            self.level = 0

    def check_awake(self) -> None:
        """Raise EngineBusyError while a part sleeps."""
        if len(self.parts) == 1:
            [part] = self.parts
            raise EngineBusyError(f"The engine sleeps: call wake_up() first, {part!r} is not awake yet.")
        if self.parts:
            raise EngineBusyError(ASLEEP)


def sleeps_in_place(platform: str) -> bool:
    """Return whether a core of its own process sleeps there. One that holds an accelerator ends instead: JAX keeps the
    memory of a GPU for its process, unless its allocator is the platform's, and a process keeps its TPU.
    """
    return platform == "cpu" or (platform == "gpu" and gives_gpu_memory_back())


def check_level(level: int, num_hosts: int) -> None:
    """Raise VLLMValidationError for an unknown level of sleep, or a model over several hosts."""
    if num_hosts > 1:
        message = f"an engine over {num_hosts} hosts cannot sleep: the others could not be woken. Shut it down."
        raise VLLMValidationError(message, parameter="nnodes", value=num_hosts)
    if level not in (1, 2):
        message = f"level must be 1 or 2, got {shown(level)}: both release weights and KV cache."
        raise VLLMValidationError(message, parameter="level", value=level)


def check_mode(mode: str) -> None:
    """Raise VLLMValidationError for an unknown mode of falling asleep."""
    if mode not in ("abort", "wait"):
        message = f"mode must be 'abort' or 'wait', got {shown(mode)}: requests cannot be kept."
        raise VLLMValidationError(message, parameter="mode", value=mode)


def check_pause_mode(mode: str) -> None:
    """Raise VLLMValidationError for an unknown mode of pausing."""
    if mode not in ("abort", "wait", "keep"):
        message = f"mode must be 'abort', 'wait' or 'keep', got {shown(mode)}."
        raise VLLMValidationError(message, parameter="mode", value=mode)


def check_tags(tags: Any) -> list[str]:
    """Return the parts to wake, all for None. Raises VLLMValidationError for unknown ones."""
    if tags is None:
        return list(SLEEPING_PARTS)
    if not isinstance(tags, (list, tuple)) or not all(tag in SLEEPING_PARTS for tag in tags):
        message = f"tags must be None or a list of {' and '.join(map(repr, SLEEPING_PARTS))}, got {shown(tags)}."
        raise VLLMValidationError(message, parameter="tags", value=tags)
    return list(tags)
