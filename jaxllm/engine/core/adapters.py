"""The adapters that a core holds on the host: read in the background, kept for as long as requests need them and room
is left after that.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from jaxllm.lora.request import LoRARequest
from jaxllm.messages import RequestError


class AdapterStore:
    """Adapters by a number that is never given to another one, so that what was cached with it stays right."""

    def __init__(self, load: Callable[[LoRARequest], Any], max_held: int) -> None:
        """Load with `load`, which raises VLLMValidationError for a bad adapter; hold `max_held` that nobody needs or
        fewer.
        """
        self._load, self._max_held = load, max_held
        self._thread = ThreadPoolExecutor(1, "adapters")
        self._numbers: dict[int, int] = {}
        """The number of each user's id, as long as it stands for the same adapter."""
        self._loads: OrderedDict[int, Future[Any]] = OrderedDict()
        """The arrays by number, the one used last at the end."""
        self._pinned: set[int] = set()
        self._needed: dict[str, int] = {}
        """The number of the adapter that each sequence needs."""
        self._num_made = 0
        self._done = threading.Event()

    def ask(self, sequence_id: str, request: LoRARequest) -> int:
        """Begin to load an adapter unless it is there, and keep it until the sequence is released; return its
        number.
        """
        number = self._needed[sequence_id] = self._find(request)
        return number

    def add(self, request: LoRARequest) -> None:
        """Load an adapter, if it is not there, and wait for it; raise what is wrong with it."""
        number = self._find(request)
        try:
            self._loads[number].result()
        except BaseException:
            self._drop(number)
            raise
        self._make_room()

    def remove(self, adapter_id: int) -> int | None:
        """Forget an id, and return the number of its adapter; requests that have it go on. None if it is unknown."""
        number = self._numbers.pop(adapter_id, None)
        if number is not None:
            self._pinned.discard(number)
            self._drop(number)
        return number

    def pin(self, adapter_id: int) -> bool:
        """Keep an adapter until it is removed; return False if the id is unknown."""
        number = self._numbers.get(adapter_id)
        if number is None or number not in self._loads:
            return False
        self._pinned.add(number)
        return True

    def ids(self) -> set[int]:
        """Return the ids of the adapters that are held."""
        return {each for each, number in self._numbers.items() if number in self._loads}

    def is_ready(self, sequence_id: str) -> bool:
        """Say whether a sequence's adapter is there, or known to be bad; True for one that needs none."""
        number = self._needed.get(sequence_id)
        return number is None or self._loads[number].done()

    def error(self, sequence_id: str) -> RequestError | None:
        """Return what is wrong with the adapter of a sequence that is ready."""
        number = self._needed.get(sequence_id)
        error = None if number is None else self._loads[number].exception()
        return None if error is None else RequestError.of(error)

    def number_of(self, sequence_id: str) -> int | None:
        """Return the number of a sequence's adapter."""
        return self._needed.get(sequence_id)

    def arrays(self, number: int) -> Any:
        """Return an adapter's arrays, which are there while a sequence needs it."""
        return self._loads[number].result()

    def wait(self, seconds: float) -> None:
        """Wait for an adapter to be loaded, at most so long."""
        self._done.wait(seconds)
        self._done.clear()

    def release(self, sequence_ids: Iterable[str]) -> None:
        """Note that sequences have ended; ids without adapters are ignored."""
        if not self._needed:
            return
        numbers = {number for each in sequence_ids if (number := self._needed.pop(each, None)) is not None}
        for number in numbers:
            load = self._loads.get(number)
            if load is not None and load.done() and load.exception() is not None:
                self._drop(number)  # a later request may find it mended
            elif number not in self._numbers.values():
                self._drop(number)
        self._make_room()

    def close(self) -> None:
        """Load nothing further."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _find(self, request: LoRARequest) -> int:
        number = self._numbers.get(request.lora_int_id)
        if number is None or request.load_inplace:
            if number is not None:
                self.remove(request.lora_int_id)
            number = self._num_made
            self._num_made += 1
            self._numbers[request.lora_int_id] = number
        if number not in self._loads:
            load = self._loads[number] = self._thread.submit(self._load, request)
            load.add_done_callback(lambda _: self._done.set())
        self._loads.move_to_end(number)
        return number

    def _drop(self, number: int) -> None:
        """Let go of an adapter, unless a sequence needs it."""
        if number not in self._needed.values():
            self._loads.pop(number, None)

    def _make_room(self) -> None:
        needed = Counter(self._needed.values())
        spare = [number for number in self._loads if number not in needed and number not in self._pinned]
        for number in spare[: max(0, len(self._loads) - self._max_held)]:
            del self._loads[number]
