"""Run an engine core as an actor of a Ray cluster, on any of its machines; Ray gives it its devices."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from typing import TYPE_CHECKING, Any

import msgspec
import ray  # pyright: ignore[reportMissingImports]
from ray.exceptions import GetTimeoutError, RayError  # pyright: ignore[reportMissingImports]

from jaxllm.engine.core.core_process import StartOrder, carry_out
from jaxllm.engine.transport.sockets import Meeting

if TYPE_CHECKING:
    from jaxllm.resolve.engine_args import EngineArgs


class _Core:
    """The actor: one core, for as long as it runs."""

    def place(self) -> tuple[str, int]:
        """Return the node and the process that it runs in."""
        return ray.get_runtime_context().get_node_id(), os.getpid()

    def run(self, order: bytes) -> int:
        """Run the core that an order asks for, and return its exit status."""
        return carry_out(msgspec.json.decode(order, type=StartOrder))


class CoreActor:
    """A core in an actor. Its messages cross the network, encrypted with a key that Ray delivers."""

    fds: list[int] = []  # noqa: RUF012 - there are none
    poll_seconds = 0.1

    def __init__(self, engine_args: EngineArgs, replica: int | None = None) -> None:
        """Have Ray start the actor on a machine with as many free devices as the core's mesh has.

        The cluster is the one that this program is connected to, else that of RAY_ADDRESS, else one of this machine
        alone. Raises VLLMValidationError for arguments that cannot cross to it.
        """
        portable = engine_args.portable()
        if not ray.is_initialized():
            ray.init(log_to_driver=True, include_dashboard=False)
        self.meeting = Meeting.on_network(ray.util.get_node_ip_address())
        order = StartOrder(
            portable,
            self.meeting.addresses,
            sys_path=[],
            log_level=logging.getLogger("jaxllm").getEffectiveLevel(),
            front_pid=os.getpid(),
            replica=None,  # Ray gives the actor its devices, which it need not share out
            folder=None,
        )
        options = _resources(engine_args.tensor_parallel_size)
        self._actor: Any = ray.remote(_Core).options(max_restarts=0, **options).remote()
        of_replica = "" if replica is None else f" of replica {replica}"
        self.name = f"the engine core{of_replica} (a Ray actor)"
        self._place = self._actor.place.remote()
        self._run = self._actor.run.remote(msgspec.json.encode(order))
        self._reason: str | None = None
        self._next_look = 0.0

    @property
    def pid(self) -> int | None:
        """Return the id of the actor's process, once it runs, if it is on this machine."""
        try:
            node, pid = ray.get(self._place, timeout=0)
        except (GetTimeoutError, RayError):
            return None
        return pid if node == ray.get_runtime_context().get_node_id() else None

    def end_reason(self) -> str | None:
        """Return how the actor has ended; None while it runs."""
        if self._reason is None and time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + self.poll_seconds  # each look asks Ray
            self._look(0)
        return self._reason

    def wait(self, seconds: float) -> None:
        """Wait until the actor has ended; it is killed after `seconds`."""
        self._look(seconds)
        if self._reason is None:
            self.kill()

    def stop(self, seconds: float) -> None:
        """Do as `wait` does, and have Ray free the devices. May be called twice."""
        self.wait(seconds)
        self.kill()
        self.meeting.close()

    def kill(self) -> None:
        """Kill the actor and do not wait."""
        with contextlib.suppress(RayError):
            ray.kill(self._actor)

    def _look(self, seconds: float) -> None:
        if self._reason is not None:
            return
        try:
            status = ray.get(self._run, timeout=seconds)
        except GetTimeoutError:
            return
        except RayError as error:
            self._reason = f"Ray says: {str(error).splitlines()[0]}"
        else:
            self._reason = f"it ended with status {status}"


def _resources(num_devices: int) -> dict[str, Any]:
    """Return the resources that a core needs of a cluster: accelerators if it has any, else a CPU."""
    resources = ray.cluster_resources()
    if "GPU" in resources:
        return {"num_gpus": num_devices}
    if "TPU" in resources:
        return {"resources": {"TPU": num_devices}}
    return {"num_cpus": 1}
