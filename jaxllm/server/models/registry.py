"""All models of a server, and which of them are loaded: within a number and a memory, as requests ask for them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Iterator, Sequence

from jaxllm.exceptions import EngineBusyError, EngineDeadError
from jaxllm.server.http.errors import unknown_model
from jaxllm.server.models.entry import ModelEntry, Served, State
from jaxllm.server.models.size import resident_bytes

_WATCH_SECONDS = 0.25


class ServedModels[R: Served]:
    """The models of a server by their names. For one event loop.

    A model that requests wait for is loaded once there is room. For that idle models go to sleep, the least recently
    used first; if there are none, one that answers requests takes no more of them and sleeps after its last one, so
    that no model is kept from loading for ever. No request is cut off for another model. Models are loaded in the
    order in which requests have asked for them.
    """

    def __init__(
        self, entries: Iterable[ModelEntry[R]], *, max_loaded: int | None = None, max_bytes: int | None = None
    ) -> None:
        """Load at most `max_loaded` models of `max_bytes` of memory at a time; None is no limit."""
        self.entries = tuple(entries)
        self.max_loaded, self.max_bytes = max_loaded, max_bytes
        self._by_name = {name: each for each in self.entries for name in (*each.names, *each.adapters)}
        self.only: ModelEntry[R] | None = None
        """The model of a server that has no others: it is always loaded, and answers whatever name a request has."""
        self._is_closed = self._is_planning = False
        self._num_turns = 0
        for entry in self.entries:
            entry.join(self)

    @classmethod
    def single(cls, entry: ModelEntry[R]) -> ServedModels[R]:
        """Return the models of a server with a single one, which is loaded."""
        models = cls(())
        models.entries, models.only = (entry,), entry
        return models

    def find(self, names: Sequence[str]) -> ModelEntry[R]:
        """Return the model of the first known name. Raises RequestFailedError, 404, if none is known."""
        if self.only is not None:
            return self.only
        for name in names:
            if (entry := self._by_name.get(name)) is not None:
                return entry
            for loaded, record in self.records():
                if record.has(name):
                    return loaded
        raise unknown_model(names[0], [each.name for each in self.entries])

    def records(self) -> Iterator[tuple[ModelEntry[R], R]]:
        """Yield the models that have been loaded, with what answers their requests."""
        for entry in self.entries:
            if entry.record is not None:
                yield entry, entry.record

    def check_room(self) -> None:
        """Raise EngineBusyError where a request would find no room, whatever model it is for."""
        if self.only is not None:
            self.only.engine.admission.check_room()

    async def check_health(self) -> None:
        """Raise the reason why no request can be answered: the only engine sleeps, hangs or has ended, or all models
        have failed.
        """
        if self.only is not None:
            await self.only.engine.check_health()
        elif all(each.state is State.FAILED for each in self.entries):
            raise EngineBusyError(
                f"No model can be loaded. The model `{self.entries[0].name}`: {self.entries[0].error}"
            )

    def check_alive(self) -> None:
        """Raise EngineDeadError once the only engine has ended."""
        if self.only is not None and self.only.engine.is_stopped:
            raise EngineDeadError("The engine has ended.")

    def cut_off(self, error: Exception) -> None:
        """End all requests, those that wait too: their clients get the error."""
        self._is_closed = True
        for entry in self.entries:
            entry.refuse(error)
            if entry.record is not None:
                entry.record.engine.cut_off(error)

    async def watch(self) -> None:
        """Notice engines that have ended: for ever, or until the only one has.

        Before the first request nothing else reads a core's messages, which report its end and its metrics.
        """
        while self.only is None or not self.only.engine.is_stopped:
            for entry, record in list(self.records()):
                if entry.state is not State.READY:
                    continue
                with contextlib.suppress(EngineDeadError, EngineBusyError):  # it has ended, or sleeps
                    await record.engine.check_health()
                if self.max_bytes is not None:
                    entry.on_measured(resident_bytes(record.engine.core_pids.values()))
                if self.only is None and entry.state is State.READY and record.engine.is_stopped:
                    entry.on_dead(record.engine.dead_error)
                    self.plan()
            if self.max_bytes is not None:
                self.plan()
            await asyncio.sleep(_WATCH_SECONDS)

    async def close(self) -> None:
        """End all engines, also those that start. The only engine belongs to its maker."""
        self._is_closed = True
        if self.only is None:
            await asyncio.gather(*(each.close() for each in self.entries))

    def next_turn(self) -> int:
        """Return the place of a model that a request begins to wait for, behind all others."""
        self._num_turns += 1
        return self._num_turns

    def plan(self) -> None:
        """Load what requests wait for where there is room, and make room for the first that has none."""
        if self._is_closed or self._is_planning:
            return
        self._is_planning = True
        try:
            draining = self._plan()
        finally:
            self._is_planning = False
        for entry in self.entries:
            entry.is_draining = entry in draining
            if entry.state is State.READY and not entry.is_draining and entry.num_waiting:
                entry.admit()

    def _plan(self) -> set[ModelEntry[R]]:
        """Begin loads and leaves; return the models that are to take no new requests."""
        self._leave_if_too_large()
        while wanted := [each for each in self.entries if each.is_wanted]:
            first = min(wanted, key=lambda model: model.turn)
            loaded = [each for each in self.entries if each.is_loaded]
            if first.state is State.LEAVING:
                return set()
            if self._fits(first, loaded):
                first.load()
                continue
            staying = [each for each in loaded if each.state is not State.LEAVING]
            draining = set()
            for victim in self._victims(first, staying):
                if victim.num_running:
                    draining.add(victim)
                else:
                    victim.leave()
            return draining
        return set()

    def _leave_if_too_large(self) -> None:
        """Let an idle model leave if the loaded ones have come to take more than they may, and it is not alone."""
        others = [each for each in self.entries if each.is_loaded and each.state is not State.LEAVING]
        if self.max_bytes is None or len(others) < 2 or sum(each.num_bytes or 0 for each in others) <= self.max_bytes:
            return
        idle = [each for each in others if each.state is State.READY and not each.num_running]
        if idle:
            min(idle, key=lambda model: model.last_used).leave()

    def _victims(self, first: ModelEntry[R], staying: list[ModelEntry[R]]) -> list[ModelEntry[R]]:
        """Return the models that have to leave for another besides those that do; none if that would not be enough."""
        victims: list[ModelEntry[R]] = []
        ready = [each for each in staying if each.state is State.READY]
        candidates = iter(sorted(ready, key=lambda model: (model.num_running > 0, model.last_used)))
        while not self._fits(first, staying):
            victim = next(candidates, None)
            if victim is None:  # the others are being loaded
                return []
            victims.append(victim)
            staying.remove(victim)
        for victim in victims[:-1]:
            if self._fits(first, [*staying, victim]):  # a larger one makes enough room
                staying.append(victim)
                victims.remove(victim)
        return victims

    def _fits(self, entry: ModelEntry[R], others: Sequence[ModelEntry[R]]) -> bool:
        """Return whether a model can be loaded beside others. One of unknown size is loaded alone, if memory counts."""
        if self.max_loaded is not None and len(others) >= self.max_loaded:
            return False
        if self.max_bytes is None or not others:
            return True
        sizes = [each.num_bytes for each in (entry, *others)]
        return None not in sizes and sum(each or 0 for each in sizes) <= self.max_bytes
