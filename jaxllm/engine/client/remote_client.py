"""What an event loop, or a start, needs of cores that run by themselves: one, or several that are replicas."""

from __future__ import annotations

from typing import Any, Protocol

from jaxllm.core_messages import EngineCoreOutputs
from jaxllm.engine.transport.core_client import CoreClient
from jaxllm.engine.transport.engine_ready import EngineReady
from jaxllm.engine.transport.wire import Reply
from jaxllm.exceptions import EngineDeadError
from jaxllm.text.tokenizer_parts import TokenizerParts


class RemoteClient(CoreClient, Protocol):
    """A client whose messages come by themselves: `RemoteCore`, or `ReplicatedCore`. For one thread."""

    is_closed: bool
    """True once `shutdown` or `begin_shutdown` was called."""

    @property
    def fds(self) -> list[int]:
        """Return the file descriptors that tell of messages, once, and of ends."""
        ...

    @property
    def has_ended(self) -> bool:
        """Say whether a process or thread has ended that `look` has not seen yet."""
        ...

    @property
    def process_ids(self) -> dict[int, int]:
        """Return the ids of the processes that run by their replicas' numbers; a core alone is replica 0."""
        ...

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Return a new error that says what has ended it; None while it runs."""
        ...

    def raise_if_dead(self) -> None:
        """Raise EngineDeadError if it has ended."""
        ...

    def wait_tokenizer(self) -> TokenizerParts | None:
        """Wait for the tokenizer and return it, None without one. Raises as `wait_ready` does."""
        ...

    def wait_ready(self) -> EngineReady:
        """Wait until requests can be sent. Raises VLLMValidationError for arguments that a core refuses,
        EngineDeadError if it ends otherwise.
        """
        ...

    def receive(self) -> bool:
        """Take in one message; return False if none has come. Raises EngineDeadError if it has ended."""
        ...

    def look(self) -> None:
        """Take in what has come, and see whether it has ended or hangs. Raises EngineDeadError then."""
        ...

    def take_outputs(self) -> EngineCoreOutputs | None:
        """Return the oldest outcome of a step that has come and not been taken; None if there is none.

        Raises FrameError for one that cannot be read.
        """
        ...

    def begin_call(self, method: str, *arguments: Any) -> int:
        """Call a method without waiting and return the call's id for `take_reply` and `drop_reply`."""
        ...

    def take_reply(self, call_id: int) -> Reply | None:
        """Return the answer to a call once, None while there is none."""
        ...

    def drop_reply(self, call_id: int) -> None:
        """Wait for the answer to a call no more. May be called after it was taken."""
        ...

    def begin_shutdown(self) -> None:
        """Tell it to end, without waiting; every call raises EngineDeadError from now on."""
        ...

    def finish_shutdown(self, timeout: float | None = None) -> None:
        """Wait until it has ended; a process is killed after `timeout` seconds. Any thread may do it, one alone."""
        ...

    def kill(self) -> None:
        """End it at once, as an interrupted start does."""
        ...
