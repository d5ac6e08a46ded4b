"""The LoRA adapters of a core that runs by itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from jaxllm.lora.request import LoRARequest


class RemoteAdapters(ABC):
    """A base of remote cores."""

    @abstractmethod
    def _call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the core and wait for its answer."""

    def add_lora(self, request: LoRARequest) -> bool:
        """Load an adapter and wait for it. Raises VLLMValidationError for a bad one."""
        return self._call("add_lora", request)

    def remove_lora(self, adapter_id: int) -> bool:
        """Forget an adapter; return False for an unknown id."""
        return self._call("remove_lora", adapter_id)

    def list_loras(self) -> list[int]:
        """Return the ids of the adapters that are there."""
        return self._call("list_loras")

    def pin_lora(self, adapter_id: int) -> bool:
        """Keep an adapter until it is removed; return False for an unknown id."""
        return self._call("pin_lora", adapter_id)
