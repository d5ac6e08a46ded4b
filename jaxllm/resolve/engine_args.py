"""`EngineArgs`: vLLM's engine arguments, from keywords or a command line, which become an `EngineConfig`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxllm.config.arguments import EngineArguments
from jaxllm.exceptions import VLLMValidationError
from jaxllm.resolve.discovery import on_this_host
from jaxllm.resolve.engine_config import EngineConfig
from jaxllm.resolve.resolve_engine import resolve

if TYPE_CHECKING:
    from jaxllm.execution.mesh import Device
    from jaxllm.loading.checkpoint import Checkpoint


@dataclasses.dataclass
class EngineArgs(EngineArguments):
    """Each of vLLM's engine arguments works (`arguments.py`) or is refused by name (`unsupported_arguments.py`)."""

    def create_engine_config(
        self,
        usage_context: Any = None,
        headless: bool = False,
        *,
        devices: Sequence[Device] | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> EngineConfig:
        """Open the checkpoint (headers and config only) and this process's devices, and settle everything.

        `usage_context` has no effect: nothing is reported to anybody. `headless` engines, whose front end is on
        another machine, are refused. `devices` replace the devices that JAX sees; they may be a topology's.
        `checkpoint` is one that is open already.
        Raises VLLMValidationError.
        """
        del usage_context
        refuse_headless(headless)
        return resolve(on_this_host(self), devices, checkpoint)


def refuse_headless(headless: bool) -> None:
    """Raise VLLMValidationError for an engine whose front end is on another machine."""
    if headless:
        message = "headless=True is not supported yet: an engine and its front end are on one machine."
        raise VLLMValidationError(message, parameter="headless", value=headless)
