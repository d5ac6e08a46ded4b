"""The base of the clients of cores in other processes or threads: one core, or several replicas."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from jaxllm.core_messages import EngineCoreOutputs, RequestError
from jaxllm.engine.transport.core_client import CoreClient
from jaxllm.engine.transport.engine_ready import EngineReady
from jaxllm.engine.transport.wire import Reply
from jaxllm.exceptions import EngineDeadError, VLLMValidationError
from jaxllm.text.tokenizer_parts import TokenizerParts


class RemoteClient(CoreClient):
    """The base of `RemoteCore` and `ReplicatedCore`: messages arrive at any time. For one thread."""

    is_closed: bool
    """True once `shutdown` or `begin_shutdown` was called."""
    max_replicas = 1
    """The most replicas that there can be."""

    @property
    @abstractmethod
    def fds(self) -> list[int]:
        """Return the file descriptors that become readable, once, when messages come or a core ends."""

    @property
    @abstractmethod
    def has_ended(self) -> bool:
        """Return whether a process or thread has ended that `look` has not seen yet."""

    @property
    @abstractmethod
    def process_ids(self) -> dict[int, int]:
        """Return the ids of the processes that run by their replicas' numbers; a core alone is replica 0."""

    @property
    def shares_memory(self) -> bool:
        """Return whether the core is a thread of this process."""
        return False

    @property
    @abstractmethod
    def dead_error(self) -> EngineDeadError | None:
        """Return a new error that names what has ended it; None while it runs."""

    def raise_if_dead(self) -> None:
        """Raise EngineDeadError if it has ended."""
        error = self.dead_error
        if error is not None:
            raise error

    @abstractmethod
    def wait_tokenizer(self) -> TokenizerParts | None:
        """Wait for the tokenizer and return it, None without one. Raises as `wait_ready` does."""

    @abstractmethod
    def wait_ready(self) -> EngineReady:
        """Wait until requests can be sent. Raises VLLMValidationError for arguments that a core refuses,
        EngineDeadError if it ends otherwise.
        """

    @abstractmethod
    def receive(self) -> bool:
        """Take in one message; return False if none has come. Raises EngineDeadError if it has ended."""

    @abstractmethod
    def look(self) -> None:
        """Take in what has come, and see whether it has ended or hangs. Raises EngineDeadError then."""

    @abstractmethod
    def take_outputs(self) -> EngineCoreOutputs | None:
        """Return the oldest outcome of a step that has come and not been taken; None if there is none.

        Raises FrameError if it cannot be read.
        """

    @abstractmethod
    def begin_call(self, method: str, *arguments: Any) -> int:
        """Call a method without waiting and return the call's id for `take_reply` and `drop_reply`."""

    @abstractmethod
    def take_reply(self, call_id: int) -> Reply | None:
        """Return the answer to a call once, None while there is none."""

    @abstractmethod
    def drop_reply(self, call_id: int) -> None:
        """Stop waiting for the answer to a call. May be called after it was taken."""

    @abstractmethod
    def begin_shutdown(self) -> None:
        """Tell it to end, without waiting; every call raises EngineDeadError from now on."""

    @abstractmethod
    def finish_shutdown(self, timeout: float | None = None) -> None:
        """Wait until it has ended; a process is killed after `timeout` seconds. Any thread may do it, one alone."""

    @abstractmethod
    def kill(self) -> None:
        """End it at once, as an interrupted start does."""

    @abstractmethod
    def _wait(self) -> None:
        """Wait for a message or an end, and take in what has come."""

    def step(self, *, wait: bool) -> EngineCoreOutputs | None:
        """Return the outcome of the next step; without `wait`, None if it has not come.

        Raises FrameError if it cannot be read: nobody knows whose tokens it had.
        """
        while self.receive():
            pass
        while (outputs := self.take_outputs()) is None and wait:
            self._wait()
        return outputs

    def shutdown(self, timeout: float | None = None) -> None:
        """End it and wait for the end; a process is killed after `timeout` seconds. May be called twice.

        A thread cannot be killed: it ends after the step that it is in.
        """
        if not self.is_closed:
            self.begin_shutdown()
            self.finish_shutdown(timeout)

    def drop(self) -> None:
        """End it as `shutdown` does, which waits some seconds at most."""
        self.shutdown()

    def _call(self, method: str, *arguments: Any) -> Any:
        call_id = self.begin_call(method, *arguments)
        try:
            while (reply := self.take_reply(call_id)) is None:
                self._wait()
        finally:
            self.drop_reply(call_id)
        return result(reply)


def result(reply: Reply) -> Any:
    """Return the value of a reply. Raises its error: VLLMValidationError, or RuntimeError for one of the engine's."""
    return reply.value if reply.error is None else _raise(reply.error)


def _raise(error: RequestError) -> Any:
    if error.kind == "invalid":
        raise VLLMValidationError(error.message, parameter=error.parameter)
    raise RuntimeError(error.message)
