"""The client of an engine core that runs in another process or thread."""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, Self

import msgspec
import zmq

from jaxllm.config.environment import core_timeouts
from jaxllm.core_messages import EngineCoreOutputs, EngineCoreRequest
from jaxllm.engine.client.core_handle import CoreHandle, CoreProcess, CoreThread
from jaxllm.engine.client.core_watch import CoreWatch
from jaxllm.engine.client.fork_server import ForkServer
from jaxllm.engine.client.remote_client import RemoteClient
from jaxllm.engine.core.core_process import StartCore
from jaxllm.engine.transport.core_client import Programs
from jaxllm.engine.transport.engine_ready import EngineReady
from jaxllm.engine.transport.sockets import FrontSockets
from jaxllm.engine.transport.wire import (
    Abort,
    Add,
    Call,
    Failure,
    FrameError,
    FromCore,
    Heartbeat,
    Release,
    Reply,
    Shutdown,
    Starting,
    ToCore,
)
from jaxllm.exceptions import EngineDeadError, VLLMValidationError
from jaxllm.resolve.engine_args import EngineArgs
from jaxllm.text.tokenizer_parts import TokenizerParts
from jaxllm.usage.usage_lib import UsageContext
from jaxllm.utils.log import show_log

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5
KILL_SECONDS = 5.0
"""The time that a core has to end, or to finish after a failure, before it is killed."""
REPORT_SECONDS = 30.0
"""The time between log lines of a start that takes long."""
_GONE_SECONDS = 1.0
"""The time in which a core whose socket is gone is expected to end."""


