"""Resolve `nnodes="auto"` to the number of hosts of this job, with this host's rank and the first host's address."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from jaxllm.exceptions import VLLMValidationError

if TYPE_CHECKING:
    from jaxllm.config.arguments import EngineArguments

_FIND_SECONDS = 300
"""The seconds that the first host's name may take to resolve: its pod may start after the others'."""


def on_this_host[Args: EngineArguments](args: Args) -> Args:
    """Return engine arguments with numbers for nnodes="auto"; other arguments stay unchanged.

    Call it once, before the numbers are read: with Open MPI 5 all hosts must call it at the same time. Raises
    VLLMValidationError if no hosts are found, or if this host's rank is set as well.
    """
    if args.nnodes > 0:
        return args
    for name in ("node_rank", "master_addr"):
        if (value := getattr(args, name)) != getattr(type(args), name):
            message = f"{name}={value!r} cannot be given with nnodes=auto, which finds it: leave it out."
            raise VLLMValidationError(message, parameter=name, value=value)
    nnodes, node_rank, master_addr = _find()
    if nnodes == 1:
        return dataclasses.replace(args, nnodes=1)
    return dataclasses.replace(args, nnodes=nnodes, node_rank=node_rank, master_addr=master_addr)


def _find() -> tuple[int, int, str]:
    """Return the number of hosts, this one's rank and the first one's address."""
    try:
        # JAX has no public name for it: `jax.distributed.initialize` finds hosts only to join them, at a port of its
        # own, and with Slurm and Open MPI leaves a process but one device.
        from jax._src.clusters import ClusterEnv

        address, count, rank, local_ids = ClusterEnv.auto_detect_unset_distributed_params(
            coordinator_address=None,
            num_processes=None,
            process_id=None,
            local_device_ids=None,
            cluster_detection_method=None,
            initialization_timeout=_FIND_SECONDS,
        )
    except Exception as error:  # the clients of Kubernetes, MPI and metadata servers may raise anything
        raise _refusal(f"JAX has failed to find the hosts ({type(error).__name__}: {error})") from error
    if address is None or count is None or rank is None:
        known = "a TPU pod, of a step of Slurm (srun), of Open MPI (mpirun), or of a Kubernetes job (with jax[k8s])"
        raise _refusal(f"JAX does not find this process to be part of {known}")
    if local_ids and local_ids[0] > 0:
        message = f"this is process {local_ids[0]} of its host, whose first process takes all devices"
        raise _refusal(f"{message}: start one process on each host")
    return count, rank, address.rpartition(":")[0]


def _refusal(message: str) -> VLLMValidationError:
    message = f"nnodes=auto: {message}. Otherwise give nnodes, node_rank and master_addr."
    return VLLMValidationError(message, parameter="nnodes", value="auto")
