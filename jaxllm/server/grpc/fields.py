"""Read gRPC messages' fields as values of JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.struct_pb2 import Struct, Value

from jaxllm.exceptions import VLLMValidationError
from jaxllm.server.grpc.inference_pb2 import TokenIds
from jaxllm.server.http.shape import MAX_LISTS, MAX_VALUES
from jaxllm.server.openai.prompt_fields import MAX_MESSAGES, MAX_TOOLS
from jaxllm.server.pooling.pooling_protocol import MAX_INPUTS

_LENGTHS = {"messages": MAX_MESSAGES, "documents": MAX_MESSAGES, "tools": MAX_TOOLS, "token_ids": MAX_INPUTS}
"""The maximum number of messages in a repeated field."""


def read_fields(data: bytes, kind: type[Message]) -> dict[str, Any]:
    """Return the fields of a message that are set, as in JSON. Raises VLLMValidationError for a malformed message, and
    for values that are too many or that JSON does not have.
    """
    try:
        message = kind.FromString(data)
    except DecodeError as error:
        raise VLLMValidationError(f"The message is not a {kind.DESCRIPTOR.full_name}.") from error
    reader = _Reader()
    return {field.name: reader.read(field, value) for field, value in message.ListFields()}


class _Reader:
    """Reads the fields of one message, and counts the values of objects and lists."""

    def __init__(self) -> None:
        self._num_values = 0

    def read(self, field: FieldDescriptor, value: Any) -> Any:
        """Return a field's value."""
        if field.message_type is None:
            return list(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes) else value
        if field.message_type.GetOptions().map_entry:
            return {str(key): each for key, each in value.items()}
        if isinstance(value, Message):
            return self._message(field.name, value)
        most = _LENGTHS[field.name]
        if len(value) > most:
            message = f"{field.name} must have at most {most} entries, got {len(value)}."
            raise VLLMValidationError(message, parameter=field.name, value=len(value))
        return [self._message(field.name, each) for each in value]

    def _message(self, name: str, value: Message) -> Any:
        match value:
            case TokenIds():
                if len(value.ids) > MAX_VALUES:
                    message = f"{name} must have at most {MAX_VALUES} entries, got {len(value.ids)}."
                    raise VLLMValidationError(message, parameter=name, value=len(value.ids))
                return list(value.ids)
            case Struct():
                return {key: self._json(name, each) for key, each in value.fields.items()}
            case Value():
                return self._json(name, value)
            case _:
                return {inner.name: self.read(inner, each) for inner, each in value.ListFields()}

    def _json(self, name: str, value: Value) -> Any:
        """Return a JSON value of a field, with integers for whole numbers: the message holds all as floats."""
        self._num_values += 1
        if self._num_values > MAX_LISTS:
            raise VLLMValidationError(f"The message's objects have more than {MAX_LISTS} values.", parameter=name)
        match value.WhichOneof("kind"):
            case "struct_value":
                return {key: self._json(name, each) for key, each in value.struct_value.fields.items()}
            case "list_value":
                return [self._json(name, each) for each in value.list_value.values]
            case "number_value":
                number = value.number_value
                if not math.isfinite(number):
                    raise VLLMValidationError(f"{name} is not JSON: it has {number}.", parameter=name)
                return int(number) if number.is_integer() else number
            case "string_value":
                return value.string_value
            case "bool_value":
                return value.bool_value
            case _:
                return None
