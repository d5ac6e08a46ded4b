"""The client of several cores of one model, which look like one to their front end."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import msgspec

from jaxllm.core_messages import EngineCoreOutputs, EngineCoreRequest
from jaxllm.engine.client.gathered_call import GatheredCall
from jaxllm.engine.client.remote_client import RemoteClient
from jaxllm.engine.client.remote_core import KILL_SECONDS
from jaxllm.engine.client.replica import StartReplica
from jaxllm.engine.client.replica_set import ReplicaSet
from jaxllm.engine.transport.core_client import Programs
from jaxllm.engine.transport.engine_ready import EngineReady
from jaxllm.engine.transport.wire import Reply
from jaxllm.exceptions import EngineDeadError
from jaxllm.params.checks import check_int
from jaxllm.text.tokenizer_parts import TokenizerParts

MAX_REPLICAS = 1024


class ReplicatedCore(RemoteClient):
    """The client of replicas, which routes requests and gathers answers. For one thread.

    Once no core runs or starts, or soon will, every call raises EngineDeadError, but for `shutdown`.
    """

    max_replicas = MAX_REPLICAS

    def __init__(self, start: StartReplica, count: int) -> None:
        """Start `count` cores; `wait_ready` waits for them."""
        self.replicas = ReplicaSet(start, count)
        self._calls: dict[int, GatheredCall] = {}
        self._call_ids = itertools.count()
        self.is_closed = False
        """True once `shutdown` or `begin_shutdown` was called."""

    def wait_tokenizer(self) -> TokenizerParts | None:
        """Wait until the first core has sent the tokenizer and return it, None without one. Raises as `wait_ready`."""
        return next(iter(self.replicas.cores().values())).wait_tokenizer()

    def wait_ready(self) -> EngineReady:
        """Wait until all cores are ready; return what the one with the least room for a request says.

        Raises VLLMValidationError for arguments that a core refuses, EngineDeadError if one ends otherwise.
        """
        return self.replicas.wait_ready()

    @property
    def fds(self) -> list[int]:
        """Return the file descriptor to wait for messages and ends with, whichever cores there are."""
        return [self.replicas.fileno()]

    @property
    def has_ended(self) -> bool:
        """Return whether a core has ended that `look` has not seen yet."""
        return any(core.has_ended for core in self.replicas.cores().values())

    @property
    def process_ids(self) -> dict[int, int]:
        """Return the ids of the cores' processes by their replicas' numbers."""
        return {index: pid for index, core in self.replicas.cores().items() for pid in core.process_ids.values()}

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Return a new error that names what has ended the last core; None while one runs or starts, or soon will."""
        if self.is_closed:
            return EngineDeadError("The engine was shut down: make a new one.")
        message = self.replicas.end_message
        return None if message is None else EngineDeadError(message)

    def programs(self) -> list[Programs]:
        """Return how far each replica has compiled its programs, by their numbers."""
        programs = {index: core.programs()[0] for index, core in self.replicas.cores().items()}
        return [programs.get(index, Programs(0, is_warm=False)) for index in range(max(programs, default=-1) + 1)]

    # -- Requests -------------------------------------------------------------------------------------------------

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request with one of the cores; if that core refuses it, it ends with an output that gives the reason.

        Raises VLLMValidationError if it is too large to be sent, or asks for an unknown replica.
        """
        while True:
            self.raise_if_dead()
            replica = self.replicas.choose(request)
            try:
                replica.add_request(request)
                return
            except EngineDeadError as error:  # it has received nothing, so another replica may take the request
                self.replicas.router.withdraw(request)
                self.replicas.lose(replica, str(error))
            except BaseException:
                self.replicas.router.withdraw(request)
                raise

    def abort_requests(self, sequence_ids: Iterable[str]) -> None:
        """End sequences and free their blocks; unknown ids are ignored."""
        self.raise_if_dead()
        router = self.replicas.router
        for index, ids in router.split(sequence_ids).items():
            router.end(ids)
            with self.replicas.losing(index) as replica:
                replica.abort(ids)

    def release(self, sequence_ids: Iterable[str]) -> None:
        """Give up the blocks that ended sequences have kept for forks; unknown ids are ignored."""
        self.raise_if_dead()
        router = self.replicas.router
        for index, ids in router.split(sequence_ids).items():
            router.release(ids)
            with self.replicas.losing(index) as replica:
                if replica.core is not None and replica.is_running:
                    replica.core.release(ids)

    def take_outputs(self) -> EngineCoreOutputs | None:
        """Return the oldest outcome of a step that has come and not been taken; None if there is none."""
        return self.replicas.outputs.popleft() if self.replicas.outputs else None

    def receive(self) -> bool:
        """Take in one message, of each core in turn; return False if none has come."""
        self.raise_if_dead()
        return self.replicas.receive()

    def look(self) -> None:
        """Take in what has come, see which cores have ended or hang, and start those whose time it is."""
        self.raise_if_dead()
        self.replicas.look()
        self.raise_if_dead()

    # -- Calls ----------------------------------------------------------------------------------------------------

    def begin_call(self, method: str, *arguments: Any) -> int:
        """Call a method of every core that runs, without waiting; the id is for `take_reply` and `drop_reply`."""
        self.raise_if_dead()
        if method in ("reset_prefix_cache", "sleep"):
            self.replicas.router.forget_prefixes()
        if method in ("sleep", "wake_up"):
            self.replicas.sleep_level = arguments[0] if method == "sleep" else 0
        running, call = self.replicas.running(), GatheredCall(method)
        for replica in running[:1] if call.rule.asks_one else running:
            with self.replicas.losing(replica.index):
                assert replica.core is not None
                call.add(replica.core, replica.core.begin_call(method, *arguments))
        call_id = next(self._call_ids)
        self._calls[call_id] = call
        return call_id

    def take_reply(self, call_id: int) -> Reply | None:
        """Return the one answer gathered from all cores, once all have answered; None before."""
        call = self._calls.get(call_id)
        reply = None if call is None else call.take(call_id)
        if reply is not None:
            del self._calls[call_id]
        return reply

    def drop_reply(self, call_id: int) -> None:
        """Stop waiting for the answers to a call. May be called after they were taken."""
        if (call := self._calls.pop(call_id, None)) is not None:
            call.drop()

    def _wait(self) -> None:
        """Wait for a message, for a core's end or for the time to start one, and take in what has come."""
        self.replicas.wait()
        while self.receive():
            pass
        self.look()

    # -- The end --------------------------------------------------------------------------------------------------

    def begin_shutdown(self) -> None:
        """Tell all cores to end, without waiting; every call raises EngineDeadError from now on."""
        self.is_closed = True
        self.replicas.begin_shutdown()

    def finish_shutdown(self, timeout: float | None = None) -> None:
        """Wait until cores that were told to end have ended, as `shutdown` says. Any thread may do it, one alone."""
        self.replicas.finish_shutdown(KILL_SECONDS if timeout is None else timeout)

    def kill(self) -> None:
        """End all cores at once, as an interrupted start does."""
        for core in self.replicas.cores().values():
            core.handle.kill()
        self.shutdown()


def for_replica(request: EngineCoreRequest, remote: RemoteClient, rank: Any) -> EngineCoreRequest:
    """Return a request with the number of its replica, if `rank` is not None.

    Raises VLLMValidationError for a number that no replica can have.
    """
    if rank is None:
        return request
    check_int("data_parallel_rank", rank, 0, remote.max_replicas - 1)
    return msgspec.structs.replace(request, data_parallel_rank=rank)
