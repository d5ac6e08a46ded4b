"""Turn exceptions into answers in OpenAI's form, which reveal nothing about the machine."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import msgspec

from jaxllm.exceptions import (
    EngineBusyError,
    EngineDeadError,
    EngineGenerateError,
    GracefulHTTPError,
    VLLMNotFoundError,
    VLLMUnprocessableEntityError,
    VLLMValidationError,
)

logger = logging.getLogger(__name__)

_MAX_MESSAGE = 2000
"""Characters of an error's message; what a client sent may be quoted in it."""
_MAX_MESSAGE_BYTES = 3500
"""Bytes of the message in JSON, where one character may take six."""
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
"""An object's address in its repr, which errors of chat templates may quote."""
_RETRY_AFTER_SECONDS = 1
_MAX_SHOWN = 20
"""Names of models in a message."""


class ErrorInfo(msgspec.Struct, frozen=True):
    """An error as OpenAI's clients read it."""

    message: str
    type: str
    param: str | None = None
    code: int = HTTPStatus.BAD_REQUEST.value
    """The HTTP status, as in vLLM."""
    retry_after: int | msgspec.UnsetType = msgspec.UNSET
    """The seconds after which another attempt may succeed, if that is known."""


class ErrorResponse(msgspec.Struct, frozen=True):
    """The body of every answer that is an error, and of the last event of a stream that fails."""

    error: ErrorInfo


class RequestFailedError(Exception):
    """A request failed with this HTTP status, such as 404 or 413."""

    def __init__(self, status: HTTPStatus, message: str, *, kind: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param = status, param
        self.kind = kind or _error_type(status)


def unknown_model(name: str, known: Sequence[str] = ()) -> RequestFailedError:
    """Return the error for a request to a model that the server does not have; it names some that are `known`."""
    message = f"The model `{name}` does not exist."
    if known:
        more = f" and {len(known) - _MAX_SHOWN} more" if len(known) > _MAX_SHOWN else ""
        message += f" This server has {', '.join(f'`{each}`' for each in known[:_MAX_SHOWN])}{more}."
    return RequestFailedError(HTTPStatus.NOT_FOUND, message, param="model")


def _error_type(status: HTTPStatus) -> str:
    """Return vLLM's name for the errors of a status: "BadRequestError", "NotFoundError" and so on."""
    words = status.phrase.replace("-", " ").removesuffix(" Error").split()
    return "".join(word.capitalize() for word in words) + "Error"


def error_response(error: BaseException) -> ErrorResponse:
    """Return the error for a client. An unexpected exception is logged, and the client gets a general message."""
    match error:
        case RequestFailedError():
            return make_error(error.status, str(error), param=error.param, kind=error.kind)
        case GracefulHTTPError():
            response = make_error(error.http_status, str(error))
            if not isinstance(error, EngineBusyError) or error.retry_after is None:
                return response
            return ErrorResponse(msgspec.structs.replace(response.error, retry_after=error.retry_after))
        case VLLMNotFoundError():
            return make_error(HTTPStatus.NOT_FOUND, str(error), param=error.parameter)
        case VLLMUnprocessableEntityError():
            return make_error(HTTPStatus.UNPROCESSABLE_ENTITY, str(error), param=error.parameter)
        case VLLMValidationError():
            return make_error(HTTPStatus.BAD_REQUEST, str(error), param=error.parameter)
        case EngineDeadError():
            return make_error(HTTPStatus.INTERNAL_SERVER_ERROR, "The engine has ended.", kind="EngineDeadError")
        case EngineGenerateError():
            return make_error(HTTPStatus.INTERNAL_SERVER_ERROR, "The engine could not go on with this request.")
        case _:
            logger.error("a request has failed", exc_info=error)
            return make_error(HTTPStatus.INTERNAL_SERVER_ERROR, "The server could not answer this request.")


def make_error(
    status: HTTPStatus | int, message: str, *, param: str | None = None, kind: str | None = None
) -> ErrorResponse:
    """Return an error with a status."""
    status = HTTPStatus(status)
    return ErrorResponse(ErrorInfo(_brief(_ADDRESS.sub("", message)), kind or _error_type(status), param, status.value))


def _brief(message: str) -> str:
    """Cut a message that is too long."""
    if len(message) > _MAX_MESSAGE:
        message = message[:_MAX_MESSAGE] + "..."
    if len(msgspec.json.encode(message)) > _MAX_MESSAGE_BYTES:
        message = message[: _MAX_MESSAGE_BYTES // 6 - 3] + "..."
    return message


def error_headers(response: ErrorResponse) -> list[tuple[bytes, bytes]]:
    """Return the headers that tell clients whether to try again."""
    if response.error.code == HTTPStatus.SERVICE_UNAVAILABLE:
        return [(b"retry-after", str(retry_seconds(response)).encode())]
    if response.error.code >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return [(b"x-should-retry", b"false")]
    return []


def retry_seconds(response: ErrorResponse) -> int:
    """Return the seconds after which a client may try again what could not be taken now."""
    seconds = response.error.retry_after
    return _RETRY_AFTER_SECONDS if isinstance(seconds, msgspec.UnsetType) else seconds


def _refuse_fields(values: dict[str, Any], reasons: dict[str, str]) -> None:
    """Raise VLLMValidationError for a field that is not None; `reasons` has the way out by field."""
    for name, reason in reasons.items():
        if values.get(name) is not None:
            raise VLLMValidationError(f"{name} is not supported: {reason}.", parameter=name, value=values[name])
