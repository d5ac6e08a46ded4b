"""Servers of several models, with cores that are threads without weights."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from lib.mock_core import start_mock

from jaxllm.engine.client.fork_server import ForkServer
from jaxllm.engine.client.remote_core import RemoteCore
from jaxllm.engine.front.start import meet
from jaxllm.server.app import build_app
from jaxllm.server.http.connection import bounded_protocol
from jaxllm.server.model_settings import read_models
from jaxllm.server.models.loader import EngineLoader
from jaxllm.server.models.registry import ServedModels
from jaxllm.server.run import bind
from jaxllm.server.several_models import init_models_state
from tests.e2e.tiny_engine import CASE, CONTEXT
from tests.models.tiny import folder
from tests.server.support import START_SECONDS, TEMPLATE, Served, command_line


def fields(tokenizer: str, **more: Any) -> dict[str, Any]:
    """Return the entry of a tiny model in the file of --models."""
    return {
        "model": str(folder(CASE)),
        "tokenizer": tokenizer,
        "chat-template": TEMPLATE,
        "dtype": "float32",
        "block-size": 8,
        "max-num-batched-tokens": 16,
        "max-num-seqs": 16,
        "cudagraph-capture-sizes": [16],
        "enforce-eager": True,
        "disable-log-stats": True,
        "hf-overrides": {"max_position_embeddings": CONTEXT},
        "kv-cache-memory-bytes": 2**20,
        **more,
    }


def use_mock_cores(monkeypatch: pytest.MonkeyPatch, tokens_per_second: float = 1000) -> None:
    """Let loaders start cores in threads, without weights."""

    def start(loader: EngineLoader[Any]) -> Any:
        make = functools.partial(start_mock, loader._args, tokens_per_second=tokens_per_second)
        return meet(RemoteCore.in_thread(make), loader._args, asks_core=False)

    monkeypatch.setattr(EngineLoader, "_start_core", start)


@contextlib.contextmanager
def several_served(path: Path, models: dict[str, Any], *words: str) -> Iterator[Served]:
    """Serve the models of a file of --models, which is written to `path`, with the flags `words`. There is no `llm`."""
    path.write_text(json.dumps(models), encoding="utf-8")
    args = command_line("--host", "127.0.0.1", "--port", "0", "--models", str(path), *words)
    app = build_app(args)
    listener = bind(app.state.server_args)
    config = uvicorn.Config(
        app, loop="uvloop", http=bounded_protocol(app.state.server_args), log_config=None, lifespan="off"
    )
    server = uvicorn.Server(config)
    loops: list[asyncio.AbstractEventLoop] = []
    is_started = threading.Event()

    async def run() -> None:
        loops.append(asyncio.get_running_loop())
        with contextlib.closing(ForkServer()) as forks:
            registry: ServedModels[Any] = init_models_state(read_models(args), app.state, args, forks)
            watching = asyncio.create_task(registry.watch())
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            while not server.started:
                await asyncio.sleep(0.01)
            is_started.set()
            await serving
            watching.cancel()
            await registry.close()

    thread = threading.Thread(target=asyncio.run, args=(run(),), name="server")
    thread.start()
    try:
        if not is_started.wait(START_SECONDS):
            raise TimeoutError("the server has not started")
        yield Served(listener.getsockname()[1], app, None, loops[0])  # type: ignore[arg-type]
    finally:
        server.should_exit = True
        thread.join(START_SECONDS)
        assert not thread.is_alive()
