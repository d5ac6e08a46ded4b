"""Own the replicas of a model: receive from all, replace failed ones, add or drain others."""

from __future__ import annotations

import contextlib
import itertools
import logging
import selectors
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator

import msgspec

from jaxllm.core_messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, RequestError, sequence_ids
from jaxllm.engine.client.remote_core import KILL_SECONDS, POLL_SECONDS, RemoteCore
from jaxllm.engine.client.replica import Replica, StartReplica
from jaxllm.engine.client.router import Router
from jaxllm.engine.transport.engine_ready import EngineReady
from jaxllm.engine.transport.wire import FrameError
from jaxllm.exceptions import EngineDeadError, ScalingReplacedError, VLLMValidationError

logger = logging.getLogger(__name__)


class ReplicaSet:
    """Owns the replicas and collects their outcomes. For one thread.

    A core that fails ends its own requests, each with an output that says why, and another is started in its place,
    also where all fail at once. The engine has ended once none runs or starts, and each has failed many times in a row.
    """

    def __init__(self, start: StartReplica, count: int) -> None:
        """Begin to start `count` cores, numbered from 0."""
        self._start = start
        self._selector = selectors.DefaultSelector()
        self._replicas: deque[Replica] = deque()
        """All replicas; the first is the next one to receive from."""
        self._watched: dict[int, list[int]] = {}
        """The file descriptors of each replica's core, which cannot be asked for them once it has closed."""
        self._endings: list[threading.Thread] = []
        self._ready: EngineReady | None = None
        self._wanted = count
        self._scale_error: str | None = None
        self._tend_at = 0.0
        self.router = Router(None)
        self.sleep_level = 0
        """The level at which the cores sleep: none is started meanwhile, and one that becomes ready sleeps too."""
        self.outputs: deque[EngineCoreOutputs] = deque()
        """The outcomes of steps that nobody has taken yet, oldest first."""
        self.end_message: str | None = None
        """What has ended the last core, once the engine has ended."""
        try:
            for index in range(count):
                self._add(index)
        except BaseException:
            for core in self.cores().values():
                core.kill()
            raise

    def cores(self) -> dict[int, RemoteCore]:
        """Return the cores that run or start, by the numbers of their replicas, in their order."""
        replicas = sorted(self._replicas, key=lambda replica: replica.index)
        return {each.index: each.core for each in replicas if each.core is not None}

    def running(self) -> list[Replica]:
        """Return the replicas whose cores take requests or finish some, by their numbers."""
        return sorted((each for each in self._replicas if each.is_running), key=lambda replica: replica.index)

    def fileno(self) -> int:
        """Return the file descriptor to wait for messages and ends with, whichever cores there are."""
        return self._selector.fileno()  # epoll's or kqueue's

    def wait_ready(self) -> EngineReady:
        """Wait until all cores are ready; return the settings of the one with the least room for a request."""
        if self._ready is None:
            answers = [core.wait_ready() for core in self.cores().values()]
            self._ready = min(answers, key=lambda ready: ready.max_model_len)
            cache = self._ready.vllm_config.cache_config
            num_seats = self._ready.vllm_config.scheduler_config.max_num_seqs
            self.router = Router(cache.block_size if cache.enable_prefix_caching else None, num_seats)
            for replica in self._replicas:
                self._meet(replica)
                replica.poll_start()
        return self._ready

    def choose(self, request: EngineCoreRequest) -> Replica:
        """Return the replica for a request: a running one, or else one that starts.

        A draining replica takes forks of its sequences. Raises VLLMValidationError if the request asks for an unknown
        replica.
        """
        asked = request.data_parallel_rank
        donor = None if request.fork_of is None else self.router.owner(request.fork_of)
        open_ones = {
            each.index: each
            for each in self._replicas
            if (each.is_open or each.index == donor) and asked in (None, each.index)
        }
        if not open_ones:
            message = f"there is no replica {asked}: there are {sorted(self._numbers())}."
            raise VLLMValidationError(message, parameter="data_parallel_rank", value=asked)
        starting = {index: each for index, each in open_ones.items() if each.core is not None}
        chosen = {index: each for index, each in open_ones.items() if each.is_running} or starting or open_ones
        return chosen[self.router.route(request, sorted(chosen))]

    @contextlib.contextmanager
    def losing(self, index: int) -> Iterator[Replica]:
        """Use a replica in a block. If its core turns out to have ended, the block is left and the replica lost."""
        replica = next(each for each in self._replicas if each.index == index)
        try:
            yield replica
        except EngineDeadError as error:
            self.lose(replica, str(error))

    def receive(self) -> bool:
        """Take in one message, of each core in turn; return False if none has come.

        It also notices the end of a core: neither `wait` nor `look` is called while others have messages.
        """
        if time.monotonic() >= self._tend_at:
            self._tend()
        for _ in range(len(self._replicas)):
            replica = self._replicas[0]
            self._replicas.rotate(-1)
            if replica.core is None:
                continue
            try:
                if replica.core.receive():
                    self._collect(replica, replica.core)
                elif replica.core.has_ended:
                    self._look(replica)
                else:
                    continue
            except (EngineDeadError, VLLMValidationError) as error:  # or it refuses arguments that it took before
                self.lose(replica, str(error))
            return True
        return False

    def look(self) -> None:
        """Take in what has come, see which cores have ended or hang, and start those whose time it is."""
        for replica in list(self._replicas):
            self._look(replica)
        self._tend()

    def _look(self, replica: Replica) -> None:
        """Take in what has come from a replica, and see whether its core has ended or hangs."""
        problem, core = None, replica.core
        if core is None:
            return
        try:
            core.look()
        except (EngineDeadError, VLLMValidationError) as error:
            problem = str(error)
        self._collect(replica, core)
        if problem is not None and replica.core is core:  # else it was lost while its messages were taken in
            self.lose(replica, problem)

    def wait(self) -> None:
        """Wait for a message, for a core's end or for the time to start one."""
        lost = [] if self.sleep_level else [each for each in self._replicas if each.core is None]
        rests = [each.restart_at - time.monotonic() for each in lost]
        self._selector.select(max(0.0, min(POLL_SECONDS, *rests, POLL_SECONDS)))

    def lose(self, replica: Replica, problem: str) -> None:
        """End a failed core's requests, and plan for another core, unless the replica drains or was never ready.

        Requests that the core has not been sent go to another replica, if there is one.
        """
        backlog = self._withdraw_backlog(replica)
        self._fail_requests(replica, problem, self.router.lose(replica.index))
        seconds = replica.rest()
        self._bury(replica)
        if not replica.is_open or not replica.has_served:
            self._replicas.remove(replica)
            self._scale_error = problem
        else:
            logger.error("replica %d is started again in %.0f s: %s", replica.index, seconds, problem)
            if seconds == 0 and not self.sleep_level:
                self._restart(replica)
        self._end_if_hopeless(problem)
        self._place(replica, backlog, problem)

    def _end_if_hopeless(self, problem: str) -> None:
        """End the engine, and the requests that wait for a core, where none runs or starts, or soon will."""
        if self.end_message is None and not any(other.is_hopeful for other in self._replicas):
            self.end_message = problem
            for other in self._replicas:
                self._place(other, self._withdraw_backlog(other), problem)

    def _place(self, before: Replica, backlog: Iterable[EngineCoreRequest], problem: str) -> None:
        """Give requests that have waited for a replica's core to others, or end them where none will take them."""
        for request in backlog:
            try:
                if self.end_message is not None:
                    raise EngineDeadError(self.end_message)
                self.choose(request).add_request(request)
            except (EngineDeadError, VLLMValidationError):
                self.router.withdraw(request)
                self._fail_requests(before, problem, sequence_ids(request))

    def _withdraw_backlog(self, replica: Replica) -> list[EngineCoreRequest]:
        """Take from a replica the requests that wait for its core."""
        backlog = replica.take_backlog()
        for request in backlog:
            self.router.withdraw(request)
        return backlog

    def _tend(self) -> None:
        """End replicas that have drained, and start cores whose time it is."""
        self._tend_at = time.monotonic() + POLL_SECONDS
        self.retire()
        for replica in self._replicas:
            if replica.core is None and not self.sleep_level and time.monotonic() >= replica.restart_at:
                self._restart(replica)

    def _restart(self, replica: Replica) -> None:
        """Start another core, or plan for it once more if that cannot even begin."""
        try:
            replica.restart()
        except Exception as error:  # no room for its files, no process, a cluster that does not answer
            seconds = replica.rest()
            logger.exception("replica %d cannot be started; the next attempt is in %.0f s", replica.index, seconds)
            self._end_if_hopeless(str(error))
        else:
            self._watch(replica)

    # -- More or fewer of them ------------------------------------------------------------------------------------

    def scale(self, count: int, drain_seconds: float) -> None:
        """Begin to have `count` replicas: others start, or the last ones drain, for `drain_seconds` at most.

        This replaces a change that has not ended.
        """
        self._wanted, self._scale_error = count, None
        taken = {each.index for each in self._replicas}
        staying = sorted(self._replicas, key=lambda kept: (not kept.is_open, kept.index))  # draining ones last
        for rank, replica in enumerate(staying):
            if rank < count:
                replica.drain_until = None
            elif replica.is_open:
                replica.drain_until = time.monotonic() + drain_seconds
        free = (index for index in itertools.count() if index not in taken)
        for index in itertools.islice(free, max(0, count - len(staying))):
            self._meet(self._add(index))
        self.retire()

    def has_scaled(self, count: int) -> bool:
        """Return whether `scale(count)` has ended: no replica starts for the first time, and none drains.

        Raises RuntimeError if a replica could not be started, ScalingReplacedError if another number has been asked for
        since.
        """
        if self._wanted != count:
            raise ScalingReplacedError(f"Scaling to {count} replicas was replaced by scaling to {self._wanted}.")
        if any(not each.is_open or not each.has_served for each in self._replicas):
            return False
        if self._scale_error is not None:
            raise RuntimeError(f"A replica cannot be started: {self._scale_error}")
        return True

    def retire(self) -> None:
        """End replicas that have drained."""
        for replica in list(self._replicas):
            if replica.drain_until is None:
                continue
            if time.monotonic() >= replica.drain_until:
                problem = "its replica was taken away before the request had ended"
                self._fail_requests(replica, problem, self.router.lose(replica.index))
            elif self.router.is_needed(replica.index):
                continue
            self._bury(replica)
            self._replicas.remove(replica)

    # -- The end --------------------------------------------------------------------------------------------------

    def begin_shutdown(self) -> None:
        """Tell all cores to end, without waiting."""
        for core in self.cores().values():
            core.begin_shutdown()

    def finish_shutdown(self, seconds: float) -> None:
        """Wait until cores that were told to end have ended; kill them after `seconds`."""
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
        """Add a replica to the router; its KV cache is as large as the others'."""
        assert self._ready is not None
        cache = self._ready.vllm_config.cache_config
        self.router.add(replica.index, cache.block_size * cache.num_gpu_blocks)

    def _numbers(self) -> list[int]:
        return [each.index for each in self._replicas if each.is_open]

    def _collect(self, replica: Replica, core: RemoteCore) -> None:
        """Take the outcomes of a core, or note that it is ready."""
        while True:
            try:
                outputs = core.take_outputs()
            except FrameError as error:
                lost = self.router.sequences(replica.index)
                with contextlib.suppress(EngineDeadError):  # which is seen when the core is looked at
                    core.abort_requests(lost)
                self.router.end(lost)
                self._fail_requests(replica, f"an outcome of its engine core cannot be read: {error}", lost)
                continue
            if outputs is None:
                break
            replica.stats = outputs.stats
            for output in outputs.outputs:
                self.router.on_output(output)
            self.router.on_next_tokens(outputs.next_tokens.sequence_ids)
            self.outputs.append(msgspec.structs.replace(outputs, engine_index=replica.index))
        with self.losing(replica.index):
            if replica.poll_start():
                logger.info("replica %d is ready", replica.index)
                if self.sleep_level:
                    core.drop_reply(core.begin_call("sleep", self.sleep_level))
                for other in self._replicas:  # others, too, may have requests that none has begun
                    if not other.is_running or other is replica:
                        self._place(other, self._withdraw_backlog(other), "its replica could not be sent the request")

    def _fail_requests(self, replica: Replica, problem: str, sequences: Iterable[str]) -> None:
        """Say that sequences of a replica have failed."""
        assert self._ready is not None
        error = RequestError("internal", problem)
        failed = [EngineCoreOutput(request_id=each, finish_reason="error", error=error) for each in sequences]
        step = EngineCoreOutputs(outputs=failed, stats=replica.stats or self._ready.stats, timestamp=time.monotonic())
        self.outputs.append(msgspec.structs.replace(step, engine_index=replica.index))

    def _bury(self, replica: Replica) -> None:
        for fd in self._watched.pop(replica.index, []):
            self._selector.unregister(fd)
        thread = replica.bury()
        self._endings = [each for each in self._endings if each.is_alive()]
        if thread is not None:
            self._endings.append(thread)
