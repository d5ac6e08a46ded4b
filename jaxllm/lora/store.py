"""The adapters that a core holds on the host: read in the background, and kept for as long as requests need them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from jaxllm.exceptions import VLLMValidationError
from jaxllm.lora.request import LoRARequest


class AdapterStore:
    """The loaded adapters by number, for use from any thread.

    A number is never given to another adapter, so data cached under it stays valid. Unneeded adapters stay loaded, the
    least recently used ones only while there is room.
    """

    def __init__(self, load: Callable[[LoRARequest], Any], max_held: int) -> None:
        """Load adapters with `load`, which raises VLLMValidationError for a bad one.

        More than `max_held` are kept only while sequences need them.
        """
        self._load, self._max_held = load, max_held
        self._thread = ThreadPoolExecutor(1, "adapters")
        self._lock = threading.RLock()
        self._numbers: dict[int, int] = {}
        """The number of each user id, as long as it stands for the same adapter."""
        self._num_made = 0
        self._loads: OrderedDict[int, Future[Any]] = OrderedDict()
        """The arrays by number, the most recently used last."""
        self._pinned: set[int] = set()
        self._needed: dict[str, int] = {}
        """The number of the adapter that each sequence needs."""
        self._done = threading.Event()

    def ask(self, sequence_id: str, request: LoRARequest) -> None:
        """Start loading an adapter unless it is loaded, and keep it until the sequence is released."""
        with self._lock:
            self._needed[sequence_id] = self._find(request)

    def is_ready(self, sequence_id: str) -> bool:
        """Return whether a sequence's adapter is loaded, or known to be bad; True for a sequence without one."""
        number = self._needed.get(sequence_id)
        return number is None or self._loads[number].done()

    def error(self, sequence_id: str) -> BaseException | None:
        """Return the error of a ready sequence's adapter, or None."""
        number = self._needed.get(sequence_id)
        return None if number is None else self._loads[number].exception()

    def number_of(self, sequence_id: str) -> int:
        """Return the number of a sequence's adapter."""
        return self._needed[sequence_id]

    def arrays(self, number: int) -> Any:
        """Return an adapter's arrays; they stay loaded while a sequence needs them."""
        return self._loads[number].result()

    def wait(self, seconds: float) -> None:
        """Wait for an adapter to be loaded, for `seconds` at most."""
        self._done.wait(seconds)
        self._done.clear()

    def release(self, sequence_ids: Iterable[str]) -> None:
        """Note that sequences have ended; ids without adapters are ignored."""
        if not self._needed:
            return
        with self._lock:
            for sequence_id in sequence_ids:
                self._needed.pop(sequence_id, None)
            self._make_room()

    def add(self, request: LoRARequest) -> None:
        """Load an adapter, unless it is loaded, and wait for it; raise its error."""
        with self._lock:
            load = self._loads[self._find(request)]
        try:
            load.result()
        finally:
            with self._lock:
                self._make_room()

    def remove(self, adapter_id: int) -> bool:
        """Forget an id; running sequences keep its adapter. Returns False for an unknown id."""
        with self._lock:
            number = self._numbers.pop(adapter_id, None)
            self._make_room()
            return number is not None

    def pin(self, adapter_id: int) -> bool:
        """Keep an adapter until it is removed; return False for an unknown id."""
        with self._lock:
            number = self._numbers.get(adapter_id)
            if number is None or number not in self._loads:
                return False
            self._pinned.add(number)
            return True

    def ids(self) -> set[int]:
        """Return the ids of the loaded adapters."""
        with self._lock:
            return {each for each, number in self._numbers.items() if number in self._loads}

    def close(self) -> None:
        """Stop loading."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _find(self, request: LoRARequest) -> int:
        number = self._numbers.get(request.lora_int_id)
        if number is None or request.load_inplace:
            number, self._num_made = self._num_made, self._num_made + 1
            self._numbers[request.lora_int_id] = number
        if number not in self._loads:
            load = self._loads[number] = self._thread.submit(self._load, request)
            load.add_done_callback(lambda _: self._done.set())
        self._loads.move_to_end(number)
        return number

    def _make_room(self) -> None:
        """Drop unneeded adapters: bad ones, those that have no id any more, and those beyond the limit."""
        named, needed = set(self._numbers.values()), set(self._needed.values())
        self._pinned &= named
        for number in [each for each in self._loads if each not in needed]:
            load = self._loads[number]
            is_bad = load.done() and load.exception() is not None  # a later request may find it repaired
            is_spare = len(self._loads) > self._max_held and load.done() and number not in self._pinned
            if is_bad or is_spare or number not in named:
                del self._loads[number]


class HoldsAdapters:
    """The base of cores, with the calls about adapters."""

    _adapters: AdapterStore | None
    """None if there are none."""

    def add_lora(self, request: LoRARequest) -> bool:
        """Load an adapter and wait for it, from any thread. Raises VLLMValidationError for a bad one."""
        self._get_adapters().add(request)
        return True

    def remove_lora(self, adapter_id: int) -> bool:
        """Forget an adapter; running requests keep it. Returns False for an unknown id."""
        return self._get_adapters().remove(adapter_id)

    def list_loras(self) -> list[int]:
        """Return the ids of the loaded adapters."""
        return sorted(self._get_adapters().ids())

    def pin_lora(self, adapter_id: int) -> bool:
        """Keep an adapter until it is removed; return False for an unknown id."""
        return self._get_adapters().pin(adapter_id)

    def _get_adapters(self) -> AdapterStore:
        if self._adapters is None:
            raise VLLMValidationError("adapters need an engine with enable_lora=True.", parameter="enable_lora")
        return self._adapters
