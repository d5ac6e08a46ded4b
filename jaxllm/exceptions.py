"""The errors that users see, under vLLM's names; every one caused by what they give is a `VLLMValidationError`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any


class VLLMError(Exception):
    """The base of all errors here."""


class VLLMClientError(VLLMError):
    """The base of errors that what was given has caused: a server answers with 4xx."""


class VLLMServerError(VLLMError):
    """The base of errors of the engine: a server answers with 5xx."""


class VLLMValidationError(VLLMClientError, ValueError):
    """A value that cannot be used: `parameter` names it, `value` is what was given."""

    def __init__(self, message: str, *, parameter: str | None = None, value: Any = None) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.value = value

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), str(self), self.parameter, self.value)


class UnknownParameterError(VLLMValidationError, TypeError):
    """A keyword that nothing here accepts; a TypeError too, as Python raises for unknown keywords."""


class VLLMNotFoundError(VLLMValidationError):
    """A name of something that there is not: a server answers with 404."""


class LoRAAdapterNotFoundError(VLLMNotFoundError):
    """There is no adapter at the path that was given."""

    def __init__(self, lora_name: str, lora_path: str) -> None:
        message = f"Loading lora {lora_name} failed: No adapter found for {lora_path}"
        super().__init__(message, parameter="lora_path", value=lora_path)
        self.message = message
        self._given = lora_name, lora_path

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._given


class ChatTemplateResolutionError(VLLMValidationError):
    """The model has no chat template, or none of the name that was given."""


class VLLMUnprocessableEntityError(VLLMValidationError):
    """Media that a request names cannot be read. Nothing raises it: models here read text alone."""


class EngineDeadError(VLLMServerError, RuntimeError):
    """The engine core has ended, and all requests with it; the message says why. Make a new engine."""


class GenerationError(VLLMServerError, RuntimeError):
    """The base of errors of one request that the engine could not go on with."""

    status_code = HTTPStatus.INTERNAL_SERVER_ERROR


class RetryableRequestError(GenerationError):
    """A request failed that may succeed when it is sent again. Nothing raises it: see EngineBusyError."""

    status_code = HTTPStatus.SERVICE_UNAVAILABLE


class EngineGenerateError(GenerationError):
    """The engine could not go on with a request; or an outcome of its core was lost, and all that ran have ended.

    The engine itself goes on.
    """


class GracefulHTTPError(VLLMError):
    """The base of errors that a server answers with a status of their own."""

    http_status = HTTPStatus.INTERNAL_SERVER_ERROR


class ProfilerAlreadyActiveError(GracefulHTTPError, VLLMValidationError):
    """A profiling session has begun and has not ended."""

    http_status = HTTPStatus.CONFLICT


class EngineBusyError(GracefulHTTPError, RuntimeError):
    """The engine takes no more requests for now; another one, or the same later, may."""

    http_status = HTTPStatus.SERVICE_UNAVAILABLE


class QueueOverflowError(EngineBusyError):
    """So many requests wait or run that another would exceed max_num_queued_reqs."""


class MaxQueuedTokensError(EngineBusyError):
    """So many prompt tokens wait that more would exceed max_num_queued_tokens."""


def _rebuild(kind: type[VLLMValidationError], message: str, parameter: str | None, value: Any) -> VLLMValidationError:
    """Rebuild an error from a pickle; exceptions do not carry keyword arguments by themselves."""
    return kind(message, parameter=parameter, value=value)


def unknown_parameter(
    owner: str, name: str, value: Any, known: Iterable[str], gone: Mapping[str, str]
) -> UnknownParameterError:
    """Make the error for keyword `name` of `owner`: what replaced it (`gone`), or the nearest known name."""
    if name in gone:
        return UnknownParameterError(f"{owner} has no {name!r} any more: {gone[name]}.", parameter=name, value=value)
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return UnknownParameterError(f"{owner} has no argument {name!r}.{hint}", parameter=name, value=value)
