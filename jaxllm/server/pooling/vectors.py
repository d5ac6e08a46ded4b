"""Encode vectors for answers: as JSON numbers, base64, or raw bytes."""

from __future__ import annotations

import base64
import json
import sys
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import msgspec

from jaxllm.exceptions import VLLMValidationError
from jaxllm.server.openai.usage import UsageInfo
from jaxllm.server.pooling.pooling_protocol import VectorFields

_LARGEST_E4M3 = 448.0
_encode = msgspec.json.Encoder().encode


def encoder(request: VectorFields) -> Callable[[Any], Any]:
    """Return the function that encodes an array as the request asks. Raises VLLMValidationError."""
    if request.encoding_format in (None, "float"):
        for name, default in (("embed_dtype", "float32"), ("endianness", "native")):
            if getattr(request, name) != default:
                message = f"{name} goes with encoding_format 'base64', 'bytes' or 'bytes_only': leave it out."
                raise VLLMValidationError(message, parameter=name, value=getattr(request, name))
        return numbers
    if request.is_in_bytes:
        return lambda array: packed(array, request.embed_dtype, request.endianness)
    return lambda array: in_base64(array, request.embed_dtype, request.endianness)


def numbers(array: Any) -> Any:
    """Return an array's numbers as JSON. Arrays are encoded one by one, so that other requests do not wait."""
    return msgspec.Raw(_encode(array.tolist()))


def in_base64(array: Any, dtype: str = "float32", endianness: str = "native") -> str:
    """Return an array's bytes in base64."""
    return base64.b64encode(packed(array, dtype, endianness)).decode()


def packed(array: Any, dtype: str, endianness: str) -> bytes:
    """Return an array's bytes in a type of `embed_dtype`. Too large numbers become its largest, or inf."""
    import ml_dtypes
    import numpy as np

    kinds = {
        "float32": np.float32,
        "float16": np.float16,
        "bfloat16": ml_dtypes.bfloat16,
        "fp8_e4m3": ml_dtypes.float8_e4m3fn,
        "fp8_e5m2": ml_dtypes.float8_e5m2,
    }
    if dtype == "fp8_e4m3":  # this type has no infinity
        array = array.clip(-_LARGEST_E4M3, _LARGEST_E4M3)
    with np.errstate(over="ignore"):
        cast = array.astype(kinds[dtype])
    whole = cast.view(f"u{cast.itemsize}")
    return (whole.byteswap() if endianness != "native" and endianness != sys.byteorder else whole).tobytes()


class VectorBytes(NamedTuple):
    """An answer of raw bytes: the numbers of its vectors, concatenated."""

    body: bytes
    metadata: str | None
    """The layout in JSON for the header `metadata`; None for encoding_format "bytes_only"."""

    @classmethod
    def of(
        cls, request: VectorFields, arrays: Sequence[Any], answer_id: str, model: str, usage: UsageInfo
    ) -> VectorBytes:
        """Return the answer to a request. Raises VLLMValidationError."""
        parts = [encoder(request)(each) for each in arrays]
        if request.encoding_format == "bytes_only":
            return cls(b"".join(parts), None)
        ends = list(accumulate(map(len, parts)))
        items = [
            {
                "index": i,
                "embed_dtype": request.embed_dtype,
                "endianness": request.endianness,
                "start": ends[i] - len(part),
                "end": ends[i],
                "shape": list(array.shape),
            }
            for i, (part, array) in enumerate(zip(parts, arrays, strict=True))
        ]
        counts = {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.total_tokens}
        told = {"id": answer_id, "created": int(time.time()), "model": model, "data": items, "usage": counts}
        return cls(b"".join(parts), json.dumps(told))
