"""The parent of several front ends: it owns the cores and the port, starts front ends, and starts them again."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import zmq
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import CollectorRegistry

from jaxllm.core_messages import RequestError
from jaxllm.engine.client.remote_client import RemoteClient
from jaxllm.engine.front.metrics import PREFIX, Metric
from jaxllm.engine.transport.wire import Call, Failure, FromCore, Heartbeat, Reply, Shutdown, Starting, Told
from jaxllm.exceptions import EngineDeadError, VLLMValidationError
from jaxllm.server.operations.prometheus import CoreProcesses, EngineCollector
from jaxllm.server.processes.board import Board
from jaxllm.server.processes.client import ASLEEP
from jaxllm.server.processes.front_process import FrontProcess, Settings
from jaxllm.server.processes.relay import Relay
from jaxllm.server.processes.reports import Report, is_of_core, merged, read, totals
from jaxllm.utils.garbage import settle_garbage

logger = logging.getLogger(__name__)

BEAT_SECONDS = 0.5
_END_SECONDS = 10.0
"""The time that front ends have to end, beyond that for their requests, before they are killed."""
_STEADY_SECONDS = 60.0
"""A front end that has served this long is replaced at once when it ends; otherwise each wait doubles."""
_LONGEST_REST = 60.0
_MOST_FAILURES = 6
"""The server ends when a front end has ended this often in a row."""


class _Seat:
    """The place of one front end: its present process, and when there is another."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.front: FrontProcess | None = None
        self.restart_at = 0.0
        """The time.monotonic() at which a process is started."""
        self.started_at = 0.0
        self.num_failures = 0

    def rest(self) -> float:
        """Plan for another process, and return the seconds until then."""
        now = time.monotonic()
        if now - self.started_at >= _STEADY_SECONDS:
            self.num_failures = 0
        seconds = min(_LONGEST_REST, 2.0 ** (self.num_failures - 1)) if self.num_failures else 0.0
        self.num_failures += 1
        self.restart_at = now + seconds
        return seconds


class _Engine:
    """The cores' metrics and processes, for collectors."""

    def __init__(self, remote: RemoteClient, relay: Relay, sleep_level: Callable[[], int]) -> None:
        self._remote, self._relay, self._sleep_level = remote, relay, sleep_level

    @property
    def core_pids(self) -> dict[int, int]:
        """Return the ids of the cores' processes by their replicas' numbers."""
        return self._remote.process_ids

    def get_metrics(self) -> list[Metric]:
        """Return the metrics of cores and steps."""
        self._relay.metrics.on_programs(self._remote.programs(), sleep_level=self._sleep_level())
        return [each for each in self._relay.metrics.snapshot() if is_of_core(each.name)]


