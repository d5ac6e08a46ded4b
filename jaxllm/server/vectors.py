"""Vectors as answers show them: numbers in JSON, or their bytes in base64."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import msgspec

from jaxllm.exceptions import VLLMValidationError
from jaxllm.server.protocol.pooling import VectorFields

_encode = msgspec.json.Encoder().encode


def encoder(request: VectorFields) -> Callable[[Any], Any]:
    """Return what makes the value that a request asks for of an array. Raises VLLMValidationError."""
    if request.encoding_format in (None, "float"):
        for name, default in (("embed_dtype", "float32"), ("endianness", "native")):
            if getattr(request, name) != default:
                message = f"{name} goes with encoding_format='base64': leave it out."
                raise VLLMValidationError(message, parameter=name, value=getattr(request, name))
        return numbers
    order = ">" if request.endianness == "big" else "<"
    kind = order + {"float32": "f4", "float16": "f2"}[request.embed_dtype]
    return lambda array: in_base64(array, kind)


def numbers(array: Any) -> Any:
    """Return an array's numbers as JSON, encoded one by one: a whole answer at once would keep others waiting."""
    return msgspec.Raw(_encode(array.tolist()))


def in_base64(array: Any, kind: str = "<f4") -> str:
    """Return an array's bytes, of NumPy's type `kind`."""
    return base64.b64encode(array.astype(kind).tobytes()).decode()
