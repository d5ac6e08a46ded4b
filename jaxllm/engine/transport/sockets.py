"""The ZeroMQ sockets between a front end and its core, in two threads or processes: one to the core, one back."""

from __future__ import annotations

import contextlib
import shutil
import socket
import tempfile
import threading
import uuid
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq

from jaxllm.engine.transport.wire import (
    MAX_FRAME_BYTES,
    FrameError,
    FromCore,
    ToCore,
    decode_from_core,
    decode_to_core,
    encode_from_core,
    encode_to_core,
)

_LAST_MESSAGES_MS = 1000
"""The time that the last messages of a core have to reach the front end."""


_PREFIX = "jaxllm-"


class Addresses(msgspec.Struct, frozen=True):
    """The addresses of the two sockets, which the front end binds and the core connects to."""

    to_core: str
    from_core: str
    public_key: bytes | None = None
    """The front end's key on a network, a secret: nobody connects without it."""


@dataclass(frozen=True)
class Meeting:
    """A place where a front end waits for its core: addresses, and the folder of those that are files."""

    addresses: Addresses
    folder: Path | None = None
    secret_key: bytes | None = None
    """The front end's secret key, on a network."""

    @classmethod
    def in_process(cls) -> Meeting:
        """Make addresses for two threads of this process."""
        name = uuid.uuid4().hex
        return cls(Addresses(f"inproc://{name}-to", f"inproc://{name}-from"))

    @classmethod
    def on_host(cls) -> Meeting:
        """Make addresses for processes of this user: files in a new folder, which is closed to everybody else."""
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_temporary_folder()))  # mkdtemp's mode is 0700
        return cls(Addresses(f"ipc://{folder}/to", f"ipc://{folder}/from"), folder)

    @classmethod
    def on_network(cls, host: str) -> Meeting:
        """Make addresses for machines of a network, which call this one `host`: two free ports, encrypted by CURVE."""
        public, secret = zmq.curve_keypair()
        with socket.socket() as one, socket.socket() as other:
            for endpoint in (one, other):
                endpoint.bind((host, 0))
            to_core, from_core = (f"tcp://{host}:{endpoint.getsockname()[1]}" for endpoint in (one, other))
        return cls(Addresses(to_core, from_core, public), secret_key=secret)

    def close(self) -> None:
        """Delete the files, which connected sockets no longer need."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


def _temporary_folder() -> str:
    """Return the folder for temporary files, or /tmp if the addresses of files in it would be invalid."""
    folder = tempfile.gettempdir()
    try:
        num_bytes = len(f"{folder}/{_PREFIX}12345678/from".encode())
    except UnicodeEncodeError:
        return "/tmp"
    return folder if num_bytes <= zmq.IPC_PATH_MAX_LEN else "/tmp"


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    made = context.socket(kind)
    made.setsockopt(zmq.MAXMSGSIZE, 2 * MAX_FRAME_BYTES)
    return made


def _core_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int, addresses: Addresses) -> zmq.Socket[bytes]:
    made = _socket(context, kind)
    if addresses.public_key is not None:
        made.curve_serverkey = addresses.public_key
        made.curve_publickey, made.curve_secretkey = zmq.curve_keypair()
    return made


class FrontSockets:
    """The front end's ends of both sockets, for one thread."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], meeting: Meeting) -> None:
        """Bind both sockets. Raises zmq.ZMQError, neither open, if one cannot be."""
        self._out, self._in = _socket(context, zmq.PUSH), _socket(context, zmq.PULL)
        for end in (self._out, self._in):
            if meeting.secret_key is not None:
                end.curve_server, end.curve_secretkey = True, meeting.secret_key
        # Without a bound, so that nothing waits for a core that compiles: requests are limited elsewhere.
        self._out.setsockopt(zmq.SNDHWM, 0)
        self._out.setsockopt(zmq.LINGER, 0)
        try:
            self._out.bind(meeting.addresses.to_core)
            self._in.bind(meeting.addresses.from_core)
        except BaseException:
            self.close()
            raise

    @property
    def fd(self) -> int:
        """Return the file descriptor that becomes readable when messages have come; then `receive` until there is
        nothing left, for it tells of them only once.
        """
        return self._in.getsockopt(zmq.FD)  # type: ignore[return-value]

    def send(self, message: ToCore) -> None:
        """Send a message without waiting. Raises FrameError if it is too large, zmq.Again without a core."""
        self._out.send_multipart(encode_to_core(message), zmq.NOBLOCK, copy=False)

    def wait_writable(self, seconds: float, *fds: int) -> None:
        """Wait until a message can be sent or one of `fds` is readable, or for `seconds`."""
        poller = zmq.Poller()
        poller.register(self._out, zmq.POLLOUT)
        for fd in fds:
            poller.register(fd, zmq.POLLIN)
        poller.poll(round(seconds * 1000))

    def poll(self, seconds: float, *fds: int) -> bool:
        """Wait until a message has come or one of `fds` is readable; False after `seconds`."""
        poller = zmq.Poller()
        for source in (self._in, *fds):
            poller.register(source, zmq.POLLIN)
        return bool(poller.poll(round(seconds * 1000)))

    def receive(self) -> FromCore | FrameError | None:
        """Return the next message, an error for one that cannot be read; None if none has come."""
        try:
            frame = self._in.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
        try:
            return decode_from_core(frame)
        except FrameError as error:
            return error

    def close(self) -> None:
        """Close both sockets; what has not been sent is lost."""
        self._out.close(0)
        self._in.close(0)


class SocketInbox:
    """The core's end of the socket that brings it messages, for one thread."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], addresses: Addresses) -> None:
        self._socket = _core_socket(context, zmq.PULL, addresses)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.connect(addresses.to_core)

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """Return the socket, for a poller."""
        return self._socket

    def receive(self, *, wait: bool) -> list[ToCore | FrameError]:
        """Return the messages that are there, in order; with `wait`, at least one."""
        messages: list[ToCore | FrameError] = []
        if wait:
            self._socket.poll()
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            try:
                messages.append(decode_to_core(frames))
            except FrameError as error:
                messages.append(error)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close(0)


class SocketOutbox:
    """The core's end of the socket back to the front end, for any thread."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        addresses: Addresses,
        *,
        can_drop: bool = False,
        can_wait: bool = True,
    ) -> None:
        """Connect. While a thousand messages are on their way, the next ones wait, or are dropped with `can_drop`;
        without `can_wait` any number may be on their way.
        """
        self._socket = _core_socket(context, zmq.PUSH, addresses)
        if not can_wait:
            self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.connect(addresses.from_core)
        self._can_drop = can_drop
        self._lock = threading.Lock()

    def send(self, message: FromCore) -> None:
        """Send a message, waiting for room unless it can be dropped; once this is closed, do nothing.

        Raises FrameError if it is too large.
        """
        frame = encode_from_core(message)
        with self._lock:
            if self._socket.closed:
                return
            if not self._can_drop:
                self._socket.send(frame, copy=False)
                return
            with contextlib.suppress(zmq.Again):
                self._socket.send(frame, zmq.NOBLOCK, copy=False)

    def close(self) -> None:
        """Close the socket; the last messages have a second to arrive."""
        with self._lock:
            self._socket.close(_LAST_MESSAGES_MS)

    def abandon(self) -> None:
        """Close the socket; messages that have not arrived are lost."""
        with self._lock:
            self._socket.close(0)
