"""Models without engines, which load when a test lets them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from jaxllm.exceptions import EngineDeadError
from jaxllm.server.models.entry import ModelEntry, State
from jaxllm.server.models.registry import ServedModels

MIB = 2**20


class StandInEngine:
    """What a registry asks of an engine."""

    def __init__(self) -> None:
        self.dead_error: BaseException = EngineDeadError("it was killed")
        self.is_stopped = False
        self.core_pids: dict[int, int] = {}
        self.cut_off_by: Exception | None = None

    async def check_health(self) -> None:
        """Raise as an engine does."""
        if self.is_stopped:
            raise self.dead_error

    def cut_off(self, error: Exception) -> None:
        """Keep the error."""
        self.cut_off_by = error


class Record:
    """What answers for a stand-in."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.engine: Any = StandInEngine()
        self.names = set(names)

    def has(self, name: str) -> bool:
        """Return whether it has the name."""
        return name in self.names


class StandInLoader:
    """Loads at once, or as long as `hold` says; counts what is loaded."""

    def __init__(self, log: list[str], wait: Callable[[], Awaitable[object]] | None = None) -> None:
        self._log, self._wait = log, wait
        self.error: Exception | None = None
        self.is_stopped = False
        self._stopping = asyncio.Event()

    async def load(self, entry: ModelEntry[Record]) -> Record:
        """Load, or raise `error`."""
        self._log.append(f"load {entry.name}")
        if self._wait is not None:
            waiting, stopping = asyncio.ensure_future(self._wait()), asyncio.ensure_future(self._stopping.wait())
            _, left = await asyncio.wait((waiting, stopping), return_when=asyncio.FIRST_COMPLETED)
            for task in left:
                task.cancel()
        if self.is_stopped:
            raise EngineDeadError("stopped")
        if self.error is not None:
            raise self.error
        return Record(entry.names)

    async def close(self, record: Record) -> None:
        """Let it leave after a turn of the loop."""
        await asyncio.sleep(0)
        self._log.append(f"close {min(record.names)}")

    def stop(self) -> None:
        """End a load."""
        self.is_stopped = True
        self._stopping.set()


class Models:
    """A registry of stand-ins."""

    def __init__(
        self,
        sizes: Mapping[str, int | None],
        *,
        max_loaded: int | None = None,
        max_mib: int | None = None,
        wait: Callable[[], Awaitable[object]] | None = None,
        max_waiting: int = 100,
    ) -> None:
        """Make a model of each size in MiB."""
        self.log: list[str] = []
        self.clock = 0.0
        self.loaders = {name: StandInLoader(self.log, wait) for name in sizes}
        entries = [
            ModelEntry(
                (name,),
                self.loaders[name],
                num_bytes=None if size is None else size * MIB,
                clock=lambda: self.clock,
                max_waiting=max_waiting,
            )
            for name, size in sizes.items()
        ]
        max_bytes = None if max_mib is None else max_mib * MIB
        self.registry: ServedModels[Record] = ServedModels(entries, max_loaded=max_loaded, max_bytes=max_bytes)

    def __getitem__(self, name: str) -> ModelEntry[Record]:
        return self.registry.find((name,))

    async def begin(self, name: str) -> Record:
        """Begin a request, as an endpoint does."""
        entry = self[name]
        record = entry.begin()
        return await entry.wait() if record is None else record

    async def ask(self, name: str) -> None:
        """Answer a request at once."""
        self.clock += 1.0
        await self.begin(name)
        self[name].end()

    @property
    def loaded(self) -> list[str]:
        """Return the models that take room."""
        return [entry.name for entry in self.registry.entries if entry.is_loaded]

    @property
    def ready(self) -> list[str]:
        """Return the models that answer."""
        return [entry.name for entry in self.registry.entries if entry.state is State.READY]

    async def settle(self) -> None:
        """Wait until no change is under way."""
        for _ in range(5):
            for entry in self.registry.entries:
                await entry.settled()
            await asyncio.sleep(0)
