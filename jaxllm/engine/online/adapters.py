"""The LoRA adapters that an engine's core holds, for those who manage them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from jaxllm.engine.front.front_end import FrontEnd
from jaxllm.lora.request import LoRARequest
from jaxllm.params.checks import INT32_MAX, check_int


class Adapters(ABC):
    """A base of engines that load adapters ahead of requests, and forget them."""

    front: FrontEnd

    @abstractmethod
    async def _call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the core."""

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter for later requests and return True; streams go on meanwhile. Raises VLLMValidationError for
        a bad one.
        """
        return await self._call("add_lora", self.front.inputs.check_named(lora_request))

    async def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter, with which running requests go on; return False for an unknown id."""
        return await self._call("remove_lora", check_int("lora_id", lora_id, 1, INT32_MAX))

    async def list_loras(self) -> set[int]:
        """Return the ids of the adapters that are kept on the host."""
        return set(await self._call("list_loras"))

    async def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter on the host until it is removed; return False for an unknown id."""
        return await self._call("pin_lora", check_int("lora_id", lora_id, 1, INT32_MAX))
