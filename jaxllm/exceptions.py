"""The errors that users see, under vLLM's names. Every invalid input raises a `VLLMValidationError`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any


class VLLMError(Exception):
    """The base of all errors of jaxllm."""


class VLLMClientError(VLLMError):
    """The base of errors caused by the user's input: a server answers with 4xx."""


class VLLMServerError(VLLMError):
    """The base of errors of the engine: a server answers with 5xx."""


class VLLMValidationError(VLLMClientError, ValueError):
    """An unusable value: `parameter` names it, `value` is the value itself."""

    def __init__(self, message: str, *, parameter: str | None = None, value: Any = None) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.value = value

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), str(self), self.parameter, self.value)


class UnknownParameterError(VLLMValidationError, TypeError):
    """An unknown keyword. It is a TypeError too, as Python raises for unknown keywords."""


class VLLMNotFoundError(VLLMValidationError):
    """An unknown name: a server answers with 404."""


class LoRAAdapterNotFoundError(VLLMNotFoundError):
    """There is no adapter at the path."""

    def __init__(self, lora_name: str, lora_path: str) -> None:
        message = f"Loading lora {lora_name} failed: No adapter found for {lora_path}"
        super().__init__(message, parameter="lora_path", value=lora_path)
        self.message = message
        self._given = lora_name, lora_path

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._given


class ChatTemplateResolutionError(VLLMValidationError):
    """The model has no chat template, or none of this name."""


class VLLMUnprocessableEntityError(VLLMValidationError):
    """A request's media cannot be fetched: a server answers with 422."""


class EngineDeadError(VLLMServerError, RuntimeError):
    """The engine core has ended, and all requests with it; the message says why. Make a new engine."""


class GenerationError(VLLMServerError, RuntimeError):
    """The base of errors of one request that the engine could not continue."""

    status_code = HTTPStatus.INTERNAL_SERVER_ERROR


class RetryableRequestError(GenerationError):
    """A request failed that may succeed when sent again. Nothing raises it: see EngineBusyError."""

    status_code = HTTPStatus.SERVICE_UNAVAILABLE


class EngineGenerateError(GenerationError):
    """The engine could not continue a request, or a result of its core was lost and all running requests have ended.

    The engine itself continues.
    """


class GracefulHTTPError(VLLMError):
    """The base of errors for which a server has a specific status."""

    http_status = HTTPStatus.INTERNAL_SERVER_ERROR


class ProfilerAlreadyActiveError(GracefulHTTPError, VLLMValidationError):
    """A profiling session is still running."""

    http_status = HTTPStatus.CONFLICT


class ScalingReplacedError(GracefulHTTPError, RuntimeError):
    """While the number of replicas was changed, another call asked for another number."""

    http_status = HTTPStatus.CONFLICT


class EngineBusyError(GracefulHTTPError, RuntimeError):
    """The engine takes no more requests for now; another one, or the same later, may."""

    http_status = HTTPStatus.SERVICE_UNAVAILABLE
    retry_after: int | None = None
    """The seconds after which another attempt may succeed, if that is known."""


class QueueOverflowError(EngineBusyError):
    """One more waiting or running request would exceed max_num_queued_reqs."""


class MaxQueuedTokensError(EngineBusyError):
    """The waiting prompt tokens would exceed max_num_queued_tokens."""


class LateFirstTokenError(EngineBusyError):
    """The first token would probably come later than max_ttft_ms."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message, retry_after)
        self.retry_after = retry_after

    def __str__(self) -> str:
        return str(self.args[0])


def _rebuild(kind: type[VLLMValidationError], message: str, parameter: str | None, value: Any) -> VLLMValidationError:
    """Rebuild an error from a pickle, which does not keep an exception's keyword arguments."""
    return kind(message, parameter=parameter, value=value)


def unknown_parameter(
    owner: str, name: str, value: Any, known: Iterable[str], gone: Mapping[str, str]
) -> UnknownParameterError:
    """Return the error for keyword `name` of `owner`, with its replacement (`gone`) or the nearest known name."""
    if name in gone:
        return UnknownParameterError(f"{owner} has no {name!r} any more: {gone[name]}.", parameter=name, value=value)
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return UnknownParameterError(f"{owner} has no argument {name!r}.{hint}", parameter=name, value=value)