class Parent:
    """Runs front ends for one engine until it is told to end, or the engine ends. For one thread, but for `end`."""

    def __init__(
        self,
        start: Callable[[], RemoteClient],
        settings: Settings,
        listener_fd: int,
        count: int,
        *,
        grpc_fd: int | None = None,
        drain_seconds: float = 0.0,
        metrics_prefix: str = PREFIX,
        on_ready: Callable[[], object] = lambda: None,
    ) -> None:
        """Have `count` front ends with these settings on a listener, for the engine that `start` begins to start.
        The first one serves gRPC too, at the address of the socket `grpc_fd`, if there is one.

        `on_ready` is called in the thread of `run` once the engine is ready; from then on `end` may be called.
        """
        self._on_ready = on_ready
        self._start, self._settings, self._listener_fd = start, settings, listener_fd
        self._grpc_fd = grpc_fd
        self._drain_seconds, self._prefix = drain_seconds, metrics_prefix
        self._board = Board.make(count)
        self._seats = [_Seat(index) for index in range(count)]
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._wake_fd, self._waker_fd = os.pipe()
        os.set_blocking(self._wake_fd, False)
        os.set_blocking(self._waker_fd, False)
        self._num_ends, self._num_told = 0, 0
        """How often it was told to end, and how many of those the front ends know of."""
        self._deadline = float("inf")
        self._next_beat = 0.0
        self._told_ids = itertools.count()
        self._tells: dict[int, tuple[FrontProcess, Call, set[FrontProcess]]] = {}
        """Changes that some front ends have not acknowledged: who asked, and whom it waits for."""
        self._turns: list[tuple[FrontProcess, Call]] = []
        """The front ends that change whether the engine sleeps: the first has its turn, the others wait for theirs."""
        self._state: dict[tuple[str, str], Any] = {}
        """The last value of what was told and not taken back, for front ends that come later."""
        self._ended: Report = []
        """The counts of front ends that have ended."""
        self._refusal: VLLMValidationError | None = None
        self._has_served = False
        """True once a front end has served: what another one refuses later is a fault of its process."""
        self._greeting: list[FromCore] = []
        """What a front end has to know first: the tokenizer, and the engine's settings."""

    def end(self) -> None:
        """End: front ends drain first. A second call has them wait no longer. Any thread may call this."""
        self._num_ends += 1
        with contextlib.suppress(OSError):
            os.write(self._waker_fd, b"!")

    def run(self) -> None:
        """Start the engine, serve, and end all.

        Raises VLLMValidationError for arguments that an engine or a front end refuses, EngineDeadError if the engine
        ends by itself, or a front end again and again.
        """
        remote: RemoteClient | None = None
        try:
            remote = self._start()
            self._greeting.append(Starting(remote.wait_tokenizer()))
            for seat in self._seats:  # they import their modules while the core loads the weights
                self._start_front(seat)
            ready = remote.wait_ready()
            self._greet(ready)
            relay = Relay(remote, ready)
            self._collector = self._collect(remote, relay)
            settle_garbage()
            self._on_ready()
            self._run(remote, relay)
        except BaseException as error:
            self._stop_fronts(error)
            if remote is not None and not remote.is_closed:
                remote.shutdown()
            raise
        else:
            remote.shutdown()
        finally:
            self._close()

    def _collect(self, remote: RemoteClient, relay: Relay) -> CollectorRegistry:
        """Return a registry of the metrics that are no front end's."""
        registry, engine = CollectorRegistry(), _Engine(remote, relay, lambda: self._state.get((ASLEEP, ""), [0])[0])
        registry.register(EngineCollector(engine, self._prefix))
        registry.register(CoreProcesses(engine))
        ProcessCollector(registry=registry)
        return registry

    # -- The loop -------------------------------------------------------------------------------------------------

    def _run(self, remote: RemoteClient, relay: Relay) -> None:
        while True:
            self._wait(remote)
            relay.receive()
            for front in self._fronts():
                self._listen(front, relay)
            if remote.has_ended:
                remote.look()
                relay.pass_on()
            self._tend(remote, relay)
            if self._refusal is not None:
                raise self._refusal
            if self._num_ends and not any(True for _ in self._fronts()):
                return

    def _wait(self, remote: RemoteClient) -> None:
        """Wait for a message, for an end or for the time to do something."""
        poller = zmq.Poller()
        for fd in (*remote.fds, self._wake_fd):
            poller.register(fd, zmq.POLLIN)
        for front in self._fronts():
            poller.register(front.inbox.socket, zmq.POLLIN)
            if front.pidfd >= 0:
                poller.register(front.pidfd, zmq.POLLIN)
        rests = [seat.restart_at for seat in self._seats if seat.front is None and not self._num_ends]
        wake_at = min([self._next_beat, self._deadline, *rests])
        poller.poll(max(0, round((wake_at - time.monotonic()) * 1000)))
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_fd, 64)

    def _tend(self, remote: RemoteClient, relay: Relay) -> None:
        """Look after front ends and core, and start front ends whose time it is."""
        now = time.monotonic()
        for seat in self._seats:
            if seat.front is not None and seat.front.status is not None:
                self._lose(seat, seat.front, relay)
        while self._num_told < self._num_ends:
            self._deadline = now + _END_SECONDS + (0.0 if self._num_told else self._drain_seconds)
            self._num_told += 1
            for front in self._fronts():
                front.tell(signal.SIGTERM)
        for seat in self._seats:
            if seat.front is None and not self._num_ends and now >= seat.restart_at:
                self._start_front(seat)
        if now >= self._deadline:
            for front in self._fronts():
                front.tell(signal.SIGKILL)
        if now >= self._next_beat:
            self._next_beat = now + BEAT_SECONDS
            self._beat(remote, relay)

    def _beat(self, remote: RemoteClient, relay: Relay) -> None:
        remote.look()
        relay.pass_on()
        programs = remote.programs()
        beat = Heartbeat(
            0.0, False, all(each.is_warm for each in programs), sum(each.num_compiled for each in programs)
        )
        for front in self._fronts():
            front.send(beat)
            if (complaint := front.complaint()) is not None:
                logger.error("front end %d (process %d) is killed: %s", front.index, front.pid, complaint)
                front.tell(signal.SIGKILL)
        relay.show_load(self._fronts())

    def _fronts(self) -> Iterator[FrontProcess]:
        return (seat.front for seat in self._seats if seat.front is not None)

    # -- Front ends -----------------------------------------------------------------------------------------------

    def _greet(self, message: FromCore) -> None:
        self._greeting.append(message)
        for front in self._fronts():
            front.send(message)

    def _start_front(self, seat: _Seat) -> None:
        seat.started_at = time.monotonic()
        try:
            front = FrontProcess(
                seat.index,
                self._settings,
                self._listener_fd,
                self._board.fd,
                len(self._seats),
                self._context,
                grpc_fd=self._grpc_fd if seat.index == 0 else None,
                is_again=self._has_served,
            )
        except OSError as error:  # too many processes, or too little memory
            self._plan(seat, f"front end {seat.index} cannot be started ({error})")
            return
        seat.front = front
        for message in self._greeting:
            front.send(message)
        for (kind, key), value in self._state.items():
            front.send(Told(-1, kind, key, value))

    def _lose(self, seat: _Seat, front: FrontProcess, relay: Relay) -> None:
        """End the requests of a front end that has ended, keep its counts, and plan for another."""
        self._listen(front, relay)  # to what it has sent before its end
        relay.lose(front)
        self._ended = merged([self._ended, totals(msgspec.convert(front.report, Report.__value__))])
        self._board.clear(front.index)
        for told_id in list(self._tells):
            self._acknowledge(told_id, front)
        self._end_turns(front)
        seat.front = None
        front.close()
        if self._num_ends or self._refusal is not None:
            return
        ended = f"front end {front.index} (process {front.pid}) has ended with status {front.status}"
        self._plan(seat, f"{ended}, and with it its connections")

    def _plan(self, seat: _Seat, what: str) -> None:
        """Log what has happened to a front end, and plan for another. Raises EngineDeadError if it happens again and
        again.
        """
        seconds = seat.rest()
        if seat.num_failures > _MOST_FAILURES:
            logger.error("%s", what)
            raise EngineDeadError(f"Front end {seat.index} has ended {seat.num_failures} times in a row.")
        logger.error("%s; it is started again in %.0f s", what, seconds)

    def _listen(self, front: FrontProcess, relay: Relay) -> None:
        """Take in what has come from a front end."""
        for message in front.hear():
            match message:
                case Shutdown():
                    pass  # its process ends, which is seen
                case Call(_, "report", _):
                    front.take_report(message.arguments[0])
                    self._has_served = True
                    front.send(Reply(message.call_id))
                case Call(_, "collect", _):
                    front.report = message.arguments[0]
                    here = msgspec.to_builtins([read(self._collector, "parent"), self._ended])
                    front.send(Reply(message.call_id, [*here, *(other.report for other in self._fronts())]))
                case Call(_, "refuse", [text, parameter]):
                    front.send(Reply(message.call_id))
                    self._refuse(front, text, parameter)
                case Call(_, "tell", [kind, key, value]):
                    self._tell(front, message, kind, key, value)
                case Call(_, "acknowledge", [told_id]):
                    front.send(Reply(message.call_id))
                    self._acknowledge(told_id, front)
                case Call(_, "take_turn", _):
                    self._turns.append((front, message))
                    if len(self._turns) == 1:
                        front.send(Reply(message.call_id))
                case Call(_, "end_turn", _):
                    front.send(Reply(message.call_id))
                    self._end_turns(front)
                case _:
                    relay.take(front, message)

    def _refuse(self, front: FrontProcess, text: str, parameter: str | None) -> None:
        """End the server with what a front end refuses; once one has served, it is a fault of this process alone."""
        if self._has_served:
            logger.error("front end %d (process %d) cannot start: %s", front.index, front.pid, text)
        else:
            self._refusal = VLLMValidationError(text, parameter=parameter)

    def _tell(self, front: FrontProcess, call: Call, kind: str, key: str, value: Any) -> None:
        """Tell all front ends of a change; whoever has asked for it waits until all know that serve."""
        if value is None:
            self._state.pop((kind, key), None)
        else:
            self._state[kind, key] = value
        told_id = next(self._told_ids)
        self._tells[told_id] = front, call, {other for other in self._fronts() if other.is_serving}
        for other in self._fronts():
            other.send(Told(told_id, kind, key, value))

    def _acknowledge(self, told_id: int, front: FrontProcess) -> None:
        if told_id not in self._tells:
            return
        asker, call, waiting = self._tells[told_id]
        waiting.discard(front)
        if not waiting:
            del self._tells[told_id]
            if asker in set(self._fronts()):
                asker.send(Reply(call.call_id))

    def _end_turns(self, front: FrontProcess) -> None:
        """End the turn that a front end has or waits for, and give it to the next one if it had it."""
        first = self._turns[:1]
        self._turns = [turn for turn in self._turns if turn[0] is not front]
        if self._turns and self._turns[:1] != first:
            after, call = self._turns[0]
            after.send(Reply(call.call_id))

    # -- The end --------------------------------------------------------------------------------------------------

    def _stop_fronts(self, error: BaseException) -> None:
        """Tell front ends that the engine has ended, and give them the time to tell their clients."""
        seconds = 0.0
        if isinstance(error, EngineDeadError) and self._has_served:
            seconds = _END_SECONDS
            for front in self._fronts():
                front.send(Failure(RequestError("internal", str(error))))
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and any(front.status is None for front in self._fronts()):
            time.sleep(0.02)

    def _close(self) -> None:
        for seat in self._seats:
            if seat.front is not None:
                seat.front.close()
                seat.front = None
        self._context.term()
        self._board.close()
        os.close(self._wake_fd)
        os.close(self._waker_fd)
