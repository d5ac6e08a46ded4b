"""Development routes that replace the engine's weights, with vLLM's names and answers."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body, Request

from jaxllm.engine.front.new_weights import read_weights
from jaxllm.server.operations.named_engine import named_engine

router = APIRouter()


@router.post("/init_weight_transfer_engine", operation_id="init_weight_transfer_engine")
async def init_weight_transfer_engine(
    request: Request, init_info: Annotated[dict[str, Any] | None, Body(embed=True)] = None
) -> dict[str, str]:
    """Do nothing: weights come from folders. Settings of NCCL and IPC are refused."""
    await named_engine(request).init_weight_transfer_engine({"init_info": init_info or {}})
    return {"message": "Weight transfer initialized"}


@router.post("/start_weight_update", operation_id="start_weight_update")
async def start_weight_update(request: Request) -> dict[str, str]:
    """Begin an update of the weights in several parts."""
    await named_engine(request).start_weight_update()
    return {"message": "Weight update started"}


@router.post("/start_draft_weight_update", operation_id="start_draft_weight_update")
async def start_draft_weight_update(request: Request) -> dict[str, str]:
    """Begin an update of the draft model's weights."""
    await named_engine(request).start_draft_weight_update()
    return {"message": "Draft weight update started"}


@router.post("/update_weights", operation_id="update_weights")
async def update_weights(request: Request, update_info: Annotated[dict[str, Any], Body(embed=True)]) -> dict[str, str]:
    """Read the weights in the folder `weights_path`, which the engine's machine has; no arrays come by HTTP.

    Without /start_weight_update they are put in place at once, which is refused while requests run, unless the engine
    is paused.
    """
    path = read_weights({"update_info": update_info}, takes_arrays=False)
    await named_engine(request).update_weights(path)
    return {"message": "Weights updated"}


@router.post("/finish_weight_update", operation_id="finish_weight_update")
async def finish_weight_update(
    request: Request, weight_version: Annotated[str | int | None, Body(embed=True)] = None
) -> dict[str, str]:
    """Put the new weights in place and set their version; caches are dropped."""
    await named_engine(request).finish_weight_update(weight_version)
    return {"message": "Weight update finished"}


@router.post("/update_weight_version", operation_id="update_weight_version")
async def update_weight_version(
    request: Request, new_version: Annotated[str | int, Body(embed=True)]
) -> dict[str, Any]:
    """Set the version of the weights without new weights."""
    await named_engine(request).update_weight_version(new_version)
    return {"success": True, "new_version": new_version}


@router.get("/weight_info", operation_id="weight_info")
async def weight_info(request: Request) -> dict[str, str | int]:
    """Show the version of the weights, "default" at first."""
    return {"weight_version": await named_engine(request).get_weight_version()}
