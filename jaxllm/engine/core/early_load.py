"""Load a model's weights while its largest step is compiled to size the pool, which takes seconds on an accelerator."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from jaxllm.execution.options import tracing


class _StoppedError(Exception):
    """There will be no engine."""


class EarlyLoad:
    """The load of a model's weights in a thread of its own, which begins at once."""

    def __init__(self, load: Callable[[Callable[[], None]], Any]) -> None:
        """Call `load` with a function that it calls before each array, and that may end it by raising."""
        self._load, self._is_stopped = load, threading.Event()
        self._params: Future[Any] | None = Future()
        # A daemon, so that Ctrl-C does not wait for all weights.
        self._thread = threading.Thread(target=self._run, args=(self._params,), name="jaxllm-load", daemon=True)
        self._thread.start()

    def result(self) -> Any:
        """Wait for the parameters and return them. Raises what the load raised, and RuntimeError if called again.

        They are not held for a second call: an engine that ends frees their memory.
        """
        params, self._params = self._params, None
        if params is None:
            raise RuntimeError("the parameters have been handed over already")
        return params.result()

    def stop(self) -> None:
        """End the load after the present array, and wait for that."""
        self._is_stopped.set()
        self._thread.join()

    def _run(self, params: Future[Any]) -> None:
        try:
            with tracing():
                params.set_result(self._load(self._check))
        except BaseException as error:  # noqa: BLE001 (the thread that waits raises it)
            params.set_exception(error)

    def _check(self) -> None:
        if self._is_stopped.is_set():
            raise _StoppedError
