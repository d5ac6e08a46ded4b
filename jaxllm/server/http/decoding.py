"""Decode a request's body to a typed request, or raise an error that names the field."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import msgspec

from jaxllm.exceptions import VLLMValidationError
from jaxllm.server.http.log_once import LogOnce
from jaxllm.server.http.shape import check_shape

HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "watermarking": (False,),
    "return_weight_versions": (False,),
    "return_token_offsets": (False,),
    "routed_experts_prompt_start": (0,),
    "enable_response_messages": (False,),
    "early_stopping": (False,),
    "logits_processors": ([],),
    "suffix": ("",),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "n": (1,),
    "include_stop_str_in_output": (False,),
    "chunking_strategy": ("auto",),
    "hotwords": ("",),
    "prompt_embeds": ([],),
    "kv_transfer_params": ({},),
    "ec_transfer_params": ({},),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    "mm_payload": ("tensors", "none"),
    "return_mm_kwargs": (False, True),
    "mcp_servers": ([],),
    "is_3d_lora_weight": (False,),
    "_debug_render_only": (False,),
}
"""Values with which a refused field is accepted, because they ask for nothing."""
LONG_BODY = 1 << 16
"""Bodies of more bytes are decoded in a thread, so that other requests do not wait."""
_PATH = re.compile(r" - at `\$\.?([^`]*)`$")
_SURROGATES = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<half>\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\.",
    re.DOTALL,
)
"""An escape in JSON: a surrogate pair, half of one, or another escape."""
_NULL = msgspec.Raw(b"null")
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def decode[T: msgspec.Struct](body: bytes, kind: type[T], refused: Mapping[str, str]) -> T:
    """Return the request in a body. Raises VLLMValidationError for a body that is not a JSON object, a field of the
    wrong type, and a field in `refused` (by name, with the reason), unless its value is null or asks for nothing.

    As in vLLM, unknown fields are ignored, since clients add some; each is logged once. A null field counts as left
    out. Types are converted: numeric strings and integral floats to numbers, "true", "false", 0 and 1 to booleans, and
    the string "null" to null.
    """
    check_shape(body)
    with _refused(body):
        fields = _fields.decode(body)
        if nulls := {name for name, value in fields.items() if value == _NULL} & _optional(kind):
            body = msgspec.json.encode({name: value for name, value in fields.items() if name not in nulls})
        request = _decoder(kind).decode(body)
    unknown = fields.keys() - _names(kind)
    for name in unknown:
        if name in refused and not _asks_for_nothing(name, fields[name]):
            raise VLLMValidationError(f"{name} is not supported: {refused[name]}.", parameter=name)
    if unknown := unknown - refused.keys():
        _UNKNOWN.note(unknown)
    return request


def field_names(body: bytes) -> frozenset[str]:
    """Return the names of the fields of a body that are not null. Raises VLLMValidationError for a body that is not a
    JSON object.
    """
    check_shape(body)
    with _refused(body):
        return frozenset(name for name, value in _fields.decode(body).items() if value != _NULL)


def peek[T: msgspec.Struct](body: bytes, kind: type[T]) -> T:
    """Decode the fields of `kind` alone; others may be anything. Raises VLLMValidationError."""
    check_shape(body)
    with _refused(body):
        return _decoder(kind).decode(body)


@contextlib.contextmanager
def _refused(body: bytes) -> Iterator[None]:
    """Raise VLLMValidationError in place of the decoder's errors."""
    try:
        yield
    except msgspec.ValidationError as error:
        raise _refusal(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise VLLMValidationError(_not_json(body, error), parameter=None) from None


def _asks_for_nothing(name: str, value: msgspec.Raw) -> bool:
    harmless = HARMLESS.get(name, ())
    if value == _NULL or not harmless:
        return value == _NULL
    asked = msgspec.json.decode(value)
    texts = [msgspec.json.encode(each).decode() for each in harmless]
    return asked in harmless or (isinstance(asked, str) and asked.lower() in texts)  # forms have texts alone


async def decode_request[T: msgspec.Struct](body: bytes, kind: type[T], refused: Mapping[str, str]) -> T:
    """Decode as `decode` does, a long body in a thread."""
    if len(body) > LONG_BODY:
        return await asyncio.to_thread(decode, body, kind, refused)
    return decode(body, kind, refused)


def _not_json(body: bytes, error: Exception) -> str:
    """Return why a body is not JSON. Clients that cut a text within an emoji send half a surrogate pair."""
    half = next((each for each in _SURROGATES.finditer(body) if each["half"]), None)
    if half is None:
        return f"The body is not JSON: {error}."
    escape, start = half["half"].decode(), half.start("half")
    return (
        f"The body is not valid JSON: {escape} at byte {start} is half of a surrogate pair without its other half, as "
        "where a text was cut within an emoji. Cut texts between characters, or replace the half by \\ufffd."
    )


_UNKNOWN = LogOnce("requests have fields that have no effect here: %s")


def _refusal(message: str) -> VLLMValidationError:
    """Return the error for msgspec's message, which ends in the path of the value."""
    path = _PATH.search(message)
    if path is None or not path[1]:
        return VLLMValidationError(f"The body must be a JSON object with the fields of a request: {message}.")
    parameter = re.split(r"[.\[]", path[1], maxsplit=1)[0]
    return VLLMValidationError(f"{path[1]}: {message[: path.start()]}.", parameter=parameter)


@lru_cache(maxsize=64)  # a route has one kind
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind, strict=False)


@lru_cache(maxsize=64)  # a route has one kind
def _names(kind: Any) -> frozenset[str]:
    return frozenset(field.encode_name for field in msgspec.structs.fields(kind))


@lru_cache(maxsize=64)  # a route has one kind
def _optional(kind: Any) -> frozenset[str]:
    return frozenset(field.encode_name for field in msgspec.structs.fields(kind) if not field.required)
