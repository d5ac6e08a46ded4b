"""vLLM's routes that load and unload LoRA adapters, only with JAXLLM_ALLOW_RUNTIME_LORA_UPDATING=1 or vLLM's variable.

Their users can make the server read any folder, and the hub.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.routing import Route

from jaxllm.server.http.decoding import decode_request, peek
from jaxllm.server.http.endpoint import Call, ModelEndpoint, Reply
from jaxllm.server.http.errors import RequestFailedError
from jaxllm.server.openai.serving_models import AdapterLoadError, LoRAModule, OpenAIServingModels


class LoadLoRAAdapterRequest(msgspec.Struct, kw_only=True):
    """The body of /v1/load_lora_adapter."""

    lora_name: str
    """The model name for requests."""
    lora_path: str
    """A folder in PEFT's form, or a repository of the hub with the same files."""
    load_inplace: bool = False
    """Reload the adapter of this name if it exists."""
    model: str | None = None
    """The model that it is for, on a server with several."""


LOAD_REFUSED = {"is_3d_lora_weight": "the form of an adapter's weights is found from them; leave it out"}
"""Fields that are refused."""


class UnloadLoRAAdapterRequest(msgspec.Struct, kw_only=True):
    """The body of /v1/unload_lora_adapter."""

    lora_name: str
    lora_int_id: int | None = None
    """It is ignored: names are unique."""


def routes(pick: Callable[[Any], OpenAIServingModels]) -> list[Route]:
    """Return the routes: `pick` returns the names of a model and its adapters."""
    unload = ModelEndpoint(unload_adapter, pick, wakes=True, names=_adapter)
    return [
        Route("/v1/load_lora_adapter", ModelEndpoint(load_adapter, pick, wakes=True), methods=["POST"]),
        Route("/v1/unload_lora_adapter", unload, methods=["POST"]),
    ]


async def _adapter(body: bytes, _headers: Mapping[bytes, bytes], _query: bytes) -> tuple[str, ...]:
    return (peek(body, UnloadLoRAAdapterRequest).lora_name,)


async def load_adapter(models: OpenAIServingModels, call: Call) -> Reply:
    """Load a LoRA adapter for later requests."""
    request = await decode_request(call.body, LoadLoRAAdapterRequest, LOAD_REFUSED)
    module = LoRAModule(name=request.lora_name, path=request.lora_path)
    try:
        await models.add(call.engine_client, module, replaces=request.load_inplace)
    except AdapterLoadError as error:  # 500, as in vLLM
        raise RequestFailedError(HTTPStatus.INTERNAL_SERVER_ERROR, str(error), param=error.parameter) from error
    return _told(f"Success: LoRA adapter '{request.lora_name}' added successfully.")


async def unload_adapter(models: OpenAIServingModels, call: Call) -> Reply:
    """Unload a LoRA adapter; running requests keep it."""
    request = await decode_request(call.body, UnloadLoRAAdapterRequest, {})
    await models.remove(call.engine_client, request.lora_name)
    return _told(f"Success: LoRA adapter '{request.lora_name}' removed successfully.")


def _told(text: str) -> Reply:
    return Reply(text.encode(), content_type=b"text/plain; charset=utf-8")
