"""The main function of the process or thread that runs an engine core for the front end that started it."""

from __future__ import annotations

import gc
import logging
import shutil
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from jaxllm.core_messages import RequestError
from jaxllm.engine.core.core_loop import CoreLoop, Heart
from jaxllm.engine.transport.core_client import RunnableCore
from jaxllm.engine.transport.engine_ready import EngineReady
from jaxllm.engine.transport.sockets import Addresses, SocketInbox, SocketOutbox
from jaxllm.engine.transport.wire import Failure, Starting
from jaxllm.exceptions import VLLMValidationError
from jaxllm.resolve.async_engine_args import AsyncEngineArgs
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.usage.usage_lib import UsageContext
from jaxllm.utils.fork_safety import end_with
from jaxllm.utils.log import configure_log, show_log

logger = logging.getLogger(__name__)

type _OnTokenizer = Callable[[Tokenizer | None], None]
type _Made = tuple[RunnableCore, EngineReady]
type _StartFor = Callable[[AsyncEngineArgs, UsageContext, _OnTokenizer], _Made]
type StartCore = Callable[[_OnTokenizer], _Made]
"""A function that makes a core; it passes the tokenizer to its argument as soon as it is loaded."""


class StartOrder(msgspec.Struct, frozen=True):
    """The request that a front end writes to the standard input of its core's process."""

    engine_args: dict[str, Any]
    usage_context: UsageContext
    addresses: Addresses
    sys_path: list[str]
    """The front end's sys.path: logits processors and plugins may lie beside the user's script."""
    log_level: int
    front_pid: int
    """The front end's process, with which the core's ends."""
    replica: int | None
    """The number of the replica, which decides its devices; None where the process sees no others."""
    folder: str | None
    """The folder of the addresses, which the core deletes when the front end has not lived to do so."""

    def clear(self) -> None:
        """Delete the folder of the addresses."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


def run_core(start: StartCore, addresses: Addresses, context: zmq.Context[zmq.Socket[bytes]]) -> int:
    """Make a core, announce it to the front end and run it until `Shutdown`; return the exit status.

    An earlier end is reported to the front end, and logged.
    """
    outbox = SocketOutbox(context, addresses)
    beats = SocketOutbox(context, addresses, can_drop=True)  # a front end that rests for long would stop the heart
    heart, core = Heart(beats), None
    inbox = SocketInbox(context, addresses)
    try:
        core, ready = start(lambda tokenizer: outbox.send(Starting(None if tokenizer is None else tokenizer.parts)))
        loop = CoreLoop(core, inbox, outbox)
        outbox.send(ready)
        heart.watch(loop)
        loop.run()
    except BaseException as error:
        outbox.send(Failure(RequestError.of(error)))
        if core is None and isinstance(error, VLLMValidationError):
            return 2  # the caller that gave the arguments gets it raised
        logger.exception("the engine core has failed")
        return 1
    finally:
        heart.stop()
        for end in (inbox, outbox, beats):
            end.close()
        if core is not None:
            core.shutdown()
    return 0


def serve(start: _StartFor) -> int:
    """Run the core that `start` makes of the engine arguments on standard input; return the exit status."""
    return follow_order(sys.stdin.buffer.read(), start)


def follow_order(content: bytes, start: _StartFor | None = None) -> int:
    """Run the core of a `StartOrder` in JSON until its front end's process ends; return the exit status."""
    order = msgspec.json.decode(content, type=StartOrder)
    end_with(order.front_pid, order.clear)
    sys.path[:] = order.sys_path
    return carry_out(order, start)


def carry_out(order: StartOrder, start: _StartFor | None = None) -> int:
    """Run the core that an order asks for, made by `start`; return the exit status."""
    begin = start or _start
    logging.getLogger("jaxllm").setLevel(order.log_level)
    show_log()

    def start_and_freeze(on_tokenizer: _OnTokenizer) -> _Made:
        engine_args = AsyncEngineArgs(**order.engine_args)
        if engine_args.log_config_file is not None:
            configure_log(engine_args.log_config_file)
        if engine_args.data_parallel_size > 1 and order.replica is not None:
            _take_share(order.replica, engine_args)
        made = begin(engine_args, order.usage_context, on_tokenizer)
        # Modules and programs are a quarter of a million objects: a look through them would hold a step up for 0.2 s.
        gc.freeze()
        return made

    with zmq.Context() as context:
        return run_core(start_and_freeze, order.addresses, context)


def _take_share(replica: int, engine_args: AsyncEngineArgs) -> None:
    from jaxllm.engine.core.replica_devices import take_share  # imports JAX

    take_share(replica, engine_args.data_parallel_size, engine_args.tensor_parallel_size)


def _start(engine_args: AsyncEngineArgs, usage_context: UsageContext, on_tokenizer: _OnTokenizer) -> _Made:
    from jaxllm.engine.core.startup import start_core  # imports JAX

    return start_core(engine_args, usage_context, on_tokenizer)


if __name__ == "__main__":
    sys.exit(serve(_start))
