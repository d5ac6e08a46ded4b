"""`EngineArgs`: vLLM's engine arguments, from keywords or a command line, which become an `EngineConfig`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxllm.config.arguments import EngineArguments
from jaxllm.exceptions import VLLMValidationError
from jaxllm.resolve.discovery import on_this_host
from jaxllm.resolve.engine_config import EngineConfig
from jaxllm.resolve.resolve_engine import resolve
from jaxllm.usage.usage_lib import UsageContext

if TYPE_CHECKING:
    from jaxllm.execution.mesh import Device
    from jaxllm.loading.checkpoint import Checkpoint


@dataclasses.dataclass
class EngineArgs(EngineArguments):
    """Each of vLLM's engine arguments works (`arguments.py`) or is refused by name (`unsupported_arguments.py`)."""

    def create_engine_config(
        self,
        usage_context: UsageContext | None = None,
        headless: bool = False,
        *,
        devices: Sequence[Device] | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> EngineConfig:
        """Open the checkpoint (headers and config only) and this process's devices, and settle everything.

        `usage_context` is what the engine is for: LLM_CLASS if it is left out. `headless` engines, whose front end is
        on another machine, are refused. `devices` replace the devices that JAX sees; they may be a topology's.
        `checkpoint` is one that is open already.
        Raises VLLMValidationError.
        """
        refuse_headless(headless)
        usage_context = UsageContext.LLM_CLASS if usage_context is None else UsageContext(usage_context)
        return resolve(on_this_host(self), devices, checkpoint, usage_context=usage_context)


def refuse_headless(headless: bool) -> None:
    """Raise VLLMValidationError for an engine whose front end is on another machine."""
    if headless:
        message = "headless=True is not supported yet: an engine and its front end are on one machine."
        raise VLLMValidationError(message, parameter="headless", value=headless)
