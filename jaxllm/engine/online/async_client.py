"""An asynchronous engine for as long as a block of code runs, made from a command line or from engine arguments."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.resolve.async_engine_args import AsyncEngineArgs
from jaxllm.usage.usage_lib import UsageContext


@asynccontextmanager
async def build_async_engine_client(
    args: argparse.Namespace,
    *,
    usage_context: UsageContext = UsageContext.OPENAI_API_SERVER,
    disable_frontend_multiprocessing: bool | None = None,
) -> AsyncIterator[AsyncLLM]:
    """Start the engine that a parsed command line asks for; it ends with the block.

    Without disable_frontend_multiprocessing the command line's flag of that name decides. `usage_context` is what the
    engine is for.
    """
    if disable_frontend_multiprocessing is None:
        disable_frontend_multiprocessing = bool(getattr(args, "disable_frontend_multiprocessing", False))
    async with build_async_engine_client_from_engine_args(
        AsyncEngineArgs.from_cli_args(args),
        usage_context=usage_context,
        disable_frontend_multiprocessing=disable_frontend_multiprocessing,
    ) as engine:
        yield engine


@asynccontextmanager
async def build_async_engine_client_from_engine_args(
    engine_args: AsyncEngineArgs,
    *,
    usage_context: UsageContext = UsageContext.OPENAI_API_SERVER,
    disable_frontend_multiprocessing: bool = False,
) -> AsyncIterator[AsyncLLM]:
    """Start an engine; it ends with the block. The event loop goes on meanwhile."""
    async with await asyncio.to_thread(
        AsyncLLM.from_engine_args,
        engine_args,
        usage_context=usage_context,
        disable_frontend_multiprocessing=disable_frontend_multiprocessing,
    ) as engine:
        yield engine
