"""The main function of one of several front-end processes, which `processes/front_process.py` starts."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import shutil
import socket
import sys
import warnings
from typing import Any

import msgspec
from prometheus_client.registry import CollectorRegistry

from jaxllm.config.server_arguments import ServerArgs
from jaxllm.engine.transport.wire import Told
from jaxllm.exceptions import EngineBusyError, EngineDeadError, VLLMValidationError
from jaxllm.resolve.async_engine_args import AsyncEngineArgs
from jaxllm.server.app import build_app
from jaxllm.server.models.registry import ServedModels
from jaxllm.server.openai.serving_models import AdapterChange, LoRAModule, OpenAIServingModels
from jaxllm.server.processes.acceptor import Acceptor
from jaxllm.server.processes.board import Board, SharedLoad
from jaxllm.server.processes.client import SharedLLM
from jaxllm.server.processes.front_process import FrontOrder
from jaxllm.server.processes.reports import Report, is_of_core, merged, read, registry_of
from jaxllm.server.run import FrontPart, serve_engine
from jaxllm.server.served_model import ServedModel
from jaxllm.utils.async_utils import start_worker_threads
from jaxllm.utils.fork_safety import end_with
from jaxllm.utils.garbage import settle_garbage
from jaxllm.utils.log import configure_log, show_log

logger = logging.getLogger(__name__)

_REPORT_SECONDS = 0.5
_ADAPTER = "adapter"


class _Front(FrontPart):
    """One front end among several: what it shares with the others, by way of their parent."""

    def __init__(self, order: FrontOrder, board: Board, engine: SharedLLM, app: Any, args: ServerArgs) -> None:
        self._index, self._engine, self._app, self._prefix = order.index, engine, app, args.metrics_prefix
        self._first_adapters = {LoRAModule.read(each).name for each in args.lora_modules or ()}
        self._board = board
        self.load, self.is_again = SharedLoad(board, order.index), order.is_again
        self._tasks: set[asyncio.Task[None]] = set()

    def acceptor(self, listener: socket.socket, connections: set[Any]) -> Acceptor:
        """Return what takes this front end's connections."""
        self._acceptor = Acceptor(listener, self._board, self._index, lambda: len(connections))
        return self._acceptor

    async def begin(self) -> None:
        """Share with the others, once the application has its engine."""
        state = self._app.state
        self._models.share(self._board.next_adapter, self._tell_adapter)
        state.kept_responses.stop_storing()
        state.gather_metrics = self._gather
        self._engine.parent.listen(self._on_told)
        await self._engine.ask_parent("report", self._report())
        self._keep(self._report_always())

    async def end(self) -> None:
        """Report for the last time."""
        for task in list(self._tasks):
            task.cancel()
        with contextlib.suppress(EngineDeadError, EngineBusyError):
            await self._engine.ask_parent("report", self._report())

    @property
    def _models(self) -> OpenAIServingModels:
        """Return the names of the only model and its adapters."""
        models: ServedModels[ServedModel] = self._app.state.models
        assert models.only is not None
        assert models.only.record is not None
        return models.only.record.models

    async def _tell_adapter(self, change: AdapterChange) -> None:
        """Tell all of a change. Later front ends hear of an adapter that is unloaded only if they begin with it."""
        is_forgotten = change.number is None and change.name not in self._first_adapters
        await self._engine.tell(_ADAPTER, change.name, None if is_forgotten else msgspec.to_builtins(change))

    def _keep(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _on_told(self, told: Told) -> None:
        self._keep(self._take_told(told))

    async def _take_told(self, told: Told) -> None:
        """Take in a change, and acknowledge it."""
        try:
            if told.kind == _ADAPTER:
                value = told.value or {"name": told.key, "number": None}
                self._models.take(msgspec.convert(value, AdapterChange))
            else:
                await self._engine.take_told(told)
        except Exception:
            logger.exception("a change that another front end has made cannot be taken in")
        with contextlib.suppress(EngineDeadError, EngineBusyError):
            await self._engine.ask_parent("acknowledge", told.told_id)

    async def _report_always(self) -> None:
        """Report this process's metrics again and again: its counts shall outlive it."""
        with contextlib.suppress(EngineDeadError, EngineBusyError):
            while True:
                await asyncio.sleep(_REPORT_SECONDS)
                self._acceptor.show()
                await self._engine.ask_parent("report", self._report())

    def _report(self) -> Any:
        report = read(self._app.state.registry, str(self._index))
        return msgspec.to_builtins([each for each in report if not is_of_core(each.name, self._prefix)])

    async def _gather(self) -> CollectorRegistry:
        """Return the metrics of all front ends and of the core."""
        reports = await self._engine.ask_parent("collect", self._report())
        return registry_of(merged(msgspec.convert(reports, list[Report.__value__])))


async def _run(order: FrontOrder) -> int:
    """Join the engine and serve it; return the exit status."""
    engine_args = AsyncEngineArgs(**order.settings.engine_args)
    server_args = ServerArgs(**order.settings.server_args)
    args = argparse.Namespace(**vars(engine_args), **vars(server_args))
    app = build_app(args)
    board = Board(order.board_fd, order.num_rows)
    start_worker_threads()
    engine = await asyncio.to_thread(SharedLLM.join, engine_args, order.addresses, board, order.index)
    async with engine:
        try:
            await asyncio.to_thread(engine.front.inputs.prepare_media)
            settle_garbage()
            part = _Front(order, board, engine, app, server_args)
            grpc_listener = None if order.grpc_fd is None else socket.socket(fileno=order.grpc_fd)
            with socket.socket(fileno=order.listener_fd) as listener:
                await serve_engine(engine, app, listener, args, grpc_listener, part=part)
        except VLLMValidationError as error:  # the parent ends the server with it
            await engine.ask_parent("refuse", str(error), error.parameter)
            return 2
    return 0


def main() -> int:
    """Run the front end that the order on standard input describes; return the exit status."""
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=FrontOrder)
    end_with(order.parent_pid, lambda: shutil.rmtree(order.folder, ignore_errors=True))
    sys.path[:] = order.sys_path
    logging.getLogger("jaxllm").setLevel(order.log_level)
    show_log()
    if (file := order.settings.engine_args.get("log_config_file")) is not None:
        configure_log(file)
    warnings.filterwarnings("ignore", module="PIL")  # as `run_server` does
    import uvloop

    try:
        return uvloop.run(_run(order))
    except EngineDeadError as error:
        logger.error("front end %d ends: %s", order.index, error)
        return 1
    except VLLMValidationError as error:
        logger.error("front end %d cannot start: %s", order.index, error)
        return 2


if __name__ == "__main__":
    sys.exit(main())
