"""A core that runs by itself: messages come in, steps are done while there is something to do, messages go out."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from jaxllm.engine.core_client import RunnableCore
from jaxllm.engine.wire import Abort, Add, Call, Failure, FrameError, FromCore, Heartbeat, Release, Reply, ToCore
from jaxllm.exceptions import VLLMValidationError
from jaxllm.messages import EngineCoreOutput, EngineCoreOutputs, RequestError
from jaxllm.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 0.5


class Inbox(Protocol):
    """The messages from a front end."""

    def receive(self, *, wait: bool) -> list[ToCore | FrameError]:
        """Return the messages that are there, in order; with `wait`, at least one. Frames that cannot be read come as
        errors.
        """
        ...


class Outbox(Protocol):
    """The way back to the front end."""

    def send(self, message: FromCore) -> None:
        """Send a message. Raises FrameError for one that is too large."""
        ...


class CoreLoop:
    """This runs a core for one front end: drain the inbox, do a step, post what it did; rest on an empty inbox."""

    def __init__(self, core: RunnableCore, inbox: Inbox, outbox: Outbox) -> None:
        self._core, self._inbox, self._outbox = core, inbox, outbox
        self._began: float | None = None
        """The time.monotonic() at which the present step began; None between steps."""
        self._is_called = False
        """True while a call, which may compile for minutes, is answered."""
        self._calls: Mapping[str, Callable[..., Any]] = {
            "check": self._check,
            "reset_prefix_cache": core.reset_prefix_cache,
            "warm_up": core.warm_up,
            "start_profile": core.start_profile,
            "stop_profile": core.stop_profile,
        }

    def run(self) -> None:
        """Run until the front end says `Shutdown`. What a step raises is raised: the core cannot go on after it."""
        while self._drain():
            if self._core.has_unfinished_requests():
                self._began = time.monotonic()
                outputs = self._core.step()
                self._began = None
                self._post(outputs)

    def heartbeat(self) -> Heartbeat:
        """Return how the loop stands, to any thread."""
        began = self._began
        seconds = 0.0 if began is None else time.monotonic() - began
        return Heartbeat(seconds, self._is_called or self._core.is_compiling, self._core.is_warm)

    def _drain(self) -> bool:
        """Do what the messages say; return False at `Shutdown`."""
        for message in self._inbox.receive(wait=not self._core.has_unfinished_requests()):
            match message:
                case Add(request):
                    self._core.add_request(request)
                case Abort(sequence_ids):
                    self._core.abort_requests(sequence_ids)
                case Release(sequence_ids):
                    self._core.release(sequence_ids)
                case Call():
                    self._outbox.send(self._answer(message))
                case FrameError():
                    self._refuse(message)
                case _:
                    return False
        return True

    def _answer(self, call: Call) -> Reply:
        self._is_called = True
        try:
            return Reply(call.call_id, self._calls[call.method](*call.arguments))
        except VLLMValidationError as error:
            return Reply(call.call_id, error=RequestError("invalid", str(error), error.parameter))
        except Exception as error:
            logger.exception("the call of %s failed", call.method)
            return Reply(call.call_id, error=RequestError("internal", f"{type(error).__name__}: {error}"))
        finally:
            self._is_called = False

    def _check(self, params: Any, seconds: float | None) -> None:
        self._core.check(msgspec.convert(params, SamplingParams), seconds)

    def _refuse(self, error: FrameError) -> None:
        """Log a frame that cannot be read; the request that it is about, if that is known, ends."""
        logger.error("a message for request %r cannot be read: %s", error.request_id, error)
        if error.request_id:
            self._core.fail(error.request_id, RequestError("internal", f"The request could not be read: {error}"))

    def _post(self, outputs: EngineCoreOutputs) -> None:
        try:
            self._outbox.send(outputs)
        except FrameError:
            for each in outputs.outputs:
                self._post_alone(each, outputs)

    def _post_alone(self, output: EngineCoreOutput, outputs: EngineCoreOutputs) -> None:
        """Send one output of a step whose outputs are too large together; too large by itself, it ends its request."""
        try:
            self._outbox.send(msgspec.structs.replace(outputs, outputs=[output], evictions=[]))
        except FrameError as error:
            message = f"The log-probabilities of one step cannot be sent: {error}. Ask for fewer of them."
            self._core.fail(output.request_id, RequestError("invalid", message, "prompt_logprobs"))


class Heart:
    """A thread that sends a heartbeat twice a second until `stop`: at first that something is being compiled."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._loop: CoreLoop | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jaxllm-heartbeat", daemon=True)
        self._thread.start()

    def watch(self, loop: CoreLoop) -> None:
        """Report on this loop from now on."""
        self._loop = loop

    def stop(self) -> None:
        """Send no more."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(HEARTBEAT_SECONDS):
            loop = self._loop
            self._outbox.send(Heartbeat(0.0, True, False) if loop is None else loop.heartbeat())


def failure(error: BaseException) -> Failure:
    """Return what a front end is told of the error that has ended its core."""
    if isinstance(error, VLLMValidationError):
        return Failure(RequestError("invalid", str(error), error.parameter))
    return Failure(RequestError("internal", f"{type(error).__name__}: {error}"))
