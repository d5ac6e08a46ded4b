"""The errors of media. Their texts quote no library's message, because those may name objects by their addresses."""

from __future__ import annotations

from jaxllm.exceptions import VLLMUnprocessableEntityError, VLLMValidationError


class MediaError(VLLMValidationError):
    """An image or video that is refused, too large or unreadable: a server answers with 400."""


class MediaFetchError(MediaError, VLLMUnprocessableEntityError):
    """The host of a media URL did not deliver: a server answers with 422."""
