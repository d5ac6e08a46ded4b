"""This process joins the others of its model: `jax.distributed` makes one list of devices of all hosts' devices."""

from __future__ import annotations

import secrets
import sys
from multiprocessing.connection import Listener
from typing import TYPE_CHECKING

import jax
import msgspec
import numpy as np
from jax.experimental import multihost_utils

from jaxllm.engine.hosts.link import Link, accept, connect
from jaxllm.exceptions import VLLMValidationError

if TYPE_CHECKING:
    from jaxllm.config.arguments import EngineArguments

JOIN_SECONDS = 300
CARD_BYTES = 512


class _Card(msgspec.Struct, frozen=True):
    """Where the first host listens, and the secret of those who may connect."""

    address: str
    port: int
    key: bytes


def join(args: EngineArguments) -> list[Link]:
    """Wait for all hosts; return the links to the others on the first one, and the link to that one on the others.

    Call it before JAX opens its devices. Raises VLLMValidationError if this process cannot join, RuntimeError if the
    others do not come within `JOIN_SECONDS`.
    """
    _check(args)
    if jax.distributed.is_initialized():
        message = "this process has joined other hosts before: one engine of several hosts is made in a process."
        raise VLLMValidationError(message, parameter="nnodes", value=args.nnodes)
    try:
        jax.distributed.initialize(
            f"{args.master_addr}:{args.master_port}",
            args.nnodes,
            args.node_rank,
            initialization_timeout=JOIN_SECONDS,
        )
    except RuntimeError as error:
        if "must be called before" not in str(error):
            raise
        message = "JAX has opened this process's devices before the engine was made: make it first."
        raise VLLMValidationError(message, parameter="nnodes", value=args.nnodes) from error
    return _meet_others(args) if args.node_rank == 0 else [_meet_first(args)]


def _check(args: EngineArguments) -> None:
    """Raise VLLMValidationError for arguments that cannot be those of several hosts."""
    name, message = "nnodes", None
    if args.node_rank >= args.nnodes:
        name, message = (
            "node_rank",
            f"node_rank={args.node_rank} is none of nnodes={args.nnodes} hosts, from 0 on.",
        )
    elif args.tensor_parallel_size % args.nnodes:
        size = args.tensor_parallel_size
        message = f"nnodes={args.nnodes} does not divide tensor_parallel_size={size}, the devices of all hosts."
    elif args.data_parallel_size > 1:
        message = "replicas of a model over several hosts are not supported: start them by themselves."
    if message is not None:
        raise VLLMValidationError(message, parameter=name, value=getattr(args, name))


def _meet_others(args: EngineArguments) -> list[Link]:
    """Let the others connect that know the secret."""
    key = secrets.token_bytes(32)
    with Listener(("", 0), backlog=args.nnodes, authkey=key) as listener:
        _, port = listener.address
        _exchange(_Card(args.master_addr, int(port), key))
        return accept(listener, args.nnodes - 1)


def _meet_first(args: EngineArguments) -> Link:
    card = _exchange(None)
    return connect(card.address, card.port, card.key, args.node_rank)


def _exchange(card: _Card | None) -> _Card:
    """Return the first host's card, which it gives, to all."""
    buffer = np.zeros(CARD_BYTES, np.uint8)
    if card is not None:
        data = msgspec.msgpack.encode(card)
        buffer[: len(data) + 2] = np.frombuffer(len(data).to_bytes(2, sys.byteorder) + data, np.uint8)
    received = np.asarray(multihost_utils.broadcast_one_to_all(buffer)).astype(np.uint8).tobytes()
    size = int.from_bytes(received[:2], sys.byteorder)
    return msgspec.msgpack.decode(received[2 : 2 + size], type=_Card)
