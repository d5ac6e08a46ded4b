"""How far the prompt of a request is, for those who wait for its first token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from jaxllm.engine.front.front_end import FrontEnd


class PrefillProgress(ABC):
    """A base of engines that ask their core how far a prompt is."""

    front: FrontEnd

    @abstractmethod
    async def _call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the core."""

    async def prefill_progress(self, request_id: str) -> tuple[int, int]:
        """Return how many tokens of a request's prompt are computed, and how many it has; (0, 0) if it has ended."""
        sequence_id, length = self.front.outputs.prompt_of(request_id)
        return min(length, await self._call("num_computed_tokens", sequence_id)), length
