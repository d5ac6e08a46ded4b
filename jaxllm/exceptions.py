"""The errors that users see; every one caused by what they give is a `VLLMValidationError`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any


class VLLMValidationError(ValueError):
    """A value that cannot be used: `parameter` names it, `value` is what was given."""

    def __init__(self, message: str, *, parameter: str | None = None, value: Any = None) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.value = value

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), str(self), self.parameter, self.value)


class UnknownParameterError(VLLMValidationError, TypeError):
    """A keyword that nothing here accepts; a TypeError too, as Python raises for unknown keywords."""


class EngineDeadError(RuntimeError):
    """The engine core has ended, and all requests with it; the message says why. Make a new engine."""


class EngineGenerateError(RuntimeError):
    """The engine could not go on with a request; or an outcome of its core was lost, and all that ran have ended.

    The engine itself goes on.
    """


class EngineBusyError(RuntimeError):
    """The engine takes no more requests for now; another one, or the same later, may."""

    http_status = HTTPStatus.SERVICE_UNAVAILABLE
    """The status that a server answers with."""


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
