"""`EngineArgs` are vLLM's engine arguments, made from keywords or a command line; they become an `EngineConfig`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxllm.config.arguments import EngineArguments
from jaxllm.config.engine_config import EngineConfig
from jaxllm.config.resolve import resolve

if TYPE_CHECKING:
    from jaxllm.execution.mesh import Device
    from jaxllm.loading.checkpoint import Checkpoint


@dataclasses.dataclass
class EngineArgs(EngineArguments):
    """Each of vLLM's engine arguments works (`arguments.py`) or is refused by name (`unsupported_arguments.py`)."""

    def create_engine_config(
        self, devices: Sequence[Device] | None = None, checkpoint: Checkpoint | None = None
    ) -> EngineConfig:
        """Open the checkpoint (headers and config only) and settle everything.

        `devices` stand in for those that JAX sees; they may be a topology's. `checkpoint` is one that is open already.
        Raises VLLMValidationError.
        """
        return resolve(self, devices, checkpoint)
