"""The other hosts of one model, for the first: it sends them launches and receives their heartbeats.

A program that spans hosts waits for all of them, so a lost host would leave the others waiting for ever. A host that
learns of a loss therefore tells the first host, which tells all, and every process ends. After a step that fails on
one host alone the hosts are in different states, so that counts as a loss too.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import selectors
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import jax
import msgspec

from jaxllm.engine.core.hosts.join import join
from jaxllm.engine.core.hosts.link import Link
from jaxllm.engine.core.hosts.wire import Agreement, Beat, End, Failed, Ready, encode
from jaxllm.exceptions import EngineDeadError
from jaxllm.execution.launcher import Launch

if TYPE_CHECKING:
    from jaxllm.config.arguments import EngineArguments

logger = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
SILENCE_SECONDS = 6.0
"""A host that has sent nothing for this long is lost."""
REASON_SECONDS = 2.0
"""The longest wait, after a collective has failed, for the link that shows which host is gone."""
_GRACE_SECONDS = 3.0
"""The time that this process has to end after a loss, before it is killed."""
_CLOSE_SECONDS = 2.0


class Hosts(Protocol):
    """The calls that an engine core makes of its hosts; a model on one host has `OneHost`."""

    @property
    def can_go_on(self) -> bool:
        """Return whether steps can follow one that has failed."""
        ...

    def agree(self, agreement: Agreement) -> None:
        """Send the others the settings that all must share."""
        ...

    def wait_ready(self) -> None:
        """Wait until all others have their parameters. Raises EngineDeadError if one is lost."""
        ...

    def broadcast(self, launch: Launch) -> None:
        """Send a launch to the others. Raises EngineDeadError if one is lost."""
        ...

    def guard(self) -> contextlib.AbstractContextManager[None]:
        """End the others if a step fails; if that is because a host is lost, raise EngineDeadError instead."""
        ...

    def fail(self, error: BaseException) -> None:
        """End the others, and soon this process, since this host cannot go on."""
        ...

    def close(self) -> None:
        """Let the others end. May be called twice."""
        ...


class OneHost:
    """A model on this host alone."""

    can_go_on = True

    def agree(self, agreement: Agreement) -> None:
        """Tell nobody."""

    def wait_ready(self) -> None:
        """Wait for nobody."""

    def broadcast(self, launch: Launch) -> None:
        """Send nothing."""

    def guard(self) -> contextlib.AbstractContextManager[None]:
        """Guard nothing."""
        return contextlib.nullcontext()

    def fail(self, error: BaseException) -> None:
        """End nobody."""

    def close(self) -> None:
        """Close nothing."""


class HostGroup:
    """The links to all other hosts. One thread listens to them, another sends them heartbeats."""

    def __init__(self, links: Sequence[Link]) -> None:
        self._links = links
        self._lost: str | None = None
        """The error that every call raises, once a host is lost or this one has failed."""
        self._has_lost, self._are_ready, self._is_closed = threading.Event(), threading.Event(), threading.Event()
        self._beating = threading.Thread(target=self._beat, name="jaxllm-hosts-beat", daemon=True)
        self._beating.start()
        threading.Thread(target=self._listen, name="jaxllm-hosts-listen", daemon=True).start()
        # JAX's own exit hook, which waits for the others, was registered before and comes after.
        atexit.register(self.close)

    @property
    def can_go_on(self) -> bool:
        """Return False: after a failed step the other hosts are one step ahead."""
        return False

    def agree(self, agreement: Agreement) -> None:
        """Send the others the settings that all must share."""
        self._send(encode(agreement))

    def wait_ready(self) -> None:
        """Wait until all others have their parameters. Raises EngineDeadError if one is lost."""
        while not self._are_ready.wait(0.05):
            self._check()

    def broadcast(self, launch: Launch) -> None:
        """Send a launch to the others. Raises EngineDeadError if one is lost."""
        self._check()
        self._send(encode(launch))

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """End the others if a step fails; if that is because a host is lost, raise EngineDeadError instead."""
        try:
            yield
        except BaseException as error:
            if isinstance(error, Exception):
                self._has_lost.wait(REASON_SECONDS)
            if self._lost is None:
                self.fail(error)
                raise
            raise EngineDeadError(self._lost) from error

    def fail(self, error: BaseException) -> None:
        """End the others, and soon this process, since this host cannot go on."""
        if not self._is_closed.is_set():
            self._give_up(f"host 0 of {len(self._links) + 1} has failed: {type(error).__name__}: {error}")

    def close(self) -> None:
        """Let the others end. May be called twice."""
        if self._is_closed.is_set() or self._lost is not None:
            return
        self._is_closed.set()
        self._beating.join(_CLOSE_SECONDS)  # which sends the last message
        jax.distributed.shutdown()  # the others do the same

    def _check(self) -> None:
        if self._lost is not None:
            raise EngineDeadError(self._lost)

    def _send(self, data: bytes) -> None:
        for link in self._links:
            try:
                link.send_encoded(data)
            except OSError as error:
                self._lose(link, f"its connection has failed ({error})")
                self._check()

    def _tell(self, message: End | Failed, but: Link | None = None) -> None:
        for link in self._links:
            if link is not but:
                with contextlib.suppress(OSError):
                    link.send(message)

    def _listen(self) -> None:
        heard = dict.fromkeys(self._links, time.monotonic())
        waits_for = set(self._links)
        with selectors.DefaultSelector() as selector:
            for link in self._links:
                selector.register(link, selectors.EVENT_READ)
            while heard and not self._has_lost.is_set():
                silent_at = min(heard.values()) + SILENCE_SECONDS
                for key, _ in selector.select(min(BEAT_SECONDS, max(0.0, silent_at - time.monotonic()))):
                    link = key.fileobj
                    assert isinstance(link, Link)
                    heard[link] = time.monotonic()
                    if not self._hear(link, waits_for):
                        selector.unregister(link)
                        heard.pop(link)
                for link, last in heard.items():
                    if time.monotonic() - last >= SILENCE_SECONDS:
                        self._lose(link, f"it has said nothing for {SILENCE_SECONDS:.0f} s")

    def _hear(self, link: Link, waits_for: set[Link]) -> bool:
        """Receive a message; return False if there will be no other."""
        try:
            message = link.receive()
        except (EOFError, OSError):
            self._lose(link, "its process has ended")
            return False
        except msgspec.MsgspecError as error:
            self._lose(link, f"what it says cannot be read ({error}): does it have another version?")
            return False
        match message:
            case Ready():
                waits_for.discard(link)
                if not waits_for:
                    self._are_ready.set()
            case Failed(why):
                self._lose(link, why)
                return False
            case _:
                pass
        return True

    def _beat(self) -> None:
        while not self._is_closed.wait(BEAT_SECONDS):
            if self._lost is not None:
                return
            for link in self._links:
                with contextlib.suppress(OSError):  # the listening thread sees it too
                    link.send(Beat())
        self._tell(End())

    def _lose(self, link: Link, why: str) -> None:
        message = f"{link} of {len(self._links) + 1} is lost: {why.rstrip('.')}"
        if not self._is_closed.is_set():
            self._give_up(f"{message}. The model spans all hosts, so all have ended.", link)

    def _give_up(self, message: str, lost: Link | None = None) -> None:
        if self._has_lost.is_set():
            return
        self._lost = message
        self._has_lost.set()
        logger.critical("%s", message)
        _end_soon()
        self._tell(Failed(message), lost)


def meet_hosts(args: EngineArguments) -> Hosts:
    """Join the hosts that arguments name, as the first of them. Raises as `join` does."""
    return OneHost() if args.nnodes == 1 else HostGroup(join(args))


def _end_soon() -> None:
    """End this process with status 1 if it is still there after `_GRACE_SECONDS`: it may wait for a device for ever."""
    timer = threading.Timer(_GRACE_SECONDS, os._exit, (1,))
    timer.daemon = True
    timer.start()
