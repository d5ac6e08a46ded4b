"""What a request asks of steering: one of the engine's vectors, and its scale."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import msgspec

from jaxllm.exceptions import VLLMValidationError
from jaxllm.params.checks import check_float, shown

STEERING = "steering"
"""The name in `SamplingParams.extra_args`, and the engine's argument."""
MAX_SCALE = 1000.0
_PARAMETER = "extra_args"


class Steered(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The vector that is added to the residual stream of a request's tokens, and its scale."""

    index: int
    """The vector's number among the engine's, from 1."""
    scale: float
    digest: str
    """A hash of the vector, in hexadecimal."""

    @property
    def key(self) -> bytes:
        """Return 40 bytes that tell apart all that steering makes of keys and values."""
        return bytes.fromhex(self.digest) + struct.pack("<d", self.scale)


def read_steered(value: Any, vectors: Mapping[str, str], label: str) -> Steered | None:
    """Return what `extra_args["steering"]` asks for, None for a scale of 0; `label` begins errors.

    `vectors` has the digests of the engine's vectors by name, in their order. Raises VLLMValidationError.
    """
    what = f"{label}: extra_args[{STEERING!r}]"
    if not vectors:
        raise _refusal(f"{what} needs an engine with steering=FILE, a file of vectors", value)
    if not isinstance(value, Mapping) or not value.keys() <= {"name", "scale"} or "name" not in value:
        raise _refusal(f"{what} must be a dict with name, and with scale if it is not 1, got {shown(value)}", value)
    name = value["name"]
    if not isinstance(name, str) or name not in vectors:
        known = ", ".join(map(repr, list(vectors)[:8])) + (", ..." if len(vectors) > 8 else "")
        raise _refusal(f"{what}: there is no vector {shown(name)}, only {known}", name)
    scale = check_float(f"{what}: scale", value.get("scale", 1.0), -MAX_SCALE, MAX_SCALE, parameter=_PARAMETER)
    return None if scale == 0.0 else Steered(list(vectors).index(name) + 1, scale, vectors[name])


def _refusal(message: str, value: object) -> VLLMValidationError:
    return VLLMValidationError(f"{message}.", parameter=_PARAMETER, value=value)
