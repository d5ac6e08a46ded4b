"""Run a core in its own process or thread: read messages, do steps while there is work, send the outcomes."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from typing import Protocol

import msgspec

from jaxllm.core_messages import EngineCoreOutput, EngineCoreOutputs, RequestError, no_tokens
from jaxllm.engine.transport.core_client import CALLS, RunnableCore
from jaxllm.engine.transport.wire import (
    Abort,
    Add,
    Call,
    FrameError,
    FromCore,
    Heartbeat,
    Release,
    Reply,
    Shutdown,
    ToCore,
)
from jaxllm.exceptions import EngineDeadError, VLLMValidationError

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 0.5


class _Inbox(Protocol):
    """The messages from a front end."""

    def receive(self, *, wait: bool) -> list[ToCore | FrameError]:
        """Return the messages that are there, in order; with `wait`, at least one. Frames that cannot be read come as
        errors.
        """
        ...


class _Outbox(Protocol):
    """The sender of messages to the front end, for any thread."""

    def send(self, message: FromCore) -> None:
        """Send a message. Raises FrameError if it is too large."""
        ...


class CoreLoop:
    """Runs a core for one front end: drain the inbox, do a step, post its outcome; wait on an empty inbox."""

    def __init__(self, core: RunnableCore, inbox: _Inbox, outbox: _Outbox) -> None:
        self._core, self._inbox, self._outbox = core, inbox, outbox
        self._began: float | None = None
        """The time.monotonic() at which the present step, message or call began; None while there is none."""
        self._compiled = 0.0
        """The time.monotonic() at which something was last seen to be compiled for the present work."""

    def run(self) -> None:
        """Run until the front end sends `Shutdown`. What a step raises is raised: the core cannot go on after it."""
        while self._drain():
            if self._has_work():
                with self._work():
                    outputs = self._core.step()
                self._post(outputs)

    def _has_work(self) -> bool:
        """Return whether there is a step to do."""
        return not self._core.is_paused and self._core.has_unfinished_requests()

    def heartbeat(self) -> Heartbeat:
        """Return the state of the loop, to any thread."""
        began, now = self._began, time.monotonic()
        if is_compiling := self._core.is_compiling:
            self._compiled = now
        seconds = 0.0 if began is None else now - max(began, self._compiled)
        return Heartbeat(seconds, is_compiling, self._core.is_warm, self._core.num_compiled)

    @contextlib.contextmanager
    def _work(self) -> Iterator[None]:
        """Time the block for heartbeats. Sending is not timed: it may wait for the front end."""
        self._began = time.monotonic()
        try:
            yield
        finally:
            self._began = None

    def _drain(self) -> bool:
        """Handle the messages that are there; return False at `Shutdown`."""
        for message in self._inbox.receive(wait=not self._has_work()):
            match message:
                case Shutdown():
                    return False
                case Call(method=method) if method in CALLS and CALLS[method].takes_long:
                    # In a thread: it takes minutes, in which streams go on, and requests come and are aborted.
                    thread = threading.Thread(
                        target=self._answer, args=(message,), name=f"jaxllm-{method}", daemon=True
                    )
                    thread.start()
                case Call():
                    with self._work():
                        reply = self._reply(message)
                    self._outbox.send(reply)
                case _:
                    with self._work():
                        self._do(message)
        return True

    def _do(self, message: Add | Abort | Release | FrameError) -> None:
        match message:
            case Add(request):
                self._core.add_request(request)
            case Abort(sequence_ids):
                self._core.abort_requests(sequence_ids)
            case Release(sequence_ids):
                self._core.release(sequence_ids)
            case FrameError():
                self._refuse(message)

    def _answer(self, call: Call) -> None:
        self._outbox.send(self._reply(call))

    def _reply(self, call: Call) -> Reply:
        try:
            arguments = msgspec.convert(call.arguments, CALLS[call.method].arguments)
            return Reply(call.call_id, getattr(self._core, call.method)(*arguments))
        except Exception as error:
            if not isinstance(error, (VLLMValidationError, EngineDeadError)):  # the latter: a shutdown has cut it off
                logger.exception("the call of %s failed", call.method)
            return Reply(call.call_id, error=RequestError.of(error))

    def _refuse(self, error: FrameError) -> None:
        """Log a frame that cannot be read; the request that it is about, if that is known, ends."""
        logger.error("a message for request %r cannot be read: %s", error.request_id, error)
        if error.request_id:
            self._core.fail(error.request_id, RequestError("internal", f"The request could not be read: {error}"))

    def _post(self, outputs: EngineCoreOutputs) -> None:
        try:
            self._outbox.send(outputs)
        except FrameError:
            for output in outputs.outputs:
                self._post_alone(output, outputs)
            self._outbox.send(msgspec.structs.replace(outputs, outputs=[]))

    def _post_alone(self, output: EngineCoreOutput, outputs: EngineCoreOutputs) -> None:
        """Send one output of a step that is too large to send whole; an output too large alone ends its request."""
        try:
            alone = msgspec.structs.replace(outputs, outputs=[output], evictions=[], next_tokens=no_tokens())
            self._outbox.send(alone)
        except FrameError as error:
            message = f"The log-probabilities of one step cannot be sent: {error}. Ask for fewer of them."
            self._core.fail(output.request_id, RequestError("invalid", message, "prompt_logprobs"))


class Heart:
    """A thread that sends a heartbeat twice a second until `stop`: at first that something is being compiled."""

    def __init__(self, outbox: _Outbox) -> None:
        self._outbox = outbox
        self._loop: CoreLoop | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jaxllm-heartbeat", daemon=True)
        self._thread.start()

    def watch(self, loop: CoreLoop) -> None:
        """Report on this loop from now on."""
        self._loop = loop

    def stop(self) -> None:
        """Stop sending."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(HEARTBEAT_SECONDS):
            loop = self._loop
            self._outbox.send(Heartbeat(0.0, True, False) if loop is None else loop.heartbeat())