class RemoteCore(RemoteClient):
    """The client of a core in another process or thread; keeps the messages received. Only one thread may use it.

    Once it has ended, every call raises EngineDeadError, but for `shutdown`.
    """

    def __init__(self, handle: CoreHandle, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Connect to a core that starts; `wait_ready` waits for it."""
        self._handle, self._context = handle, context
        try:
            self._watch = CoreWatch(*core_timeouts())
            self._sockets = FrontSockets(context, handle.meeting)
        except BaseException:
            handle.kill()
            handle.stop(KILL_SECONDS)
            if handle.end_reason() is not None:  # else the context would wait for the sockets of a thread that goes on
                context.term()
            raise
        self._outputs: deque[EngineCoreOutputs | FrameError] = deque()
        self._replies: dict[int, Reply | None] = {}
        """The calls that are waited for, with their replies; None before one has come."""
        self._call_ids = itertools.count()
        self._next_report = time.monotonic() + REPORT_SECONDS
        self._starting: Starting | None = None
        self._ready: EngineReady | None = None
        self.is_closed = False
        """True once `shutdown` or `begin_shutdown` was called."""
        self._end_message: str | None = None

    @classmethod
    def in_process(
        cls,
        engine_args: EngineArgs,
        usage_context: UsageContext,
        command: Sequence[str] = (),
        *,
        replica: int | None = None,
        forks: ForkServer | None = None,
    ) -> Self:
        """Start a core in a process of its own; `command` and `forks` tell how, as `CoreProcess` says."""
        show_log()
        return cls(CoreProcess(engine_args, usage_context, command, replica, forks), zmq.Context())

    @classmethod
    def in_thread(cls, start: StartCore) -> Self:
        """Start a core in a thread of this process."""
        core_timeouts()  # raises for wrong values before there is a thread, which could not be ended
        context = zmq.Context()
        return cls(CoreThread(start, context), context)

    @property
    def handle(self) -> CoreHandle:
        """Return the process or thread that the core runs in."""
        return self._handle

    @property
    def process_ids(self) -> dict[int, int]:
        """Return the id of the core's process as that of replica 0; empty without a running process on this machine."""
        pid = self._handle.pid
        return {} if pid is None or self._end_message is not None else {0: pid}

    @property
    def shares_memory(self) -> bool:
        """Return whether the core is a thread of this process."""
        return isinstance(self._handle, CoreThread)

    @property
    def is_ready(self) -> bool:
        """Return whether `wait_ready` would return at once."""
        return self._ready is not None

    @property
    def has_ended(self) -> bool:
        """Return whether the process or thread has ended, whether or not that was noticed."""
        return self._handle.end_reason() is not None

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Return a new error that names what has ended the core; None while it runs.

        An error that is raised again and again would grow its traceback, and keep its frames alive.
        """
        return None if self._end_message is None else EngineDeadError(self._end_message)

    def programs(self) -> list[Programs]:
        """Return how far the core's programs were compiled at its last heartbeat."""
        return [self._watch.programs]

    @property
    def fds(self) -> list[int]:
        """Return the file descriptors to wait for messages and for the core's end with; see `FrontSockets.fd`."""
        return [self._sockets.fd, *self._handle.fds]

    def wait_tokenizer(self) -> TokenizerParts | None:
        """Wait until the core has sent the tokenizer and return it, None without one. Raises as `wait_ready` does."""
        while self._starting is None:
            self._wait_start()
        return self._starting.tokenizer

    def wait_ready(self) -> EngineReady:
        """Wait until the core is ready. Raises VLLMValidationError for arguments that it refuses, EngineDeadError if
        it ends otherwise.
        """
        while self._ready is None:
            self._wait_start()
        self._handle.meeting.close()
        return self._ready

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request; if the core refuses it, it ends with an output that gives the reason.

        Raises VLLMValidationError if it is too large to be sent.
        """
        try:
            self._send(Add(request))
        except FrameError as error:
            message = f"the request cannot be sent to the engine core: {error}."
            raise VLLMValidationError(message, parameter="prompt") from error

    def abort_requests(self, sequence_ids: Iterable[str]) -> None:
        """End sequences and free their blocks; unknown ids are ignored."""
        self._send(Abort(list(sequence_ids)))

    def release(self, sequence_ids: Iterable[str]) -> None:
        """Give up the blocks that ended sequences have kept for forks; unknown ids are ignored."""
        self._send(Release(list(sequence_ids)))

    def begin_call(self, method: str, *arguments: Any) -> int:
        """Call a method of the core without waiting and return the id by which `take_reply` knows the call.

        A caller that stops waiting for the answer calls `drop_reply`.
        """
        call_id = next(self._call_ids)
        self._send(Call(call_id, method, [msgspec.to_builtins(each) for each in arguments]))
        self._replies[call_id] = None
        return call_id

    def take_reply(self, call_id: int) -> Reply | None:
        """Return the answer to a call once, None while there is none."""
        reply = self._replies.get(call_id)
        if reply is not None:
            del self._replies[call_id]
        return reply

    def drop_reply(self, call_id: int) -> None:
        """Stop waiting for the answer to a call. May be called after it was taken."""
        self._replies.pop(call_id, None)

    def take_outputs(self) -> EngineCoreOutputs | None:
        """Return the oldest outcome of a step that has come and not been taken; None if there is none.

        Raises FrameError if it cannot be read.
        """
        outputs = self._outputs.popleft() if self._outputs else None
        if isinstance(outputs, FrameError):
            raise outputs
        return outputs

    def receive(self) -> bool:
        """Take in one message; return False if none has come. Raises EngineDeadError when the core has ended."""
        self.raise_if_dead()
        message = self._sockets.receive()
        if message is None:
            return False
        self._take(message)
        return True

    def look(self) -> None:
        """Take in what has come, and see whether the core has ended or hangs. Raises EngineDeadError then."""
        while self.receive():
            pass
        reason = self._handle.end_reason()
        if reason is not None:
            while self.receive():  # messages that came between
                pass
        elif complaint := self._watch.complaint():
            self._handle.kill()
            reason = complaint
        if reason is not None:
            self._die(reason)

    def begin_shutdown(self) -> None:
        """Tell the core to end, without waiting; every call raises EngineDeadError from now on."""
        self.is_closed = True
        if self._end_message is None:
            try:
                self._sockets.send(Shutdown())
            except zmq.Again:  # nobody has connected yet
                self._handle.kill()
            self._end_message = "The engine was shut down: make a new one."

    def finish_shutdown(self, timeout: float | None = None) -> None:
        """Wait until a core that was told to end has ended, as `shutdown` says. Any one thread may call it."""
        self._wait_end(KILL_SECONDS if timeout is None else timeout)
        self._handle.stop(0)
        if self.has_ended:
            self._close()
        else:  # a thread in a long step: without our sockets it would wait for ever to send its outputs
            threading.Thread(target=self._close_late, name="jaxllm-core-end", daemon=True).start()

    def kill(self) -> None:
        """End the core at once, as an interrupted start does."""
        self._handle.kill()
        self.shutdown()

    def _send(self, message: ToCore) -> None:
        """Send a message. Raises EngineDeadError when the core has ended, though nobody may have noticed before."""
        self.raise_if_dead()
        try:
            self._sockets.send(message)
        except zmq.Again:
            self._sockets.wait_writable(_GONE_SECONDS, *self._handle.fds)
            self.look()
            try:
                self._sockets.send(message)
            except zmq.Again:
                self._handle.kill()
                self._die("it has closed its socket")

    def _wait_end(self, seconds: float) -> None:
        """Wait until the core has ended; what it sends meanwhile is dropped, so that it does not wait for room."""
        deadline = time.monotonic() + seconds
        while not self.has_ended and (left := deadline - time.monotonic()) > 0:
            self._sockets.poll(min(left, self._handle.poll_seconds), *self._handle.fds)
            while self._sockets.receive() is not None:
                pass

    def _close_late(self) -> None:
        self._wait_end(math.inf)
        self._close()

    def _close(self) -> None:
        self._sockets.close()
        self._context.term()

    def _wait(self) -> None:
        """Wait for a message, or for the core's end, and take in what has come."""
        self.raise_if_dead()
        if self._sockets.poll(POLL_SECONDS, *self._handle.fds):
            while self.receive():
                pass
        self.look()

    def _wait_start(self) -> None:
        """Wait as `_wait` does; log now and then the phase of a start that takes long."""
        self._wait()
        if self._ready is None and time.monotonic() >= self._next_report:
            self._next_report += REPORT_SECONDS
            logger.info("%s is still starting: it %s", self._handle.name, self._phase())

    def _phase(self) -> str:
        if not self._watch.has_heard:
            return "imports its modules"
        return "reads the configuration and the tokenizer" if self._starting is None else "loads the weights"

    def _take(self, message: FromCore | FrameError) -> None:
        match message:
            case FrameError() if self._ready is None:
                self._handle.kill()
                self._die(f"a message of its start cannot be read: {message}")
            case EngineCoreOutputs() | FrameError():
                if isinstance(message, FrameError):
                    logger.error("a message from %s cannot be read: %s", self._handle.name, message)
                self._outputs.append(message)
            case Heartbeat():
                self._watch.hear(message)
            case Reply(call_id):
                if call_id in self._replies:
                    self._replies[call_id] = message
            case Starting():
                self._starting = message
            case EngineReady():
                self._ready = message
            case Failure(error):
                if error.kind == "invalid" and self._ready is None:
                    self._end_message = error.message  # the caller that started it shuts it down
                    raise VLLMValidationError(error.message, parameter=error.parameter)
                self._die(error.message)

    def _die(self, reason: str) -> NoReturn:
        """Note that the core has ended, make sure that it has, and raise EngineDeadError."""
        self._end_message = f"{self._handle.name[0].upper()}{self._handle.name[1:]} has failed: {reason}."
        # In a thread: it may have things to finish, and those who wait for outputs should know at once.
        threading.Thread(target=self._handle.wait, args=(KILL_SECONDS,), name="jaxllm-core-end", daemon=True).start()
        raise EngineDeadError(self._end_message)
