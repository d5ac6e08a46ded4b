"""Read what users pass as new weights, and as their version."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxllm.exceptions import VLLMValidationError
from jaxllm.params.checks import shown

_TRANSPORTS = "NCCL and IPC carry tensors of torch, and are not supported"


def read_weights(request: Any, *, takes_arrays: bool) -> Any:
    """Return the mapping of arrays in a request, or the path of a folder as a string.

    A request is one of these itself, or has vLLM's `update_info` with "weights" or "weights_path". Raises
    VLLMValidationError for others, and for arrays unless the core takes them.
    """
    weights = request
    if _has_info(request, "update_info"):
        info = _info_of(request, "update_info")
        if not isinstance(info, Mapping) or info.keys() not in ({"weights"}, {"weights_path"}):
            names = sorted(map(str, info)) if isinstance(info, Mapping) else shown(info)
            message = f"update_info must have either 'weights' or 'weights_path', got {names}: {_TRANSPORTS}."
            raise VLLMValidationError(message, parameter="update_info")
        [weights] = info.values()
    if isinstance(weights, str | Path):
        return str(weights)
    if not isinstance(weights, Mapping) or not weights:
        message = "weights must be a mapping of names to arrays, a pytree as get_weights() returns it, or the path of "
        raise VLLMValidationError(f"{message}a folder, got {shown(weights)}.", parameter="weights")
    if not takes_arrays:
        message = "the engine's core is in another process, which arrays do not reach: save them and pass weights_path."
        raise VLLMValidationError(message, parameter="weights")
    return weights


def check_version(version: Any) -> str | int:
    """Return a version of weights. Raises VLLMValidationError unless it is a text or a whole number."""
    if isinstance(version, bool) or not isinstance(version, str | int) or version == "":
        message = f"the version of weights must be a text or a whole number, got {shown(version)}."
        raise VLLMValidationError(message, parameter="new_version", value=version)
    return version


def check_transfer(request: Any) -> None:
    """Raise VLLMValidationError for a request that has settings of a transport: there is none to set up."""
    info = _info_of(request, "init_info") if _has_info(request, "init_info") else request
    if info:
        raise VLLMValidationError(f"init_info must be empty: {_TRANSPORTS}.", parameter="init_info", value=info)


def check_update_mode(mode: Any) -> None:
    """Raise VLLMValidationError for what does not decide about the requests that run during an update."""
    if mode not in (None, "abort", "wait", "keep"):
        message = f"mode must be None, 'abort', 'wait' or 'keep', got {shown(mode)}."
        raise VLLMValidationError(message, parameter="mode", value=mode)


def refuse_replicas(count: int) -> None:
    """Raise VLLMValidationError for several replicas: one that is started again would have the old weights."""
    if count > 1:
        message = "the weights of replicas are not replaced: one that is started again would have the old ones."
        raise VLLMValidationError(message, parameter="data_parallel_size", value=count)


def _has_info(request: Any, name: str) -> bool:
    return name in request if isinstance(request, Mapping) else hasattr(request, name)


def _info_of(request: Any, name: str) -> Any:
    return request[name] if isinstance(request, Mapping) else getattr(request, name)
