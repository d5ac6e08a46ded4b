"""The calls of asynchronous engines about new weights."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from typing import Any

from jaxllm.engine.front.asleep import PauseMode
from jaxllm.engine.front.front_end import FrontEnd
from jaxllm.engine.front.new_weights import (
    check_transfer,
    check_update_mode,
    check_version,
    read_weights,
    refuse_replicas,
)
from jaxllm.engine.online.engine_client import TextClient
from jaxllm.engine.online.gate import Gate
from jaxllm.engine.online.held_core import HeldCore
from jaxllm.engine.transport.handed import HANDOVER
from jaxllm.exceptions import EngineDeadError, VLLMValidationError


class TakesWeights(TextClient):
    """The base of asynchronous engines whose weights can be replaced while they run."""

    front: FrontEnd
    _gate: Gate
    _held: HeldCore

    @abstractmethod
    def num_unfinished(self) -> int:
        """Return the number of this engine's requests that have not ended."""

    async def start_weight_update(self) -> None:
        """Begin an update in several parts; one that was begun before is dropped."""
        await self._start_update(of_draft=False)

    async def start_draft_weight_update(self) -> None:
        """Begin an update of the draft model; names are those of its own checkpoint."""
        await self._start_update(of_draft=True)

    async def update_weights(
        self, request: Any, *, version: str | int | None = None, mode: PauseMode | None = None
    ) -> None:
        """Replace weights as `LLM.update_weights` does; requests go on while the new ones are read and checked.

        Arrays reach a core in a thread alone, which disable_frontend_multiprocessing=True starts; others take the path
        of a folder. `mode` decides about requests that run once the new weights are there: "abort" ends them, with
        "wait" they end first, with "keep" they compute what they have again and go on. None needs that none runs, or
        that `pause_generation` was called before.

        Between `start_weight_update` and `finish_weight_update` it takes in one part.
        """
        weights = read_weights(request, takes_arrays=self._held.core.remote.shares_memory)
        if await self._call_weights("is_updating_weights"):
            if version is not None or mode is not None:
                message = "version and mode are finish_weight_update()'s, once start_weight_update() was called."
                raise VLLMValidationError(message, parameter="version")
            await self._add_weights(weights)
            return
        self._check_finish(version, mode)
        await self._start_update(of_draft=False)
        try:
            await self._add_weights(weights)
            await self.finish_weight_update(version, mode=mode)
        except BaseException:
            with contextlib.suppress(EngineDeadError):
                remote = self._held.core.remote
                remote.drop_reply(remote.begin_call("drop_weight_update"))
            raise

    async def finish_weight_update(
        self, weight_version: str | int | None = None, *, mode: PauseMode | None = None
    ) -> None:
        """Put the parts of an update in place, and set the weights' version if one is passed; see `update_weights`."""
        self._check_finish(weight_version, mode)
        resumes = mode in ("abort", "wait") and self._gate.unpaused.is_set
        if mode in ("abort", "wait"):
            await self.pause_generation(mode=mode, clear_cache=False)
        try:
            await self._call_weights("finish_weight_update", weight_version)
        finally:
            if resumes:
                await self.resume_generation()
        self.front.metrics.forget_hits()

    async def update_weight_version(self, new_version: str | int) -> None:
        """Set the version of the weights without new weights."""
        await self._call_weights("set_weight_version", check_version(new_version))

    async def get_weight_version(self) -> str | int:
        """Return the version of the weights, "default" before one is set."""
        return await self._call_weights("get_weight_version")

    async def init_weight_transfer_engine(self, request: Any) -> None:
        """Do nothing: there is no transport. Raises VLLMValidationError for the settings of one."""
        check_transfer(request)

    async def shutdown_weight_transfer_engine(self) -> None:
        """Do nothing: there is no connection."""

    async def _start_update(self, *, of_draft: bool) -> None:
        refuse_replicas(self.vllm_config.parallel_config.data_parallel_size)
        await self._call_weights("start_weight_update", of_draft)

    async def _add_weights(self, weights: Any) -> None:
        if isinstance(weights, str):
            await self._call_weights("update_weights", weights)
            return
        with HANDOVER.hand(weights) as number:
            await self._call_weights("update_weights", number)

    def _check_finish(self, version: str | int | None, mode: PauseMode | None) -> None:
        """Raise VLLMValidationError for a bad version or mode, and for requests that no mode decides about."""
        if version is not None:
            check_version(version)
        check_update_mode(mode)
        if mode is None and self._gate.unpaused.is_set and (count := self.num_unfinished()):
            message = (
                f"{count} requests are unfinished: call pause_generation() first, or pass mode='abort', 'wait' or "
            )
            raise VLLMValidationError(message + "'keep', with which they go on.", parameter="mode")

    async def _call_weights(self, method: str, *arguments: Any) -> Any:
        """Call the core, whose weights must be awake; its caches may sleep."""
        if "weights" in self._gate.asleep.parts:
            self._gate.asleep.check_awake()
        self._held.home.check()
        return await self._held.core.call(method, *arguments)
