"""Development routes that control the engine, only with JAXLLM_SERVER_DEV_MODE=1 or vLLM's variable."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Body, Request
from starlette.routing import BaseRoute

from jaxllm.engine.front.asleep import PauseMode
from jaxllm.server.operations import weight_routes
from jaxllm.server.operations.named_engine import named_engine

router = APIRouter()


def routes() -> list[BaseRoute]:
    """Return these routes, and those about weights; include_router would hide them from app.routes."""
    return [*router.routes, *weight_routes.router.routes]


@router.get("/server_info", operation_id="show_server_info")
async def show_server_info(request: Request) -> dict[str, Any]:
    """Show the engine's settings."""
    config = named_engine(request).vllm_config
    return {"vllm_config": msgspec.to_builtins(config, enc_hook=str, str_keys=True)}


@router.post("/reset_prefix_cache", operation_id="reset_prefix_cache")
async def reset_prefix_cache(
    request: Request, reset_running_requests: bool = False, reset_external: bool = False
) -> dict[str, bool]:
    """Clear the prefix cache; false if blocks are in use, unless running requests are reset."""
    engine = named_engine(request)
    return {"success": await engine.reset_prefix_cache(reset_running_requests, reset_external)}


@router.post("/reset_mm_cache", operation_id="reset_mm_cache")
async def reset_mm_cache(request: Request) -> None:
    """Forget all processed images and videos."""
    await named_engine(request).reset_mm_cache()


@router.post("/reset_encoder_cache", operation_id="reset_encoder_cache")
async def reset_encoder_cache(request: Request) -> dict[str, bool]:
    """Forget all encoded images and videos; false, and nothing is forgotten, while running requests need some."""
    return {"success": await named_engine(request).reset_encoder_cache()}


@router.post("/sleep", operation_id="sleep")
async def sleep(request: Request, level: int = 1, mode: PauseMode = "abort") -> None:
    """Release the device's weights and KV cache, until /wake_up; running requests are aborted, or finish with mode
    "wait".
    """
    await named_engine(request).sleep(level, mode)


@router.post("/wake_up", operation_id="wake_up")
async def wake_up(request: Request) -> None:
    """Bring back what /sleep has released: the parts that tags name, "weights" and "kv_cache", or both."""
    await named_engine(request).wake_up(request.query_params.getlist("tags") or None)


@router.post("/scale_elastic_ep", operation_id="scale_elastic_ep")
async def scale_elastic_ep(
    request: Request, new_data_parallel_size: int = Body(), drain_timeout: int = Body(300)
) -> dict[str, str]:
    """Change the number of replicas; removed ones drain for at most drain_timeout seconds."""
    await named_engine(request).scale_elastic_ep(new_data_parallel_size, drain_timeout)
    return {"message": f"Scaled to {new_data_parallel_size} data parallel engines"}


@router.get("/is_sleeping", operation_id="is_sleeping")
async def is_sleeping(request: Request) -> dict[str, bool]:
    """Show whether the engine sleeps."""
    return {"is_sleeping": await named_engine(request).is_sleeping()}


@router.post("/pause", operation_id="pause")
async def pause(
    request: Request, mode: PauseMode = "abort", wait_for_inflight_requests: bool = False, clear_cache: bool = True
) -> dict[str, str]:
    """Hold new requests until /resume; running ones are aborted, finish with mode "wait", or are kept with "keep"."""
    await named_engine(request).pause_generation(
        mode=mode, wait_for_inflight_requests=wait_for_inflight_requests, clear_cache=clear_cache
    )
    return {"status": "paused"}


@router.post("/resume", operation_id="resume")
async def resume(request: Request) -> dict[str, str]:
    """Resume taking requests."""
    await named_engine(request).resume_generation()
    return {"status": "resumed"}


@router.get("/is_paused", operation_id="is_paused")
async def is_paused(request: Request) -> dict[str, bool]:
    """Show whether new requests wait."""
    return {"is_paused": await named_engine(request).is_paused()}
