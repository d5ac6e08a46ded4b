"""Development routes that control the engine, only with JAXLLM_SERVER_DEV_MODE=1 or vLLM's variable."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Body, Request

from jaxllm.engine.front.asleep import PauseMode
from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.exceptions import VLLMValidationError
from jaxllm.server.models.entry import State
from jaxllm.server.models.registry import ServedModels

router = APIRouter()


def _engine(request: Request) -> AsyncLLM:
    """Return the engine of the only model, or of the one that the query's `model` names, which must be loaded."""
    models: ServedModels[Any] = request.app.state.models
    name = request.query_params.get("model")
    if models.only is None and name is None:
        message = "model: this server has several models: name one in the query. /v1/models lists them."
        raise VLLMValidationError(message, parameter="model")
    entry = models.find((name or "",))
    if entry.state is not State.READY:
        message = f"model: the model `{entry.name}` is not loaded. Requests load it."
        raise VLLMValidationError(message, parameter="model", value=name)
    return entry.engine


@router.get("/server_info", operation_id="show_server_info")
async def show_server_info(request: Request) -> dict[str, Any]:
    """Show the engine's settings."""
    config = _engine(request).vllm_config
    return {"vllm_config": msgspec.to_builtins(config, enc_hook=str, str_keys=True)}


@router.post("/reset_prefix_cache", operation_id="reset_prefix_cache")
async def reset_prefix_cache(
    request: Request, reset_running_requests: bool = False, reset_external: bool = False
) -> dict[str, bool]:
    """Clear the prefix cache; false if blocks are in use, unless running requests are reset."""
    engine = _engine(request)
    return {"success": await engine.reset_prefix_cache(reset_running_requests, reset_external)}


@router.post("/reset_mm_cache", operation_id="reset_mm_cache")
async def reset_mm_cache(request: Request) -> None:
    """Forget all processed images and videos."""
    await _engine(request).reset_mm_cache()


@router.post("/reset_encoder_cache", operation_id="reset_encoder_cache")
async def reset_encoder_cache(request: Request) -> dict[str, bool]:
    """Forget all encoded images and videos; false, and nothing is forgotten, while running requests need some."""
    return {"success": await _engine(request).reset_encoder_cache()}


@router.post("/sleep", operation_id="sleep")
async def sleep(request: Request, level: int = 1, mode: PauseMode = "abort") -> None:
    """Release the device's weights and KV cache, until /wake_up; running requests are aborted, or finish with mode
    "wait".
    """
    await _engine(request).sleep(level, mode)


@router.post("/wake_up", operation_id="wake_up")
async def wake_up(request: Request) -> None:
    """Bring back what /sleep has released: the parts that tags name, "weights" and "kv_cache", or both."""
    await _engine(request).wake_up(request.query_params.getlist("tags") or None)


@router.post("/scale_elastic_ep", operation_id="scale_elastic_ep")
async def scale_elastic_ep(
    request: Request, new_data_parallel_size: int = Body(), drain_timeout: int = Body(300)
) -> dict[str, str]:
    """Change the number of replicas; removed ones drain for at most drain_timeout seconds."""
    await _engine(request).scale_elastic_ep(new_data_parallel_size, drain_timeout)
    return {"message": f"Scaled to {new_data_parallel_size} data parallel engines"}


@router.get("/is_sleeping", operation_id="is_sleeping")
async def is_sleeping(request: Request) -> dict[str, bool]:
    """Show whether the engine sleeps."""
    return {"is_sleeping": await _engine(request).is_sleeping()}


@router.post("/pause", operation_id="pause")
async def pause(
    request: Request, mode: PauseMode = "abort", wait_for_inflight_requests: bool = False, clear_cache: bool = True
) -> dict[str, str]:
    """Hold new requests until /resume; running ones are aborted, finish with mode "wait", or are kept with "keep"."""
    await _engine(request).pause_generation(
        mode=mode, wait_for_inflight_requests=wait_for_inflight_requests, clear_cache=clear_cache
    )
    return {"status": "paused"}


@router.post("/resume", operation_id="resume")
async def resume(request: Request) -> dict[str, str]:
    """Resume taking requests."""
    await _engine(request).resume_generation()
    return {"status": "resumed"}


@router.get("/is_paused", operation_id="is_paused")
async def is_paused(request: Request) -> dict[str, bool]:
    """Show whether new requests wait."""
    return {"is_paused": await _engine(request).is_paused()}
