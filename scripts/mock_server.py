#!/usr/bin/env python3
"""Serve an engine without a model: `jaxllm serve` with the core of lib/mock_core.py.

    scripts/mock_server.py MODEL [--tokens-per-second N] [--replies FILE] [--step-ms P C F T] [FLAGS OF jaxllm serve]

The tokenizer, the limits and the HTTP side are a real server's. In addition GET /steps returns the monotonic times at
which the core ended its last steps, with one front end.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections import deque
from typing import Any

import uvloop
from lib.mock_core import add_step_argument, mock_command, start_mock_process

from jaxllm.config.server_arguments import ServerArgs, with_queue_bound
from jaxllm.engine.online.admission import Admission
from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.resolve.async_engine_args import AsyncEngineArgs
from jaxllm.server.app import build_app
from jaxllm.server.processes.start import run_front_ends
from jaxllm.server.run import bind, bind_grpc, serve_engine
from jaxllm.utils.argparse_utils import FlexibleArgumentParser
from jaxllm.utils.garbage import settle_garbage

KEPT_STEPS = 100_000


class TimedLLM(AsyncLLM):
    """An engine that remembers when its core ended each step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.steps: deque[float] = deque(maxlen=KEPT_STEPS)
        super().__init__(*args, **kwargs)
        metrics, steps = self.front.metrics, self.steps
        on_step = metrics.on_step

        def on_timed_step(engine_index: int, started: float, now: float) -> None:
            steps.append(now)
            on_step(engine_index, started, now)

        metrics.on_step = on_timed_step


async def serve(args: argparse.Namespace) -> None:
    """Serve until told to end."""
    args = with_queue_bound(args)
    engine_args, server_args = AsyncEngineArgs.from_cli_args(args), ServerArgs.from_cli_args(args)
    if (server_args.api_server_count or 1) > 1:
        with bind(server_args) as listener, bind_grpc(server_args) or contextlib.nullcontext() as grpc_listener:
            command = mock_command(args.tokens_per_second, args.replies, args.step_ms)
            await run_front_ends(args, server_args, listener, grpc_listener, command)
        return
    app = build_app(args)
    with (
        contextlib.closing(bind(ServerArgs.from_cli_args(args))) as listener,
        TimedLLM(
            lambda: start_mock_process(
                engine_args, tokens_per_second=args.tokens_per_second, replies=args.replies, step_ms=args.step_ms
            ),
            admission=Admission(engine_args.max_num_queued_reqs, engine_args.max_num_queued_tokens),
        ) as engine,
    ):
        settle_garbage()
        app.add_api_route("/steps", lambda: list(engine.steps))
        await serve_engine(engine, app, listener, args)


def main() -> int:
    """Serve until told to end; returns the exit status."""
    parser = FlexibleArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_tag", metavar="MODEL")
    parser.add_argument("--tokens-per-second", type=float, help="of each stream (default: as fast as can be)")
    parser.add_argument("--replies", help="JSON file of answers to some prompts, as lib/mock_core.py describes it")
    add_step_argument(parser)
    AsyncEngineArgs.add_cli_args(parser)
    ServerArgs.add_cli_args(parser)
    args = parser.parse_args()
    args.model = args.model_tag
    uvloop.run(serve(args))
    return 0


if __name__ == "__main__":
    sys.exit(main())
