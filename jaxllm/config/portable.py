"""Convert engine arguments to JSON's types for another process; functions and classes become names."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from jaxllm.config.kinds import ClassName, DeviceMesh, Json, Kind, Names
from jaxllm.exceptions import VLLMValidationError
from jaxllm.params.checks import shown
from jaxllm.utils.names import name_of

_IN_PROCESS = "or run the engine in this process, as LLM does"


def portable(name: str, kind: Kind, value: Any) -> Any:
    """Return the argument `name` in JSON's types; functions and classes become "module:name".

    Raises VLLMValidationError for a value that has no name in another process.
    """
    match kind:
        case DeviceMesh() if value is not None:
            message = f"{name} is made of this process's devices: give tensor_parallel_size instead, {_IN_PROCESS}."
            raise VLLMValidationError(message, parameter=name, value=value)
        case Names() if value is not None:
            return [_by_name(f"{name}[{i}]", each, name) for i, each in enumerate(value)]
        case ClassName() if value is not None:
            return _by_name(name, value, name)
        case Json():
            return json.dumps(value)  # its text, since not every encoder takes infinite numbers or large integers
        case _:
            return msgspec.to_builtins(value)


def _by_name(label: str, value: Any, parameter: str) -> str:
    if isinstance(value, str):
        return value
    try:
        return name_of(value)
    except ImportError as error:
        message = (
            f"{label}={shown(value)} has no name in another process: {error}. Give the 'module:name' of a function or "
            f"class of an installed module, have a plugin (entry point jaxllm.plugins) bring it, {_IN_PROCESS}."
        )
        raise VLLMValidationError(message, parameter=parameter, value=value) from error
