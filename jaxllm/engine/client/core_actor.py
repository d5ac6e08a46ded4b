"""Run an engine core as an actor of a Ray cluster, on any of its machines; Ray gives it its devices.

A model over several hosts has an actor on each of as many machines: the core's, and those of the hosts that follow it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import time
from typing import TYPE_CHECKING, Any

import msgspec
import ray  # pyright: ignore[reportMissingImports]
from ray.exceptions import GetTimeoutError, RayError  # pyright: ignore[reportMissingImports]
from ray.util.placement_group import (  # pyright: ignore[reportMissingImports]
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # pyright: ignore[reportMissingImports]

from jaxllm.engine.core.core_process import StartOrder, carry_out
from jaxllm.engine.transport.sockets import Meeting
from jaxllm.resolve.async_engine_args import AsyncEngineArgs

if TYPE_CHECKING:
    from jaxllm.resolve.engine_args import EngineArgs
    from jaxllm.usage.usage_lib import UsageContext

logger = logging.getLogger(__name__)

_PATIENCE_SECONDS = 30.0
"""Ray starts an actor in seconds if a machine has the devices for it free."""
_BLAME_SECONDS = 2.0
"""The other hosts fail with the core, and Ray may notice their ends before its end."""
_PORT_ATTEMPTS = 100


class _Host:
    """The actor: one core, or one host that follows it, for as long as it runs."""

    def place(self) -> tuple[str, int]:
        """Return the node and the process that it runs in."""
        return ray.get_runtime_context().get_node_id(), os.getpid()

    def address(self) -> dict[str, Any]:
        """Return the engine arguments by which other hosts find this one: two ports, now free, are side by side."""
        for _ in range(_PORT_ATTEMPTS):
            with socket.create_server(("", 0)) as server, contextlib.suppress(OSError, OverflowError):
                port = server.getsockname()[1]
                with socket.create_server(("", port + 1)):
                    return {"master_addr": ray.util.get_node_ip_address(), "master_port": port}
        raise OSError("this machine has no two free ports side by side")

    def run(self, order: bytes, address: dict[str, Any]) -> int:
        """Run the core that an order asks for, or follow it from another host; return the exit status.

        `address` is what the first host's `address` has returned.
        """
        decoded = msgspec.json.decode(order, type=StartOrder)
        decoded = msgspec.structs.replace(decoded, engine_args=decoded.engine_args | address)
        if decoded.engine_args.get("node_rank", 0) == 0:
            return carry_out(decoded)
        from jaxllm.engine.core.follower import follow  # imports JAX

        try:
            follow(AsyncEngineArgs(**decoded.engine_args), decoded.usage_context)
        except SystemExit as end:  # Ray takes it for a failure
            return int(end.code or 0)


class CoreActor:
    """A core in an actor, or in one for each host of its model. Its messages to the front end cross the network,
    encrypted with a key that Ray delivers.
    """

    fds: list[int] = []  # noqa: RUF012 - there are none
    poll_seconds = 0.1

    def __init__(self, engine_args: EngineArgs, usage_context: UsageContext, replica: int | None = None) -> None:
        """Have Ray start the actors on machines with as many free devices as each needs.

        The cluster is the one that this program is connected to, else that of RAY_ADDRESS, else one of this machine
        alone. Raises VLLMValidationError for arguments that cannot cross to it.
        """
        portable = engine_args.portable()
        if not ray.is_initialized():
            ray.init(log_to_driver=True, include_dashboard=False)
        self.meeting = Meeting.on_network(ray.util.get_node_ip_address())
        of_replica = "" if replica is None else f" of replica {replica}"
        self.name = f"the engine core{of_replica} (a Ray actor)"
        count = engine_args.nnodes
        self._resources = resources = _resources(engine_args.tensor_parallel_size // count)
        # A host's process takes all of its devices, so no machine may have two.
        self._group = placement_group([resources] * count, strategy="STRICT_SPREAD") if count > 1 else None
        self._actors = [_make_actor(resources, self._group, rank) for rank in range(count)]
        self._places = [actor.place.remote() for actor in self._actors]
        address = self._actors[0].address.remote() if count > 1 else {}
        self._runs = {}
        """The rank of each host's run that has not ended."""
        for rank, actor in enumerate(self._actors):
            order = StartOrder(
                portable | {"node_rank": rank},
                usage_context,
                self.meeting.addresses,
                sys_path=[],
                log_level=logging.getLogger("jaxllm").getEffectiveLevel(),
                front_pid=os.getpid(),
                replica=None,  # Ray gives the actor its devices, which it need not share out
                folder=None,
            )
            self._runs[actor.run.remote(msgspec.json.encode(order), address)] = rank
        self._reason: str | None = None
        self._failure, self._blame_at = "", math.inf
        """How another host has failed, and when that is the reason, unless the core has ended by then."""
        self._next_look = 0.0
        self._patient_until = time.monotonic() + _PATIENCE_SECONDS

    @property
    def pid(self) -> int | None:
        """Return the id of the core's process, once it runs, if it is on this machine."""
        try:
            node, pid = ray.get(self._places[0], timeout=0)
        except (GetTimeoutError, RayError):
            return None
        return pid if node == ray.get_runtime_context().get_node_id() else None

    def end_reason(self) -> str | None:
        """Return how the core has ended, or another host has failed; None while all run."""
        if self._reason is None and time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + self.poll_seconds  # each look asks Ray
            self._look(0)
            if time.monotonic() >= self._patient_until:
                self._patient_until = math.inf
                self._warn_of_missing()
        return self._reason

    def wait(self, seconds: float) -> None:
        """Wait until the core has ended, or another host has failed; all are killed after `seconds`."""
        self._look(seconds)
        if self._reason is None:
            self.kill()

    def stop(self, seconds: float) -> None:
        """Do as `wait` does, and have Ray free the devices. May be called twice."""
        self.wait(seconds)
        self.kill()
        self.meeting.close()

    def kill(self) -> None:
        """Kill the actors and do not wait."""
        for actor in self._actors:
            with contextlib.suppress(RayError):
                ray.kill(actor)
        if self._group is not None:
            with contextlib.suppress(RayError):
                remove_placement_group(self._group)
            self._group = None

    def _look(self, seconds: float) -> None:
        """Look for the core's end, for `seconds`, or that of a host that has failed before it could join."""
        deadline = time.monotonic() + seconds
        while self._reason is None:
            timeout = max(0.0, min(deadline, self._blame_at) - time.monotonic())
            ended, _ = ray.wait(list(self._runs), num_returns=1, timeout=timeout)
            if ended:
                self._take_end(ended[0])
            elif time.monotonic() >= self._blame_at:
                self._reason = self._failure
            else:
                return

    def _take_end(self, run: Any) -> None:
        """Take in the end of a host; another one than the core's ends with status 0 once the core has told it to."""
        rank = self._runs.pop(run)
        try:
            status = ray.get(run)
        except RayError as error:
            how = f"has ended; Ray says: {str(error).splitlines()[0]}"
        else:
            if rank > 0 and status == 0:
                return
            how = f"ended with status {status}"
        if rank == 0:
            self._reason = f"it {how}"
        elif not self._failure:
            self._failure = f"host {rank} of {len(self._actors)} (a Ray actor) {how}"
            self._blame_at = time.monotonic() + _BLAME_SECONDS

    def _warn_of_missing(self) -> None:
        """Say what Ray waits for if it has not started all actors."""
        count = len(self._places)
        started, _ = ray.wait(self._places, num_returns=count, timeout=0)
        if len(started) < count:
            needs = " and ".join(f"{number:g} {kind}" for kind, number in self._resources.items())
            logger.warning(
                "Ray has started %d of %d actors of %s in %.0f s: it waits for %d %s with %s free%s",
                len(started),
                count,
                self.name,
                _PATIENCE_SECONDS,
                count,
                "machine" if count == 1 else "machines",
                needs,
                "" if count == 1 else " on each",
            )


def _make_actor(resources: dict[str, float], group: Any, rank: int) -> Any:
    """Return a new actor with resources of the cluster: those of a bundle, if there is a placement group."""
    options: dict[str, Any] = {"num_cpus": resources.get("CPU", 0), "num_gpus": resources.get("GPU", 0)}
    options["resources"] = {name: count for name, count in resources.items() if name not in ("CPU", "GPU")}
    if group is not None:
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
    return ray.remote(_Host).options(max_restarts=0, **options).remote()


def _resources(num_devices: int) -> dict[str, float]:
    """Return the resources that a host needs of a cluster: accelerators if it has any, else a CPU."""
    kinds = ray.cluster_resources()
    kind = next((kind for kind in ("GPU", "TPU") if kind in kinds), None)
    return {"CPU": 1} if kind is None else {kind: num_devices}
