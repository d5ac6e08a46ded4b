"""Join the processes of one model: `jax.distributed` lists the devices of all hosts as one."""

from __future__ import annotations

import logging
import secrets
import socket
from typing import TYPE_CHECKING

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxllm.config.environment import compile_alone
from jaxllm.engine.core.hosts.link import Link, accept, connect
from jaxllm.exceptions import VLLMValidationError

if TYPE_CHECKING:
    from jaxllm.config.arguments import EngineArguments

logger = logging.getLogger(__name__)

_JOIN_SECONDS = 300
_SHUTDOWN_SECONDS = 5
_KEY_BYTES = 32


def join(args: EngineArguments) -> list[Link]:
    """Wait for all hosts; return the links to the others on the first one, and the link to that one on the others.

    Call it before JAX opens its devices. The first host listens at master_port, for JAX, and at the next one. Raises
    VLLMValidationError if this process cannot join, RuntimeError if the others do not come within `_JOIN_SECONDS`.
    """
    _check(args)
    logger.info("host %d of %d; host 0 is at %s:%d", args.node_rank, args.nnodes, args.master_addr, args.master_port)
    compile_alone()
    # The engine handles SIGTERM, not JAX.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            f"{args.master_addr}:{args.master_port}",
            args.nnodes,
            args.node_rank,
            # Each process has all devices of its host: with Slurm and Open MPI, JAX would give it one.
            cluster_detection_method="deactivate",
            initialization_timeout=_JOIN_SECONDS,
            shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
        )
    except RuntimeError as error:
        if "must be called before" not in str(error):
            raise
        message = "JAX has opened this process's devices: make an engine of several hosts first, and once."
        raise VLLMValidationError(message, parameter="nnodes", value=args.nnodes) from error
    port = args.master_port + 1
    if args.node_rank > 0:
        return [connect(args.master_addr, port, _exchange(None), args.node_rank)]
    key = secrets.token_bytes(_KEY_BYTES)
    is_dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual else socket.AF_INET
    with socket.create_server(("", port), family=family, backlog=args.nnodes, dualstack_ipv6=is_dual) as server:
        _exchange(key)
        return accept(server, key, args.nnodes - 1, _JOIN_SECONDS)


def _check(args: EngineArguments) -> None:
    """Raise VLLMValidationError for arguments that cannot be those of several hosts."""
    name, message = "nnodes", None
    if args.node_rank >= args.nnodes:
        name, message = "node_rank", f"node_rank={args.node_rank} is none of nnodes={args.nnodes} hosts, from 0 on."
    elif args.tensor_parallel_size % args.nnodes:
        size = args.tensor_parallel_size
        message = f"nnodes={args.nnodes} does not divide tensor_parallel_size={size}, the devices of all hosts."
    elif args.data_parallel_size > 1:
        message = "replicas of a model over several hosts are not supported: start them by themselves."
    elif jax.distributed.is_initialized():
        message = "this process has joined other hosts before: one engine of several hosts is made in a process."
    if message is not None:
        raise VLLMValidationError(message, parameter=name, value=getattr(args, name))


def _exchange(key: bytes | None) -> bytes:
    """Return the first host's key, which it gives, to all."""
    sent = np.frombuffer(key or bytes(_KEY_BYTES), np.uint8)
    return np.asarray(multihost_utils.broadcast_one_to_all(sent)).astype(np.uint8).tobytes()
