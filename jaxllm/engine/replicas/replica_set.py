"""A set of replicas: messages are taken in from all of them, failed ones are replaced, others are added or drained."""

from __future__ import annotations

import contextlib
import itertools
import logging
import selectors
import threading
import time
from collections import deque
from collections.abc import Iterator

import msgspec

from jaxllm.config.engine_ready import EngineReady
from jaxllm.engine.remote.remote_core import KILL_SECONDS, POLL_SECONDS, RemoteCore
from jaxllm.engine.replicas.replica import Replica, StartReplica
from jaxllm.engine.replicas.router import Router
from jaxllm.engine.transport.wire import FrameError
from jaxllm.exceptions import EngineDeadError, VLLMValidationError
from jaxllm.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, RequestError

logger = logging.getLogger(__name__)


class ReplicaSet:
    """This owns the replicas and says what has come from them. For one thread.

    A core that fails ends its own requests, each with an output that says why, and another is started in its place.
    """

    def __init__(self, start: StartReplica, count: int) -> None:
        """Begin to start `count` cores, the first of which has the number 0."""
        self._start = start
        self._selector = selectors.DefaultSelector()
        self._replicas: deque[Replica] = deque()
        """All replicas; the one whose turn it is to be listened to is the first."""
        self._watched: dict[int, list[int]] = {}
        """The file descriptors of each replica's core, which cannot be asked for them once it has closed."""
        self._endings: list[threading.Thread] = []
        self._ready: EngineReady | None = None
        self._scale_error: str | None = None
        self.router = Router(None)
        self.outputs: deque[EngineCoreOutputs] = deque()
        """The outcomes of steps that nobody has taken yet, oldest first."""
        self.end_message: str | None = None
        """What has ended the last core, once none runs or starts."""
        try:
            for index in range(count):
                self._add(index)
        except BaseException:
            for core in self.cores().values():
                core.kill()
            raise

    def cores(self) -> dict[int, RemoteCore]:
        """Return the cores that run or start, by the numbers of their replicas, in their order."""
        replicas = sorted(self._replicas, key=lambda each: each.index)
        return {each.index: each.core for each in replicas if each.core is not None}

    def running(self) -> list[Replica]:
        """Return the replicas whose cores take requests or finish some, by their numbers."""
        return sorted((each for each in self._replicas if each.is_running), key=lambda each: each.index)

    def fileno(self) -> int:
        """Return the file descriptor to wait for messages and ends with, whichever cores there are."""
        return self._selector.fileno()  # epoll's or kqueue's

    def wait_ready(self) -> EngineReady:
        """Wait until all cores are ready; return what the one with the least room for a request says."""
        if self._ready is None:
            answers = [core.wait_ready() for core in self.cores().values()]
            self._ready = min(answers, key=lambda ready: ready.max_model_len)
            cache = self._ready.vllm_config.cache_config
            self.router = Router(cache.block_size if cache.enable_prefix_caching else None)
            for replica in self._replicas:
                self._meet(replica)
                replica.poll_start()
        return self._ready

    def choose(self, request: EngineCoreRequest) -> Replica:
        """Return the replica for a request: one that runs, or if there is none, one that will.

        Raises VLLMValidationError if it asks for one that there is not.
        """
        asked = request.data_parallel_rank
        open_ones = {each.index: each for each in self._replicas if each.is_open and asked in (None, each.index)}
        if not open_ones:
            message = f"there is no replica {asked}: there are {sorted(self._numbers())}."
            raise VLLMValidationError(message, parameter="data_parallel_rank", value=asked)
        chosen = {index: each for index, each in open_ones.items() if each.is_running} or open_ones
        return chosen[self.router.route(request, sorted(chosen))]

    @contextlib.contextmanager
    def losing(self, index: int) -> Iterator[Replica]:
        """Have a replica for a block, whose core may turn out to have ended: then it is lost, and the block left."""
        replica = next(each for each in self._replicas if each.index == index)
        try:
            yield replica
        except EngineDeadError as error:
            self.lose(replica, str(error))

    def receive(self) -> bool:
        """Take in one message, of each core in turn; return False if none has come."""
        for _ in range(len(self._replicas)):
            replica = self._replicas[0]
            self._replicas.rotate(-1)
            if replica.core is None:
                continue
            try:
                if not replica.core.receive():
                    continue
                self._collect(replica, replica.core)
            except (EngineDeadError, VLLMValidationError) as error:  # or it refuses arguments that it took before
                self.lose(replica, str(error))
            return True
        return False

    def look(self) -> None:
        """Take in what has come, see which cores have ended or hang, and start those whose time it is."""
        for replica in list(self._replicas):
            if replica.core is None:
                continue
            problem = None
            try:
                replica.core.look()
            except (EngineDeadError, VLLMValidationError) as error:
                problem = str(error)
            self._collect(replica, replica.core)
            if problem is not None:
                self.lose(replica, problem)
        self.retire()
        for replica in self._replicas:
            if replica.core is None and time.monotonic() >= replica.restart_at:
                replica.restart()
                self._watch(replica)

    def wait(self) -> None:
        """Wait for a message, for a core's end or for the time to start one."""
        rests = [each.restart_at - time.monotonic() for each in self._replicas if each.core is None]
        self._selector.select(max(0.0, min(POLL_SECONDS, *rests, POLL_SECONDS)))

    def lose(self, replica: Replica, problem: str) -> None:
        """End a failed core's requests, and plan for another core. Nothing is planned for one that drains, or that has
        never been ready.
        """
        self._fail_requests(replica, problem)
        seconds = replica.rest()
        self._bury(replica)
        if not replica.is_open or not replica.has_served:
            self._replicas.remove(replica)
            self._scale_error = problem
        else:
            logger.error("replica %d is started again in %.0f s: %s", replica.index, seconds, problem)
            if seconds == 0:
                replica.restart()
                self._watch(replica)
        if not self.cores():
            self.end_message = problem

    # -- More or fewer of them ------------------------------------------------------------------------------------

    def scale(self, count: int, drain_seconds: float) -> None:
        """Begin to have `count` replicas: others start, or the last ones drain, for so many seconds at most."""
        self._scale_error = None
        taken = {each.index for each in self._replicas}
        staying = sorted((each for each in self._replicas if each.is_open), key=lambda each: each.index)
        for replica in staying[count:]:
            replica.drain_until = time.monotonic() + drain_seconds
        free = (index for index in itertools.count() if index not in taken)
        for index in itertools.islice(free, max(0, count - len(staying))):
            self._meet(self._add(index))
        self.retire()

    @property
    def is_scaling(self) -> bool:
        """Say whether replicas start for the first time, or drain."""
        return any(not each.is_open or not each.has_served for each in self._replicas)

    def take_scale_error(self) -> str | None:
        """Return, once, why a replica that `scale` has added could not be started, or has not drained."""
        error, self._scale_error = self._scale_error, None
        return error

    def retire(self) -> None:
        """End replicas that have drained."""
        for replica in list(self._replicas):
            if replica.drain_until is None:
                continue
            if time.monotonic() >= replica.drain_until:
                self._fail_requests(replica, "its replica was taken away before the request had ended")
            elif self.router.sequences(replica.index):
                continue
            self._bury(replica)
            self._replicas.remove(replica)

    # -- The end --------------------------------------------------------------------------------------------------

    def begin_shutdown(self) -> None:
        """Tell all cores to end, without waiting."""
        for core in self.cores().values():
            core.begin_shutdown()

    def finish_shutdown(self, seconds: float) -> None:
        """Wait until cores that were told to end have ended; kill them after so many seconds."""
        deadline = time.monotonic() + seconds
        for core in self.cores().values():
            core.finish_shutdown(max(0.0, deadline - time.monotonic()))
        for thread in self._endings:
            thread.join(KILL_SECONDS)
        self._selector.close()

    # -- One of them ----------------------------------------------------------------------------------------------

    def _add(self, index: int) -> Replica:
        replica = Replica(index, self._start)
        self._replicas.append(replica)
        self._watch(replica)
        return replica

    def _watch(self, replica: Replica) -> None:
        assert replica.core is not None
        self._watched[replica.index] = replica.core.fds
        for fd in self._watched[replica.index]:
            self._selector.register(fd, selectors.EVENT_READ)

    def _meet(self, replica: Replica) -> None:
        """Let the router know of a replica, whose KV cache is as large as others'."""
        assert self._ready is not None
        cache = self._ready.vllm_config.cache_config
        self.router.add(replica.index, cache.block_size * cache.num_gpu_blocks)

    def _numbers(self) -> list[int]:
        return [each.index for each in self._replicas if each.is_open]

    def _collect(self, replica: Replica, core: RemoteCore) -> None:
        """Take over what a core has said: its outcomes, or that it is ready."""
        while True:
            try:
                outputs = core.take_outputs()
            except FrameError as error:
                with contextlib.suppress(EngineDeadError):  # which is seen when the core is looked at
                    core.abort_requests(self.router.sequences(replica.index))
                self._fail_requests(replica, f"an outcome of its engine core cannot be read: {error}")
                continue
            if outputs is None:
                break
            for output in outputs.outputs:
                self.router.on_output(output)
            self.outputs.append(msgspec.structs.replace(outputs, engine_index=replica.index))
        with self.losing(replica.index):
            if replica.poll_start():
                logger.info("replica %d is ready", replica.index)

    def _fail_requests(self, replica: Replica, problem: str) -> None:
        """Say of all sequences of a replica that they have failed, and forget them."""
        assert self._ready is not None
        error = RequestError("internal", problem)
        failed = [
            EngineCoreOutput(request_id=each, finish_reason="error", error=error)
            for each in self.router.lose(replica.index)
        ]
        step = EngineCoreOutputs(outputs=failed, stats=self._ready.stats, timestamp=time.monotonic())
        self.outputs.append(msgspec.structs.replace(step, engine_index=replica.index))

    def _bury(self, replica: Replica) -> None:
        for fd in self._watched.pop(replica.index, []):
            self._selector.unregister(fd)
        thread = replica.bury()
        self._endings = [each for each in self._endings if each.is_alive()]
        if thread is not None:
            self._endings.append(thread)
